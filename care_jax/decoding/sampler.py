"""Continuous decoding with fixed shapes: no row waits for the longest rollout.

Each of B prompts occupies a slot: one entry of the batch axis, with R rows in flight, each decoding
one rollout. A row whose response ends starts its prompt's next rollout in the same step. A slot
whose rollouts are all done gets another prompt between two calls of `advance`. `slots` defines the
state, `queue` is the host loop.

Every random number is a function of prompt, rollout and token index alone, so samples do not depend
on the schedule.

Letters: B slots, R rows of a slot, G rollouts of a prompt, P prompt tokens, S positions of a row's
ring, L steps of a call, N new prompts, D model, V vocab.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt8, UInt32

from care_jax.batch import Prompts
from care_jax.decoding.sampling import is_drawn_by_softmax, sample_token
from care_jax.decoding.schedule import NUM_STEPS, Refill
from care_jax.decoding.slots import Prefix, Slots, pad_left, take_in_shard
from care_jax.devices import sharding
from models import backbone
from models.attention.cached import keys_axis, stored_keys
from models.attention.packed import XLA, AttentionImpl
from models.config import BackboneConfig
from models.decoder import KeyValues
from models.layers import constrain


@dataclasses.dataclass(frozen=True)
class DecodingAttention:
    """The implementations of prefill and of decode steps."""

    prefill: AttentionImpl
    steps: AttentionImpl


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
    """The static options of decoding."""

    config: BackboneConfig
    mesh: Mesh
    rules: sharding.Rules  # of decoding
    dtype: DTypeLike  # of activations and cache
    # Automaton of the closing think tag, see `spans.closing_tag_table`. The rationale is every
    # token up to the one that closes the span (every token if none does), except the last sampled
    # token, whose hidden state is never used.
    closing_tag: UInt8[Any, "states V"]
    temperature: float  # see `sample_token`, as top_p
    top_p: float
    attention: DecodingAttention
    stops: bool = True  # EOS ends a rollout; false to measure speed at given lengths
    keeps_routes: bool = False  # of a sparse decoder, see `Rollouts.routes`

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of prompts and slots; a prompt is decoded in a slot of its shard."""
        return sharding.batch_sharding(self.mesh, self.rules)

    @property
    def num_shards(self) -> int:
        return sharding.num_shards(self.batch_sharding)

    @property
    def is_drawn_by_softmax(self) -> bool:
        return is_drawn_by_softmax(self.temperature, self.top_p)


@flax.struct.dataclass
class SampledTokens:
    """Tokens sampled by one program, by row or by rollout."""

    token: Int[Array, "B R *L"]
    logp: Float[Array, "B R *L"]  # nats at temperature 1, as the trainer's forward computes
    rollout: Int[Array, "B R *L"]  # of its prompt; -1 if no token was sampled
    index: Int[Array, "B R *L"]  # in the rollout, from 0
    drawn_logp: Float[Array, "B R *L"] | None  # as drawn, see `sample_token`
    # Experts that read the token before, int16 by decoder layer; None for the first token, whose
    # predecessor is the prompt's, and without `DecodeOptions.keeps_routes`.
    routes: Int[Array, "B R layers K *L"] | None = None


def prefill(
    params: backbone.Params,
    prompts: Prompts,
    config: BackboneConfig,
    *,
    dtype: DTypeLike,
    attention: AttentionImpl = XLA,
) -> tuple[Float[Array, "N D"], KeyValues]:
    """Runs prompts and images through the model once; `params` are in the decode layout.

    Returns:
        the hidden states that predict the first response tokens, and the KV cache.
    """
    inputs = prompts.tokens, prompts.images, prompts.feature_index
    options: Any = {"attention": attention}
    x, features = backbone.embed_with_images(params, *inputs, config, dtype=dtype, **options)
    options |= {"features": features, "feature_index": prompts.feature_index}
    inputs = x, prompts.positions, prompts.is_valid
    hidden, cache = backbone.prefill(params, *inputs, config, **options)
    return hidden[:, -1], cache


