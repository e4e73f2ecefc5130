"""The cold start: supervised fine-tuning on rationales and answers, loss on the response only.

One example is one row `[prompt | response]`, the layout of reinforcement learning with R = 1.
Letters: B examples, T response tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jaxtyping import Array, Bool, Float, Int

from care_jax import distributed, optimizer, sharding, spans
from care_jax.batch import Example, Prompts
from care_jax.checkpoint import Checkpoints
from care_jax.data.pipeline import Batches
from care_jax.logprobs import score_responses
from care_jax.metrics import format_line, print_line, progress
from care_jax.prompt import TokenizedPrompt, prompt_sizes
from care_jax.run import Run, start_state
from care_jax.train_step import TrainState, update
from models import backbone, lora


@flax.struct.dataclass
class SftBatch:
    """B prompts and the responses to imitate.

    Attributes:
        prompts: the prompts.
        tokens, is_valid: right-padded responses, EOS included.
        weight: of each token in the loss; 0 at padding.
    """

    prompts: Prompts
    tokens: Int[Array, "B 1 T"]
    is_valid: Bool[Array, "B 1 T"]
    weight: Float[Array, "B 1 T"]


def train(run: Run, params: backbone.Params, examples: Sequence[Example]) -> backbone.Params:
    """Runs or resumes the SFT stage.

    Args:
        run: the run.
        params: where it starts; float32, on the mesh. Consumed.
        examples: with responses to imitate.

    Returns:
        the trained parameters.

    Raises:
        distributed.Preempted: the run is to end; the state reached is saved.
    """
    config, sft = run.config, run.config.sft
    learning_rate_at, adamw = make_adamw(run)
    state = start_state(run, params, adamw)
    sft_step = compile_step(run, adamw, sharding.of(state))
    rows = sharding.local_rows(sft.batch_size, run.mesh)
    batches = Batches(
        examples,
        run.policy.prompts,
        batch_size=sft.batch_size,
        seed=config.seed,
        rows=rows,
        num_workers=config.data.num_workers,
        left_out=run.metrics.counter("sft", "left_out"),
    )
    with Checkpoints(
        run.workdir / "checkpoints" / "sft",
        keep=config.keep_checkpoints,
        fingerprint=run.fingerprint(),
    ) as checkpoints:
        start = 0
        if checkpoints.latest_step is not None:
            restored = checkpoints.restore(sharding.abstract(state))
            state, start = restored.state, restored.data_position
        run.metrics.begin("sft", start)
        began, first = time.perf_counter(), start
        for step, step_examples, records in progress(
            batches.iterate(start, sft.num_steps), "sft", start, sft.num_steps
        ):
            if distributed.is_preempted():
                if step > (checkpoints.latest_step or 0):
                    checkpoints.save(step, state, step, config.seed, {})
                raise distributed.Preempted(f"before sft step {step}")
            sizes = distributed.gather_rows(prompt_sizes(records), rows)
            batch = sharding.put_batch(sft_batch(run, step_examples, records, sizes), run.mesh)
            state, metrics = sft_step(state, batch)
            is_last = step == sft.num_steps - 1
            if step % config.log_every == 0 or is_last:
                metrics = {name: float(value) for name, value in metrics.items()}
                # Steps are dispatched ahead of the device: time them from one read-out to the next.
                seconds = (time.perf_counter() - began) / (step + 1 - first)
                began, first = time.perf_counter(), step + 1
                metrics["learning_rate"] = float(learning_rate_at(step))
                run.metrics.write("sft", step, metrics)
                print_line(format_line("sft", step, sft.num_steps, metrics, seconds))
            if (step + 1) % config.checkpoint_every == 0 or is_last:
                checkpoints.save(step + 1, state, step + 1, config.seed, {})
    return lora.merged(state.params)


def make_adamw(run: Run) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """The learning rate of each update, and the optimizer."""
    sft = run.config.sft
    learning_rate_at = optimizer.make_schedule(
        learning_rate=sft.learning_rate,
        warmup_steps=sft.warmup_steps,
        num_steps=sft.num_steps,
        schedule=sft.schedule,
    )
    adamw = optimizer.make_optimizer(
        learning_rate_at,
        weight_decay=sft.weight_decay,
        max_grad_norm=sft.max_grad_norm,
    )
    return learning_rate_at, adamw


def compile_step(
    run: Run, adamw: optax.GradientTransformation, state_shardings: TrainState
) -> Callable:
    """The jitted (state, batch) -> (state, metrics), compiled once per bucket that occurs.

    Args:
        run: the run.
        adamw: its optimizer.
        state_shardings: where the state lies before and after a step.
    """
    config, model = run.config, run.config.model
    attention = sharding.attention_kernel(model.attention, config.sharding_rules, run.mesh)

    def sft_step(state, batch):
        total_weight = jnp.maximum(batch.weight.sum(), 1e-9)

        def loss_fn(params, batch):
            logp, _ = score_responses(
                params,
                batch.prompts,
                batch.tokens,
                batch.is_valid,
                run.policy.config,
                dtype=jnp.dtype(model.compute_dtype),
                chunk=config.rl.logprob_chunk,
                remat=model.remat,
                attention=attention,
            )
            nll = -jnp.where(batch.is_valid, logp, 0.0)
            num_tokens = batch.is_valid.sum().astype(jnp.float32)
            return (batch.weight * nll).sum() / total_weight, {"nll": (nll.sum(), num_tokens)}

        return update(
            state,
            batch,
            loss_fn,
            adamw,
            microbatch_size=config.sft.microbatch_size,
            partition=run.partition,
        )

    return jax.jit(run.placed(sft_step), donate_argnums=0, out_shardings=(state_shardings, None))


def sft_batch(
    run: Run,
    examples: Sequence[Example],
    records: Sequence[TokenizedPrompt],
    sizes: Int[np.ndarray, "N 2"],
) -> SftBatch:
    """Tokenises and pads the responses, answer tokens weighted by `sft.answer_weight`.

    The examples are this process's, `sizes` those of the whole batch's prompts. A response beyond
    `sft.max_response_tokens` gets weight 0 and is logged.
    """
    sft, policy = run.config.sft, run.policy
    shape = (len(examples), 1, sft.max_response_tokens)
    tokens = np.full(shape, policy.config.pad_token_id, np.int32)
    is_valid = np.zeros(shape, bool)
    weight = np.zeros(shape, np.float32)
    for row, example in enumerate(examples):
        response = policy.prompts.response_tokens(example.response)
        if len(response) > sft.max_response_tokens:
            logging.log_every_n(
                logging.WARNING,
                "left out the response of %s: %d tokens exceed sft.max_response_tokens %d",
                100,
                example.id,
                len(response),
                sft.max_response_tokens,
            )
            continue
        span = spans.parse(
            response,
            policy.token_bytes,
            eos_token_id=policy.config.eos_token_id,
            think_tag=policy.think_tag,
        )
        tokens[row, 0, : len(response)] = response
        is_valid[row, 0, : len(response)] = True
        weight[row, 0, : len(response)] = np.where(span.is_answer, sft.answer_weight, 1.0)
    return SftBatch(policy.prompts.batch(records, sizes), tokens, is_valid, weight)
