"""A prompt's group as a line of rollouts.jsonl: responses with roles, rewards and advantages.

Functions of one group take a record from `Groups.take(index)`, without the prompt axis. Row r is
response r + 1; the reflected row is the last.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from care_jax.batch import Groups, Rollouts, answer_text
from care_jax.prompts.rendering import rendered, resized_images
from models.config import BackboneConfig

ROLES = ("anchor", "pseudo-anchor", "hard negative", "reflected", "unused")
# `choose` goes through the outcomes in this order.
OUTCOMES = (
    "repaired",  # the reflected row succeeded
    "not repaired",
    "contrasted",  # an anchor and its negatives, no reflected row
    "rescued",
    "mixed",  # some correct and some wrong, under an objective without roles
    "equal acc",  # an update from other differences in reward, such as of the format
    "all correct",
    "all wrong",
    "no update",
)


@dataclasses.dataclass(frozen=True)
class Wording:
    """Detokenisation, and the markers in the text."""

    token_bytes: Sequence[bytes]  # of every token id
    config: BackboneConfig  # has the ids of special tokens and the sizes of image patches
    think_tag: str  # of the rationale
    cue: str  # appended to a failed rationale; empty for none


def describe(step: int, groups: Groups, index: int, wording: Wording) -> dict[str, Any]:
    """A prompt's group in JSON types; responses with roles are sorted by role, then by distance.

    `groups` are those of an RL step, with credit.
    """
    example, prompt, group = groups.examples[index], groups.prompts[index], groups.take(index)
    num_rows = len(group.scores.acc)
    if group.raw is not None and not group.has_reflection:
        num_rows = len(group.subgroup.is_negative)  # without the empty reflected row
    rows = zip(range(num_rows), roles(group), distances(group), strict=False)
    responses = [_response(group, row, wording, role, apart) for row, role, apart in rows]
    repair = None
    if group.raw is not None and group.has_reflection:
        failed, reflected = responses[group.subgroup.hard_negative], responses[-1]
        context, _ = _texts(group.rollouts, -1, wording)
        repair = {
            "of": failed["number"],
            "cue": wording.cue,
            "before": failed["answer"],
            "after": reflected["answer"],
            # `care.reflect_credit = "prompt_only"` leaves the tag alone.
            "has_context": context not in ("", f"<{wording.think_tag}>"),
            "num_given": len(context),  # leading characters that were forced, cue included
        }
    if group.raw is not None:
        responses.sort(key=lambda r: (ROLES.index(r["role"]), r["distance"] or 0.0, r["number"]))
    return {
        "step": step,
        "source": example.source,
        "id": example.id,
        "question": example.question,
        "choices": list(example.choices),
        "gold": answer_text(example.answer),
        "rendered": rendered(prompt, wording.token_bytes, wording.config),
        "images": resized_images(example, prompt, wording.config),
        "outcome": outcome(group),
        "repair": repair,
        "responses": responses,
    }


def choose(outcomes: Sequence[str], number: int, *, turn: int = 0) -> list[int]:
    """Indices of up to `number` prompts, round-robin over their outcomes.

    `turn` is the rank of the first outcome; varying it gives small samples different outcomes.
    """
    kinds = [kind for kind in OUTCOMES if kind in outcomes]
    order = {kind: (rank - turn) % len(kinds) for rank, kind in enumerate(kinds)}

    def round_and_order(index: int) -> tuple[int, int]:
        return outcomes[:index].count(outcomes[index]), order[outcomes[index]]

    return sorted(range(len(outcomes)), key=round_and_order)[:number]


def outcome(group: Groups) -> str:
    """One of OUTCOMES."""
    acc, has_update = group.scores.acc, bool((group.credit.advantage != 0).any())
    if group.raw is not None:
        if has_update and group.subgroup.is_rescue:
            return "rescued"
        if has_update and not group.has_reflection:
            return "contrasted"
        if has_update:
            return "repaired" if acc[-1] >= 1 else "not repaired"
        acc = acc[: len(group.subgroup.is_negative)]
    if has_update:
        return "mixed" if acc.max() > acc.min() else "equal acc"
    if (acc >= 1).all():
        return "all correct"
    return "all wrong" if (acc <= 0).all() else "no update"


def roles(group: Groups) -> list[str]:
    """One of ROLES for each row; empty strings if the objective has no roles.

    A hard negative keeps its role if a successful reflection replaced it in S.
    """
    num_rows, subgroup = len(group.scores.acc), group.subgroup
    if group.raw is None:
        return [""] * num_rows
    found = ["unused"] * num_rows
    if subgroup.has_update:
        for row in np.flatnonzero(subgroup.is_negative):
            found[row] = "hard negative"
        found[subgroup.anchor] = "pseudo-anchor" if subgroup.is_rescue else "anchor"
    if group.has_reflection:
        found[-1] = "reflected"
    return found


def distances(group: Groups) -> list[float] | list[None]:
    """d_cos = 1 - hᵢ·h₊ (eq:cosdist) of each row, if there is an anchor; 1 for a zero vector.

    Rounded to four decimals to hide the float32 error of 1 - x; abs, because that can be negative.
    """
    if group.raw is None or not group.subgroup.has_update:
        return [None] * len(group.scores.acc)
    h = np.asarray(group.rollouts.embedding, np.float32)
    h = h / np.maximum(np.linalg.norm(h, axis=1, keepdims=True), 1e-6)
    return [abs(round(float(distance), 4)) for distance in 1 - h @ h[group.subgroup.anchor]]


def number(value: Any) -> float | None:
    """A float of four significant digits; None for NaN and infinities."""
    return float(f"{float(value):.4g}") if math.isfinite(value) else None


def _response(
    group: Groups, row: int, wording: Wording, role: str, distance: float | None
) -> dict[str, Any]:
    rollouts, scores = group.rollouts, group.scores
    text = "".join(_texts(rollouts, row, wording))
    has_answer = bool(scores.has_answer[row])
    # Of the text that was judged: the row may lack its context, see `reflection.without_context`.
    answer = group.texts[row].partition("<answer>")[2].partition("</answer>")[0].strip()
    acc, reason = float(scores.acc[row]), group.reasons[row]
    notes = {
        "no answer span": not has_answer,
        "format not kept": scores.fmt[row] < 1,
        "cut off": not rollouts.is_complete[row],
    }
    components = {} if group.components is None else group.components[row]
    return {
        "number": row + 1,
        "answer": answer if has_answer else "",
        "verdict": "right" if acc >= 1 else "wrong" if acc <= 0 else "partly right",
        "reason": reason,
        "notes": [note for note, is_so in notes.items() if is_so and note != reason],
        "acc": number(acc),
        "reward": number(scores.reward[row]),
        "components": {name: number(value) for name, value in components.items()},
        "raw": None if group.raw is None else number(group.raw.value[row]),
        "advantage": number(group.credit.advantage[row]),
        "tokens": int(rollouts.is_valid[row].sum()),
        "think_tokens": int(scores.num_think[row]),
        "answer_tokens": int(scores.num_answer[row]),
        "role": role,
        "distance": distance,
        "text": text,
    }


def _texts(rollouts: Rollouts, row: int, wording: Wording) -> tuple[str, str]:
    """(text of the forced tokens, text of the sampled tokens), without EOS."""
    tokens, is_forced = np.asarray(rollouts.tokens[row]), rollouts.is_forced[row]
    is_text = rollouts.is_valid[row] & ~np.isin(tokens, list(wording.config.eos_token_ids))
    forced, sampled = (
        b"".join(wording.token_bytes[token] for token in tokens[mask]).decode("utf-8", "replace")
        for mask in (is_text & is_forced, is_text & ~is_forced)
    )
    return forced, sampled
