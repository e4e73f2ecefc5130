"""Bytes between chips against numbers worked out by hand, on programs compiled for 8 CPU devices.

Constructs of TPU and GPU compilers, which no CPU program has, stand here as text.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from care_jax.aot.collectives import COLLECTIVES, received

SIZE = 1024  # float32 values: 4096 bytes


@pytest.fixture
def mesh():
    """Groups of 4 devices along "b"."""
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    return Mesh(devices, ("a", "b"), (AxisType.Auto,) * 2)


def compiled(mesh, function, *shapes):
    """Its HLO text; every array is sharded along "b"."""
    place = NamedSharding(mesh, P("b"))
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place) for shape in shapes]
    count = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.jit(function).lower(*arguments, count).compile().as_text()


def on_shards(mesh, function, out):
    mapped = dict(mesh=mesh, in_specs=P("b"), out_specs=out, check_vma=False)
    return jax.shard_map(function, **mapped)


@pytest.mark.parametrize(
    ("kind", "function", "out", "expected"),
    [
        ("all-gather", lambda x: jax.lax.all_gather(x, "b", tiled=True), P(), 4096 * 3 // 4),
        # Each of the four has 1024 bytes of its own, sums 256 of them, of which 3 come from others.
        (
            "reduce-scatter",
            lambda x: jax.lax.psum_scatter(x, "b", tiled=True),
            P("b"),
            3 * 256,
        ),
        ("all-reduce", lambda x: jax.lax.psum(x, "b"), P(), 2 * 1024 * 3 // 4),
        (
            "all-to-all",
            lambda x: jax.lax.all_to_all(x.reshape(4, -1), "b", 0, 0, tiled=True).reshape(-1),
            P("b"),
            1024 * 3 // 4,
        ),
        (
            "collective-permute",
            lambda x: jax.lax.ppermute(x, "b", [(i, (i + 1) % 4) for i in range(4)]),
            P("b"),
            1024,
        ),
    ],
)
def test_a_chip_receives_what_is_not_its_own(mesh, kind, function, out, expected):
    text = compiled(mesh, lambda x, _: on_shards(mesh, function, out)(x), (SIZE,))
    found = received(text)
    assert found.once == Counter({kind: expected}) and not found.each_pass
    assert found.by_collective(9) == {name: 0 for name in COLLECTIVES} | {kind: expected}


def gathered_sum(mesh):
    """A scalar for which 4096 bytes are gathered: 3072 from others."""
    return on_shards(mesh, lambda x: jnp.sin(jax.lax.all_gather(x, "b", tiled=True)).sum(), P())


def test_a_loop_of_known_length_counts_every_pass(mesh):
    """A scan of 5 inside a scan of 3."""

    def function(x, _):
        def inner(total, _):
            return total + gathered_sum(mesh)(x * total), None

        def outer(total, _):
            return jax.lax.scan(inner, total, None, length=5)[0], None

        return jax.lax.scan(outer, 1.0, None, length=3)[0]

    found = received(compiled(mesh, function, (SIZE,)))
    assert found.once == Counter({"all-gather": 3 * 5 * 3072}) and not found.each_pass


def test_a_loop_of_unknown_length_is_left_to_the_caller(mesh):
    """A scan of 5 in every pass, and one gather behind the loop."""

    def function(x, count):
        def inner(total, _):
            return total + gathered_sum(mesh)(x * total), None

        def outer(_, total):
            return jax.lax.scan(inner, total, None, length=5)[0]

        total = jax.lax.fori_loop(0, count, outer, 1.0)
        return total + gathered_sum(mesh)(x + total)

    found = received(compiled(mesh, function, (SIZE,)))
    assert found.once == Counter({"all-gather": 3072})
    assert found.each_pass == Counter({"all-gather": 5 * 3072})
    assert found.total(7) == 3072 + 7 * 5 * 3072 == found.by_collective(7)["all-gather"]


@pytest.mark.parametrize("is_first", [True, False])
def test_of_a_conditional_the_branch_that_receives_most_counts(mesh, is_first):
    def function(x, count):
        def little():
            return on_shards(mesh, lambda x: jax.lax.psum(x[0], "b"), P())(x)

        branches = [lambda: gathered_sum(mesh)(x), little]
        return jax.lax.cond(count > 3, *(branches if is_first else branches[::-1]))

    assert received(compiled(mesh, function, (SIZE,))).once == Counter({"all-gather": 3072})


MODULE = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {{
  ROOT %sum = f32[] add(%x, %y)
}}

%all-reduce-scatter.1 (input: f32[96,8]) -> f32[24,8] {{
  %all-reduce.1 = f32[96,8]{{1,0:T(8,128)}} all-reduce(%input), replica_groups={{{{0,1,2,3}}}}
  ROOT %slice = f32[24,8]{{1,0}} dynamic-slice(%all-reduce.1), dynamic_slice_sizes={{24,8}}
}}

%async (x: bf16[8]) -> bf16[64] {{
  ROOT %g = bf16[64]{{0}} all-gather(%x), replica_groups={{}}, dimensions={{0}}
}}

%async_collective_fusion.1 (x: bf16[8]) -> (bf16[8,8], bf16[64]) {{
  %product = bf16[8,8]{{1,0}} convolution(%y, %z), dim_labels=bf_io->bf
  %g.1 = bf16[64]{{0}} all-gather(%x), replica_groups={{}}, dimensions={{0}}
  ROOT %tuple = (bf16[8,8]{{1,0}}, bf16[64]{{0}}) tuple(%product, %g.1)
}}

%condition (p: (s32[], f32[8])) -> pred[] {{
  %limit = s32[]{{:T(128)}} constant(28)
  %other = s32[]{{:T(128)}} constant(99)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{{:T(512)}} compare(%i, %limit), direction={direction}
}}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  {instruction}
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  ROOT %while.1 = (s32[], f32[8]{{0}}) while(%tuple), condition=%condition, body=%body
}}
"""


