"""Drawn lengths have the shares, the mean and the spread that the model states."""

import numpy as np
import pytest

from care_jax.aot.lengths import draw_prompts, draw_responses

BUCKETS = ((512, 2048), (1024, 4096), (2048, 6144))
PIXELS = {"min_pixels": 262144, "max_pixels": 1003520}


def test_every_prompt_fits_a_bucket_and_its_text_stands_beside_its_images():
    prompts = draw_prompts(500, BUCKETS, np.random.default_rng(0), **PIXELS)
    tokens, patches = prompts.T
    assert all(any((p <= bucket).all() for bucket in BUCKETS) for p in prompts)
    text = tokens - patches // 4  # 4 patches are one token
    assert (text >= 60).all() and 120 < text.mean() < 145
    assert 0.01 < (patches == 0).mean() < 0.07  # 4% of four fifths
    # 262144 to 1003520 pixels in patches of 14 x 14: 1337 to 5120, two images in 2%.
    assert patches[patches > 0].min() >= 1300 and (patches > 5120).mean() < 0.02


def test_a_larger_patch_makes_fewer():
    small, large = (
        draw_prompts(100, BUCKETS, np.random.default_rng(0), patch_size=size, **PIXELS)[:, 1]
        for size in (14, 16)
    )
    np.testing.assert_allclose(large.mean() / small.mean(), (14 / 16) ** 2, rtol=0.1)


def test_responses_have_the_mean_and_half_of_their_variance_lies_between_prompts():
    drawn = draw_responses((20000, 4), 600, 10**9, np.random.default_rng(0), sigma=0.8)
    np.testing.assert_allclose(drawn.mean(), 600, rtol=0.03)
    log = np.log(drawn)
    np.testing.assert_allclose(log.std(), 0.8, rtol=0.02)
    within = log.var(1, ddof=1).mean()
    np.testing.assert_allclose(within, 0.32, rtol=0.03)


def test_responses_are_cut_at_the_cap():
    drawn = draw_responses((1000, 9), 600, 700, np.random.default_rng(0))
    assert drawn.max() == 700 and drawn.min() >= 8
    assert draw_responses((10, 1), 600, 4, np.random.default_rng(0)).max() == 4


def test_buckets_that_hold_no_prompt_are_named():
    with pytest.raises(ValueError, match=r"data.buckets \(\(48, 64\),\) hold none of 1000 prompts"):
        draw_prompts(1, ((48, 64),), np.random.default_rng(0), **PIXELS)
