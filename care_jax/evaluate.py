"""Accuracy on held-out questions: one greedy answer each, judged by the verifier."""

from __future__ import annotations

import json
import operator
import os
from collections import defaultdict
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from care_jax import distributed, sampler, sharding
from care_jax.batch import Example
from care_jax.metrics import print_line, progress, wilson_interval
from care_jax.policy import decode_shardings
from care_jax.prompt import prompt_sizes
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

    Raises:
        ValueError: no example's prompt fits a bucket.
        distributed.Preempted: the run is to end.
    """
    config, policy = run.config, run.policy
    size = config.evaluate.batch_size
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
            jax.random.split(jax.random.key(0), size),  # greedy: nothing is drawn
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
    own = sharding.local_rows(size, run.mesh)
    # Stands in rows without a prompt, whose answers are dropped; no shorter prompt is possible.
    filler = policy.prompts.tokenize(Example("filler", "", (), "", ""))
    firsts = range(0, len(examples) if policy.prompts.fits(filler) else 0, size)
    correct, formatted = defaultdict(list), []
    path = run.workdir / f"samples_{name}.jsonl" if jax.process_index() == 0 else os.devnull
    with (
        Verifier(
            num_workers=config.verifier.num_workers,
            timeout=config.verifier.timeout,
            think_tag=policy.think_tag,
        ) as verifier,
        open(path, "w") as samples,
    ):
        for first in progress(firsts, f"evaluate {name}", 0, len(firsts)):
            if distributed.is_preempted():
                raise distributed.Preempted(f"in the evaluation after {name}")
            places = [int(place) for place in first + own if place < len(examples)]
            batch = [examples[place] for place in places]
            records = [policy.prompts.tokenize(example) for example in batch]
            kept = [row for row, record in enumerate(records) if policy.prompts.fits(record)]
            padded = [filler] * len(own)
            for row in kept:
                padded[row] = records[row]
            sizes = distributed.gather_rows(prompt_sizes(padded), own)
            prompts = sharding.put_batch(policy.prompts.batch(padded, sizes), run.mesh)
            rollouts = distributed.fetch(answer(decode_params, prompts))
            rollouts = jax.tree.map(lambda x: x[kept], rollouts)  # noqa: B023
            batch = [batch[row] for row in kept]
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
            answered = [
                {
                    "place": places[row],
                    "id": example.id,
                    "source": example.source,
                    "question": example.question,
                    "answer": example.answer,
                    "response": text,
                    "acc": float(acc),
                    "fmt": float(fmt),
                }
                for row, example, (text,), (acc,), (fmt,) in zip(
                    kept, batch, texts, scores.acc, scores.fmt, strict=True
                )
            ]
            gathered = [sample for part in distributed.gather_json(answered) for sample in part]
            for sample in sorted(gathered, key=operator.itemgetter("place")):
                del sample["place"]
                correct[sample["source"]].append(sample["acc"])
                formatted.append(sample["fmt"])
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
        "num_dropped": len(examples) - len(accs),
    }
    if len(correct) > 1:
        metrics |= {f"acc/{source}": float(np.mean(correct[source])) for source in sorted(correct)}
    print_line(
        f"accuracy after {name}: {metrics['acc']:.1%} (95% interval {low:.1%} to {high:.1%}, "
        f"{len(accs)} held-out examples, format {metrics['fmt']:.1%})"
    )
    return metrics
