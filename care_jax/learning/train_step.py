"""One optimizer update with gradient accumulation: pure (state, batch) -> (state, metrics, values).

Every sum is divided by a denominator counted over the whole batch, so loss, gradient and metrics do
not depend on packing, microbatches or sharding. Empty microbatches are skipped at run time, so one
program serves batches of several sizes.

Letters: B rows, S tokens of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from care_jax.batch import HostOrDevice, ImitationBatch, TrainBatch
from care_jax.devices import sharding
from care_jax.learning import routing
from care_jax.learning.logprobs import ForwardOptions, score_rows
from care_jax.learning.optimizer import combine, differentiable, partition, round_like, widen
from care_jax.method.objective import (
    clipped_surrogate,
    correction_weight,
    is_clipped,
    k3,
    sequence_log_ratio,
)
from care_jax.method.objectives import Objective
from models.backbone import Params
from models.config import BackboneConfig

Batch = TypeVar("Batch", TrainBatch, ImitationBatch)
# Metric name -> (numerator, denominator), summed over microbatches and divided once.
Ratios = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]
# Metric with `skip_nonfinite`: for each of L trained tensors, whether its gradient is not finite.
BROKEN_GRADIENTS = "broken_gradients"


@flax.struct.dataclass
class TrainState:
    """The state that an update changes."""

    params: Params  # master weights, in the training layout
    opt_state: optax.OptState  # of the optimizer, over the trained parameters
    step: Int[HostOrDevice, ""]  # number of updates done


def init_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    *,
    freeze_vision: bool = False,
    moments_dtype: DTypeLike = jnp.float32,
) -> TrainState:
    """The state before the first update; the optimizer's arrays are stored in `moments_dtype`."""
    trained, _ = partition(params, freeze_vision=freeze_vision)
    is_moment = lambda x: x.ndim and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    opt_state = jax.tree.map(
        lambda x: x.astype(moments_dtype) if is_moment(x) else x, optimizer.init(trained)
    )
    return TrainState(params, opt_state, jnp.zeros((), jnp.int32))


def state_shardings(state: TrainState, mesh: Mesh) -> TrainState:
    """Shardings of a state: the optimizer's follow the parameters', read from the arrays."""
    params = sharding.of(state.params)
    opt_state = sharding.shardings_like(state.opt_state, params, mesh)
    return TrainState(params, opt_state, sharding.replicated(mesh))


