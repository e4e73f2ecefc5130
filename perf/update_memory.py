"""Predicted and measured memory of a whole update, including weights, moments and gradients.

    python -m perf.update_memory

A decoder of SmolLM2-135M's shape (30 layers of 576, a vocabulary of 49152, 140M parameters with a
small tower), 8 prompts of 100 tokens with 9 responses of 96 each, float32, AdamW. The prediction is
the compiled program's arguments and temporaries; the measurement is the process's peak memory.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from care_jax.batch import TrainBatch
from care_jax.devices import xla_flags
from care_jax.learning import optimizer
from care_jax.learning.train_step import init_state, train_step
from care_jax.packing.layout import at_rows, lay_out, place
from care_jax.packing.plan import plan_rows
from care_jax.packing.trees import TreeSizes
from care_jax.prompts.builder import TokenizedPrompt
from configs import common
from models import backbone
from perf.backbones import smollm2_config
from perf.train_step import peak_gib

NUM_PROMPTS, NUM_ROWS, PROMPT_TOKENS, ROW_TOKENS = 8, 9, 100, 96


def make_batch(config, args) -> TrainBatch:
    """A batch of random tokens and advantages."""
    rng, shape = np.random.default_rng(0), (NUM_PROMPTS, NUM_ROWS, ROW_TOKENS)
    no_grid = np.zeros((0, 3), np.int32)
    no_patch = np.zeros((0, config.vision.patch_dim), np.float32)
    texts = rng.integers(0, 30000, (NUM_PROMPTS, PROMPT_TOKENS), np.int32)
    prompts = [TokenizedPrompt(text, no_grid, no_patch) for text in texts]
    sizes = TreeSizes(
        np.full(NUM_PROMPTS, PROMPT_TOKENS),
        np.zeros(NUM_PROMPTS, int),
        np.full(shape[:2], ROW_TOKENS),
    )
    plan = plan_rows(
        sizes,
        row_tokens=args.row_tokens,
        row_patches=16,
        microbatch_size=args.microbatch_size,
    )
    ones = place(np.ones(shape, np.float32), plan)
    return TrainBatch(
        rows=lay_out(prompts, rng.integers(0, 30000, shape, np.int32), plan, config),
        token_advantage=place(rng.normal(size=shape).astype(np.float32), plan),
        old_logp=-10 * ones,
        ref_logp=-10 * ones,
        row_weight=ones / NUM_ROWS,
        is_trained=ones > 0,
        is_answer=ones > 0,
        prompt_weight=at_rows(np.ones(NUM_PROMPTS, np.float32), plan),
    )


def main() -> None:
    xla_flags.set_defaults()
    shipped = common.get_config().model
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--microbatch-size", type=int, default=1, help="rows")
    parser.add_argument("--chunk", type=int, default=shipped.logprob_chunk or 1024, help="tokens")
    parser.add_argument("--remat", default=shipped.remat, choices=("none", "dots", "layer"))
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()

    config = smollm2_config()
    adamw = optimizer.make_optimizer(lambda step: 1e-6, weight_decay=0.01, max_grad_norm=1.0)
    batch = make_batch(config, args)
    state = init_state(backbone.init(config, jax.random.key(0)), adamw)
    step = jax.jit(
        functools.partial(
            train_step,
            config=config,
            optimizer=adamw,
            microbatch_size=args.microbatch_size,
            beta=0.02,
            clip_low=0.2,
            clip_high=0.28,
            chunk=max(args.chunk // args.microbatch_size, 1),
            dtype=jnp.float32,
            remat=args.remat,
        ),
        donate_argnums=0,
    )
    print(f"peak {peak_gib():.2f} GiB with weights and moments", flush=True)
    compiled = step.lower(state, batch).compile()
    print(f"peak {peak_gib():.2f} GiB once compiled", flush=True)
    memory = compiled.memory_analysis()
    held, passing = (
        size / 2**30 for size in (memory.argument_size_in_bytes, memory.temp_size_in_bytes)
    )
    num_params = sum(x.size for x in jax.tree.leaves(state.params))
    print(f"{num_params / 1e6:.1f}M parameters, rows {batch.rows.tokens.shape}")
    print(f"predicted {held + passing:.2f} GiB: arguments {held:.2f}, temporaries {passing:.2f}")
    for _ in range(args.steps):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(compiled(state, batch))
        print(
            f"update in {time.perf_counter() - began:.1f} s, peak {peak_gib():.2f} GiB", flush=True
        )


if __name__ == "__main__":
    main()
