"""Accuracy on held-out questions and on benchmarks, with one greedy response per question.

The verifier judges held-out questions, as in training. Each benchmark is judged by its published
rules; optionally, a language model judges the free-form answers that the rules call wrong. Samples
of a benchmark are written during decoding, in the format of lmms-eval. A resumed run skips the
questions that are already in the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from care_jax.attention_check import decoding_attention
from care_jax.batch import Example, Rollouts
from care_jax.benchmarks import response, scoreboard
from care_jax.benchmarks.judge import Case, Judge
from care_jax.benchmarks.suite import Benchmark
from care_jax.decoding.queue import DecodeQueue, Request
from care_jax.decoding.schedule import Sizes
from care_jax.devices import distributed, sharding
from care_jax.devices.device_clock import DeviceClock
from care_jax.method import diagnostics
from care_jax.metrics import print_line, progress, wilson_interval
from care_jax.policy import decode_shardings
from care_jax.programs import compile_decoding
from care_jax.rewards.scores import row_texts, start_scoring
from care_jax.run import Run, verifier_of
from models import backbone

Sample = dict[str, Any]
Decode = Callable[[Sequence[Request]], Iterator[tuple[list[int], Rollouts]]]

_NUM_BATCHES = 4  # batches of evaluate.batch_size that are decoded and written together


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
        distributed.Preempted: the run was told to stop.
    """
    policy = run.policy
    correct, formatted, components = defaultdict(list), [], []
    path = run.workdir / f"samples_{name}.jsonl" if jax.process_index() == 0 else os.devnull
    with (
        verifier_of(run) as verifier,
        open(path, "w") as samples,
    ):
        decode = greedy_decoder(run, params)
        for batch in _decode_batches(run, decode, examples, range(len(examples)), name):
            scored = start_scoring(
                batch.rollouts,
                batch.examples,
                verifier,
                policy.token_bytes,
                eos_token_ids=policy.config.eos_token_ids,
                think_tag=policy.think_tag,
                format_weight=0.0,
            )()
            scores = scored.scores
            answered = [
                {
                    "place": place,
                    "id": example.id,
                    "source": example.source,
                    "question": example.question,
                    "answer": example.answer,
                    "response": text,
                    "acc": float(acc),
                    "fmt": float(fmt),
                }
                for place, example, text, (acc,), (fmt,) in zip(
                    batch.places, batch.examples, batch.texts, scores.acc, scores.fmt, strict=True
                )
            ]
            if scored.components is not None:
                for sample, (found,) in zip(answered, scored.components, strict=True):
                    sample["components"] = found
            for sample in _gathered(answered, "place"):
                del sample["place"]
                components.append([sample.get("components", {})])
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
    sums = diagnostics.component_sums([np.array(components, object)], num_rollouts=1)
    metrics |= diagnostics.component_means([sums])
    if len(correct) > 1:
        metrics |= {f"acc/{source}": float(np.mean(correct[source])) for source in sorted(correct)}
    print_line(
        f"accuracy after {name}: {metrics['acc']:.1%} (95% interval {low:.1%} to {high:.1%}, "
        f"{len(accs)} held-out examples, format {metrics['fmt']:.1%})"
    )
    return metrics


def evaluate_benchmarks(run: Run, params: backbone.Params, *, name: str) -> dict[str, float]:
    """Answers `evaluate.benchmarks` greedily and scores each by its published rules.

    Args:
        run: the run.
        params: in the training layout.
        name: of this evaluation; results.json, results.md and samples_<benchmark>.jsonl go to
            `workdir/benchmarks_<name>`. Samples already in that folder are reused if weights and
            settings are the same.

    Returns:
        accuracy of each benchmark and their mean, in [0, 1].

    Raises:
        ValueError: a benchmark's files are missing.
        distributed.Preempted: the run was told to stop.
    """
    config = run.config.evaluate
    benchmarks = [Benchmark(which, path) for which, path in config.benchmarks]
    judge = None
    if config.judge_url:
        judge = Judge(
            config.judge_url,
            config.judge_model,
            timeout=config.judge_timeout,
            num_retries=config.judge_retries,
            prices=tuple(config.judge_prices),
        )
    folder = run.workdir / f"benchmarks_{name}"
    folder.mkdir(parents=True, exist_ok=True)
    decode = greedy_decoder(run, params)
    settings = _settings(run, params)
    results: dict[str, Any] = {"benchmarks": {}}
    for benchmark in benchmarks:
        samples = _benchmark_samples(run, decode, benchmark, judge, folder, settings)
        results["benchmarks"][benchmark.name] = scoreboard.score(benchmark, samples)
    results["macro"] = scoreboard.macro_average(results["benchmarks"])
    results["settings"] = settings
    if judge is not None:
        # Only this process since its start: resumed samples were judged, and paid for, before.
        results["judge"] = judge.counts | {"cost": judge.cost}
    markdown = scoreboard.to_markdown(results)
    if jax.process_index() == 0:
        text = json.dumps(results, indent=2, ensure_ascii=False)
        (folder / "results.json").write_text(text + "\n")
        (folder / "results.md").write_text(markdown)
    print_line(markdown.partition("\n\n")[0])
    return {
        f"{which}/{key}": figures[key]
        for which, figures in (results["benchmarks"] | {"mean": results["macro"]}).items()
        for key in ("acc", "acc_low", "acc_high")
    }


