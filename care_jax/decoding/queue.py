"""Decodes many prompts in few slots: the compiled programs, and the host loop that calls them.

`schedule` admits prompts to slots, `sampler` decodes all their rollouts. Finished prompts are
yielded while the devices decode the others, so that verification overlaps with decoding. Between
two calls of `advance` the host reads which slots are free and pads the next prompts.

A prompt is decoded on a batch shard of the process that has it, so neither prompts nor responses
cross the network. Every process has the sizes of all waiting prompts and makes the same decisions.
They do not depend on the host's speed: the same weights and prompts give the same calls.

A step may leave prompts to the next one (`InFlight`). Their rollouts go on under the next step's
weights with the KV cache that they have, as in PipelineRL (arXiv 2509.19128). Each token is
recorded with the probability that it was drawn with.

Letters: B slots, G rollouts of a prompt, T tokens of a rollout, P prompt tokens, N prompts of a
prefill.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PRNGKeyArray, Shaped, UInt32

from care_jax.batch import Rollouts
from care_jax.decoding import sampler
from care_jax.decoding.rollout_buffer import InFlight, Request, RolloutBuffer
from care_jax.decoding.sampler import DecodeOptions, SampledTokens
from care_jax.decoding.schedule import Scheduler, Sizes, WaitingPrompt, sizes_of, widened
from care_jax.decoding.slots import (
    Slots,
    abstract_slots,
    empty_slots,
    idle_where,
    keep_slots,
    pad_left,
    slot_axes,
)
from care_jax.devices import distributed, placement, sharding
from care_jax.devices.device_clock import DeviceClock
from care_jax.prompts.builder import PromptBuilder
from models import backbone
from models.attention.cached import keys_axis


@dataclasses.dataclass(frozen=True)
class DecodePrograms:
    """The compiled functions of decoding, see `compile_decoding`."""

    options: DecodeOptions  # what they are compiled for
    empty: Callable[..., Slots]  # (sizes, P)
    # (params, slots, prompts, key_data [N], indices [N], budget [N, G], source [B]), with prefill
    admit: Callable[..., tuple[Slots, SampledTokens]]
    share: Callable[..., Slots]  # (slots, source [B], begin [B], end [B])
    # (params, slots, refill) -> slots, sampled tokens, progress
    advance: Callable[..., tuple[Slots, SampledTokens, tuple[jax.Array, ...]]]
    pad: Callable[..., jax.Array]  # (array of the prefix, axis of its tokens, size P)
    keep: Callable[..., jax.Array]  # (array of the slots, indices of the slots to keep)
    idle: Callable[..., Slots]  # (slots, whether each is new [B]) -> slots, idle where new


def compile_decoding(options: DecodeOptions) -> DecodePrograms:
    """The jitted functions of decoding."""
    mesh, rules, num_shards = options.mesh, options.rules, options.num_shards
    placed = functools.partial(placement.placed, rules=rules, mesh=mesh)

    def laid_out(slots: Slots) -> Slots:
        """Constrains the slots to the same shardings after every program."""
        shardings = sharding.param_shardings(slot_axes(slots), slots, rules, mesh)
        return jax.lax.with_sharding_constraint(slots, shardings)

    def sharded(sampled: SampledTokens) -> SampledTokens:
        return jax.lax.with_sharding_constraint(sampled, options.batch_sharding)

    def empty(sizes, num_prompt_tokens):
        attention = options.attention.steps
        slots = empty_slots(options.config, sizes, num_prompt_tokens, options.dtype, attention)
        return laid_out(slots)

    def admit(params, slots, prompts, key_data, indices, budget, source):
        admitted = prompts, key_data, indices, budget, source
        slots, first = sampler.admit(params, slots, *admitted, options)
        return laid_out(slots), sharded(first)

    def share(slots, source, begin, end):
        return laid_out(sampler.occupy(slots, slots.prefix, source, begin, end, num_shards))

    def advance(params, slots, refill):
        slots, sampled, progress = sampler.advance(params, slots, refill, options)
        progress = jax.lax.with_sharding_constraint(progress, sharding.replicated(mesh))
        return laid_out(slots), sharded(sampled), progress

    return DecodePrograms(
        options=options,
        empty=jax.jit(placed(empty), static_argnums=(0, 1)),
        admit=jax.jit(placed(admit), donate_argnums=1),
        share=jax.jit(share, donate_argnums=0),
        advance=jax.jit(placed(advance), donate_argnums=1),
        pad=jax.jit(pad_left, static_argnames=("axis", "size")),
        keep=jax.jit(functools.partial(keep_slots, num_shards=num_shards)),
        idle=jax.jit(lambda slots, is_new: laid_out(idle_where(slots, is_new)), donate_argnums=0),
    )


class DecodeQueue:
    """Decodes prompts with the sizes and settings of one configuration.

    `prompts` pads the policy's prompts, `clock` measures the device time of the programs, and
    `num_steps` counts the decode steps so far; a step advances all rows. `in_flight` is what the
    last call of `decode` left to the next one, None if nothing.

    A prompt has an `index` in its step, which gives its shard and its random key; a `uid`, the
    index plus a multiple of `period`, that no other prompt in flight has; and on its process a
    `place` among the requests of a call.

    Args:
        meanwhile: called whenever the devices have begun to decode; does other work of the host.
        max_age: see `Scheduler`.
        is_offloaded: the slots of `in_flight` are kept in host memory.
    """

    def __init__(
        self,
        programs: DecodePrograms,
        prompts: PromptBuilder,
        sizes: Sizes,
        clock: DeviceClock,
        *,
        meanwhile: Callable[[], None] = lambda: None,
        max_age: int = 0,
        is_offloaded: bool = False,
    ):
        self.programs, self.prompts, self.sizes, self.clock = programs, prompts, sizes, clock
        self.num_steps, self.in_flight, self.meanwhile = 0, None, meanwhile
        self._max_age, self._is_offloaded = max_age, is_offloaded

    def decode(
        self,
        params: backbone.Params,
        rng: PRNGKeyArray,
        requests: Sequence[Request],
        *,
        in_flight: InFlight | None = None,
        num_wanted: int | None = None,
    ) -> Iterator[tuple[list[int], Rollouts]]:
        """Decodes prompts and yields them in the order in which they finish.

        Each process passes its requests, with indices of its shards. `params` are in the decode
        layout; `rng` is the key of all draws.

        Args:
            in_flight: of an earlier call; its requests come before `requests`.
            num_wanted: ends once so many prompts of all processes are whole, see `Scheduler`; the
                others are then in `self.in_flight`.

        Yields:
            places of n requests among those of the call, the ones in flight first, and their
            rollouts [n, G, ...] in numpy.

        Raises:
            distributed.Preempted: the run was preempted.
        """
        scheduler, slots = Scheduler(self.sizes, self._max_age), None
        self.in_flight = None
        key_data = np.tile(np.asarray(jax.random.key_data(rng)), (len(requests), 1))
        if in_flight is not None:
            scheduler = copy.deepcopy(in_flight.scheduler)
            key_data = np.concatenate([in_flight.key_data, key_data])
        waiting, uids = _gather_waiting(requests, scheduler)
        scheduler.begin(waiting, num_wanted)
        if in_flight is not None:
            requests = [*in_flight.requests, *requests]
            uids = np.concatenate([in_flight.uids, uids])
            slots = self._restored(in_flight.slots, scheduler)
        buffer = RolloutBuffer(requests, uids, self.sizes, self.programs.options, in_flight)
        before = num_steps = 0 if slots is None else int(slots.num_steps.addressable_data(0))
        finished = buffer.collect([], scheduler, slots)
        while not scheduler.is_over:
            if distributed.is_preempted():
                raise distributed.Preempted
            while (admission := scheduler.admit()) is not None:
                slots, first = self._admit(params, buffer, key_data, *admission, slots)
                self.clock.watch(first)
                buffer.enqueue(first, scheduler.uids)
            if (shares := scheduler.share()) is not None:
                slots = self.programs.share(slots, *map(self._put, shares))
            assert slots is not None  # the first prompts are admitted
            while (kept := scheduler.halve()) is not None:
                slots = self._keep(slots, kept, is_freed=True)
            slots, sampled, progress = self.programs.advance(params, slots, scheduler.refill)
            self.clock.watch(progress)
            buffer.enqueue(sampled, scheduler.uids)
            self.meanwhile()
            if finished is not None:
                yield finished  # the devices are decoding meanwhile
            buffer.store()
            *progress, num_steps = (np.asarray(x.addressable_data(0)) for x in progress)
            released = scheduler.release(*progress)
            finished = buffer.collect(released, scheduler, slots)
        self.num_steps += int(num_steps) - before
        if scheduler.has_prompts:
            self.in_flight = self._left_over(buffer, key_data, scheduler, slots)
        del slots
        if finished is not None:
            yield finished

    def _left_over(
        self,
        buffer: RolloutBuffer,
        key_data: UInt32[np.ndarray, "n 2"],
        scheduler: Scheduler,
        slots: Slots | None,
    ) -> InFlight:
        """What the step leaves to the next, with as few slots as hold it."""
        if slots is not None and (kept := scheduler.compact()) is not None:
            slots = self._keep(slots, kept, is_freed=True)
        slots = self.put_aside(slots)
        left, rollouts = buffer.left()
        requests, uids = [buffer.requests[i] for i in left], buffer.uids[left]
        left = np.array(left, int)
        return InFlight(requests, left, uids, key_data[left], rollouts, scheduler, slots)

    def put_aside(self, slots: Slots | None) -> Slots | None:
        """The slots where they are kept between steps, see `is_offloaded`."""
        if slots is None or not self._is_offloaded:
            return slots
        return jax.device_put(slots, sharding.on_host(sharding.of(slots)))

    def slots_like(self, num_slots: int, num_prompt_tokens: int) -> Slots:
        """Shapes and shardings of so many slots, of prompts of this length."""
        options, sizes = self.programs.options, dataclasses.replace(self.sizes, num_slots=num_slots)
        where = options.attention.steps, options.rules, options.mesh
        return abstract_slots(options.config, sizes, num_prompt_tokens, options.dtype, *where)

    def _restored(self, slots: Slots | None, scheduler: Scheduler) -> Slots | None:
        """A copy of the slots on the devices, as many as before."""
        if slots is None:
            return None
        kept = scheduler.widen()
        may_alias = kept is not None  # `_keep` copies
        placed: Slots = jax.tree.map(
            lambda x: jax.device_put(x, x.sharding.with_memory_kind("device"), may_alias=may_alias),
            slots,
        )
        if kept is None:
            return placed
        placed = dataclasses.replace(placed, num_steps=jnp.copy(placed.num_steps))  # not by `_keep`
        placed = self._keep(placed, np.maximum(kept, 0), is_freed=False)
        return self.programs.idle(placed, self._put(kept < 0))

    def _put(self, array: Shaped[np.ndarray, " B"]) -> jax.Array:
        """Puts one number per slot, known to all processes, on the devices."""
        batch_sharding = self.programs.options.batch_sharding
        rows = sharding.local_rows(len(array), batch_sharding)
        return sharding.put_batch(array[rows], batch_sharding)

    def _admit(
        self,
        params: backbone.Params,
        buffer: RolloutBuffer,
        key_data: UInt32[np.ndarray, "n 2"],
        waiting: Sequence[WaitingPrompt | None],
        source: Int[np.ndarray, " B"],
        slots: Slots | None,
    ) -> tuple[Slots, SampledTokens]:
        """Prefills the admitted prompts and assigns their slots."""
        sizes, batch_sharding = self.sizes, self.programs.options.batch_sharding
        padding = Request(0, self.prompts.empty_prompt)
        local = [waiting[row] for row in sharding.local_rows(sizes.num_new, batch_sharding)]
        places = buffer.places(-1 if prompt is None else prompt.uid for prompt in local)
        admitted = [padding if place < 0 else buffer.requests[place] for place in places]
        tokenized, contexts = [r.prompt for r in admitted], [r.context for r in admitted]
        prompts = self.prompts.batch(
            tokenized,
            sizes_of(waiting),
            contexts=contexts,
            num_context_tokens=sizes.num_context_tokens,
        )
        budget = np.full((len(admitted), sizes.num_rollouts), sizes.max_tokens, np.int32)
        for row, request in zip(budget, admitted, strict=True):
            row[:] = (row if request.limits is None else request.limits) - len(request.context)
        largest = self.prompts.buckets[-1][0] + sizes.num_context_tokens
        before = 0 if slots is None else slots.prefix.is_valid.shape[1]
        num_tokens = widened(before, prompts.tokens.shape[1], largest)
        if slots is None:
            slots = self.programs.empty(sizes, num_tokens)
        elif num_tokens > before:
            slots = self._widen(slots, num_tokens)
        indices = np.array([request.index for request in admitted], np.int32)
        own_keys = np.pad(key_data, ((0, 1), (0, 0)))[places]  # padding, place -1: the added row
        arrays = sharding.put_batch((prompts, own_keys, indices, budget), batch_sharding)
        return self.programs.admit(params, slots, *arrays, self._put(source))

    def _widen(self, slots: Slots, num_tokens: int) -> Slots:
        """Pads the prefix cache to `num_tokens` prompt tokens."""
        prefix, is_valid = slots.prefix, [slots.prefix.is_valid]
        keys = keys_axis(self.programs.options.attention.steps)
        for arrays, axis in ((prefix.cache.keys, keys), (prefix.cache.values, -2), (is_valid, 1)):
            _change(arrays, functools.partial(self.programs.pad, axis=axis, size=num_tokens))
        return dataclasses.replace(slots, prefix=dataclasses.replace(prefix, is_valid=is_valid[0]))

    def _keep(self, slots: Slots, kept: Int[np.ndarray, " kept"], *, is_freed: bool) -> Slots:
        """Keeps some of the slots, or repeats some; see `Scheduler.halve` and `Scheduler.widen`.

        `is_freed`: the arrays of `slots` are deleted.
        """
        num_steps, arrays = slots.num_steps, dataclasses.replace(slots, num_steps=None)
        leaves, structure = jax.tree.flatten(arrays)
        placed = self._put(kept)
        _change(leaves, lambda x: self.programs.keep(x, placed), is_freed=is_freed)
        return dataclasses.replace(jax.tree.unflatten(structure, leaves), num_steps=num_steps)


def _change(
    arrays: list[jax.Array], function: Callable[[jax.Array], jax.Array], *, is_freed: bool = True
) -> None:
    """Replaces each array by the program's result, in the same sharding.

    One array at a time, each deleted after it (`is_freed`), so that no second copy of the whole
    cache exists.
    """
    for i, array in enumerate(arrays):
        arrays[i] = jax.device_put(function(array), array.sharding)
        if is_freed:
            array.delete()


def _gather_waiting(
    requests: Sequence[Request], scheduler: Scheduler
) -> tuple[list[WaitingPrompt], Int[np.ndarray, " n"]]:
    """The prompts of all processes, and the uids of this process's."""
    first = scheduler.next_uid
    uids = np.array([first + request.index for request in requests], int)
    sizes = [(len(r.prompt.tokens), len(r.prompt.patches)) for r in requests]
    rows = [(n, int(uid), k) for uid, (n, k) in zip(uids, sizes, strict=True)]
    gathered = [row for part in distributed.gather_json(rows) for row in part]
    return [WaitingPrompt(*row) for row in gathered], uids
