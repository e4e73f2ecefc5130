"""The built-in cue, instruction and taught responses in the real releases' vocabulary."""

import functools
import types

import numpy as np
import pytest

from care_jax.decoding import reflection
from care_jax.method import spans
from care_jax.run.policy import policy_of
from care_jax.stages import sft
from configs import common, qwen3vl_4b, qwen3vl_8b, qwen25vl_3b, qwen25vl_7b

RATIONALES = (
    "The bars are 3 and 4, so the sum is 8.",
    "$\\frac{1}{2} \\cdot 6 = 4$\n",
    "∠A = 30°, 所以 x = 5 🙂",
    "",
)
REPAIRS = ("The sum is 7.", "\n\n3 + 4 = 7\n", "")
CONFIGS = (qwen25vl_3b, qwen25vl_7b, qwen3vl_4b, qwen3vl_8b)


@pytest.fixture(scope="module")
def policy(small_release):
    config = common.get_config()
    config.model.path = str(small_release)
    return policy_of(config)


@pytest.fixture(scope="module")
def encode(policy):
    return functools.partial(policy.tokenizer.encode, add_special_tokens=False)


def text_of(policy, tokens):
    return b"".join(policy.token_bytes[token] for token in tokens).decode()


@pytest.mark.parametrize("tag", ["think", "reasoning"])
@pytest.mark.parametrize("end", [151645, 151643])
def test_a_row_that_goes_on_from_the_cue_is_well_formed(policy, encode, tag, end):
    """The cue joins its neighbours in pieces of its own and does not close the rationale."""
    care = common.get_config().care
    cue = reflection.cue_text(care.cue, care.reflect_mode, seed=0)
    closing_tag = spans.closing_tag_table(policy.token_bytes, tag)
    for rationale in RATIONALES:
        context = reflection.context_tokens(
            rationale, cue, encode, think_tag=tag, max_context=care.max_context
        ).tolist()
        assert text_of(policy, context) == f"<{tag}>{rationale}{care.cue}"
        state = functools.reduce(lambda state, token: closing_tag[state, token], context, 0)
        assert state < len(closing_tag) - 1
        for repair in REPAIRS:
            written = encode(f"{repair}</{tag}><answer>7</answer>")
            found = spans.parse(
                [*context, *written, end],
                policy.token_bytes,
                eos_token_ids=policy.config.eos_token_ids,
                think_tag=tag,
            )
            assert (found.fmt, found.answer) == (1.0, "7")
            text = text_of(policy, [*context, *written])
            assert spans.rationale_of(text, tag) == rationale + care.cue + repair
            assert found.is_think[: len(context)].all() and found.is_answer[-1]


def test_a_rationale_that_is_cut_leaves_the_cue_whole_and_room_to_answer(policy, encode):
    config = common.get_config()
    care, num_cue = config.care, len(encode(config.care.cue))
    rationale, width = "3 + 4 = 8, so " * 1000, care.max_context
    context = reflection.context_tokens(
        rationale, care.cue, encode, think_tag="think", max_context=width
    )
    assert len(context) == width + num_cue
    assert text_of(policy, context[-num_cue:]) == care.cue
    assert num_cue < 64
    assert len(context) + 512 < config.rl.max_response_tokens


@pytest.mark.parametrize("module", CONFIGS, ids=lambda module: module.__name__)
def test_a_shipped_config_tells_the_policy_its_own_tags(module):
    data = module.get_config().data
    told = data.instruction.replace("{tag}", data.think_tag)
    for tag in (data.think_tag, "answer"):
        assert f"<{tag}> </{tag}>" in told


def test_a_taught_response_ends_with_the_first_end_which_weighs_as_its_answer(policy):
    """In the real vocabulary the answer's tag shares a piece with the rationale's."""
    text = "<think>3 + 4 = 7.</think><answer>7</answer>"
    config = common.get_config()
    config.sft.answer_weight = 6.0
    run = types.SimpleNamespace(policy=policy, config=config)
    tokens = policy.prompts.response_tokens(text)
    weight = sft.response_weight(run, tokens[:0], tokens)
    assert text_of(policy, tokens[:-1]) == text
    assert tokens[-1] == 151645 and weight[-1] == 6.0
    places = np.cumsum([len(policy.token_bytes[token]) for token in tokens[:-1]])
    is_answer = places > text.index("<answer>")
    np.testing.assert_array_equal(weight[:-1] == 6.0, is_answer)


def test_a_checkpoint_belongs_to_its_ends(policy):
    fields = policy.fingerprint()
    assert fields["eos_token_id"] == [151645, 151643]