@pytest.mark.parametrize(
    ("instruction", "kind", "expected"),
    [
        # The fusion of a TPU: 96 x 8 floats in groups of 4.
        (
            "%f = f32[24,8]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1",
            "reduce-scatter",
            96 * 8 * 4 * 3 // 4,
        ),
        # Operands and results stand in the shape of a start; {} is all 8 chips.
        (
            "%s = ((f32[8]{0}, f32[2]{0}), (f32[64]{0}, f32[16]{0})) all-gather-start(%a, %b), "
            "replica_groups={}, dimensions={0}",
            "all-gather",
            80 * 4 * 7 // 8,
        ),
        (
            "%s = (bf16[8]{0}, bf16[8]{0}, u32[]{:S(2)}, u32[]{:S(2)}) "
            "collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}",
            "collective-permute",
            16,
        ),
        (
            "%s = (f32[8]{0}, f32[4]{0}) all-reduce-start(%a, %b), replica_groups=[2,4]<=[8], "
            "to_apply=%add",
            "all-reduce",
            2 * 48 * 3 // 4,
        ),
        # The same as XLA writes it for JAX 0.12, and of one operand.
        (
            "%s = ((f32[8]{0}, f32[4]{0}), (f32[8]{0}, f32[4]{0})) all-reduce-start(%a, %b), "
            "replica_groups=[2,4]<=[8], to_apply=%add",
            "all-reduce",
            2 * 48 * 3 // 4,
        ),
        (
            "%s = ((bf16[8,64]{1,0}), bf16[8,64]{1,0}) all-reduce-start(%a), "
            "replica_groups=mesh['data'=1,'fsdp'=2,'tensor'=2,'sequence'=2] "
            "{'tensor','sequence'}, use_global_device_ids=true, to_apply=%add",
            "all-reduce",
            2 * 1024 * 3 // 4,
        ),
        (
            "%s = ((f32[64]{0}), f32[8]{0}, u32[]) reduce-scatter-start(%a), "
            "replica_groups=[1,8]<=[2,4]T(1,0), to_apply=%add",
            "reduce-scatter",
            32 * 7,
        ),
        (
            "%s = ((bf16[8]{0}), bf16[64]{0}, u32[]) async-start(%a), calls=%async",
            "all-gather",
            64 * 2 * 7 // 8,
        ),
        # A TPU's asynchronous gather is in the fusions of its start, of a matmul and of its end.
        (
            "%async-collective-start.2 = (bf16[8]{0}, bf16[64]{0}) fusion(%a), calls=%async\n"
            "  %fusion.1 = (bf16[8,8]{1,0}, bf16[64]{0}) fusion(%async-collective-start.2), "
            "kind=kOutput, calls=%async_collective_fusion.1\n"
            "  %async-collective-done.2 = bf16[64]{0} fusion(%fusion.1), calls=%async",
            "all-gather",
            64 * 2 * 7 // 8,
        ),
        (
            "%g = bf16[1,64]{1,0} all-gather(%a), "
            "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={1}",
            "all-gather",
            128 * 3 // 4,
        ),
        (
            "%g = bf16[64]{0} all-gather(%a), replica_groups=mesh['a'=8] {'a':(2)2}",
            "all-gather",
            128 // 2,
        ),
    ],
)
def test_what_compilers_of_tpus_and_gpus_write_is_read(instruction, kind, expected):
    text = MODULE.format(instruction=instruction, direction="LT")
    assert received(text).once == Counter({kind: 28 * expected})


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        # Groups of 8 in both slices of 4: 32 of 64 values come from the other, 8 to each chip.
        ("%g = f32[64]{0} all-gather(%a), replica_groups={}, dimensions={0}", 4 * 32 // 4),
        ("%s = f32[8]{0} reduce-scatter(%a), replica_groups=[1,8]<=[8], to_apply=%add", 4 * 8),
        # Pairs of a chip and its counterpart in the other slice: half of it each way.
        ("%r = f32[8]{0} all-reduce(%a), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add", 32),
        ("%r = f32[8]{0} all-reduce(%a), replica_groups={{0,4},{1,5},{2,6},{3,7}}", 32),
        (
            "%r = f32[8]{0} all-reduce(%a), replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], "
            "device_ids=([2,4]T(1,0)) {'axis_2'}, to_apply=%add",
            32,
        ),
        ("%r = f32[8]{0} all-reduce(%a), replica_groups=mesh['a'=8] {'a':(1)2}", 32),
        # Two axes of a group, of which the first is across.
        ("%r = f32[8]{0} all-reduce(%a), replica_groups=mesh['a'=2,'b'=4] {'a','b'}", 2 * 32 // 8),
        # Inside a slice.
        ("%r = f32[8]{0} all-reduce(%a), replica_groups=[2,4]<=[8], to_apply=%add", 0),
        ("%r = f32[8]{0} all-reduce(%a), replica_groups=[4,2]<=[2,2,2]T(0,2,1)", 0),
        ("%r = f32[8]{0} all-reduce(%a), replica_groups=[2,4]<=[2,4], to_apply=%add", 0),
        ("%r = f32[8]{0} all-reduce(%a), replica_groups={{0,1},{2,3},{4,5},{6,7}}", 0),
        ("%r = f32[8]{0} all-reduce(%a), replica_groups=mesh['a'=2,'b'=4] {'b'}", 0),
        ("%p = f32[8]{0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}", 0),
        ("%p = f32[8]{0} collective-permute(%a), source_target_pairs={{0,1},{1,5}}", 32),
    ],
)
def test_what_crosses_to_other_slices_is_told_apart(instruction, expected):
    text = MODULE.format(instruction=instruction, direction="LT")
    found = received(text, num_slices=2, chips_per_slice=4)
    assert found.between_slices(0) == 28 * expected <= found.total(0)
    assert received(text).between_slices(0) == 0


