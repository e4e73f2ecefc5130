"""Drawn charts and diagrams: right answers, a teacher wrong as often as asked, disjoint splits."""

import re

import numpy as np
import pytest

from care_jax.data.drawn.synthetic import (
    CELL,
    CHART_KINDS,
    CLEAN_KINDS,
    COLOURS,
    DIAGRAM_KINDS,
    KINDS,
    UNIT,
    SyntheticSource,
)

RESPONSE = re.compile(r"<think>(.+)</think><answer>(.+)</answer>")


def taught(example):
    return RESPONSE.fullmatch(example.response)[2]


def kind_of(example):
    return example.source.removeprefix("synthetic/")


def examples_of(kinds, num_examples):
    """Those among `num_examples` that are of these kinds."""
    return [each for each in SyntheticSource(num_examples) if kind_of(each) in kinds]


def colour_counts(image, kind):
    """From the pixels alone: cells of each colour in a diagram, units of each bar in a chart."""
    pixels = np.asarray(image)
    counts = {}
    for name, colour in COLOURS.items():
        is_colour = (pixels == colour).all(-1)
        if kind.startswith("bar"):
            counts[name] = int(is_colour.any(1).sum()) // UNIT
        else:
            rows, columns = pixels.shape[0] // CELL, pixels.shape[1] // CELL
            cells = is_colour.reshape(rows, CELL, columns, CELL).any((1, 3))
            counts[name] = int(cells.sum())
    return {name: count for name, count in counts.items() if count}


def test_answers_of_charts_are_what_the_pixels_show():
    for example in examples_of(CHART_KINDS, 800):
        kind = kind_of(example)
        heights = colour_counts(example.images[0], kind)
        asked = [word for word in re.findall(r"\w+", example.question) if word in COLOURS]
        values = [heights[colour] for colour in asked]
        expected = {
            "bar_value": str(sum(values)),
            "bar_tallest": max(heights, key=heights.get),
            "bar_sum": str(sum(values)),
            "bar_difference": str(values[0] - sum(values[1:])) if values else "",
        }[kind]
        assert example.answer == expected, (example.id, example.question)


def test_answers_of_diagrams_are_what_the_pixels_show():
    for example in examples_of(DIAGRAM_KINDS, 600):
        ((colour, count),) = colour_counts(example.images[0], "count").items()
        operand = sum(map(int, re.findall(r"\d", example.question)))
        expected = {
            "colour": colour,
            "count": str(count),
            "sum": str(count + operand),
            "difference": str(count - operand),
        }[kind_of(example)]
        assert example.answer == expected, (example.id, example.question)


def test_shape_that_is_asked_about_is_drawn():
    """A square fills all corners of its box, a triangle the lower two, a circle none."""
    for example in examples_of(("count",), 480):
        pixels = np.asarray(example.images[0])
        is_ink = (pixels != 255).any(-1)
        is_upper, is_lower = is_ink[2::CELL, 2::CELL].any(), is_ink[13::CELL, 2::CELL].any()
        shape = {(True, True): "square", (False, True): "triangle", (False, False): "circle"}
        assert f"{shape[bool(is_upper), bool(is_lower)]}s" in example.question


def test_teacher_is_wrong_by_two_as_often_as_asked_and_never_on_clean_kinds():
    source = SyntheticSource(2000, teacher_error=0.65)
    wrong = []
    for i in range(len(source)):
        example = source[i]
        if kind_of(example) in CLEAN_KINDS:
            assert taught(example) == example.answer
            continue
        miss = int(taught(example)) - int(example.answer)
        assert miss in (0, 2 if int(example.answer) <= 5 else -2)
        wrong.append(miss != 0)
    assert np.mean(wrong) == pytest.approx(0.65, abs=0.04)


def test_teacher_error_changes_no_picture_question_or_gold_answer():
    clean, flawed = SyntheticSource(80), SyntheticSource(80, teacher_error=1.0, cue_share=0.3)
    for i in range(80):
        assert (clean[i].question, clean[i].answer) == (flawed[i].question, flawed[i].answer)
        assert clean[i].images[0].tobytes() == flawed[i].images[0].tobytes()


def test_cue_stands_between_a_wrong_and_the_right_rationale_and_the_answer_is_right():
    cue = " Stop, look again."
    with_cue = SyntheticSource(2000, teacher_error=1.0, cue_share=0.1, cue=cue)
    without = SyntheticSource(2000)
    num_cues = 0
    for i in range(len(with_cue)):
        example = with_cue[i]
        if cue not in example.response:
            continue
        before, after = example.rationale.split(cue)
        assert after == f" {without[i].rationale}"
        assert before != without[i].rationale
        assert taught(example) == example.answer
        num_cues += 1
    assert num_cues / 2000 == pytest.approx(0.1, abs=0.025)


def test_train_and_test_share_no_picture_with_its_question():
    def contents(num_examples, **options):
        source = SyntheticSource(num_examples, **options)
        return {
            (e.images[0].size, e.images[0].tobytes(), e.question)
            for e in (source[i] for i in range(len(source)))
        }

    train = contents(6000, seed=0, split="train")
    assert len(train) > 5000
    assert not train & contents(1000, seed=0, split="test")
    assert not train & contents(1000, seed=1, split="test")


def test_kinds_come_in_turn_and_pictures_are_made_of_cells():
    source = SyntheticSource(4 * len(KINDS))
    examples = [source[i] for i in range(len(source))]
    assert [kind_of(e) for e in examples] == 4 * list(KINDS)
    sizes = {e.images[0].size for e in examples}
    assert len(sizes) > 2
    assert all(side % CELL == 0 and 48 <= side <= 96 for size in sizes for side in size)
    assert {e.answer for e in examples} <= {*COLOURS, *map(str, range(10))}
