"""The built-in tokenizer: Qwen's form, lossless, and the same every time."""

import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from care_jax.data.drawn import synthetic
from care_jax.data.drawn.synthetic import SyntheticSource
from care_jax.prompts.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, build_tokenizer

TOKENIZER = build_tokenizer(synthetic.texts())


def num_tokens(text):
    return len(TOKENIZER(text)["input_ids"])


@settings(deadline=None)
@given(st.text())
@example("e\u0301")  # a normaliser would compose it
def test_every_text_comes_back(text):
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


@pytest.mark.parametrize("tokenizer", [TOKENIZER, build_tokenizer(())])
def test_special_tokens_take_the_last_ids(tokenizer):
    assert len(tokenizer) == VOCAB_SIZE
    ids = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    assert ids == list(range(VOCAB_SIZE - 8, VOCAB_SIZE))
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


def test_saved_folder_opens_as_the_same_tokenizer(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    opened = AutoTokenizer.from_pretrained(tmp_path)
    assert opened.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()
    assert opened.chat_template == TOKENIZER.chat_template
    assert (opened.eos_token_id, opened.pad_token_id) == (len(opened) - 6, len(opened) - 8)


def test_another_process_builds_the_same_tokenizer():
    code = (
        "from care_jax.data.drawn import synthetic;"
        "from care_jax.prompts.tokenizer import build_tokenizer;"
        "print(build_tokenizer(synthetic.texts()).backend_tokenizer.to_str(), end='')"
    )
    built = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path), "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert built.stdout == TOKENIZER.backend_tokenizer.to_str()


def test_tags_and_the_cue_are_short():
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert num_tokens(tag) <= 3
    assert num_tokens(" Wait, that is wrong.") <= 6


def test_tags_are_ordinary_text():
    ids = TOKENIZER("<think></think><answer></answer>")["input_ids"]
    assert not set(TOKENIZER.convert_ids_to_tokens(ids)) & set(TOKENIZER.all_special_tokens)


def test_digits_stand_alone():
    pieces = TOKENIZER.backend_tokenizer.pre_tokenizer.pre_tokenize_str("x12 3450")
    assert [piece for piece, _ in pieces] == ["x", "1", "2", "Ġ", *"3450"]


def test_synthetic_responses_take_about_twenty_tokens():
    source = SyntheticSource(400)
    lengths = [num_tokens(source[i].response) for i in range(len(source))]
    assert max(lengths) <= 20
