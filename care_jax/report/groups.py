"""Describes one prompt's group as JSON: its responses with roles, spans and advantages.

All inputs are host copies of a step's arrays, for the prompts of this process.

Letters: B prompts, R rows per prompt (a reflected one last), D model.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Shaped

from care_jax.batch import (
    Example,
    Groups,
    RawAdvantages,
    Rollouts,
    Scores,
    Subgroup,
    answer_text,
)

ROLES = ("anchor", "pseudo-anchor", "hard negative", "reflected", "unused")
# `choose` goes through the outcomes in this order.
OUTCOMES = (
    "repaired",  # the reflected row succeeded
    "not repaired",
    "contrasted",  # an anchor and its negatives, no reflected row
    "rescued",
    "mixed",  # some correct and some wrong, under an objective without roles
    "all correct",
    "all wrong",
    "no update",
)
_RANK = {name: rank for rank, name in enumerate(ROLES)}


@dataclasses.dataclass(frozen=True)
class Wording:
    """How token ids become text, and the markers in that text.

    Attributes:
        token_bytes: bytes of every token id.
        eos_token_ids: any of them ends a response.
        think_tag: name of the rationale's tag.
        cue: text appended to a failed rationale; empty for none.
    """

    token_bytes: Sequence[bytes]
    eos_token_ids: Collection[int]
    think_tag: str
    cue: str


@dataclasses.dataclass(frozen=True)
class Sampled:
    """The rollouts of B prompts in one step, as numpy arrays.

    Attributes:
        examples: the prompts.
        rollouts, scores: of all rows.
        advantage: A of each row.
        has_reflection: the last row is a reflected one.
        reasons: of each row's verdict, in a few words.
        components: of each row's reward, by name; None without a reward function.
        subgroup, raw: the contrasted rows and their A_raw; `raw` is None without contrast (GRPO).
    """

    examples: Sequence[Example]
    rollouts: Rollouts
    scores: Scores
    advantage: Float[np.ndarray, "B R"]
    has_reflection: Bool[np.ndarray, " B"]
    reasons: Shaped[np.ndarray, "B R"]
    subgroup: Subgroup
    raw: RawAdvantages | None
    components: Shaped[np.ndarray, "B R"] | None = None


def sampled(groups: Groups) -> Sampled:
    """What is shown of a step's groups."""
    names = ("examples", "rollouts", "scores", "has_reflection", "reasons", "components")
    values = {name: getattr(groups, name) for name in (*names, "subgroup", "raw")}
    return Sampled(advantage=groups.credit.advantage, **values)


def outcome(sampled: Sampled, index: int) -> str:
    """One of OUTCOMES."""
    num_rows = sampled.scores.acc.shape[1]
    is_sampled = np.ones(num_rows, bool)
    if sampled.raw is not None:
        is_sampled[sampled.subgroup.is_negative.shape[1] :] = False
    acc = sampled.scores.acc[index, is_sampled]
    has_update = bool((sampled.advantage[index] != 0).any())
    if sampled.raw is not None and has_update:
        if sampled.subgroup.is_rescue[index]:
            return "rescued"
        if not sampled.has_reflection[index]:
            return "contrasted"
        return "repaired" if sampled.scores.acc[index, -1] >= 1 else "not repaired"
    if (acc >= 1).all():
        return "all correct"
    if (acc <= 0).all():
        return "all wrong"
    return "mixed" if has_update else "no update"


def choose(outcomes: Sequence[str], number: int, *, turn: int = 0) -> list[int]:
    """Indices of up to `number` prompts, taken round-robin over the outcomes.

    Args:
        outcomes: of all prompts.
        number: how many to choose.
        turn: index of the first outcome; varying it keeps small samples from repeating outcomes.
    """
    kinds = [
        [index for index, each in enumerate(outcomes) if each == kind]
        for kind in OUTCOMES
        if kind in outcomes
    ]
    kinds = kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)] if kinds else []
    rounds = range(max(map(len, kinds), default=0))
    in_turn = [kind[depth] for depth in rounds for kind in kinds if depth < len(kind)]
    return in_turn[:number]


