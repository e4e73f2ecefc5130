"""Products of consecutive groups of rows, each with a kernel of its own, and their gradients.

TPUs run megablox and GPUs a Triton kernel. The grouped products of JAX multiply all rows by all
kernels there, on TPUs in the kernels' gradient alone; they are what CPUs run.

Letters: M rows, E groups, C and F input and output width.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array, Float, Int

# Largest tiles of megablox for rows, inputs and outputs; its three products fit a v5e's VMEM.
_TILE_ROWS, _TILE_INPUTS, _TILE_OUTPUTS = 256, 2048, 512
_LANES = 128  # tiles of inputs and outputs are multiples of it
# Sides of what a program of the Triton kernels computes, and the step of its loop.
_GPU_TILE, _GPU_STEP = 128, 32
# lhs [M, C] and g [M, F] to [E, C, F], for `jax.lax.ragged_dot_general`.
_BY_GROUP = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(),
)


@jax.custom_vjp
def grouped(
    lhs: Float[Array, "M C"], kernels: Float[Array, "E C F"], sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """Consecutive rows of lhs, `sizes` of them, times the kernel of their group.

    The rows after the last group are not defined, and have no gradient. The kernels' gradients are
    rounded to their dtype once per call, so per device and microbatch.
    """
    return lax.platform_dependent(
        lhs, kernels, sizes, tpu=_megablox, cuda=_triton, default=lax.ragged_dot
    )


def _grouped_bwd(saved, g):
    lhs, kernels, sizes = saved
    d_lhs = lax.platform_dependent(
        g,
        kernels,
        sizes,
        tpu=functools.partial(_megablox, transpose_kernels=True),
        cuda=functools.partial(_triton, transpose_kernels=True),
        default=lambda g, kernels, sizes: lax.ragged_dot(g, kernels.swapaxes(1, 2), sizes),
    )
    is_grouped = jnp.arange(len(g))[:, None] < sizes.sum()
    d_kernels = lax.platform_dependent(
        lhs,
        g,
        sizes,
        tpu=_megablox_by_group,
        cuda=_triton_by_group,
        default=lambda lhs, g, sizes: lax.ragged_dot_general(lhs, g, sizes, _BY_GROUP),
    )
    return jnp.where(is_grouped, d_lhs, 0), d_kernels.astype(kernels.dtype), None


grouped.defvjp(lambda *inputs: (grouped(*inputs), inputs), _grouped_bwd)


def _megablox(
    lhs: Array,
    kernels: Array,
    sizes: Array,
    *,
    transpose_kernels: bool = False,
    interpret: bool = False,
) -> Array:
    options = {"transpose_rhs": transpose_kernels, "interpret": interpret}
    return gmm(_padded(lhs), kernels, sizes, lhs.dtype, _tiling, **options)[: len(lhs)]


def _megablox_by_group(lhs: Array, g: Array, sizes: Array, *, interpret: bool = False) -> Array:
    return tgmm(_padded(lhs).T, _padded(g), sizes, g.dtype, _tiling, interpret=interpret)


def _padded(rows: Array) -> Array:
    """Rows in whole tiles."""
    return jnp.pad(rows, ((0, -len(rows) % _row_tile(len(rows))), (0, 0)))


def _row_tile(num_rows: int) -> int:
    return _TILE_ROWS if num_rows > 4 * _TILE_ROWS else _TILE_ROWS // 2


def _tiling(num_rows: int, num_inputs: int, num_outputs: int) -> tuple[int, int, int]:
    """Tiles that cover a product with little left over; megablox multiplies whole tiles."""
    inputs = min(_TILE_INPUTS, _whole_lanes(num_inputs))
    outputs = pl.cdiv(num_outputs, pl.cdiv(num_outputs, _TILE_OUTPUTS))
    return _row_tile(num_rows), inputs, _whole_lanes(outputs)


def _whole_lanes(size: int) -> int:
    return pl.cdiv(size, _LANES) * _LANES


def _triton(
    lhs: Array,
    kernels: Array,
    sizes: Array,
    *,
    transpose_kernels: bool = False,
    interpret: bool = False,
) -> Array:
    """A program multiplies a tile of a group's rows with a tile of its kernel's columns."""
    (M, C), E = lhs.shape, len(sizes)
    F = kernels.shape[1 if transpose_kernels else 2]
    stops, num_tiles = jnp.cumsum(sizes), pl.cdiv(sizes, _GPU_TILE)
    last_tiles = jnp.cumsum(num_tiles)
    tile = jnp.arange(pl.cdiv(M, _GPU_TILE) + E)  # at least as many as there are
    group = jnp.minimum(jnp.searchsorted(last_tiles, tile, side="right"), E - 1)
    starts = (stops - sizes)[group] + (tile - (last_tiles - num_tiles)[group]) * _GPU_TILE
    tiles = [a.astype(jnp.int32) for a in (group, starts, stops[group])]

    def body(groups, starts, stops, lhs, kernels, out):
        group, start = groups[pl.program_id(0)], starts[pl.program_id(0)]
        stop = stops[pl.program_id(0)]
        rows, is_row = _part(start, _GPU_TILE, stop)
        columns, is_column = _part(pl.program_id(1) * _GPU_TILE, _GPU_TILE, F)

        def add(i, total):
            inputs, is_input = _part(i * _GPU_STEP, _GPU_STEP, C)
            a = _load(lhs.at[rows, inputs], is_row, is_input)
            if transpose_kernels:
                b = _load(kernels.at[group, columns, inputs], is_column, is_input).T
            else:
                b = _load(kernels.at[group, inputs, columns], is_input, is_column)
            return total + jnp.dot(a, b, preferred_element_type=jnp.float32)

        num_steps = (start < stop).astype(jnp.int32) * pl.cdiv(C, _GPU_STEP)  # 0 for padding tiles
        total = lax.fori_loop(0, num_steps, add, jnp.zeros((_GPU_TILE, _GPU_TILE), jnp.float32))
        is_there = is_row[:, None] & is_column[None]
        plgpu.store(out.at[rows, columns], total.astype(out.dtype), mask=is_there)

    return _call(body, (len(tile), pl.cdiv(F, _GPU_TILE)), (M, F), tiles, (lhs, kernels), interpret)


def _triton_by_group(lhs: Array, g: Array, sizes: Array, *, interpret: bool = False) -> Array:
    """A program sums a tile of a group's lhs^T g over the group's rows."""
    C, F = lhs.shape[1], g.shape[1]
    stops = jnp.cumsum(sizes).astype(jnp.int32)

    def body(starts, stops, lhs, g, out):
        group = pl.program_id(0)
        start, stop = starts[group], stops[group]
        inputs, is_input = _part(pl.program_id(1) * _GPU_TILE, _GPU_TILE, C)
        outputs, is_output = _part(pl.program_id(2) * _GPU_TILE, _GPU_TILE, F)

        def add(i, total):
            rows, is_row = _part(start + i * _GPU_STEP, _GPU_STEP, stop)
            a = _load(lhs.at[rows, inputs], is_row, is_input)
            b = _load(g.at[rows, outputs], is_row, is_output)
            return total + jnp.dot(a.T, b, preferred_element_type=jnp.float32)

        num_steps = pl.cdiv(stop - start, _GPU_STEP)
        total = lax.fori_loop(0, num_steps, add, jnp.zeros((_GPU_TILE, _GPU_TILE), jnp.float32))
        is_there = is_input[:, None] & is_output[None]
        plgpu.store(out.at[group, inputs, outputs], total.astype(out.dtype), mask=is_there)

    grid = len(sizes), pl.cdiv(C, _GPU_TILE), pl.cdiv(F, _GPU_TILE)
    lists = [stops - sizes.astype(jnp.int32), stops]
    return _call(body, grid, (len(sizes), C, F), lists, (lhs, g), interpret)


def _part(start: Array | int, size: int, stop: Array | int) -> tuple[Any, Array]:
    """`size` places from `start`, and which of them are before `stop`."""
    return pl.ds(start, size), start + jnp.arange(size) < stop


def _load(ref, is_row: Array, is_column: Array) -> Array:
    return plgpu.load(ref, mask=is_row[:, None] & is_column[None], other=0.0)


def _call(body, grid, shape, lists, arrays, interpret: bool) -> Array:
    """Every program sees lists and arrays whole; padded, as masked indices may exceed them."""

    def whole(shape):
        padded = [size + _GPU_TILE for size in shape[-2:]]
        return pl.BlockSpec((*shape[:-2], *padded), lambda *_: (0,) * len(shape))

    return pl.pallas_call(
        body,
        jax.ShapeDtypeStruct(shape, arrays[-1].dtype),
        grid=grid,
        in_specs=[pl.BlockSpec(a.shape, lambda *_: (0,)) for a in lists]
        + [whole(a.shape) for a in arrays],
        out_specs=whole(shape),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
    )(*lists, *arrays)
