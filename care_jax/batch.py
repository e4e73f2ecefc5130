"""The records that are passed from the data pipeline to the update.

Letters: B prompts, G rollouts per prompt, R = G + 1 rows per prompt (slot G holds the reflected
row), P prompt tokens (left-padded), T response tokens (right-padded), N image patches, D model.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import jax
import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from PIL import Image

from models.positions import HostOrDevice, ImagePatches

_UNKNOWN: Any = None  # default of a field that is filled in later


class Unusable(ValueError):
    """A data row or its prompt is left out; the message is the reason under which it is counted."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One question, on the host, before tokenisation.

    Attributes:
        id: unique inside its source.
        source: name of the source, for metrics and reports.
        images: in the order of the `<image>` placeholders; paths and the bytes of image files are
            decoded when they are needed.
        question: text with one `<image>` per image.
        answer: gold answer: text, or for a reward function a list or an object, such as a box.
        choices: options of a multiple-choice question, in order (A, B, ...); empty otherwise.
        rationale: the teacher's reasoning for the cold start; empty if there is none.
        response: what the cold start imitates, tags included; empty if there is none.
        context: what stands before `response` in the assistant's turn; the cold start conditions on
            it and does not learn it.
        tolerance: relative error allowed between numbers; 0: that of the verifier.
        units: "matter" if an answer without a unit differs from one with a unit; else empty.
        min_pixels, max_pixels: range of height x width to which its images are resized; 0: that of
            the prompt builder.
        repair: what was corrected in its data row; empty if nothing was.
        extra: the columns of its data row that have no meaning here, by name, in JSON types.
    """

    id: str
    source: str
    images: tuple[Image.Image | pathlib.Path | zipfile.Path | bytes, ...]
    question: str
    answer: Any
    choices: tuple[str, ...] = ()
    rationale: str = ""
    response: str = ""
    context: str = ""
    tolerance: float = 0.0
    units: str = ""
    min_pixels: int = 0
    max_pixels: int = 0
    repair: str = ""
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def answer_text(answer: Any) -> str:
    """An answer as text; lists and objects as JSON."""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


@flax.struct.dataclass
class Prompts:
    """B tokenised prompts; each is prefilled once for all of its rollouts.

    Attributes:
        tokens: left-padded token ids.
        is_valid: true at prompt tokens, false at padding.
        positions: M-RoPE ids (time, height, width); padding is not counted.
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

    Query q attends to key k iff k <= q <= reach[k]; there is no other mask. Values per scored token
    (advantages, old log-probabilities, weights) are separate [B, S] arrays, see `layout.place`.

    Attributes:
        tokens: right-padded token ids.
        reach: index in the row of the last token that attends to this one: the end of its tree for
            a prompt token, the end of its branch for a response token, itself for padding.
        positions: M-RoPE ids, restarted in each tree; every response continues from the end of its
            prompt.
        slots: index into the row's image features at image tokens, -1 elsewhere.
        images: packed patches of all prompts of a row, or None for a batch without any image.
        predictor: index in the row of the token that predicts this one: the last prompt token for
            the first token of a branch, else the previous token. -1 at tokens that are not scored
            (prompts and padding).
        branch: number of the response within its row; -1 outside responses.
        scored: indices of the scored tokens, moved to the front; -1 after them. Logits are computed
            for these only. `cumsum(predictor >= 0) - 1` is the index in `scored` of each token.
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
    """Responses to B prompts, R per prompt, as the sampler returns them.

    Attributes:
        tokens: right-padded token ids: forced tokens first, then sampled ones, EOS included.
        is_valid: true at forced and sampled tokens (EOS included), false at padding.
        is_forced: true at tokens that were given, not sampled (the context of a reflected row).
        logp: log-probability (nats) of each sampled token under the policy that sampled it; 0
            elsewhere.
        embedding: mean final-layer hidden state over the rationale, unit length, stop-gradient.
        is_complete: the row ended with EOS within its T tokens.
    """

    tokens: Int[HostOrDevice, "B R T"]
    is_valid: Bool[HostOrDevice, "B R T"]
    is_forced: Bool[HostOrDevice, "B R T"]
    logp: Float[HostOrDevice, "B R T"]
    embedding: Float[HostOrDevice, "B R D"]
    is_complete: Bool[HostOrDevice, "B R"]


