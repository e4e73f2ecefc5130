"""Speed of an update's gradient: packed trees against padded, replicated and PyTorch layouts.

    python -m perf.train_step

Prompts have an image and lengths of the paper's mixture (see `perf.fill`). Each has 9 responses of
log-normal length (mean 96, σ 0.7, clipped to 384 tokens). All sides use the same backbone of 106M
parameters and the same loss, Σ advantage · log π, and compute the gradient of the whole batch:

    packed      as a run does: trees in rows of `--row-tokens`
    padded      one row per prompt, prompts padded to the longest, responses to the longest
    replicated  every response after a copy of prompt and image, packed into rows of the same size
    torch       transformers' model: the responses to a prompt as one batch, each after a copy of
                prompt and image, padded to the longest of the nine; gradient checkpointing

The sides are interleaved, `--repeats` times; ratios to packed are medians over the repeats.
Programs are compiled before; torch computes one prompt before. Losses and gradients (torch: only
the loss) of the first turn are compared. "model TFLOP/s" counts three forward passes over non-
padding tokens; compare it with the printed rate of a float32 matmul of this backbone's size,
measured between the sides. Also printed are the memory that the packed program was compiled for and
the peak of the process after its first turn, compilation of the other sides included, for a
gradient alone; see `perf.update_memory` for a whole update.
"""

import argparse
import dataclasses
import functools
import math
import resource
import statistics
import tempfile
import time

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from care_jax.aot import lengths
from care_jax.batch import TreeRows
from care_jax.devices import flops, xla_flags
from care_jax.learning.logprobs import score_rows
from care_jax.learning.train_step import microbatch_at, num_microbatches, split_batch
from care_jax.packing.layout import lay_out, place
from care_jax.packing.plan import RowPlan, plan_rows
from care_jax.packing.trees import Part, TreeSizes
from care_jax.prompts.builder import TokenizedPrompt, prompt_sizes
from configs import common
from models import backbone
from perf.backbones import medium_config

NUM_RESPONSES = 9
MEAN, SIGMA, LONGEST = 96, 0.7, 384  # tokens of a response


def make_prompts(config, sizes, rng) -> list[TokenizedPrompt]:
    """Prompts of a square image of about the given number of patches, followed by text."""
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


@dataclasses.dataclass(frozen=True)
class Layout:
    """The batch of one layout: prompts, responses [N, R, T], advantages [N, R] and the row plan."""

    prompts: list[TokenizedPrompt]
    tokens: np.ndarray
    advantage: np.ndarray
    plan: RowPlan


def layouts_of(prompts, tokens, num_tokens, advantage, row_tokens: int) -> dict[str, Layout]:
    """The three layouts of the same responses."""
    sizes = prompt_sizes(prompts).T
    row = {"row_tokens": row_tokens, "row_patches": max(2 * row_tokens, int(sizes[1].max()))}
    trees = TreeSizes(*sizes, num_tokens)
    padded_tokens = int(sizes[0].max() + NUM_RESPONSES * num_tokens.max())
    all_branches = tuple(range(NUM_RESPONSES))
    padded = RowPlan(
        rows=tuple((Part(n, all_branches),) for n in range(len(prompts))),
        sizes=trees,
        row_tokens=padded_tokens,
        row_patches=int(sizes[1].max()),
        num_microbatches=len(prompts),
        real_tokens=int(trees.total.sum()),
        computed_tokens=len(prompts) * padded_tokens,
        real_patches=int(sizes[1].sum()),
        computed_patches=len(prompts) * int(sizes[1].max()),
    )
    copies = TreeSizes(*np.repeat(sizes, NUM_RESPONSES, axis=1), num_tokens.reshape(-1, 1))
    one_each = tokens.reshape(-1, 1, tokens.shape[-1]), advantage.reshape(-1, 1)
    repeated = [prompt for prompt in prompts for _ in all_branches]
    return {
        "packed": Layout(prompts, tokens, advantage, plan_rows(trees, **row, microbatch_size=1)),
        "padded": Layout(prompts, tokens, advantage, padded),
        "replicated": Layout(repeated, *one_each, plan_rows(copies, **row, microbatch_size=1)),
    }


