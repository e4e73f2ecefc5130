"""Every branch stands in one row, within the row's tokens and patches, and rows are well filled."""

import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from care_jax.learning.train_step import split_batch
from care_jax.packing.plan import fill_of, misfits, plan_rows
from care_jax.packing.trees import Part, TreeSizes


def make_sizes(*trees):
    """Of (prompt, patches, branches)."""
    prompt, patches, branches = zip(*trees, strict=True)
    return TreeSizes(np.array(prompt), np.array(patches), np.array(branches))


def plan(sizes, row_tokens=100, row_patches=64, microbatch_size=1, **kwargs):
    multiples = {"token_multiple": 10, "patch_multiple": 4, **kwargs}
    return plan_rows(
        sizes,
        row_tokens=row_tokens,
        row_patches=row_patches,
        microbatch_size=microbatch_size,
        **multiples,
    )


@st.composite
def some_sizes(draw):
    """Up to 12 trees of 3 branches, some absent; each fits a row of 100 tokens and 64 patches."""
    num = draw(st.integers(1, 12))
    whole = lambda low, high, n: draw(st.lists(st.integers(low, high), min_size=n, max_size=n))  # noqa: E731
    patches = 4 * np.array(whole(0, 16, num))
    branches = np.array(whole(0, 60, 3 * num)).reshape(num, 3)
    return TreeSizes(np.array(whole(1, 40, num)), patches, branches)


def assert_holds_all(sizes, plans):
    """Each branch of a length once, a prompt once in a row, no row too full."""
    seen = []
    for each in plans:
        for parts in each.rows:
            numbers = [part.tree for part in parts]
            assert len(set(numbers)) == len(numbers) and all(part.branches for part in parts)
            total = sum(
                sizes.prompt[part.tree] + sizes.branches[part.tree, list(part.branches)].sum()
                for part in parts
            )
            assert total <= each.row_tokens
            assert sizes.patches[numbers].sum() <= each.row_patches
            seen += [(part.tree, branch) for part in parts for branch in part.branches]
    assert sorted(seen) == [tuple(pair) for pair in np.argwhere(sizes.branches).tolist()]


# Narrower rows fill two microbatches where wider ones took three.
_NARROWER_IS_FEWER = TreeSizes(
    np.array([1, 1, 11]), np.array([32, 36, 0]), np.array([[1], [1], [40]])
)


@settings(deadline=None, max_examples=60)
@given(some_sizes(), st.sampled_from((1, 2, 4)))
@example(_NARROWER_IS_FEWER, 1)
def test_every_branch_stands_in_one_row_with_room_for_it(sizes, microbatch_size):
    found = plan(sizes, microbatch_size=microbatch_size)
    assert_holds_all(sizes, [found])
    is_used = np.array([bool(parts) for parts in found.rows])
    num_patches = [sum(sizes.patches[part.tree] for part in parts) for parts in found.rows]
    in_microbatch = split_batch((is_used, np.array(num_patches)), microbatch_size)
    assert in_microbatch[0].any(1).sum() == found.num_microbatches
    assert not in_microbatch[0][found.num_microbatches :].any()
    assert in_microbatch[1].max() <= found.row_patches
    num_rows = found.num_microbatches * microbatch_size
    assert found.computed_tokens == num_rows * found.row_tokens
    assert found.computed_patches == num_rows * found.row_patches
    assert all(0 <= fill <= 1 for fill in fill_of([found]).values())


@settings(deadline=None, max_examples=40)
@given(some_sizes(), st.integers(1, 3))
def test_processes_share_the_rows_of_one(sizes, seed):
    """The microbatches of both together are those of one process; so are the figures."""
    owner = np.random.default_rng(seed).integers(0, 2, len(sizes.prompt))
    kwargs = dict(microbatch_size=4, num_processes=2, owner=owner)
    plans = [plan(sizes, process=process, **kwargs) for process in range(2)]
    alone = plan(sizes, microbatch_size=4)
    assert_holds_all(sizes, plans)
    number = len(alone.rows) // 4
    for microbatch in range(number):
        rows = [row for found in plans for row in found.rows[microbatch::number]]
        assert sorted(map(repr, rows)) == sorted(map(repr, alone.rows[microbatch::number]))
    for found, other in ((found, other) for found in plans for other in (alone, plans[0])):
        for name in ("row_tokens", "row_patches", "num_microbatches"):
            assert getattr(found, name) == getattr(other, name)
        assert fill_of([found]) == fill_of([other])
        assert found.moved == plans[0].moved and not alone.moved
    needed = [{tree for tree in found.trees if owner[tree] != p} for p, found in enumerate(plans)]
    assert plans[0].moved == tuple(sorted(needed[0] | needed[1]))