@flax.struct.dataclass
class Scores:
    """Results of the verifier and the tag parser for B prompts with R rows each.

    Attributes:
        acc: 1 for a success, else 0; the verifier reads it from the answer span alone.
        fmt: 1 for exactly one think span, then one non-empty answer span, then EOS; else 0. A
            reward function may give another number in [0, 1].
        reward: (1 - λ)·acc + λ·fmt (eq:overall); of a reward function the weighted components take
            the place of acc.
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


@flax.struct.dataclass
class Subgroup:
    """Anchor and hard negatives of one prompt; under vmap, of a batch *B of prompts.

    Attributes:
        anchor: index of the anchor or, in a rescue, of the pseudo-anchor.
        is_negative: the K' = min(K, number of eligible failures) chosen hard negatives.
        hard_negative: index of the chosen negative nearest to the anchor, the one to reflect on.
        is_rescue: no rollout succeeded and at least two failed; `anchor` is a failure.
        has_update: there is an anchor and a negative; if false, ignore the indices.
    """

    anchor: Int[HostOrDevice, "*B"]
    is_negative: Bool[HostOrDevice, "*B G"]
    hard_negative: Int[HostOrDevice, "*B"]
    is_rescue: Bool[HostOrDevice, "*B"]
    has_update: Bool[HostOrDevice, "*B"]


@flax.struct.dataclass
class RawAdvantages:
    """Normalised rewards of a prompt's subgroup S before scaling; under vmap, of a batch *B.

    Attributes:
        value: A_raw, 0 outside S. For binary rewards √K' at the anchor, -1/√K' at the negatives.
        is_positive: the anchor or pseudo-anchor, and a reflected success.
        is_negative: the hard negatives in S, and a reflected failure.
        is_reflected: slot G, if the reflected row is in S.
    """

    value: Float[HostOrDevice, "*B R"]
    is_positive: Bool[HostOrDevice, "*B R"]
    is_negative: Bool[HostOrDevice, "*B R"]
    is_reflected: Bool[HostOrDevice, "*B R"]


@flax.struct.dataclass
class Credit:
    """Advantages and loss weights of a batch.

    Attributes:
        advantage: A of each row.
        token_advantage: a_t, 0 outside sampled tokens.
        row_weight: weight of the row in its prompt's loss.
        prompt_weight: what the prompt adds to the loss's denominator.
        is_trained: sampled tokens of the rows in the update.
    """

    advantage: Float[HostOrDevice, "B R"]
    token_advantage: Float[HostOrDevice, "B R T"]
    row_weight: Float[HostOrDevice, "B R"]
    prompt_weight: Float[HostOrDevice, " B"]
    is_trained: Bool[HostOrDevice, "B R T"]


@flax.struct.dataclass
class Groups:
    """What a step knows so far of B prompts and their R rows each; the rest is None.

    All leaves are numpy arrays with the prompts as their first axis, some of Python objects.
    `jax.tree.map` therefore selects, gathers and concatenates groups, whatever is known of them.

    Attributes:
        index: of each prompt in its step.
        examples: the questions, of `Example`.
        prompts: the questions tokenised, of `TokenizedPrompt`.
        sources: names of the data sources.
        sizes: tokens and image patches of each prompt.
        rollouts, scores: of all rows; where the objective reflects, the last row is the reflected.
        texts: of the responses.
        reasons: why the verifier judged each row as it did, see `Verdict`.
        components: what a reward function returned for each row, by name; empty where it failed.
            None without a reward function.
        subgroup: anchor and negatives.
        has_reflection: the last row is a reflected one.
        credit: what is trained on, and how much.
        raw: A_raw; None if the objective compares the whole group, as GRPO does.
    """

    index: Int[np.ndarray, " B"] = _UNKNOWN
    examples: Shaped[np.ndarray, " B"] = _UNKNOWN
    prompts: Shaped[np.ndarray, " B"] = _UNKNOWN
    sources: Shaped[np.ndarray, " B"] = _UNKNOWN
    sizes: Int[np.ndarray, "B 2"] = _UNKNOWN
    rollouts: Rollouts = _UNKNOWN
    scores: Scores = _UNKNOWN
    texts: Shaped[np.ndarray, "B R"] = _UNKNOWN
    reasons: Shaped[np.ndarray, "B R"] = _UNKNOWN
    components: Shaped[np.ndarray, "B R"] | None = None
    subgroup: Subgroup = _UNKNOWN
    has_reflection: Bool[np.ndarray, " B"] = _UNKNOWN
    credit: Credit = _UNKNOWN
    raw: RawAdvantages | None = None

    def take(self, chosen: Any) -> Groups:
        """The groups of some prompts: indices, a mask or a slice."""
        return jax.tree.map(lambda x: x[chosen], self)

    def split(self, number: int) -> list[Groups]:
        """The groups in equal parts, in order."""
        return [self.take(part) for part in np.split(np.arange(len(self.index)), number)]

    @staticmethod
    def concatenate(parts: Sequence[Groups]) -> Groups:
        """The groups of several batches, of all of which the same is known."""
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)

    @property
    def is_judged(self) -> Bool[np.ndarray, "B R"]:
        """False where a reward function failed."""
        if self.components is None:
            return np.ones(self.reasons.shape, bool)
        return self.components.astype(bool)  # an empty dict is False

    @property
    def num_trained(self) -> Int[np.ndarray, "B R"]:
        """Tokens of each response that is trained on, 0 of the others."""
        num_tokens = self.rollouts.is_valid.sum(-1) * self.credit.is_trained.any(-1)
        return num_tokens.astype(np.int32)


@flax.struct.dataclass
class TrainBatch:
    """The packed trees of one update, with the values of each token at its index in the row.

    The loss is Σ row_weight · surrogate(token_advantage) / Σ prompt_weight. Each objective's mean
    is a choice of these weights, and the loss does not depend on how trees are packed.

    Attributes:
        rows: the trees.
        token_advantage: a_t; 0 at tokens that were not sampled.
        old_logp: log-probability under the policy that sampled.
        ref_logp: log-probability under the fixed reference; zeros where β = 0.
        row_weight: weight of the token's response in the loss of its prompt.
        is_trained: sampled tokens of the responses that are trained on; KL and entropy are means
            over them.
        is_answer: tokens of the answer span, for the diagnostics.
        prompt_weight: sum over the prompts of a row of their terms in the denominator of the loss.
            A prompt repeated in several rows counts once.
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
    """The packed trees of one cold-start step; each has one branch, the response to imitate.

    Attributes:
        rows: the trees.
        weight: loss weight of each response token; 0 elsewhere.
    """

    rows: TreeRows
    weight: Float[HostOrDevice, "B S"]
