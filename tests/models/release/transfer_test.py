"""Releases in transformers' own layout onto eight devices and back: exact, in parts, unheld."""

import dataclasses
import json
import pathlib
import socket
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from small_backbones import all_families

from models import backbone
from models.release import config_json, transfer, weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = pathlib.Path(__file__).resolve().parents[3]
LAYOUTS = {
    "as trained": {
        **{"embed": "fsdp", "vocab": "tensor", "heads": "tensor", "kv_heads": "tensor"},
        "mlp": "tensor",
    },
    "inner axes and layers": {"embed": "fsdp", "head_dim": "tensor", "layers": "data"},
    "replicated": {},
}


def make_shardings(config, rules):
    """Over a mesh of 2 x 2 x 2; an axis that does not divide is not cut."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3)
    shapes = jax.eval_shape(lambda: backbone.init(config, jax.random.key(0)))

    def place(shape, axes):
        sizes = zip(axes, shape.shape, strict=True)
        spec = [None if size % 2 else rules.get(axis) for axis, size in sizes]
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(place, shapes, backbone.logical_axes(config))


def architecture(config):
    return getattr(transformers, config_json.to_hf(config)["architectures"][0])


@pytest.fixture(scope="module", params=["untied", "tied"])
def released(request, config, tied_config, make_params, tmp_path_factory):
    """(folder that transformers wrote in several shards, params, config)."""
    config = config if request.param == "untied" else tied_config
    params = make_params(config)
    ours, theirs = (tmp_path_factory.mktemp(f"{request.param}_{who}") for who in ("our", "their"))
    backbone.export(ours, params, config, jnp.float32, max_shard_bytes=70_000)
    model, report = architecture(config).from_pretrained(ours, output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.float32
    model.save_pretrained(theirs, max_shard_size="70KB")
    assert len(list(theirs.glob("*.safetensors"))) > 3
    return theirs, params, config


@all_families
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_device_gets_its_slice(released, layout):
    folder, params, config = released
    shardings = make_shardings(config, LAYOUTS[layout])
    loaded, loaded_config = backbone.load(folder, shardings=shardings)
    assert loaded_config.text == config.text

    def check(array, expected, sharding):
        assert array.sharding == sharding and array.shape == expected.shape
        assert len(array.addressable_shards) == 8
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.index])

    jax.tree.map(check, loaded, params, shardings)


@all_families
def test_transformers_opens_an_export_from_eight_devices(released, tmp_path):
    """Shards and index as it writes them itself, and the same bits."""
    folder, _, config = released
    shardings = make_shardings(config, LAYOUTS["as trained"])
    loaded, _ = backbone.load(folder, dtype=jnp.bfloat16, shardings=shardings)
    backbone.export(tmp_path, loaded, config, max_shard_bytes=70_000)
    index = json.loads((tmp_path / transfer.INDEX).read_text())
    files = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    stored = {name: array for tensors in files.values() for name, array in tensors.items()}
    assert {name: f for f, tensors in files.items() for name in tensors} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in stored.values())
    assert max(sum(a.nbytes for a in tensors.values()) for tensors in files.values()) <= 70_000

    model = architecture(config).from_pretrained(tmp_path)
    theirs = {
        weights.release_name(name, config.family): value
        for name, value in model.state_dict().items()
    }
    assert model.dtype == torch.bfloat16 and stored.keys() <= theirs.keys()
    for name, array in stored.items():
        bits = theirs[name].view(dtype=torch.int16).numpy()
        if ".experts." in name:  # transformers transposes a release's when it loads them
            bits = bits.swapaxes(1, 2)
        np.testing.assert_array_equal(bits, array.view(np.int16), err_msg=name)


@pytest.mark.parametrize("master", [jnp.bfloat16, jnp.float32])
def test_a_bfloat16_release_comes_back_bit_for_bit(released, tmp_path, master):
    """Every bit pattern but NaNs, which a float32 master may not tell apart."""
    _, _, config = released
    bits = np.arange(2**16, dtype=np.uint16)
    patterns = bits[bits & 0x7FFF <= 0x7F80].view(jnp.bfloat16)
    first, second = tmp_path / "first", tmp_path / "second"
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: backbone.init(config, jax.random.key(0)))
    drawn = jax.tree.map(lambda s: rng.choice(patterns, s.shape), shapes)
    backbone.export(first, drawn, config, max_shard_bytes=50_000)
    shardings = make_shardings(config, LAYOUTS["as trained"])
    loaded, _ = backbone.load(first, dtype=master, shardings=shardings)
    backbone.export(second, loaded, config, max_shard_bytes=50_000)
    for path in [*first.glob("*.safetensors"), first / transfer.INDEX]:
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_no_more_is_read_than_the_shards_hold(released, monkeypatch):
    folder, _, config = released
    read = {}
    opened = transfer.open_tensor

    class Counted:
        def __init__(self, entry):
            self.name, self.context = entry.name, opened(entry)

        def __enter__(self):
            self.source = self.context.__enter__()
            return self

        def __exit__(self, *error):
            self.context.__exit__(*error)

        def __getitem__(self, slices):
            array = self.source[slices]
            read.setdefault(self.name, []).append(array.size)
            return array

    monkeypatch.setattr(transfer, "open_tensor", Counted)
    monkeypatch.setattr(weights, "_BLOCK_SIZE", 500)
    backbone.load(folder, shardings=make_shardings(config, LAYOUTS["as trained"]))
    part_wise = ("embed_tokens.weight", "patch_embed.proj.weight", "self_attn.q_proj.weight")
    for name, entry in transfer.read_headers(folder).items():
        if name.endswith((*part_wise, "o_proj.weight")):
            assert sum(read[name]) == np.prod(entry.shape), name
            assert len(read[name]) >= 4 and max(read[name]) <= 500, name
    assert sum(name.endswith(part_wise) for name in read) >= 5


@pytest.fixture(scope="module")
def wide(config, make_params, tmp_path_factory):
    """Stacks of twice the largest tensor's size, as in the releases."""
    text = dataclasses.replace(
        config.text,
        **{"hidden_size": 256, "intermediate_size": 1024, "num_layers": 8, "num_heads": 8},
        **{"head_dim": 32, "vocab_size": 4096, "mrope_section": (4, 4, 8)},
    )
    vision = dataclasses.replace(config.vision, output_size=256)
    wide = dataclasses.replace(config, text=text, vision=vision)
    folder = tmp_path_factory.mktemp("wide")
    params = make_params(wide)
    backbone.export(folder, params, wide, jnp.bfloat16, max_shard_bytes=5_000_000)
    largest = 4096 * 256 * 4
    assert params["text"]["layers"]["mlp"]["up"]["kernel"].nbytes == 2 * largest
    return folder, wide, largest