def greedy_decoder(run: Run, params: backbone.Params) -> Decode:
    """The compiled greedy decoder, with the weights in the decode layout.

    Returns:
        A function from this process's requests to (indices of some requests, one rollout of each)
        pairs, in order of completion.
    """
    config, policy = run.config, run.policy
    dtype = jnp.dtype(config.model.compute_dtype)

    def to_decode_layout(params):
        return backbone.to_decode_layout(params, policy.config, dtype)

    layout = decode_shardings(policy, run.mesh, config.decode_sharding_rules)
    decode_params = jax.jit(to_decode_layout, out_shardings=layout)(params)
    size = config.evaluate.batch_size
    sizes = Sizes(
        num_seats=size,
        num_rows=1,
        num_rollouts=1,
        max_tokens=config.evaluate.max_response_tokens,
        context_tokens=0,
        num_shards=sharding.num_shards(run.decode_batch_sharding),
        period=size,
    )
    attention = decoding_attention(run, sizes)
    programs = compile_decoding(run, temperature=0.0, top_p=1.0, attention=attention)
    queue = DecodeQueue(run, programs, sizes, DeviceClock())
    unused_rng = jax.random.key(0)
    return lambda requests: queue.decode(decode_params, unused_rng, requests)


class _Batch(NamedTuple):
    """This process's share of a batch; `dropped` are the places of prompts that fit no bucket."""

    places: list[int]
    examples: list[Example]
    rollouts: Rollouts
    texts: list[str]
    dropped: list[int]


def _decode_batches(
    run: Run, decode: Decode, examples: Sequence[Example], places: Sequence[int], name: str
) -> Iterator[_Batch]:
    """Decodes the examples at the given indices, `_NUM_BATCHES` batches at a time."""
    policy, size = run.policy, run.config.evaluate.batch_size
    starts = np.arange(0, _NUM_BATCHES * size, size)
    local_rows = (starts[:, None] + sharding.local_rows(size, run.decode_batch_sharding)).ravel()
    firsts = range(0, len(places), _NUM_BATCHES * size)
    for first in progress(firsts, f"evaluate {name}", 0, len(firsts)):
        local = {
            int(row): int(places[first + row]) for row in local_rows if first + row < len(places)
        }
        prompts = {row: policy.prompts.tokenize(examples[place]) for row, place in local.items()}
        kept = [row for row, prompt in prompts.items() if policy.prompts.fits(prompt)]
        try:
            parts = list(decode([Request(row, prompts[row]) for row in kept]))
        except distributed.Preempted:
            raise distributed.Preempted(f"in the evaluation {name}") from None
        indices = [index for part, _ in parts for index in part]
        rollouts = [rollouts for _, rollouts in parts] or [_no_rollouts(run)]
        order = np.argsort(indices).astype(int)
        rollouts = jax.tree.map(lambda *rows: np.concatenate(rows)[order], *rollouts)  # noqa: B023
        texts = row_texts(rollouts, policy.token_bytes, eos_token_ids=policy.config.eos_token_ids)
        yield _Batch(
            places=[local[row] for row in kept],
            examples=[examples[local[row]] for row in kept],
            rollouts=rollouts,
            texts=[text for (text,) in texts],
            dropped=[place for row, place in local.items() if row not in kept],
        )


def _no_rollouts(run: Run) -> Rollouts:
    """The empty rollouts of a process without requests."""
    shape = 0, 1, run.config.evaluate.max_response_tokens
    return Rollouts(
        tokens=np.zeros(shape, np.int32),
        is_valid=np.zeros(shape, bool),
        is_forced=np.zeros(shape, bool),
        logp=np.zeros(shape, np.float32),
        embedding=np.zeros((0, 1, run.policy.config.text.hidden_size), np.float32),
        is_complete=np.zeros((0, 1), bool),
    )


def _gathered(samples: list[Sample], key: str) -> list[Sample]:
    """The samples of all processes, sorted by `key`."""
    gathered = [sample for part in distributed.gather_json(samples) for sample in part]
    return sorted(gathered, key=operator.itemgetter(key))


