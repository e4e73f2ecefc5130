"""Log-probabilities of responses under the policy, without materialising all logits.

Rows hold packed trees, `[prompt | r_0 | r_1 | ...] [prompt' | ...]`, see `batch.TreeRows`. A prompt
and its images are computed once for all of its responses, forward and backward. A response's first
token is predicted by the last token of its prompt. Logits are computed by blocks of the vocabulary.

Letters: B rows, S tokens of a row, D model.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from care_jax.batch import TreeRows
from care_jax.learning.blocked_softmax import target_logprobs
from models import backbone
from models.attention.packed import XLA, AttentionImpl
from models.config import BackboneConfig


@dataclasses.dataclass(frozen=True)
class ForwardOptions:
    """How the trainer's forward pass computes."""

    dtype: DTypeLike  # of the activations
    remat: str = "none"  # what the backward pass rematerialises, see `models.backbone.forward`
    attention: AttentionImpl = XLA  # over the rows


def token_logprobs(
    params: backbone.Params,
    hidden: Float[Array, "B S D"],
    targets: Int[Array, "B S"],
    config: BackboneConfig,
    *,
    is_wanted: Bool[Array, "B S"],
) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
    """log π(target) and the entropy of π at each token, see `target_logprobs`."""
    table = backbone.unembedding(params, config)
    is_never = functools.partial(backbone.is_never_sampled, config=config)
    return target_logprobs(table, hidden, targets, is_wanted, is_never)


def score_rows(
    params: backbone.Params,
    rows: TreeRows,
    config: BackboneConfig,
    options: ForwardOptions,
    routes: Int[Array, "B S L K"] | None = None,
) -> tuple[Float[Array, "B S"], Float[Array, "B S"], Int[Array, "B S L K"] | None]:
    """log π of every response token given prompt and earlier response tokens; the entropy of π.

    Both in nats, at the tokens' indices in the rows; 0 elsewhere. And the experts that a sparse
    decoder's routers choose; it uses `routes` where they are not -1.
    """
    x, features = backbone.embed_with_images(
        params,
        rows.tokens,
        rows.images,
        rows.feature_index,
        config,
        dtype=options.dtype,
        remat=options.remat,
        attention=options.attention,
    )
    hidden, chosen = backbone.forward(
        params,
        x,
        rows.positions,
        backbone.text_mask(rows.reach, config, options.attention),
        config,
        remat=options.remat,
        features=features,
        feature_index=rows.feature_index,
        routes=routes,
    )
    # Gather the scored tokens to the front of each row, so that columns without any can be skipped.
    index = jnp.maximum(rows.scored, 0)
    predictor = jnp.maximum(jnp.take_along_axis(rows.predictor, index, axis=1), 0)
    scored = token_logprobs(
        params,
        jnp.take_along_axis(hidden, predictor[..., None], axis=1),
        jnp.take_along_axis(rows.tokens, index, axis=1),
        config,
        is_wanted=rows.scored >= 0,
    )
    is_scored = rows.predictor >= 0
    back = jnp.maximum(jnp.cumsum(is_scored, axis=1) - 1, 0)
    logp, entropy = (
        jnp.where(is_scored, jnp.take_along_axis(x, back, axis=1), 0.0) for x in scored
    )
    return logp, entropy, chosen
