"""A row of trees says of every token what an unpacked row would: mask, position, predictor, image.

Mutations that must fail here: reach of a prompt token one short or long; a response that sees its
sibling; positions or image features counted on from the tree before; a first token predicted by its
sibling's last; a split tree without its image; `at_tokens` and `take_back` by row instead of
branch.
"""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import take_back

from care_jax.packing.layout import at_rows, at_tokens, lay_out
from care_jax.packing.plan import plan_rows
from care_jax.packing.trees import TreeSizes
from care_jax.prompts.builder import TokenizedPrompt
from models.positions import feature_indices, pack_images, prompt_positions

T = 20


@pytest.fixture(scope="module")
def tokenized(policy, examples):
    """One image, another size, two images, none."""
    return [policy.prompts.tokenize(example) for example in examples]


def sizes_of(tokenized, lengths):
    tokens, patches = ([len(getattr(r, name)) for r in tokenized] for name in ("tokens", "patches"))
    return TreeSizes(np.array(tokens), np.array(patches), np.array(lengths))


def responses_of(lengths):
    """Token b·100 + t of the b-th branch of all, padded with -7."""
    lengths = np.array(lengths)
    number = np.arange(lengths.size).reshape(*lengths.shape, 1)
    tokens = 100 * number + np.arange(T)
    return np.where(np.arange(T) < lengths[..., None], tokens, -7).astype(np.int32)


def laid_out(policy, tokenized, lengths, **kwargs):
    shape = {"row_tokens": 128, "row_patches": 256, "microbatch_size": 2, "token_multiple": 16}
    plan = plan_rows(sizes_of(tokenized, lengths), **{**shape, "patch_multiple": 16, **kwargs})
    return plan, lay_out(tokenized, responses_of(lengths), plan, policy.prompts)


def paths(plan):
    """For each token of each row, the tokens of its tree up to itself: brute force."""
    for parts in plan.rows:
        start, found = 0, {}
        for part in parts:
            prompt = list(range(start, start + plan.sizes.prompt[part.tree]))
            found |= {q: prompt[: i + 1] for i, q in enumerate(prompt)}
            start += len(prompt)
            for branch in part.branches:
                own = list(range(start, start + plan.sizes.branches[part.tree, branch]))
                found |= {q: prompt + own[: i + 1] for i, q in enumerate(own)}
                start += len(own)
        yield found | {q: [q] for q in range(start, plan.row_tokens)}


LENGTHS = [[20, 19, 20], [0, 20, 17], [12, 0, 20], [20, 7, 7]]
SOME = st.lists(st.lists(st.integers(0, T), min_size=3, max_size=3), min_size=4, max_size=4)


@settings(deadline=None, max_examples=25)
@given(SOME, st.sampled_from((96, 112, 160)), st.sampled_from((1, 2, 3)))
def test_a_token_sees_its_own_path_and_padding_itself(
    policy, tokenized, lengths, row_tokens, microbatch_size
):
    plan, rows = laid_out(
        policy, tokenized, lengths, row_tokens=row_tokens, microbatch_size=microbatch_size
    )
    place_of = np.arange(plan.row_tokens)
    for reach, expected in zip(rows.reach, paths(plan), strict=True):
        sees = (place_of <= place_of[:, None]) & (place_of[:, None] <= reach)
        wanted = np.zeros_like(sees)
        for query, keys in expected.items():
            wanted[query, keys] = True
        np.testing.assert_array_equal(sees, wanted)


@settings(deadline=None, max_examples=25)
@given(SOME, st.sampled_from((96, 160)))
def test_every_response_token_is_scored_once_by_the_token_before_it(
    policy, tokenized, lengths, row_tokens
):
    plan, rows = laid_out(policy, tokenized, lengths, row_tokens=row_tokens)
    found = []
    for row, path_of in enumerate(paths(plan)):
        scored = rows.scored[row]
        places = scored[scored >= 0]
        assert (scored[: len(places)] >= 0).all() and (np.diff(places) > 0).all()
        np.testing.assert_array_equal(np.flatnonzero(rows.predictor[row] >= 0), places)
        np.testing.assert_array_equal(np.flatnonzero(rows.branch[row] >= 0), places)
        assert all(rows.predictor[row, q] == path_of[q][-2] for q in places)
        found += rows.tokens[row, places].tolist()
        back = np.cumsum(rows.predictor[row] >= 0) - 1
        np.testing.assert_array_equal(scored[back[places]], places)
    tokens = responses_of(lengths)
    assert sorted(found) == sorted(tokens[tokens >= 0].tolist())


