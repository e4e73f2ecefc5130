"""Rows to scores, where a row may end with any of several tokens, one of which also pads rows."""

import numpy as np
import pytest

from care_jax.batch import Example, Rollouts
from care_jax.rewards.scores import row_texts, start_scoring
from care_jax.rewards.verifier import Verifier

END, PAD = 256, 257  # both end a response
TOKEN_BYTES = [bytes([byte]) for byte in range(256)] + [b"<|im_end|>", b"<|endoftext|>"]
THINK, ANSWER = "<think>two</think>", "<answer>2</answer>"
TEXT = THINK + ANSWER


def rollouts_of(groups, num_forced=0):
    """Rows [B][R] of text or bytes, a token for each byte, and of ids that end them."""
    rows = [
        [
            [t for part in row for t in ([part] if isinstance(part, int) else part.encode())]
            for row in group
        ]
        for group in groups
    ]
    lengths = np.array([[len(row) for row in group] for group in rows])
    num_tokens = lengths.max() + 3
    is_valid = np.arange(num_tokens) < lengths[..., None]
    tokens = [[row + [PAD] * (num_tokens - len(row)) for row in group] for group in rows]
    return Rollouts(
        tokens=np.array(tokens, np.int32),
        is_valid=is_valid,
        is_forced=is_valid & (np.arange(num_tokens) < num_forced),
        logp=np.zeros(is_valid.shape, np.float32),
        embedding=np.zeros((*lengths.shape, 2), np.float32),
        is_complete=np.array([[row[-1] in (END, PAD) for row in group] for group in rows]),
    )


def texts_of(rollouts):
    return row_texts(rollouts, TOKEN_BYTES, eos_token_ids=(END, PAD))


def score(
    rollouts,
    answers=("2",),
    think_tag="think",
    format_weight=0.1,
    reward="",
    weights=(("acc", 1.0),),
):
    examples = [
        Example(str(place), "made", (), f"Question {place}", answer)
        for place, answer in enumerate(answers)
    ]
    with Verifier(think_tag=think_tag, reward=reward, weights=weights) as verifier:
        return start_scoring(
            rollouts,
            examples,
            verifier,
            TOKEN_BYTES,
            eos_token_ids=(END, PAD),
            format_weight=format_weight,
        )()


@pytest.fixture
def rollouts():
    """One prompt: ended by either token, cut off, and cut off behind an answer."""
    return rollouts_of([[(TEXT, END), (TEXT, PAD), (TEXT[:-5],), (TEXT,)]])


def test_texts_hold_neither_end_nor_padding(rollouts):
    assert texts_of(rollouts) == [[TEXT, TEXT, TEXT[:-5], TEXT]]
    other = rollouts_of([[(TEXT, END), (TEXT[:-5],)]])  # here padding ends no response
    assert row_texts(other, TOKEN_BYTES, eos_token_ids=(END,)) == [[TEXT, TEXT[:-5]]]


def test_texts_hold_forced_tokens_and_characters_of_several_tokens():
    """A character that was cut off is replaced."""
    first, second = "é".encode()
    rollouts = rollouts_of([[("So é", END)], [(first, second, first)]], num_forced=2)
    assert texts_of(rollouts) == [["So é"], ["é\N{REPLACEMENT CHARACTER}"]]


def test_a_row_is_well_formed_whichever_token_ends_it_and_padding_ends_none(rollouts):
    scores, *_ = score(rollouts)
    np.testing.assert_array_equal(scores.fmt, [[1, 1, 0, 0]])
    np.testing.assert_array_equal(scores.acc, [[1, 1, 0, 1]])
    # The end is a token of the answer, so that the loss teaches to stop by whichever was drawn.
    np.testing.assert_array_equal(scores.is_answer[0, 0], scores.is_answer[0, 1])
    assert scores.is_answer[0, :2, len(TEXT)].all()
    assert not scores.is_answer[0, :, len(TEXT) + 1 :].any()
    assert not scores.is_answer[0, 3, len(TEXT) :].any()
    np.testing.assert_array_equal(scores.num_answer, [[1, 1, 0, 1]])


