"""The cold start's speed: examples that share rows against one example per row.

    python -m perf.packing

Equal examples of 256 tokens with an image of 64, first as one row of four, then as four rows: no
padding either way, so the ratio is what packing itself costs. Then examples of 80 to 480 tokens:
packed, against rows padded to the longest. Gradients are the same. The layouts take turns; the
figures are medians of the ratios of neighbouring runs.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from care_jax.logprobs import score_packed
from care_jax.packing import Sample, first_fit, pack
from care_jax.prompt import TokenizedPrompt
from models import backbone
from perf.backbones import medium_config

IMAGE = 16  # patches per side: 64 tokens
LENGTHS = (480, 80, 120, 320, 160, 200, 400, 240)  # of the mixed examples


def make_sample(config, num_tokens: int, rng) -> Sample:
    """An image, some text, and a response that is half of what remains."""
    num_image = (IMAGE // config.vision.merge_size) ** 2
    num_response = (num_tokens - num_image) // 2
    text = rng.integers(0, 30000, num_tokens - num_image - num_response - 2)
    image = np.full(num_image, config.image_token_id)
    ends = [config.vision_start_token_id], [config.vision_end_token_id]
    tokens = np.concatenate([ends[0], image, ends[1], text]).astype(np.int32)
    patches = rng.normal(size=(IMAGE**2, config.vision.patch_dim)).astype(np.float32)
    prompt = TokenizedPrompt(tokens, np.array([[1, IMAGE, IMAGE]], np.int32), patches)
    response = rng.integers(0, 30000, num_response).astype(np.int32)
    return Sample(prompt, response, np.ones(num_response, np.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    config = medium_config()
    params = backbone.init(config, jax.random.key(0))
    rng = np.random.default_rng(0)

    @jax.jit
    def gradient(params, rows):
        def loss(params):
            settings = dict(dtype=jnp.float32, chunk=256, remat="layer")
            logp = score_packed(params, rows, config, **settings)
            return -jnp.where(rows.scored >= 0, logp, 0.0).sum()

        return jax.grad(loss)(params)

    def compare(name: str, lengths: tuple[int, ...], row_tokens: int) -> None:
        samples = [make_sample(config, length, rng) for length in lengths]
        sizes = [sample.size for sample in samples]
        layouts = {}
        for shared, num_tokens in ((True, row_tokens), (False, max(lengths))):
            rows = first_fit(sizes, (num_tokens, 10**9), shared=shared)
            num_patches = IMAGE**2 * max(map(len, rows))
            layouts[shared] = pack(samples, rows, (num_tokens, num_patches), config)

        def seconds(shared: bool) -> float:
            began = time.perf_counter()
            jax.block_until_ready(gradient(params, layouts[shared]))
            return time.perf_counter() - began

        ours, theirs = (gradient(params, layouts[shared]) for shared in (True, False))
        difference = max(
            float(jnp.abs(a - b).max() / jnp.abs(b).max())
            for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
        )
        ratios = [seconds(True) / seconds(False) for _ in range(args.repeats)]
        packed, alone = (layouts[shared].tokens.size for shared in (True, False))
        print(
            f"{name}: packed takes {statistics.median(ratios):.3f} of the time, at "
            f"{packed / alone:.3f} of the tokens with padding ({packed} of {alone}, "
            f"{sum(lengths)} without); largest relative gradient difference {difference:.1e}",
            flush=True,
        )

    compare("equal examples", (256,) * 4, 1024)
    compare("mixed examples", LENGTHS, 1024)


if __name__ == "__main__":
    main()
