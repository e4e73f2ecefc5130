"""The compiled functions of a rollout batch, and the sizes and sampling of its two decodes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from care_jax.batch import Rollouts, Subgroup
from care_jax.decoding import reflection
from care_jax.decoding.queue import DecodePrograms, DecodeQueue, compile_decoding
from care_jax.decoding.sampler import DecodeOptions, DecodingAttention
from care_jax.decoding.schedule import Sizes
from care_jax.devices import sharding
from care_jax.devices.device_clock import DeviceClock
from care_jax.method import credit
from care_jax.run.run import Run

Decode = Callable[..., Iterator[tuple[list[int], Rollouts]]]


@dataclasses.dataclass(frozen=True)
class RolloutPrograms:
    """The compiled functions of a rollout, see `compile_rollout`."""

    # (params, rng, requests, ...) -> indices of requests with G rollouts of each, in order of
    # completion; see `decoding.queue.DecodeQueue.decode`.
    decode: Decode
    queue: DecodeQueue  # of `decode`
    reflect: Decode  # likewise, one rollout per request, after the request's context
    select: Callable[..., Subgroup]  # (rollouts, scores, rng, index [B]) -> Subgroup


def compile_decoder(
    run: Run,
    *,
    temperature: float,
    top_p: float,
    stops: bool = True,
    attention: DecodingAttention | None = None,
    keeps_routes: bool = False,
) -> DecodePrograms:
    """`compile_decoding` for the run's policy, devices and dtype.

    `attention` None: the device's implementation, without comparing it with XLA.
    """
    if attention is None:
        impl = run.attention(is_decoding=True)
        attention = DecodingAttention(impl, impl)
    options = DecodeOptions(
        config=run.policy.config,
        mesh=run.mesh,
        rules=run.config.decode_sharding_rules,
        dtype=jnp.dtype(run.config.model.compute_dtype),
        closing_tag=run.policy.closing_tag,
        temperature=temperature,
        top_p=top_p,
        attention=attention,
        stops=stops,
        keeps_routes=keeps_routes,
    )
    return compile_decoding(options)


def num_context_tokens(run: Run) -> int:
    """Maximum number of forced tokens of a reflected row.

    Without a tokenizer (programs are only compiled), four bytes of the cue count as one token.
    """
    care, tokenizer = run.config.care, run.policy.tokenizer
    if care.reflect_mode == "resample":
        return 0
    cue = reflection.cue_text(care.cue, care.reflect_mode, seed=run.config.seed)
    if tokenizer is None:
        return care.max_context + math.ceil(len(cue.encode()) / 4)
    return care.max_context + len(tokenizer.encode(cue, add_special_tokens=False) if cue else ())


class Sampling(NamedTuple):
    """How tokens are drawn, see `sampling.sample_token`."""

    temperature: float
    top_p: float


def sampling_of(run: Run) -> tuple[Sampling, Sampling]:
    """How the first decode draws its tokens, and how the reflected one does."""
    rl, care = run.config.rl, run.config.care
    first = Sampling(rl.temperature, rl.top_p)
    temperature, top_p = care.reflect_temperature, care.reflect_top_p
    return first, Sampling(temperature or first.temperature, top_p or first.top_p)


def rollout_sizes(run: Run) -> tuple[Sizes, Sizes]:
    """Sizes of the first decode, and of the reflected one.

    A reflected prompt has one row and needs less memory, so more of them are decoded at a time.
    """
    rl, shards = run.config.rl, sharding.num_shards(run.decode_batch_sharding)
    tries = Sizes(
        num_slots=rl.decode_prompts,
        num_rows=min(rl.decode_rows, rl.num_rollouts),
        num_rollouts=rl.num_rollouts,
        max_tokens=rl.max_response_tokens,
        num_context_tokens=0,
        num_shards=shards,
        period=rl.prompts_per_update,
    )
    repairs = dataclasses.replace(
        tries,
        num_slots=min(rl.decode_prompts * max(tries.num_rows // 2, 1), rl.prompts_per_step),
        num_rows=1,
        num_rollouts=1,
        num_context_tokens=num_context_tokens(run),
    )
    return tries, repairs


def compile_rollout(
    run: Run,
    clock: DeviceClock,
    attention: DecodingAttention | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> RolloutPrograms:
    """The jitted functions of a rollout, compiled once per shape.

    `clock` measures their time. `meanwhile` is work of the host that is called while they run.
    """
    rl, care = run.config.rl, run.config.care
    keeps_routes = bool(run.policy.config.text.num_experts)
    compiled = {
        settings: compile_decoder(
            run, **settings._asdict(), attention=attention, keeps_routes=keeps_routes
        )
        for settings in set(sampling_of(run))
    }
    options: Any = {
        "meanwhile": meanwhile,
        "max_age": rl.max_age,
        "is_offloaded": "rollouts" in run.config.model.offload,
    }
    first, second = (
        DecodeQueue(compiled[settings], run.policy.prompts, sizes, clock, **options)
        for settings, sizes in zip(sampling_of(run), rollout_sizes(run), strict=True)
    )

    def select(rollouts, scores, rng, index):
        rngs = jax.vmap(jax.random.fold_in, (None, 0))(rng, index)
        settings = {key: care[key] for key in ("K", "M", "rule", "anchor_rule", "success")}
        return credit.select_subgroups(rollouts, scores, rngs, **settings)

    return RolloutPrograms(
        decode=first.decode,
        queue=first,
        reflect=second.decode,
        select=jax.jit(select),
    )