def main() -> None:
    xla_flags.set_defaults()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--remat", default="dots", choices=("none", "dots", "layer"))
    parser.add_argument("--sides", default="packed,padded,replicated,torch")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    config = medium_config()
    params = backbone.init(config, jax.random.key(0))
    data, rng = common.get_config().data, np.random.default_rng(0)
    pixels = {"min_pixels": data.min_pixels, "max_pixels": data.max_pixels}
    drawn = lengths.draw_prompts(args.prompts, data.buckets, rng, **pixels)
    prompts = make_prompts(config, drawn, rng)
    shape = (args.prompts, NUM_RESPONSES)
    num_tokens = lengths.draw_responses(shape, MEAN, LONGEST, rng, sigma=SIGMA)
    shape = (args.prompts, NUM_RESPONSES, LONGEST)
    tokens = rng.integers(0, 30000, shape, np.int32)
    advantage = rng.normal(size=shape[:2]).astype(np.float32)
    layouts = layouts_of(prompts, tokens, num_tokens, advantage, args.row_tokens)

    @functools.partial(jax.jit, donate_argnums=1)
    def add_gradient(params, total, rows, advantage):
        """Adds a batch's loss and gradient to `total`, with microbatches of one row."""

        def loss(params, rows, advantage):
            settings = dict(dtype=jnp.float32, chunk=args.chunk, remat=args.remat)
            return (advantage * score_rows(params, rows, config, **settings)[0]).sum()

        microbatches = split_batch(Batch(rows, advantage), 1)

        def add(index, total):
            batch = microbatch_at(microbatches, index)
            new = jax.value_and_grad(loss)(params, batch.rows, batch.advantage)
            return jax.tree.map(jnp.add, total, new)

        return jax.lax.fori_loop(0, num_microbatches(microbatches), add, total)

    def rows_of(layout: Layout):
        rows = lay_out(layout.prompts, layout.tokens, layout.plan, config)
        return rows, place(layout.advantage, layout.plan)

    def compiled(layout: Layout):
        """The layout's program, which lays out its rows and computes the gradient."""
        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
        program = add_gradient.lower(params, zeros, *rows_of(layout)).compile()

        def gradient():
            total = jax.tree.map(jnp.zeros_like, zeros)
            return jax.block_until_ready(program(params, total, *rows_of(layout)))

        return gradient, program.memory_analysis()

    wanted = args.sides.split(",")
    sides = {}
    for name, layout in layouts.items():
        if name in wanted:
            sides[name], memory = compiled(layout)
            if name == "packed":
                predicted = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    if "torch" in wanted:
        sides["torch"] = torch_side(config, params, prompts, tokens, num_tokens, advantage)

    worth = flops.model_flops(config, prompt_sizes(prompts), num_tokens)
    seconds, rates = {name: [] for name in sides}, [product_rate(config)]
    for repeat in range(args.repeats):
        for name, side in sides.items():
            began = time.perf_counter()
            loss, gradient = side()
            seconds[name].append(time.perf_counter() - began)
            print(f"{name} {seconds[name][-1]:.1f} s", flush=True)
            rates.append(product_rate(config))
            if repeat == 0 and name == "packed":
                expected = loss, gradient
                print(f"packed: predicted {predicted / 2**30:.2f} GiB, peak {peak_gib():.2f} GiB")
            elif repeat == 0:
                print(f"{name}: {compare(loss, gradient, *expected)}", flush=True)
    for name, times in seconds.items():
        ratios = [time / ours for time, ours in zip(times, seconds["packed"], strict=True)]
        plan = layouts["replicated" if name == "torch" else name].plan
        print(
            f"{name}: {statistics.median(times):.1f} s, {statistics.median(ratios):.2f} of packed; "
            f"{plan.computed_tokens} tokens computed, {layouts['packed'].plan.real_tokens} real; "
            f"{worth / statistics.median(times) / 1e12:.3f} model TFLOP/s"
        )
    low, *_, high = sorted(rates)
    print(
        f"a product of its size: {statistics.median(rates):.3f} TFLOP/s ({low:.3f} to {high:.3f})"
    )


def compare(loss, gradient, expected_loss, expected_gradient) -> str:
    """How far a side's loss and gradient (not torch's) are from those of packed trees."""
    told = f"loss {loss:.3f} against {expected_loss:.3f}"
    if gradient is None:
        return f"{told}, gradient not compared"
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True)
    apart = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)
    return f"{told}, gradient within {apart:.1e}"


def peak_gib() -> float:
    """Peak resident memory of this process, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


_multiply = jax.jit(jnp.matmul)


def product_rate(config, seconds: float = 1.0) -> float:
    """TFLOP/s of the MLP's first matmul over 4096 tokens."""
    sizes = 4096, config.text.hidden_size, config.text.intermediate_size
    x, kernel = jnp.ones(sizes[:2]), jnp.ones(sizes[1:])
    _multiply(x, kernel).block_until_ready()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        _multiply(x, kernel).block_until_ready()
        count += 1
    return 2 * count * math.prod(sizes) / (time.perf_counter() - began) / 1e12


@flax.struct.dataclass
class Batch:
    rows: TreeRows
    advantage: jax.Array


def torch_side(config, params, prompts, tokens, num_tokens, advantage):
    """The gradient with transformers' model; one right-padded batch per prompt."""
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
        prompt, longest = prompts[n].tokens, num_tokens[n].max()
        rows = np.concatenate([np.tile(prompt, (NUM_RESPONSES, 1)), tokens[n, :, :longest]], 1)
        is_response = np.arange(longest) < num_tokens[n][:, None]
        mask = np.concatenate([np.ones((NUM_RESPONSES, len(prompt)), bool), is_response], 1)
        logits = model(
            input_ids=torch.tensor(rows, dtype=torch.long),
            attention_mask=torch.tensor(mask, dtype=torch.long),
            pixel_values=torch.tensor(np.tile(prompts[n].patches, (NUM_RESPONSES, 1))),
            image_grid_thw=torch.tensor(
                np.tile(prompts[n].grids, (NUM_RESPONSES, 1)), dtype=torch.long
            ),
            mm_token_type_ids=torch.tensor((rows == config.image_token_id).astype(np.int64)),
            logits_to_keep=int(longest) + 1,
        ).logits[:, :-1]
        pads = [config.image_token_id, config.video_token_id]
        logits = logits.index_fill(-1, torch.tensor(pads), -1e30)
        targets = torch.tensor(tokens[n, :, :longest], dtype=torch.long)[..., None]
        logp = torch.log_softmax(logits, -1).gather(-1, targets)[..., 0]
        weight = torch.tensor(advantage[n][:, None] * is_response)
        return (weight * logp).sum()

    def run(num_prompts):
        model.zero_grad()
        total = 0.0
        for n in range(num_prompts):
            loss = loss_of(n)
            loss.backward()
            total += float(loss.detach())
        return total, None

    run(1)
    return functools.partial(run, len(prompts))


if __name__ == "__main__":
    main()
