"""The rollouts of the prompts to decode, as they accumulate on the host.

Letters: B slots, G rollouts of a prompt, T tokens of a rollout.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jaxtyping import Int, UInt32

from care_jax.batch import Rollouts
from care_jax.decoding.sampler import DecodeOptions, SampledTokens
from care_jax.decoding.schedule import Scheduler, Sizes
from care_jax.decoding.slots import Slots
from care_jax.devices import distributed, sharding
from care_jax.prompts.builder import TokenizedPrompt

NO_CONTEXT = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to decode."""

    # Of the prompt in the step; folded into the prompt's random key, so that samples depend on
    # neither schedule nor mesh. It also determines the prompt's shard. See `DecodeQueue`.
    index: int
    prompt: TokenizedPrompt
    # Forced tokens at the start of each response; they count towards T.
    context: Int[np.ndarray, " c"] = dataclasses.field(default_factory=lambda: NO_CONTEXT)
    limits: Int[np.ndarray, " G"] | None = None  # maximum tokens of each response; None for T


@dataclasses.dataclass(frozen=True)
class InFlight:
    """What a step leaves to the next one. The next step does not change it, so it can be saved."""

    requests: Sequence[Request]  # of this process, in order
    places: Int[np.ndarray, " n"]  # of these among all requests of the call
    uids: Int[np.ndarray, " n"]  # of these requests
    key_data: UInt32[np.ndarray, "n 2"]  # of the random key of each request's step
    rollouts: Rollouts  # of these requests so far, as numpy; embeddings are sums
    scheduler: Scheduler
    slots: Slots | None  # on the devices, or offloaded to host memory

    def aged(self) -> InFlight:
        """The same, one step later."""
        scheduler, rollouts = copy.deepcopy(self.scheduler), self.rollouts
        scheduler.grow_older()
        is_sampled = rollouts.is_valid & ~rollouts.is_forced
        rollouts = dataclasses.replace(rollouts, age=rollouts.age + is_sampled.astype(np.int8))
        return dataclasses.replace(self, rollouts=rollouts, scheduler=scheduler)


