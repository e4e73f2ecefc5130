"""`care-jax`: names become paths, every command parses, wrong words are told with the nearest."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from care_jax import cli, main
from care_jax.config import command_line

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def called(monkeypatch, capsys):
    """Status, output and errors of `care-jax` with arguments that run no command."""

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["care-jax", *arguments])
        monkeypatch.setattr(cli.runpy, "run_module", None)
        try:
            cli.main()
            status = 0
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()

    return called


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_alone_it_lists_its_commands_and_configurations_with_a_line_each(called, arguments):
    status, out, _ = called(*arguments)
    assert status == 0
    for name in cli.COMMANDS:
        assert re.search(rf"^  {name} +\S.{{10,}}$", out, re.MULTILINE), name
    assert re.search(r"^  qwen25vl_7b +Qwen2.5-VL-7B-Instruct: ", out, re.MULTILINE)
    assert "rescue" in out and not re.search(r"^  arms ", out, re.MULTILINE)


def test_its_version_is_that_of_the_package(called):
    status, out, _ = called("--version")
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert (status, out) == (0, f"care-jax {version[1]}\n")


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("trian", "did you mean 'train'?"),
        ("eval", "did you mean 'evaluate'?"),
        ("--config=tiny", "choose one of train, evaluate"),
    ],
)
def test_an_unknown_command_is_told_with_the_nearest(called, word, advice):
    status, _, error = called(word)
    assert status == 2 and error.startswith(f"error: no command {word!r}; {advice}")


def test_names_become_paths_of_what_is_installed():
    resolved = cli.resolved("train", ["--config=qwen25vl_7b", "--workdir=runs/x"])
    assert resolved == [f"--config={ROOT}/configs/qwen25vl_7b.py", "--workdir=runs/x"]
    assert (
        cli.resolved("aot", ["--config", "tiny:qwen3_vl"])[1] == f"{ROOT}/configs/tiny.py:qwen3_vl"
    )
    assert cli.resolved("evaluate", ["--help"])[0] == f"--config={ROOT}/configs/tiny.py"
    assert cli.resolved("probe", [])[0] == f"--config={ROOT}/configs/repair.py"
    assert cli.resolved("aot", ["--topology=v5e:2x2"]) == ["--topology=v5e:2x2"]
    assert cli.resolved("sweep", ["--experiment=rescue"]) == [
        f"--experiment={ROOT}/experiments/rescue.py"
    ]
    for path in ("--config=my/own.py", "--config=own.py:small", "--config=9:00/own.json"):
        assert cli.resolved("train", [path]) == [path]
    with pytest.raises(ValueError, match=r"no file 'qwen' in configs; .* one of .*qwen25vl_7b"):
        cli.resolved("train", ["--config=qwen"])


def test_a_command_that_reads_a_run_takes_its_configuration(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for command in ("evaluate", "export", "probe", "gradients", "repairs"):
        for workdir in ([f"--workdir={tmp_path}"], ["--workdir", str(tmp_path)]):
            assert cli.resolved(command, workdir)[0] == f"--config={tmp_path}/config.json"
    of_tiny = f"--config={ROOT}/configs/tiny.py"
    assert cli.resolved("export", ["--config=tiny", f"--workdir={tmp_path}"])[0] == of_tiny
    assert cli.resolved("export", [f"--workdir={tmp_path}/none", "--help"])[0] == of_tiny
    with pytest.raises(ValueError, match="export needs --workdir of a run, which has a config"):
        cli.resolved("export", [f"--workdir={tmp_path}/none"])  # would export random weights
    assert cli.resolved("train", [f"--workdir={tmp_path}"])[0] == of_tiny


def test_a_command_without_a_workdir_takes_the_configuration_of_its_own(tmp_path, monkeypatch):
    """The `config.json` of the current folder may be a release's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="evaluate needs --workdir of a run"):
        cli.resolved("evaluate", [])
    for command, workdir in (("evaluate", "runs/tiny"), ("probe", "runs/repair")):
        (tmp_path / workdir).mkdir(parents=True)
        (tmp_path / workdir / "config.json").write_text("{}")
        assert cli.resolved(command, [])[0] == f"--config={workdir}/config.json"


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_a_command_of_one_stage_parses_to_that_stage(monkeypatch, command):
    given = ["--config.seed=7", "--config=tiny", "--workdir=runs/x"]
    monkeypatch.setattr(sys, "argv", ["care-jax", *cli.resolved(command, given)])
    with flagsaver.flagsaver():
        command_line.parse(sys.argv, main.define_flags())
        assert flags.FLAGS.config.stages == (command,) and flags.FLAGS.config.seed == 7
    with pytest.raises(ValueError, match=f"runs the stage '{command}' alone; leave"):
        cli.resolved(command, ["--config.stages=('rl',)"])


def test_the_checkout_is_a_program_for_other_folders_too(tmp_path):
    """An editable install: files of configs/ import `configs`, which only the checkout has."""
    root = repr(str(ROOT))
    code = f"import sys; sys.path.insert(0, {root}); from care_jax import cli; "
    code += f"sys.path.remove({root}); cli.main()"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-P", "-c", code, "aot", "--config=tiny", "--topology=abacus:1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert result.returncode == 2 and "--topology must be one of" in result.stderr, result.stderr


def test_help_lists_the_flags_that_two_commands_share():
    """absl lists the flags of the module that defines them alone."""
    result = subprocess.run(
        [sys.executable, "-m", "care_jax.cli", "repairs", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    for flag in ("config", "workdir", "stage", "questions", "out"):
        assert f"--{flag}: " in result.stdout, flag


def test_the_configurations_have_the_name_that_they_have_in_the_wheel():
    from care_jax.configs import tiny  # what the docs and configurations of users import
    from configs import tiny as of_checkout

    assert tiny is of_checkout


def test_a_module_of_the_current_folder_can_be_imported(monkeypatch, tmp_path):
    """As `python -m` allows; `my_rewards:function` is one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/bin", *sys.path])
    monkeypatch.setattr(sys, "argv", ["care-jax", "smollm"])
    monkeypatch.setenv("PYTHONPATH", "")
    seen = []
    monkeypatch.setattr(cli.runpy, "run_module", lambda *_, **__: seen.extend(sys.path))
    cli.main()
    assert str(tmp_path) in seen[:2]


def test_ctrl_c_is_one_line_in_every_command(monkeypatch, capsys):
    """Also while modules are still being imported."""

    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.runpy, "run_module", stopped)
    monkeypatch.setattr(cli.sys, "argv", ["care-jax", "report", "runs/a"])
    monkeypatch.setattr(cli.sys, "path", [*cli.sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C\n"
