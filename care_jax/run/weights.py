"""The weights of a run: initial ones, and those of a checkpoint in its workdir."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from care_jax.config.resume import TRAINING
from care_jax.data.readers import hub
from care_jax.devices import sharding
from care_jax.run import guards, integrity, lock
from care_jax.run.checkpoint import Checkpoints
from care_jax.run.progress import checkpoint_folder, saved_steps
from care_jax.run.run import Run, abstract_params
from care_jax.run.workdir import is_cold_start_unread, open_checkpoints
from models import backbone, lora
from models.backbone import Params


class Source(NamedTuple):
    """The weights that are exported, or evaluated by a run that does not train."""

    stages: tuple[str, ...]  # the training stages that led to it, with a checkpoint each
    # Of the last stage, whole; None: the weights just trained, or the initial ones.
    step: int | None
    name: str  # "start", or the last stage, with the step if it is not the last: "rl_step_40"


def find(run: Run, trained: tuple[str, ...]) -> Source:
    """Resolves `export.step`, for an export or an evaluation without training.

    `trained` are the training stages of this run so far; if there are none, those with checkpoints
    in its workdir count.

    Raises:
        ValueError: there is no such checkpoint, or it is damaged; the message lists the saved ones.
    """
    wanted = run.config.export.step
    stages = trained or tuple(stage for stage in TRAINING if saved_steps(run.workdir, stage))
    if wanted == "last" and (trained or not stages):
        return Source(stages, None, name=stages[-1] if stages else "start")
    if not stages:
        raise ValueError(
            f"export.step {wanted!r} needs a checkpoint, and {run.workdir} has none; train first, "
            "choose the --workdir of a run, or set export.step to 'last' for the weights that the "
            "run starts from"
        )
    with open_checkpoints(run, stages[-1]) as saved:
        last = saved.latest_whole_step() if wanted == "last" else None
        best = saved.best_whole_step() if wanted == "best" else saved.best_step
        if wanted.isdecimal() and int(wanted) in saved.steps:
            saved.check_whole(int(wanted))
        steps = [*saved.steps]
    step = {"last": last, "best": best}.get(wanted, wanted)
    if step is None or int(step) not in steps:
        known = f"the best by {run.config.best_metric!r}: {best or 'none was evaluated'}"
        raise ValueError(
            f"export.step {wanted!r} must be a saved step of {stages[-1]}: {steps}, {known}; set "
            "it to one of these, or train with eval_every and keep_best"
        )
    name = stages[-1] if wanted == "last" else f"{stages[-1]}_step_{step}"
    return Source(stages, int(step), name)


def start(run: Run) -> Params:
    """The weights of `model.path`, or random ones, in the training layout.

    Raises:
        ValueError: the release is incomplete, does not match its manifest, is another one on
            another process, or has weights that are not finite.
    """
    model, shape = run.config.model, run.policy.config
    dtype, shardings = jnp.dtype(model.param_dtype), sharding.of(lora.without(abstract_params(run)))
    if run.policy.folder is None:
        params = backbone.init(shape, jax.random.key(run.config.seed), dtype)
        return jax.device_put(params, shardings)
    folder = hub.find(model.path, hub.MODEL, kind="model")  # downloads the weights of a hub id
    integrity.refuse_other_copies(folder)
    integrity.refuse_damaged(folder, integrity.shared_damage(folder))
    params, _ = backbone.load(folder, shape, dtype, shardings)
    advice = "choose another, or export it again"
    guards.check_weights(run, params, f"model.path {model.path}", advice)
    return params


def start_of(run: Run, stage: str) -> Params:
    """The initial weights, or only their shapes if the first stage is resumed without them."""
    is_unread = False
    if stage == "sft":
        is_unread = saved_steps(run.workdir, "sft") or is_cold_start_unread(run)
    elif stage == "rl":
        is_unread = saved_steps(run.workdir, "rl") and not run.has_reference_copy
    return lora.without(abstract_params(run)) if is_unread else start(run)


def load(run: Run, source: Source) -> Params:
    """The weights of a source with adapters merged, or the initial ones."""
    if source.step is None:
        return start(run)
    return lora.merged(restore(run, source.stages[-1], source.step, is_whole=True))


def last_of(run: Run, stage: str) -> tuple[Params, str, str]:
    """The weights of a stage's last checkpoint, or the initial ones.

    Opening checkpoints deletes unfinished saves, and would break one in progress. The workdir is
    therefore locked meanwhile.

    `stage` is "sft", "rl" or "start"; "" for the last that exists. Returns the weights, the stage,
    and a name: "sft 1600", or the source of the initial weights.

    Raises:
        ValueError: there is no such checkpoint, all are damaged, or the run is training.
    """
    for name in [stage] if stage else ["rl", "sft", "start"]:
        if name == "start":
            return start(run), name, run.config.model.path or "random weights"
        if saved_steps(run.workdir, name):
            with lock.held(run.workdir), open_checkpoints(run, name) as saved:
                step = saved.latest_whole_step()
                assert step is not None  # else opening has raised
                advice = f"remove {saved.folder / str(step)} to use the step before it"
                params = _restored(run, saved, name, step, advice)
                return lora.merged(params), name, f"{name} {step}"
    raise ValueError(
        f"expected a checkpoint in {checkpoint_folder(run.workdir, stage)}, found none; train "
        "first, or choose another --workdir or --stage"
    )


def finished(run: Run, stage: str) -> Params | None:
    """The weights of a stage that has nothing left to do, adapters merged; None if it has.

    Its last step is saved, and evaluated if `eval_every` asks for it. The optimizer's state is not
    read, and nothing is compiled.
    """
    section = run.config[stage]
    if section.num_steps not in saved_steps(run.workdir, stage):
        return None
    if section.eval_every and not run.metrics.line(f"{stage}_eval", section.num_steps):
        return None
    with open_checkpoints(run, stage) as saved:
        if saved.latest_whole_step() != section.num_steps:
            return None  # damaged
        folder = saved.folder / str(section.num_steps)
        advice = f"remove {folder}, then run the same command"
        return lora.merged(_restored(run, saved, stage, section.num_steps, advice))


def restore(
    run: Run,
    stage: str,
    step: int | None,
    of: Callable[[Params], Params] = lambda params: params,
    *,
    is_whole: bool = False,
) -> Params:
    """The parameters of a stage's checkpoint, or a part of them, in the training layout.

    `step` is by default the last saved one; `of` selects the part from the whole tree. A step that
    `is_whole`, as `find` gives it, is not hashed again.

    Raises:
        ValueError: the step is damaged, or its parameters are not finite.
    """
    with open_checkpoints(run, stage) as saved:
        step = saved.latest_step if step is None else step
        assert step is not None  # the caller has found the stage
        advice = f"set export.step to another of the saved steps {saved.steps}"
        return _restored(run, saved, stage, step, advice, of, is_whole=is_whole)


def _restored(
    run: Run,
    saved: Checkpoints,
    stage: str,
    step: int,
    advice: str,
    of: Callable[[Params], Params] = lambda params: params,
    *,
    is_whole: bool = False,
) -> Params:
    """`advice`: what to do if a parameter is not finite."""
    params = saved.restore_params(of(abstract_params(run)), step, is_whole=is_whole)
    guards.check_weights(run, params, f"checkpoint {step} of {stage}", advice)
    return params
