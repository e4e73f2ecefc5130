"""Rows to scores, where a row may end with any of several tokens, one of which also pads rows."""

import numpy as np
import pytest

from care_jax.batch import Example, Rollouts
from care_jax.rewards.scores import row_texts, score_rollouts
from care_jax.rewards.verifier import Verifier

END, PAD = 256, 257  # both end a response
TOKEN_BYTES = [bytes([byte]) for byte in range(256)] + [b"<|im_end|>", b"<|endoftext|>"]
TEXT = "<think>two</think><answer>2</answer>"


@pytest.fixture
def rollouts():
    """One prompt: ended by either token, cut off, and cut off behind an answer."""
    rows = [[*TEXT.encode(), END], [*TEXT.encode(), PAD], [*TEXT.encode()[:-5]], [*TEXT.encode()]]
    num_tokens = len(TEXT) + 4
    is_valid = np.arange(num_tokens) < np.array([[len(row)] for row in rows])
    tokens = [row + [PAD] * (num_tokens - len(row)) for row in rows]
    return Rollouts(
        tokens=np.array([tokens], np.int32),
        is_valid=is_valid[None],
        is_forced=np.zeros_like(is_valid)[None],
        logp=np.zeros(is_valid.shape, np.float32)[None],
        embedding=np.zeros((1, len(rows), 2), np.float32),
        is_complete=np.array([[True, True, False, False]]),
    )


def test_texts_hold_neither_end_nor_padding(rollouts):
    (texts,) = row_texts(rollouts, TOKEN_BYTES, eos_token_ids=(END, PAD))
    assert texts == [TEXT, TEXT, TEXT[:-5], TEXT]


def test_a_row_is_well_formed_whichever_token_ends_it_and_padding_ends_none(rollouts):
    with Verifier() as verifier:
        scores, _, _ = score_rollouts(
            rollouts,
            [Example("a", "made", (), "1 + 1?", "2")],
            verifier,
            TOKEN_BYTES,
            eos_token_ids=(END, PAD),
            think_tag="think",
            format_weight=0.1,
        )
    np.testing.assert_array_equal(scores.fmt, [[1, 1, 0, 0]])
    np.testing.assert_array_equal(scores.acc, [[1, 1, 0, 1]])
    # The end is a token of the answer, so that the loss teaches to stop by whichever was drawn.
    np.testing.assert_array_equal(scores.is_answer[0, 0], scores.is_answer[0, 1])
    assert scores.is_answer[0, :2, len(TEXT)].all()
    assert not scores.is_answer[0, :, len(TEXT) + 1 :].any()
    assert not scores.is_answer[0, 3, len(TEXT) :].any()
    np.testing.assert_array_equal(scores.num_answer, [[1, 1, 0, 1]])
