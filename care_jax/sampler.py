"""Sampling: prefill once per prompt, then one `while_loop` that decodes all of its rows.

The prefix (prompt and image) is stored once per prompt and read by its R rows as one matmul; each
row owns only the cache of what it wrote. A reflected decode starts from the same prefix, with
forced tokens in front of what is sampled.

Letters: B prompts, R rows per prompt, P prompt tokens, T tokens of a row, C forced tokens,
D model, V vocab.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8

from care_jax.batch import Prompts, Rollouts
from care_jax.logprobs import policy_logits
from models import backbone
from models.attention_mask import XLA, AttentionImpl
from models.config import BackboneConfig
from models.decoder import KeyValues
from models.layers import constrain

_BLOCK = 256  # ids searched at a time when sampling


@flax.struct.dataclass
class Prefix:
    """What decoding needs of B prompts.

    Attributes:
        cache: keys and values of the prompt tokens.
        is_valid: false at the prompt's left padding.
        last_hidden: the state that predicts the first response token.
        next_position: the position of the first response token.
    """

    cache: KeyValues
    is_valid: Bool[Array, "B P"]
    last_hidden: Float[Array, "B D"]
    next_position: Int[Array, " B"]


@flax.struct.dataclass
class Forced:
    """Tokens put in front of what is sampled, one row per prompt.

    Attributes:
        tokens: left-padded token ids.
        is_valid: false at padding.
        is_active: rows to decode; the others stay empty.
    """

    tokens: Int[Array, "B C"]
    is_valid: Bool[Array, "B C"]
    is_active: Bool[Array, " B"]


@flax.struct.dataclass
class _State:
    """The loop's state before the token at `slot` is read.

    `tokens`, `logp` and `is_valid` are filled up to and including `slot`.
    """

    slot: Int[Array, ""]
    tokens: Int[Array, "B R T"]
    logp: Float[Array, "B R T"]
    is_valid: Bool[Array, "B R T"]
    is_done: Bool[Array, "B R"]
    is_complete: Bool[Array, "B R"]
    cache: KeyValues
    tag_state: UInt8[Array, "B R"]  # of the automaton that looks for the closing think tag
    rationale: Float[Array, "B R D"]  # sum of the hidden states of the rationale
    rngs: PRNGKeyArray  # one per prompt


def prefill(
    params: backbone.Params,
    prompts: Prompts,
    config: BackboneConfig,
    *,
    dtype: DTypeLike,
    attention: AttentionImpl = XLA,
) -> Prefix:
    """Runs prompts and images once; `params` are in the decode layout."""
    features = None
    if prompts.images is not None:
        features = backbone.encode_images(
            params, prompts.images, config, dtype=dtype, attention=attention
        )
    x = backbone.embed(params, prompts.tokens, dtype=dtype, features=features, slots=prompts.slots)
    hidden, cache = backbone.prefill(
        params,
        x,
        prompts.positions,
        prompts.is_valid,
        config,
        features=features,
        slots=prompts.slots,
        attention=attention,
    )
    return Prefix(cache, prompts.is_valid, hidden[:, -1], prompts.next_position)


def decode(
    params: backbone.Params,
    prefix: Prefix,
    rngs: PRNGKeyArray,
    closing_tag: UInt8[Array, "states V"],
    config: BackboneConfig,
    *,
    num_rows: int,
    max_tokens: int,
    temperature: float,
    top_p: float,
    dtype: DTypeLike,
    forced: Forced | None = None,
    stops: bool = True,
) -> Rollouts:
    """Samples `num_rows` responses to each prompt, until one of the EOS ids or `max_tokens`.

    Args:
        params: in the decode layout.
        prefix: of the B prompts.
        rngs: a key per prompt [B], so that what it draws does not depend on who is beside it.
        closing_tag: automaton of the closing think tag, see `spans.closing_tag_table`. The
            rationale embedding is taken over every token up to the one that closes the span (over
            all of them if none does), the last sampled one excepted, whose state is never computed.
        config: of the backbone.
        num_rows: R; 1 where tokens are forced.
        max_tokens: T, the budget of a row in tokens; its forced ones count, their padding does not.
        temperature: 0 takes the most likely token.
        top_p: the least set of most likely tokens with at least this probability is kept.
        dtype: of activations and cache.
        forced: tokens in front of the sampled ones.
        stops: whether EOS ends a row; false for measuring speed at equal lengths.

    Returns:
        the rows, forced tokens first and no gap between them and the sampled ones. `logp` is the
        model's own at temperature 1, what the trainer's forward computes.
    """
    num_prompts, model_dim = prefix.last_hidden.shape
    rows = (num_prompts, num_rows)
    num_forced = 0 if forced is None else forced.tokens.shape[1]
    if num_forced >= max_tokens:
        raise ValueError(
            f"{num_forced} forced tokens leave nothing of max_tokens {max_tokens} to sample; "
            "set care.max_context lower or rl.max_response_tokens higher"
        )
    # A row of few forced tokens samples more, so that padding takes none of its budget.
    num_slots = max_tokens + num_forced
    slots = jnp.arange(num_slots)
    forced_length = jnp.zeros(rows, jnp.int32)  # real forced tokens of each row
    slot_is_used = jnp.ones((*rows, num_slots), bool)  # false at the forced tokens' padding
    cache = backbone.init_cache(config, num_prompts, num_rows, num_slots, dtype)
    hidden = jnp.broadcast_to(prefix.last_hidden[:, None], (*rows, model_dim))
    choose = functools.partial(sample_token, temperature=temperature, top_p=top_p)
    tokens = jnp.zeros((*rows, num_slots), jnp.int32)
    is_done = jnp.zeros(rows, bool)

    def extend(tokens, slot, cache):
        """Reads tokens [B, R, n] at slots slot..slot+n-1; returns their hidden states."""
        n = tokens.shape[-1]
        return backbone.extend(
            params,
            backbone.embed(params, tokens, dtype=dtype),
            tuple(jax.lax.dynamic_slice_in_dim(x, slot, n, axis=2) for x in rotary),
            slot,
            prefix.cache,
            prefix.is_valid,
            cache,
            slot_is_used,
            config,
        )

    if forced is not None:
        forced_length = forced.is_valid.sum(-1, dtype=jnp.int32)[:, None]
        slot_is_used = slot_is_used.at[:, 0, :num_forced].set(forced.is_valid)
    skipped = num_forced - forced_length  # slots in front of a row's first token
    last_slot = skipped + max_tokens - 1
    positions = prefix.next_position[:, None, None] + slots - skipped[..., None]
    rotary = backbone.text_rotary(jnp.maximum(positions, 0), config)
    if forced is not None:
        is_done = ~forced.is_active[:, None]
    if num_forced:
        forced_hidden, cache = extend(forced.tokens[:, None], 0, cache)
        hidden = forced_hidden[:, :, -1]
        tokens = tokens.at[:, 0, :num_forced].set(forced.tokens)

    def sample(state: _State, hidden, slot) -> _State:
        """Fills `slot` of every row that is not done from the hidden state before it."""
        rngs, keys = jnp.moveaxis(jax.vmap(jax.random.split)(state.rngs), 1, 0)
        logits = constrain(policy_logits(params, hidden, config), "batch", None, "vocab")
        token = jax.vmap(choose)(logits, keys)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), token[..., None], -1)[..., 0]
        is_new = ~state.is_done
        is_end = jnp.isin(token, jnp.array(config.eos_token_ids))
        is_eos = is_end & is_new if stops else jnp.zeros_like(is_new)
        return state.replace(
            slot=slot,
            tokens=state.tokens.at[:, :, slot].set(jnp.where(is_new, token, config.pad_token_id)),
            logp=state.logp.at[:, :, slot].set(jnp.where(is_new, logp, 0.0)),
            is_valid=state.is_valid.at[:, :, slot].set(is_new),
            is_done=state.is_done | is_eos | (slot >= last_slot),
            is_complete=state.is_complete | is_eos,
            rngs=rngs,
        )

    def step(state: _State) -> _State:
        """Reads the token at `slot`, then samples the one after it."""
        token = state.tokens[:, :, state.slot]
        hidden, cache = extend(token[..., None], state.slot, state.cache)
        hidden = hidden[:, :, 0]
        is_rationale = (state.tag_state < closing_tag.shape[0] - 1) & ~state.is_done
        state = state.replace(
            cache=cache,
            tag_state=closing_tag[state.tag_state, token],
            rationale=state.rationale + jnp.where(is_rationale[..., None], hidden, 0.0),
        )
        return sample(state, hidden, state.slot + 1)

    state = _State(
        slot=jnp.int32(num_forced),
        tokens=tokens,
        logp=jnp.zeros((*rows, num_slots)),
        is_valid=jnp.zeros((*rows, num_slots), bool),
        is_done=is_done,
        is_complete=jnp.zeros(rows, bool),
        cache=cache,
        tag_state=jnp.zeros(rows, jnp.uint8),
        rationale=jnp.zeros((*rows, model_dim)),
        rngs=rngs,
    )
    state = sample(state, hidden, state.slot)
    state = jax.lax.while_loop(lambda state: ~state.is_done.all(), step, state)

    # Close the gap that the forced tokens' left padding leaves in front of a row.
    is_forced = jnp.zeros_like(state.is_valid)
    if forced is not None:
        is_forced = is_forced.at[:, 0, :num_forced].set(forced.is_valid & forced.is_active[:, None])
    source = jnp.arange(max_tokens) + skipped[..., None]

    def close_gap(x):
        return jnp.take_along_axis(x, source, -1)

    is_forced = close_gap(is_forced)
    is_valid = close_gap(state.is_valid) | is_forced
    norm = jnp.linalg.norm(state.rationale, axis=-1, keepdims=True)
    return Rollouts(
        tokens=jnp.where(is_valid, close_gap(state.tokens), config.pad_token_id),
        is_valid=is_valid,
        is_forced=is_forced,
        logp=close_gap(state.logp),
        embedding=state.rationale / jnp.maximum(norm, 1e-6),
        is_complete=state.is_complete,
    )


def sample_token(
    logits: Float[Array, "*B V"], rng: PRNGKeyArray, *, temperature: float, top_p: float
) -> Int[Array, "*B"]:
    """One token id per row of logits."""
    if temperature == 0:
        return logits.argmax(-1).astype(jnp.int32)
    logits = logits / temperature
    if top_p < 1:
        logits = jnp.where(is_nucleus(logits, top_p=top_p), logits, -jnp.inf)
    return _sample_inverse(logits, rng)


def _sample_inverse(logits: Float[Array, "*B V"], rng: PRNGKeyArray) -> Int[Array, "*B"]:
    """Samples softmax(logits) by one uniform number per row, first a block of ids, then one in it.

    The usual Gumbel noise takes a random number and two logarithms for each of V ids, which on a
    CPU is a fifth of the time of decoding.
    """
    padding = -logits.shape[-1] % _BLOCK
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    weights = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, padding)])
    blocks = weights.reshape(*weights.shape[:-1], -1, _BLOCK)
    upto_block = jnp.cumsum(blocks.sum(-1), -1)
    u = jax.random.uniform(rng, logits.shape[:-1]) * upto_block[..., -1]
    block = jnp.argmax(upto_block > u[..., None], -1)[..., None]
    before = jnp.take_along_axis(upto_block - blocks.sum(-1), block, -1)
    inside = jnp.take_along_axis(blocks, block[..., None], -2)[..., 0, :]
    # Rounding may leave u beyond the block's sum: its last possible id is taken then, never one
    # whose weight is 0.
    upto = jnp.where(inside > 0, jnp.cumsum(inside, -1), -jnp.inf)
    is_beyond = upto > (u[..., None] - before)
    last = jnp.argmax(jnp.where(inside > 0, jnp.arange(_BLOCK), -1), -1)
    place = jnp.where(is_beyond.any(-1), jnp.argmax(is_beyond, -1), last)
    return (block[..., 0] * _BLOCK + place).astype(jnp.int32)


def is_nucleus(logits: Float[Array, "*B V"], *, top_p: float) -> Bool[Array, "*B V"]:
    """The least set of most likely tokens whose probability reaches `top_p`; never empty."""
    descending = -jnp.sort(-jax.nn.softmax(logits), axis=-1)
    before = jnp.cumsum(descending, -1) - descending
    num_kept = (before < top_p).sum(-1, keepdims=True)
    threshold = jnp.take_along_axis(descending, num_kept - 1, -1)
    return jax.nn.softmax(logits) >= threshold
