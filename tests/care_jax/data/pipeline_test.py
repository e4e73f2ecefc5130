"""Batches: a pure function of the step, prepared ahead, with too long prompts replaced."""

import dataclasses
import threading
import time

import pytest

from care_jax.data.pipeline import Batches
from care_jax.prompts.builder import TokenizedPrompt


@dataclasses.dataclass
class Item:
    id: int
    source: str = "made"


class Builder:
    """Stands in for PromptBuilder: prompts whose id is in `too_long` fit no bucket."""

    buckets = ((1, 1),)

    def __init__(self, too_long=()):
        self.too_long = too_long

    def tokenize(self, item):
        return TokenizedPrompt(tokens=[item.id], grids=[], patches=[])

    def fits(self, prompt):
        return prompt.tokens[0] not in self.too_long


def make(num_examples=10, batch_size=4, seed=0, too_long=(), **options):
    items = [Item(i) for i in range(num_examples)]
    return Batches(items, Builder(too_long), batch_size=batch_size, seed=seed, **options)


def ids(examples):
    return [example.id for example in examples]


def test_step_alone_decides_the_batch():
    one, other = make(), make()
    in_order = [ids(one.batch(step)[0]) for step in range(12)]
    backwards = [ids(other.batch(step)[0]) for step in reversed(range(12))][::-1]
    assert in_order == backwards
    resumed = [(step, ids(examples)) for step, examples, _ in make().iterate(5, 12)]
    assert resumed == list(enumerate(in_order))[5:]


def test_each_pass_holds_every_example_once_in_a_new_order():
    batches = make(batch_size=5)
    passes = [ids(batches.batch(2 * k)[0]) + ids(batches.batch(2 * k + 1)[0]) for k in range(3)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert len({tuple(one) for one in passes}) == 3
    assert ids(make(batch_size=5, seed=1).batch(0)[0]) != passes[0][:5]


def test_batch_may_exceed_the_source():
    assert sorted(set(ids(make(num_examples=3, batch_size=8).batch(0)[0]))) == [0, 1, 2]


def test_rows_of_a_process_are_those_of_the_whole_batch():
    rows = (1, 3)
    own, whole = make(too_long={2, 5}, rows=rows), make(too_long={2, 5})
    for step in range(6):
        examples, tokenized = own.batch(step)
        assert ids(examples) == [ids(whole.batch(step)[0])[row] for row in rows]
        assert ids(examples) == [prompt.tokens[0] for prompt in tokenized]


def test_prompt_too_long_gives_its_place_to_the_next_pass_and_is_counted():
    batches = make(num_examples=10, batch_size=10, too_long={2})
    whole = make(num_examples=10, batch_size=10)
    planned, following = (ids(whole.batch(step)[0]) for step in (0, 1))
    index = planned.index(2)
    assert following[index] != 2
    expected = [*planned[:index], following[index], *planned[index + 1 :]]
    assert ids(batches.batch(0)[0]) == expected
    assert batches.left_out.total() == 1


def test_leaving_the_loop_ends_the_background_thread():
    before = threading.active_count()
    for step, _, _ in make().iterate(0, 1000):
        if step == 1:
            break
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


REFUSED = {
    "no examples": (lambda: make(num_examples=0), "a source with examples, got an empty one"),
    "empty batch": (lambda: make(batch_size=0), "must be at least 1, got 0, 1"),
    "no workers": (lambda: make(num_workers=0), "must be at least 1, got 4, 0"),
    "nothing fits": (lambda: make(too_long=range(10)).batch(0), "64 of them: prompt fits no"),
    "in a thread": (lambda: next(make(too_long=range(10)).iterate(0, 3)), r"1\),\); enlarge data"),
}


@pytest.mark.parametrize(("prepare", "message"), REFUSED.values(), ids=REFUSED)
def test_what_gives_no_batch_is_refused(prepare, message):
    with pytest.raises(ValueError, match=message):
        prepare()
