"""What all stages of one run share: `open_run` checks a configuration and assembles its run."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from care_jax.config import resume
from care_jax.config.checks import check_config, fill_in, has_benchmarks_only, is_evaluated
from care_jax.devices import placement, sharding, streams
from care_jax.devices.sharding import make_mesh
from care_jax.learning import optimizer
from care_jax.learning.train_step import TrainState, init_state, state_shardings
from care_jax.method.objectives import Objective, objective_of
from care_jax.report.metrics import MetricWriter
from care_jax.rewards.reward_function import RewardFunction
from care_jax.rewards.verifier import Verifier
from care_jax.run.checkpoint import Checkpoints
from care_jax.run.policy import Policy, check_policy, decode_shardings, policy_of
from care_jax.run.progress import read_progress
from care_jax.run.versions import config_before
from models import backbone, lora
from models.attention.packed import AttentionImpl
from models.backbone import Params

# What may come from Python, and what it replaces in the configuration.
_GIVEN_FOR = {"rl": "data.train", "evaluate": "data.test", "reward": "verifier.reward"}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's configuration, and the objects that last for the whole run."""

    config: ConfigDict  # complete, see `configs/common.py`
    policy: Policy
    mesh: Mesh
    workdir: pathlib.Path  # folder of metrics, checkpoints and exports
    writer: MetricWriter | None = None  # None if the run neither trains nor evaluates
    reward: RewardFunction | None = None  # given from Python in place of `verifier.reward`

    @property
    def metrics(self) -> MetricWriter:
        """The metric writer of a run that trains or evaluates."""
        assert self.writer is not None, "this run was opened without a metric writer"
        return self.writer

    @property
    def has_reward(self) -> bool:
        """Whether a reward function judges in place of the verifier's rules."""
        return bool(self.reward or self.config.verifier.reward)

    @functools.cached_property
    def objective(self) -> Objective:
        """The objective that `rl.objective` and its section define."""
        return objective_of(self.config)

    @property
    def has_trainer_logp(self) -> bool:
        """Whether the trainer recomputes π_old, at least of rows trained without their context."""
        return self.config.rl.old_logp == "trainer" or self.objective.drops_context

    @property
    def has_reference_copy(self) -> bool:
        """Whether the KL term needs a copy of the initial parameters, which LoRA keeps frozen."""
        return bool(self.objective.beta) and not self.config.model.lora_rank

    @property
    def train_batch_sharding(self) -> NamedSharding:
        """Sharding of the packed rows of an RL update or of a cold-start step."""
        return sharding.batch_sharding(self.mesh, self.config.sharding_rules)

    @property
    def decode_batch_sharding(self) -> NamedSharding:
        """Sharding of prompts and their rollouts."""
        return sharding.batch_sharding(self.mesh, self.config.decode_sharding_rules)

    def attention(self, *, is_decoding: bool = False, name: str = "") -> AttentionImpl:
        """The implementation of `name`, by default of model.attention; not compared with XLA."""
        rules = self.config.decode_sharding_rules if is_decoding else self.config.sharding_rules
        return sharding.attention_impl(name or self.config.model.attention, rules, self.mesh)

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that restores it."""
        return self.policy.fingerprint() | {"lora_rank": self.config.model.lora_rank}

    def partition(self, params: Params) -> tuple[Params, Params]:
        """(trained, frozen) parameters, see `optimizer.partition`."""
        return optimizer.partition(params, freeze_vision=self.config.model.freeze_vision)

    def placed(self, function: Callable) -> Callable:
        """`function` with activations sharded for training."""
        return placement.placed(function, self.config.sharding_rules, self.mesh)


def open_run(
    config: ConfigDict,
    workdir: pathlib.Path,
    *,
    mesh: Mesh | None = None,
    policy: Policy | None = None,
    writer: MetricWriter | None = None,
    reward: RewardFunction | None = None,
    overridden: Collection[str] = (),
    given: Collection[str] = (),
) -> Run:
    """Assembles the run of a configuration; writes no file and reads no weights.

    Args:
        config: complete, see `configs/common.py`; it is not changed.
        workdir: need not exist.
        mesh, policy: by default that of `config.mesh` on all devices, and that of `config.model`.
        overridden: keys set on the command line, see `check_config`.
        given: stages whose examples come from Python.

    Raises:
        ValueError: the configuration cannot run; names the key to change.
    """
    mesh = mesh or make_mesh(**config.mesh)
    config = fill_in(config, mesh)
    given = [*given, *(["reward"] if reward else [])]
    saved = {stage: saved_steps(workdir, stage) for stage in resume.TRAINING}
    check_config(config, mesh, overridden, given, saved)
    if policy is None:
        policy = policy_of(config)
        check_policy(config, policy)
    return Run(config, policy, mesh, workdir, writer, reward)


def open_checkpoints(run: Run, stage: str) -> Checkpoints:
    """Opens the checkpoints of a stage, "sft" or "rl"; the caller closes them.

    Raises:
        ValueError: they are of a run with other settings, see `resume`, or all are damaged.
    """
    checkpoints = Checkpoints(
        checkpoint_folder(run, stage),
        keep=run.config.keep_checkpoints,
        keep_best=run.config.keep_best,
        best_metric=run.config.best_metric,
        fingerprint=run.fingerprint(),
        settings=resume.settings(run.config, stage),
    )
    if (step := checkpoints.latest_step) is not None:
        try:
            check_settings(run, stage, step)
        except ValueError:
            checkpoints.close()
            raise
    return checkpoints


def check_settings(run: Run, stage: str, step: int) -> None:
    """Compares the run with a checkpoint of a stage, "sft" or "rl"; reads one file of it only.

    Raises:
        ValueError: it is of another model, or of a run with other settings, see `resume`.
    """
    folder = checkpoint_folder(run, stage)
    saved = read_progress(folder, step, run.fingerprint()).get("settings", {})
    ours = resume.settings(run.config, stage)
    resume.check(saved, ours, stage=stage, step=step, folder=folder)


def check_given(
    config: ConfigDict, workdir: pathlib.Path, given: Collection[str], read: Collection[str]
) -> None:
    """Checks that RL's rows and reward come from where those of its checkpoints came from.

    The settings do not tell: rows and a function from Python have no place there. Another source in
    data.test may take the place of held-out rows.

    Args:
        given: what comes from Python: "rl" and "evaluate" for a stage's examples, and "reward".
        read: what the command needs, of these.

    Raises:
        ValueError: something is read that came from Python before, and does not now; or something
            comes from there now that did not before.
    """
    saved = config_before(workdir)
    if "given" not in saved or not saved_steps(workdir, "rl"):
        return
    before, now = {*saved["given"]}, json.loads(config.to_json_best_effort())
    replaced = {name for name, key in _GIVEN_FOR.items() if _at(saved, key) != _at(now, key)}
    if lost := (before & {*read}) - {*given} - replaced:
        others = "" if lost - {"evaluate"} else "set data.test, "
        raise ValueError(
            f"the run in {workdir} had its own from Python in place of {_keys_of(lost)}: call "
            f"care_jax.train_on with it, {others}or choose another workdir"
        )
    if new := ({*given} - before) & {"rl", "reward"}:
        raise ValueError(
            f"the RL stage in {workdir} began with {_keys_of(new)} of its configuration, got "
            "others from Python; leave them out, or choose another workdir"
        )


def read_by(config: ConfigDict, given: Collection[str] = ()) -> list[str]:
    """What the stages of a configuration read, of what may come from Python; see `check_given`."""
    is_held_out = is_evaluated(config) and not has_benchmarks_only(config, given)
    rows = ["rl"] * ("rl" in config.stages) + ["evaluate"] * is_held_out
    return rows + ["reward"] * bool(rows)


def _at(settings: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    return settings.get(section, {}).get(name)


def _keys_of(names: Collection[str]) -> str:
    return " and ".join(key for name, key in _GIVEN_FOR.items() if name in names)


def check_workdir(run: Run, *, is_dry: bool = False) -> None:
    """Checks that the run can go on from the checkpoints in its workdir.

    If `is_dry`, nothing is changed there; else unfinished saves are deleted.

    Raises:
        ValueError: see `open_checkpoints`; or RL would ignore the cold start in the workdir, or
            needs it and it is gone; or no checkpoint can be written in a folder of that name.
    """
    _check_name(run.workdir.absolute())
    stages = run.config.stages
    if "rl" in stages and "sft" not in stages and has_checkpoint(run, "sft"):
        raise ValueError(
            f"{checkpoint_folder(run, 'sft')} has checkpoints of a cold start, which RL would "
            f"ignore, as stages {tuple(stages)} lacks 'sft'; add it (finished steps are not "
            "repeated), or choose another --workdir to start from the weights of model.path"
        )
    for stage in resume.TRAINING:
        if is_dry:
            if saved := saved_steps(run.workdir, stage):
                check_settings(run, stage, max(saved))
        elif any(path.name[0].isdecimal() for path in checkpoint_folder(run, stage).glob("*")):
            open_checkpoints(run, stage).close()
    is_gone = is_past_cold_start(run) and not has_checkpoint(run, "sft")
    if is_gone and not is_cold_start_unread(run):
        needs = "a stage before RL" if _is_between(run) else "RL's KL term"
        raise ValueError(
            f"{needs} needs the weights of the cold start, whose checkpoints are gone from "
            f"{checkpoint_folder(run, 'sft')}; put them back, or choose another --workdir"
        )


def is_past_cold_start(run: Run) -> bool:
    """Whether the run has a cold start ahead of an RL stage with checkpoints."""
    return {"sft", "rl"} <= {*run.config.stages} and has_checkpoint(run, "rl")


def is_cold_start_unread(run: Run) -> bool:
    """Whether RL goes on from its own checkpoints, and nothing needs the cold start's weights."""
    return is_past_cold_start(run) and not (_is_between(run) or run.has_reference_copy)