def train_step(
    state: TrainState,
    batch: TrainBatch,
    config: BackboneConfig,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    options: ForwardOptions,
    *,
    microbatch_size: int,
    freeze_vision: bool = False,
    skip_nonfinite: bool = False,
) -> tuple[TrainState, dict[str, Float[Array, ""]], Float[Array, "B S"]]:
    """One reinforcement learning update.

        L = -Σᵢ wᵢ Σₜ vₜ min(ρₜ aₜ, clip(ρₜ, 1-ε_low, 1+ε_high) aₜ) / Σ prompt_weight
            + β · mean of k3(π_θ, π_ref)                                 (eq:ppo, eq:total-loss)

    The KL term is a mean over the tokens of is_trained for CARE, and weighted like the surrogate,
    Σᵢ wᵢ Σₜ k3 / Σ prompt_weight, for the others.
    wᵢ is the weight of response i in its prompt's loss. ρₜ is the importance ratio of the token, or
    for GSPO of the response: the geometric mean over its tokens. vₜ is 1, or with rl.correction
    `correction_weight` of the token or response.

    Args:
        objective: has ε_low, ε_high, the kind of ratio, and β; without KL if β = 0.
        microbatch_size, freeze_vision, skip_nonfinite: see `update`.

    Returns:
        the new state; metrics in nats and fractions of tokens; and log π_θ of the response tokens
        before the update, 0 elsewhere. `rationale_share` is the fraction of the positive credit,
        Σᵢ wᵢ Σₜ max(aₜ, 0), outside the answer. `clip_rate_negative_answer` is the branch-clip rate
        of fig:neg_penalty.
    """
    total_weight = jnp.maximum(batch.prompt_weight.sum(), 1e-9)
    num_trained = jnp.maximum(batch.is_trained.sum(), 1)

    beta = objective.beta
    clip = {key: getattr(objective, key) for key in ("clip_low", "clip_high", "dual_clip")}
    surrogate = jax.vmap(functools.partial(clipped_surrogate, **clip))
    clips = jax.vmap(functools.partial(is_clipped, **clip))
    kl_of = jax.vmap(k3)
    weights = functools.partial(
        correction_weight, correction=objective.correction, cap=objective.correction_cap
    )

    def log_ratio(logp, old_logp, mask, branch):
        if objective.has_sequence_ratio:
            return jax.vmap(sequence_log_ratio)(logp, old_logp, mask, branch)
        return jnp.where(mask, logp - old_logp, 0.0)

    def loss_fn(params: Params, batch: TrainBatch) -> tuple[Float[Array, ""], Any]:
        routes = batch.routes if objective.replays_routes else None
        scored, entropy, chosen = score_rows(params, batch.rows, config, options, routes)
        # The ratio of other tokens (prompts, forced tokens, padding) is 1.
        logp = jnp.where(batch.is_trained, scored, batch.old_logp)
        log_rho = log_ratio(logp, batch.old_logp, batch.is_trained, batch.rows.branch)
        of_surrogate = log_rho, jnp.zeros_like(log_rho), batch.token_advantage
        terms = batch.row_weight * surrogate(*of_surrogate)
        if objective.correction != "none":
            assert batch.drawn_logp is not None  # `rl.update_batch` fills it in
            drawn = batch.old_logp, batch.drawn_logp, batch.is_compared, batch.rows.branch
            weight, is_capped = jax.vmap(weights)(log_ratio(*drawn))
            terms *= weight
        loss = -terms.sum() / total_weight
        if beta:
            kl = jnp.where(batch.is_trained, kl_of(logp, batch.ref_logp), 0.0)
            if objective.has_token_kl:
                loss += beta * kl.sum() / num_trained
            else:
                loss += beta * (batch.row_weight * kl).sum() / total_weight

        clipped, has_credit = clips(*of_surrogate), batch.token_advantage != 0
        is_negative_answer = (batch.token_advantage < 0) & batch.is_answer
        credit = jnp.maximum(batch.row_weight * batch.token_advantage, 0.0)
        ratios = {
            "policy_loss": (-terms.sum(), batch.prompt_weight.sum()),
            "entropy": _mean(entropy, batch.is_trained),
            "kl_old": _mean(kl_of(batch.old_logp, logp), batch.is_trained),
            "clip_rate": _mean(clipped, has_credit),
            "clip_rate_negative_answer": _mean(clipped, is_negative_answer),
            "rationale_share": (jnp.where(batch.is_answer, 0.0, credit).sum(), credit.sum()),
        }
        if beta:
            ratios["kl_ref"] = _mean(kl, batch.is_trained)
        if objective.correction != "none":
            ratios["correction/weight"] = _mean(weight, batch.is_compared)
            ratios["correction/capped"] = _mean(is_capped, batch.is_compared)
        if chosen is not None:
            num_experts = config.text.num_experts
            ratios[routing.LOAD] = routing.load(chosen, batch.rows.branch >= 0, num_experts)
            if batch.routes is not None:
                ratios |= routing.differing(chosen, batch.routes, batch.is_fresh)
        return loss, (ratios, scored)

    state, metrics, logp = update(
        state,
        batch,
        loss_fn,
        optimizer,
        microbatch_size=microbatch_size,
        freeze_vision=freeze_vision,
        skip_nonfinite=skip_nonfinite,
    )
    if routing.LOAD in metrics:
        metrics |= routing.of_load(metrics.pop(routing.LOAD))
    return state, metrics, logp


