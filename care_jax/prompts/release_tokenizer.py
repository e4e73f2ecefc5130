"""Opens the tokenizer of a release, with its chat template. A release is untrusted."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from care_jax.prompts.tokenizer import CHAT_TEMPLATE
from models.release import folder as release_folder

_TURN_TOKEN = "<|im_start|>"
_MOST_GROWTH = 100  # of a text by its normaliser


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Opens a tokenizer folder, with the chat template that transformers' AutoProcessor uses.

    chat_template.json or chat_template.jinja take precedence over the tokenizer's template, which
    is text-only in the releases of Qwen2.5-VL. A folder without any template gets Qwen2.5-VL's, if
    the tokenizer has its turns.
    """
    release_folder.check(folder)
    advice = "point model.tokenizer at a folder with tokenizer.json, or vocab.json and merges.txt"
    with _refused(f"a tokenizer in {str(folder)!r}", advice):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        _check_normalizer(tokenizer)
    found = processor_template(folder) or tokenizer.chat_template
    if not found and _TURN_TOKEN not in tokenizer.get_vocab():
        raise ValueError(
            f"expected a chat template in {str(folder)!r}, got none, and its tokenizer has no "
            f"{_TURN_TOKEN} for the template of Qwen; use an instruction-tuned release, or put a "
            "chat_template.jinja there"
        )
    tokenizer.chat_template = found or CHAT_TEMPLATE
    return tokenizer


def processor_template(folder: str | pathlib.Path) -> str | dict[str, str] | None:
    """The chat template, or several by name, that AutoProcessor prefers to the tokenizer's."""
    # The import takes a second, and runs with the built-in tokenizer do not need it.
    from transformers.processing_utils import ProcessorMixin

    advice = "download the release's chat_template.json or chat_template.jinja again, and keep one"
    with _refused(f"a chat template in {str(folder)!r}", advice):
        fields, _ = ProcessorMixin.get_processor_dict(str(folder))
    return fields.get("chat_template")


@contextlib.contextmanager
def _refused(expected: str, advice: str) -> Iterator[None]:
    """Turns every exception of a library that reads a release into an error of one line."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of `tokenizers` is no Exception
        text = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"expected {expected}, got {text[:200]!r}; {advice}") from error


def _check_normalizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a normaliser that can write a text of any length for a short one."""
    normalizer = tokenizer.backend_tokenizer.normalizer
    if normalizer and (growth := _growth(json.loads(normalizer.__getstate__()))) > _MOST_GROWTH:
        raise ValueError(
            f"a normaliser that makes a text {growth:.0f} times as long, expected at most "
            f"{_MOST_GROWTH}"
        )


def _growth(normalizer: Mapping[str, Any]) -> float:
    """How many times as long replacements and prefixes can make a text."""
    if "normalizers" in normalizer:
        return math.prod(map(_growth, normalizer["normalizers"]))
    written = len(normalizer.get("content", normalizer.get("prepend", "")))
    if found := len(normalizer.get("pattern", {}).get("String", "")):
        return max(1, written / found)
    return 1 + written  # a prefix, or for a pattern that may match nothing
