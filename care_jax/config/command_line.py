"""Flags of all commands; a wrong flag, key or folder is reported in one line."""

from __future__ import annotations

import collections
import errno
import itertools
import os
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict

from care_jax.config import config_file

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+([^/]*)/*(.*)", re.DOTALL)
# gcsfuse's metadata caches never expire on TPU VMs: with them, hosts do not see each other's files.
_GCSFUSE = (
    "gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0"
)


def parse(
    argv: Sequence[str],
    config: flags.FlagHolder[ConfigDict] | None = None,
    default: str | None = None,
) -> Sequence[str]:
    """Parses all defined flags, and loads the file that `config` names; returns the program's name.

    The flags of `config` may stand in any order; of a repeated one the last counts. Replaces
    `sys.argv`, where ml_collections looks for them.

    Args:
        argv: name of the program, then its arguments.
        config: holder of the flag that names a configuration file.
        default: file to load if `argv` names none; None: none is loaded.

    Raises:
        ValueError: one line: a flag or key does not exist, a file cannot be loaded, or there are
            arguments that are no flags.
    """
    try:
        argv = flags.FLAGS.read_flags_from_files(list(argv), force_gnu=False)
        if config is not None:
            argv, keys = _config_first(argv, config.name, default)
            flags.FLAGS[config.name].parser = config_file.Parser(keys)
            sys.argv = argv
        rest = flags.FLAGS(argv)
    except (config_file.Refused, flags.Error, OSError) as error:
        message = " ".join(str(error).split())
        if section := re.match(r"flag (--[\w.]+)=.* as a ConfigDict", message):
            message = f"{section[1]} is a section; write {section[1]}.<key>=<value>"
        if absent := re.findall(r"flag --(\w+)=None: ", message):
            message = " ".join(f"--{name} is missing: {flags.FLAGS[name].help}" for name in absent)
        raise ValueError(message) from error
    if len(rest) > 1:
        raise ValueError(
            f"expected only flags, got {rest[1]!r}; write --<flag>=<value>, such as --config=FILE"
        )
    return rest


def _config_first(
    argv: Sequence[str], name: str, default: str | None
) -> tuple[list[str], list[str]]:
    """(arguments with --config and its keys first, the keys); the last of each flag alone."""
    flag = re.compile(rf"--?(?:no)?({name}(?:\.[^=]*)?)(=.*)?", re.DOTALL)
    given = {name: [f"--{name}={default}"] if default else []}
    rest, waiting = [], collections.deque(argv[1:])
    while waiting:
        found = flag.fullmatch(argument := waiting.popleft())
        if argument == "--":  # nothing after it is a flag
            rest += [argument, *waiting]
            break
        if not found:
            rest.append(argument)
            continue
        has_value = found[2] is None and waiting and not waiting[0].startswith("--")
        given[found[1]] = [argument, *([waiting.popleft()] if has_value else [])]
    keys = [key.removeprefix(f"{name}.") for key in given if key != name]
    return [argv[0], *itertools.chain(*given.values()), *rest], keys


def run_command(
    act: Callable[[], None],
    folder: flags.FlagHolder,
    config: flags.FlagHolder[ConfigDict] | None = None,
    default: str | None = None,
) -> None:
    """Parses all defined flags, see `parse`, and calls `act`; user errors are one line.

    `folder` is the flag of the command's folder, for messages.
    """
    logging.set_verbosity(logging.WARNING)
    try:
        app.run(lambda _: act(), flags_parser=lambda argv: parse(argv, config, default))
    except ValueError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    except OSError as error:
        sys.exit(f"error: {os_error(error, folder.value or '')}")
    except KeyboardInterrupt:
        exit_interrupted()


def exit_interrupted() -> NoReturn:
    """Ends a command after Ctrl-C, with the status that shells report."""
    print("stopped by Ctrl-C", file=sys.stderr)
    sys.exit(130)


def folder_of(text: str | os.PathLike[str], *, flag: str = "--workdir") -> pathlib.Path:
    """The path in a folder's flag, with ~ expanded; pathlib would accept gs://bucket as a path.

    Raises:
        ValueError: it is an address; says how to mount the bucket, and which path to use then. Or
            it starts with ~ and there is no home.
    """
    found = _ADDRESS.fullmatch(os.fspath(text))
    if not found:
        try:
            return pathlib.Path(text).expanduser()
        except RuntimeError as error:
            raise ValueError(
                f"expected a folder, got {flag}={text}, and this user has no home folder; write "
                "the whole path, or set HOME"
            ) from error
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
        errno.EEXIST: ", which is a file; choose another --workdir",
        errno.ENOTDIR: ", which is inside a file; choose another --workdir",
        errno.ENAMETOOLONG: "; choose a shorter --workdir",
        errno.EFBIG: "; raise the limit (ulimit -f), then run the same command to resume",
        errno.EMFILE: "; raise the limit (ulimit -n), then run the same command to resume",
        errno.ENFILE: "; raise the limit (fs.file-max), then run the same command to resume",
        errno.ENOMEM: "; raise the limit (ulimit -v) or use a host with more memory, then run the "
        "same command to resume",
    }
    return f"{reason}{path}{advice.get(error.errno or 0, '')}"
