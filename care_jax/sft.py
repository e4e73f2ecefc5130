"""The cold start: supervised fine-tuning on rationales and answers, loss on the response only.

Examples share rows, see `packing`; a step's loss is that of its examples, however they are packed.
Letters: n examples of this process, B rows of S tokens and N patches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from care_jax import distributed, sharding, spans
from care_jax.batch import Example, PackedRows
from care_jax.checkpoint import Checkpoints
from care_jax.data.pipeline import Batches
from care_jax.logprobs import score_packed
from care_jax.metrics import format_line, print_line, progress
from care_jax.packing import Sample, first_fit, pack
from care_jax.prompt import TokenizedPrompt
from care_jax.report.writer import Report
from care_jax.run import Run, make_adamw, start_state
from care_jax.train_step import TrainState, update
from models import backbone, lora

ROW_TOO_SHORT = "prompt and response exceed a row"


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
    learning_rate_at, adamw = make_adamw(run, "sft")
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
        report = Report(run.workdir, max_megabytes=config.report.max_megabytes)
        began, first = time.perf_counter(), start
        for step, step_examples, records in progress(
            batches.iterate(start, sft.num_steps), "sft", start, sft.num_steps
        ):
            if distributed.is_preempted():
                if step > (checkpoints.latest_step or 0):
                    checkpoints.save(step, state, step, config.seed, {})
                raise distributed.Preempted(f"before sft step {step}")
            batch = sharding.put_batch(packed_batch(run, step_examples, records), run.mesh)
            state, metrics = sft_step(state, batch)
            is_last = step == sft.num_steps - 1
            if step % config.log_every == 0 or is_last:
                metrics = {name: float(value) for name, value in metrics.items()}
                # Steps are dispatched ahead of the device: time them from one read-out to the next.
                seconds = (time.perf_counter() - began) / (step + 1 - first)
                began, first = time.perf_counter(), step + 1
                metrics["learning_rate"] = float(learning_rate_at(step))
                run.metrics.write("sft", step, metrics)
                report.write()
                print_line(format_line("sft", step, sft.num_steps, metrics, seconds))
            if (step + 1) % config.checkpoint_every == 0 or is_last:
                checkpoints.save(step + 1, state, step + 1, config.seed, {})
    return lora.merged(state.params)


def compile_step(
    run: Run, adamw: optax.GradientTransformation, state_shardings: TrainState
) -> Callable:
    """The jitted (state, rows) -> (state, metrics), compiled once per number of rows that occurs.

    Args:
        run: the run.
        adamw: its optimizer.
        state_shardings: where the state lies before and after a step.
    """
    config, model = run.config, run.config.model
    attention = sharding.attention_kernel(model.attention, config.sharding_rules, run.mesh)

    def sft_step(state, rows):
        total_weight = jnp.maximum(rows.weight.sum(), 1e-9)

        def loss_fn(params, rows):
            logp = score_packed(
                params,
                rows,
                run.policy.config,
                dtype=jnp.dtype(model.compute_dtype),
                chunk=config.rl.logprob_chunk,
                remat=model.remat,
                attention=attention,
            )
            is_scored = rows.scored >= 0
            nll = -jnp.where(is_scored, logp, 0.0)
            num_tokens = is_scored.sum().astype(jnp.float32)
            return (rows.weight * nll).sum() / total_weight, {"nll": (nll.sum(), num_tokens)}

        return update(
            state,
            rows,
            loss_fn,
            adamw,
            microbatch_size=config.sft.microbatch_size,
            partition=run.partition,
        )

    return jax.jit(run.placed(sft_step), donate_argnums=0, out_shardings=(state_shardings, None))


def packed_batch(
    run: Run, examples: Sequence[Example], records: Sequence[TokenizedPrompt]
) -> PackedRows:
    """The rows of a step, as many as the examples need, in whole microbatches.

    An example that exceeds a row is left out, counted and logged. Every process packs its own
    examples and has as many rows as the one that needs most.
    """
    sft, config = run.config.sft, run.policy.config
    row_size = (sft.row_tokens, sft.row_patches)
    samples = []
    for example, record in zip(examples, records, strict=True):
        sample = make_sample(run, example, record)
        if all(size <= room for size, room in zip(sample.size, row_size, strict=True)):
            samples.append(sample)
        else:
            run.metrics.counter("sft", "left_out")[ROW_TOO_SHORT] += 1
            logging.log_every_n(
                logging.WARNING,
                "left out %s: %d tokens and %d patches exceed sft.row_tokens %d or "
                "sft.row_patches %d",
                100,
                example.id,
                *sample.size,
                *row_size,
            )
    sizes = [sample.size for sample in samples]
    rows = first_fit(sizes, row_size, shared=sft.packed)
    num_local = len(sharding.local_rows(sft.microbatch_size, run.mesh))
    has_images = any(num_patches for _, num_patches in sizes)
    wanted = distributed.gather_json([max(-(-len(rows) // num_local), 1), has_images])
    num_microbatches, has_images = (max(of_process) for of_process in zip(*wanted, strict=True))
    rows += [[] for _ in range(num_microbatches * num_local - len(rows))]
    return pack(samples, rows, row_size, config, has_images=has_images)


def make_sample(run: Run, example: Example, record: TokenizedPrompt) -> Sample:
    """A prompt and its response, answer tokens weighted by `sft.answer_weight`."""
    policy = run.policy
    response = policy.prompts.response_tokens(example.response)
    span = spans.parse(
        response,
        policy.token_bytes,
        eos_token_ids=policy.config.eos_token_ids,
        think_tag=policy.think_tag,
    )
    weight = np.where(span.is_answer, run.config.sft.answer_weight, 1.0).astype(np.float32)
    return Sample(record, response, weight)
