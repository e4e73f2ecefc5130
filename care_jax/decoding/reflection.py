"""Reflection-guided resampling (RGR): the forced context of the second decode.

If a prompt has an anchor, its nearest hard negative gets a second attempt (sec:care-reflection).
The model continues the prompt, the failed rationale and a repair cue, still inside the think span.
The template of sec:care-reflection closes the span after the cue; we follow alg:care, which inserts
the cue into the negative's span. In training the row is conditioned on these tokens, with weight 0,
so its importance ratio is exact.

The rationale is tokenised again from text, up to the first tag after the opening one: no
well-formed response can follow a closing or an answer tag. It is truncated to `max_context` tokens.

Controls are the failed rationale without the cue (No-Cue-Resample in fig:rgr_ablation), the cue
with shuffled words, and a fresh rollout without either (Random-Resample).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from care_jax.batch import Rollouts, Scores

MODES = ("cue", "no_cue", "shuffled", "resample")


def cue_text(cue: str, mode: str, *, seed: int) -> str:
    """The text that follows a failed rationale.

    Mode "cue": the cue; "no_cue", "resample": empty; "shuffled": the cue's words in another order,
    about as many tokens without the instruction.

    Raises:
        ValueError: unknown mode, or the cue's words have no other order.
    """
    if mode == "cue":
        return cue
    if mode in ("no_cue", "resample"):
        return ""
    if mode == "shuffled":
        words = cue.split()
        if len(set(words)) < 2:
            raise ValueError(
                f"care.cue must have two different words to be shuffled, got {cue!r}; write a "
                "longer one"
            )
        rng, order = np.random.default_rng(seed), words
        while order == words:
            order = list(rng.permutation(words))
        before, behind = cue[: cue.index(words[0])], cue[len(cue.rstrip()) :]
        return before + " ".join(order) + behind
    raise ValueError(f"care.reflect_mode must be one of {', '.join(MODES)}, got {mode!r}")


def context_tokens(
    rationale: str,
    cue: str,
    encode: Callable[[str], list[int]],
    *,
    think_tag: str,
    max_context: int,
) -> Int[np.ndarray, " c"]:
    """The forced tokens at the start of a prompt's second decode: failed rationale, then cue.

    `encode` gives token ids without special tokens. Tag and rationale are truncated to
    `max_context` tokens.
    """
    cue_tokens = encode(cue) if cue else []
    context = encode(f"<{think_tag}>{rationale}")[:max_context] + cue_tokens
    return np.array(context, np.int32)


def without_context(
    rollouts: Rollouts, scores: Scores, opening: Sequence[int], pad_token_id: int
) -> tuple[Rollouts, Scores]:
    """Removes the context from the rows (`care.reflect_credit = "prompt_only"`, on the host).

    Its first tokens become `opening`, the tokens of the opening think tag, and stay forced: what
    was sampled is the rest of a rationale. The rows are then trained as responses to the prompt
    alone, which they were not sampled from: their old log-probabilities must be recomputed.
    Verdicts are of the whole response.
    """
    is_forced = np.asarray(rollouts.is_forced)
    num_tokens = is_forced.shape[-1]
    num_forced = is_forced.sum(-1, keepdims=True)
    num_kept = np.minimum(num_forced, len(opening))
    source = np.arange(num_tokens) + num_forced - num_kept
    is_opening, is_inside = np.arange(num_tokens) < num_kept, source < num_tokens
    source = np.minimum(source, num_tokens - 1)

    def shift(x, fill):
        return np.where(is_inside, np.take_along_axis(np.asarray(x), source, -1), fill)

    drawn_logp, routes = rollouts.drawn_logp, rollouts.routes
    tokens = shift(rollouts.tokens, pad_token_id)
    tag = np.resize(np.asarray(opening, tokens.dtype), num_tokens)
    return dataclasses.replace(
        rollouts,
        tokens=np.where(is_opening, tag, tokens),
        is_valid=shift(rollouts.is_valid, False),
        logp=shift(rollouts.logp, 0.0),
        drawn_logp=None if drawn_logp is None else shift(drawn_logp, 0.0),
        routes=None if routes is None else np.full_like(routes, -1),  # of another context
        is_forced=is_opening,
    ), dataclasses.replace(
        scores,
        is_think=shift(scores.is_think, False),
        is_answer=shift(scores.is_answer, False),
        num_think=np.maximum(np.asarray(scores.num_think) - (num_forced - num_kept)[..., 0], 0),
    )
