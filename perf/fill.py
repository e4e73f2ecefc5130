"""How much of what an update computes is real: tokens and image patches of packed rows.

    python -m perf.fill

No data can be fetched here, so lengths of the paper's mixture are drawn from a model of it. These
are assumptions, not measurements:

- Sources by their numbers of examples: ChartQA human 7398, Geometry3K 2101, ViRL39K 38870.
- Text: 60 tokens of template, system prompt and instruction, then a question of log-normal length,
  on average 16 tokens (ChartQA), 30 (Geometry3K), 80 (ViRL39K).
- Images: ChartQA 800 x 560 to 850 x 600 pixels; Geometry3K 300 to 500 a side; ViRL39K log-normal
  in area (median 250,000, σ 1) and shape (σ 0.3), one image in 94% of rows, none in 4%, two in 2%.
  All are resized by `patches.target_size` into data.min_pixels to data.max_pixels, and cut in
  Qwen2.5-VL's patches. Prompts that no bucket of data.buckets holds are left out, as in a run.
- Answers: log-normal around the mean asked for, cut at rl.max_response_tokens. Half of the
  variance of their logarithm lies between prompts: a hard question has nine long answers.

Cases: 8 and 64 device shards, each of which runs one row at a time, every tree in the row that
suits it best. Then 64 shards of 8 processes whose rows hold only prompts that the process decoded,
shown for comparison and not in the last line. A figure is Σ real / Σ computed over the updates;
empty rows of a microbatch count as computed, and so does a repeated prompt. "least" is the worst
update. "patches" is with each microbatch's rows cut to the patches they need, "one size" with
those of the whole update. "shapes" are programs to compile. "padded" and "its patches" are the
layout of one row per prompt: data.buckets and rl.response_buckets.
"""

import argparse
import itertools
import time

import numpy as np

from care_jax.patches import target_size
from care_jax.row_plan import plan_rows
from care_jax.tree_packing import TreeSizes
from configs import common

SOURCES = ("chartqa", "geometry3k", "virl39k")
NUM_EXAMPLES = np.array((7398, 2101, 38870))
QUESTION_TOKENS = {"chartqa": 16, "geometry3k": 30, "virl39k": 80}
TEMPLATE_TOKENS = 60
PATCH, MERGE = 14, 2
CASES = ((8, 1), (64, 1), (64, 8))  # device shards, processes that keep their prompts
COLUMNS = ("shards", "processes", "row", "mean", "σ", "rows", "fill", "least", "patches")
COLUMNS += ("shapes", "seconds", "padded", "its patches")


def image_sizes(source: str, rng: np.random.Generator) -> list[tuple[float, float]]:
    """(height, width) in pixels of the images of one example."""
    if source == "chartqa":
        return [(rng.uniform(560, 600), rng.uniform(800, 850))]
    if source == "geometry3k":
        return [tuple(rng.uniform(300, 500, 2))]
    side = np.sqrt(250_000 * np.exp(rng.normal(0, 1, 2)))
    shape = np.exp(rng.normal(0, 0.15, 2))
    return [(s * a, s / a) for s, a in zip(side, shape, strict=True)][: rng.choice(3, p=SHARE)]


PADDED = (512, 1024, 2048)  # lengths that answers were padded to
SHARE = (0.04, 0.94, 0.02)  # none, one, two images in a row of ViRL39K


def draw_prompt(data, rng: np.random.Generator) -> tuple[int, int]:
    """Tokens and patches of one prompt that fits the buckets."""
    while True:
        source = rng.choice(SOURCES, p=NUM_EXAMPLES / NUM_EXAMPLES.sum())
        limits = dict(factor=PATCH * MERGE, min_pixels=data.min_pixels, max_pixels=data.max_pixels)
        num_patches = sum(
            np.prod(target_size(height, width, **limits)) // PATCH**2
            for height, width in image_sizes(source, rng)
        )
        text = TEMPLATE_TOKENS + QUESTION_TOKENS[source] * np.exp(rng.normal(-0.125, 0.5))
        size = int(text + num_patches // MERGE**2), int(num_patches)
        if any(size[0] <= p and size[1] <= n for p, n in data.buckets):
            return size


def draw_answers(shape: tuple[int, int], mean: float, sigma: float, cap: int, rng) -> np.ndarray:
    """[N, R] tokens."""
    scale = np.sqrt(0.5) * sigma
    log = np.log(mean) - sigma**2 / 2 + rng.normal(0, scale, (shape[0], 1))
    return np.clip(np.exp(log + rng.normal(0, scale, shape)), 8, cap).astype(int)


def padded_fill(sizes: TreeSizes, config) -> tuple[np.ndarray, np.ndarray]:
    """(real, computed) tokens and patches of one row per prompt, padded to buckets."""
    num_prompts, num_rows = sizes.branches.shape
    length = min(b for b in PADDED if b >= sizes.branches.max())
    prompt, patches = next(
        bucket
        for bucket in config.data.buckets
        if sizes.prompt.max() <= bucket[0] and sizes.patches.max() <= bucket[1]
    )
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
    parser.add_argument("--token-multiple", type=int, default=512, help="attention's block")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = common.get_config()

    updates = {}
    for mean, sigma in itertools.product(args.means, args.sigmas):
        rng = np.random.default_rng(args.seed)
        for _ in range(args.updates):
            prompts = np.array([draw_prompt(config.data, rng) for _ in range(args.prompts)])
            shape = (args.prompts, args.branches)
            answers = draw_answers(shape, mean, sigma, config.rl.max_response_tokens, rng)
            updates.setdefault((mean, sigma), []).append(TreeSizes(*prompts.T, answers))

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
                token_multiple=args.token_multiple,
                owner=np.arange(args.prompts) * num_processes // args.prompts,
                num_processes=num_processes,
            )
            for sizes in batches
        ]
        seconds = (time.perf_counter() - began) / len(plans)
        tokens = np.sum([(p.real_tokens, p.computed_tokens) for p in plans], 0)
        patches = np.sum([(p.real_patches, p.computed_patches) for p in plans], 0)
        padded = np.sum([padded_fill(sizes, config) for sizes in batches], 0)
        fill = np.array((tokens[0] / tokens[1], patches[0] / patches[1]))
        if num_processes == 1:
            worst = np.minimum(worst, fill)
        rows = sorted({f"{p.num_microbatches}x{p.row_tokens}" for p in plans})
        cells = (num_shards, num_processes, row_tokens, mean, sigma, rows[0])
        figures = (fill[0], min(p.train_fill for p in plans), fill[1])
        shapes = len({(len(p.rows), p.row_tokens, p.row_patches) for p in plans})
        cells += (*(f"{figure:.3f}" for figure in figures), shapes, f"{seconds:.2f}")
        cells += tuple(f"{real / computed:.3f}" for real, computed in padded)
        print(" ".join(f"{cell!s:>9}" for cell in cells), flush=True)
    print(f"train_fill {worst[0]:.3f} patch_fill {worst[1]:.3f}")


if __name__ == "__main__":
    main()
