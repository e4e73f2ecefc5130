"""Assigns trees and their branches to the rows of an update (host, from sizes alone).

A tree is a prompt with its responses, the branches. Trees are kept whole unless splitting computes
fewer tokens. A tree is split by branches; each part repeats the prompt and its images. The plan is
a pure function of all sizes, so processes that know them agree on it.

Any process may get any tree. Each gets equally many rows of a microbatch, chosen so that as few
tokens and patches as possible move. All rows have S tokens and equally many patches; sorting them
by (query, visible key) pairs makes those of a microbatch equally expensive.

Letters: N prompts, R branches of a prompt, T response tokens, B rows of this process, S tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from scipy.optimize import linear_sum_assignment

from care_jax.devices.flops import causal_pairs
from care_jax.packing.trees import Packing, Part, TreeSizes, pack

# Each row length is one more program to compile. A length below the longest must save this fraction
# of the computed tokens.
_WORTH_A_COMPILE = 1 / 16
_FEWEST_TOKENS = 32  # smallest default step between row lengths
_PATCH_BLOCK = 16  # a row's patches are a multiple of this: whole merge blocks of every tower


@dataclasses.dataclass(frozen=True, eq=False)
class RowPlan:
    """The contents of the B rows of this process.

    Microbatch i of n = B / (rows of a microbatch) holds rows i, n + i, 2n + i, ..., as in
    `train_step.split_batch`. n is a power of two, so the last microbatches may be empty.
    """

    rows: tuple[tuple[Part, ...], ...]  # the parts of each row, in order; none in an empty row
    sizes: TreeSizes  # of the trees of all processes, numbered as in `rows`
    row_tokens: int  # S, tokens of a row
    row_patches: int  # patches of a row; 0 if no tree of any process has an image
    num_microbatches: int  # not empty in at least one process; the others are not run
    moved: tuple[int, ...]  # trees that a process needs and another one has
    real_tokens: int  # over all processes, as all below; without repeats of a prompt
    computed_tokens: int
    real_patches: int
    computed_patches: int

    @property
    def is_empty(self) -> bool:
        """Whether no process has a tree."""
        return not self.real_tokens

    @property
    def trees(self) -> list[int]:
        """The trees in these rows."""
        return sorted({part.tree for row in self.rows for part in row})

    @functools.cached_property
    def token_branches(self) -> tuple[Int[np.ndarray, "B S"], Int[np.ndarray, "B S"]]:
        """Branch of each token, as tree · R + index in the tree, and its index in that branch; both
        -1 for prompts and padding."""
        num_branches = self.sizes.branches.shape[1]
        which = np.full((len(self.rows), self.row_tokens), -1, np.int32)
        offset = which.copy()
        for row, parts in enumerate(self.rows):
            start = 0
            for part in parts:
                start += self.sizes.prompt[part.tree]
                for branch in part.branches:
                    stop = start + self.sizes.branches[part.tree, branch]
                    which[row, start:stop] = part.tree * num_branches + branch
                    offset[row, start:stop] = np.arange(stop - start)
                    start = stop
        return which, offset


def misfits(sizes: TreeSizes, *, row_tokens: int, row_patches: int, section: str) -> dict[int, str]:
    """The trees that do not fit the longest row even with a single branch, and why.

    `section` is the config section named in the message, "sft" or "rl".
    """
    longest = sizes.is_needed * (sizes.prompt + sizes.branches.max(-1, initial=0))
    patches = sizes.is_needed * sizes.patches
    return {
        tree: f"prompt and longest response have {longest[tree]} tokens and {patches[tree]} "
        f"patches, but a row has {row_tokens} and {row_patches}; raise {section}.row_tokens or "
        f"{section}.row_patches, or leave the example out"
        for tree in np.flatnonzero((longest > row_tokens) | (patches > row_patches)).tolist()
    }


def fill_of(plans: Sequence[RowPlan]) -> dict[str, float]:
    """Fraction of the computed tokens and patches that is neither padding nor a repeated prompt.

    A key is absent where nothing is computed, such as patches of text alone.
    """
    fill = {}
    for name, of in (("train_fill", "tokens"), ("patch_fill", "patches")):
        real, computed = (
            sum(getattr(plan, f"{kind}_{of}") for plan in plans) for kind in ("real", "computed")
        )
        if computed:
            fill[name] = real / computed
    return fill


def plan_rows(
    sizes: TreeSizes,
    *,
    row_tokens: int,
    row_patches: int,
    microbatch_size: int,
    row_lengths: int = 16,
    token_multiple: int | None = None,
    patch_multiple: int | None = None,
    owner: Int[np.ndarray, " N"] | None = None,
    num_processes: int = 1,
    process: int = 0,
    section: str = "rl",
) -> RowPlan:
    """Plans an update, or a step of the cold start.

    The number and length of rows are chosen for the fewest computed tokens, then the patches of a
    row for the fewest patches. Permuting trees of distinct sizes changes only their numbers and
    their order within a row.

    Args:
        sizes: of the trees of all processes.
        row_tokens, row_patches: maximum tokens and patches of a row; patches are rounded up to a
            multiple of 16.
        microbatch_size: rows of one forward and backward, over all processes and shards.
        row_lengths: number of lengths that rows may have. Each is one more program to compile.
        token_multiple: a row has a multiple of this many tokens, or row_tokens. None: row_tokens /
            row_lengths, at least 32.
        patch_multiple: likewise of its patches; None: a quarter of row_patches, or all of them if
            rows have one length.
        owner: the process that has each tree; by default process 0.
        num_processes: they share the rows of a microbatch evenly.
        process: index of the process whose rows are returned.
        section: as in `misfits`.

    Raises:
        ValueError: a tree does not fit, see `misfits`; or the processes cannot share a microbatch
            evenly.
    """
    if microbatch_size < 1 or microbatch_size % num_processes:
        raise ValueError(
            f"microbatch_size {microbatch_size} must be a positive multiple of {num_processes} "
            f"processes; set it to {num_processes} or a multiple"
        )
    sizes = TreeSizes(*(np.asarray(x, np.int64) for x in dataclasses.astuple(sizes)))
    unfit = misfits(sizes, row_tokens=row_tokens, row_patches=row_patches, section=section)
    for tree, message in unfit.items():
        raise ValueError(f"{len(unfit)} of {len(sizes.prompt)} trees fit no row; {tree}: {message}")
    lengths = _sizes(
        token_multiple or max(-(-row_tokens // row_lengths), _FEWEST_TOKENS), row_tokens
    )
    whole_patches = max(-(-row_patches // _PATCH_BLOCK), 1)  # in blocks
    widths = _sizes(
        patch_multiple or _PATCH_BLOCK * -(-whole_patches // min(4, row_lengths)),
        _PATCH_BLOCK * whole_patches,
    )
    length, packing, count = _pack_all(sizes, microbatch_size, lengths, widths)
    if owner is None:
        owner = np.zeros(len(sizes.prompt), int)
    rows, moved = _share_rows(sizes, packing, microbatch_size, owner, num_processes, process)
    most = max((int(sum(sizes.patches[part.tree] for part in row)) for row in packing), default=0)
    row_patches = next(width for width in (0, *widths) if width >= most)
    return RowPlan(
        rows=rows,
        sizes=sizes,
        row_tokens=length,
        row_patches=row_patches,
        num_microbatches=count,
        moved=moved,
        real_tokens=int(sizes.total.sum()),
        computed_tokens=microbatch_size * count * length,
        real_patches=int((sizes.is_needed * sizes.patches).sum()),
        computed_patches=microbatch_size * count * row_patches,
    )


def _sizes(unit: int, largest: int) -> tuple[int, ...]:
    """Multiples of `unit` below `largest`, then `largest`."""
    return *range(unit, largest, unit), largest


def _pack_all(
    sizes: TreeSizes, num_rows: int, lengths: tuple[int, ...], widths: tuple[int, ...]
) -> tuple[int, Packing, int]:
    """The packing with the fewest computed tokens; for that shape, the fewest patches.

    A microbatch has `num_rows` rows, with tokens and patches of a row from `lengths` and `widths`.
    Returns tokens of a row, packing, microbatches.
    """
    num_tokens = int(sizes.total.sum())
    num_patches = int((sizes.is_needed * sizes.patches).sum())
    if not num_tokens:
        return lengths[-1], [], 0
    # One branch per row always fits, which bounds the number of microbatches.
    most = -(-np.count_nonzero(sizes.branches) // num_rows)
    shapes = [
        (n, length)
        for n in range(max(1, -(-num_patches // (num_rows * widths[-1]))), most + 1)
        for length in lengths
        if n * num_rows * length >= num_tokens
    ]

    def cost(shape: tuple[int, int]) -> tuple[float, int]:
        n, length = shape
        return n * length * (1 + _WORTH_A_COMPILE * (length != lengths[-1])), n

    shapes.sort(key=cost)
    failed: list[tuple[int, int]] = []
    for num_microbatches, length in shapes:
        if any(n >= num_microbatches and other >= length for n, other in failed):
            continue
        found = None
        for width in reversed(widths):  # down to the narrowest that fits
            packing = pack(sizes, num_microbatches * num_rows, length, width)
            if packing is None:
                break
            # By chance narrower rows may pack better and need fewer microbatches.
            count = -(-len(packing) // num_rows)
            if found is None or count <= found[2]:
                found = length, packing, count
        if found:
            return found
        failed.append((num_microbatches, length))
    raise AssertionError("unreachable: one branch per row always fits")


def _num_pairs(sizes: TreeSizes, parts: list[Part]) -> int:
    """(query, visible key) pairs of a row."""
    pairs = 0
    for part in parts:
        branch, prompt = sizes.branches[part.tree, list(part.branches)], sizes.prompt[part.tree]
        pairs += int(causal_pairs(prompt) + (prompt * branch + causal_pairs(branch)).sum())
    return pairs


def _share_rows(
    sizes: TreeSizes,
    packing: Packing,
    num_rows: int,
    owner: Int[np.ndarray, " N"],
    num_processes: int,
    process: int,
) -> tuple[tuple[tuple[Part, ...], ...], tuple[int, ...]]:
    """The rows of one process, and the trees that move between processes.

    Rows are sorted so that those with the most pairs share a microbatch of `num_rows`; each
    microbatch is divided so that the fewest tokens and patches move.
    """
    size = sizes.total + sizes.patches
    in_order = sorted(packing, key=lambda parts: _num_pairs(sizes, parts), reverse=True)
    starts, share = range(0, len(in_order), num_rows), num_rows // num_processes
    bucket = 1 << max(len(starts) - 1, 0).bit_length()  # a power of two
    rows: list[tuple[Part, ...]] = [()] * (bucket * share)
    moved = set()
    for microbatch, start in enumerate(starts):
        chosen = in_order[start : start + num_rows]
        kept = np.zeros((len(chosen), num_processes))  # size of the trees that need not move
        for row, parts in enumerate(chosen):
            for part in parts:
                kept[row, owner[part.tree]] += size[part.tree]
        _, slots = linear_sum_assignment(np.repeat(kept, share, axis=1), maximize=True)
        at = slots // share  # process of each row
        for row, parts in enumerate(chosen):
            moved |= {part.tree for part in parts if owner[part.tree] != at[row]}
        for number, row in enumerate(np.flatnonzero(at == process)):
            parts = sorted(chosen[row], key=lambda part: part.tree)
            rows[number * bucket + microbatch] = tuple(parts)
    return tuple(rows), tuple(sorted(moved))
