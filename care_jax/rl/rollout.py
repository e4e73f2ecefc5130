"""One rollout batch: decode, verify, select, reflect.

Finished rollouts are verified while the devices decode the others. Then anchors and hard negatives
are selected. A second decode repairs one failure of every prompt that has both a correct rollout
and a failure (sec:care-reflection).

A process decodes and verifies its own prompts, and only numbers are gathered. For the updates,
`update_batch` sends prompts, images and responses to the processes whose rows hold them.

Letters: N prompts of a step, B prompts of this process, G rollouts per prompt, R rows per prompt
(G, or G + 1 with a reflected row).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, PRNGKeyArray, Shaped

from care_jax.batch import Example, Groups, Rollouts
from care_jax.decoding import reflection
from care_jax.decoding.rollout_buffer import NO_CONTEXT, InFlight, Request
from care_jax.decoding.schedule import Sizes
from care_jax.devices import distributed, sharding
from care_jax.method import spans
from care_jax.prompts.builder import TokenizedPrompt, prompt_sizes
from care_jax.report.console import show_part
from care_jax.rewards.scores import start_scoring
from care_jax.rewards.verifier import Verifier
from care_jax.rl.rollout_programs import RolloutPrograms, rollout_sizes, sampling_of
from care_jax.run.run import Run
from models import backbone

_DECODED = "rollouts", "scores", "texts", "reasons", "components"  # fields of decoded groups


@dataclasses.dataclass
class CarriedOver:
    """This process's prompts that a rollout batch left to the next, see `carry_over`."""

    groups: Groups  # with their positions in the stream of examples
    in_flight: InFlight | None = None  # None before the first step

    def copy(self) -> CarriedOver:
        """The same prompts, for a step that may be broken off."""
        return dataclasses.replace(self)

    def aged(self) -> CarriedOver:
        """The same prompts, one step later."""
        assert self.in_flight is not None  # a step was decoded
        return CarriedOver(self.groups, self.in_flight.aged())

    def leave(self, pool: Groups, in_flight: InFlight) -> Groups:
        """Keeps the prompts of `pool` that are in flight; returns the others."""
        self.groups, self.in_flight = pool.take(in_flight.places), in_flight
        return pool.take(np.setdiff1d(np.arange(len(pool.index)), in_flight.places))


def asked(
    index: Int[np.ndarray, " B"],
    examples: Sequence[Example],
    prompts: Sequence[TokenizedPrompt],
    position: Sequence[int] | Int[np.ndarray, " B"] | None = None,
) -> Groups:
    """Groups with their questions, before decoding; `position` is theirs in the stream."""
    return Groups(
        index=np.asarray(index, np.int32),
        examples=np.array(examples, object),
        prompts=np.array(prompts, object),
        sources=np.array([example.source for example in examples], object),
        sizes=prompt_sizes(prompts),
        position=None if position is None else np.asarray(position),
    )


def gather_groups(groups: Groups) -> Groups:
    """The groups of all processes, N prompts, with the fields that packing and metrics need.

    Texts, tokens, embeddings and spans are not gathered; they are None also with one process. Of
    the components only whether a row has any is.
    """
    credit, components = groups.credit, groups.components
    numbers = Groups(
        index=groups.index,
        sizes=groups.sizes,
        rollouts=dataclasses.replace(
            groups.rollouts,
            **dict.fromkeys(("tokens", "logp", "drawn_logp", "embedding", "age", "routes")),
        ),
        scores=dataclasses.replace(groups.scores, is_think=None, is_answer=None),
        components=None if components is None else groups.is_judged,
        subgroup=groups.subgroup,
        has_reflection=groups.has_reflection,
        credit=credit and dataclasses.replace(credit, token_advantage=None),
        raw=groups.raw,
    )
    sources = [*zip(groups.index.tolist(), groups.sources, strict=True)]
    gathered = sorted(pair for pairs in distributed.gather_json(sources) for pair in pairs)
    return dataclasses.replace(
        distributed.gather_rows(numbers, groups.index),
        sources=np.array([source for _, source in gathered], object),
    )


