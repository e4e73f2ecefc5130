"""Positions of tokens and patches, computed once per prompt on the host (numpy).

`pack_images` computes the image of each patch (for full attention) and its slot in a window bin
(for windowed attention). Windowed attention is then a gather, a batched attention and a gather
back, with shapes that depend only on the padded patch count. For a tower with learned positions,
`pack_images` also computes the rows of the position table that each patch reads. Patches stay in
the order of Hugging Face processors: merge blocks in raster order, and within a block its
merge_size x merge_size patches in raster order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import numpy as np
from jaxtyping import Float, Int

from models.config import BackboneConfig, VisionConfig

# An array of a record: numpy on the host, jax on a device. `Any`, as the same records also hold
# shapes, shardings and axis names.
HostOrDevice = Any


@flax.struct.dataclass
class ImagePatches:
    """The patches of B prompts, each row padded to N patches.

    Attention windows are packed into W bins of S slots. S is the number of patches in a full
    window, and several partial windows may share a bin.

    Attributes:
        patches: flattened pixels (channel, frame, row, column), normalised by the processor.
        coordinates: (row, column) of each patch in its image, in patches.
        segments: index of the patch's image within its row, -1 at padding.
        window_patches: index of the patch in each slot, -1 in an empty slot; this and the next
            two are None if the tower has no windows.
        window_segments: index of the window in each slot, -1 in an empty slot.
        window_slots: slot of each patch among the W * S slots; 0 at padding.
        position_rows: the four rows of the position table that each patch interpolates; this and
            the next are None if the tower has no position table.
        position_weights: interpolation weights of those rows, with sum 1; 0 at padding.
    """

    patches: Float[HostOrDevice, "B N C"]
    coordinates: Int[HostOrDevice, "B N 2"]
    segments: Int[HostOrDevice, "B N"]
    window_patches: Int[HostOrDevice, "B W S"] | None = None
    window_segments: Int[HostOrDevice, "B W S"] | None = None
    window_slots: Int[HostOrDevice, "B N"] | None = None
    position_rows: Int[HostOrDevice, "B N 4"] | None = None
    position_weights: Float[HostOrDevice, "B N 4"] | None = None


def pack_images(
    patches: Sequence[Float[np.ndarray, "_ C"]],
    grids: Sequence[Int[np.ndarray, "_ 3"]],
    config: VisionConfig,
    num_patches: int,
) -> ImagePatches:
    """Packs each prompt's images into one padded row.

    Args:
        patches: per prompt, the concatenated patches of its images; empty without images.
        grids: per prompt, (frames, rows, columns) of each image, in patches; frames is 1.
        config: the tower that will read the patches.
        num_patches: N, the padded number of patches per row.

    Returns:
        ImagePatches of B = len(patches) rows, as numpy arrays; patches keep their dtype.

    Raises:
        ValueError: a grid does not fit its patches, the tower, or num_patches.
    """
    if num_patches % config.merge_size**2:
        raise ValueError(
            f"num_patches {num_patches} must be a multiple of merge_size^2 = "
            f"{config.merge_size**2}; round it up"
        )
    rows = [
        _pack_row(patch, np.asarray(grid).reshape(-1, 3), config, num_patches)
        for patch, grid in zip(patches, grids, strict=True)
    ]
    return ImagePatches(**{name: np.stack([row[name] for row in rows]) for name in rows[0]})


def _pack_row(
    patches: np.ndarray, grids: np.ndarray, config: VisionConfig, num_patches: int
) -> dict[str, np.ndarray]:
    """The fields of one row of `ImagePatches`."""
    total = int(grids.prod(-1).sum())
    if total != len(patches) or total > num_patches:
        raise ValueError(
            f"grids {grids.tolist()} describe {total} patches: got {len(patches)} patches and room "
            f"for {num_patches}; pass all patches and raise num_patches"
        )
    pixels = np.zeros((num_patches, config.patch_dim), patches.dtype)
    pixels[:total] = patches
    coordinates = np.zeros((num_patches, 2), np.int32)
    segments = np.full(num_patches, -1, np.int32)
    start = 0
    for i, grid in enumerate(grids):
        place = _block_order(grid, config.merge_size)
        stop = start + len(place)
        coordinates[start:stop] = place
        segments[start:stop] = i
        start = stop
    fields = {"patches": pixels, "coordinates": coordinates, "segments": segments}
    sizes = grids[:, 1:]
    if config.window_size:
        fields |= _window_bins(coordinates[:total], segments, sizes, config.window_side)
    if config.num_position_embeddings:
        fields |= _table_rows(coordinates[:total], segments, sizes, config.position_side)
    return fields


def _block_order(grid: np.ndarray, merge: int) -> np.ndarray:
    """(row, column) of each patch of an image, in merge-block order."""
    frames, height, width = (int(x) for x in grid)
    if frames != 1 or height % merge or width % merge or height * width == 0:
        raise ValueError(
            f"grid {(frames, height, width)} must be one frame of rows and columns that are "
            f"positive multiples of merge_size {merge}; resize the image"
        )
    place = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), -1)
    place = place.reshape(height // merge, merge, width // merge, merge, 2)
    return place.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def _window_bins(
    coordinates: np.ndarray, segments: np.ndarray, sizes: np.ndarray, side: int
) -> dict[str, np.ndarray]:
    """Packs each window into the first bin with enough free slots; no window is split.

    First fit leaves at most one bin half full or less, so 2 * ceil(N / S) + 1 bins always suffice
    and the number of bins does not depend on the images.

    Args:
        coordinates: (row, column) of each patch, without padding.
        segments: image of each of the N patches, -1 at padding.
        sizes: (rows, columns) of each image, in patches.
        side: patches per side of a full window.

    Returns:
        window_patches, window_segments and window_slots of `ImagePatches`, for one row.
    """
    size = side**2  # S, slots of a bin
    num_bins = 2 * -(-len(segments) // size) + 1
    window_patches = np.full((num_bins, size), -1, np.int32)
    window_segments = np.full((num_bins, size), -1, np.int32)
    window_slots = np.zeros(len(segments), np.int32)
    filled = np.zeros(num_bins, np.int64)
    windows, num_windows = _windows(coordinates, segments, sizes, side)
    ends = np.cumsum(np.bincount(windows, minlength=num_windows))[:-1]
    for window, members in enumerate(np.split(np.argsort(windows, kind="stable"), ends)):
        b = int(np.argmax(filled + len(members) <= size))
        slots = slice(filled[b], filled[b] + len(members))
        window_patches[b, slots] = members
        window_segments[b, slots] = window
        window_slots[members] = b * size + np.arange(slots.start, slots.stop)
        filled[b] += len(members)
    return {
        "window_patches": window_patches,
        "window_segments": window_segments,
        "window_slots": window_slots,
    }


def _windows(
    coordinates: np.ndarray, segments: np.ndarray, sizes: np.ndarray, side: int
) -> tuple[np.ndarray, int]:
    """Index of each patch's window, image by image and row by row, and the number of windows."""
    across = -(-sizes // side)  # windows per side of each image
    first = np.cumsum([0, *across.prod(-1)])
    image = segments[: len(coordinates)]
    row, column = coordinates.T // side
    return first[image] + row * across[image, 1] + column, int(first[-1])


def _table_rows(
    coordinates: np.ndarray, segments: np.ndarray, sizes: np.ndarray, side: int
) -> dict[str, np.ndarray]:
    """Bilinear interpolation of a side x side table over each image, with aligned corners.

    Args:
        coordinates, segments, sizes: as in `_window_bins`.
        side: rows and columns of the table.

    Returns:
        position_rows and position_weights of `ImagePatches`, for one row.
    """
    num = len(coordinates)
    steps = np.maximum(sizes[segments[:num]] - 1, 1).astype(np.float32)
    place = coordinates.astype(np.float32) * np.float32(side - 1) / steps  # in cells of the table
    before = np.floor(place)
    after = np.minimum(before + 1, side - 1)
    cells = np.stack([before, after], -1).astype(np.int32)  # [num, (row, column), 2]
    shares = np.stack([1 - (place - before), place - before], -1)
    rows = np.zeros((len(segments), 4), np.int32)
    weights = np.zeros((len(segments), 4), np.float32)
    rows[:num] = (cells[:, 0, :, None] * side + cells[:, 1, None]).reshape(num, 4)
    weights[:num] = (shares[:, 0, :, None] * shares[:, 1, None]).reshape(num, 4)
    return {"position_rows": rows, "position_weights": weights}


def prompt_positions(
    tokens: Int[np.ndarray, " L"], grids: Int[np.ndarray, "_ 3"], config: BackboneConfig
) -> tuple[Int[np.ndarray, "L 3"], int]:
    """M-RoPE position ids of an unpadded prompt.

    Each text token advances all three components by 1. Within an image, time is constant, and
    height and width count merged rows and columns from the image's first position. What follows
    the image starts at that position plus the longer of the two merged sides.

    Args:
        tokens: the prompt, with one image token for each merged feature.
        grids: (frames, rows, columns) of each image, in patches.
        config: gives the image token and the merge size.

    Returns:
        Position ids (time, height, width), and the position of the first response token.

    Raises:
        ValueError: image tokens and grids disagree.
    """
    tokens, grids = np.asarray(tokens), np.asarray(grids).reshape(-1, 3)
    merged = grids[:, 1:] // config.vision.merge_size
    is_image = tokens == config.image_token_id
    if is_image.sum() != merged.prod(-1).sum():
        raise ValueError(
            f"prompt has {int(is_image.sum())} image tokens but grids {grids.tolist()} give "
            f"{int(merged.prod(-1).sum())} features; expand each image placeholder to its features"
        )
    positions = np.zeros((len(tokens), 3), np.int32)
    index = position = 0
    for height, width in merged:
        start = index + int(np.argmax(is_image[index:]))
        stop = start + int(height * width)
        if not is_image[start:stop].all():
            raise ValueError(
                f"image tokens {start}..{stop - 1} of a {height} x {width} image must be "
                "consecutive; do not truncate a prompt inside an image"
            )
        positions[index:start] = position + np.arange(start - index)[:, None]
        position += start - index
        rows, columns = np.divmod(np.arange(stop - start), width)
        positions[start:stop] = position + np.stack([np.zeros_like(rows), rows, columns], -1)
        position += int(max(height, width))
        index = stop
    positions[index:] = position + np.arange(len(tokens) - index)[:, None]
    return positions, position + len(tokens) - index


def image_slots(tokens: Int[np.ndarray, " L"], config: BackboneConfig) -> Int[np.ndarray, " L"]:
    """Index of the merged feature at each image token of a prompt, -1 elsewhere."""
    is_image = np.asarray(tokens) == config.image_token_id
    return np.where(is_image, np.cumsum(is_image) - 1, -1).astype(np.int32)
