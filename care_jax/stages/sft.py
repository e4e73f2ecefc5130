"""The cold start: supervised fine-tuning on rationales and answers, loss on the response only.

An example is packed as a tree with one branch: its prompt and the response to imitate. The loss of
a step does not depend on how its examples are packed into rows.

Letters: N examples of a step, n of this process, B rows of S tokens, T response tokens.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jaxtyping import Float, Int

from care_jax.batch import Example, ImitationBatch
from care_jax.data.pipeline import Batches
from care_jax.devices import distributed, loaded_programs, sharding
from care_jax.learning.logprobs import score_rows
from care_jax.learning.train_step import TrainState, map_microbatches, update
from care_jax.method import spans
from care_jax.packing.layout import lay_out, place
from care_jax.packing.plan import RowPlan, TreeSizes, misfits, plan_rows
from care_jax.prompts.builder import TokenizedPrompt, continued, prompt_sizes
from care_jax.report.metrics import Pace, format_line, host_usage, print_line, progress
from care_jax.report.writer import Report
from care_jax.run.attention_check import training_attention
from care_jax.run.milestones import Evaluate, Milestones
from care_jax.run.run import Run, make_adamw, open_checkpoints, start_state
from care_jax.run.skipped_updates import SkippedUpdates
from care_jax.run.state_check import StateCheck
from models import backbone, lora
from models.attention.packed import AttentionImpl

ROW_TOO_SHORT = "prompt and response exceed a row"


def train(
    run: Run,
    params: backbone.Params,
    examples: Sequence[Example],
    evaluate: Evaluate | None = None,
) -> backbone.Params:
    """Runs or resumes the SFT stage.

    Args:
        run: the run.
        params: initial parameters, of dtype `model.param_dtype`, on the mesh. Must not be used
            afterwards.
        examples: with responses to imitate.
        evaluate: gives the metrics of weights, every `sft.eval_every` steps.

    Returns:
        the trained parameters.

    Raises:
        distributed.Preempted: the run was told to stop; the state reached is saved.
        FloatingPointError: an update or a state is broken; says which checkpoint is good.
    """
    config, sft = run.config, run.config.sft
    learning_rate_at, adamw = make_adamw(run, "sft")
    state = start_state(run, params, adamw)
    attention = training_attention(run, sft.row_tokens, sft.row_patches)
    sft_step = compile_step(run, adamw, sharding.of(state), attention)
    rows = sharding.local_rows(sft.batch_size, run.decode_batch_sharding)
    batches = Batches(
        examples,
        run.policy.prompts,
        batch_size=sft.batch_size,
        seed=config.seed,
        rows=rows,
        num_workers=config.data.num_workers,
        left_out=run.metrics.counter("sft", "left_out"),
    )
    nll = compile_nll(run, attention)
    unread: list[tuple[int, dict[str, jax.Array]]] = []  # metrics of steps, on the devices
    batch: ImitationBatch | None = None

    def loss(params):
        """Of the policy on the last step's responses."""
        if batch is None:
            return None
        return nll(params, sharding.put_batch(batch, run.train_batch_sharding))

    with open_checkpoints(run, "sft") as checkpoints:
        start, metadata = 0, {}
        if checkpoints.latest_step is not None:
            restored = checkpoints.restore(sharding.abstract(state))
            state, start, metadata = restored.state, restored.data_position, restored.metadata
        run.metrics.begin("sft", start)
        state_check = StateCheck(run, "sft", checkpoints, loss)
        skipped = SkippedUpdates(run, "sft", state.params, state_check.advice)
        milestones = Milestones(run, "sft", checkpoints, evaluate, state_check)
        milestones.begin(start, state, metadata)
        report = Report(run.workdir, max_megabytes=config.report.max_megabytes)

        def batch_of(step):
            examples, prompts = batches.batch(step)
            return packed_batch(run, rows, examples, prompts)[0], examples

        def read() -> dict[str, float]:
            """The metrics of the last step; all since the last call must be finite."""
            metrics = {}
            for step, of_step in unread:
                own = functools.partial(batch_of, step)
                metrics = skipped.applied(step, jax.device_get(of_step), own)
            unread.clear()
            return metrics

        began, first = time.perf_counter(), start
        pace = Pace(sft.num_steps)
        for step, step_examples, prompts in progress(
            batches.iterate(start, sft.num_steps), "sft", start, sft.num_steps
        ):
            if distributed.is_preempted():
                if step > (checkpoints.latest_step or 0):
                    read()
                    milestones.save(step, state, {})
                raise distributed.Preempted(f"before sft step {step}")
            loaded_programs.drop_if_many()
            batch, plan = packed_batch(run, rows, step_examples, prompts)
            state, metrics = sft_step(state, sharding.put_batch(batch, run.train_batch_sharding))
            unread.append((step, metrics))
            is_last = step == sft.num_steps - 1
            if step % config.log_every == 0 or is_last:
                metrics = read() | skipped.counted()
                metrics |= {"train_fill": plan.train_fill, "patch_fill": plan.patch_fill}
                # Dispatch is asynchronous, so time is measured between reads of the metrics.
                seconds = (time.perf_counter() - began) / (step + 1 - first)
                began, first = time.perf_counter(), step + 1
                metrics["learning_rate"] = float(learning_rate_at(step))
                run.metrics.write("sft", step, metrics | host_usage())
                report.write()
                left = pace.left(step)
                print_line(format_line("sft", step, sft.num_steps, metrics, seconds, left))
            if milestones.is_due(step + 1):
                read()
                began += milestones.reach(step + 1, state, {})
    return lora.merged(state.params)


