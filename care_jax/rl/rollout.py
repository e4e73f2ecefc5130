"""One rollout batch: decode, verify, select, reflect.

This is the host side of a step. Finished rollouts are verified while the devices decode the others.
Then anchors and hard negatives are selected. A second decode repairs one failure of every prompt
that has both a correct rollout and a failure.

With several processes, each does this for its part of the prompts. A process trains on the prompts
that it decoded, so that no prompt, image or response crosses the network.

Letters: N prompts of a step, B prompts of this process, G rollouts per prompt, R rows per prompt
(G, or G + 1 with a reflected row).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import flax.struct
import jax
import numpy as np
from jaxtyping import Bool, Int, PRNGKeyArray, Shaped

from care_jax.batch import Example, Rollouts, Scores
from care_jax.decoding import reflection
from care_jax.decoding.queue import NO_CONTEXT, Request
from care_jax.devices import distributed
from care_jax.method.select import Subgroup
from care_jax.prompts.builder import TokenizedPrompt, prompt_sizes
from care_jax.rewards.scores import start_scoring
from care_jax.rewards.verifier import Verifier
from care_jax.rl.programs import RolloutPrograms
from care_jax.run.run import Run
from models import backbone


@dataclasses.dataclass(frozen=True)
class PromptTable:
    """What every process knows about all prompts of a step.

    Attributes:
        local: indices in the step of this process's B prompts, ascending.
        sizes: tokens and patches of each of the N prompts.
        sources: name of the data source of each of the N prompts.
    """

    local: Int[np.ndarray, " B"]
    sizes: Int[np.ndarray, "N 2"]
    sources: list[str]


def gather_prompt_table(
    local: Int[np.ndarray, " B"], examples: Sequence[Example], prompts: Sequence[TokenizedPrompt]
) -> PromptTable:
    """Gathers the table from all processes, each of which passes its prompts."""
    sources = [[int(place), example.source] for place, example in zip(local, examples, strict=True)]
    gathered = sorted(pair for pairs in distributed.gather_json(sources) for pair in pairs)
    sizes = distributed.gather_rows(prompt_sizes(prompts), local)
    return PromptTable(local, sizes, [source for _, source in gathered])


@dataclasses.dataclass(frozen=True)
class Groups:
    """The results of one rollout batch, as numpy arrays over B prompts.

    Attributes:
        rollouts, scores: of all rows; a reflected row is the last.
        subgroup: anchor and negatives.
        has_reflection: the last row is a reflected one.
        reasons: why the verifier judged each row as it did, see `Verdict`.
        components: what a reward function returned for each row, see `Scored`.
    """

    rollouts: Rollouts
    scores: Scores
    subgroup: Subgroup
    has_reflection: Bool[np.ndarray, " B"]
    reasons: Shaped[np.ndarray, "B R"]
    components: Shaped[np.ndarray, "B R"] | None = None

    @staticmethod
    def concatenate(groups: Sequence[Groups], places: Int[np.ndarray, " B"]) -> Groups:
        """Concatenates batches of groups, then takes the groups at indices `places`, in order."""

        def joined(name):
            parts = [getattr(group, name) for group in groups]
            return jax.tree.map(lambda *arrays: np.concatenate(arrays)[places], *parts)

        return Groups(*(joined(field.name) for field in dataclasses.fields(Groups)))


@flax.struct.dataclass
class Verified:
    """Rows of B prompts with the verifier's results, as numpy arrays."""

    rollouts: Rollouts
    scores: Scores
    texts: Shaped[np.ndarray, "B R"]
    reasons: Shaped[np.ndarray, "B R"]
    components: Shaped[np.ndarray, "B R"] | None

    @property
    def is_judged(self) -> Bool[np.ndarray, "B R"]:
        """False where a reward function failed."""
        if self.components is None:
            return np.ones(self.reasons.shape, bool)
        return self.components.astype(bool)  # an empty dict is False


