"""Lays out prompts and responses in rows of trees, and values at their tokens (host numpy).

A row is `[prompt | r_0 | r_1 | ...] [prompt' | r'_0 | ...] padding`, as assigned by `plan`. The
prompt and images of a split tree are repeated in each of its rows.

Letters: N prompts, R branches of a prompt, T response tokens, B rows of this process, S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from care_jax.batch import TreeRows
from care_jax.packing.plan import RowPlan
from care_jax.prompts.builder import PromptBuilder, TokenizedPrompt
from models.positions import ImagePatches, feature_indices, pack_images, prompt_positions


def lay_out(
    prompts: Sequence[TokenizedPrompt] | Mapping[int, TokenizedPrompt],
    responses: Int[np.ndarray, "N R T"],
    plan: RowPlan,
    builder: PromptBuilder,
) -> TreeRows:
    """The rows of this process.

    Args:
        prompts: by their tree numbers in the plan; only those in `plan.trees` are read.
        responses: right-padded token ids, of the lengths in `plan.sizes.branches`.
        builder: which made the prompts. Rows of a process without any prompt have the dtypes of the
            others', since all processes must run the same program.

    Raises:
        ValueError: the plan was made for prompts of other sizes.
    """
    config = builder.config
    which, offset = plan.token_branches
    is_response = which >= 0
    index = np.arange(plan.row_tokens)  # each token's index in its row
    length = plan.sizes.branches.reshape(-1)[which]
    tokens = at_tokens(responses, plan, fill=config.pad_token_id)
    reach = np.where(is_response, index - offset + length - 1, index).astype(np.int32)
    predictor = np.where(is_response, index - 1, -1).astype(np.int32)
    positions = np.zeros((*which.shape, 3), np.int32)
    feature_index = np.full(which.shape, -1, np.int32)
    positions_of = {}  # M-RoPE positions of a prompt's tokens, and of the first token after it
    for tree in plan.trees:
        prompt = prompts[tree]
        _check_size(tree, prompt, plan)
        positions_of[tree] = prompt_positions(prompt.tokens, prompt.grids, config)
    for row, parts in enumerate(plan.rows):
        start = num_features = 0
        for part in parts:
            prompt = prompts[part.tree]
            end = start + len(prompt.tokens)
            stop = end + int(plan.sizes.branches[part.tree, list(part.branches)].sum())
            tokens[row, start:end] = prompt.tokens
            reach[row, start:end] = stop - 1
            positions[row, start:end], following = positions_of[part.tree]
            positions[row, end:stop] = (following + offset[row, end:stop])[:, None]
            feature = feature_indices(prompt.tokens, prompt.grids, config)
            feature_index[row, start:end] = np.where(feature >= 0, feature + num_features, -1)
            num_features += len(prompt.patches) // config.merge_size**2
            is_first = offset[row, end:stop] == 0
            predictor[row, end:stop][is_first] = end - 1
            start = stop
    return TreeRows(
        tokens=tokens,
        reach=reach,
        positions=positions,
        feature_index=feature_index,
        images=_images(prompts, plan, builder),
        predictor=predictor,
        branch=np.where(is_response, np.cumsum(offset == 0, axis=1) - 1, -1).astype(np.int32),
        scored=_compacted(is_response),
    )


def at_tokens(values: np.ndarray, plan: RowPlan, *, fill: float | int = 0) -> np.ndarray:
    """[B, S, ...]: values of responses at their tokens in the rows, `fill` at all other tokens.

    `values` are [N, R, T, ...], by token, or [N, R], by branch.
    """
    which, offset = plan.token_branches
    by_branch = values.reshape(-1, *values.shape[2:])
    found = by_branch[which] if values.ndim == 2 else by_branch[which, offset]
    is_response = (which >= 0).reshape(*which.shape, *(1,) * (found.ndim - 2))
    return np.where(is_response, found, np.asarray(fill, values.dtype))


def at_rows(values: Float[np.ndarray, " N"], plan: RowPlan) -> Float[np.ndarray, " B"]:
    """Values of prompts, summed over each row.

    The parts of a split prompt, which may be in rows of several processes, have a share each, by
    the tokens of their responses.
    """
    sums = np.zeros(len(plan.rows))
    for row, parts in enumerate(plan.rows):
        for part in parts:
            branches = plan.sizes.branches[part.tree]
            share = branches[list(part.branches)].sum() / branches.sum()
            sums[row] += values[part.tree] * share
    return sums.astype(np.float32)


def _images(prompts, plan: RowPlan, builder: PromptBuilder) -> ImagePatches | None:
    """The patches of each row's prompts, concatenated."""
    vision, dtype = builder.config.vision, builder.patch_dtype
    if not plan.row_patches or vision is None:
        return None
    no_patch, no_grid = np.zeros((0, vision.patch_dim), dtype), np.zeros((0, 3), np.int32)
    patches = (
        np.concatenate([no_patch, *(prompts[p.tree].patches for p in row)]) for row in plan.rows
    )
    return pack_images(
        [each.astype(dtype, copy=False) for each in patches],
        [np.concatenate([no_grid, *(prompts[p.tree].grids for p in row)]) for row in plan.rows],
        vision,
        plan.row_patches,
    )


def _compacted(is_response: np.ndarray) -> np.ndarray:
    """Indices of true values at the front of each row, then -1."""
    order = np.argsort(~is_response, axis=1, kind="stable").astype(np.int32)
    return np.where(np.take_along_axis(is_response, order, 1), order, -1)


def _check_size(tree: int, prompt: TokenizedPrompt, plan: RowPlan) -> None:
    expected = int(plan.sizes.prompt[tree]), int(plan.sizes.patches[tree])
    got = len(prompt.tokens), len(prompt.patches)
    if got != expected:
        raise ValueError(
            f"prompt {tree} must have {expected[0]} tokens and {expected[1]} patches as planned, "
            f"got {got[0]} and {got[1]}; plan and lay out the same prompts in the same order"
        )
