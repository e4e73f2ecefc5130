"""Log-probabilities of responses under the policy, without ever holding all logits.

The rows that answer one prompt are scored together: `[prompt | r_0 | ... | r_{R-1}]` is one row
under the tree mask, so prompt and image are computed once for all of them, forward and backward.

Letters: B prompts, R rows per prompt, P prompt tokens, T response tokens, S tokens, D model,
V vocab.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from care_jax.batch import PackedRows, Prompts
from models import backbone
from models.attention import XLA, Kernel, Tree
from models.config import BackboneConfig
from models.layers import constrain

_NEVER = -1e30  # a logit no sample and no sum notices; finite, so that 0·logp stays 0


def policy_logits(
    params: backbone.Params, hidden: Float[Array, "*S D"], config: BackboneConfig
) -> Float[Array, "*S V"]:
    """float32 logits of the policy, in which image and video pad tokens never occur."""
    logits = backbone.unembed(params, hidden, config)
    ids = jnp.arange(logits.shape[-1])
    is_pad = (ids == config.image_token_id) | (ids == config.video_token_id)
    return jnp.where(is_pad, _NEVER, logits)


def token_logprobs(
    params: backbone.Params,
    hidden: Float[Array, "B S D"],
    targets: Int[Array, "B S"],
    config: BackboneConfig,
    *,
    chunk: int,
    is_wanted: Bool[Array, "B S"] | None = None,
) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
    """log π(target) and the entropy of π at each token, both in nats.

    Args:
        params: the backbone's.
        hidden: states that predict `targets`, after the final norm.
        targets: token ids.
        config: of the backbone.
        chunk: tokens of each row whose logits are held at a time, in the backward pass too.
        is_wanted: chunks without any such token are not computed, and give 0.
    """

    @jax.checkpoint
    def score(hidden, targets):
        hidden = constrain(hidden, "batch", "tokens", None)
        logits = constrain(policy_logits(params, hidden, config), "batch", "tokens", "vocab")
        logp = jax.nn.log_softmax(logits)
        entropy = -(jnp.exp(logp) * logp).sum(-1)
        return jnp.take_along_axis(logp, targets[..., None], -1)[..., 0], entropy

    num_tokens = targets.shape[1]
    if num_tokens <= chunk:
        return score(hidden, targets)

    padding = -num_tokens % chunk
    in_chunks = functools.partial(_split_tokens, chunk=chunk, padding=padding)

    def skip(hidden, targets):
        return (jnp.zeros(targets.shape),) * 2

    def step(_, x):
        hidden, targets, is_wanted = x
        if is_wanted is None:
            return None, score(hidden, targets)
        return None, jax.lax.cond(is_wanted.any(), score, skip, hidden, targets)

    xs = jax.tree.map(in_chunks, (hidden, targets, is_wanted))
    _, scored = jax.lax.scan(step, None, xs)
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :num_tokens], scored
    )


def score_responses(
    params: backbone.Params,
    prompts: Prompts,
    tokens: Int[Array, "B R T"],
    is_valid: Bool[Array, "B R T"],
    config: BackboneConfig,
    *,
    dtype: DTypeLike,
    chunk: int,
    remat: str = "none",
    attention: Kernel = XLA,
) -> tuple[Float[Array, "B R T"], Float[Array, "B R T"]]:
    """log π of every response token given its prompt and its own past, and the entropy there.

    Args:
        params: the backbone's, in the training layout.
        prompts: computed once for the R rows of each.
        tokens: responses, right-padded.
        is_valid: false at padding, where the result means nothing.
        config: of the backbone.
        dtype: of the activations.
        chunk: tokens of each prompt's row whose logits are held at a time.
        remat: what the backward pass recomputes, see `models.backbone.forward`.
        attention: what computes attention over the rows.

    Returns:
        log-probabilities and entropies, in nats.
    """
    _, num_rows, num_tokens = tokens.shape
    prompt_length = prompts.tokens.shape[1]
    features = None
    if prompts.images is not None:
        features = backbone.encode_images(params, prompts.images, config, dtype=dtype, remat=remat)

    def flat(x):
        return x.reshape(x.shape[0], num_rows * num_tokens, *x.shape[3:])

    offsets = jnp.tile(jnp.arange(num_tokens), num_rows)
    response_positions = prompts.next_position[:, None] + offsets
    x = jnp.concatenate(
        [
            backbone.embed(
                params, prompts.tokens, dtype=dtype, features=features, slots=prompts.slots
            ),
            backbone.embed(params, flat(tokens), dtype=dtype),
        ],
        axis=1,
    )
    positions = jnp.concatenate(
        [prompts.positions, jnp.repeat(response_positions[..., None], 3, -1)], axis=1
    )
    is_token = jnp.concatenate([prompts.is_valid, flat(is_valid)], axis=1)
    hidden = backbone.forward(
        params,
        x,
        positions,
        jnp.where(is_token, 0, -1),
        config,
        tree=Tree(prompt_length, num_rows, num_tokens),
        remat=remat,
        deepstack=backbone.deepstack_at(features, prompts.slots),
        attention=attention,
    )
    # A response's first token is predicted by the prompt's last, every other by the one before.
    last = hidden[:, prompt_length - 1]
    own = hidden[:, prompt_length:].reshape(*tokens.shape, -1)
    first = jnp.broadcast_to(last[:, None, None], own[:, :, :1].shape)
    predicting = jnp.concatenate([first, own[:, :, :-1]], axis=2)
    logp, entropy = token_logprobs(params, flat(predicting), flat(tokens), config, chunk=chunk)
    return logp.reshape(tokens.shape), entropy.reshape(tokens.shape)


def score_packed(
    params: backbone.Params,
    rows: PackedRows,
    config: BackboneConfig,
    *,
    dtype: DTypeLike,
    chunk: int,
    remat: str = "none",
    attention: Kernel = XLA,
) -> Float[Array, "B S"]:
    """log π of the scored tokens of packed rows, in nats; behind them it means nothing.

    The arguments are those of `score_responses`.
    """
    features = None
    if rows.images is not None:
        features = backbone.encode_images(params, rows.images, config, dtype=dtype, remat=remat)
    hidden = backbone.forward(
        params,
        backbone.embed(params, rows.tokens, dtype=dtype, features=features, slots=rows.slots),
        rows.positions,
        rows.segments,
        config,
        tree=Tree(rows.tokens.shape[1], 0, 0),
        remat=remat,
        deepstack=backbone.deepstack_at(features, rows.slots),
        attention=attention,
    )
    places = jnp.maximum(rows.scored, 1)  # no response begins a row
    predicting = jnp.take_along_axis(hidden, places[..., None] - 1, axis=1)
    targets = jnp.take_along_axis(rows.tokens, places, axis=1)
    is_wanted = rows.scored >= 0
    logp, _ = token_logprobs(params, predicting, targets, config, chunk=chunk, is_wanted=is_wanted)
    return logp


def _split_tokens(x: Array, *, chunk: int, padding: int) -> Array:
    """[B, S, ...] to [S / chunk, B, chunk, ...], the last chunk padded with zeros."""
    x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)
