"""Decodes many prompts on few seats: the host's side of continuous decoding.

Prompts take seats a few at a time (`schedule`), and all their rollouts are decoded (`sampler`).
Finished prompts are yielded while the devices decode the others, so verifying takes no device
time. Between two calls of `advance` the host reads which seats are free and pads the prompts that
take them.

A prompt is decoded on the batch shard that trains on it, so neither prompts nor responses cross the
network. Every process knows all waiting prompts and makes the same decisions. Nothing depends on
how long the host takes: the same weights and prompts give the same calls.

Letters: B seats, R rows of a seat, G rollouts of a prompt, T tokens of a rollout, N prompts of a
prefill, P prompt tokens, S slots of a row's ring. `sampler` explains seats, rows and rings.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int, PRNGKeyArray

from care_jax.batch import Rollouts
from care_jax.decoding.sampler import Progress, Sampled, Seats
from care_jax.decoding.schedule import Line, Newcomers, Sizes, Waiting
from care_jax.devices import distributed, sharding
from care_jax.devices.device_clock import DeviceClock
from care_jax.prompts.builder import TokenizedPrompt
from care_jax.run import Run
from models import backbone
from models.config import BackboneConfig

_NO_CONTEXT = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to decode.

    Attributes:
        place: index of the prompt in the step. It is folded into the prompt's random key, so
            samples depend on neither schedule nor mesh, and it determines the prompt's shard.
        record: the prompt.
        context: forced tokens at the start of each response; they count towards T.
        limits: most tokens of each response, at most T; None for T.
    """

    place: int
    record: TokenizedPrompt
    context: Int[np.ndarray, " c"] = dataclasses.field(default_factory=lambda: _NO_CONTEXT)
    limits: Int[np.ndarray, " G"] | None = None


@dataclasses.dataclass(frozen=True)
class DecodePrograms:
    """The compiled functions of decoding, see `programs.compile_decoding`.

    Attributes:
        empty: (sizes, P, S) -> Seats.
        sit_down: (params, seats, prompts, rng, places [N], budget [N, G], chosen [B]) ->
            (Seats, Sampled), prefill included.
        share: (seats, source [B], begin [B], end [B]) -> Seats.
        advance: (params, seats, num_wanted) -> (Seats, Sampled, Progress).
        resize: (array of the rows' cache, clock, axis of its slots, S) -> the resized array.
        pad: (array of the prefix's cache, axis of its tokens, P) -> the padded array.
        keep: (array of the seats, indices of the seats to keep) -> the smaller array.
    """

    empty: Callable[..., Seats]
    sit_down: Callable[..., tuple[Seats, Sampled]]
    share: Callable[..., Seats]
    advance: Callable[..., tuple[Seats, Sampled, Progress]]
    resize: Callable[..., jax.Array]
    pad: Callable[..., jax.Array]
    keep: Callable[..., jax.Array]