def test_a_process_gets_the_rows_of_its_trees():
    """Rows of one tree, six of eight owned by process 1: two of them move, the smallest."""
    sizes = make_sizes(*((10, 4 * n, [85]) for n in (5, 1, 4, 3, 2, 6, 7, 8)))
    owner = np.array([1, 1, 1, 1, 1, 0, 0, 1])
    plans = [
        plan(sizes, microbatch_size=8, owner=owner, num_processes=2, process=p) for p in range(2)
    ]
    assert [found.trees for found in plans] == [[1, 4, 5, 6], [0, 2, 3, 7]]
    assert plans[0].moved == plans[1].moved == (1, 4)


@settings(deadline=None, max_examples=40)
@given(some_sizes(), st.randoms(use_true_random=False))
def test_permuting_prompts_changes_their_numbers_only(sizes, random):
    order = list(range(len(sizes.prompt)))
    random.shuffle(order)
    ours, theirs = (plan(s, microbatch_size=2) for s in (sizes, sizes.take(np.array(order))))

    def contents(found):
        def content(part):
            own = found.sizes
            branches = own.branches[part.tree, list(part.branches)].tolist()
            return own.prompt[part.tree], own.patches[part.tree], branches

        return [sorted(map(content, parts)) for parts in found.rows]

    assert contents(ours) == contents(theirs)
    assert (ours.row_tokens, ours.row_patches) == (theirs.row_tokens, theirs.row_patches)


def test_a_plan_is_the_same_every_time():
    rng = np.random.default_rng(0)
    sizes = TreeSizes(
        rng.integers(5, 40, 64), 4 * rng.integers(0, 16, 64), rng.integers(0, 60, (64, 9))
    )
    assert plan(sizes, microbatch_size=8).rows == plan(sizes, microbatch_size=8).rows


def test_the_fill_of_a_hand_example():
    """Trees of 50, 50 and 40 tokens in two rows of 100: both rows have an image of 8 patches where
    the tree without an image stands beside one that has one."""
    sizes = make_sizes((10, 8, [20, 20]), (20, 8, [30, 0]), (10, 0, [10, 20]))
    found = plan(sizes, row_patches=16, token_multiple=100)
    assert found.rows == ((Part(1, (0,)), Part(2, (0, 1))), (Part(0, (0, 1)),))
    assert (found.row_tokens, found.row_patches, found.num_microbatches) == (100, 8, 2)
    assert fill_of([found])["train_fill"] == pytest.approx(140 / 200)
    assert fill_of([found])["patch_fill"] == 1.0


def test_rows_have_the_patches_of_the_fullest():
    found = plan(make_sizes((10, 10, [90]), (10, 0, [90]), (10, 32, [90])))
    assert (found.row_patches, found.num_microbatches) == (32, 3)
    assert fill_of([found])["patch_fill"] == pytest.approx(42 / 96)


def test_a_tree_is_split_only_where_rows_get_fewer():
    fits = make_sizes((10, 0, [40, 40]), (10, 0, [40, 40]), (10, 0, [40, 40]))
    assert all(len(parts) <= 1 for parts in plan(fits).rows)
    # Three whole trees of 70 take three rows of 100, or two if one of them is split.
    long = plan(make_sizes((10, 4, [30, 30]), (10, 4, [30, 30]), (10, 4, [30, 30])), row_tokens=110)
    assert long.num_microbatches == 2 and long.row_tokens == 110
    assert [sum(part.tree == tree for row in long.rows for part in row) for tree in range(3)] in (
        [2, 1, 1],
        [1, 2, 1],
        [1, 1, 2],
    )
    assert (long.real_tokens, long.computed_tokens) == (210, 220)
    assert (long.real_patches, long.computed_patches) == (12, 16)


def test_a_tree_longer_than_a_row_is_split():
    found = plan(make_sizes((10, 8, [60, 70, 20])))
    assert sorted(part.branches for row in found.rows for part in row) == [(0, 2), (1,)]
    assert found.row_tokens == 90


