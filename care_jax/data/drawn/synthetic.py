"""Charts and diagrams drawn on demand, with questions whose answers are computed.

An example is a pure function of (seed, split, index): nothing is stored, and access is random.
Pictures are grids of 16 x 16 pixel cells, so a backbone with 8-pixel patches and a 2 x 2 merge has
one token per cell. Diagrams show 1 to 6 copies of one shape in one colour; charts show bars of 1 to
4 units next to an axis with ticks.

The splits never share a (picture, question), whatever the seeds. Each candidate has a content key
(everything that determines its pixels and its question), and `crc32(key) % 8` assigns it to a
split. Candidates of the other split are rejected and redrawn.

The teacher that the cold start imitates can be made wrong on purpose. `teacher_error` is the
fraction of its answers that are off by two, for the kinds that compute (sums and differences),
among the rows without the repair cue. The sign depends only on the true answer (+2 up to 5, else
-2), so imitating the teacher teaches a systematic mistake, not just noise. All else stays right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image, ImageDraw

from care_jax.batch import Example
from care_jax.data.drawn import splits_and_repairs

CELL = 16  # pixels
UNIT = 12  # pixels per unit of a bar
MAX_HEIGHT = 4  # units of the tallest bar
MAX_COUNT = 6  # shapes in a diagram
_MAX_OPERAND = 3  # added to or subtracted from a count
COLOURS = {
    "red": (225, 30, 30),
    "green": (20, 160, 50),
    "blue": (30, 70, 230),
    "yellow": (245, 200, 0),
    "purple": (150, 40, 190),
}
SHAPES = ("circle", "square", "triangle")
DIAGRAM_KINDS = ("colour", "count", "sum", "difference")
CHART_KINDS = ("bar_value", "bar_tallest", "bar_sum", "bar_difference")
KINDS = DIAGRAM_KINDS + CHART_KINDS
CLEAN_KINDS = ("colour", "count", "bar_value", "bar_tallest")  # read, not computed

DIAGRAM_GRIDS = ((3, 3), (4, 3), (3, 4), (4, 4))  # columns, rows
_NUM_BARS = (2, 3)
_CHART_HEIGHT = 4 * CELL  # pixels
_BACKGROUND = (255, 255, 255)
_INK = (40, 40, 40)

# kind -> (question, rationale, a rationale with the wrong operation). `a` is the shape or bar asked
# about, `b` the other bar or the number. Rationales do not state the result; only the answer does.
_TEXTS = {
    "colour": ("What colour are the {a}s?", "Look at the {a}s.", "Count the {a}s."),
    "count": ("How many {a}s?", "Count the {a}s.", "Look at the {a}s."),
    "sum": ("How many {a}s with {b} more?", "Count the {a}s, add {b}.", "Count the {a}s."),
    "difference": (
        "How many {a}s with {b} fewer?",
        "Count the {a}s, subtract {b}.",
        "Count the {a}s, add {b}.",
    ),
    "bar_value": ("How high is the {a} bar?", "Read the {a} bar.", "Compare the bars."),
    "bar_tallest": ("Which bar is tallest?", "Compare the bars.", "Read the {a} bar."),
    "bar_sum": ("How high are {a} and {b} together?", "Add {a} and {b}.", "Read the {a} bar."),
    "bar_difference": (
        "How much higher is {a} than {b}?",
        "Subtract {b} from {a}.",
        "Add {a} and {b}.",
    ),
}


@dataclasses.dataclass(frozen=True)
class Diagram:
    """Copies of a shape in some of the cells; cells are numbered in row-major order."""

    columns: int
    rows: int
    shape: str
    colour: str
    cells: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Chart:
    """Bars from left to right as (colour, value in units)."""

    bars: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class SyntheticSource(Sequence[Example]):
    """A random-access sequence of drawn examples, whose answer is always right.

    "train" and "test" share no (picture, question), whatever the seeds; different seeds draw
    different examples of the same split. Shares are probabilities in [0, 1].
    """

    num_examples: int
    seed: int = 0
    split: str = "train"
    teacher_error: float = 0.0  # of non-repairs in kinds that compute: answers that are wrong
    cue_share: float = 0.0  # of rationales that are a wrong one, the cue, and a right one
    cue: str = " Wait, that is wrong."
    think_tag: str = "think"  # around the rationale

    def __post_init__(self):
        splits_and_repairs.check(self)

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> Example:
        rng = splits_and_repairs.rng_of(self, index)
        kind = KINDS[index % len(KINDS)]
        sample = _sample_chart if kind in CHART_KINDS else _sample_count
        while True:
            picture, names, answer = sample(rng, kind)
            question, rationale, wrong = (text.format(**names) for text in _TEXTS[kind])
            if split_of(picture, question) == self.split:
                break
        response_answer = answer
        if rng.random() < self.cue_share:
            rationale = "".join(splits_and_repairs.repair(wrong, self.cue, rationale))
        elif kind not in CLEAN_KINDS and rng.random() < self.teacher_error:
            response_answer = mistake(answer)
        tag = self.think_tag
        return Example(
            id=f"{self.split}-{self.seed}-{index}",
            source=f"synthetic/{kind}",
            images=(draw(picture),),
            question=f"<image>{question}",
            answer=answer,
            rationale=rationale,
            response=f"<{tag}>{rationale}</{tag}><answer>{response_answer}</answer>",
        )


def draw(picture: Diagram | _Chart) -> Image.Image:
    """Renders a picture as RGB, both sides multiples of `CELL` pixels."""
    return _draw_diagram(picture) if isinstance(picture, Diagram) else _draw_chart(picture)


def texts() -> Iterator[str]:
    """Every question, rationale and answer that can occur, to train a tokenizer on.

    Colours are repeated, so that the tokenizer learns a token for each.
    """
    for _ in range(50):
        yield from COLOURS
    for kind, templates in _TEXTS.items():
        is_chart = kind in CHART_KINDS
        for a in COLOURS if is_chart else SHAPES:
            for b in COLOURS if is_chart else range(1, _MAX_OPERAND + 1):
                yield from (text.format(a=a, b=b) for text in templates)
    yield from COLOURS
    yield from (str(number) for number in range(MAX_COUNT + _MAX_OPERAND + 1))


def split_of(picture: Diagram | _Chart, question: str) -> str:
    """ "train" or "test", the same whenever the picture and the question are drawn."""
    return splits_and_repairs.split_of(f"{dataclasses.astuple(picture)}{question}")


def mistake(answer: str) -> str:
    """The wrong answer that the teacher gives to a sum or a difference."""
    value = int(answer)
    return str(value + 2 if value <= 5 else value - 2)


def sample_diagram(
    rng: np.random.Generator, kind: str, numbers: tuple[int, int]
) -> tuple[Diagram, int]:
    """A diagram for a kind of question, and the number b, drawn from a half-open range."""
    columns, rows = DIAGRAM_GRIDS[rng.integers(len(DIAGRAM_GRIDS))]
    shape = SHAPES[rng.integers(len(SHAPES))]
    colour = list(COLOURS)[rng.integers(len(COLOURS))]
    b = int(rng.integers(*numbers))
    count = int(rng.integers(lowest_count(kind, b), MAX_COUNT + 1))
    cells = tuple(sorted(rng.permutation(columns * rows)[:count].tolist()))
    return Diagram(columns, rows, shape, colour, cells), b


def lowest_count(kind: str, b: int) -> int:
    """The minimum number of shapes for a kind of question."""
    return b if kind == "difference" else 1


def _sample_count(rng: np.random.Generator, kind: str) -> tuple[Diagram, dict[str, str], str]:
    diagram, b = sample_diagram(rng, kind, (1, _MAX_OPERAND + 1))
    count = len(diagram.cells)
    answers = {"count": count, "sum": count + b, "difference": count - b}
    answer = diagram.colour if kind == "colour" else str(answers[kind])
    return diagram, {"a": diagram.shape, "b": str(b)}, answer


def _sample_chart(rng: np.random.Generator, kind: str) -> tuple[_Chart, dict[str, str], str]:
    num_bars = _NUM_BARS[rng.integers(len(_NUM_BARS))]
    colours = [list(COLOURS)[i] for i in rng.permutation(len(COLOURS))[:num_bars]]
    values = rng.integers(1, MAX_HEIGHT + 1, num_bars)
    if kind == "bar_tallest":  # distinct values, so that exactly one bar is tallest
        values = rng.permutation(MAX_HEIGHT)[:num_bars] + 1
    a, b = rng.permutation(num_bars)[:2]
    if kind == "bar_difference" and values[a] < values[b]:
        a, b = b, a
    answer = {
        "bar_value": str(values[a]),
        "bar_tallest": colours[int(np.argmax(values))],
        "bar_sum": str(values[a] + values[b]),
        "bar_difference": str(values[a] - values[b]),
    }[kind]
    bars = tuple(zip(colours, values.tolist(), strict=True))
    return _Chart(bars), {"a": colours[a], "b": colours[b]}, answer


def _draw_diagram(diagram: Diagram) -> Image.Image:
    image = Image.new("RGB", (diagram.columns * CELL, diagram.rows * CELL), _BACKGROUND)
    pen = ImageDraw.Draw(image)
    fill = COLOURS[diagram.colour]
    for cell in diagram.cells:
        left, top = cell % diagram.columns * CELL + 2, cell // diagram.columns * CELL + 2
        right, bottom = left + CELL - 5, top + CELL - 5
        if diagram.shape == "circle":
            pen.ellipse((left, top, right, bottom), fill=fill)
        elif diagram.shape == "square":
            pen.rectangle((left, top, right, bottom), fill=fill)
        else:
            apex = ((left + right) // 2, top)
            pen.polygon((apex, (left, bottom), (right, bottom)), fill=fill)
    return image


def _draw_chart(chart: _Chart) -> Image.Image:
    width = (1 + len(chart.bars)) * CELL  # the first column holds the axis
    image = Image.new("RGB", (width, _CHART_HEIGHT), _BACKGROUND)
    pen = ImageDraw.Draw(image)
    base = _CHART_HEIGHT - UNIT
    pen.line((CELL - 3, base - MAX_HEIGHT * UNIT, CELL - 3, base), fill=_INK)
    pen.line((CELL - 3, base, width - 1, base), fill=_INK)
    for value in range(MAX_HEIGHT + 1):
        length = 7 if value % 5 == 0 else 4
        pen.line((CELL - 3 - length, base - value * UNIT, CELL - 3, base - value * UNIT), fill=_INK)
    for column, (colour, value) in enumerate(chart.bars, start=1):
        left = column * CELL + 2
        pen.rectangle((left, base - value * UNIT, left + CELL - 5, base - 1), fill=COLOURS[colour])
    return image