def admit(
    params: backbone.Params,
    slots: Slots,
    prompts: Prompts,
    key_data: UInt32[Array, "N K"],
    indices: Int[Array, " N"],
    budget: Int[Array, "N G"],
    source: Int[Array, " B"],
    options: DecodeOptions,
) -> tuple[Slots, SampledTokens]:
    """Prefills prompts, assigns their slots and samples the first token of each of their rollouts.

    Args:
        params: in the decode layout.
        prompts: N prompts, some of which may be padding; P is at most the slots'.
        key_data: of the random key of each prompt's step, into which its index is folded.
        budget: maximum number of tokens that each rollout samples, at least 1.
        source: for each slot, index of its new prompt among the N / num_shards of its shard; -1 for
            none.

    Returns:
        the slots, and the first tokens by slot, [B, G, 1]; `rollout` is -1 on the other slots.
    """
    config, num_shards = options.config, options.num_shards
    hidden, cache = prefill(
        params, prompts, config, dtype=options.dtype, attention=options.attention.prefill
    )
    logits = constrain(backbone.policy_logits(params, hidden, config), "batch", "vocab")[:, None]
    logits = jnp.broadcast_to(logits, (*budget.shape, logits.shape[-1]))
    rngs = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(key_data), indices)
    rngs = jax.random.key_data(rngs)
    rollout = jnp.broadcast_to(jnp.arange(budget.shape[1]), budget.shape)
    first = _sample(logits, rngs, rollout, jnp.zeros_like(rollout), options)

    num_tokens = slots.prefix.is_valid.shape[1]
    values = [pad_left(x, 2, num_tokens) for x in cache.values]
    keys = [stored_keys(x.mT, options.attention.steps) for x in cache.keys]
    keys = [pad_left(x, keys_axis(options.attention.steps), num_tokens) for x in keys]
    prefix = Prefix(
        cache=KeyValues(keys, values),
        is_valid=pad_left(prompts.is_valid, 1, num_tokens),
        next_position=prompts.next_position,
        rngs=rngs,
        budget=budget,
        first=first.token,
    )
    end = jnp.where(source >= 0, budget.shape[1], slots.end_rollout)
    slots = occupy(slots, prefix, source, jnp.zeros_like(source), end, num_shards)

    def by_slot(x: Array) -> Array:
        none = jnp.full((len(source), *x.shape[1:]), -1, x.dtype)
        return take_in_shard(x, none, source, num_shards)[..., None]

    return slots, jax.tree.map(by_slot, first)


@flax.struct.dataclass
class _Call:
    """What the steps of one call of `advance` carry."""

    step: Int[Array, ""]
    is_due: Bool[Array, ""]  # the free slots are worth refilling
    lost: tuple[Array, Array]  # as in `Refill`
    slots: Slots
    log: SampledTokens


