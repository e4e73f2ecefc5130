"""The wheel, installed apart from the checkout: a program that runs from any folder."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from care_jax import cli

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = "care_jax", "models", "configs", "experiments", "pyproject.toml", "setup.py", "README.md"


def test_names_become_paths_of_what_is_installed():
    flags = cli.resolved("train", ["--config=qwen25vl_7b", "--workdir=runs/x"])
    assert flags == [f"--config={ROOT}/configs/qwen25vl_7b.py", "--workdir=runs/x"]
    assert (
        cli.resolved("aot", ["--config", "tiny:qwen3_vl"])[1] == f"{ROOT}/configs/tiny.py:qwen3_vl"
    )
    assert cli.resolved("evaluate", ["--dry_run"])[0] == f"--config={ROOT}/configs/tiny.py"
    assert cli.resolved("aot", ["--topology=v5e:2x2"]) == ["--topology=v5e:2x2"]
    assert cli.resolved("sweep", ["--experiment=rescue"]) == [
        f"--experiment={ROOT}/experiments/rescue.py"
    ]
    for path in ("--config=my/own.py", "--config=own.py:small"):
        assert cli.resolved("train", [path]) == [path]
    with pytest.raises(ValueError, match=r"no file 'qwen' in configs; .* one of .*qwen25vl_7b"):
        cli.resolved("train", ["--config=qwen"])


def test_the_checkout_is_a_program_for_other_folders_too(tmp_path):
    """An editable install: files of configs/ import `configs`, which only the checkout has."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'care_jax')!r}); import cli; cli.main()"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-P", "-c", code, "aot", "--config=tiny", "--topology=abacus:1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert result.returncode == 2 and "--topology must be one of" in result.stderr, result.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the wheel alone, beside a `models` of somebody else's."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, source / name)
    pip = sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"
    build = "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source
    subprocess.run([*pip, *build], check=True)
    (wheel,) = folder.glob("*.whl")
    install = "install", "--no-deps", "--target", folder / "site", wheel
    subprocess.run([*pip, *install], check=True)
    (folder / "theirs" / "models").mkdir(parents=True)
    (folder / "theirs" / "models" / "__init__.py").write_text("raise ImportError('theirs')\n")
    for name in ("configs", "experiments"):
        (folder / "theirs" / f"{name}.py").write_text("raise ImportError('theirs')\n")
    return folder, wheel


@pytest.mark.exhaustive
def test_an_empty_environment_has_the_program_from_its_wheel(installed, tmp_path):
    """With the versions that `make` uses for this Python."""
    _, wheel = installed
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    newest = "-newest" * (sys.version_info >= (3, 12))
    pip = tmp_path / "env" / "bin" / "pip", "--quiet", "--disable-pip-version-check"
    constraint = "--constraint", ROOT / f"constraints{newest}.txt"
    subprocess.run([*pip, "install", *constraint, wheel], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [tmp_path / "env" / "bin" / "care-jax", "train", "--config=tiny", "--dry_run"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment | {"JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "## Configuration" in result.stdout and "## Memory of a device" in result.stdout


def run(folder, *command):
    return subprocess.run(
        [folder / "site" / "bin" / "care-jax", *command],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": f"{folder / 'theirs'}:{folder / 'site'}", "JAX_PLATFORMS": "cpu"},
    )


@pytest.mark.exhaustive
def test_the_wheel_has_one_package_with_everything_in_it(installed):
    _, wheel = installed
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"care_jax"}
    for name in ("models/vision.py", "configs/tiny.py", "experiments/rescue.py", "report/page.css"):
        assert f"care_jax/{name}" in names


@pytest.mark.exhaustive
def test_it_runs_beside_other_packages_of_these_names(installed):
    folder, _ = installed
    small = ("--config.sft.num_steps=2", "--config.sft.warmup_steps=0", "--config.stages=('sft',)")
    result = run(folder, "train", "--config=tiny", "--workdir=w", *small)
    assert (folder / "w" / "metrics.jsonl").exists(), result.stderr[-2000:]
    assert (folder / "w" / "report.html").exists()  # has files of the package
    result = run(folder, "sweep", "--help")
    assert result.returncode == 0 and "--experiment" in result.stdout
    result = run(folder, "evaluate", "--config=nothing")
    assert result.returncode == 1 and "error: no file 'nothing' in configs" in result.stderr
    result = run(folder, "fly")
    assert result.returncode == 2 and "error: no command 'fly'" in result.stderr
