"""What all stages of one run share: `open_run` checks a configuration and assembles its run."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from care_jax.config.checks import check_config, fill_in
from care_jax.config.resume import TRAINING
from care_jax.devices import placement, sharding, streams
from care_jax.devices.sharding import make_mesh
from care_jax.learning import optimizer
from care_jax.learning.train_step import TrainState, init_state, state_shardings
from care_jax.method.objectives import Objective, objective_of
from care_jax.report.metrics import MetricWriter
from care_jax.rewards.reward_function import RewardFunction
from care_jax.rewards.verifier import Verifier
from care_jax.run.policy import Policy, check_policy, decode_shardings, policy_of
from care_jax.run.progress import saved_steps
from models import backbone, lora
from models.attention.packed import AttentionImpl
from models.backbone import Params


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
    saved = {stage: saved_steps(workdir, stage) for stage in TRAINING}
    check_config(config, mesh, overridden, given, saved)
    if policy is None:
        policy = policy_of(config)
        check_policy(config, policy)
    return Run(config, policy, mesh, workdir, writer, reward)


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
