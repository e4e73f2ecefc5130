"""Writes a trained policy as a Hugging Face folder: weights, config, tokenizer and processor."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp

from care_jax.run import Run
from models import backbone


def export(run: Run, params: backbone.Params, folder: pathlib.Path) -> pathlib.Path:
    """Exports parameters in bfloat16, the releases' own type.

    Args:
        run: the run.
        params: in the training layout.
        folder: made where it does not exist.
    """
    backbone.export(folder, jax.device_get(params), run.policy.config, dtype=jnp.bfloat16)
    run.policy.prompts.save_processor(folder)
    return folder
