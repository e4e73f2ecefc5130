"""The rollouts of the prompts to decode, as they accumulate on the host.

Letters: B slots, G rollouts of a prompt, T tokens of a rollout.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence

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
        shape = len(requests), sizes.num_rollouts, sizes.max_tokens
        self._tokens = np.full(shape, self._config.pad_token_id, np.int32)
        self._logp = np.zeros(shape, np.float32)
        self._drawn_logp = None if options.is_drawn_by_softmax else np.zeros(shape, np.float32)
        self._age = np.zeros(shape, np.int8)
        self._routes = None
        if options.keeps_routes:
            self._routes = np.full((*shape, *self._config.text.route_shape), -1, np.int16)
        self._is_sampled = np.zeros(shape, bool)
        self._rationale = np.zeros((*shape[:2], self._config.text.hidden_size), np.float32)
        for rows, request in zip(self._tokens, requests, strict=True):
            rows[:, : len(request.context)] = request.context
        if in_flight is not None:
            begun, part = in_flight.rollouts, slice(len(in_flight.requests))
            assert begun.age is not None  # `_rollouts` gives it
            self._tokens[part], self._logp[part] = begun.tokens, begun.logp
            self._age[part], self._rationale[part] = begun.age, begun.embedding
            self._is_sampled[part] = begun.is_valid & ~begun.is_forced
            if self._drawn_logp is not None:
                self._drawn_logp[part] = begun.drawn_logp
            if self._routes is not None:
                assert begun.routes is not None  # likewise
                self._routes[part] = begun.routes
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
            self._tokens[target], self._logp[target] = sampled.token[found], sampled.logp[found]
            self._is_sampled[target] = True
            if self._drawn_logp is not None:
                self._drawn_logp[target] = sampled.drawn_logp[found]
            if self._routes is not None and sampled.routes is not None:
                of_tokens = np.moveaxis(sampled.routes, -1, 2)
                self._routes[*target[:2], index - 1] = of_tokens[found]

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
                self._rationale[place] += rationale[np.searchsorted(rows, slot)]
        chosen = scheduler.chosen[self._num_collected :]
        self._num_collected = len(scheduler.chosen)
        done = sorted(self._place_of[uid] for uid in chosen if uid in self._place_of)
        for place in done:
            del self._left[place]
        return (done, self._rollouts(done)) if done else None

    def left(self) -> tuple[list[int], Rollouts]:
        """The other requests, and their rollouts so far; embeddings are sums."""
        left = list(self._left)
        return left, dataclasses.replace(self._rollouts(left), embedding=self._rationale[left])

    def _rollouts(self, places: list[int]) -> Rollouts:
        """The rollouts of some requests, each with its context in front."""
        tokens, num_forced = self._tokens[places], self._num_forced[places][:, None, None]
        is_forced = np.broadcast_to(np.arange(tokens.shape[-1]) < num_forced, tokens.shape)
        is_valid = is_forced | self._is_sampled[places]
        last = np.take_along_axis(tokens, is_valid.sum(-1, keepdims=True) - 1, -1)[..., 0]
        rationale = self._rationale[places]
        norm = np.linalg.norm(rationale, axis=-1, keepdims=True)
        return Rollouts(
            tokens=tokens,
            is_valid=is_valid,
            is_forced=is_forced,
            logp=self._logp[places],
            embedding=rationale / np.maximum(norm, 1e-6),
            is_complete=np.isin(last, self._config.eos_token_ids),
            drawn_logp=None if self._drawn_logp is None else self._drawn_logp[places],
            age=self._age[places],
            routes=None if self._routes is None else self._routes[places],
        )
