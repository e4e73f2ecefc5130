"""The records passed from the data pipeline to the update.

Letters: B prompts, G rollouts per prompt, R = G + 1 rows per prompt (row G is the reflected
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
_MAX_DETAIL = 300  # characters


class Unusable(ValueError):
    """A data row or its prompt cannot be used; it is left out and counted by this message.

    `detail` is what was found in this row, as one short line: a path, its beginning, its keys.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.detail = "".join(c if c.isprintable() else "?" for c in detail[:_MAX_DETAIL])


@dataclasses.dataclass(frozen=True)
class Example:
    """One question, on the host, before tokenisation."""

    id: str  # unique inside its source
    source: str  # name of the source, for metrics and reports
    # In the order of the `<image>` placeholders; paths and bytes are decoded when they are needed.
    images: tuple[Image.Image | pathlib.Path | zipfile.Path | bytes, ...]
    question: str  # text with one `<image>` per image
    answer: Any  # gold answer: text, or for a reward function a list or an object, such as a box
    choices: tuple[str, ...] = ()  # of a multiple-choice question, in order (A, B, ...)
    rationale: str = ""  # the teacher's reasoning for the cold start; empty if there is none
    response: str = ""  # what the cold start imitates, tags included; empty if there is none
    context: str = ""  # text before `response`, without loss in the cold start
    tolerance: float = 0.0  # relative error allowed between numbers; 0: exact
    units: str = ""  # "matter" if an answer without a unit differs from one with a unit; else empty
    min_pixels: int = 0  # least height x width of resized images; 0: the prompt builder's
    max_pixels: int = 0  # the largest, likewise
    repair: str = ""  # what was corrected in its data row; empty if nothing was
    # Further columns of its data row, by name, in JSON types.
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def answer_text(answer: Any) -> str:
    """An answer as text; lists and objects become JSON."""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


@flax.struct.dataclass
class Prompts:
    """B tokenised prompts; each is prefilled once for all of its rollouts."""

    tokens: Int[HostOrDevice, "B P"]  # left-padded token ids
    is_valid: Bool[HostOrDevice, "B P"]  # true at prompt tokens, false at padding
    positions: Int[HostOrDevice, "B P 3"]  # M-RoPE ids (time, height, width), padding not counted
    next_position: Int[HostOrDevice, " B"]  # of the first response token, all three components
    feature_index: Int[HostOrDevice, "B P"]  # into the row's image features, -1 at other tokens
    images: ImagePatches | None  # packed patches; None for a batch without any image


@flax.struct.dataclass
class TreeRows:
    """B rows of S tokens, each of several trees: `[prompt | r_0 | r_1 | ...] [prompt' | ...]`.

    Query q attends to key k iff k <= q <= reach[k]; there is no other mask. Values per scored token
    (advantages, old log-probabilities, weights) are separate [B, S] arrays, see `layout.at_tokens`.
    """

    tokens: Int[HostOrDevice, "B S"]  # right-padded token ids
    # Index in the row of the last token that attends to this one: the end of its tree for a prompt
    # token, the end of its branch for a response token, itself for padding.
    reach: Int[HostOrDevice, "B S"]
    positions: Int[HostOrDevice, "B S 3"]  # M-RoPE ids; a response continues from its prompt's end
    feature_index: Int[HostOrDevice, "B S"]  # into the row's image features, -1 at other tokens
    images: ImagePatches | None  # packed patches of all prompts of a row; None without any
    # Index in the row of the token that predicts this one: the last prompt token for a branch's
    # first, else the previous token. -1 where nothing is scored (prompts and padding).
    predictor: Int[HostOrDevice, "B S"]
    branch: Int[HostOrDevice, "B S"]  # number of the response within its row; -1 outside responses
    # Indices of the scored tokens, moved to the front; -1 after them. Logits are computed for these
    # only. `cumsum(predictor >= 0) - 1` is the index in `scored` of each token.
    scored: Int[HostOrDevice, "B S"]


