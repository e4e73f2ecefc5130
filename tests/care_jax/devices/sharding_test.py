import ast
import logging
import pathlib
import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from small_backbones import small_backbone

from care_jax.devices import distributed, sharding
from models import backbone
from models.families import FAMILIES

RULES = (("embed", "fsdp"), ("vocab", "tensor"), ("mlp", "tensor"), ("kv_heads", "tensor"))


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, np.float32)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, -1, 1), (1, 8, 1, 1)),
        ((2, 2, -1), (2, 2, 2, 1)),
        ((1, 2, 1, -1), (1, 2, 1, 4)),
        ((8, 1, 1, 1),) * 2,
    ],
)
def test_one_free_size_takes_what_the_others_leave(sizes, expected):
    mesh = sharding.make_mesh(*sizes)
    assert tuple(mesh.shape.values()) == expected
    assert mesh.axis_names == ("data", "fsdp", "tensor", "sequence")
    assert mesh.axis_types == (AxisType.Auto,) * 4


def test_data_spans_the_slices():
    """The first half of the mesh is one slice."""
    mesh = make_mesh(0, -1, 2, slices=SLICES)
    assert tuple(mesh.shape.values()) == (2, 2, 2, 1)
    halves = [{SLICES[device.id] for device in half.flat} for half in mesh.devices]
    assert halves == [{0}, {1}]
    mesh = make_mesh(4, -1, 1, slices=SLICES)
    quarters = [{SLICES[device.id] for device in part.flat} for part in mesh.devices]
    assert quarters == [{0}, {0}, {1}, {1}]
    assert sharding.make_mesh(0, -1, 1).shape["data"] == 1


def test_fsdp_spans_the_slices_if_there_is_no_data_axis():
    """Parameters are then sharded over all devices."""
    mesh = make_mesh(1, -1, 2, slices=SLICES)
    assert tuple(mesh.shape.values()) == (1, 4, 2, 1)
    quarters = [{SLICES[device.id] for device in part.flat} for part in mesh.devices[0]]
    assert quarters == [{0}, {0}, {1}, {1}]


def test_a_mesh_may_take_some_of_the_devices():
    assert sharding.make_mesh(1, -1, 2, devices=jax.devices()[:4]).shape["fsdp"] == 2


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("sizes", [(0, -1, 2, 2), (2, 3, 4, 1), (-1, 2, 5, 3)])
def test_the_flags_of_an_error_are_a_mesh_of_these_devices(sizes, count):
    devices, named = jax.devices()[:count], dict(zip(sharding.MESH_AXES, sizes, strict=True))
    try:
        sharding.make_mesh(**named, devices=devices)
    except ValueError as error:
        flags = re.findall(r"--config\.mesh\.(\w+)=(-?\d+)", str(error).partition("; add ")[2])
        assert flags
        mesh = sharding.make_mesh(**named | {k: int(v) for k, v in flags}, devices=devices)
        assert mesh.size == count
    else:
        assert count % 4 == 0  # a multiple of what the first mesh needs


def place_of(mesh, *axes):
    return sharding.batch_sharding(mesh, (("batch", axes),))


def make_mesh(*sizes, **options):
    return sharding.make_mesh(*sizes, devices=jax.devices(), **options)


def shard(*axes):
    sharding.param_shardings({"w": axes}, {"w": shape(2, 2)}, RULES, make_mesh(1, 4, 2))


def put_rows(number):
    place = place_of(make_mesh(2, 2, 2), "data", "fsdp")
    sharding.put_batch({"rows": np.zeros((number, 3))}, place)


def divide(size, *axes):
    sharding.check_divides("rl.microbatch_size", size, place_of(make_mesh(2, 4, 1), *axes))


