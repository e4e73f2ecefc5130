"""Flags of all commands; a wrong flag, key or folder is reported in one line."""

from __future__ import annotations

import errno
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from ml_collections import ConfigDict

# If a config file raises, ml_collections raises an error whose message begins with this and holds
# the traceback; the original exception is the `__context__` of that error.
_WRAPPED = "Error whilst parsing config file"
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+([^/]*)/*(.*)", re.DOTALL)
# gcsfuse's metadata caches never expire on TPU VMs: with them, hosts do not see each other's files.
_GCSFUSE = (
    "gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0"
)


def parse(argv: Sequence[str], config: flags.FlagHolder[ConfigDict] | None = None) -> Sequence[str]:
    """Parses all defined flags, and loads the file that `config` names; returns the program's name.

    Raises:
        ValueError: one line: a flag or key does not exist, a file cannot be loaded, or there are
            arguments that are no flags.
    """
    try:
        rest = flags.FLAGS(argv)
        if config is not None and config.value is not None:
            _ = config.value.stages  # raises if the file could not be loaded
    except Exception as error:  # whatever a configuration file raises
        raise ValueError(" ".join(_message(error).split())) from error
    if len(rest) > 1:
        raise ValueError(f"expected only flags, got {rest[1]!r}; write --<flag>=<value>")
    return rest


def run_command(
    act: Callable[[], None],
    folder: flags.FlagHolder,
    config: flags.FlagHolder[ConfigDict] | None = None,
) -> None:
    """Parses all defined flags and calls `act`; user errors are one line, not a traceback.

    `folder` is the flag of the command's folder, for messages.
    """
    logging.set_verbosity(logging.WARNING)
    try:
        app.run(lambda _: act(), flags_parser=lambda argv: parse(argv, config))
    except ValueError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    except OSError as error:
        sys.exit(f"error: {os_error(error, folder.value or '')}")


def folder_of(text: str | os.PathLike[str], *, flag: str = "--workdir") -> pathlib.Path:
    """The path in a folder's flag, with ~ expanded; pathlib would accept gs://bucket as a path.

    Raises:
        ValueError: it is an address; says how to mount the bucket, and which path to use then.
    """
    found = _ADDRESS.fullmatch(os.fspath(text))
    if not found:
        return pathlib.Path(text).expanduser()
    scheme, bucket, rest = found.groups()
    point = f"/mnt/{bucket or 'BUCKET'}"
    command = f" ({_GCSFUSE} {bucket or 'BUCKET'} {point})" if scheme == "gs" else ""
    raise ValueError(
        f"expected a folder, got {flag}={scheme}://{bucket}/{rest}; mount the bucket on every "
        f"host{command} and write {flag}={pathlib.Path(point, rest)}"
    )


def os_error(error: OSError, workdir: str) -> str:
    """Describes an OSError in one line, with its file, or else the folder `workdir`.

    The error names its file if opening it failed, but not if writing did.
    """
    reason = error.strerror or str(error) or type(error).__name__
    path = f": {error.filename}" if error.filename else f", while accessing files in {workdir}"
    full = "; free space there, then run the same command to resume"
    advice = {
        errno.ENOSPC: full,
        errno.EDQUOT: full,
        errno.EACCES: "; make it writable, or choose another --workdir",
        errno.EROFS: "; choose another --workdir",
    }
    return f"{reason}{path}{advice.get(error.errno or 0, '')}"


def _message(error: Exception) -> str:
    cause = error.args[0] if error.args and isinstance(error.args[0], KeyError) else error
    if isinstance(cause, KeyError):
        key, _, suggestion = str(cause.args[0]).partition("\n")
        return f"no such key: {key}; configs/common.py lists all keys. {suggestion}"
    wrapper = error.__context__
    if wrapper is not None and str(wrapper).startswith(_WRAPPED):
        return f"{str(error).partition(_WRAPPED)[0]}{wrapper.__context__}"
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {error.msg}: {(error.text or '').strip()}"
    if isinstance(error, AttributeError | TypeError | ValueError | OSError | flags.Error):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}: {type(error).__name__}: {error}"
