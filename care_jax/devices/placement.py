"""Functions traced for a mesh: sharded activations, gradients of kernels, and experts.

The layers of a backbone name the axes of what they compute (`layers.activation_sharding`); `placed`
binds these names to a mesh. XLA propagates the shardings of activations. The sums of kernels'
gradients and the exchange of tokens between experts are written out as collectives.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from care_jax.devices.sharding import (
    MESH_AXES,
    Rules,
    axis_names,
    mesh_axes,
    partition_spec,
    platform,
)
from models import layers


def placed(function: Callable, rules: Rules, mesh: Mesh) -> Callable:
    """`function`, with its backbone's activations and kernels' gradients sharded by `rules`."""
    if mesh.size == 1:
        return function

    def constrained(x: jax.Array, logical: layers.Axes) -> jax.Array:
        spec = partition_spec("activation", logical, x.shape, rules, mesh)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    @functools.wraps(function)
    def traced(*args, **kwargs):
        by_rules = {"rules": rules, "mesh": mesh}
        with layers.activation_sharding(
            constrained,
            functools.partial(_scattered, **by_rules),
            functools.partial(_over_experts, **by_rules),
        ):
            return function(*args, **kwargs)

    return traced


def _scattered(
    gradient: layers.KernelGradient, axes: layers.Axes, *, rules: Rules, mesh: Mesh
) -> layers.KernelGradient:
    """`gradient` of the rows of each device, reduce-scattered to the shards of the kernel.

    XLA would all-reduce over the whole of v5e:8x8: it has no reduce-scatter for such a group, but
    one for "tensor" and "sequence", and one for "fsdp". Rules that do not shard the batch over the
    whole mesh leave it to XLA. So do GPUs, where XLA reduce-scatters by itself.
    """
    if platform(mesh) == "gpu":
        return gradient

    def scattered(x: jax.Array, g: jax.Array) -> jax.Array:
        rows = partition_spec("activation", ("batch",), x.shape[:1], rules, mesh)
        if math.prod(mesh.shape[axis] for axis in axis_names(rows[0])) != mesh.size:
            return gradient(x, g)
        shape = jax.eval_shape(gradient, x, g).shape
        spec = partition_spec("gradient", axes, shape, rules, mesh)
        unsummed = set(MESH_AXES) - {axis for used in spec for axis in axis_names(used)}

        def of_own_rows(x, g):
            total = gradient(x, g)
            for dim, used in enumerate(spec):
                total = jnp.moveaxis(total, dim, 0)
                # libtpu aborts on a reduce-scatter of one device.
                split = [axis for axis in axis_names(used) if mesh.shape[axis] > 1]
                for _, group in itertools.groupby(split, lambda axis: axis == "fsdp"):
                    total = jax.lax.psum_scatter(total, (*group,), tiled=True)
                total = jnp.moveaxis(total, 0, dim)
            return jax.lax.psum(total, sorted(unsummed))

        return jax.shard_map(of_own_rows, mesh=mesh, in_specs=rows, out_specs=spec)(x, g)

    return scattered


def _over_experts(
    compute: layers.OfExperts, axes: Sequence[layers.Axes], *, rules: Rules, mesh: Mesh
) -> Callable[[Any, Any], jax.Array]:
    """Expert parallelism: `compute` on the local experts, for the tokens of the expert group.

    Over the mesh axes of "expert" that shard the batch, tokens are all-gathered and outputs
    reduce-scattered; over its other axes outputs are all-reduced. Kernels are cast, and
    all-gathered over their other mesh axes; their gradients are summed over devices in float32.
    """
    expert_axes = tuple(axis for axis in mesh_axes("expert", rules) if mesh.shape[axis] > 1)

    def outputs(tokens: Any, kernels: Any) -> jax.Array:
        x, dtype = tokens[0], tokens[0].dtype
        (rows,) = partition_spec("activation", ("batch",), x.shape[:1], rules, mesh)
        rows = tuple(axis for axis in axis_names(rows) if mesh.shape[axis] > 1)
        num_shards = math.prod(mesh.shape[axis] for axis in expert_axes)
        if kernels[0].shape[0] % num_shards:
            raise ValueError(
                f"{kernels[0].shape[0]} experts must be divisible by the {num_shards} devices of "
                f"mesh axes {', '.join(expert_axes)}; change the rule of 'expert', or the mesh"
            )
        gathered = tuple(axis for axis in rows if axis in expert_axes)
        kept = tuple(axis for axis in rows if axis not in expert_axes)
        specs = [
            partition_spec("kernel", logical, kernel.shape, rules, mesh)
            for logical, kernel in zip(axes, kernels, strict=True)
        ]

        def on_device(tokens, kernels):
            whole = [
                _gathered(kernel, spec, dtype, mesh)
                for kernel, spec in zip(kernels, specs, strict=True)
            ]
            first = 0
            if expert_axes:
                first = jax.lax.axis_index(expert_axes) * whole[0].shape[0]
            y = compute(tokens, whole, first)
            summed = tuple(axis for axis in expert_axes if axis not in gathered)
            y = jax.lax.psum(y, summed) if summed else y
            if not gathered:
                return y
            return jax.lax.psum_scatter(y, gathered, tiled=True)

        # Axes that are gathered come last, so that the shards of the output are in order.
        return jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(PartitionSpec(kept), specs),
            out_specs=PartitionSpec((*kept, *gathered)),
            check_vma=False,  # else gradients would be summed before they are float32
        )(tokens, list(kernels))

    return outputs


def _gathered(kernel: jax.Array, spec: PartitionSpec, dtype: jnp.dtype, mesh: Mesh) -> jax.Array:
    """An expert kernel [E, ...] of this device, cast and whole but for its first axis."""
    parts = [
        (dim, axis)
        for dim, used in enumerate(spec)
        for axis in reversed(axis_names(used))
        if dim and mesh.shape[axis] > 1
    ]

    @jax.custom_vjp
    def whole(kernel):
        kernel = kernel.astype(dtype)
        for dim, axis in parts:
            kernel = jax.lax.all_gather(kernel, axis, axis=dim, tiled=True)
        return kernel

    def scattered(_, gradient):
        gradient = gradient.astype(jnp.float32)
        for dim, axis in reversed(parts):
            gradient = jax.lax.psum_scatter(gradient, axis, scatter_dimension=dim, tiled=True)
        return (gradient.astype(kernel.dtype),)

    whole.defvjp(lambda kernel: (whole(kernel), None), scattered)
    return whole(kernel)
