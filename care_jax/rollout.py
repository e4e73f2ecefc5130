"""One rollout batch: decode in waves, verify, select, reflect.

The host side of a step. While the device decodes one wave, the host verifies the wave before,
chooses its anchors and failures and has the device repair them from the same prefix cache.

Letters: B prompts, G rollouts per prompt, R rows per prompt (G, or G + 1 with a reflected row).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Bool, PRNGKeyArray

from care_jax import reflect, sharding
from care_jax.batch import Example, Rollouts, Scores
from care_jax.prompt import TokenizedPrompt
from care_jax.run import Run
from care_jax.scores import score_rollouts
from care_jax.select import Subgroup
from care_jax.verifier import Verifier
from models import backbone


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled functions of a rollout, see `train.rollout_programs`.

    Attributes:
        prefill: (params, prompts) -> Prefix.
        decode: (params, prefix, rng) -> Rollouts of G rows.
        reflect: (params, prefix, rng, forced) -> Rollouts of one row.
        select: (rollouts, scores, rng) -> Subgroup.
    """

    prefill: Callable
    decode: Callable
    reflect: Callable
    select: Callable


@dataclasses.dataclass(frozen=True)
class Groups:
    """What one rollout batch came to, as numpy arrays over its B prompts.

    Attributes:
        rollouts, scores: of all rows; a reflected row stands last.
        subgroup: anchor and negatives.
        has_reflection: the last row is a reflected one.
    """

    rollouts: Rollouts
    scores: Scores
    subgroup: Subgroup
    has_reflection: Bool[np.ndarray, " B"]

    @staticmethod
    def concatenate(groups: Sequence[Groups], order: Sequence[int]) -> Groups:
        """Joins waves that hold the prompts `order`, and puts these back in their own order."""
        places = np.argsort(order)

        def joined(name):
            parts = [getattr(group, name) for group in groups]
            return jax.tree.map(lambda *arrays: np.concatenate(arrays)[places], *parts)

        return Groups(*(joined(field.name) for field in dataclasses.fields(Groups)))


def roll_out(
    run: Run,
    programs: Programs,
    params: backbone.Params,
    rng: PRNGKeyArray,
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
        examples, records: the B prompts, as questions and as tokens.
        verifier: compares answers.
    """
    rl, care, policy = run.config.rl, run.config.care, run.policy
    cue = reflect.cue_text(care.cue, care.reflect_mode, seed=run.config.seed)
    encode = functools.partial(policy.tokenizer.encode, add_special_tokens=False)
    has_slot = rl.objective == "care" and care.reflect

    def score(rollouts, examples):
        return score_rollouts(
            rollouts,
            examples,
            verifier,
            policy.token_bytes,
            eos_token_id=policy.config.eos_token_id,
            think_tag=policy.think_tag,
            format_weight=rl.format_weight,
        )

    def launch(wave: list[int]):
        rngs = jax.random.split(jax.random.fold_in(rng, wave[0]), 3)
        prompts = policy.prompts.batch([records[i] for i in wave])
        prompts = sharding.put_batch(prompts, run.mesh)
        prefix = programs.prefill(params, prompts)
        return wave, rngs, prefix, programs.decode(params, prefix, rngs[0])

    def finish(wave: list[int], rngs, prefix, rollouts) -> Groups:
        wave_examples = [examples[i] for i in wave]
        rollouts = jax.device_get(rollouts)
        wave_scores, rationales = score(rollouts, wave_examples)
        subgroup = jax.device_get(programs.select(rollouts, wave_scores, rngs[1]))
        has_reflection = np.zeros(len(rationales), bool)
        if has_slot:
            has_reflection = subgroup.has_update & ~subgroup.is_rescue
            forced = reflect.forced_context(
                [
                    rows[index] if is_triggered else None
                    for rows, index, is_triggered in zip(
                        rationales, subgroup.hard_negative, has_reflection, strict=True
                    )
                ],
                cue,
                encode,
                think_tag=policy.think_tag,
                max_context=care.max_context,
                pad_token_id=policy.config.pad_token_id,
            )
            reflected = jax.device_get(
                programs.reflect(params, prefix, rngs[2], sharding.put_batch(forced, run.mesh))
            )
            reflected_scores, _ = score(reflected, wave_examples)
            if care.reflect_credit == "prompt_only":
                reflected, reflected_scores = reflect.without_context(
                    reflected, reflected_scores, policy.config.pad_token_id
                )
            rollouts, wave_scores = (
                jax.tree.map(lambda *rows: np.concatenate(rows, 1), *pair)
                for pair in ((rollouts, reflected), (wave_scores, reflected_scores))
            )
        return Groups(rollouts, wave_scores, subgroup, has_reflection)

    # Prompts of like size share a wave, so that few are padded to another's bucket.
    by_size = sorted(range(len(records)), key=lambda i: (len(records[i].tokens), i))
    groups, launched = [], None
    for first in range(0, len(records), rl.decode_prompts):
        # Dispatch is asynchronous: the device decodes this wave while the host ends the last.
        following = launch(by_size[first : first + rl.decode_prompts])
        if launched:
            groups.append(finish(*launched))
        launched = following
    groups.append(finish(*launched))
    return Groups.concatenate(groups, by_size)
