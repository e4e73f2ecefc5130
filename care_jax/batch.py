"""The records that flow from data to update.

Letters: B prompts, G rollouts per prompt, R = G + 1 rows per prompt (slot G holds the reflected
row), P prompt tokens (left-padded), T response tokens (right-padded), N image patches, D model.
"""

from __future__ import annotations

import dataclasses
import pathlib
import zipfile

import flax.struct
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from PIL import Image

from models.positions import ImagePatches

# Records hold jax arrays on the device and numpy arrays on the host.
HostOrDevice = Array | np.ndarray


class Unusable(ValueError):
    """Why a row or its prompt is left out; the message is the reason it is counted under."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One question, on the host, before any tokenising.

    Attributes:
        id: unique inside its source.
        source: name of the source, for metrics and reports.
        images: in the order of the `<image>` placeholders; a path, or the bytes of an image file,
            is decoded when it is needed.
        question: text with one `<image>` per image.
        answer: gold answer.
        choices: options of a multiple-choice question, in order (A, B, ...); empty otherwise.
        rationale: the teacher's reasoning for the cold start; empty where there is none.
        response: what the cold start imitates, tags included; empty where there is none.
        tolerance: relative error allowed between numbers; 0 takes the verifier's.
        min_pixels, max_pixels: its images are resized into this range; 0 takes the prompts'.
        repair: what had to be mended in its row; empty where nothing.
    """

    id: str
    source: str
    images: tuple[Image.Image | pathlib.Path | zipfile.Path | bytes, ...]
    question: str
    answer: str
    choices: tuple[str, ...] = ()
    rationale: str = ""
    response: str = ""
    tolerance: float = 0.0
    min_pixels: int = 0
    max_pixels: int = 0
    repair: str = ""


@flax.struct.dataclass
class Prompts:
    """B tokenised prompts, each computed once for all rows that answer it.

    Attributes:
        tokens: left-padded token ids.
        is_valid: true at prompt tokens, false at padding.
        positions: M-RoPE ids (time, height, width), counted over unpadded tokens.
        next_position: the position of the first response token (all three components).
        slots: index into the row's image features at image tokens, -1 elsewhere.
        images: packed patches, or None for a batch without any image.
    """

    tokens: Int[HostOrDevice, "B P"]
    is_valid: Bool[HostOrDevice, "B P"]
    positions: Int[HostOrDevice, "B P 3"]
    next_position: Int[HostOrDevice, " B"]
    slots: Int[HostOrDevice, "B P"]
    images: ImagePatches | None


@flax.struct.dataclass
class TreeRows:
    """B rows of S tokens, each of several trees: `[prompt | r_0 | r_1 | ...] [prompt' | ...]`.

    Query q sees key k iff k <= q <= reach[k], which is the whole mask. What belongs to the scored
    tokens (advantages, old log-probabilities, weights) is [B, S] beside it, see `layout.place`.

    Attributes:
        tokens: right-padded token ids.
        reach: place in the row of the last token that sees this one: its tree's end for a prompt
            token, its branch's end for a response token, itself for padding.
        positions: M-RoPE ids, counted anew in each tree; every response continues from the end of
            its prompt.
        slots: index into the row's image features at image tokens, -1 elsewhere.
        images: packed patches of all prompts of a row, or None for a batch without any image.
        predictor: place in the row of the token that predicts this one: the prompt's last for a
            branch's first, else the one before; -1 at tokens that are not scored, which are those
            of prompts and padding.
        branch: number of the response within its row, -1 off responses.
        scored: places of the scored tokens, one after the other; -1 behind them. Logits are
            computed over these; `cumsum(predictor >= 0) - 1` leads back from a token's place.
    """

    tokens: Int[HostOrDevice, "B S"]
    reach: Int[HostOrDevice, "B S"]
    positions: Int[HostOrDevice, "B S 3"]
    slots: Int[HostOrDevice, "B S"]
    images: ImagePatches | None
    predictor: Int[HostOrDevice, "B S"]
    branch: Int[HostOrDevice, "B S"]
    scored: Int[HostOrDevice, "B S"]


