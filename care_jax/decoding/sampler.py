"""Continuous decoding: fixed shapes, no waiting for the longest rollout.

Each of B prompts occupies a slot: one entry of the batch axis, with R rows in flight, each decoding
one rollout. A row whose response ends starts its prompt's next rollout in the same step. A prompt
whose rollouts are all done leaves its slot to another prompt between two calls of `advance`. The
state is in `slots`, the host's side is `queue`.

Every draw is a function of prompt, rollout and token index alone, so samples do not depend on the
schedule.

Letters: B slots, R rows of a slot, G rollouts of a prompt, P prompt tokens, S positions of the ring,
L steps of a call, N new prompts, D model, V vocab.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from care_jax.batch import Prompts
from care_jax.decoding.sampling import log_probability, sample_token
from care_jax.decoding.slots import Prefix, Slots, pad_left, take_in_shard
from models import backbone
from models.attention.mask import XLA, AttentionImpl
from models.config import BackboneConfig
from models.decoder import KeyValues
from models.layers import constrain


@flax.struct.dataclass
class Sampled:
    """Tokens that a program sampled.

    Attributes:
        tokens: their ids.
        logp: log-probability (nats) at temperature 1, the quantity the trainer's forward computes.
        rollout: the rollout of its prompt that a token belongs to; -1 if none was sampled.
        index: of the token in its rollout, from 0.
    """

    tokens: Int[Array, "B R L"]
    logp: Float[Array, "B R L"]
    rollout: Int[Array, "B R L"]
    index: Int[Array, "B R L"]


@flax.struct.dataclass
class Progress:
    """State of the slots after a call of `advance`.

    Attributes:
        is_free: no row of the slot is decoding.
        next_rollout: of the slot.
        longest: largest `num_read` of any row.
        clock: of the slots.
    """

    is_free: Bool[Array, " B"]
    next_rollout: Int[Array, " B"]
    longest: Int[Array, ""]
    clock: Int[Array, ""]


def prefill(
    params: backbone.Params,
    prompts: Prompts,
    config: BackboneConfig,
    *,
    dtype: DTypeLike,
    attention: AttentionImpl = XLA,
) -> Prefix:
    """Runs prompts and images through the model once; `params` are in the decode layout."""
    x, features = backbone.embed_with_images(
        params,
        prompts.tokens,
        prompts.images,
        prompts.slots,
        config,
        dtype=dtype,
        attention=attention,
    )
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


def admit(
    params: backbone.Params,
    slots: Slots,
    prefix: Prefix,
    rngs: Key[Array, " B"],
    budget: Int[Array, "N G"],
    chosen: Int[Array, " B"],
    config: BackboneConfig,
    *,
    num_shards: int,
    temperature: float,
    top_p: float,
    vocab_shards: int = 1,
) -> tuple[Slots, Sampled]:
    """Gives prompts their slots and samples the first token of each of their rollouts.

    Args:
        params: in the decode layout.
        slots: some of them free.
        prefix: of N prompts, not all of which need to take a slot; P at most that of the slots.
        rngs: a key per prompt [N], so that its draws do not depend on the rest of the batch.
        budget: most tokens that each of their rollouts may sample, at least 1.
        chosen: per slot, index among its shard's N / num_shards prompts of the one that takes it;
            -1 for none.
        config: of the backbone.
        num_shards: of the batch. A prompt takes a slot on its shard.
        temperature, top_p, vocab_shards: see `sample_token`.

    Returns:
        the slots, and the first tokens by slot, [B, G, 1]; `rollout` is -1 on the other slots.
    """
    num_rollouts = budget.shape[1]
    logits = backbone.policy_logits(params, prefix.last_hidden, config)
    logits = constrain(logits, "batch", "vocab")[:, None]
    logits = jnp.broadcast_to(logits, (*budget.shape, logits.shape[-1]))
    u = _draws(rngs, jnp.broadcast_to(jnp.arange(num_rollouts), budget.shape), 0)
    token = sample_token(logits, u, temperature=temperature, top_p=top_p, vocab_shards=vocab_shards)
    logp = log_probability(logits, token)

    num_tokens = slots.prefix.is_valid.shape[1]
    prefix = dataclasses.replace(
        prefix,
        cache=KeyValues(
            [pad_left(x, 3, num_tokens) for x in prefix.cache.keys],
            [pad_left(x, 2, num_tokens) for x in prefix.cache.values],
        ),
        is_valid=pad_left(prefix.is_valid, 1, num_tokens),
    )
    take = functools.partial(take_in_shard, chosen=chosen, num_shards=num_shards)
    is_new = chosen >= 0
    first = take(token, slots.first)
    begin, end = jnp.zeros_like(chosen), jnp.full_like(chosen, num_rollouts)
    slots = dataclasses.replace(
        slots,
        prefix=jax.tree.map(take, prefix, slots.prefix),
        rngs=take(rngs, slots.rngs),
        budget=take(budget, slots.budget),
        first=first,
        end_rollout=jnp.where(is_new, end, slots.end_rollout),
    )
    slots = _begin(slots, is_new, begin)
    is_sampled = is_new[:, None] & jnp.ones_like(first, bool)
    sampled = Sampled(
        tokens=first,
        logp=take(logp, jnp.zeros(first.shape)),
        rollout=jnp.where(is_sampled, jnp.arange(num_rollouts), -1),
        index=jnp.zeros_like(first),
    )
    return slots, jax.tree.map(lambda x: x[..., None], sampled)


def share(
    slots: Slots,
    source: Int[Array, " B"],
    begin: Int[Array, " B"],
    end: Int[Array, " B"],
    *,
    num_shards: int,
) -> Slots:
    """Gives free slots some rollouts of prompts on other slots; see `schedule.Shares`."""
    take = functools.partial(take_in_shard, chosen=source, num_shards=num_shards)
    slots = dataclasses.replace(
        slots,
        prefix=jax.tree.map(take, slots.prefix, slots.prefix),
        rngs=take(slots.rngs, slots.rngs),
        budget=take(slots.budget, slots.budget),
        first=take(slots.first, slots.first),
        end_rollout=end,
    )
    return _begin(slots, source >= 0, begin)


def advance(
    params: backbone.Params,
    slots: Slots,
    closing_tag: UInt8[Array, "states V"],
    num_wanted: Int[Array, ""],
    config: BackboneConfig,
    *,
    num_steps: int,
    temperature: float,
    top_p: float,
    vocab_shards: int = 1,
    dtype: DTypeLike,
    stops: bool = True,
    attention: AttentionImpl = XLA,
) -> tuple[Slots, Sampled, Progress]:
    """Decodes until all slots are free, `num_wanted` slots are free, or `num_steps` are done.

    Args:
        params: in the decode layout.
        slots: as `admit`, `share` or this function returned them. No row may outgrow the ring:
            either every `num_read` is at most S - num_steps, or S is at least every budget.
        closing_tag: automaton of the closing think tag, see `spans.closing_tag_table`. The
            rationale is every token up to the one that closes the span (all of them if none does),
            except the last sampled token, whose hidden state is never used.
        num_wanted: number of free slots at which the host has something to do.
        config: of the backbone.
        num_steps: L, most decode steps of this call.
        temperature, top_p, vocab_shards: see `sample_token`.
        dtype: of activations and cache.
        stops: whether EOS ends a rollout; false for measuring speed at given lengths.
        attention: the implementation, see `cached`.
    """
    num_rollouts, num_positions = slots.first.shape[1], slots.cache.keys[0].shape[-1]
    slots = jnp.arange(num_positions)

    def is_end(token):
        is_eos = jnp.isin(token, jnp.array(config.eos_token_ids))
        return is_eos if stops else jnp.zeros_like(is_eos)

    def read(slots: Slots) -> tuple[Float[Array, "B R D"], KeyValues]:
        """The hidden state of every row's last token, and the cache with that token added."""
        positions = slots.prefix.next_position[:, None] + slots.num_read
        rotary = backbone.text_rotary(positions[..., None], config)
        age = (slots.clock - slots) % num_positions
        hidden, cache = backbone.extend(
            params,
            backbone.embed(params, slots.token[..., None], dtype=dtype),
            rotary,
            slots.clock % num_positions,
            slots.prefix.cache,
            slots.prefix.is_valid,
            slots.cache,
            (age <= slots.num_read[..., None])[:, :, None],
            config,
            attention=attention,
        )
        return hidden[:, :, 0], cache

    def step(carry: tuple[Array, Slots, Sampled]) -> tuple[Array, Slots, Sampled]:
        i, slots, log = carry
        hidden, cache = read(slots)
        index = slots.num_read + 1
        is_active = slots.rollout < num_rollouts
        limit = _rollouts_of(slots.budget, slots.rollout)
        # A rollout may end with its first token.
        is_sampled = is_active & ~is_end(slots.token) & (index < limit)
        logits = backbone.policy_logits(params, hidden, config)
        logits = constrain(logits, "batch", None, "vocab")
        u = _draws(slots.rngs, slots.rollout, index)
        token = sample_token(
            logits, u, temperature=temperature, top_p=top_p, vocab_shards=vocab_shards
        )
        entry = Sampled(
            tokens=token,
            logp=log_probability(logits, token),
            rollout=jnp.where(is_sampled, slots.rollout, -1),
            index=index,
        )
        log = jax.tree.map(lambda all, x: all.at[..., i].set(x), log, entry)

        is_rationale = (slots.tag_state < closing_tag.shape[0] - 1) & is_sampled
        running = slots.running + jnp.where(is_rationale[..., None], hidden, 0.0)
        is_last = is_active & (~is_sampled | is_end(token) | (index + 1 >= limit))
        ends_rollout = is_last[..., None] & (slots.rollout[..., None] == jnp.arange(num_rollouts))
        ended = jnp.einsum(
            "BRG,BRD->BGD", ends_rollout.astype(jnp.float32), running, precision="highest"
        )
        # Rows that end take the next rollouts, in row order.
        upcoming = slots.next_rollout[:, None] + jnp.cumsum(is_last, 1) - is_last
        upcoming = jnp.where(upcoming < slots.end_rollout[:, None], upcoming, num_rollouts)
        slots = dataclasses.replace(
            slots,
            next_rollout=slots.next_rollout + is_last.sum(1),
            rationale=slots.rationale + ended,
            rollout=jnp.where(is_last, upcoming, slots.rollout),
            token=jnp.where(is_last, _rollouts_of(slots.first, upcoming), token),
            num_read=jnp.where(is_active & ~is_last, index, 0),
            tag_state=jnp.where(is_last, 0, closing_tag[slots.tag_state, slots.token]),
            running=jnp.where(is_last[..., None], 0.0, running),
            cache=cache,
            clock=slots.clock + 1,
        )
        return i + 1, slots, log

    def is_free(slots: Slots) -> Bool[Array, " B"]:
        return (slots.rollout == num_rollouts).all(1)

    def should_continue(carry) -> Bool[Array, ""]:
        i, slots, _ = carry
        num_free = is_free(slots).sum()
        return (i < num_steps) & (num_free < num_wanted) & (num_free < slots.rollout.shape[0])

    shape = (*slots.rollout.shape, num_steps)
    ids = jnp.zeros(shape, jnp.int32)
    log = Sampled(tokens=ids, logp=jnp.zeros(shape), rollout=ids - 1, index=ids)
    _, slots, log = jax.lax.while_loop(should_continue, step, (jnp.int32(0), slots, log))
    return (
        slots,
        log,
        Progress(is_free(slots), slots.next_rollout, slots.num_read.max(), slots.clock),
    )