def roles(sampled: Sampled, index: int) -> list[str]:
    """One of ROLES for each row; empty strings if the objective has no roles.

    A hard negative that its successful reflection replaced in S keeps its role.
    """
    num_rows = sampled.scores.acc.shape[1]
    if sampled.raw is None:
        return [""] * num_rows
    found, subgroup = ["unused"] * num_rows, sampled.subgroup
    if subgroup.has_update[index]:
        for row in np.flatnonzero(subgroup.is_negative[index]):
            found[row] = "hard negative"
        is_rescue = subgroup.is_rescue[index]
        found[subgroup.anchor[index]] = "pseudo-anchor" if is_rescue else "anchor"
    if sampled.has_reflection[index]:
        found[-1] = "reflected"
    return found


def distances(embedding: Float[np.ndarray, "R D"], anchor: int) -> Float[np.ndarray, " R"]:
    """d_cos = 1 - hᵢ·h₊ to the anchor, hᵢ of unit length; 1 for a zero vector."""
    h = np.asarray(embedding, np.float32)
    h = h / np.maximum(np.linalg.norm(h, axis=1, keepdims=True), 1e-6)
    return 1 - h @ h[anchor]


def segments(
    context: str, written: str, *, think_tag: str, has_think: bool, has_answer: bool, cue: str
) -> list[list[str]]:
    """Splits a response into [kind, text] pairs whose texts concatenate to context + written.

    Kinds: "context" and "cue" for forced text, "think" and "answer" for the spans of sampled text,
    tags included, "text" for the rest.

    Args:
        context: text of the forced tokens; empty for none.
        written: text of the sampled tokens.
        think_tag: name of the rationale's tag.
        has_think, has_answer: whether there is a well-formed span.
        cue: suffix of a context that ends with it.
    """
    text = context + written
    think = _extent(text, think_tag) if has_think else (0, 0)
    answer = _extent(text, "answer") if has_answer else (0, 0)
    cue_start = len(context) - (len(cue) if cue and context.endswith(cue) else 0)

    def kind(place: int) -> str:
        if place < len(context):
            return "context" if place < cue_start else "cue"
        for name, (start, end) in (("think", think), ("answer", answer)):
            if start <= place < end:
                return name
        return "text"

    bounds = sorted({0, cue_start, len(context), *think, *answer, len(text)})
    return [[kind(a), text[a:b]] for a, b in itertools.pairwise(bounds)]


def describe(sampled: Sampled, index: int, wording: Wording) -> dict[str, Any]:
    """One prompt's group, in JSON types."""
    example = sampled.examples[index]
    names = roles(sampled, index)
    to_anchor = [None] * len(names)
    if sampled.raw is not None and sampled.subgroup.has_update[index]:
        anchor = int(sampled.subgroup.anchor[index])
        to_anchor = distances(sampled.rollouts.embedding[index], anchor)
    is_there = [True] * len(names)
    if sampled.raw is not None and len(names) > sampled.subgroup.is_negative.shape[1]:
        is_there[-1] = bool(sampled.has_reflection[index])
    responses = [
        _response(sampled, index, row, wording) | {"role": role, "distance": _distance(distance)}
        for row, (role, distance) in enumerate(zip(names, to_anchor, strict=True))
        if is_there[row]
    ]
    repair = _repair(sampled, index, responses, wording)
    if any(names):
        responses.sort(
            key=lambda each: (_RANK[each["role"]], each["distance"] or 0.0, each["number"])
        )
    return {
        "source": example.source,
        "id": example.id,
        "question": example.question,
        "choices": list(example.choices),
        "gold": answer_text(example.answer),
        "outcome": outcome(sampled, index),
        "repair": repair,
        "responses": responses,
    }


def columns(response: Mapping[str, Any]) -> dict[str, Any]:
    """A response of `describe` as one row of a table."""
    names = ("role", "acc", "reward", "advantage", "tokens", "reason")
    return {
        **{name: response[name] for name in names},
        "components": ", ".join(f"{name} {value}" for name, value in response["components"]),
        "text": "".join(text for _, text in response["segments"]),
    }


