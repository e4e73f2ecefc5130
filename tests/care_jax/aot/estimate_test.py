"""The estimated step adds up what the texts of shallow programs say, at the sizes of the step."""

import dataclasses
import math
import os
import pathlib
import re
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from care_jax.aot import estimate as estimates
from care_jax.aot import shapes, step_sizes
from care_jax.aot.__main__ import estimate_report
from care_jax.aot.compile import Program
from care_jax.aot.estimate import PARTS, assumptions, estimate, rows
from care_jax.aot.kernel_prices import kernel_prices
from care_jax.aot.roofline import Work
from care_jax.aot.topology import Topology
from care_jax.devices.flops import CHIPS
from care_jax.devices.sharding import make_mesh
from care_jax.rl.rollout_programs import rollout_sizes
from care_jax.run.run import open_run
from configs import tiny
from models.attention.packed import block_mask

ROOT = pathlib.Path(__file__).resolve().parents[3]
CLOCK = CHIPS["v5e"].flops / (4 * 128 * 128 * 2)
TEXT = """HloModule jit_f, num_partitions=4

FunctionNames
1 "main"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=1}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}

%body (x: f32[8]) -> f32[8] {{
  %b = f32[8] copy(%x), backend_config={{"estimated_cycles":"{each_pass:.0f}"}}
}}

%condition (x: f32[8]) -> pred[] {{
  ROOT %c = pred[] compare(%x, %n), direction=LT
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %a = f32[8] copy(%p), backend_config={{"estimated_cycles":"{once:.0f}"}}
  {kernel}
  %w = f32[8] while(%a), condition=%condition, body=%body
}}
"""
PROGRAMS = ["reshard", "decode prefill", "decode", "reflect prefill", "reflect", "score", "update"]


def config():
    settings = tiny.get_config()
    settings.care.beta, settings.rl.row_tokens = 0.1, 512
    settings.data.buckets, settings.stages = ((128, 64),), ("rl",)
    return settings


@pytest.fixture
def shallow(monkeypatch):
    """Programs of four devices that pass for v5e:2x2.

    A layer has 1 s in a call and 2 s in a pass of each program, and work of 3 s; without layers
    there are 10 s in a call. `kernel` is a line of each program.
    """
    chip, found = CHIPS["v5e"], types.SimpleNamespace(depths=[], kernel="")
    topology = Topology(chip, jax.devices()[:4])

    def programs(run, _, largest, expected):
        depth = run.policy.config.text.num_layers
        found.depths.append(depth)
        cycles = {"once": (10 + depth) * CLOCK, "each_pass": 2 * depth * CLOCK}
        text = TEXT.format(**cycles, kernel=found.kernel)
        work = Work(hbm_bytes=3 * depth * chip.hbm_bandwidth)
        return [Program(f"rl {name}", work, 1, (work,), hlo=text) for name in PROGRAMS], None

    monkeypatch.setattr(estimates, "find_topology", lambda name, num_slices: topology)
    monkeypatch.setattr(estimates.compile, "rl_programs", programs)
    return found


@pytest.fixture
def step(monkeypatch):
    """The expected step of the next estimate, as a list."""
    steps, draw = [], step_sizes.expected_step

    def kept(*arguments):
        steps.append(draw(*arguments))
        return steps[-1]

    monkeypatch.setattr(step_sizes, "expected_step", kept)
    return steps


def test_two_depths_give_all_layers(shallow):
    settings = config()
    settings.model.backbone.text_config.num_hidden_layers = 7
    result = estimate(settings, "v5e:2x2", 12.0)
    assert shallow.depths == [2, 4] and sum(result.seconds["resharding"].values()) == pytest.approx(
        17
    )
    assert result.least == dict.fromkeys(PARTS, 0) | {
        "updates": pytest.approx(21),
        "scoring": pytest.approx(21),
        "decoding": pytest.approx(21),
        "reflection": pytest.approx(21),
        "prefill": pytest.approx(42),
        "resharding": pytest.approx(21),
    }
    header, *table = rows(result)
    assert header[:3] == ["part", "least", "estimated"] and [row[0] for row in table] == [*PARTS]
    assert "not a measurement" in assumptions(result)[0]
    estimated, least = 5 * 21 + 42, sum(result.least.values())
    assert least == pytest.approx(estimated)
    *_, mfu, last = estimate_report(result).splitlines()
    assert last == f"estimated {result.total:.1f} least {least:.1f}"
    assert mfu.startswith(f"MFU of the updates {result.mfu:.0%}, ") and 0 < result.mfu < 1
    assert "memory was not compared" in estimate_report(result)
    assert any("at 180 GB/s" in line for line in assumptions(result))