@pytest.mark.parametrize("policy", ["qwen2_5_vl", "qwen3_vl"], indirect=True)
@pytest.mark.parametrize("row_tokens", [96, 192])
def test_a_tree_stands_in_a_row_as_it_would_alone(policy, tokenized, row_tokens):
    """Tokens, positions, branches and image features of every part, and padding behind them."""
    plan, rows = laid_out(policy, tokenized, LENGTHS, row_tokens=row_tokens)
    assert sum(map(len, plan.rows)) > 4 if row_tokens == 96 else any(len(r) > 1 for r in plan.rows)
    tokens = responses_of(LENGTHS)
    for row, parts in enumerate(plan.rows):
        start = num_features = num_branches = 0
        for part in parts:
            prompt = tokenized[part.tree]
            given = slice(start, start + len(prompt.tokens))
            positions, behind = prompt_positions(prompt.tokens, prompt.grids, policy.config)
            np.testing.assert_array_equal(rows.tokens[row, given], prompt.tokens)
            np.testing.assert_array_equal(rows.positions[row, given], positions)
            feature_index = feature_indices(prompt.tokens, prompt.grids, policy.config)
            feature_index[feature_index >= 0] += num_features
            np.testing.assert_array_equal(rows.feature_index[row, given], feature_index)
            num_features += len(prompt.patches) // policy.config.vision.merge_size**2
            start = given.stop
            for branch in part.branches:
                length = LENGTHS[part.tree][branch]
                own = slice(start, start + length)
                np.testing.assert_array_equal(
                    rows.tokens[row, own], tokens[part.tree, branch, :length]
                )
                expected = np.repeat(behind + np.arange(length)[:, None], 3, 1)
                np.testing.assert_array_equal(rows.positions[row, own], expected)
                assert (rows.branch[row, own] == num_branches).all()
                assert (rows.feature_index[row, own] == -1).all()
                start, num_branches = own.stop, num_branches + 1
        behind = slice(start, None)
        assert (rows.tokens[row, behind] == policy.config.pad_token_id).all()
        for name in ("feature_index", "predictor", "branch"):
            assert (getattr(rows, name)[row, behind] == -1).all()
        assert not rows.positions[row, behind].any()
        if not parts:
            continue
        images = pack_images(
            [np.concatenate([tokenized[part.tree].patches for part in parts])],
            [np.concatenate([tokenized[part.tree].grids for part in parts])],
            policy.config.vision,
            plan.row_patches,
        )
        for field in ("patches", "coordinates", "segments", "windows", "position_rows"):
            if getattr(images, field) is not None:
                np.testing.assert_array_equal(
                    getattr(rows.images, field)[row], getattr(images, field)[0]
                )


def test_a_split_tree_repeats_its_prompt_and_its_image(policy, tokenized):
    plan, rows = laid_out(policy, tokenized[:1], [[20, 20, 20]], row_tokens=64)
    assert len(plan.rows) > 1 and all(len(parts) == 1 for parts in plan.rows if parts)
    prompt = tokenized[0]
    is_used = [bool(parts) for parts in plan.rows]
    for row in np.flatnonzero(is_used):
        np.testing.assert_array_equal(rows.tokens[row, : len(prompt.tokens)], prompt.tokens)
        np.testing.assert_array_equal(
            rows.images.patches[row, : len(prompt.patches)], prompt.patches
        )
    assert plan.real_tokens == len(prompt.tokens) + 60
    assert plan.real_patches == len(prompt.patches) < plan.computed_patches


