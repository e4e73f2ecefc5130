"""A run of a backbone from random weights by `care_jax.main`: cold start, RL and export.

Its questions are made: a picture, and numbers whose sum is even or odd. The responses of the cold
start add them up one by one, so that they have log-normal lengths and the policy learns to end.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from care_jax.aot import lengths
from configs import common
from perf.first_hour import backbone
from perf.first_hour.demo import ROOT, rows_of

TOKENS_PER_NUMBER = 12  # of "12 + 7 = 19. ", in the built-in tokenizer
NUM_QUESTIONS = 1600
_CONFIG = "from perf.first_hour import running\n\n\ndef get_config():\n    return running.{call}\n"
_NUM_BYTES = "from perf.first_hour import backbone; print(backbone.total_bytes())"


def measure(name: str, *, is_small: bool, until: float) -> Iterator[dict[str, Any]]:
    """The rows of `demo.rows_of`."""
    with tempfile.TemporaryDirectory() as folder:
        mean = 12 if is_small else 600
        write_questions(pathlib.Path(folder), mean, NUM_QUESTIONS // (40 if is_small else 1))
        printed = subprocess.run(
            [sys.executable, "-c", _NUM_BYTES], capture_output=True, text=True, cwd=ROOT, check=True
        )
        call = f"configuration({name!r}, {folder!r}, {printed.stdout.split()[-1]}, {is_small})"
        config, workdir = pathlib.Path(folder, "config.py"), pathlib.Path(folder, "run")
        config.write_text(_CONFIG.format(call=call))
        yield from rows_of(str(config), workdir, (), until)


def configuration(name: str, folder: str, num_bytes: int, is_small: bool) -> ConfigDict:
    """`backbone.configuration` with the questions of `folder`, for a few minutes."""
    config = backbone.configuration(name, num_bytes, is_small=is_small)
    config.stages, config.log_every = ("sft", "rl", "export"), 1
    for section in ("sft", "train"):
        config.data[section] = common.source("jsonl", path=f"{folder}/questions.jsonl")
    # One bucket and one length of rows: every other is one more program to compile.
    config.rl.update(num_steps=2, row_lengths=1, learning_rate=1e-6, warmup_steps=0)
    config.sft.update(batch_size=8, row_lengths=1, learning_rate=2e-4)
    if is_small:
        config.sft.update(num_steps=2, warmup_steps=0, row_tokens=256)
    else:
        config.sft.update(num_steps=80, warmup_steps=10, row_tokens=8192)
        config.data.buckets, config.data.max_pixels = ((768, 2560),), 501760
    return config


def write_questions(folder: pathlib.Path, mean: int, number: int) -> None:
    """Writes questions.jsonl and its pictures; responses have about `mean` tokens on average."""
    rng = np.random.default_rng(0)
    tokens = lengths.draw_responses((number, 1), mean, 3 * mean, rng)[:, 0]
    with (folder / "questions.jsonl").open("w") as file:
        for index, count in enumerate(np.maximum(tokens // TOKENS_PER_NUMBER, 1).tolist()):
            size = np.exp(rng.normal(np.log(500), 0.35, 2)).astype(int)
            noise = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(noise).resize(size.tolist()).save(folder / f"{index}.png")
            numbers = rng.integers(1, 10, count)
            sums = np.cumsum(numbers)
            steps = " ".join(
                f"{total - each} + {each} = {total}."
                for each, total in zip(numbers, sums, strict=True)
            )
            answer = "odd" if sums[-1] % 2 else "even"
            row = {
                "question": f"Is the sum even or odd? {' '.join(map(str, numbers))}",
                "answer": answer,
                "image": f"{index}.png",
                "response": f"<think>{steps}</think><answer>{answer}</answer>",
            }
            file.write(json.dumps(row) + "\n")