SLICES = [0, 1, 1, 0, 0, 1, 0, 1]  # of each device, in any order
REFUSED = {
    "too few": (
        *(make_mesh, (1, 3, 1)),
        "mesh.fsdp=3 .* needs 3 devices, there are 8 \\(cpu\\); add --config.mesh.fsdp=-1$",
    ),
    "no divisor": (
        *(make_mesh, (3, -1, 1)),
        "needs a multiple of 3 devices, there are 8 \\(cpu\\); add --config.mesh.data=1$",
    ),
    "too many": (
        *(make_mesh, (2, -1, 3, 4)),
        "of 24 devices, there are 8 \\(cpu\\); add --config.mesh.tensor=1$",
    ),
    "two free": (make_mesh, (-1, -1, 1), "or -1 for one of them, got mesh.data=-1 x mesh.fsdp=-1"),
    "zero": (make_mesh, (1, 0, 8), "mesh sizes must be positive.* mesh.fsdp=0"),
    "below -1": (make_mesh, (1, -2, 8), "mesh sizes must be positive"),
    "slices": (
        *(lambda: make_mesh(1, 1, 8, slices=SLICES), ()),
        "mesh.data=1 must be a multiple of 2 slices",
    ),
    "an axis twice": (shard, ("vocab", "mlp"), "w: axes 'vocab' and 'mlp' are both .* 'tensor'"),
    "no axis": (shard, ("mlp",), r"w has axes \('mlp',\) but shape \(2, 2\); name each dimension"),
    "unknown axis": (
        *(sharding.check_rules, ("rules", (("embed", None), ("mlp", ("tensor", "model"))))),
        "rules maps 'mlp' to 'model', which is not a mesh axis; choose among data",
    ),
    "a misspelt axis": (
        *(sharding.check_rules, ("rules", (("batch", "data"), ("embd", "fsdp")))),
        "rules has a rule for 'embd', which no array has an axis of; write 'embed'",
    ),
    "an axis unlike any": (
        *(sharding.check_rules, ("rules", (("xyz", "fsdp"),))),
        "a rule for 'xyz', which .*; write one of batch, tokens, ",
    ),
    "two rules for an axis": (
        *(sharding.check_rules, ("rules", (("mlp", "data"), ("embed", None), ("mlp", "fsdp")))),
        "rules must have one rule for 'mlp', got 2, of which only the first .*; remove the other",
    ),
    "rows": (put_rows, (6,), r"batch\['rows'\] of shape \(6, 3\) .* by 4 shards \(data x fsdp of"),
    "12": (
        divide,
        (12, "data", "fsdp"),
        r"12 must .* 8 devices \(data x fsdp\); set it to 8 or 16$",
    ),
    "3": (divide, (3, "data", "fsdp"), "rl.microbatch_size 3 must be .*; set it to 8$"),
    "0": (divide, (0, "data", "fsdp"), "rl.microbatch_size 0 must be .*; set it to 8$"),
}


