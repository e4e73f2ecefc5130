import jax.numpy as jnp
import numpy as np
import pytest

from care_jax.batch import Rollouts, Scores
from care_jax.decoding import reflection
from care_jax.method import spans
from configs.common import CUE


def encode(text):
    return [ord(character) for character in text]


def context(rationale, max_context):
    tokens = reflection.context_tokens(
        rationale, "!?", encode, think_tag="t", max_context=max_context
    )
    return "".join(map(chr, tokens))


def test_context_is_tag_rationale_and_cue():
    assert context("abc", 8) == "<t>abc!?"
    assert context("", 8) == "<t>!?"


def test_long_rationale_loses_its_end_and_keeps_the_cue():
    assert context("abcdefgh", 5) == "<t>ab!?"


@pytest.mark.parametrize(
    "response", ["<think>a <answer>3</answer>", "a</answer>", "<think>a<think>b", "<answer>"]
)
def test_every_context_leaves_a_well_formed_answer_to_be_sampled(response):
    """A forced answer tag would make a second answer span, and acc 0, certain."""
    context = f"<think>{spans.rationale_of(response, 'think')}{CUE}"
    text = (context + "b</think><answer>4</answer>").encode()
    table = [bytes([byte]) for byte in range(256)] + [b""]
    found = spans.parse([*text, 256], table, eos_token_ids=(256,))
    assert (found.answer, found.fmt) == ("4", 1.0)


def test_modes_are_the_cue_nothing_and_its_words_shuffled():
    assert reflection.cue_text(CUE, "cue", seed=0) == CUE
    assert reflection.cue_text(CUE, "no_cue", seed=0) == ""
    assert reflection.cue_text(CUE, "resample", seed=0) == ""
    with pytest.raises(
        ValueError, match=r"care\.reflect_mode must be one of cue, no_cue, .* got 'hint'"
    ):
        reflection.cue_text(CUE, "hint", seed=0)


@pytest.mark.parametrize("cue", [CUE, " Wait, that is wrong.", "\nNo, no.\n"])
def test_no_seed_shuffles_a_cue_into_itself_or_moves_its_spaces(cue):
    words = cue.split()
    for seed in range(50):
        shuffled = reflection.cue_text(cue, "shuffled", seed=seed)
        assert sorted(shuffled.split()) == sorted(words) and shuffled.split() != words
        edges = [text.partition(text.strip())[::2] for text in (cue, shuffled)]
        assert edges[0] == edges[1]
        assert shuffled == reflection.cue_text(cue, "shuffled", seed=seed)


def test_a_cue_of_one_word_is_not_shuffled():
    for cue in (" Wait.", " No No"):
        with pytest.raises(ValueError, match=r"care\.cue must have two different words .* got '"):
            reflection.cue_text(cue, "shuffled", seed=0)


def test_rows_without_context_keep_the_tag_and_what_was_sampled():
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
        drawn_logp=-2.0 * tokens * (is_valid & ~is_forced),
    )
    is_answer = tokens >= 8
    scores = Scores(
        *(np.ones((2, 1)),) * 3,
        is_think=is_valid & ~is_answer,
        is_answer=is_answer,
        num_think=jnp.array([[2], [1]]),
        num_answer=jnp.ones((2, 1)),
        has_answer=np.ones((2, 1), bool),
    )
    rollouts, scores = reflection.without_context(rollouts, scores, [4], pad_token_id=2)
    np.testing.assert_array_equal(rollouts.tokens[:, 0], [[4, 7, 8, 2, 2], [7, 8, 9, 2, 2]])
    np.testing.assert_array_equal(rollouts.is_valid, rollouts.tokens > 2)
    np.testing.assert_array_equal(rollouts.is_forced, rollouts.tokens == 4)
    is_sampled = rollouts.is_valid & ~rollouts.is_forced
    np.testing.assert_array_equal(rollouts.logp, -rollouts.tokens * is_sampled)
    np.testing.assert_array_equal(rollouts.drawn_logp, 2 * rollouts.logp)
    np.testing.assert_array_equal(scores.is_answer, rollouts.tokens >= 8)
    np.testing.assert_array_equal(scores.is_think, rollouts.is_valid & (rollouts.tokens <= 7))
    np.testing.assert_array_equal(scores.num_think, [[1], [1]])