def compile_step(
    run: Run,
    adamw: optax.GradientTransformation,
    state_shardings: TrainState,
    attention: AttentionImpl | None = None,
) -> Callable:
    """The jitted (state, batch) -> (state, metrics), compiled once per shape of rows that occurs.

    Args:
        run: the run.
        adamw: its optimizer.
        state_shardings: of the state before and after a step.
        attention: the attention implementation; None: that of `model.attention`, unchecked.
    """
    config, model = run.config, run.config.model
    if attention is None:
        attention = sharding.attention_impl(model.attention, config.sharding_rules, run.mesh)

    def sft_step(state, batch):
        total_weight = jnp.maximum(batch.weight.sum(), 1e-9)

        def loss_fn(params, batch):
            logp, _ = score_rows(
                params,
                batch.rows,
                run.policy.config,
                dtype=jnp.dtype(model.compute_dtype),
                chunk=run.chunk_of_row(config.sft.microbatch_size),
                remat=model.remat,
                attention=attention,
            )
            num_tokens = (batch.rows.predictor >= 0).sum().astype(jnp.float32)
            return -(batch.weight * logp).sum() / total_weight, {"nll": (-logp.sum(), num_tokens)}

        return update(
            state,
            batch,
            loss_fn,
            adamw,
            microbatch_size=config.sft.microbatch_size,
            partition=run.partition,
            skip_nonfinite=config.sft.max_skipped > 0,
        )

    return jax.jit(run.placed(sft_step), donate_argnums=0, out_shardings=(state_shardings, None))


def compile_nll(run: Run, attention: AttentionImpl) -> Callable:
    """The jitted (params, batch) -> mean of -log π over the response tokens, for `state_check`."""
    model, microbatch_size = run.config.model, run.config.sft.microbatch_size

    def nll(params, batch):
        def one(batch):
            return score_rows(
                params,
                batch.rows,
                run.policy.config,
                dtype=jnp.dtype(model.compute_dtype),
                chunk=run.chunk_of_row(microbatch_size),
                remat=model.remat,
                attention=attention,
            )[0]

        is_scored = batch.rows.predictor >= 0
        logp = map_microbatches(one, batch, microbatch_size)
        return -jnp.where(is_scored, logp, 0.0).sum() / jnp.maximum(is_scored.sum(), 1)

    return jax.jit(run.placed(nll), out_shardings=sharding.replicated(run.mesh))


def packed_batch(
    run: Run,
    places: Int[np.ndarray, " n"],
    examples: Sequence[Example],
    prompts: Sequence[TokenizedPrompt],
) -> tuple[ImitationBatch, RowPlan]:
    """This process's packed rows of a step, on the host, and the plan of the packing.

    An example that exceeds a row is left out, counted and logged.

    Args:
        run: the run.
        places: indices of this process's examples in the step.
        examples, prompts: of this process.
    """
    sft, policy = run.config.sft, run.policy
    contexts = [policy.prompts.context_tokens(example.context) for example in examples]
    prompts = [continued(*pair) for pair in zip(prompts, contexts, strict=True)]
    row = {"row_tokens": sft.row_tokens, "row_patches": sft.row_patches, "section": "sft"}
    responses = [policy.prompts.response_tokens(example.response) for example in examples]
    lengths = np.array([len(response) for response in responses], np.int32)
    sizes = np.concatenate([prompt_sizes(prompts), lengths[:, None]], axis=1)
    unfit = misfits(TreeSizes(*sizes.T[:2], branches=sizes[:, 2:]), **row)
    for index, reason in unfit.items():
        run.metrics.counter("sft", "left_out")[ROW_TOO_SHORT] += 1
        logging.log_every_n(logging.WARNING, "left out %s: %s", 100, examples[index].id, reason)
    sizes[list(unfit), 2] = 0  # a tree without branches is not packed
    sizes = distributed.gather_rows(sizes, places)
    plan = plan_rows(
        TreeSizes(*sizes.T[:2], branches=sizes[:, 2:]),
        microbatch_size=sft.microbatch_size,
        owner=sharding.owners(sft.batch_size, run.decode_batch_sharding),
        num_processes=jax.process_count(),
        process=jax.process_index(),
        **row,
    )
    tokens = np.full((len(examples), 1, lengths.max(initial=1)), policy.config.pad_token_id)
    weight = np.zeros(tokens.shape, np.float32)
    for index, (context, response) in enumerate(zip(contexts, responses, strict=True)):
        tokens[index, 0, : len(response)] = response
        weight[index, 0, : len(response)] = response_weight(run, context, response)
    rows = lay_out(prompts, tokens.astype(np.int32), plan, policy.config)
    return ImitationBatch(rows, place(weight, plan)), plan


def response_weight(
    run: Run, context: Int[np.ndarray, " c"], response: Int[np.ndarray, " T"]
) -> Float[np.ndarray, " T"]:
    """Loss weight of each response token: `sft.answer_weight` in the answer span, 1 elsewhere."""
    policy = run.policy
    span = spans.parse(
        np.concatenate([context, response]),
        policy.token_bytes,
        eos_token_ids=policy.config.eos_token_ids,
        think_tag=policy.think_tag,
    )
    weight = np.where(span.is_answer, run.config.sft.answer_weight, 1.0).astype(np.float32)
    return weight[len(context) :]