def test_rows_that_run_together_have_like_numbers_of_pairs():
    """Prompts that share a row of 100: 1 to 10 responses see them."""
    sizes = make_sizes(*((10, 0, [90 // n] * n + [0] * (10 - n)) for n in (1, 9, 2, 10)))
    found = plan(sizes, microbatch_size=2, row_tokens=100)
    numbers = np.array([len(parts[0].branches) for parts in found.rows])
    assert [sorted(each) for each in split_batch(numbers, 2).tolist()] == [[1, 2], [9, 10]]


def test_images_are_spread_over_rows_that_run_together():
    """Ten small images and ten texts for two rows: five of each in both."""
    found = plan(make_sizes(*[(5, 8, [5])] * 10, *[(5, 0, [5])] * 10), microbatch_size=2)
    assert (found.num_microbatches, found.row_patches) == (1, 40)
    assert fill_of([found]) == {"train_fill": 1.0, "patch_fill": 1.0}


def test_of_rows_with_like_patches_those_with_most_visible_pairs_run_together():
    branches = [90, 0, 0], [30, 30, 30], [80, 10, 0], [40, 30, 20]
    found = plan(make_sizes(*((10, 0, own) for own in branches)), microbatch_size=2)
    trees = np.array([parts[0].tree for parts in found.rows])
    assert split_batch(trees, 2).tolist() == [[0, 2], [3, 1]]


def test_visible_pairs_are_those_with_the_prompt_too():
    """Two branches of 20 behind a prompt of 60 see more than ones of 60 and 30 behind one of 10."""
    sizes = make_sizes(
        (10, 0, [90, 0, 0]), (60, 0, [20, 20, 0]), (10, 0, [60, 30, 0]), (10, 0, [30] * 3)
    )
    found = plan(sizes, microbatch_size=2)
    trees = np.array([parts[0].tree for parts in found.rows])
    assert [sorted(each) for each in split_batch(trees, 2).tolist()] == [[0, 1], [2, 3]]


def test_rows_of_one_microbatch_are_as_short_as_their_trees():
    """Four trees of 40 for four shards: rows of 40, not one full row and three empty ones."""
    found = plan(make_sizes(*[(10, 0, [30])] * 4), microbatch_size=4)
    assert found.row_tokens == 40 and fill_of([found])["train_fill"] == 1.0


def test_rows_whose_patches_fill_them_are_as_short_as_their_tokens():
    """No two of these images stand in one row, however short the rows are."""
    found = plan(make_sizes(*[(10, 40, [10])] * 4))
    assert (found.row_tokens, found.num_microbatches) == (20, 4)


def test_a_row_is_filled_by_the_two_trees_that_fill_it():
    found = plan(make_sizes(*((5, 0, [n - 5]) for n in (50, 30, 20, 45, 35, 20))))
    assert fill_of([found])["train_fill"] == 1.0 and found.num_microbatches == 2


def test_nothing_to_learn_from_takes_no_place():
    found = plan(make_sizes((10, 8, [0, 0]), (10, 4, [0, 5])))
    assert [part for row in found.rows for part in row] == [Part(1, (1,))]
    assert found.trees == [1] and found.real_tokens == 15 and found.real_patches == 4
    empty = plan(make_sizes((10, 8, [0, 0])), microbatch_size=2)
    assert empty.rows == ((), ()) and empty.num_microbatches == 0 and empty.row_patches == 0
    assert fill_of([empty]) == {}


def test_arrays_come_in_few_sizes():
    """Each is a program to compile: sixteenths of the tokens, quarters of the patches, and numbers
    of rows that are powers of two."""
    rng = np.random.default_rng(0)
    plans = []
    for number in range(1, 60):
        prompt, patches = rng.integers(10, 40, number), 4 * rng.integers(0, 16, number)
        sizes = TreeSizes(prompt, patches, rng.integers(0, 60, (number, 3)))
        plans.append(plan_rows(sizes, row_tokens=512, row_patches=128, microbatch_size=2))
    assert {len(found.rows) for found in plans} == {2, 4, 8, 16, 32}
    assert {found.row_tokens % 32 for found in plans} == {0}
    assert {found.row_patches for found in plans} <= {0, 32, 64, 96, 128}


def test_what_fits_no_row_is_named_with_the_keys_to_change():
    sizes = make_sizes((10, 0, [91, 5]), (10, 68, [5, 5]), (10, 64, [90, 90]), (200, 99, [0, 0]))
    unfit = misfits(sizes, row_tokens=100, row_patches=64, section="sft")
    assert set(unfit) == {0, 1}
    assert "101 tokens and 0 patches, but a row has 100 and 64; raise sft.row_tokens" in unfit[0]
    assert "sft.row_patches" in unfit[1]
    with pytest.raises(ValueError, match=r"2 of 4 trees fit no row; 0: .*rl\.row_tokens"):
        plan(sizes)
    with pytest.raises(ValueError, match="3 must be a positive multiple of 2 processes"):
        plan(sizes, microbatch_size=3, num_processes=2)


def test_an_update_of_512_prompts_is_planned_at_once():
    rng = np.random.default_rng(0)
    sizes = TreeSizes(
        rng.integers(300, 1500, 512),
        4 * rng.integers(300, 1280, 512),
        np.clip(rng.lognormal(6.2, 0.8, (512, 9)), 8, 2048).astype(int),
    )
    began = time.process_time()
    found = plan_rows(sizes, row_tokens=8192, row_patches=8192, microbatch_size=64)
    assert time.process_time() - began < 5  # a fraction of a second on an idle core
    assert fill_of([found])["train_fill"] > 0.85


@settings(max_examples=50, deadline=None)
@given(some_sizes(), st.integers(1, 5))
def test_rows_have_at_most_as_many_lengths_as_are_given(sizes, row_lengths):
    """Every length is a program to compile."""
    found = plan(sizes, row_tokens=160, token_multiple=None, row_lengths=row_lengths)
    unit = max(-(-160 // row_lengths), 32)
    assert found.row_tokens in (*range(unit, 160, unit), 160)
    assert len((*range(unit, 160, unit), 160)) <= row_lengths
