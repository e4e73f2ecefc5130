"""Accuracy on held-out questions and on benchmarks: one greedy response each, or several samples.

The verifier judges held-out questions, as in training. Each benchmark is scored by its published
rules; optionally, a language model judges the free-form answers that the rules call wrong.

Samples are written during decoding, each with a digest of the weights and settings that it depends
on. A restarted evaluation decodes only the questions without a sample of that digest, and asks a
judge only about answers without its verdict.

With `evaluate.num_samples` above 1 a question's accuracy is the mean over its samples, and pass@k
is estimated from them.

A held-out question is left out of all figures, and counted, if a reward function failed on any of
its samples.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from care_jax.batch import Example
from care_jax.benchmarks import held_out, scoreboard
from care_jax.benchmarks.judge import Judge
from care_jax.benchmarks.releases import RELEASES
from care_jax.benchmarks.samples import Answers, Questions, Sample, read, samples_of, to_line
from care_jax.benchmarks.suite import BLANK, Benchmark
from care_jax.config.resume import ANSWERING
from care_jax.devices import distributed
from care_jax.devices.whole_file import write_whole
from care_jax.prompts.images import checksum
from care_jax.report.console import print_line
from care_jax.report.records import read_records
from care_jax.rewards.failures import failure
from care_jax.rewards.scores import start_scoring
from care_jax.run.run import Run, verifier_of
from care_jax.run.terminal import how_decoded
from care_jax.run.versions import versions
from care_jax.stages.answering import Decode, compile_answering, decode_batches, make_decoder
from models import backbone

_AT_ONCE = 256  # kept samples that are gathered, through the devices, or judged anew


def open_benchmarks(config: ConfigDict) -> list[Benchmark]:
    """The benchmarks of `evaluate.benchmarks`; prints what is unusual about them.

    ValueError: files are missing or rows are wrong.
    """
    benchmarks = [Benchmark(which, path) for which, path in config.evaluate.benchmarks]
    for note in (note for benchmark in benchmarks for note in benchmark.notes):
        print_line(note)
    return benchmarks


def evaluate_stage(
    run: Run, evaluator: Evaluator, params: backbone.Params, *, name: str, is_past: bool = False
) -> dict[str, float]:
    """Runs the stage `evaluate`; writes its metrics unless metrics.jsonl already has them.

    Their line also has the keys of `resume.ANSWERING`.

    A reward function's samples are not reused. Held-out questions that it judged are therefore not
    judged again if the stage `is_past`: a training stage behind it has checkpoints.
    """
    answering = {key: run.config.evaluate[key] for key in ANSWERING}
    before = run.metrics.line(f"evaluate_{name}", 0) if is_past and run.has_reward else None
    if before:
        is_same = all(before.get(key, value) == value for key, value in answering.items())
        before = {key: x for key, x in before.items() if key not in ANSWERING} if is_same else None
    metrics = evaluator(params, name=name, before=before)
    line = {"stage": f"evaluate_{name}", "step": 0, **metrics, **answering}
    is_there = jax.process_index() == 0 and any(
        record == line for _, record in read_records(run.metrics.path)
    )
    if not distributed.gather_json(is_there)[0]:
        run.metrics.write(f"evaluate_{name}", 0, metrics | answering)
    return metrics


class Evaluator:
    """Evaluates weights of one run; evaluations share the compiled programs.

    `examples` are the held-out questions; None to evaluate benchmarks only.
    """

    def __init__(
        self, run: Run, examples: Sequence[Example] | None, benchmarks: Sequence[Benchmark]
    ):
        self._run, self._examples, self._benchmarks = run, examples, benchmarks
        self._programs = functools.cache(lambda: compile_answering(run))
        self._answered: dict[str, pathlib.Path] = {}  # files of samples by their digests

    def __call__(
        self,
        params: backbone.Params,
        *,
        name: str,
        step: int | None = None,
        before: dict[str, float] | None = None,
    ) -> dict[str, float]:
        """Answers all questions and scores the responses.

        Args:
            params: in the training layout.
            name: of the stage that trained the weights ("sft", "rl"). Held-out samples go to
                `workdir/samples_<name>.jsonl`; results.json, results.md and
                samples_<benchmark>.jsonl of benchmarks to `workdir/benchmarks_<name>`.
            step: of the stage, for an evaluation during it; samples are then in
                `samples_<name>/step_<step>.jsonl` and `benchmarks_<name>/step_<step>`.
            before: metrics of the same evaluation; held-out questions are then not asked again.

        Returns:
            for held-out questions the metrics of `held_out.metrics_of`, `num_dropped` and, with a
            reward function, `num_not_judged`; for each benchmark `<name>/acc`, its interval and
            pass@k; and the benchmarks' mean `mean/acc`.

        Raises:
            ValueError: no prompt of a benchmark fits a bucket.
            RewardFailed: the reward function judged no held-out question.
            distributed.Preempted: the run was preempted.
        """
        metrics, examples = {}, None if before else self._examples
        if before:
            others = {*RELEASES, "mean"}
            metrics = {key: x for key, x in before.items() if key.partition("/")[0] not in others}
            print_line(f"the evaluation {_label(name, step)} of held-out questions was made before")
        if examples is None and not self._benchmarks:
            return metrics
        decode = make_decoder(self._run, params, self._programs())
        settings = _settings(self._run, self._programs().checksum(params))
        if examples is not None:
            metrics |= self._held_out(decode, settings, examples, name, step)
        if self._benchmarks:
            metrics |= self._on_benchmarks(decode, settings, name, step)
        return metrics

    def _held_out(
        self,
        decode: Decode,
        settings: dict[str, Any],
        examples: Sequence[Example],
        name: str,
        step: int | None,
    ) -> dict[str, float]:
        run, policy = self._run, self._run.policy
        path, label = _path(run.workdir / f"samples_{name}", step, ".jsonl"), _label(name, step)
        with verifier_of(run) as verifier:

            def score(answers: Answers):
                return start_scoring(
                    answers.rollouts,
                    answers.examples,
                    verifier,
                    policy.token_bytes,
                    eos_token_ids=policy.config.eos_token_ids,
                    format_weight=0.0,
                )()

            questions = held_out.questions_of(examples, score)
            # A reward function may depend on anything, so its samples are not reused.
            of = None if verifier.has_reward else _digest(settings | self._held_out_settings)
            if of:
                self._take_over(path, of)
            samples = _answer(run, decode, questions, path, of, label)
        answered = [sample for sample in samples if not sample["is_dropped"]]
        judged = [sample for sample in answered if sample["acc"] is not None]
        if not judged:
            what = f"none of {len(answered)} held-out questions was judged"
            raise failure(verifier, f"evaluation after {label}: {what}")
        metrics = held_out.metrics_of(scoreboard.score(judged, questions.categories), judged)
        metrics["num_dropped"] = len(samples) - len(answered)
        if verifier.has_reward:
            metrics["num_not_judged"] = len(answered) - len(judged)
        unjudged = f", {metrics['num_not_judged']} not judged" if judged != answered else ""
        rates = [f", {key} {rate:.1%}" for key, rate in metrics.items() if key.startswith("pass@")]
        how = how_decoded(run.config.evaluate.temperature)
        print_line(
            f"{how} accuracy after {label}: {metrics['acc']:.1%} "
            f"(95% interval {metrics['acc_low']:.1%} to {metrics['acc_high']:.1%}, {len(judged)} "
            f"held-out examples{unjudged}, format {metrics['fmt']:.1%}{''.join(rates[-1:])})"
        )
        return metrics

    @functools.cached_property
    def _held_out_settings(self) -> dict[str, Any]:
        """What held-out samples depend on besides `_settings`: the verifier and the questions."""
        whole = json.loads(self._run.config.to_json_best_effort())
        sections = ("verifier", "model", "decode_sharding_rules")
        # Rows read from disk are a function of the settings.
        rows = self._examples if isinstance(self._examples, list) else []
        return {
            **{name: whole[name] for name in sections},
            "test": whole["data"]["test"],
            "rows": _digest(
                [(x.id, x.question, x.answer, x.units, [*map(checksum, x.images)]) for x in rows]
            ),
            "versions": versions(),
        }

    def _on_benchmarks(
        self, decode: Decode, settings: dict[str, Any], name: str, step: int | None
    ) -> dict[str, float]:
        config, judge = self._run.config.evaluate, None
        if config.judge_url:
            judge = Judge(
                config.judge_url,
                config.judge_model,
                timeout=config.judge_timeout,
                num_retries=config.judge_retries,
                prices=tuple(config.judge_prices),
            )
        folder = _path(self._run.workdir / f"benchmarks_{name}", step)
        folder.mkdir(exist_ok=True)
        results: dict[str, Any] = {"benchmarks": {}}
        for benchmark in self._benchmarks:
            path = folder / f"samples_{benchmark.name}.jsonl"
            of = {"benchmark": benchmark.name, "rows": _digest(benchmark.fingerprint())}
            digest = _digest(settings | of)
            questions = benchmark.questions(judge)
            self._take_over(path, digest)
            samples = _answer(self._run, decode, questions, path, digest, benchmark.name)
            if lost := sum(sample["is_dropped"] for sample in samples):
                print_line(
                    f"{lost} of {len(samples)} prompts of {benchmark.name} fit no bucket of "
                    "data.buckets and count as wrong; add a larger bucket or lower data.max_pixels"
                )
            if num_blank := sum(BLANK in sample["doc"] for sample in samples):
                print_line(
                    f"{num_blank} of {len(samples)} questions of {benchmark.name} have an image of "
                    "one colour; the official harness shows it so too, as it ignores transparency"
                )
            results["benchmarks"][benchmark.name] = scoreboard.score(samples, benchmark.categories)
        results["macro"] = scoreboard.macro_average(results["benchmarks"])
        results["settings"] = settings
        if judge is not None:
            # Only since this process started: resumed samples were judged, and paid for, before.
            asked = [judge.counts, judge.cost, judge.problem]
            counts, costs, problems = zip(*distributed.gather_json(asked), strict=True)
            total = {key: sum(each[key] for each in counts) for key in judge.counts}
            results["judge"] = {"name": judge.name, **total, "cost": sum(costs)}
            if lost := total["failures"]:
                # A stage does not repeat its evaluations.
                advice = "run again with the same workdir to ask it about these"
                print_line(
                    f"the judge gave no verdict on {lost} answers ({max(problems, key=len)})"
                    + (f"; {advice}" if step is None else "")
                )
        markdown = scoreboard.to_markdown(results)
        if jax.process_index() == 0:
            text = json.dumps(results, indent=2, ensure_ascii=False)
            write_whole(folder / "results.json", text + "\n")
            write_whole(folder / "results.md", markdown)
        if step is not None:
            print_line(f"benchmarks after {_label(name, step)}:")
        print_line(markdown.partition("\n\n")[0])
        return {
            f"{which}/{key}": value
            for which, figures in (results["benchmarks"] | {"mean": results["macro"]}).items()
            for key, value in figures.items()
            if key in ("acc", "acc_low", "acc_high") or key.startswith("pass@")
        }

    def _take_over(self, path: pathlib.Path, digest: str) -> None:
        """Copies the samples of an earlier evaluation of the same weights, questions and settings.

        The end of a stage with `eval_every` and the stage "evaluate" behind it are two such, but
        not with LoRA, whose adapters are merged in between.
        """
        answered = self._answered.setdefault(digest, path)
        if answered != path and jax.process_index() == 0 and not read(path, digest):
            shutil.copyfile(answered, path)


def _path(stem: pathlib.Path, step: int | None, suffix: str = "") -> pathlib.Path:
    """`stem` with the suffix, or in the folder `stem` that of a step; its folder is created."""
    path = stem if step is None else stem / f"step_{step}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(path.name + suffix)


def _label(name: str, step: int | None) -> str:
    return name if step is None else f"{name} step {step}"


def _settings(run: Run, checksum: jax.Array) -> dict[str, Any]:
    """What samples of all benchmarks depend on: weights, prompts and sampling."""
    config = run.config
    sampling = {key: config.evaluate[key] for key in ("temperature", "top_p", "num_samples")}
    prompts = ("min_pixels", "max_pixels", "system_prompt", "instruction", "think_tag")
    tokenizer = run.policy.tokenizer
    return {
        "model": config.model.path,
        "tokenizer": config.model.tokenizer,
        # Of its files, which may have been edited.
        "tokens": _digest([tokenizer.get_chat_template(), tokenizer.get_vocab()]),
        "versions": versions(),
        "compute_dtype": config.model.compute_dtype,
        "weights": _digest(np.asarray(checksum.addressable_data(0)).tolist()),
        "max_response_tokens": config.evaluate.max_response_tokens,
        "buckets": [list(bucket) for bucket in run.policy.prompts.buckets],
        **{key: config.data[key] for key in prompts},
        **(sampling | {"seed": config.seed} if sampling["temperature"] else {}),
    }


def _digest(settings: Any) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _answer(
    run: Run,
    decode: Decode,
    questions: Questions,
    path: pathlib.Path,
    digest: str | None,
    label: str,
) -> list[Sample]:
    """The samples in order, read from the file if they have the digest, else decoded and appended.

    Without a digest all are decoded.
    """
    is_writer = jax.process_index() == 0
    kept = read(path, digest) if is_writer else []  # renames a file of other settings
    kept = kept if digest else []
    samples: list[Sample] = []
    for start in range(0, distributed.gather_json(len(kept))[0], _AT_ONCE):
        samples += distributed.gather_json(kept[start : start + _AT_ONCE])[0]
    done = {sample["doc_id"] for sample in samples}
    if len(done) == len(questions.examples) > 0:
        print_line(
            f"the evaluation {label} has its answers already: {path} is of these weights and "
            "settings"
        )
    if is_writer:
        write_whole(path, "".join(map(to_line, kept)))
    for start in range(0, len(samples), _AT_ONCE):
        chunk = slice(start, start + _AT_ONCE)
        if samples[chunk] != (judged := _judged_anew(questions, samples[chunk])):
            samples[chunk] = judged
            if is_writer:
                write_whole(path, "".join(map(to_line, samples)))
    with path.open("a", encoding="utf-8") if is_writer else contextlib.nullcontext() as out:
        for answers in decode_batches(run, decode, questions.examples, done, label):
            mine = questions.judged(samples_of(answers, questions.verdicts(answers)))
            parts = distributed.gather_json(mine)
            fresh = [sample | {"settings": digest} for part in parts for sample in part]
            fresh.sort(key=lambda sample: sample["doc_id"])
            samples += fresh
            if out is not None:
                out.writelines(map(to_line, fresh))
                out.flush()
    samples.sort(key=lambda sample: sample["doc_id"])
    if is_writer:
        write_whole(path, "".join(map(to_line, samples)))
    if all(sample["is_dropped"] for sample in samples):
        raise ValueError(
            f"none of the {len(questions.examples)} prompts of {questions.name} fits data.buckets "
            f"{run.policy.prompts.buckets}; enlarge them or lower data.max_pixels"
        )
    return samples


def _judged_anew(questions: Questions, samples: list[Sample]) -> list[Sample]:
    """The samples with the verdicts of a judge that they lack; each process asks for its share."""
    mine = questions.judged(samples[jax.process_index() :: jax.process_count()])
    parts = distributed.gather_json(mine)
    judged = {sample["doc_id"]: sample for part in parts for sample in part}
    return [judged[sample["doc_id"]] for sample in samples]
