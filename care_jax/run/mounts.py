"""Whether a folder is in a bucket, that is on a FUSE mount, which differs from a disk.

There a folder cannot be renamed atomically, or not at all, and what was written to a file reaches
the bucket when the file is closed. `checkpoint` and `metrics` write accordingly.
"""

from __future__ import annotations

import pathlib
import re


def is_fuse(path: pathlib.Path, table: pathlib.Path = pathlib.Path("/proc/self/mounts")) -> bool:
    """Whether a path, which need not exist, is on a FUSE mount by a table of the mounts."""
    place = path.resolve()
    try:
        lines = table.read_text().splitlines()
    except OSError:  # not on Linux
        return False
    kind, longest = "", 0
    for line in lines:
        point, type_of_point = map(_plain, line.split(" ")[1:3])
        # Of several mounts in one place the last is on top.
        if place.is_relative_to(point) and len(point) >= longest:
            kind, longest = type_of_point, len(point)
    # gcsfuse calls itself "fuse.gcsfuse" on a VM and "fuse" in a pod of GKE.
    return kind == "fuse" or kind.startswith("fuse.")


def _plain(field: str) -> str:
    """The kernel writes spaces, tabs, line ends and backslashes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal.group(1), 8)), field)