class DecodeQueue:
    """Decodes prompts with the sizes and settings of one configuration.

    Args:
        run: the run.
        programs: compiled for it.
        sizes: shapes to run them with.
        clock: measures the device time of the programs.

    Attributes:
        num_steps: decode steps so far; a step advances all rows.
    """

    def __init__(self, run: Run, programs: DecodePrograms, sizes: Sizes, clock: DeviceClock):
        self.programs, self.sizes, self.clock = programs, sizes, clock
        self.place, self.policy = run.decode_batch_place, run.policy
        self.num_steps = 0

    def answers(
        self, params: backbone.Params, rng: PRNGKeyArray, requests: Sequence[Request]
    ) -> Iterator[tuple[list[int], Rollouts]]:
        """Decodes prompts and yields them in the order in which they finish.

        Args:
            params: in the decode layout.
            rng: key of all draws.
            requests: of this process. Each process passes different requests, with places of its
                shards.

        Yields:
            indices of n requests, and their rollouts [n, G, ...] as numpy arrays.

        Raises:
            distributed.Preempted: the run is to end.
        """
        line = Line(_everyone(requests), self.sizes)
        sheets = _Sheets(requests, self.sizes, self.place, self.policy.config)
        seats, longest, num_steps, finished = None, 0, 0, None
        while line.is_anyone_left:
            if distributed.is_preempted():
                raise distributed.Preempted
            while (newcomers := line.next_newcomers()) is not None:
                seats, first = self._sit_down(params, rng, requests, newcomers, seats, longest)
                self.clock.watch(first)
                sheets.expect(first, line.who)
            if (shares := line.next_shares()) is not None:
                seats = self.programs.share(
                    seats, *map(self._put_seats, (shares.source, shares.begin, shares.end))
                )
            while (kept := line.next_half()) is not None:
                seats = self._keep(seats, self._put_seats(kept))
            seats = self._with_room(seats, seats.prefix.is_valid.shape[1], longest)
            num_wanted = np.int32(line.num_wanted)
            seats, sampled, progress = self.programs.advance(params, seats, num_wanted)
            self.clock.watch(progress)
            sheets.expect(sampled, line.who)
            if finished is not None:
                yield finished  # the devices are decoding meanwhile
            sheets.write()
            progress = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), progress)
            longest, num_steps = int(progress.longest), int(progress.clock)
            left = line.leave(progress.is_free, progress.next_rollout)
            finished = sheets.end(left, line.who, seats)
        self.num_steps += num_steps
        if finished is not None:
            yield finished

    def _put_seats(self, array: Int[np.ndarray, " B"]) -> jax.Array:
        """Puts one number per seat, known to all processes, on the devices."""
        rows = sharding.local_rows(len(array), self.place)
        return sharding.put_batch(array[rows], self.place)

    def _sit_down(
        self,
        params: backbone.Params,
        rng: PRNGKeyArray,
        requests: Sequence[Request],
        newcomers: Newcomers,
        seats: Seats | None,
        longest: int,
    ) -> tuple[Seats, Sampled]:
        """Prefills the newcomers' prompts and gives them their seats."""
        sizes, put = self.sizes, functools.partial(sharding.put_batch, place=self.place)
        own = {request.place: request for request in requests}
        nobody = Request(0, self.policy.prompts.nothing)
        asked = [
            nobody if prompt is None else own[prompt.place]
            for prompt in (
                newcomers.prompts[row] for row in sharding.local_rows(sizes.num_new, self.place)
            )
        ]
        prompts = self.policy.prompts.batch(
            [request.record for request in asked],
            newcomers.sizes,
            contexts=[request.context for request in asked],
            context_tokens=sizes.context_tokens,
        )
        longest_answers = np.full(sizes.num_rollouts, sizes.max_tokens)
        budget = [
            (longest_answers if request.limits is None else request.limits) - len(request.context)
            for request in asked
        ]
        places = np.array([request.place for request in asked], np.int32)
        num_tokens = prompts.tokens.shape[1]
        if seats is None:
            seats = self.programs.empty(sizes, num_tokens, sizes.ring_for(0))
        seats = self._with_room(seats, num_tokens, longest)
        arrays = *put((places, np.array(budget, np.int32))), self._put_seats(newcomers.chosen)
        return self.programs.sit_down(params, seats, put(prompts), rng, *arrays)

    def _with_room(self, seats: Seats, num_tokens: int, longest: int) -> Seats:
        """Makes room for prompts of `num_tokens` tokens, and in the ring for one `advance` call."""
        prefix, cache, programs = seats.prefix, seats.cache, self.programs
        if num_tokens > prefix.is_valid.shape[1]:
            _change(prefix.cache.keys, lambda x: programs.pad(x, 3, num_tokens))
            _change(prefix.cache.values, lambda x: programs.pad(x, 2, num_tokens))
            is_valid = [prefix.is_valid]
            _change(is_valid, lambda x: programs.pad(x, 1, num_tokens))
            seats = seats.replace(prefix=prefix.replace(is_valid=is_valid[0]))
        wanted = self.sizes.ring_for(longest)
        while (size := cache.keys[0].shape[4]) != wanted:
            size = size * 2 if size < wanted else size // 2
            _change(cache.keys, lambda x: programs.resize(x, seats.clock, 4, size))  # noqa: B023
            _change(cache.values, lambda x: programs.resize(x, seats.clock, 3, size))  # noqa: B023
        return seats

    def _keep(self, seats: Seats, kept: jax.Array) -> Seats:
        """Keeps half of the seats; see `Line.next_half`."""
        clock, arrays = seats.clock, seats.replace(clock=None)
        leaves, structure = jax.tree.flatten(arrays)
        del seats, arrays
        _change(leaves, lambda x: self.programs.keep(x, kept))
        return jax.tree.unflatten(structure, leaves).replace(clock=clock)


def _change(arrays: list[jax.Array], function: Callable[[jax.Array], jax.Array]) -> None:
    """Replaces each array by the program's result, in the same sharding.

    One array at a time, so that no second copy of the whole cache exists.
    """
    for place, array in enumerate(arrays):
        arrays[place] = jax.device_put(function(array), array.sharding)


