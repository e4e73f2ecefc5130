"""Batches: a pure function of the step, prepared ahead, with too long prompts replaced."""

import dataclasses
import threading
import time

import pytest

from care_jax.data.pipeline import Batches
from care_jax.data.sources import open_source
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


def make(num_examples=10, batch_size=4, seed=0, too_long=()):
    items = [Item(i) for i in range(num_examples)]
    return Batches(items, Builder(too_long), batch_size=batch_size, seed=seed)


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


def test_another_seed_gives_another_order():
    assert ids(make(seed=0).batch(0)[0]) != ids(make(seed=1).batch(0)[0])


def test_batch_may_exceed_the_source():
    assert sorted(set(ids(make(num_examples=3, batch_size=8).batch(0)[0]))) == [0, 1, 2]


def test_rows_of_a_process_are_those_of_the_whole_batch():
    items, rows = [Item(i) for i in range(10)], (1, 3)
    own = Batches(items, Builder({2, 5}), batch_size=4, seed=0, rows=rows)
    whole = make(too_long={2, 5})
    for step in range(6):
        examples, tokenized = own.batch(step)
        assert ids(examples) == [ids(whole.batch(step)[0])[row] for row in rows]
        assert ids(examples) == [prompt.tokens[0] for prompt in tokenized]


def test_prompt_too_long_gives_its_place_to_the_next_pass_and_is_counted():
    batches = make(num_examples=10, batch_size=10, too_long={2})
    whole = make(num_examples=10, batch_size=10)
    planned, following = (ids(whole.batch(step)[0]) for step in (0, 1))
    place = planned.index(2)
    assert following[place] != 2
    expected = [*planned[:place], following[place], *planned[place + 1 :]]
    assert ids(batches.batch(0)[0]) == expected
    assert batches.left_out.total() == 1


def test_source_of_nothing_but_too_long_prompts_is_refused():
    with pytest.raises(
        ValueError, match="in a row cannot be used, 64 of them: prompt fits no bucket"
    ):
        make(too_long=range(10)).batch(0)


def test_records_belong_to_their_examples():
    for _, examples, tokenized in make().iterate(0, 3):
        assert ids(examples) == [prompt.tokens[0] for prompt in tokenized]


def test_error_of_the_background_thread_is_raised_in_the_loop():
    with pytest.raises(
        ValueError, match="in a row cannot be used, 64 of them: prompt fits no bucket"
    ):
        next(make(too_long=range(10)).iterate(0, 3))


def test_leaving_the_loop_ends_the_background_thread():
    before = threading.active_count()
    for step, _, _ in make().iterate(0, 1000):
        if step == 1:
            break
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_unknown_source_names_the_choices():
    with pytest.raises(
        ValueError, match=r"source must be one of synthetic, readings, .*, got 'csv'"
    ):
        open_source("csv")


def test_source_refuses_what_it_does_not_take():
    with pytest.raises(ValueError, match="takes no path"):
        open_source("synthetic", path="rows.jsonl", num_examples=3)
    with pytest.raises(ValueError, match="takes no teacher_error"):
        open_source("jsonl", path="rows.jsonl", teacher_error=0.5)


def test_jsonl_source_takes_the_first_examples(shared):
    path = str(shared / "data" / "mathvision_mini" / "testmini.jsonl")
    assert [e.id for e in open_source("jsonl", path=path, num_examples=3)] == ["4", "5", "6"]
    assert len(open_source("jsonl", path=path)) == 304


@pytest.mark.parametrize(("num_examples", "batch_size"), [(0, 4), (10, 0)])
def test_empty_source_or_batch_is_refused(num_examples, batch_size):
    with pytest.raises(ValueError, match=r"a source with examples|must be at least 1"):
        make(num_examples=num_examples, batch_size=batch_size)