def host_memory(run):
    """Bytes of host memory at the peak of `run`, and those still held while its result is.

    Every numpy array counts, and what safetensors reads; of a device's arrays those that took over
    the host's.
    """
    tracemalloc.start()
    try:
        result = run()
        held, peak = tracemalloc.get_traced_memory()
        del result
    finally:
        tracemalloc.stop()
    return peak, held


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
@pytest.mark.parametrize("layout", ["one device", "as trained"])
def test_loading_and_export_hold_less_than_one_and_a_half_tensors(wide, tmp_path, layout):
    folder, config, largest = wide
    shardings = None if layout == "one device" else make_shardings(config, LAYOUTS[layout])

    def load():
        return backbone.load(folder, shardings=shardings)[0]

    params = load()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    peak, held = host_memory(load)
    assert peak - held < 1.5 * largest < 0.2 * size

    backbone.export(tmp_path, load(), config)  # compiles what it runs
    peak, held = host_memory(lambda: backbone.export(tmp_path, params, config))
    assert peak < 1.5 * largest and held < 0.1 * largest


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
def test_an_accelerators_host_holds_no_more_than_the_largest_tensor(wide, monkeypatch):
    """There a stacked parameter goes over in groups of layers."""
    folder, _, largest = wide
    expected, _ = backbone.load(folder)
    sizes, make = [], transfer._aligned_empty
    monkeypatch.setattr(transfer, "_staged_bytes", lambda *_: largest)
    monkeypatch.setattr(
        transfer, "_aligned_empty", lambda *args: sizes.append(make(*args).nbytes) or make(*args)
    )
    loaded, _ = backbone.load(folder)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    assert max(sizes) == largest


def test_tensors_of_integers_or_under_two_names_are_refused(released, tmp_path):
    folder, _, config = released
    stored = {n: a for path in folder.glob("*.safetensors") for n, a in load_file(path).items()}
    query, norm = (
        weights.release_name(f"model.layers.0.{name}.weight", config.family)
        for name in ("self_attn.q_proj", "input_layernorm")
    )
    for prefix in ("model.", "model.language_model."):
        stored[f"{prefix}layers.0.self_attn.q_proj.weight"] = stored[query]
    stored[norm] = stored[norm].astype(np.int8)
    save_file(stored, tmp_path / transfer.SINGLE)
    with pytest.raises(ValueError) as error:
        backbone.load(tmp_path, config)
    assert f"{query} is duplicated, as model." in str(error.value)
    assert f"{norm} is I8, expected" in str(error.value)


CHILD = """
import sys
rank, port, folder, target = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(
    f"127.0.0.1:{port}", 2, rank, cluster_detection_method="deactivate"
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from models import backbone
mesh = jax.make_mesh((4,), ("fsdp",), (AxisType.Auto,))
_, config = backbone.load(folder)
is_axes = lambda node: isinstance(node, tuple)
shardings = jax.tree.map(
    lambda axes: NamedSharding(
        mesh, PartitionSpec(*["fsdp" if a == "embed" else None for a in axes])
    ),
    backbone.logical_axes(config),
    is_leaf=is_axes,
)
params, _ = backbone.load(folder, shardings=shardings)
assert not params["text"]["embed"]["table"].is_fully_addressable
backbone.export(target + str(rank), params, config, "bfloat16", 40_000)
"""


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
def test_two_processes_load_their_parts_and_the_first_one_exports(config, make_params, tmp_path):
    stored = jax.tree.map(lambda a: a.astype(jnp.bfloat16), make_params(config))
    backbone.export(tmp_path / "given", stored, config, max_shard_bytes=40_000)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [str(port), str(tmp_path / "given"), str(tmp_path / "export")]
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(rank), *arguments], cwd=ROOT)
        for rank in range(2)
    ]
    try:
        assert [child.wait(timeout=120) for child in children] == [0, 0]
    finally:
        for child in children:
            child.kill()
    assert not (tmp_path / "export1").exists()
    for path in (tmp_path / "given").iterdir():
        assert path.read_bytes() == (tmp_path / "export0" / path.name).read_bytes(), path.name