@flax.struct.dataclass
class Rollouts:
    """Responses to B prompts, R per prompt, as the sampler returns them."""

    tokens: Int[HostOrDevice, "B R T"]  # right-padded: forced tokens, then sampled ones, EOS too
    is_valid: Bool[HostOrDevice, "B R T"]  # forced and sampled tokens (EOS included), no padding
    is_forced: Bool[HostOrDevice, "B R T"]  # given, not sampled: the context of a reflected row
    # nats at temperature 1, under the policy that sampled the token; 0 if not sampled
    logp: Float[HostOrDevice, "B R T"]
    embedding: Float[HostOrDevice, "B R D"]  # unit mean of the rationale's last hidden states
    is_complete: Bool[HostOrDevice, "B R"]  # the row ended with EOS within its T tokens
    # log-probability with which the token was drawn, at the sampler's temperature and top-p; 0 if
    # not sampled. None at temperature 1 and top-p 1, where it is `logp`.
    drawn_logp: Float[HostOrDevice, "B R T"] | None = None
    age: Int[HostOrDevice, "B R T"] | None = None  # steps since the token was drawn; None: 0
    # Experts that read the token in each of L layers, int16; -1 for forced tokens, the last one and
    # padding, which no decode step read. None if the decoder is not sparse, or did not keep them.
    routes: Int[HostOrDevice, "B R T L K"] | None = None

    def with_drawn_logp(self) -> Rollouts:
        """The same, with `drawn_logp` also where it is `logp`."""
        drawn_logp = self.logp if self.drawn_logp is None else self.drawn_logp
        return dataclasses.replace(self, drawn_logp=drawn_logp)


@flax.struct.dataclass
class Scores:
    """Results of the verifier and the tag parser for B prompts with R rows each."""

    acc: Float[HostOrDevice, "B R"]  # 1 for a success, else 0; read from the answer span alone
    # 1 for exactly one think span, then one non-empty answer span, then EOS; else 0. A reward
    # function may give another number in [0, 1].
    fmt: Float[HostOrDevice, "B R"]
    # (1 - λ)·acc + λ·fmt (eq:overall); a reward function's weighted components replace acc
    reward: Float[HostOrDevice, "B R"]
    is_think: Bool[HostOrDevice, "B R T"]  # tokens of the span, tags included
    is_answer: Bool[HostOrDevice, "B R T"]  # likewise, with EOS
    num_think: Int[HostOrDevice, "B R"]  # tokens strictly between the tags
    num_answer: Int[HostOrDevice, "B R"]  # likewise
    has_answer: Bool[HostOrDevice, "B R"]  # the row has a well-formed answer span


@flax.struct.dataclass
class Subgroup:
    """Anchor and hard negatives of one prompt; under vmap, of a batch *B of prompts."""

    anchor: Int[HostOrDevice, "*B"]  # index; in a rescue that of the pseudo-anchor
    is_negative: Bool[HostOrDevice, "*B G"]  # the K' = min(K, number of eligible failures) chosen
    hard_negative: Int[HostOrDevice, "*B"]  # the negative nearest to the anchor, for reflection
    is_rescue: Bool[HostOrDevice, "*B"]  # none succeeded, at least two failed; anchor is a failure
    has_update: Bool[HostOrDevice, "*B"]  # has anchor and negative; if false, ignore the indices


@flax.struct.dataclass
class RawAdvantages:
    """Normalised rewards of a prompt's subgroup S before scaling; under vmap, of a batch *B."""

    value: Float[HostOrDevice, "*B R"]  # A_raw, 0 outside S (eq:care-zscore)
    is_positive: Bool[HostOrDevice, "*B R"]  # the anchor or pseudo-anchor, and a reflected success
    is_negative: Bool[HostOrDevice, "*B R"]  # the hard negatives in S, and a reflected failure
    is_reflected: Bool[HostOrDevice, "*B R"]  # row G, if the reflected one is in S


@flax.struct.dataclass
class Credit:
    """Advantages and loss weights of a batch."""

    advantage: Float[HostOrDevice, "B R"]  # A of each row
    token_advantage: Float[HostOrDevice, "B R T"]  # a_t, 0 outside sampled tokens
    row_weight: Float[HostOrDevice, "B R"]  # weight of the row in its prompt's loss
    prompt_weight: Float[HostOrDevice, " B"]  # the prompt's term in the loss's denominator
    is_trained: Bool[HostOrDevice, "B R T"]  # sampled tokens of the rows in the update