def shapes_of(
    num_requests: int, sizes: Sizes, options: DecodeOptions
) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of the rollouts of some requests, by their fields of `Rollouts`."""
    text = options.config.text
    shape = num_requests, sizes.num_rollouts, sizes.max_tokens
    found = {
        "tokens": (shape, np.int32),
        "logp": (shape, np.float32),
        "age": (shape, np.int8),
        "embedding": ((*shape[:2], text.hidden_size), np.float32),
    }
    if not options.is_drawn_by_softmax:
        found["drawn_logp"] = shape, np.float32
    if options.keeps_routes:
        found["routes"] = (*shape, *text.route_shape), np.int16
    return {name: jax.ShapeDtypeStruct(*pair) for name, pair in found.items()}


class RolloutBuffer:
    """The rollouts of this process's requests as they accumulate (numpy)."""

    def __init__(
        self,
        requests: Sequence[Request],
        uids: Int[np.ndarray, " n"],
        sizes: Sizes,
        options: DecodeOptions,
        in_flight: InFlight | None,
    ):
        self.requests, self.uids = requests, uids
        self._config, self._sharding = options.config, options.batch_sharding
        self._place_of = dict(zip(uids.tolist(), range(len(uids)), strict=True))
        self._num_forced = np.array([len(request.context) for request in requests], int)
        fills = {"tokens": self._config.pad_token_id, "routes": -1}
        self._arrays = {  # by their fields of `Rollouts`; embeddings are sums
            name: np.full(array.shape, fills.get(name, 0), array.dtype)
            for name, array in shapes_of(len(requests), sizes, options).items()
        }
        self._is_sampled = np.zeros(self._arrays["tokens"].shape, bool)
        for rows, request in zip(self._arrays["tokens"], requests, strict=True):
            rows[:, : len(request.context)] = request.context
        if in_flight is not None:
            begun, part = in_flight.rollouts, slice(len(in_flight.requests))
            for name, array in self._arrays.items():
                array[part] = getattr(begun, name)
            self._is_sampled[part] = begun.is_valid & ~begun.is_forced
        self._left = dict.fromkeys(range(len(requests)))  # an ordered set
        self._queued: list[tuple[SampledTokens, Int[np.ndarray, " b"]]] = []
        self._num_collected = 0

    def places(self, uids: Iterable[int]) -> Int[np.ndarray, " n"]:
        """The place of each prompt among the requests; -1 if it is none of them."""
        return np.array([self._place_of.get(uid, -1) for uid in uids], int)

    def enqueue(self, sampled: SampledTokens, uids: Int[np.ndarray, " B"]) -> None:
        """Queues the tokens of a program that may still run; `uids` as `Scheduler.uids`."""
        rows = sharding.local_rows(len(uids), self._sharding)
        self._queued.append((sampled, self.places(uids.tolist())[rows]))

    def store(self) -> None:
        """Waits for the queued tokens and stores them."""
        queued, self._queued = self._queued, []
        for sampled, places in queued:
            sampled = distributed.fetch(sampled)
            found = np.nonzero(sampled.rollout >= 0)
            place = places[found[0]]
            index = sampled.index[found] + self._num_forced[place]
            target = place, sampled.rollout[found], index
            self._is_sampled[target] = True
            for name, drawn in (
                ("tokens", sampled.token),
                ("logp", sampled.logp),
                ("drawn_logp", sampled.drawn_logp),
            ):
                if name in self._arrays:
                    self._arrays[name][target] = drawn[found]
            if "routes" in self._arrays and sampled.routes is not None:
                of_tokens = np.moveaxis(sampled.routes, -1, 2)
                self._arrays["routes"][*target[:2], index - 1] = of_tokens[found]

    def collect(
        self, released: Sequence[tuple[int, int]], scheduler: Scheduler, slots: Slots | None
    ) -> tuple[list[int], Rollouts] | None:
        """Places of the requests that were just chosen for this step, and their rollouts, if any.

        Args:
            released: (uid of the prompt, slot) of the slots that have just become free.
            slots: as `advance` returned them.
        """
        own = [(self._place_of[uid], slot) for uid, slot in released if uid in self._place_of]
        if own:
            assert slots is not None  # they were released
            rows = sharding.local_rows(len(scheduler.uids), self._sharding)
            rationale = distributed.fetch(slots.rationale)
            for place, slot in own:  # a prompt's rollouts may be spread over several slots
                self._arrays["embedding"][place] += rationale[np.searchsorted(rows, slot)]
        chosen = scheduler.chosen[self._num_collected :]
        self._num_collected = len(scheduler.chosen)
        done = sorted(self._place_of[uid] for uid in chosen if uid in self._place_of)
        for place in done:
            del self._left[place]
        return (done, self._rollouts(done)) if done else None

    def left(self) -> tuple[list[int], Rollouts]:
        """The other requests, and their rollouts so far; embeddings are sums."""
        left = list(self._left)
        sums = self._arrays["embedding"][left]
        return left, dataclasses.replace(self._rollouts(left), embedding=sums)

    def _rollouts(self, places: list[int]) -> Rollouts:
        """The rollouts of some requests, each with its context in front."""
        arrays = {name: array[places] for name, array in self._arrays.items()}
        tokens, num_forced = arrays["tokens"], self._num_forced[places][:, None, None]
        is_forced = np.broadcast_to(np.arange(tokens.shape[-1]) < num_forced, tokens.shape)
        is_valid = is_forced | self._is_sampled[places]
        last = np.take_along_axis(tokens, is_valid.sum(-1, keepdims=True) - 1, -1)[..., 0]
        norm = np.linalg.norm(arrays["embedding"], axis=-1, keepdims=True)
        arrays["embedding"] /= np.maximum(norm, 1e-6)
        return Rollouts(
            **arrays,
            is_valid=is_valid,
            is_forced=is_forced,
            is_complete=np.isin(last, self._config.eos_token_ids),
        )
