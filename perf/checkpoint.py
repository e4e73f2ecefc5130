"""Host memory and time to load and export a bfloat16 checkpoint of Qwen2.5-VL-3B's shape.

    python -m perf.checkpoint

Writes random weights as a release in a temporary folder (7.5 GB), loads them in a fresh process
onto a mesh of virtual CPU devices, exports them again and compares every tensor bit by bit. On CPU,
device memory is host memory, so loading must hold the local shards; the figure of interest is the
memory beyond them. Prints peak resident and peak anonymous memory above the level before each
stage. Resident memory includes pages of mapped files, which can be dropped at any time.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from care_jax.devices import sharding
from configs import common
from models import backbone
from models.config import QWEN2_5_VL_3B, BackboneConfig
from models.release import config_json, tensor_files, weights

SHARD_BYTES = 4_000_000_000
GB = 1e9


def shapes_of(config: BackboneConfig) -> backbone.Params:
    return jax.eval_shape(lambda: backbone.init(config, jax.random.key(0)))


def make_release(folder: pathlib.Path, config: BackboneConfig) -> dict[str, int]:
    """Writes random bfloat16 bits, |x| < 2, one tensor at a time; returns bytes by tensor name."""
    rng = np.random.default_rng(0)
    dtype = np.dtype(jnp.bfloat16)

    def blocks(shapes: dict[str, tuple[int, ...]]) -> Iterator[np.ndarray]:
        for shape in shapes.values():
            bits = rng.integers(0, 2**16, shape, np.uint16)
            yield (bits & 0xBFFF).view(dtype)

    files: list[dict[str, tuple[int, ...]]] = [{}]
    filled, sizes = 0, {}
    for row in weights.tensors(config, shapes_of(config)).values():
        for tensor in row:
            size = sizes[tensor.name] = int(np.prod(tensor.hf_shape)) * dtype.itemsize
            if filled + size > SHARD_BYTES:
                files.append({})
                filled = 0
            files[-1][tensor.name] = tensor.hf_shape
            filled += size
    weight_map = {}
    for i, shapes in enumerate(files):
        name = f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        tensor_files.write_file(folder / name, shapes, dtype, blocks(shapes))
        weight_map |= dict.fromkeys(shapes, name)
    tensor_files.write_index(folder, weight_map, sum(sizes.values()))
    (folder / "config.json").write_text(json.dumps(config_json.to_hf(config)))
    return sizes


def memory(*names: str) -> list[int]:
    """Fields of /proc/self/status in bytes, such as VmHWM or RssAnon."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return [int(fields[name].split()[0]) * 1024 for name in names]


def measured(run: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Runs `run`; returns its result, and its seconds and peak memory above the start in bytes."""
    before, anonymous_before = memory("VmRSS", "RssAnon")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    peak_anonymous, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak_anonymous
        while not done.wait(0.002):
            peak_anonymous = max(peak_anonymous, *memory("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    try:
        result = run()
    finally:
        seconds = time.perf_counter() - began
        done.set()
        watcher.join()
    return result, {
        "seconds": seconds,
        "resident": memory("VmHWM")[0] - before,
        "anonymous": max(peak_anonymous, *memory("RssAnon")) - anonymous_before,
    }


def load_and_export(folder: pathlib.Path, target: pathlib.Path, num_devices: int) -> None:
    """Runs in the child process; prints its figures as JSON."""
    jax.config.update("jax_num_cpu_devices", num_devices)
    config = QWEN2_5_VL_3B
    mesh = sharding.make_mesh(1, -1, 1)
    rules = common.get_config().sharding_rules
    shardings = sharding.param_shardings(
        backbone.logical_axes(config), shapes_of(config), rules, mesh
    )
    jax.block_until_ready(jax.device_put(jnp.ones((8, num_devices)), sharding.replicated(mesh)))
    dtype = jnp.bfloat16
    (params, _), loading = measured(lambda: backbone.load(folder, config, dtype, shardings))
    buffers = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for leaf in jax.tree.leaves(params)
        for shard in leaf.addressable_shards
    }
    _, exporting = measured(lambda: backbone.export(target, params, config, dtype))
    print(json.dumps({"shards": sum(buffers.values()), "load": loading, "export": exporting}))


def differing(folder: pathlib.Path, target: pathlib.Path) -> list[str]:
    """Names of tensors that are in only one release or not bitwise equal in both."""
    ours, theirs = tensor_files.read_headers(folder), tensor_files.read_headers(target)
    wrong = sorted(ours.keys() ^ theirs.keys())
    for name in ours.keys() & theirs.keys():
        with tensor_files.open_tensor(ours[name]) as a, tensor_files.open_tensor(theirs[name]) as b:
            if not np.array_equal(a[:].view(np.uint16), b[:].view(np.uint16)):
                wrong.append(name)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--folder", help="a disk with 16 GB; the system's by default")
    parser.add_argument("--child", nargs=2, type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return load_and_export(*args.child, args.devices)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        source, target = pathlib.Path(folder, "release"), pathlib.Path(folder, "export")
        source.mkdir()
        began = time.perf_counter()
        sizes = make_release(source, QWEN2_5_VL_3B)
        print(f"made {sum(sizes.values()) / GB:.2f} GB in {time.perf_counter() - began:.0f} s")
        command = [sys.executable, "-m", "perf.checkpoint", f"--devices={args.devices}"]
        result = subprocess.run(
            [*command, "--child", source, target], stdout=subprocess.PIPE, text=True, check=True
        )
        figures = json.loads(result.stdout.splitlines()[-1])
        largest, shards = max(sizes.values()), figures["shards"]
        print(f"local shards {shards / GB:.3f} GB, largest tensor {largest / GB:.3f} GB")
        for stage, base in (("load", shards), ("export", 0)):
            for kind in ("resident", "anonymous"):
                beyond = figures[stage][kind] - base
                print(
                    f"{stage}: peak {kind} {figures[stage][kind] / GB:.3f} GB above the baseline, "
                    f"{beyond / largest:.2f} of the largest tensor"
                    + (" beyond the local shards" if base else "")
                )
            print(f"{stage}: {figures[stage]['seconds']:.0f} s")
        wrong = differing(source, target)
        print(f"round trip: {len(sizes)} tensors, {len(wrong)} differ {wrong[:3] or ''}")
        if wrong or figures["load"]["resident"] > shards + 1.5 * largest:
            sys.exit("error: more memory than 1.5 of the largest tensor, or other bits than given")


if __name__ == "__main__":
    main()
