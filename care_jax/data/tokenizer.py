"""The tokenizer of a run: a folder's, or a small one that knows what the synthetic source says."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from care_jax.data import synthetic
from care_jax.prompts.builder import load_tokenizer
from care_jax.prompts.tokenizer import build_tokenizer


def open_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """That of a folder; the built-in one, trained in about a second, of an empty name.

    Raises:
        ValueError: the folder holds no tokenizer, or its templates cannot be read.
    """
    return load_tokenizer(folder) if folder else build_tokenizer(synthetic.texts())