def test_updates_run_the_microbatches_of_the_plan_at_the_length_of_its_rows(shallow, step):
    settings = config()
    result = estimate(settings, "v5e:2x2", 12.0)
    plans = [plan for plan, _ in step[0].updates]
    layers = settings.model.backbone.text_config.num_hidden_layers
    seconds = sum(
        plan.row_tokens
        / settings.rl.row_tokens
        * (10 + layers + 2 * layers * plan.num_microbatches)
        for plan in plans
    )
    assert sum(result.seconds["updates"].values()) == pytest.approx(seconds)
    assert sum(result.seconds["scoring"].values()) == pytest.approx(seconds)
    # Every call of a decode program returns to the host, and its steps are passes.
    calls = step[0].decoding.calls
    assert calls[0].num_slots == settings.rl.decode_prompts
    shares = [call.num_slots / calls[0].num_slots for call in calls]
    decoding = sum(
        10 + layers + share * 2 * layers * call.num_steps
        for share, call in zip(shares, calls, strict=True)
    )
    assert sum(result.seconds["decoding"].values()) == pytest.approx(decoding, rel=1e-3)
    num_calls = len(calls) + len(step[0].reflecting.calls)
    assert sum(result.seconds["host"].values()) == pytest.approx(4e-3 * num_calls)
    assert result.total == pytest.approx(
        sum(sum(part.values()) for part in result.seconds.values())
    )


def test_offloaded_rollouts_go_to_the_host_and_back(shallow, step):
    settings = config()
    settings.rl.carry_over, settings.rl.decode_prompts = 0.05, 64
    settings.model.offload = ("rollouts",)
    result = estimate(settings, "v5e:2x2", 12.0)
    num_calls = len(step[0].decoding.calls) + len(step[0].reflecting.calls)
    moved = sum(result.seconds["host"].values()) - 4e-3 * num_calls
    # 4 prompts are carried over, in a power of two of slots on each of the 4 shards. A chip's slot
    # has the keys and values, 2 heads of 24 in 2 layers, of 128 tokens and of 4 rows of 36.
    assert step[0].num_left in (8, 16, 32)
    slot = (128 + 4 * 36) * 2 * 2 * 2 * 24 * 4
    num_bytes = 2 * step[0].num_left / 4 * slot
    assert num_bytes < moved * 10e9 < 1.3 * num_bytes