@pytest.mark.parametrize(
    ("transfer", "share"), [("ALL_REDUCE", 2 * 2 / 3), ("ALL_GATHER", 2), ("REDUCE_SCATTER", 2 / 3)]
)
def test_a_tpu_sends_to_other_slices_through_its_host(transfer, share):
    """384 bytes of each chip in 3 slices of 8; the program is that of one slice."""
    send = (
        "%s = (bf16[12,16]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}, token[]) send(%a, %t), channel_id=2, "
        'is_host_transfer=true, frontend_attributes={_xla_megascale_reduce_operation="SUM",'
        f'_xla_megascale_target="{{1,2}}x{{0:7}}",_xla_megascale_transfer_type="{transfer}"}}'
    )
    text = MODULE.format(instruction=send, direction="LT")
    found = received(text, num_slices=3, chips_per_slice=8)
    assert found.between_slices(5) == 28 * int(384 * share) and found.total(5) == 0
    other = send.replace(f',_xla_megascale_transfer_type="{transfer}"', "")
    found = received(MODULE.format(instruction=other, direction="LT"), 3, 8)
    assert found.between_slices(5) == 0


def test_a_loop_without_a_constant_bound_has_no_known_length():
    gather = "%g = bf16[64]{0} all-gather(%a), replica_groups={}, dimensions={0}"
    found = received(MODULE.format(instruction=gather, direction="NE"))
    assert not found.once and found.each_pass == Counter({"all-gather": 128 * 7 // 8})


def test_groups_that_cannot_be_read_are_refused():
    gather = "%g = bf16[64]{0} all-gather(%a), replica_groups=?, dimensions={0}"
    with pytest.raises(ValueError, match="groups of a collective cannot be parsed: %g = bf16"):
        received(MODULE.format(instruction=gather, direction="LT"))
