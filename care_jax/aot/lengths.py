"""Lengths of prompts and responses, drawn from a model of the paper's mixture (host).

They size the computation of a run before there is any data. These are assumptions, not
measurements:

- Sources by number of examples (tab:dataset-stats): ChartQA human 7398, Geometry3K 2101, ViRL39K
  38870.
- Text: 60 tokens of template, system prompt and instruction, then a question of log-normal length
  (σ 0.5), on average 16 tokens (ChartQA), 30 (Geometry3K), 80 (ViRL39K).
- Images: ChartQA 800 x 560 to 850 x 600 pixels; Geometry3K 300 to 500 a side; ViRL39K log-normal in
  area (median 250,000, σ 1) and aspect ratio (σ 0.3), with one image in 94% of examples, none in
  4%, two in 2%. All are resized by `patches.target_size`. Prompts that fit no bucket are dropped.
  A backbone that reads text alone gets questions as long as ViRL39K's.
- Responses: log-normal with the given mean, then clipped to the cap. Half of the variance of the
  log-length is between prompts: responses to a hard question are all long.

Letters: N prompts, R responses of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from care_jax.prompts.patches import target_size

SIGMA = 0.8  # standard deviation of the log of a response's tokens
_NUM_EXAMPLES = {"chartqa": 7398, "geometry3k": 2101, "virl39k": 38870}
_QUESTION_TOKENS = {"chartqa": 16, "geometry3k": 30, "virl39k": 80}
_TEMPLATE_TOKENS = 60
_NUM_IMAGES = (0.04, 0.94, 0.02)  # shares of ViRL39K's examples with none, one and two
_MIN_RESPONSE = 8  # tokens
_TRIES = 1000  # maximum draws for one prompt that fits a bucket


def draw_prompts(
    num_prompts: int,
    buckets: Sequence[tuple[int, int]],
    rng: np.random.Generator,
    *,
    min_pixels: int,
    max_pixels: int,
    patch_size: int | None = 14,
    merge_size: int = 2,
) -> Int[np.ndarray, "N 2"]:
    """Tokens and image patches of N prompts, each of which fits a bucket of (tokens, patches).

    Images are resized to `min_pixels` to `max_pixels`. The vision tower is Qwen2.5-VL's by default;
    without one `patch_size` is None.

    Raises:
        ValueError: none of `_TRIES` drawn prompts fits.
    """
    limits = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    shares = np.array(list(_NUM_EXAMPLES.values())) / sum(_NUM_EXAMPLES.values())

    def draw() -> tuple[int, int]:
        source, num_patches = "virl39k", 0
        if patch_size is not None:
            source = rng.choice(list(_NUM_EXAMPLES), p=shares)
            num_patches = sum(
                np.prod(target_size(*size, factor=patch_size * merge_size, **limits))
                // patch_size**2
                for size in _image_sizes(source, rng)
            )
        text = _TEMPLATE_TOKENS + _QUESTION_TOKENS[source] * np.exp(rng.normal(-0.125, 0.5))
        return int(text + num_patches // merge_size**2), int(num_patches)

    def draw_fitting() -> tuple[int, int]:
        for _ in range(_TRIES):
            size = draw()
            if any(size[0] <= tokens and size[1] <= patches for tokens, patches in buckets):
                return size
        raise ValueError(
            f"data.buckets {tuple(buckets)} hold none of {_TRIES} prompts with lengths drawn like "
            "the mixture's; enlarge data.buckets, or leave out --mean_response"
        )

    return np.array([draw_fitting() for _ in range(num_prompts)])


def _image_sizes(source: str, rng: np.random.Generator) -> list[tuple[float, float]]:
    """(height, width) in pixels of the images of one example."""
    if source == "chartqa":
        return [(rng.uniform(560, 600), rng.uniform(800, 850))]
    if source == "geometry3k":
        return [tuple(rng.uniform(300, 500, 2))]
    side = np.sqrt(250_000 * np.exp(rng.normal(0, 1, 2)))
    shape = np.exp(rng.normal(0, 0.15, 2))
    sizes = [(s * a, s / a) for s, a in zip(side, shape, strict=True)]
    return sizes[: rng.choice(3, p=_NUM_IMAGES)]


def draw_responses(
    shape: tuple[int, int], mean: float, cap: int, rng: np.random.Generator, *, sigma: float = SIGMA
) -> Int[np.ndarray, "N R"]:
    """Tokens of each response: log-normal with this mean, then clipped to at most `cap`.

    `shape` is (N, R); `sigma` is the standard deviation of the log-length.
    """
    scale = np.sqrt(0.5) * sigma
    log = np.log(mean) - sigma**2 / 2 + rng.normal(0, scale, (shape[0], 1))
    drawn = np.exp(log + rng.normal(0, scale, shape))
    return np.clip(drawn, min(_MIN_RESPONSE, cap), cap).astype(int)
