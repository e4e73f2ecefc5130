"""The decoding state of `sampler`: prompts in slots, rows, and the KV caches of both.

The KV cache of a prompt (image tokens included) is stored once and read by its R rows in one
matmul. The KV cache of a row is a ring: at global step t every row writes position t mod S, so no
scatter is needed. For a row with n earlier tokens in its cache, position j is valid if
(t - j) mod S <= n. Keys are rotated by token position before they are written.

Letters: B slots, R rows of a slot, G rollouts of a prompt, P prompt tokens, S positions of a row's
ring (at least the maximum tokens of a rollout), D model.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt8, UInt32

from care_jax.decoding.schedule import Sizes
from care_jax.devices import sharding
from care_jax.devices.sharding import Rules
from models import backbone
from models.attention.cached import stored_keys, whole_blocks
from models.attention.packed import XLA, AttentionImpl
from models.config import BackboneConfig
from models.decoder import PREFIX_AXES, SUFFIX_AXES, KeyValues


@flax.struct.dataclass
class Prefix:
    """The prompts of B slots."""

    cache: KeyValues  # of the prompt tokens
    is_valid: Bool[Array, "B P"]  # false at the prompt's left padding
    next_position: Int[Array, " B"]  # the position of the first response token
    rngs: UInt32[Array, "B K"]  # data of a random key per prompt
    budget: Int[Array, "B G"]  # maximum number of tokens that each rollout samples
    first: Int[Array, "B G"]  # each rollout's first token, sampled when the prompt is admitted


@flax.struct.dataclass
class Slots:
    """The decoding state: prompts in slots, and their rows."""

    prefix: Prefix
    # The next rollout to start, until `end_rollout` ends the slot's range of rollouts. The prompt's
    # other rollouts may be in other slots.
    next_rollout: Int[Array, " B"]
    end_rollout: Int[Array, " B"]
    rationale: Float[Array, "B G D"]  # sum of a rationale's hidden states; 0 until it ends
    rollout: Int[Array, "B R"]  # the rollout in each row; G if the row is idle
    token: Int[Array, "B R"]  # the row's last token, the input of the next step
    num_read: Int[Array, "B R"]  # tokens of the rollout in the row's cache
    tag_state: UInt8[Array, "B R"]  # of the automaton that detects the closing think tag
    running: Float[Array, "B R D"]  # sum of the current rationale's hidden states so far
    cache: KeyValues  # of the rows
    num_steps: Int[Array, ""]  # so far, t


def empty_slots(
    config: BackboneConfig,
    sizes: Sizes,
    num_prompt_tokens: int,
    dtype: DTypeLike,
    attention: AttentionImpl = XLA,
) -> Slots:
    """Slots without prompts."""
    text, B, R, G = config.text, sizes.num_slots, sizes.num_rows, sizes.num_rollouts
    P, D = whole_blocks(num_prompt_tokens), text.hidden_size
    values = jnp.zeros((B, text.num_kv_heads, P, text.head_dim), dtype)
    return Slots(
        prefix=Prefix(
            cache=KeyValues(
                [stored_keys(values, attention)] * text.num_layers, [values] * text.num_layers
            ),
            is_valid=jnp.zeros((B, P), bool),
            next_position=jnp.zeros(B, jnp.int32),
            rngs=jnp.tile(jax.random.key_data(jax.random.key(0)), (B, 1)),
            budget=jnp.zeros((B, G), jnp.int32),
            first=jnp.zeros((B, G), jnp.int32),
        ),
        next_rollout=jnp.zeros(B, jnp.int32),
        end_rollout=jnp.zeros(B, jnp.int32),
        rationale=jnp.zeros((B, G, D)),
        rollout=jnp.full((B, R), G, jnp.int32),
        token=jnp.zeros((B, R), jnp.int32),
        num_read=jnp.zeros((B, R), jnp.int32),
        tag_state=jnp.zeros((B, R), jnp.uint8),
        running=jnp.zeros((B, R, D)),
        cache=backbone.init_cache(config, B, R, whole_blocks(sizes.max_tokens), dtype, attention),
        num_steps=jnp.int32(0),
    )


def slot_axes(slots: Slots) -> Slots:
    """The tree of `slots` with a tuple of logical axis names at every leaf."""
    axes = jax.tree.map(lambda x: ("batch",) + (None,) * (x.ndim - 1) if x.ndim else (), slots)
    prefix_cache = jax.tree.map(lambda _: PREFIX_AXES, slots.prefix.cache)
    return dataclasses.replace(
        axes,
        cache=jax.tree.map(lambda _: SUFFIX_AXES, slots.cache),
        prefix=dataclasses.replace(axes.prefix, cache=prefix_cache),
    )


def abstract_slots(
    config: BackboneConfig,
    sizes: Sizes,
    num_prompt_tokens: int,
    dtype: DTypeLike,
    attention: AttentionImpl,
    rules: Rules,
    mesh: Mesh,
) -> Slots:
    """Shapes and shardings of `empty_slots`."""
    empty = jax.eval_shape(lambda: empty_slots(config, sizes, num_prompt_tokens, dtype, attention))
    shardings = sharding.param_shardings(slot_axes(empty), empty, rules, mesh)
    return sharding.abstract(empty, shardings)


def idle_where(slots: Slots, is_new: Bool[Array, " B"]) -> Slots:
    """Makes slots idle, whatever they hold."""
    rollout = jnp.where(is_new[:, None], slots.prefix.first.shape[1], slots.rollout)
    end = jnp.where(is_new, 0, slots.end_rollout)
    return dataclasses.replace(slots, rollout=rollout, end_rollout=end)


def pad_left(x: Array, axis: int, size: int) -> Array:
    """Pads an array of a prefix on the left to `size` tokens."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (size - x.shape[axis], 0)
    return jnp.pad(x, widths)


def keep_slots(x: Array, kept: Int[Array, " half"], num_shards: int) -> Array:
    """Selects slots of each shard from an array of the slots; see `schedule.Scheduler.halve`."""
    shards = x.reshape(num_shards, -1, *x.shape[1:])
    found = jax.vmap(lambda x, i: x[i])(shards, kept.reshape(num_shards, -1))
    return found.reshape(-1, *x.shape[1:])


def take_in_shard(new: Array, old: Array, source: Int[Array, " B"], num_shards: int) -> Array:
    """Row b is row source[b] of b's shard of `new`, or row b of `old` if source[b] is negative."""
    found = keep_slots(new, jnp.maximum(source, 0), num_shards)
    return jnp.where(jnp.expand_dims(source >= 0, range(1, old.ndim)), found, old)
