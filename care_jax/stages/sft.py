"""The cold start: supervised fine-tuning on rationales and answers, loss on the response only.

An example is packed as a tree with one branch: its prompt and the response to imitate. The loss of
a step does not depend on how its examples are packed into rows.

Letters: N examples of a step, n of this process, B rows of S tokens, T response tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jaxtyping import Float, Int

from care_jax.batch import Example, ImitationBatch
from care_jax.data.pipeline import Batches
from care_jax.devices import distributed, sharding
from care_jax.learning.logprobs import score_rows
from care_jax.learning.train_step import TrainState, update
from care_jax.method import spans
from care_jax.packing.layout import at_tokens, lay_out
from care_jax.packing.plan import RowPlan, TreeSizes, fill_of, misfits, plan_rows
from care_jax.prompts.builder import TokenizedPrompt, continued, prompt_sizes
from care_jax.report.report import Report
from care_jax.run.attention_check import training_attention
from care_jax.run.run import Run, make_adamw, schedule_of, start_state
from care_jax.run.stage import Evaluate, compile_nll, compile_score, forward_options, open_stage
from models import backbone, lora
from models.attention.packed import AttentionImpl

ROW_TOO_SHORT = "prompt and response exceed a row"


def train(
    run: Run, params: backbone.Params, examples: Sequence[Example], evaluate: Evaluate | None = None
) -> backbone.Params:
    """Runs or resumes the SFT stage; returns the trained parameters.

    Args:
        params: initial parameters, of dtype `model.param_dtype`, on the mesh; shapes will do if the
            stage has a checkpoint. Must not be used afterwards.
        examples: with responses to imitate.
        evaluate: returns the metrics of weights; called every `sft.eval_every` steps.

    Raises:
        distributed.Preempted: the run was preempted; the current state is saved.
        FloatingPointError: an update or a state is broken; the message names a good checkpoint.
    """
    sft = run.config.sft
    index = sharding.local_rows(sft.batch_size, run.decode_batch_sharding)
    adamw = make_adamw(run, "sft")
    state = start_state(run, params, adamw, "sft")
    attention = training_attention(run, sft.row_tokens, sft.row_patches)
    sft_step = compile_step(run, adamw, sharding.of(state), attention)
    nll = compile_nll(run, compile_score(run, "sft", forward_options(run, attention)))
    batches = Batches(
        examples,
        run.policy.prompts,
        batch_size=sft.batch_size,
        seed=run.config.seed,
        rows=index,
        num_workers=run.config.data.num_workers,
        left_out=run.metrics.left_out("sft"),
    )

    def rebuild(step):
        examples, prompts = batches.batch(step)
        return packed_batch(run, index, examples, prompts)[0], examples

    with open_stage(run, "sft", state, nll, evaluate, rebuild) as stage:
        del state  # the stage holds it, or has restored another
        report = Report(run.workdir, **run.config.report)

        def log(step, plan):
            if stage.is_logged(step):  # dispatch is asynchronous between logged steps
                stage.log(step, stage.read()[-1] | fill_of([plan]))
                report.write()

        for step, imitated, prompts in stage.steps(batches):
            batch, plan = packed_batch(run, index, imitated, prompts)
            placed = sharding.put_batch(batch, run.train_batch_sharding)
            stage.catch_up()  # after the work on the host that the devices need not wait for
            if plan.is_empty:
                stage.not_updated(step)
            else:
                stage.state, metrics = sft_step(stage.state, placed)
                stage.updated(step, metrics, (batch, imitated))
            stage.finish(step, functools.partial(log, step, plan))
    return lora.merged(stage.state.params)


def compile_step(
    run: Run,
    adamw: optax.GradientTransformation,
    state_shardings: TrainState,
    attention: AttentionImpl | None = None,
) -> Callable:
    """The jitted (state, batch) -> (state, metrics), compiled once per shape of rows."""
    sft, options = run.config.sft, forward_options(run, attention)
    learning_rate_at = schedule_of(run, "sft")

    def sft_step(state, batch):
        learning_rate = learning_rate_at(state.step)
        total_weight = jnp.maximum(batch.weight.sum(), 1e-9)

        def loss_fn(params, batch):
            logp, *_ = score_rows(params, batch.rows, run.policy.config, options)
            num_tokens = (batch.rows.predictor >= 0).sum().astype(jnp.float32)
            ratios = {"nll": (-logp.sum(), num_tokens)}
            return -(batch.weight * logp).sum() / total_weight, (ratios, None)

        state, metrics, _ = update(
            state,
            batch,
            loss_fn,
            adamw,
            microbatch_size=sft.microbatch_size,
            freeze_vision=run.config.model.freeze_vision,
            skip_nonfinite=sft.max_skipped > 0,
        )
        return state, metrics | {"learning_rate": learning_rate}

    return jax.jit(run.placed(sft_step), donate_argnums=0, out_shardings=(state_shardings, None))


def packed_batch(
    run: Run,
    index: Int[np.ndarray, " n"],
    examples: Sequence[Example],
    prompts: Sequence[TokenizedPrompt],
) -> tuple[ImitationBatch, RowPlan]:
    """This process's packed rows of a step, on the host, and the plan of the packing.

    An example that exceeds a row is left out, counted and logged. `index` has the indices in the
    step of this process's examples; those that its rows need and another process read are fetched
    from there.
    """
    sft, policy = run.config.sft, run.policy
    contexts = [policy.prompts.context_tokens(example.context) for example in examples]
    prompts = [continued(*pair) for pair in zip(prompts, contexts, strict=True)]
    row = {"row_tokens": sft.row_tokens, "row_patches": sft.row_patches, "section": "sft"}
    responses = [policy.prompts.response_tokens(example.response) for example in examples]
    lengths = np.array([len(response) for response in responses], np.int32)
    sizes = np.concatenate([prompt_sizes(prompts), lengths[:, None]], axis=1)
    unfit = misfits(TreeSizes(*sizes.T[:2], branches=sizes[:, 2:]), **row)
    for number, reason in unfit.items():
        run.metrics.left_out("sft")[ROW_TOO_SHORT] += 1
        logging.log_every_n(logging.WARNING, "left out %s: %s", 100, examples[number].id, reason)
    sizes[list(unfit), 2] = 0  # a tree without branches is not packed
    lengths = sizes[:, 2]
    sizes = distributed.gather_rows(sizes, index)
    plan = plan_rows(
        TreeSizes(*sizes.T[:2], branches=sizes[:, 2:]),
        microbatch_size=sft.microbatch_size,
        row_lengths=sft.row_lengths,
        owner=sharding.owners(sft.batch_size, run.decode_batch_sharding),
        num_processes=jax.process_count(),
        process=jax.process_index(),
        **row,
    )
    tokens = np.zeros((len(examples), 1, sizes[:, 2].max(initial=1)), np.int32)
    weight = np.zeros(tokens.shape, np.float32)
    for number, (context, response) in enumerate(zip(contexts, responses, strict=True)):
        if length := lengths[number]:
            tokens[number, 0, :length] = response
            weight[number, 0, :length] = response_weight(run, context, response)
    made = {"prompts": np.array(prompts, object), "tokens": tokens, "weight": weight}
    found = distributed.exchange_rows(made, index, len(sizes), moved=plan.moved, wanted=plan.trees)
    packed = {tree: found["prompts"][tree] for tree in plan.trees}
    rows = lay_out(packed, found["tokens"], plan, policy.prompts)
    return ImitationBatch(rows, at_tokens(found["weight"], plan)), plan


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