@pytest.mark.parametrize("think_tag", ["think", "reasoning"])
def test_regions_are_the_tokens_of_each_span_with_its_tags(think_tag):
    think = THINK.replace("think", think_tag)
    scores, *_ = score(rollouts_of([[(think, ANSWER, END), (ANSWER, END)]]), think_tag=think_tag)
    np.testing.assert_array_equal(scores.is_think[0, 0].nonzero()[0], range(len(think)))
    np.testing.assert_array_equal(
        scores.is_answer[0, 0].nonzero()[0], range(len(think), len(think + ANSWER) + 1)
    )
    assert not scores.is_think[0, 1].any()
    np.testing.assert_array_equal(scores.num_think, [[len("two"), 0]])
    np.testing.assert_array_equal(scores.has_answer, [[True, True]])
    np.testing.assert_array_equal(scores.fmt, [[1, 0]])


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_the_reward_weighs_accuracy_and_format(weight):
    """r = (1-λ)·acc + λ·fmt; rows are right and wrong, in and out of the format."""
    right, wrong = (ANSWER, END), (ANSWER.replace("2", "3"), END)
    scores, *_ = score(
        rollouts_of([[(THINK, *right), right, (THINK, *wrong), wrong]]), format_weight=weight
    )
    np.testing.assert_array_equal(scores.acc, [[1, 1, 0, 0]])
    np.testing.assert_array_equal(scores.reward, [[1, 1 - weight, weight, 0]])


def test_each_row_is_judged_against_the_answer_of_its_own_prompt():
    rows = [(THINK, f"<answer>{answer}</answer>", END) for answer in "123"]
    scores, texts, reasons, components = score(rollouts_of([rows, rows[::-1]]), answers=("1", "2"))
    np.testing.assert_array_equal(scores.acc, [[1, 0, 0], [0, 1, 0]])
    np.testing.assert_array_equal(reasons == "same text", scores.acc)
    assert texts[0] == texts[1][::-1]
    assert components is None


def by_length(question, responses, example):
    """A reward function: how long a response is, and its share of the longest of its group."""
    assert question == f"Question {example.id}"
    longest = max(map(len, responses))
    rows = [{"acc": len(text) / 10, "share": len(text) / longest} for text in responses]
    return [row if row["acc"] < 0.9 else {} for row in rows]


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_the_reward_weighs_the_components_of_a_group_and_the_format(weight):
    """r = (1-λ)·Σ w·c + λ·fmt; acc is graded there, and 1 or 0 for the method."""
    rollouts = rollouts_of([[("12345", END), ("12", END)], [("1" * 9, END), ("123",)]])
    scores, _, reasons, components = score(
        rollouts,
        answers=("2", "2"),
        format_weight=weight,
        reward=f"{__name__}:by_length",
        weights=(("acc", 0.5), ("share", -0.25)),
    )
    assert components.tolist() == [
        [{"acc": 0.5, "share": 1.0}, {"acc": 0.2, "share": 0.4}],
        [{}, {"acc": 0.3, "share": 3 / 9}],
    ]
    assert reasons.tolist() == [["reward function"] * 2, ["failed: result", "reward function"]]
    np.testing.assert_array_equal(scores.acc, [[1, 0], [0, 0]])
    np.testing.assert_array_equal(scores.fmt, 0)
    quality = np.array([[0.25 - 0.25, 0.1 - 0.1], [0, 0.15 - 0.25 / 3]])
    np.testing.assert_allclose(scores.reward, (1 - weight) * quality, rtol=1e-6, atol=1e-7)


def formatted(question, responses, example):
    return [{"acc": 1.0, "fmt": 0.5}, {"acc": 1.0}, {"acc": 1.0}]


def test_a_format_that_is_not_returned_is_the_built_in_one():
    rollouts = rollouts_of([[(TEXT, END), (TEXT, END), (ANSWER, END)]])
    scores, *_ = score(rollouts, reward=f"{__name__}:formatted")
    np.testing.assert_array_equal(scores.fmt, [[0.5, 1, 0]])
    np.testing.assert_allclose(scores.reward, [[0.95, 1, 0.9]], rtol=1e-6)
