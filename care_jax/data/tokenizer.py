"""The tokenizer of a run: from a folder, or a small one trained on the synthetic source's text."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from care_jax.data.drawn import synthetic
from care_jax.prompts.builder import load_tokenizer
from care_jax.prompts.tokenizer import build_tokenizer


def open_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Loads the folder's tokenizer; for "" trains the built-in one, in about a second.

    Raises:
        ValueError: the folder holds no tokenizer, or its templates cannot be read.
    """
    return load_tokenizer(folder) if folder else build_tokenizer(synthetic.texts())