def advance(
    params: backbone.Params, slots: Slots, refill: Refill, options: DecodeOptions
) -> tuple[Slots, SampledTokens, tuple[Array, ...]]:
    """Decodes until it is worth refilling the free slots, or for L = NUM_STEPS steps.

    `refill` says when; it is replicated. `params` are in the decode layout.

    Returns:
        the slots, the sampled tokens, and for the host: whether each slot is free, its
        `next_rollout`, `lost` as in `Refill`, and the number of steps so far.
    """
    config, closing_tag = options.config, jnp.asarray(options.closing_tag)
    num_rollouts = slots.prefix.first.shape[1]

    def is_end(token):
        is_eos = jnp.isin(token, jnp.array(config.eos_token_ids))
        return is_eos if options.stops else jnp.zeros_like(is_eos)

    def step(call: _Call) -> _Call:
        slots = call.slots
        prefix, index = slots.prefix, slots.num_read + 1
        hidden, cache, routes = _read(params, slots, options)
        is_active = slots.rollout < num_rollouts
        limit = _of_rollout(prefix.budget, slots.rollout)
        # A rollout may end with its first token.
        is_sampled = is_active & ~is_end(slots.token) & (index < limit)
        logits = constrain(backbone.policy_logits(params, hidden, config), "batch", None, "vocab")
        sampled = _sample(logits, prefix.rngs, slots.rollout, index, options)
        rollout = jnp.where(is_sampled, slots.rollout, -1)
        entry = dataclasses.replace(sampled, rollout=rollout, routes=routes)
        log = jax.tree.map(lambda all, x: all.at[..., call.step].set(x), call.log, entry)

        is_rationale = (slots.tag_state < closing_tag.shape[0] - 1) & is_sampled
        running = slots.running + jnp.where(is_rationale[..., None], hidden, 0.0)
        is_last = is_active & (~is_sampled | is_end(sampled.token) | (index + 1 >= limit))
        ends_rollout = is_last[..., None] & (slots.rollout[..., None] == jnp.arange(num_rollouts))
        ended = jnp.einsum(
            "BRG,BRD->BGD", ends_rollout.astype(jnp.float32), running, precision="highest"
        )
        # Rows that end start the next rollouts, in row order.
        upcoming = slots.next_rollout[:, None] + jnp.cumsum(is_last, 1) - is_last
        upcoming = jnp.where(upcoming < slots.end_rollout[:, None], upcoming, num_rollouts)
        slots = dataclasses.replace(
            slots,
            next_rollout=slots.next_rollout + is_last.sum(1),
            rationale=slots.rationale + ended,
            rollout=jnp.where(is_last, upcoming, slots.rollout),
            token=jnp.where(is_last, _of_rollout(prefix.first, upcoming), sampled.token),
            num_read=jnp.where(is_active & ~is_last, index, 0),
            tag_state=jnp.where(is_last, 0, closing_tag[slots.tag_state, slots.token]),
            running=jnp.where(is_last[..., None], 0.0, running),
            cache=cache,
            num_steps=slots.num_steps + 1,
        )
        unstarted = jnp.maximum(slots.end_rollout - slots.next_rollout, 0)
        # Replicated at once, so that the shards exchange no more than this.
        state = constrain(jnp.stack([is_free(slots), unstarted]), None, None)
        state = state[0] > 0, state[1]
        lost = jax.tree.map(jnp.add, call.lost, refill.num_idle(*state))
        return _Call(call.step + 1, refill.is_due(*state, lost), lost, slots, log)

    def is_free(slots: Slots) -> Bool[Array, " B"]:
        return (slots.rollout == num_rollouts).all(1)

    def should_continue(call: _Call) -> Bool[Array, ""]:
        return (call.step < NUM_STEPS) & ~call.is_due

    shape = (*slots.rollout.shape, NUM_STEPS)
    ids = jnp.zeros(shape, jnp.int32)
    routes = None
    if options.keeps_routes:
        routes = jnp.zeros((*shape[:2], *config.text.route_shape, NUM_STEPS), jnp.int16)
    log = SampledTokens(
        token=ids,
        logp=jnp.zeros(shape),
        rollout=ids - 1,
        index=ids,
        drawn_logp=None if options.is_drawn_by_softmax else jnp.zeros(shape),
        routes=routes,
    )
    start = _Call(jnp.int32(0), jnp.bool(False), (refill.lost, jnp.int32(0)), slots, log)
    end = jax.lax.while_loop(should_continue, step, start)
    slots = end.slots
    return slots, end.log, (is_free(slots), slots.next_rollout, end.lost[0], slots.num_steps)


