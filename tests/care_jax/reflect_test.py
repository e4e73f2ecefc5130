import jax.numpy as jnp
import numpy as np
import pytest

from care_jax import reflect
from care_jax.batch import Rollouts, Scores
from configs.common import CUE


def encode(text):
    return [ord(character) for character in text]


def test_context_is_tag_rationale_and_cue_left_padded():
    forced = reflect.forced_context(
        ["abc", None, ""], "!?", encode, think_tag="t", max_context=8, pad_token_id=7
    )
    assert forced.tokens.shape == (3, 10)
    texts = ["".join(map(chr, forced.tokens[i, forced.is_valid[i]])) for i in range(3)]
    assert texts == ["<t>abc!?", "", "<t>!?"]
    np.testing.assert_array_equal(forced.is_valid[0], [False] * 2 + [True] * 8)
    np.testing.assert_array_equal(forced.is_active, [True, False, True])
    np.testing.assert_array_equal(forced.tokens[~forced.is_valid], 7)


def test_long_rationale_loses_its_end_and_keeps_the_cue():
    forced = reflect.forced_context(
        ["abcdefgh"], "!?", encode, think_tag="t", max_context=5, pad_token_id=0
    )
    assert "".join(map(chr, forced.tokens[0])) == "<t>ab!?"


def test_modes_are_the_cue_nothing_and_its_words_shuffled():
    assert reflect.cue_text(CUE, "cue", seed=0) == CUE
    assert reflect.cue_text(CUE, "no_cue", seed=0) == ""
    shuffled = reflect.cue_text(CUE, "random", seed=0)
    assert sorted(shuffled.split()) == sorted(CUE.split()) and shuffled.split() != CUE.split()
    assert (
        shuffled
        == reflect.cue_text(CUE, "random", seed=0)
        != reflect.cue_text(CUE, "random", seed=1)
    )
    with pytest.raises(ValueError, match=r"care\.reflect_mode 'hint' is none of cue, no_cue"):
        reflect.cue_text(CUE, "hint", seed=0)


def test_rows_without_context_keep_what_was_sampled():
    tokens = np.array([[[5, 6, 7, 8, 2]], [[7, 8, 9, 2, 2]]])
    is_valid = tokens > 2
    is_forced = np.zeros_like(is_valid)
    is_forced[0, 0, :2] = True
    rollouts = Rollouts(
        tokens=tokens,
        is_valid=is_valid,
        is_forced=is_forced,
        logp=-tokens.astype(np.float32) * (is_valid & ~is_forced),
        embedding=np.zeros((2, 1, 1), np.float32),
        is_complete=np.ones((2, 1), bool),
    )
    is_answer = tokens >= 8
    scores = Scores(
        *(np.ones((2, 1)),) * 3,
        is_think=is_valid & ~is_answer,
        is_answer=is_answer,
        num_think=jnp.ones((2, 1)),
        num_answer=jnp.ones((2, 1)),
        has_answer=np.ones((2, 1), bool),
    )
    rollouts, scores = reflect.without_context(rollouts, scores, pad_token_id=2)
    np.testing.assert_array_equal(rollouts.tokens[:, 0], [[7, 8, 2, 2, 2], [7, 8, 9, 2, 2]])
    np.testing.assert_array_equal(rollouts.is_valid, rollouts.tokens > 2)
    np.testing.assert_array_equal(rollouts.logp, -rollouts.tokens * rollouts.is_valid)
    np.testing.assert_array_equal(scores.is_answer, rollouts.tokens >= 8)
    np.testing.assert_array_equal(scores.is_think, rollouts.tokens == 7)
    assert not rollouts.is_forced.any()
