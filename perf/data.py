"""Input pipeline throughput on JPEG files, against the most prompts/s that an update can consume.

    python -m perf.data

Writes random pictures of 480 to 1200 pixels a side to shards, then makes batches of prompts from
them, with images resized to the configuration's range of pixels and split into Qwen2.5-VL's
patches. The update's rate is bounded by arithmetic: 6 FLOPs per parameter and decoder token, at a
fraction of the chips' peak. Sampling, the reference model and the vision tower only lower it.
"""

import argparse
import io
import os
import pathlib
import statistics
import tempfile
import time

import jax.numpy as jnp
import numpy as np
from PIL import Image

from care_jax.batch import Example
from care_jax.data.pipeline import Batches
from care_jax.data.readers import shards
from care_jax.data.sources import open_source, open_tokenizer
from care_jax.prompts.builder import PromptBuilder, backbone_config
from configs import common
from models.release import config_json
from perf.backbones import medium_config

CHIPS, PEAK, UTILISATION = 8, 197e12, 0.4  # one TPU v5e host, bfloat16
PARAMETERS = 7.6e9
ROWS, RESPONSE_TOKENS = 9, 400  # rows of a group, and mean response tokens of a row
SFT_TOKENS = 800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()

    data = common.get_config().data
    tokenizer = open_tokenizer("")
    prompts = PromptBuilder(
        tokenizer,
        backbone_config(None, config_json.to_hf(medium_config()), tokenizer),
        min_pixels=data.min_pixels,
        max_pixels=data.max_pixels,
        buckets=((4096, 8192),),
        instruction=data.instruction,
        patch_dtype=jnp.bfloat16,
    )
    with tempfile.TemporaryDirectory() as folder:
        write_shards(pathlib.Path(folder), args.examples)
        source = open_source("arrayrecord", path=folder)
        tokenized = [prompts.tokenize(source[index]) for index in range(32)]
        num_patches = statistics.mean(len(prompt.patches) for prompt in tokenized)
        num_tokens = statistics.mean(len(prompt.tokens) for prompt in tokenized)
        num_bytes = statistics.mean(prompt.patches.nbytes for prompt in tokenized)
        print(
            f"{args.examples} JPEG files of {mean_bytes(source) / 1e3:.0f} kB, {num_patches:.0f} "
            f"patches, {num_tokens:.0f} tokens and {num_bytes / 1e6:.1f} MB a prompt; "
            f"{os.cpu_count()} cores"
        )
        rates = {workers: [] for workers in args.workers}
        cpu = {workers: [] for workers in args.workers}
        num_steps = max(args.examples // args.batch_size, 1)
        for _ in range(args.repeats):  # interleaves the worker counts
            for workers in args.workers:
                began = time.process_time()
                rates[workers].append(rate(source, prompts, args.batch_size, num_steps, workers))
                seconds = time.process_time() - began
                cpu[workers].append(seconds / (num_steps * args.batch_size))
    for workers, measured in rates.items():
        print(
            f"{workers} workers: {statistics.median(measured):6.1f} prompts/s "
            f"(of {sorted(map(round, measured))}), "
            f"{statistics.median(cpu[workers]) * 1e3:.0f} ms of CPU time each"
        )
    best = max(map(statistics.median, rates.values()))
    for name, response in (("RL", ROWS * RESPONSE_TOKENS), ("SFT", SFT_TOKENS)):
        operations = 6 * PARAMETERS * (num_tokens + response)
        taken = CHIPS * PEAK * UTILISATION / operations
        print(
            f"{name} update of {PARAMETERS / 1e9:.1f}B parameters on {CHIPS} chips at "
            f"{UTILISATION:.0%} of {PEAK / 1e12:.0f} TFLOP/s: at most {taken:.1f} prompts/s, "
            f"{taken / best:.2f} of what the pipeline makes here"
        )


def write_shards(folder: pathlib.Path, count: int) -> None:
    """Writes a prepared folder of random pictures as JPEG files."""
    rng = np.random.default_rng(0)
    writer = shards.ShardWriter(folder, "made", shard_bytes=2**26)
    for number in range(count):
        width, height = (int(side) for side in rng.integers(480, 1200, 2))
        coarse = rng.integers(0, 256, (height // 24, width // 24, 3), np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        image = Image.blend(image, Image.effect_noise(image.size, 60).convert("RGB"), 0.1)
        file = io.BytesIO()
        image.save(file, "JPEG", quality=85)
        question = f"<image>How many bars of figure {number} are higher than the one beside them?"
        writer.write(Example(str(number), "made", (file.getvalue(),), question, "1"))
    writer.close()
    shards.write_manifest(folder, {"sources": {"made": {"shards": writer.shards}}})


def mean_bytes(source) -> float:
    return statistics.mean(len(source[index].images[0]) for index in range(len(source)))


def rate(source, prompts: PromptBuilder, batch_size: int, num_steps: int, workers: int) -> float:
    """Prompts per second over `num_steps` batches."""
    batches = Batches(source, prompts, batch_size=batch_size, seed=0, num_workers=workers)
    began = time.perf_counter()
    for _ in batches.iterate(0, num_steps):
        pass
    return num_steps * batch_size / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