def num_scores(plan, row, group):
    """Scores of the blocks where a query sees a key: an earlier one of its prompt or response."""
    owner = np.full((plan.row_tokens, 2), -1)  # tree and branch; -1 for prompts
    owner[:, 0] -= np.arange(plan.row_tokens)  # padding is alone
    start = 0
    for part in row:
        lengths = [plan.sizes.prompt[part.tree], *plan.sizes.branches[part.tree, [*part.branches]]]
        for branch, length in enumerate(lengths, -1):
            owner[start : start + length] = part.tree, branch
            start += length
    (tree, branch), token = owner.T, np.arange(len(owner))
    sees = (tree[:, None] == tree) & ((branch[:, None] == branch) | (branch == -1))
    sees &= token[:, None] >= token
    blocks = block_mask(None, token[None], group).blocks
    assert blocks is not None  # the rows are too long for dense attention
    queries, keys = (-(-len(owner) // size) for size in blocks)
    padded = np.zeros((queries * blocks[0], keys * blocks[1]), bool)
    padded[: len(owner), : len(owner)] = sees
    return padded.reshape(queries, blocks[0], keys, blocks[1]).any((1, 3)).sum() * math.prod(blocks)


def test_attention_is_priced_by_the_blocks_that_the_planned_rows_see(shallow, step):
    """A forward of two kv heads, in each of two depths and so in all; head dim 24 takes 128."""
    results = "(bf16[2,1024,24]{2,1,0}, f32[2,1,1024]{2,1,0})"
    shallow.kernel = f'%k = {results} custom-call(%p), custom_call_target="tpu_custom_call"'
    settings = config()
    found = estimate(settings, "v5e:2x2", 12.0).seconds
    text = settings.model.backbone.text_config
    group = text.num_attention_heads // text.num_key_value_heads
    rows = [(plan, row) for plan, _ in step[0].updates for row in plan.rows if row]
    scores = np.mean([num_scores(*each, group) for each in rows])
    flops = 2 * 2 * scores * group * 128 * 2
    flops *= settings.rl.microbatch_size / 4  # rows of a chip
    seconds = flops / (0.59 * CHIPS["v5e"].flops)
    assert found["updates"]["kernels"] == pytest.approx(len(step[0].updates) * seconds)


def test_a_kernel_of_the_tower_is_priced_by_the_blocks_of_windows_and_of_whole_images():
    """1024 patches of one image, in 8 blocks: whole 8 x 8 pairs, in windows of 4 x 4 patches 8."""
    settings = config()
    vision = {"depth": 4, "window_size": 32, "fullatt_block_indexes": [1]}
    settings.model.backbone.vision_config.update(vision)
    topology = Topology(CHIPS["v5e"], jax.devices()[:1])
    mesh = make_mesh(**settings.mesh, devices=topology.devices)
    run = open_run(settings, pathlib.Path(), mesh=mesh, policy=shapes.policy(settings))
    expected = step_sizes.expected_step(run, 12.0)
    prefill = dataclasses.replace(expected.decoding, prefills=[(128, 1024)])
    expected = dataclasses.replace(expected, decoding=prefill)
    price = kernel_prices(run, expected, topology.chip)["rl decode prefill"]
    flops = 2 * 2 * (64 + 3 * 8) / 4 * 128**2 * 128 * 4  # a forward of 4 heads
    num_new = rollout_sizes(run)[0].num_new
    seconds = num_new * flops / (0.59 * topology.chip.flops)
    assert price("tower", "(bf16[4,1024,24], f32[4,1,1024])") == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("topology", "mean", "stages", "reason"),
    [
        ("v5e:2x2", None, ("rl",), "give --mean_response, in tokens, got None"),
        ("v5e:2x2", 12.0, ("sft",), 'of a step of "rl", got stages'),
    ],
)
def test_what_has_no_estimate_is_refused(topology, mean, stages, reason):
    settings = config()
    settings.stages = stages
    with pytest.raises(ValueError, match=re.escape(reason)):
        estimate(settings, topology, mean)


def test_a_sparse_decoder_is_refused():
    settings = tiny.get_config("qwen3_vl_moe")
    with pytest.raises(ValueError, match="grouped products of experts, got qwen3_vl_moe; leave it"):
        estimate(settings, "v5e:2x2", 12.0)


def test_slices_and_nodes_are_refused(monkeypatch):
    nodes = [types.SimpleNamespace(platform="gpu", process_index=node) for node in (0, 0, 1, 1)]
    monkeypatch.setattr(estimates, "find_topology", lambda *_: Topology(CHIPS["h100"], nodes))
    with pytest.raises(ValueError, match="between slices or nodes, got 2 of them"):
        estimate(config(), "h100:2x2", 12.0)


def test_a_refused_program_says_so(shallow, monkeypatch):
    refused = [Program("rl update", Work(), is_refused=True)]
    monkeypatch.setattr(estimates.compile, "rl_programs", lambda *_: (refused, None))
    with pytest.raises(ValueError, match="compiler refuses rl update"):
        estimate(config(), "v5e:2x2", 12.0)


SCRIPT = """
import sys
from care_jax.aot import estimate
from configs import tiny
settings = tiny.get_config()
settings.data.buckets, settings.rl.row_tokens, settings.stages = ((128, 64),), 512, ("rl",)
settings.model.backbone.text_config.num_hidden_layers, settings.care.reflect = 6, False
read, found = estimate._read, {}
def read_once(run, depth, *rest):
    if depth not in found:
        found[depth] = read(run, depth, *rest)
    return found[depth]
estimate._read = read_once
for depths in ((2, 4), (4, 6)):
    estimate._DEPTHS = depths
    seconds = estimate.estimate(settings, sys.argv[1], 12.0).seconds
    print(*(seconds[part]["compute"] for part in ("updates", "prefill", "decoding")))
"""


@pytest.mark.parametrize(
    ("topology", "compiler", "tolerance"),
    [("v5e:1x1", "libtpu", 0.05), ("h100:1", "cuda", 0.15)],  # small kernels fuse differently
)
@pytest.mark.exhaustive
def test_seconds_scale_with_layers(topology, compiler, tolerance):
    """Six layers from programs of two and four are those of a program of six."""
    folder = pathlib.Path(sys.prefix, compiler)
    if not folder.is_dir():
        pytest.skip(f"needs the compiler in {folder}")
    own = {"PYTHONPATH": f"{folder}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    own |= {"JAX_OPTIMIZATION_LEVEL": "O0"}
    command = [sys.executable, "-c", SCRIPT, topology]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    from_shallow, direct = (np.array(line.split(), float) for line in done.stdout.splitlines()[-2:])
    assert (direct > 0).all() and math.isfinite(from_shallow.sum())
    np.testing.assert_allclose(from_shallow, direct, rtol=tolerance)
