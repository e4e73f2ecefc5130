"""What all stages of one run share."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from care_jax.config import resume
from care_jax.devices import sharding
from care_jax.learning import optimizer
from care_jax.learning.train_step import TrainState, init_state, state_shardings
from care_jax.method.objectives import Objective, objective_of
from care_jax.report.metrics import MetricWriter
from care_jax.rewards.reward_function import RewardFunction
from care_jax.rewards.verifier import Verifier
from care_jax.run.checkpoint import Checkpoints
from care_jax.run.policy import Policy, abstract_params, decode_shardings, with_adapters
from models import backbone
from models.backbone import Params


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's configuration, and the objects that last for the whole run.

    Attributes:
        config: complete, see `configs/common.py`.
        policy: the policy that is trained.
        mesh: the devices.
        workdir: folder of metrics, checkpoints and exports.
        metrics: the metric writer; None for a run that is only compiled.
        reward: a reward function given from Python in place of `verifier.reward`.
    """

    config: ConfigDict
    policy: Policy
    mesh: Mesh
    workdir: pathlib.Path
    metrics: MetricWriter
    reward: RewardFunction | None = None

    @functools.cached_property
    def objective(self) -> Objective:
        """The objective that `rl.objective` and its section define."""
        return objective_of(self.config)

    @property
    def has_trainer_logp(self) -> bool:
        """Whether the trainer recomputes π_old instead of taking it from the sampler."""
        return self.config.rl.old_logp == "trainer" or self.objective.is_reframed

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

    def chunk_of_row(self, microbatch_size: int) -> int:
        """Tokens per row whose logits are in memory at a time: `model.logprob_chunk` per device.

        For every chunk the table of the logits is gathered and its gradient scattered. On GPUs with
        sharded parameters larger chunks therefore move less, and take less memory: of the 7B on
        8 H100 a microbatch receives 60 GB instead of 89, and its update needs 44 GiB instead of 62.

        Args:
            microbatch_size: rows per forward and backward pass, over all devices.
        """
        rows_of_device = microbatch_size // sharding.num_shards(self.train_batch_sharding)
        is_gathered = sharding.num_shards_of("embed", self.config.sharding_rules, self.mesh) > 1
        is_gpu = sharding.platform(self.mesh) == "gpu"
        chunk = self.config.model.logprob_chunk or (4096 if is_gpu and is_gathered else 1024)
        return max(chunk // max(rows_of_device, 1), 1)

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that restores it."""
        return self.policy.fingerprint() | {"lora_rank": self.config.model.lora_rank}

    def partition(self, params: Params) -> tuple[Params, Params]:
        """(trained, frozen) parameters, see `optimizer.partition`."""
        model = self.config.model
        return optimizer.partition(
            params, freeze_vision=model.freeze_vision, freeze_decoder=model.freeze_decoder
        )

    def placed(self, function: Callable) -> Callable:
        """`function` with activations sharded for training."""
        return sharding.placed(function, self.config.sharding_rules, self.mesh)


def open_checkpoints(run: Run, stage: str) -> Checkpoints:
    """The checkpoints of a stage, "sft" or "rl"; to be closed.

    Raises:
        ValueError: they are of a run with other settings, see `resume`, or none is whole.
    """
    settings = resume.settings(run.config, stage)
    checkpoints = Checkpoints(
        checkpoint_folder(run, stage),
        keep=run.config.keep_checkpoints,
        keep_best=run.config.keep_best,
        best_metric=run.config.best_metric,
        fingerprint=run.fingerprint(),
        settings=settings,
    )
    step = checkpoints.latest_step
    if step is not None:
        try:
            saved, folder = checkpoints.saved_settings(), checkpoints.folder
            resume.check(saved, settings, stage=stage, step=step, folder=folder)
        except ValueError:
            checkpoints.close()
            raise
    return checkpoints


def check_workdir(run: Run) -> None:
    """Opens the checkpoints that the workdir has, of whatever stage, and closes them.

    Raises:
        ValueError: see `open_checkpoints`; or RL would not start from the cold start that is here.
    """
    stages = run.config.stages
    if "rl" in stages and "sft" not in stages and has_checkpoint(run, "sft"):
        raise ValueError(
            f"{checkpoint_folder(run, 'sft')} has a cold start, from which RL would not start, as "
            f'stages {tuple(stages)} lacks "sft"; add it (what is done of it is not repeated), or '
            "choose another --workdir to start from the weights of model.path"
        )
    for stage in resume.TRAINING:
        if any(path.name[0].isdecimal() for path in checkpoint_folder(run, stage).glob("*")):
            open_checkpoints(run, stage).close()


def has_checkpoint(run: Run, stage: str) -> bool:
    """Whether the workdir has checkpoints of a stage, "sft" or "rl", that are not set aside."""
    return any(path.name.isdecimal() for path in checkpoint_folder(run, stage).glob("*"))


def checkpoint_folder(run: Run, stage: str) -> pathlib.Path:
    """Where the checkpoints of a stage are, if there are any."""
    return run.workdir / "checkpoints" / stage


def verifier_of(run: Run) -> Verifier:
    """The verifier that the section `verifier` defines; a context manager."""
    section = run.config.verifier
    return Verifier(
        num_workers=section.num_workers,
        timeout=section.timeout,
        think_tag=run.policy.think_tag,
        reward=run.reward or section.reward,
        weights=section.weights,
        success=section.success,
        concurrency=section.concurrency,
    )


def make_adamw(run: Run, stage: str) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """The learning rate schedule and the optimizer of a stage, "sft" or "rl"."""
    section = run.config[stage]
    num_updates = section.num_steps
    if stage == "rl":
        num_updates *= section.prompts_per_step // section.prompts_per_update
    learning_rate_at = optimizer.make_schedule(
        learning_rate=section.learning_rate,
        warmup_steps=section.warmup_steps,
        num_steps=num_updates,
        schedule=section.schedule,
    )
    adamw = optimizer.make_optimizer(
        learning_rate_at,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
    )
    return learning_rate_at, adamw


def start_state(run: Run, params: Params, adamw: optax.GradientTransformation) -> TrainState:
    """The state a stage starts from: adapters added and optimizer state placed as configured.

    Args:
        run: the run.
        params: without adapters, on the mesh. Must not be used afterwards.
        adamw: optimizer of the trained parameters.
    """
    model = run.config.model
    if model.lora_rank:
        params = with_adapters(
            params,
            run.policy,
            run.mesh,
            run.config.sharding_rules,
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            seed=run.config.seed,
        )
    state = _init_state(run, params, adamw)
    return jax.device_put(state, _state_shardings(run, state))


def params_of(run: Run) -> Params:
    """Shape, dtype and sharding of every trained or frozen parameter, adapters included."""
    model = run.config.model
    return abstract_params(
        run.policy,
        run.mesh,
        run.config.sharding_rules,
        dtype=jnp.dtype(model.param_dtype),
        lora_rank=model.lora_rank,
    )


def compile_to_decode_layout(run: Run) -> Callable[[Params], Params]:
    """The jitted params -> params in the decode layout."""
    policy, dtype = run.policy, jnp.dtype(run.config.model.compute_dtype)
    layout = decode_shardings(policy, run.mesh, run.config.decode_sharding_rules)

    def to_decode_layout(params):
        return backbone.to_decode_layout(params, policy.config, dtype)

    return jax.jit(to_decode_layout, out_shardings=layout)


def abstract_state(run: Run, adamw: optax.GradientTransformation) -> TrainState:
    """Shape, dtype and sharding of the result of `start_state`, without allocating arrays."""
    params = params_of(run)
    state = jax.eval_shape(lambda params: _init_state(run, params, adamw), params)
    state = dataclasses.replace(state, params=params)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        state,
        _state_shardings(run, state),
    )


def _init_state(run: Run, params: Params, adamw: optax.GradientTransformation) -> TrainState:
    dtype = jnp.dtype(run.config.model.moments_dtype)
    return init_state(params, adamw, partition=run.partition, moments_dtype=dtype)


def _state_shardings(run: Run, state: TrainState) -> TrainState:
    shardings = state_shardings(state, run.mesh)
    if "optimizer" in run.config.model.offload:
        opt_state = sharding.on_host(shardings.opt_state)
        shardings = dataclasses.replace(shardings, opt_state=opt_state)
    return shardings
