"""Draws the page of one or more runs from metrics.jsonl, report.jsonl and the run's description.

A page stays within its size: the groups of whole steps are dropped, more often for older steps, and
the page says so. Curves are thinned separately.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Sequence

from care_jax.devices.whole_file import write_whole
from care_jax.report import curves, page, terms
from care_jax.report.about import describe_run
from care_jax.report.records import read_records

_MAX_POINTS = 600  # per curve, more than a screen resolves


@dataclasses.dataclass
class Shown:
    """What a page shows of a run: its workdir, and groups of its logged steps."""

    title: str
    workdir: pathlib.Path
    # Groups of each logged step as JSON, steps in order; empty if they were dropped.
    steps: dict[int, list[str]]

    def __post_init__(self):
        self.curves = curves.Curves(self.workdir / "metrics.jsonl", max_points=_MAX_POINTS)


def read_shown(workdir: pathlib.Path, title: str = "") -> Shown:
    """The run of a workdir, with the groups of its report.jsonl, if there is one.

    `title` is the folder's name by default.
    """
    steps: dict[int, list[str]] = {}
    for _, record in read_records(workdir / "report.jsonl"):
        groups = steps.setdefault(record["step"], [])
        if "responses" in record:
            groups.append(page.to_json(record))
    return Shown(title or workdir.resolve().name, workdir, steps)


def draw(path: pathlib.Path, runs: Sequence[Shown], *, max_bytes: int) -> None:
    """Replaces the page atomically; drops groups from `runs` until it has at most `max_bytes`."""
    stages = curves.merge([run.curves.read() for run in runs])
    data = {
        "written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "max_megabytes": max_bytes / 2**20,
        "terms": terms.ROLLOUTS | {name: terms.define(name) for name in curves.names(stages)},
        "stages": stages,
        "runs": [],
    }
    heads = [
        page.to_json(
            {
                "title": run.title,
                "about": describe_run(run.workdir),
                "logged": list(run.steps),
                "groups": [],
            }
        )
        for run in runs
    ]
    head = page.to_json(data)
    left = max_bytes - len(page.render(head).encode()) - sum(len(each) + 1 for each in heads)
    for run in runs:
        thin(run.steps, left // len(runs))
    bodies = (
        f"{each[:-2]}{','.join(line for groups in run.steps.values() for line in groups)}]}}"
        for run, each in zip(runs, heads, strict=True)
    )
    write_whole(path, page.render(f"{head[:-2]}{','.join(bodies)}]}}"))


def thin(steps: dict[int, list[str]], max_bytes: int) -> None:
    """Drops groups, step by step, until the rest fits; from a last single step, one by one."""
    full = [step for step, groups in steps.items() if groups]
    size = sum(len(line) + 1 for step in full for line in steps[step])
    while full and size > max_bytes:
        step = next_to_go(full)
        kept = steps[step][:-1] if len(full) == 1 else []
        size -= sum(len(line) + 1 for line in steps[step][len(kept) :])
        steps[step] = kept
        if not kept:
            full.remove(step)


def next_to_go(steps: Sequence[int]) -> int:
    """The step to drop next: argmin of gap / age over all but the first and the last.

    gap is the distance between the two neighbours of a step, age its distance to the last step.
    The remaining steps are then spread evenly in log(age). Of one or two steps it is the first.
    `steps` are in ascending order.
    """
    if len(steps) < 3:
        return steps[0]
    threes = zip(steps, steps[1:], steps[2:], strict=False)
    return min(((after - before) / (steps[-1] - step), step) for before, step, after in threes)[1]
