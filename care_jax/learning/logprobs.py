"""Log-probabilities of responses under the policy, without materialising all logits.

Rows hold packed trees, `[prompt | r_0 | r_1 | ...] [prompt' | ...]`, see `batch.TreeRows`. A prompt
and its images are computed once for all of its responses, forward and backward. A response's first
token is predicted by the last token of its prompt. Logits are computed in chunks of scored tokens.

Letters: B rows, S tokens of a row, D model, V vocab.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from care_jax.batch import TreeRows
from models import backbone
from models.attention.packed import XLA, AttentionImpl
from models.config import BackboneConfig
from models.layers import constrain


@dataclasses.dataclass(frozen=True)
class ForwardOptions:
    """How the trainer's forward pass computes."""

    dtype: DTypeLike  # of the activations
    chunk: int  # tokens per row whose logits are in memory at a time, in the backward pass too
    remat: str = "none"  # what the backward pass rematerialises, see `models.backbone.forward`
    attention: AttentionImpl = XLA  # over the rows


def token_logprobs(
    params: backbone.Params,
    hidden: Float[Array, "B S D"],
    targets: Int[Array, "B S"],
    config: BackboneConfig,
    *,
    chunk: int,
    is_wanted: Bool[Array, "B S"],
) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
    """log π(target) and the entropy of π at each token, both in nats.

    Args:
        hidden: states that predict `targets`, after the final norm.
        chunk: see `ForwardOptions`.
        is_wanted: tokens to score; of several chunks, those without any are skipped and give 0.
    """

    @jax.checkpoint
    def score(hidden, targets):
        hidden = constrain(hidden, "batch", "tokens", None)
        logits = backbone.policy_logits(params, hidden, config)
        logp = jax.nn.log_softmax(constrain(logits, "batch", "tokens", "vocab"))
        entropy = -(jnp.exp(logp) * logp).sum(-1)
        return jnp.take_along_axis(logp, targets[..., None], -1)[..., 0], entropy

    num_tokens = targets.shape[1]
    if num_tokens <= chunk:
        return score(hidden, targets)

    def skip(hidden, targets):
        return (jnp.zeros(targets.shape),) * 2

    def step(_, x):
        hidden, targets, is_wanted = x
        return None, jax.lax.cond(is_wanted.any(), score, skip, hidden, targets)

    in_chunks = [_split_tokens(x, chunk) for x in (hidden, targets, is_wanted)]
    _, scored = jax.lax.scan(step, None, in_chunks)
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :num_tokens], scored
    )


def score_rows(
    params: backbone.Params, rows: TreeRows, config: BackboneConfig, options: ForwardOptions
) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
    """log π of every response token given prompt and earlier response tokens; the entropy of π.

    Both in nats, at the tokens' indices in the rows; 0 elsewhere.
    """
    x, features = backbone.embed_with_images(
        params,
        rows.tokens,
        rows.images,
        rows.slots,
        config,
        dtype=options.dtype,
        remat=options.remat,
        attention=options.attention,
    )
    hidden = backbone.forward(
        params,
        x,
        rows.positions,
        backbone.text_mask(rows.reach, config, options.attention),
        config,
        remat=options.remat,
        features=features,
        slots=rows.slots,
    )
    # Gather the scored tokens to the front of each row, so that chunks without any can be skipped.
    index = jnp.maximum(rows.scored, 0)
    predictor = jnp.maximum(jnp.take_along_axis(rows.predictor, index, axis=1), 0)
    scored = token_logprobs(
        params,
        jnp.take_along_axis(hidden, predictor[..., None], axis=1),
        jnp.take_along_axis(rows.tokens, index, axis=1),
        config,
        chunk=options.chunk,
        is_wanted=rows.scored >= 0,
    )
    is_scored = rows.predictor >= 0
    back = jnp.maximum(jnp.cumsum(is_scored, axis=1) - 1, 0)
    logp, entropy = (
        jnp.where(is_scored, jnp.take_along_axis(x, back, axis=1), 0.0) for x in scored
    )
    return logp, entropy


def _split_tokens(x: Array, chunk: int) -> Array:
    """Reshapes [B, S, ...] to [S / chunk, B, chunk, ...], the last chunk zero-padded."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk), *[(0, 0)] * (x.ndim - 2)])
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)