def _settings(run: Run, params: backbone.Params) -> dict[str, Any]:
    """What all samples of a file must have in common: weights, prompts, lengths and judge."""
    config = run.config

    def checksum(params):
        leaves = [jnp.sum(jnp.abs(x), dtype=jnp.float32) for x in jax.tree.leaves(params)]
        return jnp.sum(jnp.stack(leaves) * jnp.arange(1, len(leaves) + 1))

    replicated = jax.sharding.NamedSharding(run.mesh, jax.sharding.PartitionSpec())
    total = jax.jit(checksum, out_shardings=replicated)(params)
    return {
        "model": config.model.path,
        "weights": repr(float(np.asarray(total.addressable_data(0)))),
        "max_response_tokens": config.evaluate.max_response_tokens,
        "min_pixels": config.data.min_pixels,
        "max_pixels": config.data.max_pixels,
        "buckets": [list(bucket) for bucket in run.policy.prompts.buckets],
        "system_prompt": config.data.system_prompt,
        "instruction": config.data.instruction,
        "think_tag": config.data.think_tag,
        "judge": [config.evaluate.judge_url, config.evaluate.judge_model],
    }


def _benchmark_samples(
    run: Run, decode: Decode, benchmark: Benchmark, judge: Judge | None, folder, settings
) -> list[Sample]:
    """A sample per row of the benchmark: read from its file, or decoded and appended to it."""
    path = folder / f"samples_{benchmark.name}.jsonl"
    stamp = folder / f"settings_{benchmark.name}.json"
    is_same = stamp.exists() and json.loads(stamp.read_text()) == settings
    lines = path.read_text().splitlines(keepends=True) if is_same and path.exists() else []
    lines = [line for line in lines if line.endswith("\n")]  # a killed run leaves half a line
    samples = [json.loads(line) for line in lines]
    done = {sample["doc_id"] for sample in samples}
    distributed.gather_json(len(done))  # a barrier: all processes have read the file
    file = contextlib.nullcontext()
    if jax.process_index() == 0:
        path.write_text("".join(lines))
        stamp.write_text(json.dumps(settings, indent=2) + "\n")
        file = path.open("a")
    todo = [place for place in range(len(benchmark)) if place not in done]
    with file as out:
        for batch in _decode_batches(run, decode, benchmark, todo, benchmark.name):
            fresh = _scored(benchmark, batch, judge)
            fresh = _gathered(fresh, "doc_id")
            samples += fresh
            if out is not None:
                out.writelines(json.dumps(x, ensure_ascii=False) + "\n" for x in fresh)
                out.flush()
    if not samples or all(sample["is_dropped"] for sample in samples):
        raise ValueError(
            f"none of the {len(benchmark)} prompts of {benchmark.name} fits data.buckets "
            f"{run.policy.prompts.buckets}; enlarge them or lower data.max_pixels"
        )
    return samples


def _scored(benchmark: Benchmark, batch: _Batch, judge: Judge | None) -> list[Sample]:
    """Samples in lmms-eval's format, with the fields that `benchmarks.scoreboard.score` needs."""
    is_complete = np.asarray(batch.rollouts.is_complete)[:, 0]
    samples = [
        _sample(benchmark, place, example, text, bool(ended))
        for place, example, text, ended in zip(
            batch.places, batch.examples, batch.texts, is_complete, strict=True
        )
    ]
    if judge is not None:
        # Free-form answers that the rules parse but call wrong.
        rest = [
            (sample, Case(example.question, example.answer, sample["filtered_resps"][0]))
            for sample, example in zip(samples, batch.examples, strict=True)
            if not sample["acc"] and sample["is_parsed"] and not example.choices
        ]
        for (sample, _), verdict in zip(
            rest, judge.verdicts([case for _, case in rest]), strict=True
        ):
            sample["acc_judged"] = None if verdict is None else float(verdict)
    dropped = [
        _sample(benchmark, place, benchmark[place], "", False) | {"is_dropped": True}
        for place in batch.dropped
    ]
    return samples + dropped


def _sample(
    benchmark: Benchmark, place: int, example: Example, text: str, is_complete: bool
) -> Sample:
    row, scorer = benchmark.rows[place], benchmark.scorer
    document = json.dumps(row, ensure_ascii=False, default=str)
    return {
        "doc_id": place,
        "doc": json.loads(document),
        "target": example.answer,
        "input": example.question,
        "resps": [text],
        "filtered_resps": [response.unwrap(text)],
        "doc_hash": _hash(document),
        "prompt_hash": _hash(example.question),
        "target_hash": _hash(example.answer),
        "acc": float(scorer.is_correct(text, row)),
        "acc_judged": None,
        "is_parsed": scorer.parse(text, row) is not None,
        "is_complete": is_complete,
        "is_dropped": False,
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
