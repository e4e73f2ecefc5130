"""Positions of tokens and patches, computed once per prompt on the host (numpy).

`pack_images` computes the image of each patch (for full attention) and its window (for windowed
attention). For a tower with learned positions, it also computes the rows of the position table that
each patch interpolates. Hugging Face processors give an image's merge blocks in raster order, and
the patches of a block in raster order. For a tower with windows, `pack_images` sorts the blocks by
window, and `feature_indices` points at their features in that order.
"""

from __future__ import annotations

import functools
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

    The patches of an image are consecutive, and so are those of a window.
    """

    patches: Float[HostOrDevice, "B N C"]  # channel, frame, row, column; normalised
    coordinates: Int[HostOrDevice, "B N 2"]  # (row, column) in the image, in patches
    segments: Int[HostOrDevice, "B N"]  # index of the image within its row, -1 at padding
    # Index of the window within its row, -1 at padding; None if the tower has no windows.
    windows: Int[HostOrDevice, "B N"] | None = None
    # None if the tower has no position table:
    position_rows: Int[HostOrDevice, "B N 4"] | None = None  # table rows to interpolate
    position_weights: Float[HostOrDevice, "B N 4"] | None = None  # sum 1; 0 at padding


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
        num_patches: N, the padded number of patches per row.

    Returns:
        B = len(patches) rows of numpy arrays; patches keep their dtype.

    Raises:
        ValueError: a grid does not fit its patches, the tower, or num_patches.
    """
    if num_patches % config.merge_size**2:
        raise ValueError(
            f"num_patches {num_patches} must be a multiple of merge_size^2 = "
            f"{config.merge_size**2}; round it up"
        )
    packed = np.zeros((len(patches), num_patches, patches[0].shape[-1]), patches[0].dtype)
    rows = [
        _pack_row(patch, np.asarray(grid).reshape(-1, 3), config, into)
        for patch, grid, into in zip(patches, grids, packed, strict=True)
    ]
    others = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return ImagePatches(patches=packed, **others)


def _pack_row(
    patches: np.ndarray, grids: np.ndarray, config: VisionConfig, into: np.ndarray
) -> dict[str, np.ndarray]:
    """Writes the patches of one row `into` [N, C], which is 0; returns its other fields."""
    total, N = int(grids.prod(-1).sum()), len(into)
    if total != len(patches) or total > N:
        raise ValueError(
            f"grids {grids.tolist()} describe {total} patches: got {len(patches)} patches and room "
            f"for {N}; pass all patches and raise num_patches"
        )
    coordinates, images, windows = _places(grids, config)
    fields = {"segments": _padded(images, N, -1)}
    if config.window_size:
        order = np.argsort(windows, kind="stable")  # images and merge blocks stay whole
        np.take(patches, order, 0, out=into[:total], mode="clip")  # "raise" would copy once more
        coordinates = coordinates[order]
        fields["windows"] = _padded(windows[order], N, -1)
    else:
        into[:total] = patches
    fields["coordinates"] = _padded(coordinates, N)
    if config.num_position_embeddings:
        rows, weights = _table_rows(coordinates, grids[images, 1:], config.position_side)
        fields |= {"position_rows": _padded(rows, N), "position_weights": _padded(weights, N)}
    return fields


def _places(grids: np.ndarray, config: VisionConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, column), image and window of each patch, in the processor's order.

    Windows are numbered image by image and row by row; without windows, an image is one.
    """
    orders = [_block_order(*grid, config.merge_size) for grid in grids.tolist()]
    coordinates = np.concatenate([np.zeros((0, 2), np.int32), *orders], dtype=np.int32)
    images = np.repeat(np.arange(len(grids), dtype=np.int32), grids.prod(-1))
    if not config.window_size:
        return coordinates, images, images
    side = config.window_side
    across = -(-grids[:, 1:] // side)  # windows per side of each image
    first = np.cumsum([0, *across.prod(-1)])
    row, column = coordinates.T // side
    windows = first[images] + row * across[images, 1] + column
    return coordinates, images, windows.astype(np.int32)


def _padded(array: np.ndarray, length: int, value: int = 0) -> np.ndarray:
    padded = np.full((length, *array.shape[1:]), value, array.dtype)
    padded[: len(array)] = array
    return padded


@functools.lru_cache(maxsize=256)  # images have few sizes
def _block_order(frames: int, height: int, width: int, merge: int) -> np.ndarray:
    """(row, column) of each patch of an image, in merge-block order."""
    if frames != 1 or height % merge or width % merge or height * width == 0:
        raise ValueError(
            f"grid {(frames, height, width)} must be one frame of rows and columns that are "
            f"positive multiples of merge_size {merge}; resize the image"
        )
    raster = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), -1)
    blocks = raster.reshape(height // merge, merge, width // merge, merge, 2)
    return blocks.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def _table_rows(
    coordinates: np.ndarray, sizes: np.ndarray, side: int
) -> tuple[np.ndarray, np.ndarray]:
    """Bilinear interpolation of a side x side table over each patch's image, aligned corners."""
    steps = np.maximum(sizes - 1, 1).astype(np.float32)
    exact = coordinates.astype(np.float32) * np.float32(side - 1) / steps  # in cells of the table
    before = np.floor(exact)
    after = np.minimum(before + 1, side - 1)
    cells = np.stack([before, after], -1).astype(np.int32)  # [patches, (row, column), 2]
    shares = np.stack([1 - (exact - before), exact - before], -1)
    rows = cells[:, 0, :, None] * side + cells[:, 1, None]
    weights = shares[:, 0, :, None] * shares[:, 1, None]
    return rows.reshape(-1, 4), weights.reshape(-1, 4)


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

    Returns:
        Position ids (time, height, width), and the position of the first response token.

    Raises:
        ValueError: image tokens and grids disagree.
    """
    tokens, grids = np.asarray(tokens), np.asarray(grids).reshape(-1, 3)
    merged = grids[:, 1:] // config.merge_size
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


def feature_indices(
    tokens: Int[np.ndarray, " L"], grids: Int[np.ndarray, "_ 3"], config: BackboneConfig
) -> Int[np.ndarray, " L"]:
    """Index of the merged feature at each image token of a prompt, -1 elsewhere.

    Args:
        tokens: the prompt, with its image tokens in the processor's order.
        grids: (frames, rows, columns) of each image, in patches.
    """
    is_image = np.asarray(tokens) == config.image_token_id
    feature_index = np.full(len(is_image), -1, np.int32)
    if config.vision is None:
        return feature_index
    _, _, windows = _places(np.asarray(grids).reshape(-1, 3), config.vision)
    order = np.argsort(windows[:: config.vision.merge_size**2], kind="stable")
    feature_index[is_image] = np.argsort(order)
    return feature_index