@flax.struct.dataclass
class Groups:
    """B prompts of a step with R rows each; fields that are not computed yet are None.

    All leaves are numpy arrays, some of Python objects, with prompts along their first axis, so
    `jax.tree.map` selects, gathers and concatenates groups.
    """

    index: Int[np.ndarray, " B"] = _UNKNOWN  # of each prompt in its step
    examples: Shaped[np.ndarray, " B"] = _UNKNOWN  # an `Example` per prompt
    prompts: Shaped[np.ndarray, " B"] = _UNKNOWN  # a `TokenizedPrompt` per prompt
    sources: Shaped[np.ndarray, " B"] = _UNKNOWN  # names of the data sources
    sizes: Int[np.ndarray, "B 2"] = _UNKNOWN  # tokens and image patches of each prompt
    position: Int[np.ndarray, " B"] | None = None  # of each prompt in the stream of examples
    rollouts: Rollouts = _UNKNOWN  # of all rows, the reflected one last
    scores: Scores = _UNKNOWN
    texts: Shaped[np.ndarray, "B R"] = _UNKNOWN  # of the responses
    reasons: Shaped[np.ndarray, "B R"] = _UNKNOWN  # of the verifier, see `Verdict`
    # The reward function's components of each row, a dict, empty where it failed. None without one.
    components: Shaped[np.ndarray, "B R"] | None = None
    subgroup: Subgroup = _UNKNOWN  # anchor and negatives; None if whole groups are compared
    has_reflection: Bool[np.ndarray, " B"] = _UNKNOWN  # the last row is a reflected one
    credit: Credit = _UNKNOWN  # advantages and loss weights
    raw: RawAdvantages | None = None  # A_raw; None as `subgroup`

    def take(self, chosen: Any) -> Groups:
        """The groups of some prompts: indices, a mask or a slice."""
        return jax.tree.map(lambda x: x[chosen], self)

    def split(self, number: int) -> list[Groups]:
        """The groups in equal parts, in order."""
        return [self.take(part) for part in np.split(np.arange(len(self.index)), number)]

    @staticmethod
    def concatenate(parts: Sequence[Groups]) -> Groups:
        """Joins the groups of several batches that have the same fields set."""
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)

    @property
    def is_judged(self) -> Bool[np.ndarray, "B R"]:
        """False where a reward function failed."""
        if self.components is None:
            return np.ones(self.scores.acc.shape, bool)
        return self.components.astype(bool)  # an empty dict is False

    @property
    def trained_scores(self) -> Scores:
        """The scores for selection and credit: an unjudged response is neither right nor wrong.

        Its acc is 1/2, and its reward the mean of those judged in its group.
        """
        if self.components is None:
            return self.scores
        is_judged, reward = self.is_judged, self.scores.reward
        mean = (reward * is_judged).sum(1) / np.maximum(is_judged.sum(1), 1)
        return dataclasses.replace(
            self.scores,
            acc=np.where(is_judged, self.scores.acc, np.float32(0.5)),
            reward=np.where(is_judged, reward, mean[:, None].astype(reward.dtype)),
        )

    @property
    def num_trained(self) -> Int[np.ndarray, "B R"]:
        """Number of tokens of each response that is trained on, 0 for the others."""
        num_tokens = self.rollouts.is_valid.sum(-1) * self.credit.is_trained.any(-1)
        return num_tokens.astype(np.int32)


@flax.struct.dataclass
class TrainBatch:
    """The packed trees of one update, with the values of each token at its index in the row.

    The loss is -Σ row_weight · surrogate(token_advantage) / Σ prompt_weight (eq:ppo). Each
    objective's mean is a choice of these weights. The loss does not depend on the packing.
    """

    rows: TreeRows
    token_advantage: Float[HostOrDevice, "B S"]  # a_t; 0 at tokens that were not sampled
    old_logp: Float[HostOrDevice, "B S"]  # under π_old, as the sampler or the trainer computes it
    ref_logp: Float[HostOrDevice, "B S"]  # under the fixed reference; zeros where β = 0
    row_weight: Float[HostOrDevice, "B S"]  # of the token's response in the loss of its prompt
    # Sampled tokens of the responses that are trained on; KL and entropy are means over them.
    is_trained: Bool[HostOrDevice, "B S"]
    # Tokens of `is_trained` that are trained in the context they were sampled in, so that sampler
    # and trainer can be compared: all but reflected rows under care.reflect_credit = "prompt_only".
    is_compared: Bool[HostOrDevice, "B S"]
    is_answer: Bool[HostOrDevice, "B S"]  # tokens of the answer span, for the diagnostics
    # Sum over a row's prompts of their terms in the loss's denominator, a repeated prompt once.
    prompt_weight: Float[HostOrDevice, " B"]
    # `Rollouts.drawn_logp`, or `Rollouts.logp` where that is None; None without rl.correction.
    drawn_logp: Float[HostOrDevice, "B S"] | None = None
    # Tokens drawn by the weights before the step's first update; None without rl.carry_over: all.
    is_fresh: Bool[HostOrDevice, "B S"] | None = None
    # `Rollouts.routes`, -1 elsewhere; None if the decoder is not sparse.
    routes: Int[HostOrDevice, "B S L K"] | None = None


@flax.struct.dataclass
class ImitationBatch:
    """The packed trees of one cold-start step; each has one branch, the response to imitate."""

    rows: TreeRows
    weight: Float[HostOrDevice, "B S"]  # of each response token in the loss; 0 elsewhere
