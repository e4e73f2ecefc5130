"""A sweep from its command to its table and figure."""

import os
import pathlib
import subprocess
import sys

import pytest
from small_run import metrics_of

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.mark.exhaustive
def test_a_sweep_runs_its_arms_from_their_cold_start_and_tabulates_them(tmp_path):
    experiment = tmp_path / "one_arm.py"
    experiment.write_text(
        '"""GRPO alone."""\n\nfrom configs.arms import with_arm\n\n'
        'ARMS = {"grpo": {"rl.objective": "grpo"}}\nREFERENCE = "grpo"\n\n\n'
        "def get_config(arm):\n    return with_arm(ARMS, arm)\n"
    )
    sizes = {
        **{
            "sft.num_steps": 2,
            "sft.warmup_steps": 1,
            "sft.batch_size": 8,
            "sft.microbatch_size": 8,
        },
        **{"rl.num_steps": 2, "rl.warmup_steps": 1, "rl.prompts_per_step": 8},
        **{"rl.prompts_per_update": 8, "rl.decode_prompts": 8, "rl.num_rollouts": 4},
        **{"data.test.num_examples": 8, "evaluate.batch_size": 8},
    }
    flags = [f"--config.{key}={value}" for key, value in sizes.items()]
    command = [sys.executable, "-m", "experiments.sweep", f"--experiment={experiment}", "--seeds=1"]
    result = subprocess.run(
        [*command, f"--workdir={tmp_path}", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    stages = [record["stage"] for record in metrics_of(tmp_path / "one_arm/grpo/seed_0")]
    assert stages == ["rl", "rl", "evaluate_rl"]
    assert "| grpo | 1 | " in (tmp_path / "one_arm/table.md").read_text()
    assert (tmp_path / "one_arm/figure.png").stat().st_size > 10000
