"""Which folder a workdir is, and what kind of file system it is on.

A bucket is used through a mount (gcsfuse, rclone). Such a mount differs from a
disk: a folder cannot be renamed atomically, or not at all, and what was written to a file reaches
the bucket when the file is closed. `checkpoint`, `workdir_lock` and `metrics` write accordingly.
"""

from __future__ import annotations

import os
import pathlib
import re

_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+(?P<bucket>[^/]*)/*(?P<rest>.*)", re.DOTALL
)
_MOUNTS = pathlib.Path("/proc/self/mounts")
# Without its caches, which never expire on TPU VMs, every host sees what another has written.
_GCSFUSE = (
    "gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0"
)


def as_folder(workdir: str | os.PathLike[str]) -> pathlib.Path:
    """The folder that a user named.

    Raises:
        ValueError: it is the address of a bucket, of which pathlib would make a local folder `gs:`.
    """
    found = _URL.fullmatch(os.fspath(workdir))
    if not found:
        return pathlib.Path(workdir)
    scheme, bucket, rest = found.group("scheme", "bucket", "rest")
    mount = pathlib.PurePosixPath("/mnt", bucket)
    command = f" ({_GCSFUSE} {bucket} {mount})" if scheme == "gs" else ""
    raise ValueError(
        f"expected a folder as --workdir, got the address {scheme}://{bucket}/{rest}; mount the "
        f"bucket on every host{command} and set --workdir={mount / rest}"
    )


def file_system_of(path: pathlib.Path, mounts: pathlib.Path = _MOUNTS) -> str:
    """The type of the file system that a path is on, such as "ext4"; "" where it is not known.

    Args:
        path: need not exist.
        mounts: table of the mounts in the format of /proc/self/mounts.
    """
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    place, longest, kind = path.resolve(), -1, ""
    for line in lines:
        _, point, found, *_ = line.split(" ")
        # The kernel writes spaces, tabs, line ends and backslashes as octal numbers.
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal.group(1), 8)), point)
        # Of several mounts in one place the last is on top.
        if place.is_relative_to(point) and len(point) >= longest:
            longest, kind = len(point), found
    return kind


def is_fuse(path: pathlib.Path, mounts: pathlib.Path = _MOUNTS) -> bool:
    """Whether a path is on a FUSE mount, as buckets are.

    gcsfuse calls itself "fuse.gcsfuse" on a VM and "fuse" in a pod of GKE.
    """
    kind = file_system_of(path, mounts)
    return kind == "fuse" or kind.startswith("fuse.")