def roll_out(
    run: Run,
    programs: RolloutPrograms,
    params: backbone.Params,
    rng: PRNGKeyArray,
    table: PromptTable,
    examples: Sequence[Example],
    prompts: Sequence[TokenizedPrompt],
    verifier: Verifier,
) -> Groups:
    """Decodes a rollout batch, verifies, selects and reflects.

    Args:
        run: the run.
        programs: compiled for the run.
        params: in the decode layout.
        rng: key of this step.
        table: of the step's prompts.
        examples, prompts: questions and tokenised prompts of this process.
        verifier: compares answers.

    Returns:
        the groups of this process's prompts, in the order of `table.local`.

    Raises:
        distributed.Preempted: the run was told to stop; nothing of this step is kept.
    """
    decode_rng, select_rng, reflect_rng = jax.random.split(rng, 3)
    places = np.asarray(table.local, np.int32)
    requests = [Request(*pair) for pair in zip(places.tolist(), prompts, strict=True)]
    first = verify(run, programs.decode(params, decode_rng, requests), examples, verifier)
    assert first is not None  # every process has prompts
    subgroup = programs.select(first.rollouts, first.scores, select_rng, places)
    subgroup = jax.device_get(subgroup)
    # Where nothing was judged, there is no failure to rescue.
    is_judged = first.is_judged.any(1)
    subgroup = dataclasses.replace(subgroup, has_update=subgroup.has_update & is_judged)
    has_reflection = np.zeros(len(places), bool)
    if run.objective.has_reflection:
        has_reflection = subgroup.has_update & ~subgroup.is_rescue
        repaired = np.flatnonzero(has_reflection)
        contexts = contexts_of(
            run,
            first.texts[repaired, subgroup.hard_negative[repaired]],
            run.config.care.reflect_mode,
        )
        requests = [
            dataclasses.replace(requests[i], context=context)
            for i, context in zip(repaired, contexts, strict=True)
        ]
        repairs = programs.reflect(params, reflect_rng, requests)
        second = verify(run, repairs, [examples[i] for i in repaired.tolist()], verifier)
        if second is not None:
            is_judged = second.is_judged[:, 0]
            has_reflection[repaired[~is_judged]] = False
            repaired = repaired[is_judged]
            second = jax.tree.map(lambda x: x[is_judged], second) if len(repaired) else None
        first = _with_reflected(run, first, second, repaired)
    return Groups(
        first.rollouts,
        first.scores,
        subgroup,
        has_reflection,
        first.reasons,
        first.components,
    )


def verify(
    run: Run,
    decoded: Iterator[tuple[list[int], Rollouts]],
    examples: Sequence[Example],
    verifier: Verifier,
) -> Verified | None:
    """Verifies rollouts as they finish; returns them in the order of `examples`, None if none.

    Args:
        run: the run.
        decoded: (indices of examples, their rollouts) as they finish.
        examples: the questions.
        verifier: compares answers.
    """
    policy, started, order = run.policy, [], []
    for indices, rollouts in decoded:
        finish = start_scoring(
            rollouts,
            [examples[index] for index in indices],
            verifier,
            policy.token_bytes,
            eos_token_ids=policy.config.eos_token_ids,
            think_tag=policy.think_tag,
            format_weight=run.config.rl.format_weight,
        )
        started.append((rollouts, finish))
        order += indices
    if not started:
        return None
    parts = []
    for rollouts, finish in started:
        scores, texts, reasons, components = finish()
        texts = np.array(texts, object)
        parts.append(Verified(rollouts, scores, texts, reasons, components))
    return jax.tree.map(lambda *rows: np.concatenate(rows)[np.argsort(order)], *parts)


def contexts_of(
    run: Run, failures: Shaped[np.ndarray, " n"], mode: str
) -> list[Int[np.ndarray, " c"]]:
    """The forced tokens with which the repair of each failed response starts.

    Args:
        run: the run.
        failures: texts of the responses.
        mode: one of `reflection.MODES`.
    """
    care, policy = run.config.care, run.policy
    if mode == "resample":
        return [NO_CONTEXT for _ in failures]
    return [
        reflection.context_tokens(
            reflection.rationale_of(failure, policy.think_tag),
            reflection.cue_text(care.cue, mode, seed=run.config.seed),
            functools.partial(policy.tokenizer.encode, add_special_tokens=False),
            think_tag=policy.think_tag,
            max_context=care.max_context,
        )
        for failure in failures
    ]


def _with_reflected(
    run: Run, first: Verified, second: Verified | None, repaired: Int[np.ndarray, " n"]
) -> Verified:
    """Appends the reflected row to every prompt; an empty row if nothing was repaired."""
    last = jax.tree.map(lambda x: np.zeros_like(x[:, :1]), first)
    last.rollouts.tokens[:] = run.policy.config.pad_token_id
    last.texts[:] = last.reasons[:] = ""
    if last.components is not None:
        last.components.fill({})
    if second is not None:
        if run.config.care.reflect_credit == "prompt_only":
            rollouts, scores = reflection.without_context(
                second.rollouts, second.scores, run.policy.config.pad_token_id
            )
            second = dataclasses.replace(second, rollouts=rollouts, scores=scores)
        for rows, found in zip(jax.tree.leaves(last), jax.tree.leaves(second), strict=True):
            rows[repaired] = found
    return jax.tree.map(lambda *rows: np.concatenate(rows, 1), first, last)
