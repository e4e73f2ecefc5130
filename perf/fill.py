"""Fill of packed rows: the share of an update's computed tokens and image patches that is real.

    python -m perf.fill

Needs no data: lengths are drawn from the model of the paper's mixture in `care_jax.aot.lengths`.

Cases: 8 device shards of one process and 64 shards of 16 processes, with one row each per
microbatch. A figure is Σ real / Σ computed over the updates. Empty rows of a microbatch and
repeated prompts are computed, not real. "fill" is for tokens, "least" for the update with the
lowest fill, "patches" for image patches, "moved" the share of prompts that are sent to a process
which did not decode them, "shapes" the number of programs to compile. "padded" and "its patches"
are the fill of one row per prompt, padded to data.buckets and RESPONSE_BUCKETS.
"""

import argparse
import itertools
import time

import numpy as np

from care_jax.aot.lengths import draw_prompts, draw_responses
from care_jax.packing.plan import fill_of, plan_rows
from care_jax.packing.trees import TreeSizes
from configs import common

RESPONSE_BUCKETS = (512, 1024, 2048)
CASES = ((8, 1), (64, 16))  # device shards, processes
COLUMNS = ("shards", "processes", "row", "mean", "σ", "rows", "fill", "least", "patches")
COLUMNS += ("moved", "shapes", "seconds", "padded", "its patches")


def padded_fill(sizes: TreeSizes, buckets) -> tuple[np.ndarray, np.ndarray]:
    """(real, computed) tokens, then patches, of one row per prompt padded to buckets."""
    num_prompts, num_rows = sizes.branches.shape
    length = min(b for b in RESPONSE_BUCKETS if b >= sizes.branches.max())
    least = sizes.prompt.max(), sizes.patches.max()
    prompt, patches = next((t, p) for t, p in buckets if t >= least[0] and p >= least[1])
    tokens = np.array((sizes.total.sum(), num_prompts * (prompt + num_rows * length)))
    return tokens, np.array((sizes.patches.sum(), num_prompts * patches))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=128, help="of an update")
    parser.add_argument("--branches", type=int, default=9)
    parser.add_argument("--means", type=int, nargs="+", default=[300, 600, 700])
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.6, 0.8])
    parser.add_argument("--row-tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = common.get_config()
    data = config.data
    pixels = {"min_pixels": data.min_pixels, "max_pixels": data.max_pixels}

    updates = {}
    for mean, sigma in itertools.product(args.means, args.sigmas):
        rng = np.random.default_rng(args.seed)
        for _ in range(args.updates):
            prompts = draw_prompts(args.prompts, data.buckets, rng, **pixels)
            shape, cap = (args.prompts, args.branches), config.rl.max_response_tokens
            responses = draw_responses(shape, mean, cap, rng, sigma=sigma)
            updates.setdefault((mean, sigma), []).append(TreeSizes(*prompts.T, responses))

    print(" ".join(f"{name:>9}" for name in COLUMNS))
    worst = np.ones(2)
    cases = itertools.product(CASES, args.row_tokens, updates.items())
    for (num_shards, num_processes), row_tokens, ((mean, sigma), batches) in cases:
        began = time.perf_counter()
        plans = [
            plan_rows(
                sizes,
                row_tokens=row_tokens,
                row_patches=row_tokens,
                microbatch_size=num_shards,
                owner=np.arange(args.prompts) * num_processes // args.prompts,
                num_processes=num_processes,
            )
            for sizes in batches
        ]
        seconds = (time.perf_counter() - began) / len(plans)
        padded = np.sum([padded_fill(sizes, data.buckets) for sizes in batches], 0)
        fill = np.array([fill_of(plans)[name] for name in ("train_fill", "patch_fill")])
        worst = np.minimum(worst, fill)
        moved = np.mean([len(plan.moved) for plan in plans]) / args.prompts
        rows = sorted({f"{p.num_microbatches}x{p.row_tokens}" for p in plans})
        cells = (num_shards, num_processes, row_tokens, mean, sigma, rows[0])
        figures = (fill[0], min(fill_of([p])["train_fill"] for p in plans), fill[1], moved)
        shapes = len({(len(p.rows), p.row_tokens, p.row_patches) for p in plans})
        cells += (*(f"{figure:.3f}" for figure in figures), shapes, f"{seconds:.2f}")
        cells += tuple(f"{real / computed:.3f}" for real, computed in padded)
        print(" ".join(f"{cell!s:>9}" for cell in cells), flush=True)
    print(f"train_fill {worst[0]:.3f} patch_fill {worst[1]:.3f}")


if __name__ == "__main__":
    main()