def roll_out(
    run: Run,
    programs: RolloutPrograms,
    params: backbone.Params,
    rng: PRNGKeyArray,
    groups: Groups,
    verifier: Verifier,
    carried: CarriedOver | None = None,
) -> Groups:
    """The groups with rollouts, scores and subgroups: decodes, verifies, selects and reflects.

    `params` are in the decode layout; `rng` is the key of this step. With `carried`, the groups are
    those of its prompts and of `groups` that are whole first, as many as `groups`; `carried` then
    has the others.

    Raises:
        distributed.Preempted: the run was preempted; the step is discarded.
    """
    decode_rng, select_rng, reflect_rng = jax.random.split(rng, 3)
    if carried is None:
        decoded = programs.decode(params, decode_rng, _requests(groups))
        rows = verify(run, decoded, groups.examples, verifier)
        assert rows is not None  # every process has prompts
    else:
        groups = _decode_pool(run, programs, params, decode_rng, groups, verifier, carried)
        rows = Groups(**{name: getattr(groups, name) for name in _DECODED})
    requests = _requests(groups)
    subgroup, has_reflection = None, np.zeros(len(requests), bool)
    if run.objective.raw_advantages is not None:
        subgroup = programs.select(rows.rollouts, rows.trained_scores, select_rng, groups.index)
        subgroup = jax.device_get(subgroup)
    if run.objective.has_reflection:
        assert subgroup is not None
        has_reflection = subgroup.has_update & ~subgroup.is_rescue
        index = np.flatnonzero(has_reflection)  # of the prompts that are repaired
        failures = rows.texts[index, subgroup.hard_negative[index]]
        contexts = contexts_of(run, failures, run.config.care.reflect_mode)
        requests = [
            dataclasses.replace(requests[i], context=context)
            for i, context in zip(index, contexts, strict=True)
        ]
        repairs = programs.reflect(params, reflect_rng, requests)
        reflected = verify(run, repairs, groups.examples[index], verifier)
        if reflected is not None:
            is_judged = reflected.is_judged[:, 0]
            has_reflection[index[~is_judged]] = False
            index, reflected = index[is_judged], reflected.take(is_judged)
        rows = _with_reflected(run, rows, reflected, index)
    found = {name: getattr(rows, name) for name in _DECODED}
    return dataclasses.replace(groups, subgroup=subgroup, has_reflection=has_reflection, **found)


def _requests(groups: Groups) -> list[Request]:
    return [Request(*pair) for pair in zip(groups.index.tolist(), groups.prompts, strict=True)]


def _decode_pool(
    run: Run,
    programs: RolloutPrograms,
    params: backbone.Params,
    rng: PRNGKeyArray,
    groups: Groups,
    verifier: Verifier,
    carried: CarriedOver,
) -> Groups:
    """As many groups as `groups`, decoded and verified, of these and of those in `carried`."""
    index = groups.index
    pool, flight = Groups.concatenate([carried.groups, groups]), carried.in_flight
    new = pool if flight is None else groups
    goal: Any = {"in_flight": flight, "num_wanted": run.config.rl.prompts_per_step}
    decoded = programs.decode(params, rng, _requests(new), **goal)
    rows = verify(run, decoded, pool.examples, verifier, num_wanted=len(index))
    left = programs.queue.in_flight
    assert left is not None  # more prompts are decoded than are wanted
    whole = carried.leave(pool, left)
    if rows is not None:
        whole = dataclasses.replace(whole, **{name: getattr(rows, name) for name in _DECODED})
    return _share_out(run, whole, index)


def _share_out(run: Run, groups: Groups, index: Int[np.ndarray, " B"]) -> Groups:
    """The groups of this process's positions in the step, `index`, of all that are whole.

    Processes may have decoded unequal numbers of them, and train on equal ones.
    """
    rl, (sizes, _) = run.config.rl, rollout_sizes(run)
    held = distributed.gather_json(sizes.shard_of(groups.index).tolist())
    assigned = _assign_positions(held, sizes, rl.prompts_per_update)
    owners = sharding.owners(rl.prompts_per_update, run.decode_batch_sharding)
    owner = np.resize(owners, rl.prompts_per_step)
    moved = [position for position, (process, _) in assigned.items() if process != owner[position]]
    me = jax.process_index()
    own = {row: position for position, (process, row) in assigned.items() if process == me}
    # A process may have no group, and then not the fields of the others.
    boxed = np.empty(len(own), object)
    boxed[:] = [groups.take(slice(row, row + 1)) for row in own]
    positions = np.array([*own.values()], int)
    boxed = distributed.exchange_rows(
        boxed, positions, rl.prompts_per_step, moved=sorted(moved), wanted=index
    )
    in_order = np.argsort(positions) if jax.process_count() == 1 else index
    return dataclasses.replace(Groups.concatenate(boxed[in_order].tolist()), index=index)


