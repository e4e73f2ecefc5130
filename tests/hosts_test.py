"""Two processes train as one does, and a run that is told to end goes on where it was."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import hosts_config
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from care_jax import main
from care_jax.devices.sharding import make_mesh
from care_jax.rl import update_batch
from care_jax.run.policy import policy_of
from models import backbone

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIG = pathlib.Path(hosts_config.__file__)
# Of two tests, which have programs in common.
SIZES = {"rl.prompts_per_update": 16, "rl.row_tokens": 512, "rl.row_patches": 192}


def launch(workdir, *flags, num_devices):
    """Starts one process of a run of `hosts_config`; its output goes to its standard error."""
    cache = jax.config.jax_compilation_cache_dir
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "care_jax.main", f"--config={CONFIG}"),
            *(f"--workdir={workdir}", *flags),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(CONFIG.parent))),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(num_devices),
            "JAX_DEFAULT_MATMUL_PRECISION": "highest",  # as in tests: programs in common
            **({"JAX_COMPILATION_CACHE_DIR": cache} if cache else {}),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch_two(workdir, *flags):
    """Starts two processes of four devices each as one run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    who = (f"--coordinator_address=127.0.0.1:{port}", "--num_processes=2")
    return [
        launch(workdir, *flags, *who, f"--process_id={index}", num_devices=4) for index in range(2)
    ]


def metrics_of(workdir):
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line[-1] == "\n"]


def wait_for(workdir, stage, step, processes):
    """Returns once the step stands in metrics.jsonl; ends the processes where it never will."""
    deadline = time.monotonic() + 600
    while not any((r["stage"], r["step"]) == (stage, step) for r in metrics_of(workdir)):
        if time.monotonic() > deadline or any(p.poll() is not None for p in processes):
            for process in processes:
                process.kill()
            pytest.fail("\n".join(process.communicate()[1] for process in processes))
        time.sleep(0.1)


def end_of(process):
    """Exit status and the line that says why."""
    error = process.communicate(timeout=300)[1]
    lines = [line for line in error.splitlines() if line.startswith(("stopped", "error"))]
    return process.returncode, " ".join(lines) or error


