"""One page of one or more runs: `care-jax report runs/a runs/b --out=both.html`.

Curves of the same metric share a chart, and settings that differ are listed. The page of a single
run replaces its report.html by default, for instance after an update of this program.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence

from care_jax.config.command_line import exit_interrupted, folder_of, os_error
from care_jax.devices.standard_streams import outlive_readers
from care_jax.report.drawing import draw, read_shown


def main(argv: Sequence[str]) -> None:
    """Draws the page and prints its path."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("workdir", nargs="+", help="folder of a run, with its metrics.jsonl")
    where = "report.html, of one run in its workdir, of several in this folder"
    parser.add_argument("--out", help=f"file; by default {where}")
    parser.add_argument("--max_megabytes", type=float, default=16.0, help="maximum MiB of the file")
    given = parser.parse_args(argv)
    try:
        workdirs = [folder_of(text, flag="workdir") for text in given.workdir]
        folder = workdirs[0] if len(workdirs) == 1 else pathlib.Path()
        path = folder_of(given.out, flag="--out") if given.out else folder / "report.html"
        draw_page(workdirs, path, max_megabytes=given.max_megabytes)
    except ValueError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {os_error(error, given.workdir[0])}")
    except KeyboardInterrupt:
        exit_interrupted()
    print(path)


def draw_page(
    workdirs: Sequence[pathlib.Path], path: pathlib.Path, *, max_megabytes: float
) -> None:
    """Writes the page of the runs in `workdirs`; changes none of them.

    Raises:
        ValueError: a folder has no metrics.jsonl.
    """
    for workdir in workdirs:
        if not (workdir / "metrics.jsonl").is_file():
            raise ValueError(
                f"{workdir} has no metrics.jsonl; give the --workdir of a run that has begun to "
                "train or evaluate"
            )
    names = zip(workdirs, titles(workdirs), strict=True)
    draw(path, [read_shown(*each) for each in names], max_bytes=int(max_megabytes * 2**20))


def titles(workdirs: Sequence[pathlib.Path]) -> list[str]:
    """The shortest ends of the paths that tell the folders apart: `a/seed0`, `b/seed0`."""
    parts = [workdir.resolve().parts for workdir in workdirs]
    for length in range(1, max(map(len, parts)) + 1):
        found = [os.path.join(*each[-length:]) for each in parts]
        if len(set(found)) == len(set(parts)):
            break
    return found


if __name__ == "__main__":
    outlive_readers()
    main(sys.argv[1:])
