"""The device mesh, and shardings from logical axis names.

Parameters, activations, caches and batches name their axes ("batch", "embed", "mlp", ...). Ordered
rules map these names to mesh axes, with one table for training and one for decoding. The default
training rules are FSDP: all four mesh axes shard the batch, all but "data" shard the parameters,
and each parameter is all-gathered where it is used. The default decoding rules are tensor parallel:
"tensor" and "sequence" shard heads, MLP and vocabulary, "data" and "fsdp" shard the batch.
"""

from __future__ import annotations

import difflib
import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from models import layers
from models.attention.packed import AttentionImpl

MESH_AXES = ("data", "fsdp", "tensor", "sequence")
# All names that parameters, activations, caches and batches have; a test compares them with models.
LOGICAL_AXES = (
    *("batch", "tokens", "vocab", "embed", "mlp", "heads", "kv_heads", "head_dim"),
    *("attended_heads", "expert", "expert_embed", "layers"),
)

# (logical axis, the mesh axes that shard it), in order of precedence.
Rules = Sequence[tuple[str, str | Sequence[str] | None]]


def make_mesh(
    data: int,
    fsdp: int,
    tensor: int,
    sequence: int = 1,
    devices: Sequence[jax.Device] | None = None,
    slices: Sequence[int] | None = None,
) -> Mesh:
    """A mesh of all devices with the axes `MESH_AXES`.

    "data" spans the slices of TPUs or nodes of GPUs, between which the network is slow, or with
    data = 1 "fsdp" does; "tensor" and "sequence" stay on one host if they fit.

    Args:
        data, fsdp, tensor, sequence: sizes, at least 1; one may be -1 for all remaining devices.
            data = 0 is the number of slices.
        devices: by default all devices of the run.
        slices: the slice of each device; by default its `slice_index`.

    Raises:
        ValueError: the sizes do not multiply to the number of devices, or neither "data" nor, with
            data = 1, "fsdp" is a multiple of the number of slices.
    """
    devices = jax.devices() if devices is None else devices
    slices = slices or [getattr(device, "slice_index", None) or 0 for device in devices]
    sizes = [data or len(set(slices)), fsdp, tensor, sequence]
    named = " x ".join(f"mesh.{name}={size}" for name, size in zip(MESH_AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"mesh sizes must be positive, or -1 for one of them, got {named}")
    known, count = math.prod(sizes), len(devices)
    if count % known if known < 0 else known != count:
        needed = f"a multiple of {-known}" if known < 0 else str(known)
        raise ValueError(
            f"{named} needs {needed} devices, there {'is' if count == 1 else 'are'} {count} "
            f"({devices[0].platform}); add "
            f"{_fitting_flags(sizes, count)}"
        )
    sizes = tuple(count // -known if size == -1 else size for size in sizes)
    return Mesh(_grid(sizes, devices, slices), MESH_AXES, (AxisType.Auto,) * len(MESH_AXES))


def _fitting_flags(sizes: Sequence[int], count: int) -> str:
    """Flags of a mesh of `count` devices: axes are shortened where needed, fsdp is the rest."""
    fitting, left = {"fsdp": -1}, count
    named = dict(zip(MESH_AXES, sizes, strict=True))
    for name in ("data", "tensor", "sequence"):
        fitting[name] = math.gcd(left, max(named[name], 1))
        left //= fitting[name]
    changed = (name for name in MESH_AXES if fitting[name] != named[name])
    return " ".join(f"--config.mesh.{name}={fitting[name]}" for name in changed)


def _grid(
    sizes: tuple[int, ...], devices: Sequence[jax.Device], slices: Sequence[int]
) -> np.ndarray:
    """The devices in the shape of the mesh; the later axes connect nearby devices."""
    slice_of = dict(zip(devices, slices, strict=True))
    members = [[x for x in devices if slice_of[x] == n] for n in sorted(set(slices))]
    spanning = next((axis for axis in (0, 1) if sizes[axis] % len(members) == 0), None)
    if spanning is None or (spanning and sizes[0] > 1):
        raise ValueError(
            f"mesh.data={sizes[0]} must be a multiple of {len(members)} slices, between which the "
            f"network is slow; set it to {len(members)}, or to 0 for their number"
        )
    size = tuple(n // len(members) if axis == spanning else n for axis, n in enumerate(sizes))
    grid_of = functools.partial(mesh_utils.create_device_mesh, size, allow_split_physical_axes=True)
    grid = np.concatenate([*map(grid_of, members)], axis=spanning)
    rows = grid.reshape(-1, sizes[2] * sizes[3])
    if all(len({device.process_index for device in row}) == 1 for row in rows):
        return grid
    # A row of a batch would span several hosts, so order the devices host by host.
    by_host = sorted(devices, key=lambda x: (slice_of[x], x.process_index, x.id))
    return np.array(by_host).reshape(sizes)


def platform(mesh: Mesh) -> str:
    """ "cpu", "gpu" or "tpu"."""
    return mesh.devices.flat[0].platform


_warn_once = functools.cache(logging.warning)  # not once per parameter


def axis_names(axes: str | Sequence[str] | None) -> tuple[str, ...]:
    """The mesh axes of one entry of rules or of a `PartitionSpec`."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def mesh_axes(name: str | None, rules: Rules) -> tuple[str, ...]:
    """The mesh axes in the first rule for a logical axis."""
    return axis_names(next((axes for rule, axes in rules if rule == name), None))


def partition_spec(
    path: str, logical: layers.Axes, shape: tuple[int, ...], rules: Rules, mesh: Mesh
) -> PartitionSpec:
    """Of one array with these logical axes, as `param_shardings` says; `path` is for messages."""
    if len(logical) != len(shape):
        raise ValueError(f"{path} has axes {logical} but shape {shape}; name each dimension once")
    spec: list[tuple[str, ...] | str | None] = []
    logical_of: dict[str, str | None] = {}  # mesh axis -> the logical axis mapped to it
    for name, size in zip(logical, shape, strict=True):
        used, num_parts = [], 1
        for mesh_axis in mesh_axes(name, rules):
            if mesh_axis in logical_of:
                raise ValueError(
                    f"{path}: axes {logical_of[mesh_axis]!r} and {name!r} are both mapped to mesh "
                    f"axis {mesh_axis!r}; change one of them in the sharding rules"
                )
            logical_of[mesh_axis] = name
            num_parts *= mesh.shape[mesh_axis]
            if size % num_parts:
                _warn_once(
                    f"axis {name!r} of size {size} is not divisible by mesh.{mesh_axis}="
                    f"{mesh.shape[mesh_axis]} and is replicated"
                )
                break
            used.append(mesh_axis)
        spec.append(tuple(used) if len(used) > 1 else used[0] if used else None)
    return PartitionSpec(*spec)


def check_rules(name: str, rules: Rules) -> None:
    """Rejects rules, the config's key `name`, with an unknown axis or two for one logical axis."""
    named = [logical for logical, _ in rules]
    for logical in named:
        if logical not in LOGICAL_AXES:
            near = difflib.get_close_matches(logical, LOGICAL_AXES)
            raise ValueError(
                f"{name} has a rule for {logical!r}, which no array has an axis of; write "
                f"{' or '.join(map(repr, near)) or 'one of ' + ', '.join(LOGICAL_AXES)}"
            )
        if named.count(logical) > 1:
            raise ValueError(
                f"{name} must have one rule for {logical!r}, got {named.count(logical)}, of which "
                "only the first would count; remove the others"
            )
        for mesh_axis in mesh_axes(logical, rules):
            if mesh_axis not in MESH_AXES:
                raise ValueError(
                    f"{name} maps {logical!r} to {mesh_axis!r}, which is not a mesh axis; "
                    f"choose among {', '.join(MESH_AXES)} or None"
                )


def param_shardings(logical_axes: Any, shapes: Any, rules: Rules, mesh: Mesh) -> Any:
    """The sharding of every array of a tree, such as parameters or a KV cache.

    The first rule that names a logical axis decides; an axis without a rule is replicated. An axis
    is sharded over the longest prefix of its rule's mesh axes whose product divides its size. If
    that prefix is empty (2 kv heads on tensor=4: each device then holds the keys its query heads
    need) or not all of them, a warning is logged once per axis and size.

    `logical_axes` has a tuple of axis names for every array or `ShapeDtypeStruct` of `shapes`.

    Raises:
        ValueError: the rules map two axes of one array to the same mesh axis.
    """

    def sharding_of(path: jax.tree_util.KeyPath, logical: layers.Axes, shape: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, partition_spec(name, logical, shape.shape, rules, mesh))

    return jax.tree_util.tree_map_with_path(
        sharding_of, logical_axes, shapes, is_leaf=lambda node: isinstance(node, tuple)
    )


def shardings_like(tree: Any, shardings: Any, mesh: Mesh) -> Any:
    """Shardings of a tree that contains copies of the parameter tree, such as an optimizer state.

    A leaf whose path ends in a parameter's path is sharded like it; any other is replicated.
    `tree` has arrays or `ShapeDtypeStruct`s; `shardings` are those of the parameters.
    """
    by_path = dict(jax.tree_util.tree_leaves_with_path(shardings))

    def sharding_of(path: jax.tree_util.KeyPath, _: Any) -> NamedSharding:
        tails = (path[start:] for start in range(len(path)))
        param = next((tail for tail in tails if tail in by_path), None)
        return replicated(mesh) if param is None else by_path[param]

    return jax.tree_util.tree_map_with_path(sharding_of, tree)


def of(tree: Any) -> Any:
    """The shardings of a tree's arrays."""
    return jax.tree.map(lambda x: x.sharding, tree)


def on_host(shardings: Any) -> Any:
    """The same shardings, in pinned host memory."""
    return jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), shardings)


def has_host_memory(mesh: Mesh) -> bool:
    """Whether the devices can keep arrays in pinned host memory."""
    return all(
        any(memory.kind == "pinned_host" for memory in device.addressable_memories())
        for device in mesh.local_devices
    )


def abstract(tree: Any, shardings: Any = None) -> Any:
    """Shape, dtype and sharding (by default the array's) of every array, to restore it."""
    shardings = of(tree) if shardings is None else shardings
    return jax.tree.map(
        lambda x, its: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=its), tree, shardings
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, rules: Rules) -> NamedSharding:
    """Shards the leading axis (prompts, rows) over the mesh axes of "batch", and no other axis."""
    return NamedSharding(mesh, PartitionSpec(mesh_axes("batch", rules)))


