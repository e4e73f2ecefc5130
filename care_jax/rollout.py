"""One rollout batch: decode in waves, verify, select, reflect.

The host side of a step. While the device decodes one wave, the host verifies the wave before,
chooses its anchors and failures and has the device repair them from the same prefix cache.

In a run of several processes each does this for its own prompts. Those are the same in decoding and
in training (see `plan_waves`), so that no prompt, image or response crosses the network.

Letters: N prompts of a step, B prompts of this process, W prompts of a wave, G rollouts per prompt,
R rows per prompt (G, or G + 1 with a reflected row).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Bool, Int, PRNGKeyArray, Shaped

from care_jax import distributed, reflect, sharding
from care_jax.batch import Example, Rollouts, Scores
from care_jax.prompt import TokenizedPrompt, prompt_sizes
from care_jax.run import Run
from care_jax.sampler import Forced
from care_jax.scores import score_rollouts
from care_jax.select import Subgroup
from care_jax.verifier import Verifier
from models import backbone


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled functions of a rollout, see `train.rollout_programs`.

    Attributes:
        prefill: (params, prompts) -> Prefix.
        decode: (params, prefix, rng, places) -> Rollouts of G rows.
        reflect: (params, prefix, rng, places, forced) -> Rollouts of one row.
        select: (rollouts, scores, rng, places) -> Subgroup.

    `places` [W] are the prompts' places in the step: a prompt draws by its own, so that neither the
    wave nor the mesh decides what it samples.
    """

    prefill: Callable
    decode: Callable
    reflect: Callable
    select: Callable


@dataclasses.dataclass(frozen=True)
class Roster:
    """What every process knows of all prompts of a step.

    Attributes:
        own: places in the step of this process's B prompts, ascending.
        sizes: tokens and patches of each of the N prompts.
        sources: where each of them comes from.
    """

    own: Int[np.ndarray, " B"]
    sizes: Int[np.ndarray, "N 2"]
    sources: list[str]

    @staticmethod
    def call(
        own: Int[np.ndarray, " B"], examples: Sequence[Example], records: Sequence[TokenizedPrompt]
    ) -> Roster:
        """Gathers it from all processes."""
        sources = [
            [int(place), example.source] for place, example in zip(own, examples, strict=True)
        ]
        known = sorted(pair for pairs in distributed.gather_json(sources) for pair in pairs)
        sizes = distributed.gather_rows(prompt_sizes(records), own)
        return Roster(own, sizes, [source for _, source in known])


@dataclasses.dataclass(frozen=True)
class Groups:
    """What one rollout batch came to, as numpy arrays over B prompts.

    Attributes:
        rollouts, scores: of all rows; a reflected row stands last.
        subgroup: anchor and negatives.
        has_reflection: the last row is a reflected one.
        reasons: why the verifier judged each row as it did, see `Verdict`.
    """

    rollouts: Rollouts
    scores: Scores
    subgroup: Subgroup
    has_reflection: Bool[np.ndarray, " B"]
    reasons: Shaped[np.ndarray, "B R"]

    @staticmethod
    def concatenate(groups: Sequence[Groups], places: Sequence[int]) -> Groups:
        """Joins batches of groups and takes those at `places`, counted over all, in that order."""

        def joined(name):
            parts = [getattr(group, name) for group in groups]
            return jax.tree.map(lambda *arrays: np.concatenate(arrays)[places], *parts)

        return Groups(*(joined(field.name) for field in dataclasses.fields(Groups)))


