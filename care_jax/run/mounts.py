"""Which folder a workdir is, and whether that folder is in a bucket.

A bucket is used through a mount, `gs://` by one of gcsfuse that is made here. A mount differs from
a disk: a folder cannot be renamed atomically, or not at all, and what was written to a file reaches
the bucket when the file is closed. `checkpoint`, `lock` and `metrics` write accordingly.
"""

from __future__ import annotations

import fcntl
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+([^/]*)/*(.*)", re.DOTALL)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]*[a-z0-9]")
_TABLE = pathlib.Path("/proc/self/mounts")
# Without its caches, which never expire on TPU VMs, every host sees what another has written.
_GCSFUSE = (
    "gcsfuse",
    "--implicit-dirs",
    "--metadata-cache-ttl-secs=0",
    "--metadata-cache-negative-ttl-secs=0",
)
_TIMEOUT = 60.0  # seconds to mount a bucket in


class _Mount(NamedTuple):
    source: str
    point: str
    kind: str


def as_folder(
    workdir: str | os.PathLike[str], table: pathlib.Path = _TABLE, *, flag: str = "--workdir"
) -> pathlib.Path:
    """The folder that a user named; of gs://bucket/folder, a folder of a mount made here.

    pathlib alone would make a local folder `gs:` of it. The mount outlives this process, and the
    next one finds it.

    Args:
        workdir: a folder, which may begin with ~, or an address.
        table: of the mounts, in the format of /proc/self/mounts.
        flag: that named it, for messages.

    Raises:
        ValueError: another address, or the bucket cannot be mounted.
    """
    found = _URL.fullmatch(os.fspath(workdir))
    if not found:
        return pathlib.Path(workdir).expanduser()
    scheme, bucket, rest = found.groups()
    if scheme != "gs" or not _BUCKET.fullmatch(bucket):
        raise ValueError(
            f"expected a folder or gs://bucket/folder as {flag}, got {scheme}://{bucket}/{rest}; "
            f"mount the bucket on every host and set {flag} to a folder of the mount"
        )
    caches = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    point = caches / "care_jax" / "buckets" / bucket
    try:
        _mount(bucket, point, table)
    except OSError as error:
        elsewhere = [each.point for each in _mounts(table) if each.source == bucket]
        place = pathlib.Path(elsewhere[-1] if elsewhere else f"/mnt/{bucket}")
        command = "" if elsewhere else f" ({' '.join(_GCSFUSE)} {bucket} {place})"
        raise ValueError(
            f"{flag}={scheme}://{bucket}/{rest} cannot be mounted at {point}: {error}; mount "
            f"the bucket on every host{command} and set {flag}={place / rest}"
        ) from error
    return point / rest


def _mount(bucket: str, point: pathlib.Path, table: pathlib.Path) -> None:
    """Mounts a bucket, unless it is mounted.

    Raises:
        OSError: there is no gcsfuse, it failed, or takes too long.
        ValueError: the bucket is mounted, but its gcsfuse has died.
    """
    point.parent.mkdir(parents=True, exist_ok=True)
    # Of several processes on a host, one mounts.
    with (point.parent / f"{bucket}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if any(each.point == str(point.resolve()) for each in _mounts(table)):
            try:
                point.stat()
            except OSError as error:
                raise ValueError(
                    f"the gcsfuse of gs://{bucket} has died ({error.strerror}); remove its mount, "
                    f"fusermount -u {point}, and start again"
                ) from error
            return
        point.mkdir(exist_ok=True)
        if shutil.which(_GCSFUSE[0]) is None:
            raise FileNotFoundError("gcsfuse is not installed")
        with tempfile.TemporaryFile("w+") as said:  # no pipe: gcsfuse goes on in the background
            command = [*_GCSFUSE, bucket, str(point)]
            try:
                done = subprocess.run(command, stdout=said, stderr=said, timeout=_TIMEOUT)
            except subprocess.TimeoutExpired:
                raise OSError(f"gcsfuse takes longer than {_TIMEOUT} seconds") from None
            said.seek(0)
            lines = said.read().split("\n")
    if done.returncode:
        last = next((line for line in reversed(lines) if line.strip()), "it gave no reason")
        raise OSError(f"gcsfuse ended with status {done.returncode}, {last}")
    print(f"gs://{bucket} is mounted at {point}", file=sys.stderr, flush=True)


def _mounts(table: pathlib.Path) -> list[_Mount]:
    """All mounts, later ones on top of those before; none where there is no such table."""
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return []

    def plain(field: str) -> str:
        # The kernel writes spaces, tabs, line ends and backslashes as octal numbers.
        return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal.group(1), 8)), field)

    return [_Mount(*map(plain, line.split(" ")[:3])) for line in lines]


def file_system_of(path: pathlib.Path, table: pathlib.Path = _TABLE) -> str:
    """The type of the file system that a path is on, such as "ext4"; "" where it is not known.

    Args:
        path: need not exist.
        table: of the mounts, in the format of /proc/self/mounts.
    """
    place = path.resolve()
    above = [each for each in _mounts(table) if place.is_relative_to(each.point)]
    # Of several mounts in one place the last is on top.
    return max(reversed(above), key=lambda each: len(each.point)).kind if above else ""


def is_fuse(path: pathlib.Path, table: pathlib.Path = _TABLE) -> bool:
    """Whether a path is on a FUSE mount, as buckets are.

    gcsfuse calls itself "fuse.gcsfuse" on a VM and "fuse" in a pod of GKE.
    """
    kind = file_system_of(path, table)
    return kind == "fuse" or kind.startswith("fuse.")
