"""Reopens a run for `probe`, `repairs` and `gradients`: its weights, and groups of samples."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import flags, logging
from jaxtyping import Float, PRNGKeyArray, Shaped
from ml_collections import config_flags

from care_jax.batch import Example
from care_jax.config import command_line
from care_jax.config.checks import check_config
from care_jax.config.keys import check_keys
from care_jax.data.examples import open_examples
from care_jax.data.pipeline import Batches
from care_jax.decoding.rollout_buffer import Request
from care_jax.devices import xla_flags
from care_jax.method.select import Subgroup
from care_jax.rewards.verifier import Verifier
from care_jax.rl.rollout import verify
from care_jax.rl.rollout_programs import RolloutPrograms
from care_jax.run import weights
from care_jax.run.policy import check_policy
from care_jax.run.run import Run, open_run
from care_jax.run.workdir import check_given
from models import backbone

_DEFAULT = "configs/repair.py"
flags.disclaim_key_flags()  # the flags below are the command's, so that its --help lists them


class Reopened(NamedTuple):
    """The run of a command; see `weights.last_of` for the checkpoint."""

    run: Run
    params: backbone.Params
    stage: str
    name: str
    examples: Sequence[Example]  # the training data of RL
    num_questions: int  # of the examples, to sample groups for


def run_command(act: Callable[[Reopened], None]) -> None:
    """Parses the shared flags and calls `act`; user errors print one line, not a traceback.

    A command defines its other flags before this call.
    """
    config = config_flags.DEFINE_config_file("config", None, f"Configuration; else {_DEFAULT}.")
    workdir = flags.DEFINE_string("workdir", "runs/repair", "Folder of the run.")
    text = "Stage whose last checkpoint is read; start: initial weights; empty: the last saved."
    stage = flags.DEFINE_enum("stage", "", ["", "start", "sft", "rl"], text)
    text = "Number of training questions."
    questions = flags.DEFINE_integer("questions", 512, text, lower_bound=1)

    def reopen_and_act() -> None:
        xla_flags.set_defaults(config.value.xla_preset)
        folder = command_line.folder_of(workdir.value)
        check_keys(config.value)
        check_given(config.value, folder, (), ("rl", "reward"))
        run = open_run(config.value, folder)
        check_reflection(run)
        examples = questions_of(run, questions.value)
        act(Reopened(run, *weights.last_of(run, stage.value), examples, questions.value))

    command_line.run_command(reopen_and_act, workdir, config, _DEFAULT)


def file_of(out: str | pathlib.Path) -> pathlib.Path:
    """The path of the file that a command writes in the end; its folder is made.

    ValueError: it is an address or a folder.
    """
    path = command_line.folder_of(out, flag="--out")
    if path.is_dir():
        raise ValueError(f"expected a file, got the folder --out={path}; name a file in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def by_accuracy(run: Run) -> Run:
    """The run with CARE's successes those answers that are right."""
    config = run.config.copy_and_resolve_references()
    config.care.success = "acc"
    return dataclasses.replace(run, config=config)


def check_reflection(run: Run, cue: str | None = None) -> None:
    """Checks that the run's settings, with `cue` in place of its cue if given, allow reflection.

    Raises:
        ValueError: they do not; names the key to change.
    """
    config = run.config.copy_and_resolve_references()
    config.stages, config.rl.objective = ("rl",), "care"
    config.care.reflect, config.care.reflect_mode = True, "cue"
    config.keep_best = 0  # would need evaluations inside the stage
    if cue is not None:
        config.care.cue = cue
    check_config(config, run.mesh)
    check_policy(config, run.policy)


def questions_of(run: Run, num_questions: int) -> Sequence[Example]:
    """The training data of RL, which must have at least `num_questions` examples."""
    examples = open_examples(run.config, "rl", run.has_reward)
    if num_questions > len(examples):
        raise ValueError(
            f"--questions must be at most {len(examples)}, the size of data.train, got "
            f"{num_questions}"
        )
    return examples


class Tried(NamedTuple):
    """Groups with both outcomes: N questions, G rollouts of each."""

    num_asked: int  # different questions sampled, N of them with both outcomes
    asked: list[Example]
    requests: list[Request]  # to decode the questions again
    texts: Shaped[np.ndarray, "N G"]
    accs: Float[np.ndarray, "N G"]  # in [0, 1]
    subgroup: Subgroup


def sample_groups(
    run: Run,
    programs: RolloutPrograms,
    params: backbone.Params,
    rng: PRNGKeyArray,
    examples: Sequence[Example],
    num_questions: int,
    verifier: Verifier,
) -> Tried:
    """Samples a group for each of the first `num_questions` examples of the shuffled stream.

    `programs` are of a run `by_accuracy`. Repeated questions, as of a small part of a mixture, are
    sampled once. Groups with an answer that a reward function failed to judge are left out.
    Single-process; `params` are in the decode layout.

    Raises:
        ValueError: no group has both outcomes.
    """
    decode_rng, select_rng = jax.random.split(rng)
    options = {"seed": run.config.seed, "num_workers": run.config.data.num_workers}
    stream = Batches(examples, run.policy.prompts, batch_size=num_questions, **options)
    asked, prompts = stream.batch(0)
    # Ids are unique inside a file, and sources may share a name.
    names = [(example.source, example.id, example.question) for example in asked]
    drawn = {name: i for i, name in reversed([*enumerate(names)])}
    first = sorted(drawn.values())  # first occurrence of each question
    asked, prompts = [asked[i] for i in first], [prompts[i] for i in first]
    requests = [Request(index, prompt) for index, prompt in enumerate(prompts)]
    indices = np.arange(len(asked), dtype=np.int32)
    tried = verify(run, programs.decode(params, decode_rng, requests), asked, verifier)
    assert tried is not None
    subgroup = jax.device_get(programs.select(tried.rollouts, tried.scores, select_rng, indices))
    is_judged = tried.is_judged.all(1)
    if again := num_questions - len(asked):
        logging.warning("skipping %d repetitions of questions that were drawn before", again)
    if unjudged := int((~is_judged).sum()):
        logging.warning("skipping %d groups that the reward function failed on", unjudged)
    kept = np.flatnonzero(subgroup.has_update & ~subgroup.is_rescue & is_judged)
    if not len(kept):
        raise ValueError(
            f"expected groups with both outcomes, got none among {len(asked)} questions "
            f"({tried.scores.acc.mean():.1%} of the answers are right); raise --questions, or "
            "use another checkpoint"
        )
    return Tried(
        num_asked=len(asked),
        asked=[asked[i] for i in kept],
        requests=[requests[i] for i in kept],
        texts=tried.texts[kept],
        accs=tried.scores.acc[kept],
        subgroup=jax.tree.map(lambda x: x[kept], subgroup),
    )
