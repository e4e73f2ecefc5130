"""Loads a configuration, of a file or of a run; errors are one line with the file's own words."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import pathlib
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from types import FrameType, ModuleType
from typing import Any

from absl import flags
from ml_collections import ConfigDict
from ml_collections.config_flags import config_path

from care_jax.config.keys import leaves
from care_jax.config.nearest import did_you_mean, nearest_keys
from care_jax.configs import common  # pyright: ignore[reportAttributeAccessIssue]

# How a ConfigDict says that it has no such key, on writing and on reading.
_NO_KEY = re.compile(r"""["']*Key "(\w+)" does not exist|["']*(\w+)["']*$""")
_NUMBERS = ("Infinity", "-Infinity", "NaN")  # strings in config.json, see `run.versions`


class Refused(Exception):
    """A file or key cannot be used; not a ValueError, which absl prefixes with the flag."""


class Parser(flags.ArgumentParser):
    """Parser of --config=FILE[:ARGUMENT]; `keys` are those set on the command line."""

    def __init__(self, keys: Sequence[str]):
        self._keys = keys

    def parse(self, path: str) -> ConfigDict:
        """The locked configuration, which has all `keys`; raises `Refused`."""
        config = load(path).lock()
        for key in self._keys:
            check_key(config, key)
        return config

    def flag_type(self) -> str:
        return "config object"


def load(path: str) -> ConfigDict:
    """What `get_config(ARGUMENT)` of FILE[:ARGUMENT] returns, or the config.json of a run holds.

    Raises:
        Refused: there is no such file, it raises, or it does not return a `ConfigDict`.
    """
    # A folder's name may have colons, such as those of a time.
    found = re.fullmatch(r"(.+?\.(?:py|json))(?:(:)(.*))?", path, re.DOTALL)
    file, colon, argument = found.groups("") if found else path.partition(":")
    if not pathlib.Path(file).is_file():
        ours = pathlib.Path("configs", f"{file}.py")
        advice = f"write --config={ours}{colon}{argument}" if ours.is_file() else "correct the path"
        raise Refused(f"expected --config=FILE.py, got {file!r}, which is no file; {advice}")
    try:
        if not file.endswith((".py", ".json")):
            raise Refused(f"expected --config=FILE.py or a run's config.json, got {file!r}")
        if file.endswith(".json"):
            return _of_run(file)
        module = _imported(file)
        if not hasattr(module, "get_config"):
            raise Refused(f"{file} must define get_config(), which returns a ConfigDict; add it")
        config = module.get_config(*([argument] if colon else []))
    except Refused:
        raise
    except Exception as error:
        raise Refused(_message(error, file)) from error
    if not isinstance(config, ConfigDict):
        raise Refused(
            f"{file}: get_config() must return a ConfigDict, got {type(config).__name__}; return "
            "the configuration"
        )
    return config


def _of_run(file: str) -> ConfigDict:
    """The configuration of a run's last start; keys that its version lacked have their default."""
    try:
        fields = json.loads(pathlib.Path(file).read_text(encoding="utf-8"))
        del fields["versions"]  # which every config.json of a run has
        fields.pop("given", None)  # what came from Python, see `run.workdir`
        backbone = fields["model"].pop("backbone")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(
            f"expected the config.json that a run wrote, got {file}, which is not one; write "
            "--config=FILE.py"
        ) from error
    config = common.get_config()
    config.update(_of_json(fields))
    config.model.backbone = ConfigDict(backbone)  # JSON by itself: a release's config.json
    return config


def _of_json(value: Any) -> Any:
    """The value that `run.versions` wrote as JSON, which has no tuples and no infinite numbers."""
    if isinstance(value, dict):
        return {name: _of_json(each) for name, each in value.items()}
    if isinstance(value, list):
        parts = map(_of_json, value)
        return tuple(ConfigDict(part) if isinstance(part, dict) else part for part in parts)
    return float(value) if value in _NUMBERS else value


def _imported(file: str) -> ModuleType:
    name = "config_file"
    spec = importlib.util.spec_from_loader(
        name, importlib.machinery.SourceFileLoader(name, file), origin=file
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for dataclasses in the file
    spec.loader.exec_module(module)
    return module


def _message(error: Exception, file: str) -> str:
    """The error with its line in the file; without its type where it is the file's own words."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {error.msg}: {(error.text or '').strip()}"
    frames = [*traceback.walk_tb(error.__traceback__)]
    lines = [line for frame, line in frames if frame.f_code.co_filename == file]
    place = f"{file}:{lines[-1]}" if lines else file
    if (section := _section_without(frames, error)) is not None:
        return f"{place}: {section}"
    if isinstance(error, ModuleNotFoundError) and error.name == "configs":
        return f"{place}: {error}; write: from care_jax.configs import ..."
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return f"{place}: {kind}{error}"


def _section_without(frames: Iterable[tuple[FrameType, int]], error: Exception) -> str | None:
    """What to say of a key that a section of the configuration lacks; None for other errors."""
    owners = [frame.f_locals.get("self") for frame, _ in frames]
    section = next((each for each in reversed(owners) if isinstance(each, ConfigDict)), None)
    found = _NO_KEY.match(str(error)) if isinstance(error, AttributeError | KeyError) else None
    if section is None or found is None:
        return None
    name = found[1] or found[2]
    return f"no such key: {name!r}.{did_you_mean(nearest_keys(name, section.keys()))}"


def check_key(config: ConfigDict, key: str) -> None:
    """Raises `Refused` if a configuration has no such key, with those that are like it."""
    try:
        config_path.get_value(key, config)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        names = [name for name, _ in leaves(config)]
        raise Refused(
            f"no such key: --config.{key}.{did_you_mean(nearest_keys(key, names))} "
            "configs/common.py lists all keys"
        ) from error
