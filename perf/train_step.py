"""The update's speed on answers of real lengths: packed trees against two other layouts.

    python -m perf.train_step

Prompts have an image and the lengths of the paper's mixture (see `perf.fill`), answers are
log-normal (mean 96, σ 0.7, cut at 384 tokens), 9 to a prompt. One backbone of 106M parameters, one
loss, Σ advantage · log π; the gradient of the whole batch is computed

    packed      as a run does: trees in rows of `--row-tokens`
    padded      one row per prompt, prompts padded to the longest, answers to the longest answer
    replicated  every answer alone behind its own copy of prompt and image, nothing padded
    torch       transformers' model: a prompt's answers in one batch, each behind a copy of prompt
                and image, padded to the longest of the nine; layers recomputed as in ours

The sides take turns, `--repeats` times; each ratio is the median of those of neighbouring runs.
Gradients are compared once. "model TFLOP/s" counts three forwards of what is not padding.
"""

import argparse
import functools
import resource
import statistics
import tempfile
import time

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from care_jax import lengths, roofline
from care_jax.batch import TreeRows
from care_jax.logprobs import score_rows
from care_jax.prompt import TokenizedPrompt
from care_jax.row_plan import Part, RowPlan, TreeSizes, plan_rows
from care_jax.train_step import microbatch_at, num_microbatches, split_batch
from care_jax.tree_rows import lay_out, place
from configs import common
from models import backbone
from perf.backbones import medium_config

NUM_ANSWERS = 9
MEAN, SIGMA, LONGEST = 96, 0.7, 384  # tokens of an answer


def make_prompts(config, sizes, rng) -> list[TokenizedPrompt]:
    """An image of about so many patches, as near to a square as merge blocks allow, then text."""
    vision, prompts = config.vision, []
    for num_tokens, num_patches in sizes:
        side = max(round((num_patches / vision.merge_size**2) ** 0.5), 1)
        grid = np.array([[1, side * vision.merge_size, side * vision.merge_size]], np.int32)
        image = [config.image_token_id] * side**2
        text = rng.integers(0, 30000, max(num_tokens - side**2 - 2, 8))
        ends = config.vision_start_token_id, config.vision_end_token_id
        tokens = np.array([ends[0], *image, ends[1], *text], np.int32)
        patches = rng.normal(size=(int(grid.prod()), vision.patch_dim)).astype(np.float32)
        prompts.append(TokenizedPrompt(tokens, grid, patches))
    return prompts


