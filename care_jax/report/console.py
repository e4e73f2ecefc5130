"""What a run prints: lines, and on a terminal a progress bar below them."""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import jax
import tqdm

Item = TypeVar("Item")
_bars: list[tqdm.tqdm] = []  # those on the screen, the innermost last


class Pace:
    """Remaining time of a stage of `num_steps`, from the mean of its last 10 steps."""

    def __init__(self, num_steps: int):
        self._num_steps = num_steps
        self._ends: deque[tuple[int, float]] = deque(maxlen=11)

    def left(self, step: int) -> float | None:
        """Seconds left after this step; None after the first, which includes compilation."""
        self._ends.append((step, time.perf_counter()))
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        if last == first:
            return None
        return (ended - began) / (last - first) * (self._num_steps - 1 - step)


def format_line(
    stage: str,
    step: int,
    num_steps: int,
    metrics: Mapping[str, float],
    seconds: float,
    left: float | None = None,
) -> str:
    """One line for the console: `rl   12/200  reward 0.5132  acc 0.4375  3.21 s  0:10:03 left`.

    `seconds` is the wall time of the step, `left` the remaining time of the stage, if known.
    """
    width = len(str(num_steps))
    values = (
        f"{name} {100 * value:.3g}%" if name == "not judged" else f"{name} {value:.4g}"
        for name, value in metrics.items()
    )
    line = "  ".join((f"{stage} {step:{width}d}/{num_steps}", *values, f"{seconds:.2f} s"))
    return line if not left else f"{line}  {datetime.timedelta(seconds=round(left))} left"


def print_line(line: str) -> None:
    """Prints above the progress bar, on the first process only."""
    if jax.process_index() == 0:
        tqdm.tqdm.write(line)


def progress(items: Iterable[Item], name: str, start: int, stop: int) -> Iterator[Item]:
    """Yields the items under a progress bar, hidden if the output is no terminal."""
    with tqdm.tqdm(items, name, stop, leave=False, initial=start, disable=_is_hidden()) as bar:
        _bars.append(bar)
        try:
            yield from bar
        finally:
            _bars.remove(bar)


def show_part(part: str) -> None:
    """Shows behind the progress bar which part of the item is being worked on."""
    if _bars:
        _bars[-1].set_postfix_str(part)


def _is_hidden() -> bool | None:
    """For tqdm: None hides a bar unless it is drawn on a terminal."""
    return True if jax.process_index() else None
