"""Rollout speed: the sampler against transformers' `generate`, same weights, one process.

    python -m perf.decode

4 prompts of 283 tokens with a 448 x 448 image, G = 8 rollouts each, 64 sampled tokens each
(EOS does not end a row on either side), prefill and vision tower included. The two sides take
turns; the figure is the median of the ratios of neighbouring runs.
"""

import argparse
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from care_jax import sampler
from care_jax.batch import Prompts
from models import backbone
from models.positions import image_slots, pack_images, prompt_positions
from perf.backbones import IMAGE_SIDE, medium_config


def make_prompts(config, num_prompts: int, num_text: int, rng) -> tuple[Prompts, dict]:
    """The same prompts for both sides: an image, then text."""
    vision = config.vision
    side = IMAGE_SIDE // vision.patch_size
    num_image_tokens = (side // vision.merge_size) ** 2
    grid = np.array([[1, side, side]])
    rows = []
    for _ in range(num_prompts):
        text = rng.integers(0, 30000, num_text)
        image = np.full(num_image_tokens, config.image_token_id)
        wrapped = [config.vision_start_token_id, *image, config.vision_end_token_id]
        rows.append(np.array([*wrapped, *text], np.int32))
    patches = rng.normal(size=(num_prompts, side * side, vision.patch_dim)).astype(np.float32)
    tokens = np.stack(rows)
    placed = [prompt_positions(row, grid, config) for row in rows]
    prompts = Prompts(
        tokens=tokens,
        is_valid=np.ones(tokens.shape, bool),
        positions=np.stack([positions for positions, _ in placed]),
        next_position=np.array([following for _, following in placed], np.int32),
        slots=np.stack([image_slots(row, config) for row in rows]),
        images=pack_images(list(patches), [grid] * num_prompts, vision, side * side),
    )
    inputs = {
        "input_ids": torch.tensor(tokens, dtype=torch.long),
        "attention_mask": torch.ones(tokens.shape, dtype=torch.long),
        "pixel_values": torch.tensor(patches.reshape(-1, vision.patch_dim)),
        "image_grid_thw": torch.tensor(np.repeat(grid, num_prompts, 0)),
        "mm_token_type_ids": torch.tensor((tokens == config.image_token_id).astype(np.int64)),
    }
    return prompts, inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()

    config, dtype = medium_config(), jnp.dtype(args.dtype)
    params = backbone.init(config, jax.random.key(0))
    num_params = sum(x.size for x in jax.tree.leaves(params))
    prompts, inputs = make_prompts(config, args.prompts, 25, np.random.default_rng(0))
    with tempfile.TemporaryDirectory() as folder:
        backbone.export(folder, params, config, dtype=jnp.float32)
        reference = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
            folder, dtype=getattr(torch, args.dtype)
        ).eval()
    inputs["pixel_values"] = inputs["pixel_values"].to(reference.dtype)
    closing_tag = jnp.zeros((2, config.text.vocab_size), jnp.uint8)  # no tag ever closes

    @jax.jit
    def roll_out(params, prompts, rng):
        prefix = sampler.prefill(params, prompts, config, dtype=dtype)
        return sampler.decode(
            params,
            prefix,
            jax.random.split(rng, args.prompts),
            closing_tag,
            config,
            num_rows=args.rollouts,
            max_tokens=args.tokens,
            temperature=1.0,
            top_p=1.0,
            dtype=dtype,
            stops=False,
        )

    decode_params = jax.jit(lambda p: backbone.to_decode_layout(p, config, dtype))(params)

    def ours(repeat: int) -> float:
        began = time.perf_counter()
        rollouts = jax.block_until_ready(roll_out(decode_params, prompts, jax.random.key(repeat)))
        seconds = time.perf_counter() - began
        assert int(rollouts.is_valid.sum()) == args.prompts * args.rollouts * args.tokens
        return seconds

    def theirs(repeat: int) -> float:
        torch.manual_seed(repeat)
        began = time.perf_counter()
        with torch.inference_mode():
            out = reference.generate(
                **inputs,
                do_sample=True,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                num_return_sequences=args.rollouts,
                min_new_tokens=args.tokens,
                max_new_tokens=args.tokens,
            )
        seconds = time.perf_counter() - began
        assert out.shape[1] - inputs["input_ids"].shape[1] == args.tokens
        return seconds

    ours(-1)  # compiles
    theirs(-1)
    num_tokens = args.prompts * args.rollouts * args.tokens
    print(
        f"{num_params / 1e6:.0f}M parameters, {args.prompts} prompts of "
        f"{prompts.tokens.shape[1]} tokens, G = {args.rollouts}, {args.tokens} new tokens, "
        f"{args.dtype}, {torch.get_num_threads()} threads"
    )
    ratios = []
    for repeat in range(args.repeats):
        seconds = {"care_jax": ours(repeat), "transformers": theirs(repeat)}
        ratios.append(seconds["transformers"] / seconds["care_jax"])
        speeds = "  ".join(f"{name} {num_tokens / s:7.1f} tok/s" for name, s in seconds.items())
        print(f"{speeds}  ratio {ratios[-1]:.2f}")
    print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