@pytest.mark.parametrize(("function", "arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_the_mesh_is_refused(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


def test_rules_may_name_the_axes_of_parameters_and_activations_and_no_others():
    found = set()
    for family in FAMILIES:
        for axes_of in (backbone.logical_axes, backbone.decode_axes):
            axes = axes_of(small_backbone(family))
            found.update(*jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple)))
    root = pathlib.Path(sharding.__file__).resolve().parents[2]
    for path in (*(root / "models").rglob("*.py"), *(root / "care_jax").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("constrain"):
                names = [each.value for each in node.args if isinstance(each, ast.Constant)]
                found.update(names)
    assert found - {None} == {*sharding.LOGICAL_AXES}
    sharding.check_rules("rules", [(name, None) for name in sharding.LOGICAL_AXES])


def test_only_the_mesh_axes_of_its_rule_count_for_a_batch():
    divide(16, "data", "fsdp")
    divide(4, "fsdp", "tensor")


def test_first_rule_decides_and_axes_without_rule_are_replicated():
    mesh = sharding.make_mesh(2, 2, 2)
    axes = {"a": ("layers", "embed", "mlp"), "b": (None, "vocab"), "c": ()}
    shapes = {"a": shape(3, 4, 6), "b": shape(5, 2), "c": shape()}
    got = sharding.param_shardings(axes, shapes, (*RULES, ("embed", "tensor")), mesh)
    specs = jax.tree.map(lambda each: each.spec, got)
    assert specs == {"a": P(None, "fsdp", "tensor"), "b": P(None, "tensor"), "c": P()}


def test_an_axis_that_does_not_divide_is_replicated_and_logged_once(caplog):
    mesh = sharding.make_mesh(1, 2, 4)
    axes = {"k": ("embed", "kv_heads"), "v": ("embed", "kv_heads")}
    with caplog.at_level(logging.WARNING):
        got = sharding.param_shardings(axes, dict.fromkeys("kv", shape(8, 2)), RULES, mesh)
    assert got["k"].spec == got["v"].spec == P("fsdp", None)
    assert [r.getMessage() for r in caplog.records if "'kv_heads' of size 2" in r.getMessage()] == [
        "axis 'kv_heads' of size 2 is not divisible by mesh.tensor=4 and is replicated"
    ]


def test_an_axis_is_cut_over_as_many_mesh_axes_as_it_divides_by(caplog):
    mesh = sharding.make_mesh(1, 1, 2, 4)
    rules = (("heads", ("tensor", "sequence")),)
    axes = {"all": ("heads", None), "some": ("heads", None)}
    with caplog.at_level(logging.WARNING):
        shapes = {"all": shape(16, 3), "some": shape(6, 3)}
        got = sharding.param_shardings(axes, shapes, rules, mesh)
    assert got["all"].spec == P(("tensor", "sequence"), None)
    assert got["some"].spec == P("tensor", None)
    assert "axis 'heads' of size 6 is not divisible by mesh.sequence=4" in caplog.text


def test_optimizer_state_lies_as_its_parameters():
    mesh = sharding.make_mesh(1, 4, 2)
    axes = {"text": {"up": ("embed", "mlp")}, "scale": ("embed",)}
    shapes = {"text": {"up": shape(8, 2)}, "scale": shape(8)}
    own = sharding.param_shardings(axes, shapes, RULES, mesh)
    state = jax.eval_shape(optax.adam(1e-3).init, shapes)
    moments = sharding.shardings_like(state, own, mesh)[0]
    assert moments.mu == moments.nu == own
    assert moments.count.spec == P()


def test_batch_is_sharded_by_rows_as_its_rule_says():
    mesh = sharding.make_mesh(2, 2, 2)
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    for axes, num_rows in ((("data", "fsdp"), 2), (("data", "fsdp", "tensor"), 1)):
        place = place_of(mesh, *axes)
        batch = sharding.put_batch({"rows": rows, "images": None, "mask": rows[:, 0] > 3}, place)
        assert batch["images"] is None
        np.testing.assert_array_equal(batch["rows"], rows)
        assert batch["rows"].sharding == place and sharding.num_shards(place) == 8 // num_rows
        assert {each.data.shape for each in batch["rows"].addressable_shards} == {(num_rows, 3)}
        assert {each.data.shape for each in batch["mask"].addressable_shards} == {(num_rows,)}


@pytest.mark.parametrize("axes", ["fsdp", ("fsdp",)])
def test_a_batch_may_be_sharded_over_a_single_axis(axes):
    """Of which a `PartitionSpec` keeps the name alone."""
    mesh = sharding.make_mesh(2, 4, 1)
    place = sharding.batch_sharding(mesh, (("batch", axes),))
    assert sharding.num_shards(place) == 4
    assert sharding.put_batch(np.zeros((8, 3)), place).sharding == place
    with pytest.raises(ValueError, match=r"4 devices \(fsdp\); set it to 4 or 8"):
        sharding.check_divides("rl.microbatch_size", 6, place)
    distributed.check_mesh(mesh, (("batch", axes),))


def test_every_row_of_a_batch_has_one_owner():
    place = place_of(sharding.make_mesh(2, 2, 2), "data", "fsdp")
    np.testing.assert_array_equal(sharding.owners(8, place), np.zeros(8))
    np.testing.assert_array_equal(sharding.local_rows(8, place), np.arange(8))


def test_attention_is_sharded_as_the_rules_say_and_chosen_by_the_device():
    mesh = sharding.make_mesh(2, 2, 2)
    rules = (("batch", "data"), ("attended_heads", "tensor"))
    impl = sharding.attention_impl("auto", rules, mesh)
    assert (impl.name, impl.batch_axes, impl.head_axes) == ("xla", ("data",), ("tensor",))
    assert impl.mesh == mesh