def test_a_batch_without_images_has_none_and_an_empty_row_sees_nothing_else(policy, tokenized):
    plan, rows = laid_out(policy, tokenized[3:], [[4, 2, 0]], microbatch_size=3)
    assert rows.images is None and plan.row_patches == 0 and len(plan.rows) == 3
    np.testing.assert_array_equal(rows.reach[-1], np.arange(plan.row_tokens))
    assert (rows.scored[-1] == -1).all()


@settings(deadline=None, max_examples=25)
@given(SOME, st.sampled_from((96, 160)))
def test_values_return_from_the_places_of_their_tokens(policy, tokenized, lengths, row_tokens):
    plan, rows = laid_out(policy, tokenized, lengths, row_tokens=row_tokens)
    is_valid = np.arange(T) < np.array(lengths)[..., None]
    values = np.random.default_rng(0).normal(size=is_valid.shape).astype(np.float32)
    placed = at_tokens(values, plan)
    assert placed.dtype == np.float32 and not placed[rows.predictor < 0].any()
    np.testing.assert_array_equal(take_back(placed, plan, T), np.where(is_valid, values, 0))
    np.testing.assert_array_equal(at_tokens(is_valid, plan), rows.predictor >= 0)
    of_branch = at_tokens(values[..., 0], plan, fill=-1)
    np.testing.assert_array_equal(
        of_branch, np.where(rows.predictor >= 0, at_tokens(values[..., :1].repeat(T, 2), plan), -1)
    )


def test_two_processes_score_all_branches_between_them(policy, tokenized):
    """The parts of a split tree, on both, weigh as much as the whole tree does on one."""
    sizes = sizes_of(tokenized, LENGTHS)
    values, found, trees, weight = responses_of(LENGTHS), 0, [], 0.0
    for process in range(2):
        plan = plan_rows(
            sizes,
            row_tokens=96,
            row_patches=256,
            microbatch_size=4,
            token_multiple=16,
            patch_multiple=16,
            num_processes=2,
            process=process,
        )
        own = {tree: tokenized[tree] for tree in plan.trees}  # no other prompt is there
        rows = lay_out(own, values, plan, policy.prompts)
        np.testing.assert_array_equal(
            rows.tokens[rows.predictor >= 0], at_tokens(values, plan)[rows.predictor >= 0]
        )
        found = found + take_back(rows.tokens, plan, T)
        trees += plan.trees
        weight += at_rows(np.array([1.0, 10, 100, 1000]), plan).sum()
    np.testing.assert_array_equal(found, np.where(values >= 0, values, 0))
    assert len(trees) > len(set(trees))
    assert weight == pytest.approx(1111)


def test_rows_without_a_prompt_have_the_dtypes_of_the_others(policy, tokenized):
    """Of three processes two have nothing to compute, and all must run one program."""
    builder = copy.copy(policy.prompts)
    builder.patch_dtype = np.dtype(jnp.bfloat16)
    patches = tokenized[0].patches.astype(jnp.bfloat16)
    prompts, lengths = [dataclasses.replace(tokenized[0], patches=patches)], [[5]]
    found, num_trees = [], []
    for process in range(3):
        shape = {"row_tokens": 128, "row_patches": 256, "microbatch_size": 3}
        shape |= {"token_multiple": 16, "patch_multiple": 16}
        places = {"num_processes": 3, "process": process}
        plan = plan_rows(sizes_of(prompts, lengths), **shape, **places)
        num_trees.append(len(plan.trees))
        rows = lay_out(prompts, responses_of(lengths), plan, builder)
        found.append([(x.shape, x.dtype) for x in jax.tree.leaves(rows)])
    assert sorted(num_trees) == [0, 0, 1]
    assert found[0] == found[1] == found[2]


def test_a_plan_for_other_prompts_is_refused(policy, tokenized):
    plan, _ = laid_out(policy, tokenized, LENGTHS)
    other = TokenizedPrompt(tokenized[0].tokens[:-1], tokenized[0].grids, tokenized[0].patches)
    with pytest.raises(ValueError, match=r"prompt 0 must have 42 tokens .* got 41 and 48"):
        lay_out([other, *tokenized[1:]], responses_of(LENGTHS), plan, policy.prompts)
