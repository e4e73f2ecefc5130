"""Several examples in one row: the cold start's batches, with little padding and the same loss.

An example is its prompt and the response to imitate, one after the other. A row holds as many as
its tokens and patches allow; they are told apart by segments, and each has its own positions, so
that none knows of the others.

Letters: n examples, B rows of S tokens and N patches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from care_jax.batch import PackedRows
from care_jax.prompt import TokenizedPrompt
from models.config import BackboneConfig
from models.positions import image_slots, pack_images, prompt_positions


@dataclasses.dataclass(frozen=True)
class Sample:
    """One example, tokenised.

    Attributes:
        prompt: what is given.
        response: the tokens to imitate, end-of-sequence included.
        weight: of each of them in the loss.
    """

    prompt: TokenizedPrompt
    response: Int[np.ndarray, " T"]
    weight: Float[np.ndarray, " T"]

    @property
    def size(self) -> tuple[int, int]:
        """Tokens and patches."""
        return len(self.prompt.tokens) + len(self.response), len(self.prompt.patches)


def first_fit(
    sizes: Sequence[tuple[int, int]], row_size: tuple[int, int], *, shared: bool = True
) -> list[list[int]]:
    """Which examples share which row: each, the longest first, goes into the first with room.

    Args:
        sizes: tokens and patches of each example; none exceeds a row.
        row_size: tokens S and patches N of a row.
        shared: false gives each example a row of its own.

    Returns:
        the examples of each row, by their places.
    """
    if not shared:
        return [[place] for place in range(len(sizes))]
    rows: list[list[int]] = []
    room = np.zeros((0, 2), int)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place][0], place)):
        has_room = np.flatnonzero((room >= sizes[place]).all(-1))
        if not len(has_room):
            rows.append([])
            room = np.concatenate([room, [row_size]])
        row = has_room[0] if len(has_room) else len(rows) - 1
        rows[row].append(place)
        room[row] -= sizes[place]
    return rows


def pack(
    samples: Sequence[Sample],
    rows: Sequence[Sequence[int]],
    row_size: tuple[int, int],
    config: BackboneConfig,
    *,
    has_images: bool = True,
) -> PackedRows:
    """Lays examples out in rows.

    Args:
        samples: the examples.
        rows: the places of those that share each row, see `first_fit`; a row may be empty.
        row_size: tokens S and patches N of a row.
        config: of the backbone.
        has_images: false where no example of the batch has any.

    Returns:
        numpy arrays of B = len(rows) rows.
    """
    num_tokens, num_patches = row_size
    shape = (len(rows), num_tokens)
    tokens = np.full(shape, config.pad_token_id, np.int32)
    segments, slots, scored = (np.full(shape, -1, np.int32) for _ in range(3))
    positions = np.zeros((*shape, 3), np.int32)
    weight = np.zeros(shape, np.float32)
    for row, places in enumerate(rows):
        start = num_features = num_scored = 0
        for segment, sample in enumerate(samples[place] for place in places):
            prompt, response = sample.prompt, sample.response
            given, stop = start + len(prompt.tokens), start + sample.size[0]
            tokens[row, start:given], tokens[row, given:stop] = prompt.tokens, response
            segments[row, start:stop] = segment
            positions[row, start:given], first = prompt_positions(
                prompt.tokens, prompt.grids, config
            )
            positions[row, given:stop] = (first + np.arange(len(response)))[:, None]
            own = image_slots(prompt.tokens, config)
            slots[row, start:given] = np.where(own >= 0, own + num_features, -1)
            behind = num_scored + len(response)
            scored[row, num_scored:behind] = np.arange(given, stop)
            weight[row, num_scored:behind] = sample.weight
            start, num_scored = stop, behind
            num_features += len(prompt.patches) // config.vision.merge_size**2
    images = None
    if has_images:
        empty = np.zeros((0, config.vision.patch_dim), samples[0].prompt.patches.dtype)
        no_grid = np.zeros((0, 3), np.int32)
        images = pack_images(
            [np.concatenate([empty, *(samples[i].prompt.patches for i in row)]) for row in rows],
            [np.concatenate([no_grid, *(samples[i].prompt.grids for i in row)]) for row in rows],
            config.vision,
            num_patches,
        )
    return PackedRows(tokens, segments, positions, slots, images, scored, weight)