def replicate(array: np.ndarray, mesh: Mesh) -> jax.Array:
    """Replicates an array on all devices; every process passes the same array."""
    return jax.make_array_from_callback(array.shape, replicated(mesh), lambda part: array[part])


def num_shards(sharding: NamedSharding) -> int:
    """Number of shards of the leading axis, over all processes."""
    return math.prod(sharding.mesh.shape[axis] for axis in axis_names(sharding.spec[0]))


def num_shards_of(axis: str, rules: Rules, mesh: Mesh) -> int:
    """Number of shards of a logical axis under the rules; its size must be divisible by it."""
    return math.prod(mesh.shape[mesh_axis] for mesh_axis in mesh_axes(axis, rules))


def attention_impl(name: str, rules: Rules, mesh: Mesh) -> AttentionImpl:
    """The attention implementation over whole rows for a mesh.

    Args:
        name: "xla" for XLA matmuls; "kernel" or "auto" for the device's kernel, if it has one.
        rules: they give the mesh axes that shard rows and heads inside attention.
    """
    kernel = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu"}.get(platform(mesh), "xla")
    axes = mesh_axes("batch", rules), mesh_axes("attended_heads", rules)
    return AttentionImpl("xla" if name == "xla" else kernel, mesh, *axes)


def local_rows(size: int, sharding: NamedSharding) -> Int[np.ndarray, " n"]:
    """Indices of the batch rows on this process's devices, ascending, not always contiguous.

    `size` is the number of rows of the global batch, a multiple of the number of shards.
    """
    slices = filter(None, sharding.addressable_devices_indices_map((size,)).values())
    return np.array(sorted({row for (rows,) in slices for row in range(size)[rows]}))


