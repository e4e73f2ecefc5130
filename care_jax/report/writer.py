"""Maintains workdir/report.html: written atomically, read back by a resumed run.

The file is the only state. A resumed run reads it once and drops the steps that it will repeat.
Every write replaces the whole file.

The file size is bounded. To stay within it, steps are dropped from the inspector, older ones more
often than recent ones, and the page says so. Curves are thinned separately.
"""

from __future__ import annotations

import hashlib
import pathlib
import time
from collections.abc import Sequence

import jax

from care_jax.devices.whole_file import write_whole
from care_jax.report import curves, groups, page, pictures
from care_jax.report.groups import Sampled, Wording
from care_jax.report.metrics import ShownGroup, print_line

VERSION = 1  # of the data layout; a file with another version is not read
_MAX_POINTS = 600  # per curve, more than a screen resolves


class Report:
    """The report of one run; only process 0 writes it.

    Args:
        workdir: folder of metrics.jsonl and of the report.
        max_megabytes: maximum size of the file, MiB.
        groups_per_step: prompts shown per step.
        max_side: pixels of a picture's longer side.
        wording: how tokens become text; None if `add` is never called.
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
        # Per step, (group as JSON, keys of its pictures); serialised once.
        self._steps: dict[int, list[tuple[str, tuple[str, ...]]]] = {}
        self._pictures: dict[str, str] = {}
        if self._is_writer and self.path.exists():
            self._recall(self.path.read_text(encoding="utf-8", errors="replace"))

    def begin(self, start_step: int) -> None:
        """Drops the steps that the run will repeat."""
        self._logged = [step for step in self._logged if step < start_step]
        self._steps = {step: shown for step, shown in self._steps.items() if step < start_step}

    def add(self, step: int, sampled: Sampled) -> list[ShownGroup]:
        """Adds a sample of a step's groups and writes the file; returns that sample."""
        if not self._is_writer:
            return []
        outcomes = [groups.outcome(sampled, index) for index in range(len(sampled.examples))]
        chosen = groups.choose(outcomes, self._groups_per_step, turn=len(self._logged))
        self._logged.append(step)
        self._steps[step] = [self._group(sampled, index) for index in chosen]
        self.write()
        return [self._shown(sampled, index) for index in chosen]

    def write(self) -> None:
        """Replaces the file atomically."""
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
        write_whole(self.path, page.render(self._data(head, self._steps)))

    def _group(self, sampled: Sampled, index: int) -> tuple[str, tuple[str, ...]]:
        assert self._wording is not None  # required by `add`
        example, keys = sampled.examples[index], []
        for order, image in enumerate(example.images):
            uri = pictures.data_uri(image, max_side=self._max_side)
            keys.append(self._keep_picture(f"{example.source}/{example.id}/{order}", uri))
        group = groups.describe(sampled, index, self._wording) | {"pictures": keys}
        return page.to_json(group), tuple(keys)

    def _keep_picture(self, key: str, uri: str) -> str:
        """Stores a picture; returns its key, which differs from `key` if that has another one.

        Ids of a source may repeat, though they should not. A picture that can no longer be read
        is shown as it was.
        """
        picture = page.to_json(uri)
        if uri and self._pictures.get(key, picture) != picture:
            key += f"/{hashlib.sha256(uri.encode()).hexdigest()[:8]}"
        self._pictures.setdefault(key, picture)
        return key

    def _shown(self, sampled: Sampled, index: int) -> ShownGroup:
        assert self._wording is not None  # required by `add`
        example, group = sampled.examples[index], groups.describe(sampled, index, self._wording)
        image = None
        if example.images:
            image = pictures.thumbnail(example.images[0], max_side=self._max_side)
        return ShownGroup(
            name=f"{example.source} {example.id}",
            question=example.question,
            gold=group["gold"],
            image=image,
            responses=[groups.columns(response) for response in group["responses"]],
        )

    def _data(self, head: str, steps: dict[int, list[tuple[str, tuple[str, ...]]]]) -> str:
        shown = (
            f'{{"step":{step},"groups":[{",".join(group for group, _ in entries)}]}}'
            for step, entries in sorted(steps.items())
        )
        keys = {key for entries in steps.values() for _, keys in entries for key in keys}
        stored = (f"{page.to_json(key)}:{self._pictures[key]}" for key in sorted(keys))
        return f'{head[:-1]},"steps":[{",".join(shown)}],"pictures":{{{",".join(stored)}}}}}'

    def _thin(self, max_bytes: int) -> None:
        """Drops steps, then groups of the last one, until the rest fits; then unused pictures."""
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
        """Restores the state of an earlier run; ignores a file with another layout version."""
        try:
            data = page.read(text)
            if data.get("version") != VERSION:
                return
            stored = {key: page.to_json(uri) for key, uri in data["pictures"].items()}
            steps = {
                int(entry["step"]): [
                    (page.to_json(group), tuple(group["pictures"])) for group in entry["groups"]
                ]
                for entry in data["steps"]
            }
            logged = [int(step) for step in data["logged"]]
            keys = {key for shown in steps.values() for _, keys in shown for key in keys}
            if lost := keys - stored.keys():
                raise KeyError(min(lost))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            print_line(f"{self.path} is damaged ({error!r}); it begins anew with the next step")
            return
        self._logged, self._pictures, self._steps = logged, stored, steps


def next_to_go(steps: Sequence[int]) -> int:
    """The step to drop next: argmin of gap / age over all but the first and the newest.

    gap is the distance between the two neighbours of a step, age its distance to the newest step.
    The remaining steps are then spread evenly in log(age).

    Args:
        steps: ascending, two or more; of two, the first is dropped.
    """
    if len(steps) == 2:
        return steps[0]
    newest = steps[-1]
    return min(
        zip(steps, steps[1:], steps[2:], strict=False),
        key=lambda three: ((three[2] - three[0]) / (newest - three[1]), three[1]),
    )[1]