def _everyone(requests: Sequence[Request]) -> list[Waiting]:
    """The prompts of all processes."""
    own = [
        (len(request.record.tokens), request.place, len(request.record.patches))
        for request in requests
    ]
    return [Waiting(*row) for part in distributed.gather_json(own) for row in part]


class _Sheets:
    """The rollouts of this process's requests as they accumulate (numpy)."""

    def __init__(
        self,
        requests: Sequence[Request],
        sizes: Sizes,
        place: NamedSharding,
        config: BackboneConfig,
    ):
        self._contexts = [request.context for request in requests]
        self._number = {request.place: number for number, request in enumerate(requests)}
        self._config, self._place = config, place
        shape = len(requests), sizes.num_rollouts, sizes.max_tokens
        self._tokens = np.full(shape, config.pad_token_id, np.int32)
        self._logp = np.zeros(shape, np.float32)
        self._is_sampled = np.zeros(shape, bool)
        self._rationale = np.zeros((*shape[:2], config.text.hidden_size), np.float32)
        self._unread: list[tuple[Sampled, Int[np.ndarray, " b"]]] = []

    def expect(self, sampled: Sampled, who: Int[np.ndarray, " B"]) -> None:
        """Queues the samples of a program that may still run; `who` has the place on each seat."""
        seats = sharding.local_rows(len(who), self._place)
        numbers = [self._number.get(place, -1) for place in who[seats].tolist()]
        self._unread.append((sampled, np.array(numbers)))

    def write(self) -> None:
        """Waits for the queued samples and stores them."""
        unread, self._unread = self._unread, []
        for sampled, numbers in unread:
            sampled = distributed.fetch(sampled)
            seat, row, step = np.nonzero(sampled.rollout >= 0)
            found = seat, row, step
            places = numbers[seat], sampled.rollout[found], sampled.index[found]
            self._tokens[places], self._logp[places] = sampled.tokens[found], sampled.logp[found]
            self._is_sampled[places] = True

    def end(
        self, left: Sequence[tuple[int, int]], who: Int[np.ndarray, " B"], seats: Seats
    ) -> tuple[list[int], Rollouts] | None:
        """Returns the requests that have left their last seat, with their rollouts; None if none.

        Args:
            left: (place, seat) of prompts that have just left a seat.
            who: place of the prompt on each seat, -1 if free.
            seats: as `advance` returned them.
        """
        left = [(self._number[place], seat) for place, seat in left if place in self._number]
        if not left:
            return None
        local = {
            int(seat): row for row, seat in enumerate(sharding.local_rows(len(who), self._place))
        }
        rationale = distributed.fetch(seats.rationale)
        for number, seat in left:  # a prompt's rollouts may be spread over several seats
            self._rationale[number] += rationale[local[seat]]
        sitting = {self._number.get(place) for place in who.tolist()}
        numbers = sorted({number for number, _ in left} - sitting)
        return (numbers, self._rollouts(numbers)) if numbers else None

    def _rollouts(self, numbers: list[int]) -> Rollouts:
        """The rollouts of some requests, each with its context in front."""
        contexts = [self._contexts[number] for number in numbers]
        num_forced = np.array([len(context) for context in contexts])[:, None, None]
        slots = np.arange(self._tokens.shape[-1])
        is_forced = np.broadcast_to(slots < num_forced, self._tokens[numbers].shape)
        source = np.maximum(slots - num_forced, 0)
        shift = functools.partial(np.take_along_axis, indices=source, axis=-1)
        is_sampled = shift(self._is_sampled[numbers]) & ~is_forced
        tokens = np.where(is_sampled, shift(self._tokens[numbers]), self._config.pad_token_id)
        for row, context in zip(tokens, contexts, strict=True):
            row[:, : len(context)] = context
        is_valid = is_forced | is_sampled
        last = np.take_along_axis(tokens, is_valid.sum(-1, keepdims=True) - 1, -1)[..., 0]
        rationale = self._rationale[numbers]
        norm = np.linalg.norm(rationale, axis=-1, keepdims=True)
        return Rollouts(
            tokens=tokens,
            is_valid=is_valid,
            is_forced=is_forced,
            logp=np.where(is_sampled, shift(self._logp[numbers]), 0.0),
            embedding=rationale / np.maximum(norm, 1e-6),
            is_complete=np.isin(last, self._config.eos_token_ids),
        )