def trained_stages(run: Run) -> list[str]:
    """The stages of the run that train, without a cold start that is unread."""
    stages = [stage for stage in resume.TRAINING if stage in run.config.stages]
    return [stage for stage in stages if stage != "sft" or not is_cold_start_unread(run)]


def _is_between(run: Run) -> bool:
    """Whether a stage between the cold start and RL works on its weights."""
    return run.config.stages.index("rl") != run.config.stages.index("sft") + 1


def _check_name(folder: pathlib.Path) -> None:
    """Rejects names of folders in which Orbax writes checkpoints that cannot be read.

    It finds files that it has written with a pattern that includes the folder's name, takes "gs:/"
    for an address and "\\" for the "/" of Windows, and its metadata is in UTF-8.
    """
    if found := [part for part in ("*", "?", "[", "\\", ":/") if part in f"{folder}/"]:
        raise ValueError(
            "expected a --workdir without *, ?, [, \\ and :/, where checkpoints could not be read, "
            f"got {found[0]} in {folder}; choose another --workdir"
        )
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        name = os.fsencode(folder).decode(errors="backslashreplace")
        raise ValueError(
            f"expected a --workdir whose name is UTF-8, got {name}; choose another --workdir"
        ) from error


def has_checkpoint(run: Run, stage: str) -> bool:
    """Whether the workdir has checkpoints of a stage, "sft" or "rl", that are not set aside."""
    return bool(saved_steps(run.workdir, stage))


