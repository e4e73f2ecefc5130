"""Whether a folder is on a FUSE mount, as buckets are.

There a folder cannot be renamed atomically, or not at all, and writes reach the bucket only when
the file is closed. `checkpoint` and `metrics` write accordingly.
"""

from __future__ import annotations

import pathlib
import re


def is_fuse(path: pathlib.Path, table: pathlib.Path = pathlib.Path("/proc/self/mounts")) -> bool:
    """Whether a path, which need not exist, is on a FUSE mount according to a mount table."""
    path = path.resolve()
    try:
        lines = table.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not on Linux
        return False
    kind, longest = "", 0
    for line in lines:
        point, type_of_point = map(_plain, line.split(" ")[1:3])
        # The last of several mounts at one mount point hides the others.
        if path.is_relative_to(point) and len(point) >= longest:
            kind, longest = type_of_point, len(point)
    # The type of gcsfuse is "fuse.gcsfuse" on a VM and "fuse" in a pod of GKE.
    return kind == "fuse" or kind.startswith("fuse.")


def _plain(field: str) -> str:
    """Unescapes a field: the kernel writes spaces, tabs, newlines and backslashes in octal."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal.group(1), 8)), field)