def number(value: Any) -> float | None:
    """A float of four significant digits; None for None, NaN and infinities."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{float(value):.4g}")


def _distance(value: float | None) -> float | None:
    """Rounded to four decimals, as float32 resolves 1 - x; abs because rounding can make it < 0."""
    return None if value is None else abs(round(float(value), 4))


def _response(sampled: Sampled, index: int, row: int, wording: Wording) -> dict[str, Any]:
    rollouts, scores = sampled.rollouts, sampled.scores
    context, written = _texts(rollouts, index, row, wording)
    has_answer = bool(scores.has_answer[index, row])
    answer = ""
    if has_answer:
        whole = context + written
        start, end = _extent(whole, "answer")
        answer = whole[start:end].removeprefix("<answer>").removesuffix("</answer>").strip()
    acc = float(scores.acc[index, row])
    reason = sampled.reasons[index, row]
    raw = None if sampled.raw is None else number(sampled.raw.value[index, row])
    return {
        "number": row + 1,
        "segments": segments(
            context,
            written,
            think_tag=wording.think_tag,
            has_think=bool(scores.is_think[index, row].any()),
            has_answer=has_answer,
            cue=wording.cue,
        ),
        "answer": answer,
        "verdict": "right" if acc >= 1 else "wrong" if acc <= 0 else "partly right",
        "reason": reason,
        "notes": [
            note
            for note, is_so in (
                ("no answer span", not has_answer),
                ("format not kept", scores.fmt[index, row] < 1),
                ("cut off", not rollouts.is_complete[index, row]),
            )
            if is_so and note != reason
        ],
        "acc": number(acc),
        "reward": number(scores.reward[index, row]),
        "components": _components(sampled, index, row),
        "raw": raw,
        "advantage": number(sampled.advantage[index, row]),
        "tokens": int(rollouts.is_valid[index, row].sum()),
        "think_tokens": int(scores.num_think[index, row]),
        "answer_tokens": int(scores.num_answer[index, row]),
    }


def _components(sampled: Sampled, index: int, row: int) -> list[list[Any]]:
    """[name, value] pairs, in the order of the reward function."""
    if sampled.components is None:
        return []
    return [[name, number(value)] for name, value in sampled.components[index, row].items()]


def _repair(
    sampled: Sampled, index: int, responses: list[dict[str, Any]], wording: Wording
) -> dict[str, Any] | None:
    """What the reflection changed: the failed response, the cue, the answers before and after."""
    if sampled.raw is None or not sampled.has_reflection[index]:
        return None
    failed = responses[int(sampled.subgroup.hard_negative[index])]
    given = [text for kind, text in responses[-1]["segments"] if kind in ("context", "cue")]
    return {
        "of": failed["number"],
        "cue": wording.cue,
        "before": failed["answer"],
        "after": responses[-1]["answer"],
        # `care.reflect_credit = "prompt_only"` removes the context from the row.
        "has_context": bool(given),
        # Characters of context and cue, with which the text begins.
        "num_given": len("".join(given)),
    }


def _texts(rollouts: Rollouts, index: int, row: int, wording: Wording) -> tuple[str, str]:
    """(text of the forced tokens, text of the sampled tokens), without EOS."""
    tokens = np.asarray(rollouts.tokens[index, row])
    is_text = rollouts.is_valid[index, row] & ~np.isin(tokens, list(wording.eos_token_ids))
    is_forced = rollouts.is_forced[index, row]
    forced, sampled = (
        b"".join(wording.token_bytes[token] for token in tokens[mask]).decode("utf-8", "replace")
        for mask in (is_text & is_forced, is_text & ~is_forced)
    )
    return forced, sampled


def _extent(text: str, tag: str) -> tuple[int, int]:
    """(start, end) of a span, tags included; a missing tag means the start or end of the text."""
    start = max(text.find(f"<{tag}>"), 0)
    end = text.find(f"</{tag}>", start)
    return start, len(text) if end < 0 else end + len(f"</{tag}>")
