"""Maintains workdir/rollouts.jsonl: every response of every step, with its reward and advantage.

One line per prompt: the step, and the group as `groups.describe` gives it, with each response as
one text. The size is bounded: a file that has half of the allowed bytes becomes `rollouts.1.jsonl`,
in place of the former one. A process that is not the first appends its number to the name.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import jax

from care_jax.devices.whole_file import write_whole
from care_jax.report import groups
from care_jax.report.groups import Sampled, Wording


class RolloutLog:
    """The rollouts of one run, of the prompts of this process.

    Args:
        workdir: folder of the files.
        max_megabytes: of both files together, MiB; 0 writes none. A step is never divided, so that
            one step may exceed it.
        wording: how tokens become text.
    """

    def __init__(self, workdir: pathlib.Path, *, max_megabytes: float, wording: Wording):
        number = jax.process_index()
        stem = f"rollouts_{number}" if number else "rollouts"
        self.path = workdir / f"{stem}.jsonl"
        self.former = workdir / f"{stem}.1.jsonl"
        self._max_bytes = int(max_megabytes * 2**20 / 2)  # of one file
        self._wording = wording

    def begin(self, start_step: int) -> None:
        """Drops the steps that the run will repeat, and a line that a kill cut off."""
        for path in (self.former, self.path):
            if path.exists():
                kept = [line for line in read_lines(path) if _is_before(line, start_step)]
                write_whole(path, "".join(f"{line}\n" for line in kept))

    def add(self, step: int, sampled: Sampled) -> None:
        """Appends the groups of a step."""
        if not self._max_bytes:
            return
        if self.path.exists() and self.path.stat().st_size >= self._max_bytes:
            os.replace(self.path, self.former)
        with self.path.open("a", encoding="utf-8") as file:
            for index in range(len(sampled.examples)):
                group = {"step": step} | self._group(sampled, index)
                file.write(json.dumps(group, ensure_ascii=False) + "\n")

    def _group(self, sampled: Sampled, index: int) -> dict[str, Any]:
        group = groups.describe(sampled, index, self._wording)
        for response in group["responses"]:
            response["text"] = "".join(text for _, text in response.pop("segments"))
            response["components"] = dict(response["components"])
        return group


def read_lines(path: pathlib.Path) -> list[str]:
    """The lines of a file; not `splitlines`, for which U+2028 in a response ends a line too.

    A kill may have cut the last line inside a character.
    """
    return path.read_text(encoding="utf-8", errors="replace").split("\n")


def _is_before(line: str, step: int) -> bool:
    try:
        return json.loads(line)["step"] < step
    except (ValueError, KeyError, TypeError):
        return False
