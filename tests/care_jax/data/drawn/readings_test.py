"""Drawn figures whose rationale states its reading: what is right, and which mistakes are drawn."""

import re
from collections import Counter

import numpy as np
import pytest

from care_jax.data.drawn.readings import KINDS, MISCOMPUTED, MISREAD, ReadingsSource
from care_jax.data.drawn.synthetic import CELL
from care_jax.data.sources import open_source

RESPONSE = re.compile(r"<think>(.+)</think><answer>(.+)</answer>")
READING = re.compile(
    r"There are (\d)|number of \w+ is (\d)|picture there are (\d)|each of them\. I have (\d)"
)
CUE = " Wait, that is wrong."


def parts_of(example):
    """(kind, reading, number in the question, rationale, answer) of the response."""
    rationale, answer = RESPONSE.fullmatch(example.response).groups()
    stated = [int(next(filter(None, found))) for found in READING.findall(rationale)]
    number = next(map(int, re.findall(r"\d", example.question)), None)
    return example.source.removeprefix("readings/"), stated, number, rationale, int(answer)


def drawn(example):
    """Shapes in the picture, from its pixels."""
    pixels = np.asarray(example.images[0])
    rows, columns = pixels.shape[0] // CELL, pixels.shape[1] // CELL
    cells = (pixels != 255).any(-1).reshape(rows, CELL, columns, CELL).any((1, 3))
    return int(cells.sum())


def computed(kind, reading, number):
    return {
        "sum": lambda: reading + number,
        "difference": lambda: reading - number,
        "missing": lambda: number - reading,
        "twice": lambda: 2 * reading,
    }[kind]()


def test_a_right_teacher_states_what_is_drawn_and_answers_from_it():
    source = ReadingsSource(400)
    for i in range(len(source)):
        kind, (reading,), number, rationale, answer = parts_of(source[i])
        assert kind == KINDS[i % 4]
        assert reading == drawn(source[i]), source[i].question
        assert answer == computed(kind, reading, number) == int(source[i].answer)
        assert rationale == source[i].rationale


def test_each_half_of_the_kinds_has_one_mistake():
    """Misread: the answer follows from the wrong reading. Miscomputed: the reading is right."""
    source = ReadingsSource(2000, misread_share=0.75, teacher_error=0.3)
    misread, miscomputed = [], []
    for i in range(len(source)):
        kind, (reading,), number, _, answer = parts_of(source[i])
        is_misread = reading != drawn(source[i])
        is_computed = answer == computed(kind, reading, number)
        if kind in MISREAD:
            assert is_computed and abs(reading - drawn(source[i])) <= 1
            misread.append(is_misread)
        else:
            assert not is_misread and kind in MISCOMPUTED
            miscomputed.append(not is_computed)
        assert source[i].answer == str(computed(kind, drawn(source[i]), number))
        assert [int(next(filter(None, x))) for x in READING.findall(source[i].rationale)] == [
            drawn(source[i])
        ]
    assert np.mean(misread) == pytest.approx(0.75, abs=0.04)
    assert np.mean(miscomputed) == pytest.approx(0.3, abs=0.04)


def test_every_kind_may_have_both_mistakes_and_some_responses_are_lucky():
    shares = {"misread_share": 0.3, "teacher_error": 0.5, "lucky_share": 0.2}
    source = ReadingsSource(3000, mixed_errors=True, **shares)
    counts, lengths = Counter(), {True: [], False: []}
    for i in range(len(source)):
        kind, (reading,), number, rationale, answer = parts_of(source[i])
        is_misread = reading != drawn(source[i])
        is_right = answer == int(source[i].answer)
        assert is_right or not is_misread or answer == computed(kind, reading, number)
        counts[kind, is_misread, is_right] += 1
        lengths[is_misread and is_right].append(len(rationale))
    for kind in KINDS:
        total = sum(count for key, count in counts.items() if key[0] == kind)
        shares = [counts[kind, *key] / total for key in ((1, 1), (1, 0), (0, 0), (0, 1))]
        assert shares == pytest.approx([0.2, 0.8 * 0.3, 0.8 * 0.7 * 0.5, 0.8 * 0.7 * 0.5], abs=0.05)
    assert np.mean(lengths[True]) > np.mean(lengths[False]) + 20


def test_repairs_begin_with_a_wrong_reading_mostly_and_end_right():
    source = ReadingsSource(1500, misread_share=0.75, teacher_error=0.3, cue_share=0.4, cue=CUE)
    first_is_right, kinds = [], set()
    for i in range(len(source)):
        kind, stated, _, rationale, answer = parts_of(source[i])
        if CUE not in rationale:
            continue
        kinds.add(kind)
        _, after = rationale.split(CUE)
        assert after == " " + source[i].rationale and answer == int(source[i].answer)
        assert stated[1] == drawn(source[i])
        first_is_right.append(stated[0] == stated[1])
    assert len(first_is_right) / 1500 == pytest.approx(0.4, abs=0.04)
    assert np.mean(first_is_right) == pytest.approx(0.15, abs=0.04)
    assert kinds == set(KINDS)


def test_splits_share_no_question_about_a_picture():
    seen = {}
    for split in ("train", "test"):
        source = ReadingsSource(3000, split=split, seed=len(seen))
        seen[split] = {
            (example.question, example.images[0].tobytes())
            for example in (source[i] for i in range(len(source)))
        }
    assert not seen["train"] & seen["test"]


def test_it_is_a_source_by_name_and_asks_the_kinds_in_turn():
    sources = [example.source for example in open_source("readings", num_examples=8)]
    assert sources == [f"readings/{kind}" for kind in KINDS] * 2


def test_wordings_and_orders_vary():
    source = ReadingsSource(400)
    forms = {re.sub(r"\d|circle|square|triangle", "", source[i].rationale) for i in range(400)}
    assert len(forms) > 60
