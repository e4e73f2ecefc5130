"""Keeps workdir/report.html: written whole or not at all, read back by a run that goes on.

The file is its own memory: what an earlier run left in it is read once, what the new one is about
to do again is dropped, and every later writing puts a new file in its place.

It has a size it may not exceed. Where it would, steps of the inspector are left out, the more of
them the older they are; the page says so. Curves are thinned by themselves.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Sequence

import jax

from care_jax.report import curves, groups, page, pictures
from care_jax.report.groups import Sampled, Wording

VERSION = 1  # of the data's layout; a file of another is begun anew
_MAX_POINTS = 600  # of a curve, more than a screen shows


class Report:
    """The file of one run, on the first process alone.

    Args:
        workdir: has metrics.jsonl; the report is put beside it.
        max_megabytes: size of the file.
        groups_per_step: prompts shown of a step.
        max_side: pixels of a picture's longer side.
        wording: how tokens become text; None for who adds nothing.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        *,
        max_megabytes: float,
        groups_per_step: int = 0,
        max_side: int = 1,
        wording: Wording | None = None,
    ):
        self.path = workdir / "report.html"
        self._is_writer = jax.process_index() == 0
        self._max_bytes = int(max_megabytes * 2**20)
        self._groups_per_step = groups_per_step
        self._max_side = max_side
        self._wording = wording
        self._logged: list[int] = []
        # As JSON, made once; with each group the keys of its pictures.
        self._steps: dict[int, list[tuple[str, tuple[str, ...]]]] = {}
        self._pictures: dict[str, str] = {}
        if self._is_writer and self.path.exists():
            self._recall(self.path.read_text(encoding="utf-8"))

    def begin(self, start_step: int) -> None:
        """Drops what the run is about to do again."""
        self._logged = [step for step in self._logged if step < start_step]
        self._steps = {step: shown for step, shown in self._steps.items() if step < start_step}

    def add(self, step: int, sampled: Sampled) -> None:
        """Adds a sample of a step's groups and writes the file."""
        if not self._is_writer:
            return
        outcomes = [groups.outcome(sampled, index) for index in range(len(sampled.examples))]
        chosen = groups.choose(outcomes, self._groups_per_step, turn=len(self._logged))
        self._logged.append(step)
        self._steps[step] = [self._group(sampled, index) for index in chosen]
        self.write()

    def write(self) -> None:
        """Puts a new file in place of the old one."""
        if not self._is_writer:
            return
        stages = curves.read_stages(self.path.with_name("metrics.jsonl"), max_points=_MAX_POINTS)
        head = page.to_json(
            {
                "version": VERSION,
                "title": self.path.parent.resolve().name,
                "written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
                "max_megabytes": self._max_bytes / 2**20,
                "stages": stages,
                "logged": self._logged,
            }
        )
        self._thin(self._max_bytes - len(page.render(self._data(head, {})).encode()))
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(page.render(self._data(head, self._steps)), encoding="utf-8")
        os.replace(temporary, self.path)

    def _group(self, sampled: Sampled, index: int) -> tuple[str, tuple[str, ...]]:
        example, keys = sampled.examples[index], []
        for order, image in enumerate(example.images):
            keys.append(f"{example.source}/{example.id}/{order}")
            if keys[-1] not in self._pictures:
                uri = pictures.data_uri(image, max_side=self._max_side)
                self._pictures[keys[-1]] = page.to_json(uri)
        group = groups.describe(sampled, index, self._wording) | {"pictures": keys}
        return page.to_json(group), tuple(keys)

    def _data(self, head: str, steps: dict[int, list[tuple[str, tuple[str, ...]]]]) -> str:
        shown = (
            f'{{"step":{step},"groups":[{",".join(group for group, _ in entries)}]}}'
            for step, entries in sorted(steps.items())
        )
        keys = {key for entries in steps.values() for _, keys in entries for key in keys}
        stored = (f"{page.to_json(key)}:{self._pictures[key]}" for key in sorted(keys))
        return f'{head[:-1]},"steps":[{",".join(shown)}],"pictures":{{{",".join(stored)}}}}}'

    def _thin(self, max_bytes: int) -> None:
        """Leaves out steps, at last groups of the only one, until the rest fits; then pictures."""
        while self._steps and len(self._data("{}", self._steps)) > max_bytes:
            steps = sorted(self._steps)
            if len(steps) > 1:
                del self._steps[next_to_go(steps)]
            elif len(self._steps[steps[0]]) > 1:
                self._steps[steps[0]].pop()
            else:
                del self._steps[steps[0]]
        keys = {key for entries in self._steps.values() for _, keys in entries for key in keys}
        self._pictures = {key: uri for key, uri in self._pictures.items() if key in keys}

    def _recall(self, text: str) -> None:
        """Takes up what an earlier run left; nothing of a file in another layout."""
        try:
            data = page.read(text)
        except ValueError:
            return
        if data.get("version") != VERSION:
            return
        self._logged = data["logged"]
        self._pictures = {key: page.to_json(uri) for key, uri in data["pictures"].items()}
        self._steps = {
            entry["step"]: [
                (page.to_json(group), tuple(group["pictures"])) for group in entry["groups"]
            ]
            for entry in data["steps"]
        }


def next_to_go(steps: Sequence[int]) -> int:
    """The step that is missed least: argmin of gap / age over all but the first and the newest.

    The gap is that between the steps beside it, its age that behind the newest; so the steps that
    stay are spread evenly over the logarithm of their age.

    Args:
        steps: ascending, two or more; of two the first goes.
    """
    if len(steps) == 2:
        return steps[0]
    newest = steps[-1]
    return min(
        zip(steps, steps[1:], steps[2:], strict=False),
        key=lambda three: ((three[2] - three[0]) / (newest - three[1]), three[1]),
    )[1]
