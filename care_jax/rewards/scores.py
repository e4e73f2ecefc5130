"""Computes scores from sampled tokens: parses the tags, then verifies the answer span (host).

Letters: B prompts, R rows per prompt, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Shaped

from care_jax.batch import Example, Rollouts, Scores
from care_jax.method import spans
from care_jax.rewards.verifier import Verifier


def row_texts(
    rollouts: Rollouts, token_bytes: Sequence[bytes], *, eos_token_ids: Collection[int]
) -> list[list[str]]:
    """The text of every row, [B][R], with forced tokens and without EOS."""
    tokens, is_valid = np.asarray(rollouts.tokens), np.asarray(rollouts.is_valid)
    is_text = is_valid & ~np.isin(tokens, list(eos_token_ids))
    return [
        [
            b"".join(token_bytes[token] for token in row[mask]).decode("utf-8", "replace")
            for row, mask in zip(rows, masks, strict=True)
        ]
        for rows, masks in zip(tokens, is_text, strict=True)
    ]


class Scored(NamedTuple):
    """Scores of every row, its text, and its verdict's reason (str) and components (dict).

    Components are empty where the reward function failed, and None without a reward function.
    """

    scores: Scores
    texts: list[list[str]]
    reasons: Shaped[np.ndarray, "B R"]
    components: Shaped[np.ndarray, "B R"] | None


def start_scoring(
    rollouts: Rollouts,
    examples: Sequence[Example],
    verifier: Verifier,
    token_bytes: Sequence[bytes],
    *,
    eos_token_ids: Collection[int],
    format_weight: float,
) -> Callable[[], Scored]:
    """Parses every row and starts verifying it; a group is all rows of a prompt.

    Args:
        examples: B, one per prompt.
        token_bytes: the bytes of every token id.
        format_weight: λ of r = (1-λ)·acc + λ·fmt (eq:overall). With a reward function its weighted
            components Σₖ wₖ·cₖ replace acc.

    Returns:
        a function that waits for the verdicts and returns the scores.
    """
    tokens, is_valid = np.asarray(rollouts.tokens), np.asarray(rollouts.is_valid)
    think_tag = verifier.think_tag
    num_rows, num_tokens = tokens.shape[1:]
    # Tokens are parsed, not texts: only they show whether a row ended with EOS, which fmt requires.
    parsed = [
        spans.parse(row[mask], token_bytes, eos_token_ids=eos_token_ids, think_tag=think_tag)
        for rows, masks in zip(tokens, is_valid, strict=True)
        for row, mask in zip(rows, masks, strict=True)
    ]
    texts = row_texts(rollouts, token_bytes, eos_token_ids=eos_token_ids)
    verdicts_of = verifier.begin(
        [text for rows in texts for text in rows],
        parsed,
        [example for example in examples for _ in range(num_rows)],
        group_size=num_rows,
    )

    def table(values, dtype: DTypeLike = np.float32):
        return np.array(values, dtype).reshape(len(examples), num_rows)

    def masks(name):
        padded = np.zeros((len(parsed), num_tokens), bool)
        for row, span in zip(padded, parsed, strict=True):
            mask = getattr(span, name)
            row[: len(mask)] = mask
        return padded.reshape(tokens.shape)

    def finish() -> Scored:
        verdicts = verdicts_of()
        fmt = table([verdict.fmt for verdict in verdicts])
        quality = table([v.acc if v.quality is None else v.quality for v in verdicts])
        scores = Scores(
            acc=table([verdict.acc for verdict in verdicts]),
            fmt=fmt,
            reward=(1 - format_weight) * quality + format_weight * fmt,
            is_think=masks("is_think"),
            is_answer=masks("is_answer"),
            num_think=table([span.num_think for span in parsed], np.int32),
            num_answer=table([span.num_answer for span in parsed], np.int32),
            has_answer=table([span.has_answer for span in parsed], bool),
        )
        reasons = table([verdict.reason for verdict in verdicts], object)
        components = table([dict(verdict.components) for verdict in verdicts], object)
        return Scored(scores, texts, reasons, components if verifier.has_reward else None)

    return finish
