"""The wheel, installed apart from the checkout: a program that runs from any folder."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile

import pytest

from care_jax import cli

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = "care_jax", "models", "configs", "experiments", "pyproject.toml", "setup.py", "README.md"


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
@pytest.mark.smoke
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


def run(folder, *command, path="theirs"):
    """Runs `care-jax` of the wheel in `folder`; `path` is further folders of PYTHONPATH."""
    return subprocess.run(
        [sys.executable, "-P", folder / "site" / "bin" / "care-jax", *command],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{path}:{folder / 'site'}", "JAX_PLATFORMS": "cpu"},
    )


@pytest.mark.exhaustive
@pytest.mark.smoke
def test_the_wheel_has_one_package_with_everything_in_it(installed):
    _, wheel = installed
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"care_jax"}
    for name in ("models/vision.py", "configs/tiny.py", "experiments/rescue.py", "report/page.css"):
        assert f"care_jax/{name}" in names
    assert "care_jax/configs.py" not in names


REWARD = """import zlib
def by_bytes(question, responses, example):
    return [{"acc": float(zlib.crc32(text.encode()) % 3 == 0)} for text in responses]
"""
DATA = """from care_jax.configs import common, tiny
def get_config():
    config = tiny.get_config()
    config.data.prepare.sources = (common.source("jsonl", path="rows.jsonl"),)
    return config
"""
SIZES = (
    *("--config.sft.num_steps=1", "--config.sft.warmup_steps=0", "--config.sft.batch_size=8"),
    *("--config.rl.num_steps=1", "--config.rl.warmup_steps=0", "--config.rl.prompts_per_step=8"),
    *("--config.rl.prompts_per_update=8", "--config.rl.decode_prompts=8"),
    *("--config.data.test.num_examples=8", "--config.evaluate.batch_size=8"),
)
RUN = ("--config=mine.py", "--workdir=w", "--config.verifier.reward=my_rewards:by_bytes", *SIZES)
# Arguments of every command, in the order in which each finds what the former ones left; a file
# that it writes, and what it says.
TO_THE_END = {
    "train": ([*RUN, "--config.stages=('sft','rl')"], "w/checkpoints/rl/1", "rl 0/1 "),
    "evaluate": (["--workdir=w"], "w/samples_rl.jsonl", "accuracy after rl: "),
    "export": (["--workdir=w"], "w/export/model.safetensors", "exported step 1 of rl to w/export"),
    "probe": ([*RUN, "--questions=8"], "w/probe_rl.csv", "wrote w/probe_rl.csv"),
    "gradients": (
        *(["--workdir=w", "--questions=24"], "w/gradients_rl.csv", "wrote w/gradients_rl.csv"),
    ),
    "report": (["w", "--out=page.html"], "page.html", "page.html"),
    "repairs": ([*RUN, "--questions=8", "--out=rows"], "rows/manifest.json", "rows to rows"),
    "prepare": (["--config=data.py", "--out=shards"], "shards/manifest.json", "2 of 2 rows kept"),
    "aot": (
        *(["--config=tiny", "--topology=v5e:2x2", "--config.stages=sft"], "", "It fits, with "),
    ),
    "sweep": (
        ["--experiment=rescue", "--arms=full", "--seeds=1", "--workdir=sweeps", *SIZES],
        *("sweeps/rescue/table.md", "| full "),
    ),
    "smollm": (["--gguf=small.gguf", "--out=small"], "small/model.safetensors", "small: "),
}
SMOKE_COMMANDS = "train", "evaluate", "export"


@pytest.fixture(scope="module")
def folder(installed):
    """The wheel, and what a user has beside it."""
    folder, _ = installed
    (folder / "my_rewards.py").write_text(REWARD)
    (folder / "data.py").write_text(DATA)
    (folder / "rows.jsonl").write_text(
        "".join(f'{{"question": "{i} and two?", "answer": "{i + 2}"}}\n' for i in range(2))
    )
    shutil.copy(folder / "site" / "care_jax" / "configs" / "repair.py", folder / "mine.py")
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(name, marks=[pytest.mark.smoke] * (name in SMOKE_COMMANDS))
        for name in cli.COMMANDS
    ],
)
def test_a_command_runs_to_its_end(folder, command):
    """Each test needs those before it: the run of `train` is evaluated, exported and probed."""
    arguments, written, said = TO_THE_END[command]
    path = "theirs"
    if command == "aot":
        path = pathlib.Path(sys.prefix, "libtpu")
        if not path.is_dir():
            pytest.skip(f"needs libtpu in {path}")
    if command == "smollm":
        smollm_test = imported(ROOT / "tests" / "care_jax" / "commands" / "smollm_test.py")
        smollm_test.write_gguf(folder / "small.gguf", smollm_test.llama(smollm_test.VOCABULARY))
    result = run(folder, command, *arguments, path=path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert said in result.stdout + result.stderr
    assert (folder / written).exists()


def imported(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", ["mine.py", "configs/mine.py"])
def test_a_configuration_copied_from_the_checkout_runs(folder, tmp_path, place):
    """It imports `configs`, and may lie in a folder of that name."""
    for name in ("site", "my_rewards.py"):
        (tmp_path / name).symlink_to(folder / name)
    (tmp_path / place).parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / "configs" / "repair.py", tmp_path / place)
    assert "from configs import" in (tmp_path / place).read_text()
    result = run(tmp_path, "train", *RUN, f"--config={place}", "--dry_run", path="")
    assert result.returncode == 0 and "## Configuration" in result.stdout, result.stderr[-2000:]


@pytest.mark.exhaustive
def test_the_snippet_of_the_docs_runs_in_any_folder(folder, tmp_path):
    text = (ROOT / "docs" / "rewards.md").read_text().partition("## From Python")[2]
    code = textwrap.dedent(re.search(r"(?:^ {4}.*\n\n?)+", text, re.MULTILINE)[0])
    assert "care_jax.train_on(config" in code
    sizes = [flag.removeprefix("--config.").replace("=", " = ") for flag in SIZES]
    code = code.replace("rows = [", "".join(f"config.{size}\n" for size in sizes) + "rows = [", 1)
    (tmp_path / "snippet.py").write_text(code)
    result = subprocess.run(
        [sys.executable, "snippet.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(folder / "site"), "JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "runs/notebook/report.html" in result.stdout
    assert (tmp_path / "runs" / "notebook" / "report.html").exists()


@pytest.mark.exhaustive
def test_a_wrong_name_ends_with_a_line(folder):
    result = run(folder, "evaluate", "--config=nothing")
    assert result.returncode == 1 and "error: no file 'nothing' in configs" in result.stderr
    result = run(folder, "fly")
    assert result.returncode == 2 and "error: no command 'fly'" in result.stderr