def update(
    state: TrainState,
    batch: Batch,
    loss_fn: Callable[[Params, Batch], tuple[Float[Array, ""], tuple[Ratios, Any]]],
    optimizer: optax.GradientTransformation,
    *,
    microbatch_size: int,
    freeze_vision: bool = False,
    skip_nonfinite: bool = False,
) -> tuple[TrainState, dict[str, Float[Array, ""]], Any]:
    """Sums `loss_fn`'s gradients over microbatches and applies them once.

    Args:
        batch: arrays with a leading axis of B rows; its trees are `batch.rows`.
        loss_fn: a microbatch's contribution to the loss (already divided by the whole batch's
            denominators); metrics as (numerator, denominator); and a tree of values of its rows,
            [microbatch_size, ...], or None.
        microbatch_size: rows of one forward and backward; divides B.
        freeze_vision: see `optimizer.partition`.
        skip_nonfinite: an update whose loss or gradient norm is not finite leaves the state
            unchanged, including its step; adds the metric `BROKEN_GRADIENTS`.

    Returns:
        the new state, the metrics, and the values of all rows, [B, ...]; 0 in empty microbatches.

    Gradients are taken, summed and applied in float32, whatever dtype the state is stored in; only
    those of experts' kernels are rounded to the compute dtype, per device and microbatch, before
    they are summed (`models.grouped`).
    """
    trained, frozen = partition(state.params, freeze_vision=freeze_vision)
    arrays, params_of = differentiable(trained)
    value_and_grad = jax.value_and_grad(
        lambda arrays, batch: loss_fn(combine(params_of(arrays), frozen), batch), has_aux=True
    )
    microbatches = split_batch(batch, microbatch_size)

    def compute(microbatch):
        (loss, (ratios, values)), grads = value_and_grad(arrays, microbatch)
        return (loss, ratios, grads), values

    def add(index, carry):
        total, rows = carry
        new, values = compute(microbatch_at(microbatches, index))
        return jax.tree.map(jnp.add, total, new), _put_microbatch(rows, values, index)

    shapes, row_shapes = jax.eval_shape(lambda x: compute(microbatch_at(x, 0)), microbatches)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    carry = zeros, _empty_microbatches(row_shapes, microbatches)
    carry = jax.lax.fori_loop(0, num_microbatches(microbatches), add, carry)
    (loss, ratios, grads), rows = carry

    moments = jax.device_put(state.opt_state, jax.memory.Space.Device)  # may be in host memory
    wide = widen(trained)
    updates, opt_state = optimizer.update(grads, widen(moments), wide)
    updated = optax.apply_updates(wide, updates), opt_state
    rng = jax.random.fold_in(jax.random.key(0), state.step)
    before = trained
    trained, opt_state = round_like(updated, (trained, moments), rng)
    metrics = {
        name: numerator / jnp.maximum(denominator, 1e-9)
        for name, (numerator, denominator) in ratios.items()
    }
    metrics |= {"loss": loss, "grad_norm": optax.tree.norm(grads)}
    done = state.step + 1
    if skip_nonfinite:
        # optax.apply_if_finite changes the layout of checkpoints, and finally applies bad updates.
        is_finite = jnp.isfinite(loss) & jnp.isfinite(metrics["grad_norm"])
        (trained, opt_state, done) = jax.tree.map(
            lambda new, old: jnp.where(is_finite, new, old),
            (trained, opt_state, done),
            (before, moments, state.step),
        )
        broken = [~jnp.isfinite(gradient).all() for gradient in jax.tree.leaves(grads)]
        metrics[BROKEN_GRADIENTS] = jnp.stack(broken)
    return TrainState(combine(trained, frozen), opt_state, done), metrics, _join(rows)


def split_batch(batch: Batch, microbatch_size: int) -> Batch:
    """Splits [B, ...] into [B / microbatch_size, microbatch_size, ...].

    Microbatch i of n holds rows i, n + i, 2n + i, ..., so that each is sharded like the batch.
    `_join` is the inverse.
    """
    size = jax.tree.leaves(batch)[0].shape[0]
    if size % microbatch_size:
        raise ValueError(f"microbatch size {microbatch_size} must divide the batch of {size}")

    def split(x):
        return jnp.swapaxes(x.reshape(microbatch_size, size // microbatch_size, *x.shape[1:]), 0, 1)

    return jax.tree.map(split, batch)


def microbatch_at(microbatches: Batch, index: int | Int[Array, ""]) -> Batch:
    """One microbatch of the result of `split_batch`."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), microbatches
    )


def num_microbatches(microbatches: TrainBatch | ImitationBatch) -> Int[Array, ""]:
    """Number of microbatches before the first without a response; all later ones are empty too."""
    is_used = (microbatches.rows.predictor >= 0).any((1, 2))
    return jnp.cumprod(is_used.astype(jnp.int32)).sum()


def map_microbatches(
    function: Callable[[Batch], Array], batch: Batch, microbatch_size: int
) -> Array:
    """Applies `function` (results [microbatch_size, ...]) to each microbatch, joined to [B, ...].

    Rows of empty microbatches are 0.
    """
    microbatches = split_batch(batch, microbatch_size)
    shape = jax.eval_shape(lambda x: function(microbatch_at(x, 0)), microbatches)

    def put(index, results):
        return _put_microbatch(results, function(microbatch_at(microbatches, index)), index)

    results = _empty_microbatches(shape, microbatches)
    return _join(jax.lax.fori_loop(0, num_microbatches(microbatches), put, results))


def _empty_microbatches(shapes: Any, microbatches: Batch) -> Any:
    """Zeros for every microbatch, of the shapes of one."""
    count = jax.tree.leaves(microbatches)[0].shape[0]
    return jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), shapes)


def _put_microbatch(results: Any, new: Any, index: Int[Array, ""]) -> Any:
    """The results with those of one microbatch replaced."""
    return jax.tree.map(
        lambda all, x: jax.lax.dynamic_update_index_in_dim(all, x, index, 0), results, new
    )


def _join(results: Any) -> Any:
    """[B / microbatch_size, microbatch_size, ...] in the order of the rows, [B, ...]."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), results)


def _mean(x: Array, mask: Array) -> tuple[Float[Array, ""], Float[Array, ""]]:
    return jnp.where(mask, x, 0.0).sum(), mask.sum().astype(jnp.float32)
