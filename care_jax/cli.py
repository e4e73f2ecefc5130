"""The installed program, from any folder: `care-jax train --config=qwen25vl_7b --workdir=runs/7b`.

Each command runs a module with its arguments, as `python -m` does: modules of the current folder,
such as one with a reward function, can be imported. A configuration or an experiment is a path, or
the name of an installed one. Commands that read a run default to its own.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import pathlib
import runpy
import sys
import types
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """A row of `care-jax --help`."""

    module: str
    summary: str
    config: str = ""  # the default, also in runs/; all but train prefer the workdir's config.json
    stage: str = ""  # the one stage that it runs


COMMANDS = {
    "train": Command("care_jax.main", "run the stages of a configuration; resume them", "tiny"),
    "evaluate": Command("care_jax.main", "evaluate the last checkpoint", "tiny", "evaluate"),
    "export": Command("care_jax.main", "write it as a Hugging Face release", "tiny", "export"),
    "aot": Command("care_jax.aot", "say whether a run fits, and its least time, without a device"),
    "prepare": Command("care_jax.commands.prepare", "deduplicate data sets into shards"),
    "report": Command("care_jax.commands.report", "draw one page of one or more runs"),
    "sweep": Command("experiments.sweep", "run the arms of an experiment with several seeds"),
    "probe": Command("care_jax.commands.probe", "measure what reflection can repair", "repair"),
    "gradients": Command("care_jax.commands.gradients", "compare objectives' gradients", "repair"),
    "repairs": Command("care_jax.commands.repairs", "write repairs as SFT rows", "repair"),
    "smollm": Command("care_jax.commands.smollm", "make a release from SmolLM2's decoder"),
}
_FOLDERS = {"--config": "configs", "--experiment": "experiments"}  # where names are looked up
_PACKAGE = pathlib.Path(__file__).parent
_IS_INSTALLED = (_PACKAGE / "configs").is_dir()  # inside the package, see setup.py
_ROOT = _PACKAGE if _IS_INSTALLED else _PACKAGE.parent


def main() -> None:
    """Runs a command; exits with status 2 if it is unknown, 1 if a name is."""
    command, *given = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help", "help"):
        print(usage())
        return
    if command == "--version":
        print(f"care-jax {importlib.metadata.version('care_jax')}")
        return
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS)
        advice = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(COMMANDS)}"
        print(f"error: no command {command!r}; {advice}", file=sys.stderr)
        sys.exit(2)
    try:
        arguments = resolved(command, given)
    except ValueError as error:
        sys.exit(f"error: {error}")
    sys.path.insert(0, os.getcwd())
    module = COMMANDS[command].module
    if _IS_INSTALLED:
        module = module if module.startswith("care_jax.") else f"care_jax.{module}"
        _name_configs()
    else:  # files of the checkout import `configs`
        sys.path.insert(0, str(_ROOT))
        folders = filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    sys.argv = [f"care-jax {command}", *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:  # while modules are imported, or in a command that does not expect it
        print("stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)


def usage() -> str:
    """The commands, configurations and experiments, with a line each."""
    commands = {name: command.summary for name, command in COMMANDS.items()}
    return "\n".join(
        [
            "usage: care-jax COMMAND [--config=NAME or PATH] [--workdir=FOLDER] [flags]",
            "",
            *_table("commands (care-jax COMMAND --help lists its flags):", commands),
            "",
            *_table("configurations:", {name: _first_line(name) for name in names("configs")}),
            "",
            f"experiments (of sweep): {', '.join(names('experiments'))}",
        ]
    )


def resolved(command: str, given: Sequence[str]) -> list[str]:
    """The arguments, with names of configurations and experiments replaced by paths.

    Raises:
        ValueError: there is no file of that name, or a flag contradicts the command.
    """
    arguments, before = [], ""
    for argument in given:
        name, equals, value = argument.partition("=")
        if before in _FOLDERS:
            argument = path_of(_FOLDERS[before], argument)
        elif equals and name in _FOLDERS:
            argument = f"{name}={path_of(_FOLDERS[name], value)}"
        arguments.append(argument)
        before = argument
    flags = {argument.partition("=")[0] for argument in arguments}
    _, _, config, stage = COMMANDS[command]
    if stage and "--config.stages" in flags:
        raise ValueError(
            f"care-jax {command} runs the stage {stage!r} alone; leave --config.stages out, or use "
            "care-jax train"
        )
    if config and "--config" not in flags:
        of_run = _config_of_run(arguments, f"runs/{config}") if command != "train" else None
        asks_for_help = any(flag.startswith(("-h", "--help")) for flag in flags)
        if stage and not of_run and not asks_for_help:
            raise ValueError(
                f"care-jax {command} needs --workdir of a run, which has a config.json, or --config"
            )
        arguments.insert(0, f"--config={of_run or path_of('configs', config)}")
    return arguments + [f"--config.stages=('{stage}',)"] * bool(stage)


def _config_of_run(arguments: Sequence[str], default: str) -> pathlib.Path | None:
    """The config.json of the run in --workdir, or in the folder `default`; None without one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--workdir", type=pathlib.Path, default=default)
    path = parser.parse_known_args(arguments)[0].workdir.expanduser() / "config.json"
    return path if path.is_file() else None


def path_of(folder: str, name: str) -> str:
    """The path of an installed file; paths are unchanged. `name` may end with ":argument".

    Raises:
        ValueError: nothing of that name is installed.
    """
    stem, colon, argument = name.partition(":")
    if "/" in name or stem.endswith((".py", ".json")):
        return name
    if stem not in names(folder):
        raise ValueError(
            f"no file {stem!r} in {folder}; give a path that ends with .py, or one of "
            f"{', '.join(names(folder))}"
        )
    return f"{_ROOT / folder / stem}.py{colon}{argument}"


def names(folder: str) -> list[str]:
    """The names of the files in `configs` or `experiments` that define a configuration."""
    files = (_ROOT / folder).glob("[!_]*.py")
    return sorted(
        path.stem for path in files if "def get_config(" in path.read_text(encoding="utf-8")
    )


def _table(title: str, rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows))
    return [title, *(f"  {name:<{width}}  {text}" for name, text in rows.items())]


def _first_line(config: str) -> str:
    text = (
        ast.get_docstring(
            ast.parse((_ROOT / "configs" / f"{config}.py").read_text(encoding="utf-8"))
        )
        or ""
    )
    return text.partition("\n")[0]


def _name_configs() -> None:
    """Lets a file from the checkout, which imports `configs`, run with the wheel.

    A folder `configs` of the user's may have further files; a package of that name is left alone.
    """
    found = importlib.util.find_spec("configs")
    if found is None or found.origin is None:
        module = types.ModuleType("configs")
        theirs = found.submodule_search_locations if found else None
        module.__path__ = [*(theirs or ()), f"{_ROOT}/configs"]
        sys.modules["configs"] = module


if __name__ == "__main__":
    main()