def saved_steps(workdir: pathlib.Path, stage: str) -> list[int]:
    """The steps of a stage, "sft" or "rl", whose checkpoints are whole and not set aside, in order.

    Orbax writes commit_success.txt last. On a bucket an unfinished save has a whole one's name.
    """
    files = (workdir / "checkpoints" / stage).glob("*/commit_success.txt")
    names = [file.parent.name for file in files]
    return sorted(int(name) for name in names if name.isdecimal())


def checkpoint_folder(run: Run, stage: str) -> pathlib.Path:
    """The folder of a stage's checkpoints, which need not exist."""
    return run.workdir / "checkpoints" / stage


def verifier_of(run: Run) -> Verifier:
    """The verifier that the section `verifier` defines; a context manager."""
    section = run.config.verifier
    keys = ("num_workers", "timeout", "weights", "success", "concurrency")
    options = {key: section[key] for key in keys}
    reward = run.reward or section.reward
    return Verifier(think_tag=run.policy.think_tag, reward=reward, **options)


def schedule_of(run: Run, stage: str) -> optax.Schedule:
    """The learning rate of each update of a stage, "sft" or "rl"."""
    section = run.config[stage]
    num_updates = section.num_steps
    if stage == "rl":
        num_updates *= section.prompts_per_step // section.prompts_per_update
    options = {key: section[key] for key in ("learning_rate", "warmup_steps", "schedule")}
    return optimizer.make_schedule(num_steps=num_updates, **options)