def _begin(slots: Slots, is_new: Bool[Array, " B"], begin: Int[Array, " B"]) -> Slots:
    """Starts the rows of new slots on rollouts `begin`, `begin` + 1, ..."""
    num_rows, num_rollouts = slots.rollout.shape[1], slots.first.shape[1]
    taken = begin[:, None] + jnp.arange(num_rows)
    rollout = jnp.where(taken < slots.end_rollout[:, None], taken, num_rollouts)

    def if_new(new: Any, old: Array) -> Array:
        return jnp.where(jnp.expand_dims(is_new, range(1, old.ndim)), new, old).astype(old.dtype)

    return dataclasses.replace(
        slots,
        next_rollout=if_new(begin + num_rows, slots.next_rollout),
        rationale=if_new(0, slots.rationale),
        rollout=if_new(rollout, slots.rollout),
        token=if_new(_rollouts_of(slots.first, taken), slots.token),
        num_read=if_new(0, slots.num_read),
        tag_state=if_new(0, slots.tag_state),
        running=if_new(0, slots.running),
    )


def _rollouts_of(values: Int[Array, "B G"], rollout: Int[Array, "B R"]) -> Int[Array, "B R"]:
    """The value of each row's rollout; arbitrary for idle rows."""
    return jnp.take_along_axis(values, jnp.minimum(rollout, values.shape[1] - 1), 1)


def _draws(rngs: Key[Array, " B"], rollout: Int[Array, "B R"], index: Any) -> Float[Array, "B R"]:
    """A uniform number in [0, 1) for each prompt, rollout and token index."""
    index = jnp.broadcast_to(index, rollout.shape)

    def draw(rng, rollout, index):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(rng, rollout), index))

    return jax.vmap(jax.vmap(draw, (None, 0, 0)))(rngs, rollout, index)
