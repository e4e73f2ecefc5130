"""Maintains rollouts.jsonl, report.jsonl and report.html in a run's workdir.

rollouts.jsonl has a line for every prompt of every step, from `groups.describe`. Its size is
bounded: at half of the allowed bytes the file replaces rollouts.1.jsonl, and a new one begins.
Processes other than the first append their number to the name.

report.jsonl has a line for every logged step and some of its lines of rollouts.jsonl, with
pictures. report.html is drawn from it, see `drawing`; groups that are dropped from the page to keep
it within its size are dropped from report.jsonl as well.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import jax

from care_jax.batch import Groups
from care_jax.devices.whole_file import write_whole
from care_jax.report import page, pictures
from care_jax.report.drawing import Shown, draw, read_shown
from care_jax.report.groups import Wording, choose, describe
from care_jax.report.records import keep_records


class Report:
    """The report of one run. The first process writes it; each logs the prompts it decoded.

    Args:
        groups_per_step: prompts shown per logged step.
        max_megabytes: maximum size of report.html, MiB.
        image_side: maximum pixels of a picture's longer side.
        rollouts_megabytes: maximum MiB of rollouts.jsonl and rollouts.1.jsonl together; 0 writes
            neither. A step is never split over files, so one step may exceed it.
        wording: detokenisation; None if `add` is never called.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        *,
        groups_per_step: int,
        max_megabytes: float,
        image_side: int,
        rollouts_megabytes: float,
        wording: Wording | None = None,
    ):
        number = jax.process_index()
        stem = f"rollouts_{number}" if number else "rollouts"
        self._rollouts, self._former = workdir / f"{stem}.jsonl", workdir / f"{stem}.1.jsonl"
        self._rollouts_bytes = int(rollouts_megabytes * 2**20 / 2)  # per file
        self.path, self._shown = workdir / "report.html", workdir / "report.jsonl"
        self._is_writer = number == 0
        self._max_bytes = int(max_megabytes * 2**20)
        self._groups_per_step = groups_per_step
        self._image_side = image_side
        self._wording = wording
        self._run = read_shown(workdir) if self._is_writer else Shown("", workdir, {})

    def begin(self, start_step: int) -> None:
        """Drops the steps that the run will repeat."""
        paths = [self._former, self._rollouts]
        if self._is_writer:  # also of processes that an earlier start had and this one has not
            folder, number = self.path.parent, jax.process_count()
            while (later := folder / f"rollouts_{number}.jsonl").exists():
                paths += [later, later.with_suffix(".1.jsonl")]
                number += 1
            paths.append(self._shown)
        for path in paths:
            keep_records(path, lambda record: record["step"] < start_step)
        kept = {step: groups for step, groups in self._run.steps.items() if step < start_step}
        self._run.steps = kept

    def add(self, step: int, groups: Groups, *, is_logged: bool) -> list[dict[str, Any]]:
        """Logs the groups of a step; at a logged step, also writes the report with some of them.

        Returns these groups: lines of rollouts.jsonl, each with "pictures", data URIs.
        """
        is_shown = is_logged and self._is_writer
        if not (is_shown or self._rollouts_bytes):
            return []
        wording = self._wording
        assert wording is not None
        lines = [describe(step, groups, i, wording) for i in range(len(groups.examples))]
        if self._rollouts_bytes:
            if self._rollouts.exists() and self._rollouts.stat().st_size >= self._rollouts_bytes:
                os.replace(self._rollouts, self._former)
            _append(self._rollouts, (json.dumps(line, ensure_ascii=False) for line in lines))
        if not is_shown:
            return []
        shown, outcomes = [], [line["outcome"] for line in lines]
        for index in choose(outcomes, self._groups_per_step, turn=len(self._run.steps)):
            images = groups.examples[index].images
            uris = [pictures.data_uri(image, max_side=self._image_side) for image in images]
            shown.append(lines[index] | {"think_tag": wording.think_tag, "pictures": uris})
        self._run.steps[step] = [page.to_json(group) for group in shown]
        _append(self._shown, self._lines(step))
        self.write()
        return shown

    def write(self) -> None:
        """Replaces report.html atomically; groups that it has no room for leave report.jsonl."""
        if not self._is_writer:
            return
        number = self._num_groups()
        draw(self.path, [self._run], max_bytes=self._max_bytes)
        if self._num_groups() < number:
            lines = (line for step in self._run.steps for line in self._lines(step))
            write_whole(self._shown, "".join(f"{line}\n" for line in lines))

    def _num_groups(self) -> int:
        return sum(map(len, self._run.steps.values()))

    def _lines(self, step: int) -> list[str]:
        """The lines of a step in report.jsonl: the step, then its groups."""
        return [page.to_json({"step": step}), *self._run.steps[step]]


def _append(path: pathlib.Path, lines: Iterable[str]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
