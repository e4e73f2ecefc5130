"""A prompt sampled as an RL step leaves it, in a vocabulary of one token per byte."""

import dataclasses

import numpy as np
from PIL import Image

from care_jax.batch import Credit, Example, Groups, RawAdvantages, Rollouts, Scores, Subgroup
from care_jax.data.prompts import open_tokenizer
from care_jax.prompts.builder import TokenizedPrompt, backbone_config
from care_jax.report.groups import Wording
from care_jax.rewards.verifier import parse_text
from configs import tiny

EOS, IMAGE = 256, 257
CUE = " Wait, that is wrong."
HOSTILE = "</script><script>document.title='taken'</script><!--<img src=x onerror=alert(1)>"
RIGHT = "<think>two</think><answer>2</answer>"
WRONG = "<think>one é and three</think><answer>3</answer>"
CONTEXT = "<think>one é and three"
REPAIR = " so two</think><answer>2</answer>"
REASONS = ("same number", "another number", "no answer span", "same text", "same number")
CONFIG = dataclasses.replace(
    backbone_config(tiny.get_config().model.backbone.to_dict(), open_tokenizer("")),
    eos_token_ids=(EOS,),
    image_token_id=IMAGE,
)
WORDING = Wording([bytes([i]) for i in range(256)] + [b"<eos>", b"<image>"], CONFIG, "think", CUE)


def make_sampled(
    texts=(RIGHT, WRONG, HOSTILE, RIGHT + " "),
    acc=(1, 0, 0, 1),
    repair=REPAIR,
    given=CONTEXT + CUE,
    is_rescue=False,
    has_roles=True,
    name="q0",
    question=f"<image>How many? {HOSTILE}",
    images=None,
    reasons=REASONS,
    answer="2",
    components=None,
):
    """A step of one group: 4 rollouts and, where it is repaired, a reflected row.

    Rollout 1 is the anchor, 2 the hard negative that is repaired, 3 another one, 4 unused. The
    reflected row is the forced `given` and the sampled `repair`.
    """
    rows = [("", text) for text in texts]
    acc = list(acc)
    if repair is not None:
        rows, acc = [*rows, (given, repair)], [*acc, 1]
    num_rows, longest = len(rows), max(len((a + b).encode()) for a, b in rows) + 1
    tokens = np.zeros((1, num_rows, longest), np.int32)
    is_valid, is_forced = np.zeros((2, 1, num_rows, longest), bool)
    is_think, is_answer = np.zeros((2, 1, num_rows, longest), bool)
    parsed = [parse_text(given + written) for given, written in rows]
    for row, (given, written) in enumerate(rows):
        text = [*(given + written).encode(), EOS]
        tokens[0, row, : len(text)] = text
        is_valid[0, row, : len(text)] = True
        is_forced[0, row, : len(given.encode())] = True
        is_think[0, row, 0] = parsed[row].is_think.any()
        is_answer[0, row, 0] = parsed[row].is_answer.any()
    acc = np.array([acc], np.float32)
    fmt = np.array([[span.fmt for span in parsed]], np.float32)
    h = np.array([[[1, 0], [0.6, 0.8], [0, 1], [0.8, 0.6], [1, 0]]], np.float32)
    is_negative = np.array([[False, True, True, False]])
    value = np.array([[1.5, -0.5, -0.75, 0, 1.0]][:1], np.float32)
    raw = RawAdvantages(value, value > 0, value < 0, np.arange(5)[None] == 4)
    if images is None:
        images = (Image.new("RGB", (40, 30), "red"),)
    example = Example(name, "made", images, question, answer, ("1", "2"))
    # 4 x 6 patches of 8 pixels per image, merged by 2 x 2.
    features = [IMAGE] * 6 * len(images)
    read = np.array([*question.replace("<image>", "").encode(), *features, EOS], np.int32)
    grids = np.array([[1, 4, 6]] * len(images), np.int32).reshape(-1, 3)
    return Groups(
        examples=np.array([example], object),
        prompts=np.array([TokenizedPrompt(read, grids, np.zeros((0, 1), np.float32))], object),
        rollouts=Rollouts(tokens, is_valid, is_forced, -1.0 * is_valid, h[:, :num_rows], acc >= 0),
        scores=Scores(
            acc=acc,
            fmt=fmt,
            reward=0.9 * acc + 0.1 * fmt,
            is_think=is_think,
            is_answer=is_answer,
            num_think=3 * is_think.any(-1),
            num_answer=1 * is_answer.any(-1),
            has_answer=np.array([[span.has_answer for span in parsed]]),
        ),
        credit=Credit(value[:, :num_rows] / 2, *[None] * 4),
        has_reflection=np.array([repair is not None]),
        texts=np.array([[given + written for given, written in rows]], object),
        reasons=np.array([reasons[: acc.shape[1]]], object),
        subgroup=Subgroup(
            anchor=np.array([0]),
            is_negative=is_negative,
            hard_negative=np.array([1]),
            is_rescue=np.array([is_rescue]),
            has_update=np.array([True]),
        ),
        raw=raw if has_roles else None,
        components=None if components is None else np.array([components], object),
    )