def _assign_positions(
    held: Sequence[Sequence[int]], sizes: Sizes, prompts_per_update: int
) -> dict[int, tuple[int, int]]:
    """The group, as (process, row), that takes each position of a step.

    `held` has the batch shard on which each group was decoded, by process. Every shard has the same
    number of positions. They first take groups of that shard, so that few move; what is left over
    takes the other shards' free ones. Positions are taken in turn from every update, and a
    process's carried-over groups come first, so that every update gets its share of these.
    """
    positions = np.arange(sum(map(len, held))).reshape(-1, prompts_per_update).T.ravel()
    free = [
        deque(positions[sizes.shard_of(positions) == shard].tolist())
        for shard in range(sizes.num_shards)
    ]
    groups = sorted(
        (shard, process, row)
        for process, shards in enumerate(held)
        for row, shard in enumerate(shards)
    )
    assigned, left = {}, []
    for shard, *group in groups:
        if free[shard]:
            assigned[free[shard].popleft()] = tuple(group)
        else:
            left.append(tuple(group))
    return assigned | dict(zip(sorted(itertools.chain(*free)), left, strict=True))


def verify(
    run: Run,
    decoded: Iterator[tuple[list[int], Rollouts]],
    examples: Sequence[Example] | Shaped[np.ndarray, " B"],
    verifier: Verifier,
    num_wanted: int | None = None,
) -> Groups | None:
    """Verifies rollouts as they finish; returns them in the order of `examples`, None if none.

    `decoded` yields (indices of examples, their rollouts), of `num_wanted` or all examples.
    """
    policy, started, order = run.policy, [], []
    num_wanted = num_wanted or len(examples)
    for indices, rollouts in decoded:
        show_part(f"decoded {len(order) + len(indices)} of {num_wanted} prompts")
        finish = start_scoring(
            rollouts,
            [examples[index] for index in indices],
            verifier,
            policy.token_bytes,
            eos_token_ids=policy.config.eos_token_ids,
            format_weight=run.config.rl.format_weight,
        )
        started.append((rollouts, finish))
        order += indices
    if not started:
        return None
    parts = []
    for rollouts, finish in started:
        scored = finish()._asdict()
        scored["texts"] = np.array(scored["texts"], object)
        parts.append(Groups(rollouts=rollouts, **scored))
    return Groups.concatenate(parts).take(np.argsort(order))


def contexts_of(
    run: Run, failures: Shaped[np.ndarray, " n"], mode: str
) -> list[Int[np.ndarray, " c"]]:
    """The forced tokens at the start of the repair of each failed response, a text.

    `mode` is one of `reflection.MODES`.
    """
    care, policy = run.config.care, run.policy
    if mode == "resample":
        return [NO_CONTEXT for _ in failures]
    cue = reflection.cue_text(care.cue, mode, seed=run.config.seed)
    encode = functools.partial(policy.tokenizer.encode, add_special_tokens=False)
    tag, limit = policy.think_tag, care.max_context
    return [
        reflection.context_tokens(
            spans.rationale_of(failure, tag), cue, encode, think_tag=tag, max_context=limit
        )
        for failure in failures
    ]


def _with_reflected(
    run: Run, rows: Groups, reflected: Groups | None, index: Int[np.ndarray, " n"]
) -> Groups:
    """Appends a row to every prompt: the reflected one at `index`, an empty one elsewhere."""
    if len(set(sampling_of(run))) > 1:  # one of the two may have drawn by the softmax
        rows = dataclasses.replace(rows, rollouts=rows.rollouts.with_drawn_logp())
        if reflected is not None:
            drawn = reflected.rollouts.with_drawn_logp()
            reflected = dataclasses.replace(reflected, rollouts=drawn)
    last = jax.tree.map(lambda x: np.zeros_like(x[:, :1]), rows)
    last.rollouts.tokens[:] = run.policy.config.pad_token_id
    last.texts[:] = last.reasons[:] = ""
    if last.components is not None:
        last.components.fill({})
    if reflected is not None and len(index):
        if run.objective.drops_context:
            policy = run.policy
            opening = policy.tokenizer.encode(f"<{policy.think_tag}>", add_special_tokens=False)
            rollouts, scores = reflection.without_context(
                reflected.rollouts, reflected.scores, opening, policy.config.pad_token_id
            )
            reflected = dataclasses.replace(reflected, rollouts=rollouts, scores=scores)
        for empty, found in zip(jax.tree.leaves(last), jax.tree.leaves(reflected), strict=True):
            empty[index] = found
    return jax.tree.map(lambda *parts: np.concatenate(parts, 1), rows, last)
