"""The installed program, from any folder: `care-jax train --config=qwen25vl_7b --workdir=runs/7b`.

Each command runs a module with its flags. A configuration or an experiment is a path, or the name
of an installed one.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import sys
from collections.abc import Sequence

# The module of each command, and flags that precede the user's.
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "train": ("care_jax.main", ()),
    "evaluate": ("care_jax.main", ("--config.stages=('evaluate',)",)),
    "export": ("care_jax.main", ("--config.stages=('export',)",)),
    "aot": ("care_jax.aot", ()),
    "prepare": ("care_jax.commands.prepare", ()),
    "report": ("care_jax.commands.report", ()),
    "sweep": ("experiments.sweep", ()),
    "probe": ("care_jax.commands.probe", ()),
    "repairs": ("care_jax.commands.repairs", ()),
    "smollm": ("care_jax.commands.smollm", ()),
}
_FOLDERS = {"--config": "configs", "--experiment": "experiments"}  # where names are looked up
_PACKAGE = pathlib.Path(__file__).parent
_IS_INSTALLED = (_PACKAGE / "configs").is_dir()  # inside the package, see setup.py
_ROOT = _PACKAGE if _IS_INSTALLED else _PACKAGE.parent
_DEFAULT = "tiny"  # configuration of the commands that train or evaluate, if none is given


def main() -> None:
    """Runs a command; exits with status 2 if it is unknown, 1 if a name is."""
    command, *given = sys.argv[1:] or ["--help"]
    if command not in COMMANDS:
        is_help = command in ("-h", "--help")
        print(
            f"usage: care-jax {{{','.join(COMMANDS)}}} [--config=NAME or PATH] [flags]\n"
            f"configurations: {', '.join(names('configs'))}\n"
            f"experiments, of sweep --experiment=NAME: {', '.join(names('experiments'))}"
            + ("" if is_help else f"\nerror: no command {command!r}"),
            file=sys.stdout if is_help else sys.stderr,
        )
        sys.exit(0 if is_help else 2)
    module, first = COMMANDS[command]
    if _IS_INSTALLED:
        module = module if module.startswith("care_jax.") else f"care_jax.{module}"
    else:  # files of the checkout import `configs`
        sys.path.insert(0, str(_ROOT))
        folders = filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    try:
        flags = resolved(command, given)
    except ValueError as error:
        sys.exit(f"error: {error}")
    sys.argv = [f"care-jax {command}", *first, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def resolved(command: str, given: Sequence[str]) -> list[str]:
    """The flags, with names of configurations and experiments replaced by paths."""
    flags, before = [], ""
    for flag in given:
        name, equals, value = flag.partition("=")
        if before in _FOLDERS:
            flag = path_of(_FOLDERS[before], flag)
        elif equals and name in _FOLDERS:
            flag = f"{name}={path_of(_FOLDERS[name], value)}"
        flags.append(flag)
        before = flag
    has_config = any(flag.partition("=")[0] == "--config" for flag in flags)
    if COMMANDS[command][0] == "care_jax.main" and not has_config:
        flags.insert(0, f"--config={path_of('configs', _DEFAULT)}")
    return flags


def path_of(folder: str, name: str) -> str:
    """The path of an installed file; paths are unchanged. `name` may end with ":argument".

    Raises:
        ValueError: nothing of that name is installed.
    """
    stem, colon, argument = name.partition(":")
    if "/" in stem or stem.endswith(".py"):
        return name
    if stem not in names(folder):
        raise ValueError(
            f"no file {stem!r} in {folder}; give a path that ends with .py, or one of "
            f"{', '.join(names(folder))}"
        )
    return f"{_ROOT / folder / stem}.py{colon}{argument}"


def names(folder: str) -> list[str]:
    """The names of the files in `configs` or `experiments`."""
    return sorted(path.stem for path in (_ROOT / folder).glob("*.py") if path.stem[0] != "_")


if __name__ == "__main__":
    main()