def owners(size: int, sharding: NamedSharding) -> Int[np.ndarray, " N"]:
    """The process whose devices hold each row of a batch; see `local_rows`."""
    found = np.zeros(size, int)
    for device, (rows,) in sharding.devices_indices_map((size,)).items():
        found[rows] = device.process_index
    return found


def put_batch(batch: Any, sharding: NamedSharding) -> Any:
    """Puts a tree of numpy arrays [B, ...] on the devices, sharded along their leading axis.

    Leaves may be None. In a run of several processes, B is the global batch and each process passes
    its `local_rows`.

    Raises:
        ValueError: B is not divisible by the number of shards.
    """
    num_local = len(local_rows(num_shards(sharding), sharding))

    def check(path: jax.tree_util.KeyPath, array: Any) -> None:
        if array.ndim == 0 or array.shape[0] % num_local:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} of shape {array.shape} must have a leading "
                f"axis divisible by {num_local} shards ({_product(sharding)} of this process)"
            )

    for path, array in jax.tree_util.tree_leaves_with_path(batch):
        check(path, array)
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)  # all arrays in one call, which is faster
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)


def check_divides(name: str, size: int, sharding: NamedSharding) -> None:
    """Rejects a batch size, the config's key `name`, that the mesh cannot shard evenly."""
    count = num_shards(sharding)
    if size < 1 or size % count:
        below = max(size, 0) // count * count
        choices = " or ".join(str(n) for n in (below, below + count) if n)
        raise ValueError(
            f"{name} {size} must be divisible by {count} devices ({_product(sharding)}); "
            f"set it to {choices}"
        )


def _product(sharding: NamedSharding) -> str:
    """The mesh axes of the leading axis, such as "data x fsdp"."""
    return " x ".join(axis_names(sharding.spec[0]))