def plans_of(sizes: TreeSizes, row_tokens: int, row_patches: int) -> dict[str, list[RowPlan]]:
    """The rows of each layout; those of one plan have one shape."""
    packed = plan_rows(sizes, row_tokens=row_tokens, row_patches=row_patches, microbatch_size=1)

    def rows_of(rows, longest):
        patches = max(int(sizes.patches[part.tree]) for row in rows for part in row)
        return RowPlan(rows, sizes, longest, patches, len(rows), 0, 0, 0, 0)

    everything = tuple(range(NUM_ANSWERS))
    trees = tuple((Part(n, everything),) for n in range(len(sizes.prompt)))
    padded = int(sizes.prompt.max() + NUM_ANSWERS * sizes.branches.max())
    alone = [
        rows_of(((Part(n, (r,)),),), int(sizes.prompt[n] + sizes.branches[n, r]))
        for n in range(len(sizes.prompt))
        for r in everything
    ]
    return {"packed": [packed], "padded": [rows_of(trees, padded)], "replicated": alone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--remat", default="layer", choices=("none", "dots", "layer"))
    parser.add_argument("--sides", default="packed,padded,replicated,torch")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    config = medium_config()
    params = backbone.init(config, jax.random.key(0))
    data, rng = common.get_config().data, np.random.default_rng(0)
    pixels = {"min_pixels": data.min_pixels, "max_pixels": data.max_pixels}
    drawn = lengths.draw_prompts(args.prompts, data.buckets, rng, **pixels)
    prompts = make_prompts(config, drawn, rng)
    shape = (args.prompts, NUM_ANSWERS)
    answers = lengths.draw_responses(shape, MEAN, LONGEST, rng, sigma=SIGMA)
    num_tokens = np.array([len(prompt.tokens) for prompt in prompts])
    patches = np.array([len(prompt.patches) for prompt in prompts])
    sizes = TreeSizes(num_tokens, patches, answers)
    shape = (args.prompts, NUM_ANSWERS, LONGEST)
    tokens = rng.integers(0, 30000, shape, np.int32)
    advantage = rng.normal(size=shape[:2]).astype(np.float32)
    row_patches = max(2 * args.row_tokens, int(patches.max()))
    plans = plans_of(sizes, args.row_tokens, row_patches)

    @functools.partial(jax.jit, donate_argnums=1)
    def add_gradient(params, total, rows, advantage):
        """Adds a batch's to a sum, microbatches of one row after another."""

        def loss(params, rows, advantage):
            settings = dict(dtype=jnp.float32, chunk=args.chunk, remat=args.remat)
            return (advantage * score_rows(params, rows, config, **settings)[0]).sum()

        microbatches = split_batch(Batch(rows, advantage), 1)

        def add(index, total):
            batch = microbatch_at(microbatches, index)
            new = jax.value_and_grad(loss)(params, batch.rows, batch.advantage)
            return jax.tree.map(jnp.add, total, new)

        return jax.lax.fori_loop(0, num_microbatches(microbatches), add, total)

    def gradient(name):
        total = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
        for plan in plans[name]:
            rows = lay_out(prompts, tokens, plan, config)
            total = add_gradient(params, total, rows, place(advantage, plan))
        return jax.block_until_ready(total)

    sides = {name: functools.partial(gradient, name) for name in plans}
    sides["torch"] = torch_side(config, params, prompts, tokens, answers, advantage)
    sides = {name: sides[name] for name in args.sides.split(",")}
    results = {name: side() for name, side in sides.items()}  # compiled now
    loss, expected = results["packed"]
    for name, (other, grad) in results.items():
        pairs = zip(jax.tree.leaves(grad), jax.tree.leaves(expected), strict=bool(grad))
        within = max((float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs), default=0)
        print(f"{name}: loss {other:.3f} against {loss:.3f}, gradient within {within:.1e}")

    worth = roofline.model_flops(config, np.stack([num_tokens, patches], 1), answers)
    seconds = {name: [] for name in sides}
    for _ in range(args.repeats):
        for name, side in sides.items():
            began = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - began)
        print(*(f"{name} {times[-1]:.1f} s" for name, times in seconds.items()), flush=True)
    real = int(sizes.total.sum())
    for name, times in seconds.items():
        computed = sum(len(plan.rows) * plan.row_tokens for plan in plans.get(name, []))
        computed = computed or sum(plan.row_tokens for plan in plans["replicated"])
        ratio = statistics.median(
            t / ours for t, ours in zip(times, seconds["packed"], strict=True)
        )
        print(
            f"{name}: {statistics.median(times):.1f} s, {ratio:.2f} of packed; {computed} tokens "
            f"computed for {real}; {worth / statistics.median(times) / 1e12:.3f} model TFLOP/s"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak of this process {peak:.2f} GiB, parameters and one gradient included")


@flax.struct.dataclass
class Batch:
    rows: TreeRows
    advantage: jax.Array


def torch_side(config, params, prompts, tokens, answers, advantage):
    """The gradient by transformers' model: a prompt's answers in one right-padded batch."""
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        backbone.export(folder, params, config, dtype=jnp.float32)
        model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        )
    if "sdpa" in model.config._attn_implementation:
        model.gradient_checkpointing_enable()

    def loss_of(n):
        prompt, longest = prompts[n].tokens, answers[n].max()
        rows = np.concatenate([np.tile(prompt, (NUM_ANSWERS, 1)), tokens[n, :, :longest]], 1)
        is_answer = np.arange(longest) < answers[n][:, None]
        mask = np.concatenate([np.ones((NUM_ANSWERS, len(prompt)), bool), is_answer], 1)
        logits = model(
            input_ids=torch.tensor(rows, dtype=torch.long),
            attention_mask=torch.tensor(mask, dtype=torch.long),
            pixel_values=torch.tensor(np.tile(prompts[n].patches, (NUM_ANSWERS, 1))),
            image_grid_thw=torch.tensor(
                np.tile(prompts[n].grids, (NUM_ANSWERS, 1)), dtype=torch.long
            ),
            mm_token_type_ids=torch.tensor((rows == config.image_token_id).astype(np.int64)),
            logits_to_keep=int(longest) + 1,
        ).logits[:, :-1]
        pads = [config.image_token_id, config.video_token_id]
        logits = logits.index_fill(-1, torch.tensor(pads), -1e30)
        targets = torch.tensor(tokens[n, :, :longest], dtype=torch.long)[..., None]
        logp = torch.log_softmax(logits, -1).gather(-1, targets)[..., 0]
        weight = torch.tensor(advantage[n][:, None] * is_answer)
        return (weight * logp).sum()

    def run():
        model.zero_grad()
        total = 0.0
        for n in range(len(prompts)):
            loss = loss_of(n)
            loss.backward()
            total += float(loss.detach())
        return total, {}

    return run


if __name__ == "__main__":
    main()
