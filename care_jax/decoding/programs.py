"""The compiled functions of the continuous decoder, each compiled once per shape that occurs.

Letters: B slots, G rollouts of a prompt, P prompt tokens, N prompts of a prefill.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax

from care_jax.decoding import sampler
from care_jax.decoding.sampler import DecodeOptions, SampledTokens
from care_jax.decoding.slots import (
    Slots,
    empty_slots,
    keep_slots,
    pad_left,
    slot_axes,
)
from care_jax.devices import sharding


@dataclasses.dataclass(frozen=True)
class DecodePrograms:
    """The compiled functions of decoding, see `compile_decoding`.

    Attributes:
        options: what they are compiled for.
        empty: (sizes, P) -> Slots.
        admit: (params, slots, prompts, rng, indices [N], budget [N, G], chosen [B]) ->
            (Slots, SampledTokens), prefill included.
        share: (slots, source [B], begin [B], end [B]) -> Slots.
        advance: (params, slots, num_wanted) -> (Slots, SampledTokens, progress).
        pad: (array of the prefix, axis of its tokens, size P) -> the padded array.
        keep: (array of the slots, indices of the slots to keep) -> the smaller array.
    """

    options: DecodeOptions
    empty: Callable[..., Slots]
    admit: Callable[..., tuple[Slots, SampledTokens]]
    share: Callable[..., Slots]
    advance: Callable[..., tuple[Slots, SampledTokens, tuple[jax.Array, ...]]]
    pad: Callable[..., jax.Array]
    keep: Callable[..., jax.Array]


def compile_decoding(options: DecodeOptions) -> DecodePrograms:
    """The jitted functions of decoding."""
    mesh, rules, num_shards = options.mesh, options.rules, options.num_shards
    placed = functools.partial(sharding.placed, rules=rules, mesh=mesh)

    def laid_out(slots: Slots) -> Slots:
        """Gives the slots the same shardings after every program."""
        shardings = sharding.param_shardings(slot_axes(slots), slots, rules, mesh)
        return jax.lax.with_sharding_constraint(slots, shardings)

    def by_slot(sampled: SampledTokens) -> SampledTokens:
        return jax.lax.with_sharding_constraint(sampled, options.batch_sharding)

    def empty(sizes, num_prompt_tokens):
        return laid_out(empty_slots(options.config, sizes, num_prompt_tokens, options.dtype))

    def admit(params, slots, prompts, rng, indices, budget, chosen):
        arguments = params, slots, prompts, rng, indices, budget, chosen
        slots, first = sampler.admit(*arguments, options)
        return laid_out(slots), by_slot(first)

    def share(slots, source, begin, end):
        return laid_out(sampler.share(slots, source, begin, end, num_shards=num_shards))

    def advance(params, slots, num_wanted):
        slots, sampled, progress = sampler.advance(params, slots, num_wanted, options)
        progress = jax.lax.with_sharding_constraint(progress, sharding.replicated(mesh))
        return laid_out(slots), by_slot(sampled), progress

    return DecodePrograms(
        options=options,
        empty=jax.jit(placed(empty), static_argnums=(0, 1)),
        admit=jax.jit(placed(admit), donate_argnums=1),
        share=jax.jit(share, donate_argnums=0),
        advance=jax.jit(placed(advance), donate_argnums=1),
        pad=jax.jit(pad_left, static_argnames=("axis", "size")),
        keep=jax.jit(functools.partial(keep_slots, num_shards=num_shards)),
    )