@flax.struct.dataclass
class Rollouts:
    """Responses to B prompts, R per prompt, as the sampler leaves them.

    Attributes:
        tokens: right-padded token ids: forced tokens first, then sampled ones, EOS included.
        is_valid: true at forced and sampled tokens (EOS included), false at padding.
        is_forced: true where the token was put there and not sampled (reflected context).
        logp: log-probability (nats) of each sampled token under the policy that sampled it; 0
            elsewhere.
        embedding: mean final-layer hidden state over the rationale, unit length, stop-gradient.
        is_complete: the row ended with EOS inside its budget of T tokens.
    """

    tokens: Int[HostOrDevice, "B R T"]
    is_valid: Bool[HostOrDevice, "B R T"]
    is_forced: Bool[HostOrDevice, "B R T"]
    logp: Float[HostOrDevice, "B R T"]
    embedding: Float[HostOrDevice, "B R D"]
    is_complete: Bool[HostOrDevice, "B R"]

    def without_text(self) -> Rollouts:
        """What metrics and bucket sizes need, a fraction of the bytes."""
        return self.replace(tokens=None, logp=None, embedding=None)


@flax.struct.dataclass
class Scores:
    """What the verifier and the tag parser say of R rows for B prompts.

    Attributes:
        acc: correctness in [0, 1], read from the answer span alone.
        fmt: 1 for exactly one think span, then one non-empty answer span, then EOS; else 0.
        reward: (1 - λ)·acc + λ·fmt (eq:overall).
        is_think, is_answer: token masks of the spans, tags included, EOS in the answer.
        num_think, num_answer: tokens strictly between the tags.
        has_answer: the row has a well-formed answer span.
    """

    acc: Float[HostOrDevice, "B R"]
    fmt: Float[HostOrDevice, "B R"]
    reward: Float[HostOrDevice, "B R"]
    is_think: Bool[HostOrDevice, "B R T"]
    is_answer: Bool[HostOrDevice, "B R T"]
    num_think: Int[HostOrDevice, "B R"]
    num_answer: Int[HostOrDevice, "B R"]
    has_answer: Bool[HostOrDevice, "B R"]

    def without_spans(self) -> Scores:
        """What metrics need."""
        return self.replace(is_think=None, is_answer=None)


@flax.struct.dataclass
class TrainBatch:
    """One update's worth of packed trees; numbers of a response's tokens stand at their places.

    The loss is Σ row_weight · surrogate(token_advantage) / Σ prompt_weight, so that every
    objective's own mean is a choice of weights and no number depends on how trees are packed.

    Attributes:
        rows: the trees.
        token_advantage: a_t, zero off sampled tokens.
        old_logp: log-probability under the policy that sampled.
        ref_logp: log-probability under the fixed reference; zeros where β = 0.
        row_weight: share of each token's response in its prompt's loss.
        is_trained: sampled tokens of the responses that take part; KL and entropy are means over
            them.
        is_answer: answer span, for the diagnostics.
        prompt_weight: what the prompts of a row add to the loss's denominator; a prompt that is in
            several rows counts in one of them.
    """

    rows: TreeRows
    token_advantage: Float[HostOrDevice, "B S"]
    old_logp: Float[HostOrDevice, "B S"]
    ref_logp: Float[HostOrDevice, "B S"]
    row_weight: Float[HostOrDevice, "B S"]
    is_trained: Bool[HostOrDevice, "B S"]
    is_answer: Bool[HostOrDevice, "B S"]
    prompt_weight: Float[HostOrDevice, " B"]


@flax.struct.dataclass
class ImitationBatch:
    """One step's worth of the cold start: trees of one branch, the response to imitate.

    Attributes:
        rows: the trees.
        weight: of each response token in the loss; 0 elsewhere.
    """

    rows: TreeRows
    weight: Float[HostOrDevice, "B S"]
