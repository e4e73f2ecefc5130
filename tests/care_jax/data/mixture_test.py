"""Mixtures: shares by weight, each source's own order, the same on any number of processes."""

import itertools
from collections import Counter

import pytest

from care_jax.batch import Example, Unusable
from care_jax.data.mixture import Mixture
from care_jax.data.pipeline import Batches
from care_jax.data.rows import Rows
from care_jax.prompts.builder import TokenizedPrompt

BATCH = 20


class Builder:
    """Stands in for PromptBuilder: everything fits."""

    buckets = ((1, 1),)

    def tokenize(self, example):
        if "cut" in example.id:
            raise Unusable("image unreadable or truncated")
        return TokenizedPrompt(tokens=[example.id], grids=[], patches=[])

    def fits(self, prompt):
        return True


def source(name, count, bad=(), cut=()):
    def read(index):
        if index in bad:
            raise Unusable("no answer")
        return Example(f"{name}{index}{'cut' * (index in cut)}", name, (), "?", "1")

    return Rows(count, read)


def mixture(weights=(1.0, 3.0), **bad):
    return Mixture([source("a", 10), source("b", 7, **bad)], weights)


def drawn(examples, steps, **options):
    batches = Batches(examples, Builder(), batch_size=BATCH, seed=3, **options)
    return [[example.id for example in batches.batch(step)[0]] for step in steps]


def test_every_batch_has_the_shares_of_the_weights():
    for ids in drawn(mixture(), range(12)):
        assert Counter(id[0] for id in ids) == {"a": 5, "b": 15}
    lengths = Counter(id[0] for ids in drawn(mixture((0, 0)), range(17)) for id in ids)
    assert abs(lengths["a"] - 340 * 10 / 17) <= 2  # by their lengths, a pass of both at a time


def test_each_source_is_gone_through_before_it_repeats():
    flat = list(itertools.chain(*drawn(mixture(), range(14))))
    for name, count in (("a", 10), ("b", 7)):
        own = [id for id in flat if id[0] == name]
        passes = [own[i : i + count] for i in range(0, len(own) - count, count)]
        assert all(len(set(one)) == count for one in passes)
        assert len({tuple(one) for one in passes}) == len(passes)


def test_step_alone_decides_the_batch_with_any_processes_and_workers():
    whole = drawn(mixture(), range(6))
    assert drawn(mixture(), range(6), num_workers=4) == whole
    for num_processes in (2, 4, 5):
        parts = [
            drawn(mixture(), [4], rows=range(rank, BATCH, num_processes), num_workers=2)[0]
            for rank in range(num_processes)
        ]
        joined = [parts[row % num_processes][row // num_processes] for row in range(BATCH)]
        assert joined == whole[4]


def test_unusable_row_gives_its_place_to_its_own_source_and_is_counted_by_reason():
    clean = list(itertools.chain(*drawn(mixture(), range(3))))
    examples = mixture(bad={2}, cut={5})
    counts = Counter()
    batches = Batches(examples, Builder(), batch_size=BATCH, seed=3, num_workers=3, left_out=counts)
    mended = [example.id for step in range(3) for example in batches.batch(step)[0]]
    replaced = [(one, other) for one, other in zip(clean, mended, strict=True) if one != other]
    assert {one for one, _ in replaced} == {"b2", "b5"}
    assert all(other[0] == "b" and other not in ("b2", "b5") for _, other in replaced)
    assert set(counts) == {"no answer", "image unreadable or truncated"}
    assert batches.left_out is counts and counts.total() >= len(replaced)


def test_sources_stand_one_after_another():
    examples = mixture()
    assert len(examples) == 17
    assert [examples[i].id for i in (0, 9, 10, 16)] == ["a0", "a9", "b0", "b6"]


REFUSED = {
    "weight 0 beside others": (lambda: mixture((1.0, 0.0)), "above 0 for every .* got .1.0, 0.0"),
    "negative weight": (lambda: mixture((-1.0, -1.0)), r"or 0 for all of them, got \[-1.0, -1.0\]"),
    "empty part": (
        lambda: Mixture([source("b", 0)], (1,)),
        r"non-empty sources, got lengths \[0\]",
    ),
    "no part": (lambda: Mixture([], ()), r"non-empty sources, got lengths \[\]"),
    "index": (lambda: mixture()[17], r"index 17 is outside 0\.\.16"),
    "unusable rows": (
        lambda: drawn(mixture(bad=range(7)), [0]),
        "64 of them: no answer; check the",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_parts_are_refused(make, message):
    with pytest.raises((ValueError, IndexError), match=message):
        make()
