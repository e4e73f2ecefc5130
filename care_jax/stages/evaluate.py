"""Accuracy on held-out questions and on benchmarks: one greedy response each, or several samples.

The verifier judges held-out questions, as in training. Each benchmark is judged by its published
rules; optionally, a language model judges the free-form answers that the rules call wrong. Samples
of a benchmark are written during decoding, in the format of lmms-eval. A resumed run skips the
questions that are already in the file.

With `evaluate.num_samples` above 1 a question's accuracy is the mean over its samples, and pass@k
is estimated from them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import operator
import os
import pathlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from care_jax.batch import Example
from care_jax.benchmarks import lmms_samples, scoreboard
from care_jax.benchmarks.judge import Judge
from care_jax.benchmarks.lmms_samples import Sample
from care_jax.benchmarks.suite import Benchmark
from care_jax.devices import distributed
from care_jax.method import diagnostics
from care_jax.report.metrics import pass_rates, print_line, wilson_interval
from care_jax.rewards.scores import start_scoring
from care_jax.run.run import Run, verifier_of
from care_jax.run.versions import versions
from care_jax.stages.answering import (
    AnsweringPrograms,
    Decode,
    compile_answering,
    decode_batches,
    make_decoder,
)
from models import backbone


class Evaluator:
    """Evaluates weights of one run; what one evaluation compiles serves the next.

    Args:
        run: the run.
        held_out: the held-out questions; None if benchmarks alone are evaluated.
        benchmarks: opened, see `open_benchmarks`.
    """

    def __init__(
        self, run: Run, held_out: Sequence[Example] | None, benchmarks: Sequence[Benchmark]
    ):
        self._run, self._held_out, self._benchmarks = run, held_out, benchmarks

    @functools.cached_property
    def _programs(self) -> AnsweringPrograms:
        return compile_answering(self._run)

    def stamp(self, params: backbone.Params) -> dict[str, Any] | None:
        """What the metrics of these weights depend on; None if a reward function judges."""
        run = self._run
        if run.reward is not None or run.config.verifier.reward:
            return None
        whole = json.loads(run.config.to_json_best_effort())
        names = ("evaluate", "verifier", "model", "decode_sharding_rules")
        rows = [(x.id, x.question, x.answer) for x in self._held_out or () if self._is_read]
        return {
            **{name: whole[name] for name in names},
            "test": whole["data"]["test"],
            "rows": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
            "weights_and_prompts": _settings(run, self._programs.checksum(params)),
            "versions": versions(),
        }

    @property
    def _is_read(self) -> bool:
        """Whether the held-out rows are in memory; others are a function of the settings."""
        return isinstance(self._held_out, list)

    def __call__(
        self, params: backbone.Params, *, name: str, step: int | None = None
    ) -> dict[str, float]:
        """The metrics of `evaluate` and of `evaluate_benchmarks`, as far as they are configured."""
        where: dict[str, Any] = dict(name=name, step=step, programs=self._programs)
        metrics = {}
        if self._held_out is not None:
            metrics |= evaluate(self._run, params, self._held_out, **where)
        if self._benchmarks:
            metrics |= evaluate_benchmarks(self._run, params, self._benchmarks, **where)
        return metrics


def open_benchmarks(config: ConfigDict) -> list[Benchmark]:
    """The benchmarks of `evaluate.benchmarks`; their images are read when they are asked for.

    Raises:
        ValueError: files are missing.
    """
    return [Benchmark(which, path) for which, path in config.evaluate.benchmarks]


def evaluate(
    run: Run,
    params: backbone.Params,
    examples: Sequence[Example],
    *,
    name: str,
    step: int | None = None,
    programs: AnsweringPrograms | None = None,
) -> dict[str, float]:
    """Answers every example and scores the responses.

    Args:
        run: the run.
        params: in the training layout.
        examples: held out.
        name: of the stage that trained the weights ("sft", "rl"); samples go to
            `workdir/samples_<name>.jsonl`.
        step: of the stage, if it goes on after this evaluation; samples then go to
            `workdir/samples_<name>/step_<step>.jsonl`.
        programs: of the run; None: compiled here.

    Returns:
        accuracy and format in [0, 1], the accuracy's 95% Wilson interval, and accuracy by source;
        with several samples per question also pass@k.

    Raises:
        ValueError: no example's prompt fits a bucket.
        distributed.Preempted: the run was told to stop.
    """
    config, policy = run.config, run.policy
    correct, formatted, num_correct, components = defaultdict(list), [], [], []
    path = _path(run.workdir / f"samples_{name}", step, ".jsonl")
    label = _label(name, step)
    with (
        verifier_of(run) as verifier,
        open(path if jax.process_index() == 0 else os.devnull, "w") as samples,
    ):
        decode = make_decoder(run, params, programs or compile_answering(run))
        for batch in decode_batches(run, decode, examples, (), label):
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
                    **_responses(texts, accs),
                    "fmt": float(fmts.mean()),
                }
                for place, example, texts, accs, fmts in zip(
                    batch.places, batch.examples, batch.texts, scores.acc, scores.fmt, strict=True
                )
            ]
            if scored.components is not None:
                for sample, found in zip(answered, scored.components, strict=True):
                    sample["components"] = found[0] if len(found) == 1 else list(found)
            for sample in _gathered(answered, "place"):
                del sample["place"]
                found = sample.get("components", [])
                components += found if isinstance(found, list) else [found]
                correct[sample["source"]].append(sample["acc"])
                formatted.append(sample["fmt"])
                num_correct.append(sum(acc == 1 for acc in sample.get("accs", ())))
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
        **pass_rates(num_correct, config.evaluate.num_samples),
    }
    group = np.array(components, object)[:, None]
    metrics |= diagnostics.component_means([diagnostics.component_sums([group], num_rollouts=1)])
    if len(correct) > 1:
        metrics |= {f"acc/{source}": float(np.mean(correct[source])) for source in sorted(correct)}
    rates = [f", {name} {rate:.1%}" for name, rate in metrics.items() if name.startswith("pass@")]
    print_line(
        f"accuracy after {label}: {metrics['acc']:.1%} (95% interval {low:.1%} to {high:.1%}, "
        f"{len(accs)} held-out examples, format {metrics['fmt']:.1%}{''.join(rates[-1:])})"
    )
    return metrics


def _responses(texts: Sequence[str], accs: Sequence[float]) -> Sample:
    """The fields of a sample that hold one response, or several and their mean accuracy."""
    accs = [float(acc) for acc in accs]
    if len(texts) == 1:
        return {"response": texts[0], "acc": accs[0]}
    return {"responses": list(texts), "acc": sum(accs) / len(accs), "accs": accs}


def _path(stem: pathlib.Path, step: int | None, suffix: str = "") -> pathlib.Path:
    """`stem` with the suffix, or in the folder `stem` that of a step; its folder is created."""
    path = stem if step is None else stem / f"step_{step}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(path.name + suffix)


def _label(name: str, step: int | None) -> str:
    return name if step is None else f"{name} step {step}"


def evaluate_benchmarks(
    run: Run,
    params: backbone.Params,
    benchmarks: Sequence[Benchmark],
    *,
    name: str,
    step: int | None = None,
    programs: AnsweringPrograms | None = None,
) -> dict[str, float]:
    """Answers benchmarks and scores each by its published rules.

    Args:
        run: the run.
        params: in the training layout.
        benchmarks: one or more.
        name: see `evaluate`; results.json, results.md and samples_<benchmark>.jsonl go to
            `workdir/benchmarks_<name>`. Samples already in that folder are reused if weights and
            settings are the same.
        step: see `evaluate`; the folder is then `workdir/benchmarks_<name>/step_<step>`.
        programs: of the run; None: compiled here.

    Returns:
        accuracy of each benchmark and their mean, in [0, 1]; with several samples per question
        also pass@k of each benchmark.

    Raises:
        ValueError: no prompt of a benchmark fits a bucket.
        distributed.Preempted: the run was told to stop.
    """
    config = run.config.evaluate
    judge = None
    if config.judge_url:
        judge = Judge(
            config.judge_url,
            config.judge_model,
            timeout=config.judge_timeout,
            num_retries=config.judge_retries,
            prices=tuple(config.judge_prices),
        )
    folder = _path(run.workdir / f"benchmarks_{name}", step)
    folder.mkdir(exist_ok=True)
    programs = programs or compile_answering(run)
    decode = make_decoder(run, params, programs)
    settings = _settings(run, programs.checksum(params))
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
    if step is not None:
        print_line(f"benchmarks after {_label(name, step)}:")
    print_line(markdown.partition("\n\n")[0])
    return {
        f"{which}/{key}": value
        for which, figures in (results["benchmarks"] | {"mean": results["macro"]}).items()
        for key, value in figures.items()
        if key in ("acc", "acc_low", "acc_high") or key.startswith("pass@")
    }


def _gathered(samples: list[Sample], key: str) -> list[Sample]:
    """The samples of all processes, sorted by `key`."""
    gathered = [sample for part in distributed.gather_json(samples) for sample in part]
    return sorted(gathered, key=operator.itemgetter(key))


def _settings(run: Run, checksum: jax.Array) -> dict[str, Any]:
    """What all samples of a file must have in common: weights, prompts, sampling and judge."""
    config = run.config
    sampling = {key: config.evaluate[key] for key in ("temperature", "top_p", "num_samples")}
    return {
        "model": config.model.path,
        "weights": repr(float(np.asarray(checksum.addressable_data(0)))),
        "max_response_tokens": config.evaluate.max_response_tokens,
        "min_pixels": config.data.min_pixels,
        "max_pixels": config.data.max_pixels,
        "buckets": [list(bucket) for bucket in run.policy.prompts.buckets],
        "system_prompt": config.data.system_prompt,
        "instruction": config.data.instruction,
        "think_tag": config.data.think_tag,
        "judge": [config.evaluate.judge_url, config.evaluate.judge_model],
        **(sampling | {"seed": config.seed} if sampling["temperature"] else {}),
    }


def _benchmark_samples(
    run: Run, decode: Decode, benchmark: Benchmark, judge: Judge | None, folder, settings
) -> list[Sample]:
    """A sample per row of the benchmark: read from its file, or decoded and appended to it."""
    path = folder / f"samples_{benchmark.name}.jsonl"
    stamp = folder / f"settings_{benchmark.name}.json"
    is_same = stamp.exists() and json.loads(stamp.read_text()) == settings
    # Not `splitlines`, for which U+2028 in a response ends a line too. The last part is empty, or
    # what a killed run left of a line.
    whole = path.read_text().split("\n")[:-1] if is_same and path.exists() else []
    lines = [f"{line}\n" for line in whole]
    samples = [json.loads(line) for line in lines]
    done = {sample["doc_id"] for sample in samples}
    distributed.gather_json(len(done))  # a barrier: all processes have read the file
    file = contextlib.nullcontext()
    if jax.process_index() == 0:
        path.write_text("".join(lines))
        stamp.write_text(json.dumps(settings, indent=2) + "\n")
        file = path.open("a")
    with file as out:
        for batch in decode_batches(run, decode, benchmark, done, benchmark.name):
            fresh = lmms_samples.scored(
                benchmark,
                batch.places,
                batch.examples,
                batch.texts,
                [bool(ended.all()) for ended in np.asarray(batch.rollouts.is_complete)],
                judge,
            )
            num_samples = run.config.evaluate.num_samples
            fresh += [
                lmms_samples.dropped(benchmark, place, num_samples) for place in batch.dropped
            ]
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