def make_adamw(run: Run, stage: str) -> optax.GradientTransformation:
    """The optimizer of a stage, "sft" or "rl"."""
    options = {key: run.config[stage][key] for key in ("weight_decay", "max_grad_norm")}
    return optimizer.make_optimizer(schedule_of(run, stage), **options)


def start_state(
    run: Run, params: Params, adamw: optax.GradientTransformation, stage: str
) -> TrainState:
    """The state that a stage, "sft" or "rl", starts from: adapters added, optimizer state placed.

    `params` have no adapters and are on the mesh. They must not be used afterwards. If they are
    shapes, so is the result.
    """
    model = run.config.model
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        return abstract_state(run, adamw)
    if model.lora_rank:
        rng = streams.key_of(run.config.seed, streams.ADAPTERS[stage])
        options = {"rank": model.lora_rank, "experts": model.lora_experts}
        params = lora.add(params, rng, alpha=model.lora_alpha, **options)
        params = jax.device_put(params, sharding.of(abstract_params(run)))
    state = _init_state(run, params, adamw)
    return jax.device_put(state, _state_shardings(run, state))


def abstract_params(run: Run) -> Params:
    """Shape, dtype and sharding of every trained or frozen parameter, adapters included."""
    config, model = run.policy.config, run.config.model
    rank, experts = model.lora_rank, model.lora_experts

    def init(key):
        params = backbone.init(config, key, jnp.dtype(model.param_dtype))
        return lora.add(params, key, rank=rank, alpha=1.0, experts=experts) if rank else params

    axes = backbone.logical_axes(config)
    axes = lora.add_axes(axes, experts=experts) if rank else axes
    shapes = jax.eval_shape(init, jax.random.key(0))
    rules = run.config.sharding_rules
    return sharding.abstract(shapes, sharding.param_shardings(axes, shapes, rules, run.mesh))


def compile_to_decode_layout(run: Run) -> Callable[[Params], Params]:
    """The jitted params -> params in the decode layout."""
    policy, dtype = run.policy, jnp.dtype(run.config.model.compute_dtype)
    layout = decode_shardings(policy, run.mesh, run.config.decode_sharding_rules)

    def to_decode_layout(params):
        return backbone.to_decode_layout(params, policy.config, dtype)

    return jax.jit(to_decode_layout, out_shardings=layout)


def abstract_state(run: Run, adamw: optax.GradientTransformation) -> TrainState:
    """Shape, dtype and sharding of the result of `start_state`, without allocating arrays."""
    params = abstract_params(run)
    state = jax.eval_shape(lambda params: _init_state(run, params, adamw), params)
    state = dataclasses.replace(state, params=params)
    return sharding.abstract(state, _state_shardings(run, state))


def _init_state(run: Run, params: Params, adamw: optax.GradientTransformation) -> TrainState:
    model = run.config.model
    moments_dtype = jnp.dtype(model.moments_dtype)
    return init_state(params, adamw, freeze_vision=model.freeze_vision, moments_dtype=moments_dtype)


def _state_shardings(run: Run, state: TrainState) -> TrainState:
    shardings = state_shardings(state, run.mesh)
    if "optimizer" in run.config.model.offload:
        opt_state = sharding.on_host(shardings.opt_state)
        shardings = dataclasses.replace(shardings, opt_state=opt_state)
    return shardings
