"""The compiled functions of the continuous decoder.

Each is compiled once per shape that occurs.

Letters: B slots, R rows of a slot, G rollouts of a prompt, P prompt tokens, N prompts of a prefill,
S positions of a row's ring.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import UInt8

from care_jax.decoding import sampler
from care_jax.decoding.sampler import Progress, Sampled
from care_jax.decoding.schedule import NUM_STEPS
from care_jax.decoding.slots import (
    Slots,
    empty_slots,
    keep_slots,
    pad_left,
    resize_ring,
    slot_axes,
)
from care_jax.devices import sharding
from models.attention.mask import AttentionImpl
from models.config import BackboneConfig


@dataclasses.dataclass(frozen=True)
class DecodingAttention:
    """The implementations of prefill and of decode steps."""

    prefill: AttentionImpl
    steps: AttentionImpl


@dataclasses.dataclass(frozen=True)
class DecodePrograms:
    """The compiled functions of decoding, see `compile_decoding`.

    Attributes:
        config: of the backbone.
        batch_sharding: of prompts and slots.
        empty: (sizes, P, S) -> Slots.
        admit: (params, slots, prompts, rng, places [N], budget [N, G], chosen [B]) ->
            (Slots, Sampled), prefill included.
        share: (slots, source [B], begin [B], end [B]) -> Slots.
        advance: (params, slots, num_wanted) -> (Slots, Sampled, Progress).
        resize: (array of the rows' cache, clock, axis of its positions, S) -> the resized array.
        pad: (array of the prefix's cache, axis of its tokens, P) -> the padded array.
        keep: (array of the slots, indices of the slots to keep) -> the smaller array.
    """

    config: BackboneConfig
    batch_sharding: NamedSharding
    empty: Callable[..., Slots]
    admit: Callable[..., tuple[Slots, Sampled]]
    share: Callable[..., Slots]
    advance: Callable[..., tuple[Slots, Sampled, Progress]]
    resize: Callable[..., jax.Array]
    pad: Callable[..., jax.Array]
    keep: Callable[..., jax.Array]


def compile_decoding(
    config: BackboneConfig,
    mesh: Mesh,
    rules: sharding.Rules,
    *,
    dtype: DTypeLike,
    closing_tag: UInt8[Any, "states V"],
    temperature: float,
    top_p: float,
    stops: bool = True,
    attention: DecodingAttention,
) -> DecodePrograms:
    """The jitted functions of decoding.

    Args:
        config: of the backbone.
        mesh: the devices.
        rules: sharding rules of decoding.
        dtype: of activations and cache.
        closing_tag: automaton of the closing think tag, see `spans.closing_tag_table`.
        temperature, top_p: of sampling; greedy at temperature 0.
        stops: end-of-sequence tokens end a rollout.
        attention: of prefill and decode steps.
    """
    rows, closing_tag = sharding.batch_sharding(mesh, rules), jnp.asarray(closing_tag)
    num_shards = sharding.num_shards(rows)
    vocab_shards = sharding.num_shards_of("vocab", rules, mesh)
    choice: dict[str, Any] = dict(temperature=temperature, top_p=top_p, vocab_shards=vocab_shards)

    def laid_out(slots: Slots) -> Slots:
        """Gives the slots the same shardings after every program."""
        shardings = sharding.param_shardings(slot_axes(slots), slots, rules, mesh)
        return jax.lax.with_sharding_constraint(slots, shardings)

    def empty(sizes, num_prompt_tokens, num_positions):
        return laid_out(
            empty_slots(
                config,
                sizes=sizes,
                num_prompt_tokens=num_prompt_tokens,
                num_positions=num_positions,
                dtype=dtype,
            )
        )

    def admit(params, slots, prompts, rng, places, budget, chosen):
        prefix = sampler.prefill(params, prompts, config, dtype=dtype, attention=attention.prefill)
        rngs = jax.vmap(jax.random.fold_in, (None, 0))(rng, places)
        slots, first = sampler.admit(
            params, slots, prefix, rngs, budget, chosen, config, num_shards=num_shards, **choice
        )
        return laid_out(slots), jax.lax.with_sharding_constraint(first, rows)

    def share(slots, source, begin, end):
        return laid_out(sampler.share(slots, source, begin, end, num_shards=num_shards))

    def advance(params, slots, num_wanted):
        slots, sampled, progress = sampler.advance(
            params,
            slots,
            closing_tag,
            num_wanted,
            config,
            num_steps=NUM_STEPS,
            dtype=dtype,
            stops=stops,
            attention=attention.steps,
            **choice,
        )
        sampled = jax.lax.with_sharding_constraint(sampled, rows)
        progress = jax.lax.with_sharding_constraint(progress, sharding.replicated(mesh))
        return laid_out(slots), sampled, progress

    placed = functools.partial(sharding.placed, rules=rules, mesh=mesh)
    return DecodePrograms(
        config=config,
        batch_sharding=rows,
        empty=jax.jit(placed(empty), static_argnums=(0, 1, 2)),
        admit=jax.jit(placed(admit), donate_argnums=1),
        share=jax.jit(share, donate_argnums=0),
        advance=jax.jit(placed(advance), donate_argnums=1),
        resize=jax.jit(resize_ring, static_argnums=(2, 3)),
        pad=jax.jit(pad_left, static_argnums=(1, 2)),
        keep=jax.jit(functools.partial(keep_slots, num_shards=num_shards)),
    )
