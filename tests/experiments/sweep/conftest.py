"""Outcomes and runs without a model."""

import json
import math
import pathlib

import pytest

from experiments.sweep import trials
from experiments.sweep.outcome import Outcome

EXPERIMENT = '''"""What one key does.

More of it.
"""

from ml_collections import ConfigDict

from configs.arms import with_arm

ARMS = {"one": {}, "two": {"care.K": 2}, "same": {"care.K": 2}}
REFERENCE = "one"


def get_config(arm: str = REFERENCE) -> ConfigDict:
    return with_arm(ARMS, arm)
'''


@pytest.fixture
def write_experiment(tmp_path):
    """Writes an experiment's file, `changes` of its text made."""

    def write(**changes: str) -> pathlib.Path:
        text = EXPERIMENT
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "some_key.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def runs(monkeypatch):
    """Runs that write what a run leaves; returns the commands, in the order they began.

    A flag `--config.best_metric=<part of a workdir>` makes that run fail.
    """
    commands = []

    def run(command, running, **settings):
        flags = dict(flag.split("=", 1) for flag in command[3:])
        workdir = pathlib.Path(flags["--workdir"])
        commands.append((workdir, flags, settings["env"]))
        if "--config.best_metric" in flags and flags["--config.best_metric"] in str(workdir):
            settings["stdout"].write("Traceback\nerror: too small\n")
            return 1
        stages = flags.get("--config.stages", "")
        seed = int(flags["--config.seed"])
        records = []
        if "sft" in stages:
            weights = workdir / "checkpoints" / "sft" / "400"
            if not weights.exists():
                for step in ("350", "400"):
                    (weights.parent / step).mkdir(parents=True)
                    (weights.parent / step / "weights").write_text(f"of seed {seed}")
        if "rl" not in stages:
            records.append({"stage": "evaluate_sft", "step": 0, "acc": 0.5 + seed / 100})
        else:
            steps = range(4)
            records += [
                {"stage": "rl", "step": step, "acc": 0.5, "decoded_tokens": 1000 * (step + 1)}
                for step in steps
            ]
            acc = 0.7 if "one" in str(workdir) else 0.75
            records.append({"stage": "evaluate_rl", "step": 0, "acc": acc + seed / 100})
        config = {"rl": {"prompts_per_step": 64, "objective": "care"}, "care": {"K": 4}}
        workdir.joinpath("config.json").write_text(json.dumps(config))
        workdir.joinpath("metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        return 0

    monkeypatch.setattr(trials, "_run", run)
    monkeypatch.setattr(trials, "commit", lambda: "abc1234")
    monkeypatch.setattr(trials, "_local_devices", lambda: ("cpu", 1))
    return commands


@pytest.fixture
def make_outcome():
    """An outcome over a number of steps; metrics are lists, or one value for all steps.

    `held_out` maps the steps done to the held-out accuracy.
    """

    def make(
        arm="one",
        seed=0,
        *,
        start=None,
        final=None,
        num_steps=100,
        held_out=None,
        objective="care",
        workdir=pathlib.Path("nowhere"),
        shared_tokens=math.nan,
        **metrics,
    ):
        steps = [
            {
                name: value[step] if isinstance(value, list) else value
                for name, value in metrics.items()
                if not isinstance(value, list) or value[step] is not None
            }
            for step in range(num_steps)
        ]
        config = {"rl": {"prompts_per_step": 64, "objective": objective}, "care": {"K": 4}}
        evaluations = [{"step": step, "acc": acc} for step, acc in (held_out or {}).items()]
        ends = start or {}, final or {}
        return Outcome(arm, seed, config, *ends, steps, evaluations, workdir, shared_tokens)

    return make
