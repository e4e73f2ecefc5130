"""Accuracy on held-out questions: one greedy answer each, judged by the verifier."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from care_jax import sampler, sharding
from care_jax.batch import Example
from care_jax.metrics import print_line, progress, wilson_interval
from care_jax.policy import decode_shardings
from care_jax.run import Run
from care_jax.scores import row_texts, score_rollouts
from care_jax.verifier import Verifier
from models import backbone


def evaluate(
    run: Run, params: backbone.Params, examples: Sequence[Example], *, name: str
) -> dict[str, float]:
    """Answers every example greedily and scores it.

    Args:
        run: the run.
        params: in the training layout.
        examples: held out.
        name: of this evaluation ("sft", "rl"); samples go to `workdir/samples_<name>.jsonl`.

    Returns:
        accuracy and format in [0, 1], the accuracy's 95% Wilson interval, and accuracy by source.
    """
    config, policy = run.config, run.policy
    dtype = jnp.dtype(config.model.compute_dtype)
    rows = sharding.batch_sharding(run.mesh)
    attention = sharding.attention_kernel(
        config.model.attention, config.decode_sharding_rules, run.mesh
    )

    def to_decode_layout(params):
        return backbone.to_decode_layout(params, policy.config, dtype)

    def answer(params, prompts):
        return sampler.decode(
            params,
            sampler.prefill(params, prompts, policy.config, dtype=dtype, attention=attention),
            jax.random.key(0),
            jnp.asarray(policy.closing_tag),
            policy.config,
            num_rows=1,
            max_tokens=config.evaluate.max_response_tokens,
            temperature=0.0,
            top_p=1.0,
            dtype=dtype,
        )

    layout = decode_shardings(policy, run.mesh, config.decode_sharding_rules)
    decode_params = jax.jit(to_decode_layout, out_shardings=layout)(params)
    answer = jax.jit(run.placed_to_decode(answer), out_shardings=rows)
    correct, formatted = defaultdict(list), []
    path = run.workdir / f"samples_{name}.jsonl"
    batches = list(_batches(examples, config.evaluate.batch_size))
    num_dropped = 0
    with (
        Verifier(
            num_workers=config.verifier.num_workers,
            timeout=config.verifier.timeout,
            think_tag=policy.think_tag,
        ) as verifier,
        path.open("w") as samples,
    ):
        for batch in progress(batches, f"evaluate {name}", 0, len(batches)):
            records = [policy.prompts.tokenize(example) for example in batch]
            fits = [policy.prompts.fits(record) for record in records]
            batch = [example for example, fit in zip(batch, fits, strict=True) if fit]
            records = [record for record, fit in zip(records, fits, strict=True) if fit]
            num_dropped += len(fits) - len(batch)
            if not batch:
                continue
            # The last batch is filled up with its first prompt, whose extra answers are dropped.
            padding = [records[0]] * (config.evaluate.batch_size - len(records))
            prompts = sharding.put_batch(policy.prompts.batch(records + padding), run.mesh)
            rollouts = jax.device_get(answer(decode_params, prompts))
            rollouts = jax.tree.map(lambda x: x[: len(batch)], rollouts)  # noqa: B023
            scores, _ = score_rollouts(
                rollouts,
                batch,
                verifier,
                policy.token_bytes,
                eos_token_id=policy.config.eos_token_id,
                think_tag=policy.think_tag,
                format_weight=0.0,
            )
            texts = row_texts(rollouts, policy.token_bytes, eos_token_id=policy.config.eos_token_id)
            formatted.extend(scores.fmt[:, 0])
            for example, acc, (text,) in zip(batch, scores.acc[:, 0], texts, strict=True):
                correct[example.source].append(acc)
                sample = {
                    "id": example.id,
                    "source": example.source,
                    "question": example.question,
                    "answer": example.answer,
                    "response": text,
                    "acc": float(acc),
                }
                samples.write(json.dumps(sample, ensure_ascii=False) + "\n")

    if not correct:
        raise ValueError(
            f"none of the {len(examples)} held-out prompts fits data.buckets "
            f"{policy.prompts.buckets}; enlarge them or lower data.max_pixels"
        )
    accs = np.concatenate(list(correct.values()))
    low, high = wilson_interval(float(accs.sum()), len(accs))
    metrics = {
        "acc": float(accs.mean()),
        "acc_low": low,
        "acc_high": high,
        "fmt": float(np.mean(formatted)),
        "num_examples": len(accs),
        "num_dropped": num_dropped,
    }
    if len(correct) > 1:
        metrics |= {f"acc/{source}": float(np.mean(correct[source])) for source in sorted(correct)}
    print_line(
        f"accuracy after {name}: {metrics['acc']:.1%} (95% interval {low:.1%} to {high:.1%}, "
        f"{len(accs)} held-out examples, format {metrics['fmt']:.1%})"
    )
    return metrics


def _batches(examples: Sequence[Example], size: int) -> Iterator[list[Example]]:
    for first in range(0, len(examples), size):
        yield [examples[index] for index in range(first, min(first + size, len(examples)))]