def plan_waves(
    num_tokens: Int[np.ndarray, " N"],
    *,
    prompts_per_update: int,
    decode_prompts: int,
    num_shards: int,
) -> Int[np.ndarray, "waves W"]:
    """Which prompts each wave decodes, in the order of its rows.

    Prompts of like size share a wave, so that few are padded to another's bucket: each shard of the
    devices takes its own prompts from the shortest to the longest. A prompt belongs to the shard
    on which its update places it.

    Args:
        num_tokens: of each prompt of the step.
        prompts_per_update: divides N.
        decode_prompts: W, divides N.
        num_shards: that a batch is split into; divides W and prompts_per_update.
    """
    place = np.arange(len(num_tokens))
    shard = place % prompts_per_update // (prompts_per_update // num_shards)
    by_shard = np.lexsort((num_tokens, shard)).reshape(num_shards, -1, decode_prompts // num_shards)
    return by_shard.swapaxes(0, 1).reshape(-1, decode_prompts)


def roll_out(
    run: Run,
    programs: Programs,
    params: backbone.Params,
    rng: PRNGKeyArray,
    roster: Roster,
    examples: Sequence[Example],
    records: Sequence[TokenizedPrompt],
    verifier: Verifier,
) -> Groups:
    """Decodes a rollout batch in waves, verifies, selects and reflects.

    Args:
        run: the run.
        programs: compiled for it.
        params: in the decode layout.
        rng: key of this step.
        roster: of the step's prompts.
        examples, records: this process's, as questions and as tokens.
        verifier: compares answers.

    Returns:
        the groups of this process's prompts, in the order of `roster.own`.

    Raises:
        distributed.Preempted: the run is to end; nothing of this step is kept.
    """
    rl, care, policy = run.config.rl, run.config.care, run.policy
    cue = reflect.cue_text(care.cue, care.reflect_mode, seed=run.config.seed)
    encode = functools.partial(policy.tokenizer.encode, add_special_tokens=False)
    has_slot = rl.objective == "care" and care.reflect
    put = functools.partial(sharding.put_batch, place=run.decode_batch_place)
    decode_rng, select_rng, reflect_rng = jax.random.split(rng, 3)

    def score(rollouts, examples):
        return score_rollouts(
            rollouts,
            examples,
            verifier,
            policy.token_bytes,
            eos_token_ids=policy.config.eos_token_ids,
            think_tag=policy.think_tag,
            format_weight=rl.format_weight,
        )

    def context_of(texts, hard_negative, has_reflection) -> Forced:
        if care.reflect_mode == "resample":
            return reflect.no_context(has_reflection)
        rationales = [
            reflect.rationale_of(rows[index], policy.think_tag) if is_triggered else None
            for rows, index, is_triggered in zip(texts, hard_negative, has_reflection, strict=True)
        ]
        return reflect.forced_context(
            rationales,
            cue,
            encode,
            think_tag=policy.think_tag,
            max_context=care.max_context,
            pad_token_id=policy.config.pad_token_id,
        )

    def launch(wave: Int[np.ndarray, " W"]):
        if distributed.is_preempted():
            raise distributed.Preempted
        own = [index_of[place] for place in wave.tolist() if place in index_of]
        prompts = policy.prompts.batch([records[i] for i in own], roster.sizes[wave])
        prompts = put(prompts)
        places = put(roster.own[own].astype(np.int32))
        prefix = programs.prefill(params, prompts)
        return own, places, prefix, programs.decode(params, prefix, decode_rng, places)

    def finish(own: list[int], places, prefix, decoded: Rollouts) -> Groups:
        wave_examples = [examples[i] for i in own]
        rollouts = distributed.fetch(decoded)
        wave_scores, texts, reasons = score(rollouts, wave_examples)
        subgroup = distributed.fetch(programs.select(decoded, put(wave_scores), select_rng, places))
        has_reflection = np.zeros(len(texts), bool)
        if has_slot:
            has_reflection = subgroup.has_update & ~subgroup.is_rescue
            forced = context_of(texts, subgroup.hard_negative, has_reflection)
            reflected = distributed.fetch(
                programs.reflect(params, prefix, reflect_rng, places, put(forced))
            )
            reflected_scores, _, reflected_reasons = score(reflected, wave_examples)
            if care.reflect_credit == "prompt_only":
                reflected, reflected_scores = reflect.without_context(
                    reflected, reflected_scores, policy.config.pad_token_id
                )
            rollouts, wave_scores, reasons = jax.tree.map(
                lambda *rows: np.concatenate(rows, 1),
                (rollouts, wave_scores, reasons),
                (reflected, reflected_scores, reflected_reasons),
            )
        return Groups(rollouts, wave_scores, subgroup, has_reflection, reasons)

    index_of = {int(place): index for index, place in enumerate(roster.own)}
    waves = plan_waves(
        roster.sizes[:, 0],
        prompts_per_update=rl.prompts_per_update,
        decode_prompts=rl.decode_prompts,
        num_shards=sharding.num_shards(run.decode_batch_place),
    )
    groups, order, launched = [], [], None
    for wave in waves:
        # Dispatch is asynchronous: the device decodes this wave while the host ends the last.
        following = launch(wave)
        order += following[0]
        if launched:
            groups.append(finish(*launched))
        launched = following
    groups.append(finish(*launched))
    return Groups.concatenate(groups, np.argsort(order))
