"""Trees in rows for tests: packed as a run does, split, or each response behind its own prompt."""

import dataclasses

import numpy as np

from care_jax.batch import TrainBatch
from care_jax.packing.layout import at_rows, at_tokens, lay_out
from care_jax.packing.plan import Part, RowPlan, TreeSizes, plan_rows


def sizes_of(tokenized, lengths):
    prompts, patches = (
        [len(getattr(r, name)) for r in tokenized] for name in ("tokens", "patches")
    )
    return TreeSizes(np.array(prompts), np.array(patches), np.asarray(lengths))


def packed_plan(tokenized, lengths, *, row_tokens=128, microbatch_size=1, row_patches=256):
    """Of trees whose responses have `lengths` tokens [N, R]."""
    sizes = sizes_of(tokenized, lengths)
    shape = dict(row_tokens=row_tokens, row_patches=row_patches)
    return plan_rows(sizes, **shape, microbatch_size=microbatch_size)


def plan_of(tokenized, lengths, rows):
    """A plan of given rows, each of microbatches of one, as long as the longest needs."""
    sizes = sizes_of(tokenized, lengths)

    def tokens(part):
        return int(sizes.prompt[part.tree] + sizes.branches[part.tree, list(part.branches)].sum())

    row_tokens = max(sum(map(tokens, row)) for row in rows)
    row_patches = max(sum(int(sizes.patches[part.tree]) for part in row) for row in rows)
    return RowPlan(rows, sizes, row_tokens, row_patches, len(rows), (), 0, 0, 0, 0)


def replicated_plan(tokenized, lengths):
    """Every response in a row of its own, behind a copy of its prompt: what others train on."""
    places = np.argwhere(np.asarray(lengths) > 0).tolist()
    return plan_of(tokenized, lengths, tuple((Part(n, (r,)),) for n, r in places))


def split_plan(tokenized, lengths):
    """Every tree of N in two rows, each behind a part of the tree before it."""
    number, num_branches = np.shape(lengths)
    rest = tuple(range(1, num_branches))
    rows = [(Part(n, rest), Part((n + 1) % number, (0,))) for n in range(number)]
    return plan_of(tokenized, lengths, tuple(rows))


def padded(plan, *, num_rows, row_tokens, row_patches):
    """The plan with empty rows behind its own, and longer rows: layouts that share a program."""
    assert len(plan.rows) <= num_rows
    assert plan.row_tokens <= row_tokens and plan.row_patches <= row_patches
    rows = plan.rows + ((),) * (num_rows - len(plan.rows))
    return dataclasses.replace(plan, rows=rows, row_tokens=row_tokens, row_patches=row_patches)


def train_batch(policy, tokenized, plan, tokens, fields, prompt_weight):
    """The batch of an update.

    Args:
        policy: whose tokens they are.
        tokenized: the prompts.
        plan: which tree stands where.
        tokens: of the responses [N, R, T].
        fields: of `TrainBatch`, [N, R, T] or [N, R], by name; is_compared is by default
            is_trained.
        prompt_weight: [N].
    """
    fields = {"is_compared": fields["is_trained"], **fields}
    laid_out = {name: at_tokens(np.asarray(values), plan) for name, values in fields.items()}
    return TrainBatch(
        rows=lay_out(tokenized, np.asarray(tokens), plan, policy.prompts),
        prompt_weight=at_rows(np.asarray(prompt_weight), plan),
        **laid_out,
    )


def take_back(values: np.ndarray, plan: RowPlan, num_tokens: int) -> np.ndarray:
    """Inverse of `at_tokens`: [B, S] values as [N, R, T]; 0 for tokens that are in no row.

    Args:
        values: at every token of the rows.
        plan: the row of each branch.
        num_tokens: T.
    """
    which, offset = plan.token_branches
    is_response = which >= 0
    found = np.zeros((plan.sizes.branches.size, num_tokens), values.dtype)
    found[which[is_response], offset[is_response]] = values[is_response]
    return found.reshape(*plan.sizes.branches.shape, num_tokens)