def _read(
    params: backbone.Params, slots: Slots, options: DecodeOptions
) -> tuple[Float[Array, "B R D"], KeyValues, Array | None]:
    """The hidden state of every row's last token, the cache with it, and its routes."""
    positions = slots.prefix.next_position[:, None] + slots.num_read
    on_prefix, on_suffix = visible(slots)
    hidden, cache, routes = backbone.extend(
        params,
        backbone.embed(params, slots.token[..., None], dtype=options.dtype),
        backbone.text_rotary(positions[..., None], options.config),
        slots.num_steps % slots.cache.values[0].shape[-2],
        slots.prefix.cache,
        on_prefix,
        slots.cache,
        on_suffix[:, :, None],
        options.config,
        attention=options.attention.steps,
    )
    if not options.keeps_routes:
        return hidden[:, :, 0], cache, None
    assert routes is not None  # the decoder is sparse
    return hidden[:, :, 0], cache, routes[:, :, 0].astype(jnp.int16)


def visible(slots: Slots) -> tuple[Bool[Array, "B P"], Bool[Array, "B R S"]]:
    """The positions of prefixes and rings that the rows' last tokens attend to.

    Idle rows attend to nothing, so that kernels read nothing for them.
    """
    size = slots.cache.values[0].shape[-2]
    is_active = slots.rollout < slots.prefix.first.shape[1]
    steps_ago = (slots.num_steps - jnp.arange(size)) % size
    on_suffix = is_active[..., None] & (steps_ago <= slots.num_read[..., None])
    return slots.prefix.is_valid & is_active.any(1, keepdims=True), on_suffix


def occupy(
    slots: Slots,
    prefix: Prefix,
    source: Int[Array, " B"],
    begin: Int[Array, " B"],
    end: Int[Array, " B"],
    num_shards: int,
) -> Slots:
    """Assigns prompts, and a range of their rollouts, to slots.

    Args:
        prefix: of new prompts, or `slots.prefix` if free slots take over rollouts of others.
        source: for each slot, index in its shard of `prefix` of its new prompt; -1 for none.
        begin, end: range of rollouts of each slot; `begin` is ignored where `source` is -1.
    """
    num_rows, num_rollouts = slots.rollout.shape[1], slots.prefix.first.shape[1]
    take = functools.partial(take_in_shard, source=source, num_shards=num_shards)
    prefix, is_new = jax.tree.map(take, prefix, slots.prefix), source >= 0
    taken = begin[:, None] + jnp.arange(num_rows)

    def if_new(new: Any, old: Array) -> Array:
        return jnp.where(jnp.expand_dims(is_new, range(1, old.ndim)), new, old).astype(old.dtype)

    return dataclasses.replace(
        slots,
        prefix=prefix,
        next_rollout=if_new(begin + num_rows, slots.next_rollout),
        end_rollout=end,
        rationale=if_new(0, slots.rationale),
        rollout=if_new(jnp.where(taken < end[:, None], taken, num_rollouts), slots.rollout),
        token=if_new(_of_rollout(prefix.first, taken), slots.token),
        num_read=if_new(0, slots.num_read),
        tag_state=if_new(0, slots.tag_state),
        running=if_new(0, slots.running),
    )


def _of_rollout(values: Int[Array, "B G"], rollout: Int[Array, "B R"]) -> Int[Array, "B R"]:
    """The value of each row's rollout; arbitrary for idle rows."""
    return jnp.take_along_axis(values, jnp.minimum(rollout, values.shape[1] - 1), 1)


def _sample(
    logits: Float[Array, "B R V"],
    rngs: UInt32[Array, "B K"],
    rollout: Int[Array, "B R"],
    index: Int[Array, "B R"],
    options: DecodeOptions,
) -> SampledTokens:
    """The token at this index of each rollout; `rngs` are data of the prompts' keys."""

    def uniform(rng, rollout, index):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(rng, rollout), index))

    token, logp, drawn_logp = sample_token(
        logits,
        jax.vmap(jax.vmap(uniform, (None, 0, 0)))(jax.random.wrap_key_data(rngs), rollout, index),
        temperature=options.temperature,
        top_p=options.top_p,
        vocab_shards=sharding.num_shards_of("vocab", options.rules, options.mesh),
    )
    return SampledTokens(token, logp, rollout, index, drawn_logp)
