"""Packs trees into a given number of rows: best-fit decreasing, trees split only to fill a row.

Both tokens and image patches must fit. Letters: N prompts, R branches of a prompt.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int

_SPLITS_TRIED = 8  # trees considered for splitting, per row


@dataclasses.dataclass(frozen=True)
class TreeSizes:
    """Sizes of N trees."""

    prompt: Int[np.ndarray, " N"]  # tokens of each prompt
    patches: Int[np.ndarray, " N"]  # image patches of each prompt
    # Tokens of each response; 0 if it does not exist or is not needed. A prompt without needed
    # responses is not packed.
    branches: Int[np.ndarray, "N R"]

    @property
    def is_needed(self) -> np.ndarray:
        """[N]: at least one branch is needed."""
        return np.any(self.branches, -1)

    @property
    def total(self) -> np.ndarray:
        """[N] tokens of each tree; 0 if it is not needed."""
        return self.is_needed * (self.prompt + self.branches.sum(-1))

    def take(self, trees: np.ndarray) -> TreeSizes:
        """The sizes of some trees, by index."""
        return TreeSizes(self.prompt[trees], self.patches[trees], self.branches[trees])


@dataclasses.dataclass(frozen=True)
class Part:
    """A prompt and some of its branches in one row, by their indices in N and R."""

    tree: int
    branches: tuple[int, ...]


Packing = list[list[Part]]  # the parts of each row that is not empty


def pack(sizes: TreeSizes, num_rows: int, row_tokens: int, row_patches: int) -> Packing | None:
    """Packs the trees into at most `num_rows` rows; None if they do not all fit.

    A row starts with the tree that is hardest to pack. It is full once its empty tokens are at most
    its share of all tokens that will be empty. Until then whole trees are added: one or two that
    fill it, else the largest. If none fits, some branches of a tree are added; the other branches
    are left for later rows.
    """
    # The result does not depend on the order of the trees, except among trees of equal sizes.
    order = np.lexsort((*sizes.branches.T, sizes.patches, sizes.prompt, sizes.total))[::-1]
    sizes = sizes.take(order)
    patches, size = sizes.patches, sizes.total.copy()  # of what is left of each tree
    left = [np.flatnonzero(row).tolist() for row in sizes.branches]
    if (patches[size > 0] > row_patches).any():
        return None
    rows: Packing = []
    for num_left in range(num_rows, 0, -1):
        slack = row_tokens - size.sum() / num_left
        if slack < 0:
            return None
        if slack == row_tokens:
            break
        share = (patches * (size > 0)).sum() / num_left
        room, width = row_tokens, row_patches
        row: dict[int, list[int]] = {}
        while room > slack or not row:
            is_free = (size > 0) & (patches <= width)
            if row:
                space = _Space(room, width, slack, share - (row_patches - width))
                chosen = _filling(sizes, size, left, is_free, space)
            else:
                chosen = _hardest(sizes, size, left, room, width)
            for tree, branches in chosen:
                num_tokens = int(sizes.branches[tree, branches].sum())
                room -= int(sizes.prompt[tree]) + num_tokens
                width -= int(patches[tree])
                left[tree] = [branch for branch in left[tree] if branch not in branches]
                size[tree] = size[tree] - num_tokens if left[tree] else 0
                row[tree] = branches
            if not chosen:
                break
        rows.append([Part(int(order[tree]), tuple(branches)) for tree, branches in row.items()])
    return None if size.any() else rows


@dataclasses.dataclass(frozen=True)
class _Space:
    """The space left in a row."""

    room: int  # tokens
    width: int  # patches
    slack: float  # tokens that may stay empty
    share: float  # patches by which the row is below the mean of the rows still to pack


# Trees, by index, each with its branches to add to a row.
Choice = list[tuple[int, list[int]]]


def _hardest(
    sizes: TreeSizes, size: np.ndarray, left: list[list[int]], room: int, width: int
) -> Choice:
    """First in a row: the tree that fills most of its tokens or patches, cut to the space left."""
    tree = int(np.argmax(np.maximum(size / room, (size > 0) * sizes.patches / width)))
    if size[tree] <= room:
        return [(tree, left[tree])]
    return [(tree, _fullest(sizes.branches[tree], left[tree], room - int(sizes.prompt[tree])))]


def _filling(
    sizes: TreeSizes, size: np.ndarray, left: list[list[int]], is_free: np.ndarray, space: _Space
) -> Choice:
    """Which of the trees in `is_free` to add to a non-empty row; empty if nothing fits."""
    whole = np.flatnonzero(is_free & (size <= space.room))
    if len(whole):
        chosen = whole[_best_whole(size[whole], sizes.patches[whole], space)].tolist()
        return [(tree, left[tree]) for tree in chosen]
    best, least = [], np.inf
    trees = np.flatnonzero(is_free)
    # Short prompts cost least to repeat.
    for tree in trees[np.argsort(sizes.prompt[trees], kind="stable")][:_SPLITS_TRIED].tolist():
        prompt = int(sizes.prompt[tree])
        branches = _fullest(sizes.branches[tree], left[tree], space.room - prompt)
        empty = space.room - prompt - int(sizes.branches[tree, branches].sum())
        if branches and prompt + empty < least:
            best, least = [(tree, branches)], prompt + empty
        if branches and empty <= space.slack:
            break
    return best


def _best_whole(size: np.ndarray, patches: np.ndarray, space: _Space) -> list[int]:
    """One or two whole trees that fill the row, with patches nearest to its share; else the
    largest."""
    is_full = size >= space.room - space.slack
    if is_full.any():
        return [int(np.argmin(np.where(is_full, np.abs(patches - space.share), np.inf)))]
    first = np.argsort(size, kind="stable")
    beside = np.searchsorted(size[first], space.room - size[first], "right") - 1
    second = first[np.maximum(beside, 0)]  # the largest that fits beside the first
    both, patches = size[first] + size[second], patches[first] + patches[second]
    is_pair = (first != second) & (both <= space.room) & (patches <= space.width)
    is_full = is_pair & (both >= space.room - space.slack)
    if is_full.any():
        best = np.argmin(np.where(is_full, np.abs(patches - space.share), np.inf))
        return [int(first[best]), int(second[best])]
    return [int(np.argmax(size))]


def _fullest(length: np.ndarray, branches: list[int], room: int) -> list[int]:
    """The branches of largest total length that fit in `room` (subset sums, as a bit set)."""
    if room <= 0:
        return []
    sums = [1]
    for branch in branches:
        sums.append(sums[-1] | sums[-1] << int(length[branch]))
    total = (sums[-1] & ((1 << int(room) + 1) - 1)).bit_length() - 1
    chosen = []
    for reachable, branch in zip(reversed(sums[:-1]), reversed(branches), strict=True):
        if not reachable >> total & 1:
            chosen.append(branch)
            total -= int(length[branch])
    return chosen[::-1]
