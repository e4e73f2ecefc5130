"""A run opened again by another command: its weights, and groups that are sampled from them."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags, logging
from jaxtyping import Float, PRNGKeyArray, Shaped
from ml_collections import ConfigDict, config_flags

from care_jax import command_line, run_weights
from care_jax.batch import Example
from care_jax.config_checks import check_config, check_policy, fill_in
from care_jax.data.pipeline import Batches
from care_jax.decoding.queue import Request
from care_jax.devices import mounts, xla_flags
from care_jax.devices.sharding import make_mesh
from care_jax.main import open_stage, policy_of
from care_jax.method.select import Subgroup
from care_jax.programs import RolloutPrograms
from care_jax.rewards.verifier import Verifier
from care_jax.rollout import verify
from care_jax.run import Run, checkpoint_folder, has_checkpoint, open_checkpoints
from models import backbone, lora


class Reopened(NamedTuple):
    """What a command is given.

    Attributes:
        run: of one process.
        params: of the checkpoint, in the training layout.
        name: of the checkpoint: "sft 1600", or where the run started from.
        examples: the training data of RL.
        num_questions: how many of them to ask.
    """

    run: Run
    params: backbone.Params
    name: str
    examples: Sequence[Example]
    num_questions: int


def run_command(act: Callable[[Reopened], None]) -> None:
    """Parses the flags that these commands share and acts; user errors are one line.

    A command defines its own flags before.
    """
    config = config_flags.DEFINE_config_file("config", "configs/repair.py", "Configuration.")
    workdir = flags.DEFINE_string("workdir", "runs/repair", "Folder of the run.")
    stage = flags.DEFINE_enum("stage", "", ["", "start", "sft", "rl"], "Whose last checkpoint.")
    questions = flags.DEFINE_integer("questions", 512, "Of the training data.", lower_bound=1)

    def main(argv: Sequence[str]) -> None:
        if len(argv) > 1:
            raise ValueError(f"expected flags alone, got {argv[1]!r}; write --config.<key>=<value>")
        xla_flags.set_defaults(config.value.xla_preset)
        run, examples = open_run(config.value, mounts.as_folder(workdir.value))
        act(Reopened(run, *checkpoint_of(run, stage.value), examples, questions.value))

    logging.set_verbosity(logging.WARNING)
    try:
        app.run(main, flags_parser=lambda argv: command_line.parse(argv, config))
    except ValueError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {command_line.os_error(error, workdir.value)}")


def open_run(config: ConfigDict, workdir: pathlib.Path) -> tuple[Run, Sequence[Example]]:
    """The run of a configuration in its workdir, and its training data.

    Raises:
        ValueError: bad configuration, or the data cannot be opened.
    """
    mesh = make_mesh(**config.mesh)
    config = fill_in(config, mesh)
    check_config(config, mesh)
    policy = policy_of(config)
    reflecting = config.copy_and_resolve_references()
    reflecting.stages, reflecting.rl.objective = ("rl",), "care"  # whatever trains the policy
    check_policy(reflecting, policy)
    no_metrics: Any = None
    return Run(config, policy, mesh, workdir, no_metrics), open_stage(config, "rl")


def checkpoint_of(run: Run, stage: str) -> tuple[backbone.Params, str]:
    """The weights of a stage's last checkpoint and their name, or those that the run starts from.

    Args:
        run: the run.
        stage: "sft", "rl", "start"; "" for the last of them that there is.

    Raises:
        ValueError: there is no such checkpoint, or none that is whole.
    """
    stages = [stage] if stage else ["rl", "sft", "start"]
    for name in stages:
        if name == "start":
            return run_weights.start(run), run.config.model.path or "random weights"
        if has_checkpoint(run, name):
            with open_checkpoints(run, name) as saved:
                step = saved.latest_whole_step()
            return lora.merged(run_weights.restore(run, name, step)), f"{name} {step}"
    raise ValueError(
        f"expected a checkpoint in {checkpoint_folder(run, stage)}, found none; train first, or "
        "name another --workdir or --stage"
    )


class Tried(NamedTuple):
    """Groups with both outcomes: N questions, G rollouts of each.

    Attributes:
        num_asked: questions, of which N had both.
        asked: the questions.
        requests: for decoding them again.
        texts: of the rollouts.
        accs: their correctness in [0, 1].
        subgroup: anchor and negatives.
    """

    num_asked: int
    asked: list[Example]
    requests: list[Request]
    texts: Shaped[np.ndarray, "N G"]
    accs: Float[np.ndarray, "N G"]
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
    """Asks the first questions of a source's shuffled stream.

    Args:
        run: of one process.
        programs: compiled for the run.
        params: in the decode layout.
        rng: of the draws.
        examples: the source.
        num_questions: how many; a multiple of the shards of the decode batch.
        verifier: compares answers.

    Raises:
        ValueError: no group has both outcomes.
    """
    asked, prompts = Batches(
        examples,
        run.policy.prompts,
        batch_size=num_questions,
        seed=run.config.seed,
        num_workers=run.config.data.num_workers,
    ).batch(0)
    requests = [Request(place, prompt) for place, prompt in enumerate(prompts)]
    places = np.arange(num_questions, dtype=np.int32)
    tried = verify(run, programs.decode(params, rng, requests), asked, verifier)
    assert tried is not None
    subgroup = jax.device_get(programs.select(tried.rollouts, tried.scores, rng, places))
    kept = np.flatnonzero(subgroup.has_update & ~subgroup.is_rescue)
    if not len(kept):
        raise ValueError(
            f"expected groups with both outcomes, got none among {num_questions} questions, "
            f"{tried.scores.acc.mean():.1%} of whose answers are right; raise --questions, or "
            "name another checkpoint"
        )
    return Tried(
        num_asked=num_questions,
        asked=[asked[i] for i in kept],
        requests=[requests[i] for i in kept],
        texts=tried.texts[kept],
        accs=tried.scores.acc[kept],
        subgroup=jax.tree.map(lambda x: x[kept], subgroup),
    )
