"""The estimated step adds up what the texts of shallow programs say, at the sizes of the step."""

import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from care_jax.aot import estimate as estimates
from care_jax.aot import step_sizes
from care_jax.aot.compile import Program
from care_jax.aot.estimate import PARTS, assumptions, estimate, rows
from care_jax.aot.roofline import Work
from care_jax.aot.topology import Topology
from care_jax.devices.flops import CHIPS
from configs import tiny

ROOT = pathlib.Path(__file__).resolve().parents[3]
LIBTPU = pathlib.Path(sys.prefix, "libtpu")
CLOCK = 1.503e9
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
def depths(monkeypatch):
    """Four devices that pass for v5e:2x2. A layer has 1 s in a call and 2 s in a pass of each
    program, and work of 3 s; without layers there are 10 s in a call."""
    chip, found = CHIPS["v5e"], []
    topology = Topology(chip, jax.devices()[:4])

    def programs(run, _, largest, expected):
        depth = run.policy.config.text.num_layers
        found.append(depth)
        text = TEXT.format(once=(10 + depth) * CLOCK, each_pass=2 * depth * CLOCK)
        work = Work(hbm_bytes=3 * depth * chip.hbm_bandwidth)
        return [Program(f"rl {name}", work, 1, (work,), hlo=text) for name in PROGRAMS], None

    monkeypatch.setattr(estimates, "find_topology", lambda name, num_slices: topology)
    monkeypatch.setattr(estimates.compile, "rl_programs", programs)
    return found


def test_two_depths_give_all_layers(depths):
    settings = config()
    settings.model.backbone.text_config.num_hidden_layers = 7
    result = estimate(settings, "v5e:2x2", 12.0)
    assert depths == [2, 4] and sum(result.seconds["resharding"].values()) == pytest.approx(17)
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
    assert any("90 GB/s (v5e without wraparound links)" in line for line in assumptions(result))


def test_updates_run_the_microbatches_of_the_plan_at_the_length_of_its_rows(depths, monkeypatch):
    steps = []
    draw = step_sizes.expected_step
    monkeypatch.setattr(
        step_sizes, "expected_step", lambda *of: steps.append(draw(*of)) or steps[-1]
    )
    settings = config()
    result = estimate(settings, "v5e:2x2", 12.0)
    plans = [plan for plan, _ in steps[0].updates]
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
    calls = steps[0].decoding.calls
    assert calls[0].num_slots == settings.rl.decode_prompts
    shares = [call.num_slots / calls[0].num_slots for call in calls]
    decoding = sum(
        10 + layers + share * 2 * layers * call.num_steps
        for share, call in zip(shares, calls, strict=True)
    )
    assert sum(result.seconds["decoding"].values()) == pytest.approx(decoding, rel=1e-3)
    num_calls = len(calls) + len(steps[0].reflecting.calls)
    assert sum(result.seconds["host"].values()) == pytest.approx(4e-3 * num_calls)
    assert result.total == pytest.approx(
        sum(sum(part.values()) for part in result.seconds.values())
    )


@pytest.mark.parametrize(
    ("topology", "mean", "stages", "reason"),
    [
        ("h100:8", 12.0, ("rl",), "constants for v5e alone, got --topology 'h100:8'"),
        ("v5e:2x2", None, ("rl",), "give --mean_response, in tokens, got None"),
        ("v5e:2x2", 12.0, ("sft",), 'of a step of "rl", got stages'),
    ],
)
def test_what_has_no_estimate_is_refused(topology, mean, stages, reason):
    settings = config()
    settings.stages = stages
    with pytest.raises(ValueError, match=re.escape(reason)):
        estimate(settings, topology, mean)


def test_slices_are_refused():
    with pytest.raises(ValueError, match="between slices, got --slices 4"):
        estimate(config(), "v5e:8x8", 12.0, num_slices=4)


def test_a_refused_program_says_so(depths, monkeypatch):
    refused = [Program("rl update", Work(), is_refused=True)]
    monkeypatch.setattr(estimates.compile, "rl_programs", lambda *_: (refused, None))
    with pytest.raises(ValueError, match="compiler refuses rl update"):
        estimate(config(), "v5e:2x2", 12.0)


SCRIPT = """
from care_jax.aot import estimate
from configs import tiny
settings = tiny.get_config()
settings.data.buckets, settings.rl.row_tokens, settings.stages = ((128, 64),), 512, ("rl",)
settings.model.backbone.text_config.num_hidden_layers = 6
for depths in ((2, 4), (5, 6)):
    estimate._DEPTHS = depths
    seconds = estimate.estimate(settings, "v5e:1x1", 12.0).seconds
    print(*(seconds[part]["compute"] for part in ("updates", "prefill", "decoding")))
"""


@pytest.mark.skipif(not LIBTPU.is_dir(), reason=f"needs libtpu in {LIBTPU}")
@pytest.mark.exhaustive
def test_cycles_scale_with_layers():
    """Six layers from programs of two and four are those of a program of six."""
    own = {"PYTHONPATH": f"{LIBTPU}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    own |= {"JAX_OPTIMIZATION_LEVEL": "O0"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    from_shallow, direct = (np.array(line.split(), float) for line in done.stdout.splitlines()[-2:])
    assert (direct > 0).all() and math.isfinite(from_shallow.sum())
    np.testing.assert_allclose(from_shallow, direct, rtol=0.05)
