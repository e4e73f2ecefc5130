"""SmolLM2-135M on word problems: cold start, evaluations and RL of configs/smollm_words.py."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from care_jax.commands.smollm import INSTALL, PACKAGE
from perf.first_hour.demo import ROOT, rows_of

FLAGS = ("--config.log_every=1", "--config.evaluate.batch_size=32")  # for eight devices
SMALL = ("--config.stages=('rl',)", "--config.rl.num_steps=1", "--config.rl.warmup_steps=0")
SMALL += ("--config.rl.prompts_per_step=1", "--config.rl.prompts_per_update=1")
SMALL += ("--config.rl.decode_prompts=1", "--config.rl.decode_rows=2")
SMALL += ("--config.rl.num_rollouts=2", "--config.rl.max_response_tokens=16")
SMALL += ("--config.care.max_context=4",)


def measure(*, is_small: bool, until: float) -> Iterator[dict[str, Any]]:
    """The rows of `demo.rows_of`."""
    missing = [name for name in (PACKAGE, "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        install = f"pip install gguf; {INSTALL}"
        raise ModuleNotFoundError(f"{missing[0]} is not installed; run: {install}")
    with tempfile.TemporaryDirectory() as folder:
        release, workdir = pathlib.Path(folder, "release"), pathlib.Path(folder, "run")
        command = [sys.executable, "-m", "care_jax.commands.smollm", f"--out={release}"]
        cpu = {**os.environ, "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, stdout=sys.stderr, cwd=ROOT, env=cpu, check=True)
        flags = [f"--config.model.path={release}", *FLAGS]
        flags += SMALL if is_small else ("--config.stages=('sft','evaluate','rl','evaluate')",)
        yield from rows_of("configs/smollm_words.py", workdir, flags, until)