@pytest.mark.exhaustive
@pytest.mark.parametrize("carry_over", [0.0, 0.25])
def test_two_processes_train_as_one_and_stop_together(tmp_path, monkeypatch, carry_over):
    """RL steps from a checkpoint of one process; then SIGTERM to one of the two.

    In each step prompts move between the processes.
    """
    moved, plan_rows = [], update_batch.plan_rows

    def planned(sizes, *, owner, **kwargs):
        as_two = kwargs | {"num_processes": 2, "process": 0}
        moved.append(plan_rows(sizes, owner=np.arange(16) // 8, **as_two).moved)
        return plan_rows(sizes, owner=owner, **kwargs)

    monkeypatch.setattr(update_batch, "plan_rows", planned)
    one, two = tmp_path / "one", tmp_path / "two"
    changes = {"stages": ("rl",), "verifier.reward": "hosts_config:often_right"}
    changes |= SIZES | {"rl.carry_over": carry_over}
    config = hosts_config.get_config()
    config.update_from_flattened_dict(changes | {"rl.num_steps": 3, "checkpoint_every": 1})
    config.keep_checkpoints = 3
    main.run_stages(config, one)
    assert len(moved) == 3 and all(moved)
    shutil.copytree(one / "checkpoints" / "rl" / "1", two / "checkpoints" / "rl" / "1")
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    processes = launch_two(two, *flags, "--config.rl.num_steps=100000")
    wait_for(two, "rl", 2, processes)
    processes[1].send_signal(signal.SIGTERM)
    ends = [end_of(process) for process in processes]

    expected, got = metrics_of(one)[1:], metrics_of(two)
    assert [record["step"] for record in expected] == [1, 2]
    assert [record["step"] for record in got[:2]] == [1, 2]
    for record, other in zip(expected, got, strict=False):
        differ = ("second", "verifier", "device_idle", "host/")
        names = [name for name in record if not any(part in name for part in differ)]
        values = [other.get(name) for name in names]
        assert values == pytest.approx([record[name] for name in names], abs=1e-5)
    assert 0 < got[0]["acc"] < 1 and got[0]["anchor_rate"] and got[0]["reflect_rate"]

    step = got[-1]["step"] + 1
    message = f"stopped by SIGTERM before rl step {step}; run the same command to resume"
    assert ends == [(75, message)] * 2
    assert (two / "checkpoints" / "rl" / str(step) / "state").is_dir()


@pytest.mark.exhaustive
def test_two_processes_say_what_they_would_do(tmp_path):
    ends = [end_of(process) for process in launch_two(tmp_path / "two", "--dry_run")]
    assert [status for status, _ in ends] == [0, 0], ends
    assert not (tmp_path / "two").exists()


@pytest.mark.exhaustive
def test_two_processes_draw_until_both_are_full(tmp_path):
    """Each step has two in five groups mixed; it takes batches until the slower process is full."""
    changes = {"stages": ("rl",), "rl.objective": "dapo", "dapo.max_tries": 12}
    changes |= {"verifier.reward": "hosts_config:by_its_bytes"}
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    ends = [end_of(process) for process in launch_two(tmp_path, *flags)]
    assert [status for status, _ in ends] == [0, 0], ends
    steps = metrics_of(tmp_path)
    assert [record["step"] for record in steps] == [0, 1]
    for record in steps:
        num_mixed = record["dynamic/kept_rate"] * record["dynamic/tries"] * 16
        assert record["dynamic/unused"] == pytest.approx(num_mixed - 16)
        assert 1 < record["dynamic/tries"] < 12 and record["dynamic/missing"] == 0
        assert 0.05 < record["acc"] < 0.25 and record["grad_norm"] > 0


@pytest.mark.exhaustive
def test_two_processes_end_together_where_their_reward_fails_too_often(tmp_path):
    changes = {"stages": ("rl",), "rl.num_steps": 6, "checkpoint_every": 100}
    changes |= SIZES | {"verifier.reward": "hosts_config:seldom_judges"}
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    (status, message), other = (end_of(process) for process in launch_two(tmp_path, *flags))
    assert (status, message) == other and status == 1
    share = r"error: rl step 4: \d+\.\d% of the responses of the last 5 steps were not judged"
    assert re.match(share, message), message
    steps = metrics_of(tmp_path)
    assert [record["step"] for record in steps] == [0, 1, 2, 3]
    assert all(0.5 < record["not_judged"] < 1 for record in steps)
    assert (tmp_path / "checkpoints" / "rl" / "4" / "state").is_dir()


@pytest.mark.exhaustive
def test_two_processes_export_what_one_does(tmp_path):
    """The best step, with adapters, and moments in the host's memory; evaluated at each step."""
    changes = {"stages": ("sft", "export"), "sft.num_steps": 3, "sft.warmup_steps": 0}
    changes |= {"sft.eval_every": 1, "keep_best": 1, "export.step": "best"}
    changes |= {"model.lora_rank": 2, "model.offload": ("optimizer",)}
    config = hosts_config.get_config()
    config.update_from_flattened_dict(changes)
    one, two = tmp_path / "one", tmp_path / "two"
    main.run_stages(config, one)
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    ends = [end_of(process) for process in launch_two(two, *flags)]
    assert [status for status, _ in ends] == [0, 0], ends
    names = [sorted(path.name for path in (folder / "export").iterdir()) for folder in (one, two)]
    assert names[0] == names[1] and "model.safetensors" in names[0]
    at_start = [metrics_of(folder)[0] for folder in (one, two)]
    assert [(record["stage"], record["step"]) for record in at_start] == [("sft_eval", 0)] * 2
    assert at_start[0]["acc"] == at_start[1]["acc"]
    texts = [(folder / "samples_sft" / "step_0.jsonl").read_text() for folder in (one, two)]
    samples = [[json.loads(line) for line in text.splitlines()] for text in texts]
    for sample in (*samples[0], *samples[1]):
        del sample["settings"]  # the sums of the weights may differ in the last digit
        del sample["sha256"]  # of the settings too
    assert samples[0] == samples[1] and len(samples[0]) == 12
    shape = policy_of(config).config
    start = backbone.init(shape, jax.random.key(config.seed))
    ours, theirs = (
        backbone.load(folder / "export", shape, jnp.bfloat16)[0] for folder in (one, two)
    )
    assert distance(theirs, ours) < 0.01 * distance(start, ours)
    adapters = [load_file(w / "adapter" / "adapter_model.safetensors") for w in (one, two)]
    assert adapters[0].keys() == adapters[1].keys()
    for name, tensor in adapters[0].items():
        np.testing.assert_allclose(adapters[1][name], tensor, rtol=0, atol=1e-3)


def distance(params, others):
    """Summed over the decoder's layers, where the adapters are."""
    pairs = zip(*(jax.tree.leaves(p["text"]["layers"]) for p in (params, others)), strict=True)
    return sum(float(jnp.abs(x.astype(float) - y.astype(float)).sum()) for x, y in pairs)


@pytest.mark.exhaustive
def test_a_run_told_to_end_saves_and_goes_on_where_it_was(tmp_path, monkeypatch):
    flags = ("--config.stages=('sft',)", "--config.checkpoint_every=100000")
    process = launch(tmp_path, *flags, "--config.sft.num_steps=100000", num_devices=1)
    wait_for(tmp_path, "sft", 2, [process])
    process.send_signal(signal.SIGTERM)
    status, message = end_of(process)
    steps = [record["step"] for record in metrics_of(tmp_path)]
    assert (status, message) == (
        75,
        f"stopped by SIGTERM before sft step {len(steps)}; run the same command to resume",
    )

    one_device = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    monkeypatch.setattr("care_jax.run.run.make_mesh", lambda **_: one_device)
    config = hosts_config.get_config()
    config.stages = ("sft",)
    config.sft.num_steps = len(steps) + 2
    main.run_stages(config, tmp_path)
    records = metrics_of(tmp_path)
    assert [record["step"] for record in records] == list(range(len(steps) + 2))
    # A run from new weights would be back at its first loss.
    assert records[-1]["loss"] < 0.8 * records[0]["loss"]
