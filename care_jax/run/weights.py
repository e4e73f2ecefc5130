"""The weights of a run: those it starts from, and those of a checkpoint in its workdir."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from care_jax.config.resume import TRAINING
from care_jax.run import guards
from care_jax.run.policy import initial_params
from care_jax.run.run import Run, has_checkpoint, open_checkpoints, params_of
from models import lora
from models.backbone import Params


class Source(NamedTuple):
    """What is exported, or evaluated by a run that does not train.

    Attributes:
        stages: the training stages that led to it, with a checkpoint each.
        step: of the last of them; None: the weights that the run started from.
        in_memory: the run has just trained these weights, or starts from them.
        name: "start", or the last stage, with the step if it is not the last: "rl_step_40".
    """

    stages: tuple[str, ...]
    step: int | None
    in_memory: bool
    name: str


def find(run: Run, trained: tuple[str, ...]) -> Source:
    """What `export.step` means: for an export, and for an evaluation without training.

    Args:
        run: the run.
        trained: the training stages of this run so far; if there are none, those that have
            checkpoints in its workdir.

    Raises:
        ValueError: there is no such checkpoint; the message names those that there are.
    """
    wanted = run.config.export.step
    stages = trained or tuple(stage for stage in TRAINING if has_checkpoint(run, stage))
    if wanted == "last" and (not stages or (trained and not run.config.model.lora_rank)):
        return Source(stages, None, in_memory=True, name=stages[-1] if stages else "start")
    if not stages:
        raise ValueError(
            f"export.step {wanted!r} needs a checkpoint, and {run.workdir} has none; train first, "
            "name the --workdir of a run, or set export.step to 'last' for the weights that the "
            "run starts from"
        )
    with open_checkpoints(run, stages[-1]) as saved:
        # A damaged step is set aside, and the one before, or the next best, is taken.
        while wanted == "best" and saved.best_step and not saved.is_whole(saved.best_step):
            pass
        last = saved.latest_whole_step() if wanted == "last" else None
        steps, best = [*saved.steps], saved.best_step
    step = {"last": last, "best": best}.get(wanted, wanted)
    if step is None or int(step) not in steps:
        known = f"the best by {run.config.best_metric!r}: {best or 'none was evaluated'}"
        raise ValueError(
            f"export.step {wanted!r} is no saved step of {stages[-1]}; saved are {steps}, {known}; "
            "name one of these, or train with eval_every and keep_best"
        )
    name = stages[-1] if wanted == "last" else f"{stages[-1]}_step_{step}"
    return Source(stages, int(step), in_memory=bool(trained) and wanted == "last", name=name)


def start(run: Run) -> Params:
    """The weights of `model.path`, or random ones, in the training layout.

    Raises:
        ValueError: they are not finite.
    """
    config = run.config
    params = initial_params(
        run.policy,
        run.mesh,
        config.sharding_rules,
        seed=config.seed,
        dtype=jnp.dtype(config.model.param_dtype),
    )
    if config.model.path:
        name = f"model.path {config.model.path}"
        guards.check_weights(run, params, name, "choose another, or export it again")
    return params


def load(run: Run, source: Source) -> Params:
    """The weights of a source that is not in memory, adapters merged; see `restore`."""
    return lora.merged(restore(run, source.stages[-1], source.step))


def restore(
    run: Run,
    stage: str,
    step: int | None,
    of: Callable[[Params], Params] = lambda params: params,
) -> Params:
    """The parameters of a checkpoint of a stage, or a part of them, in the training layout.

    Args:
        run: the run.
        stage: "sft" or "rl", with a checkpoint.
        step: a saved step; None: the last.
        of: takes the part out of the tree of all.

    Raises:
        ValueError: the step is damaged, or its parameters are not finite.
    """
    with open_checkpoints(run, stage) as saved:
        step = saved.latest_step if step is None else step
        assert step is not None  # the caller has found the stage
        params = saved.restore_params(of(params_of(run)), step)
        name = f"checkpoint {step} of {stage}"
        advice = f"set export.step to another of the saved steps {saved.steps}"
        guards.check_weights(run, params, name, advice)
        return params
