"""Describes what a run would do: `python -m care_jax.main --dry_run --config=...`.

The configuration, the devices, the first tokenised rows of every source and benchmark, parameters
and memory, and the files that would be written. No weights are read and nothing is written,
but for what a hub id downloads.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from care_jax.aot import shapes
from care_jax.aot.compile import update_program
from care_jax.batch import Example, Unusable
from care_jax.benchmarks.suite import Benchmark
from care_jax.config.resume import TRAINING
from care_jax.data.mixture import Mixture
from care_jax.data.pipeline import TOO_LONG, size_of
from care_jax.data.rows import LeftOut
from care_jax.devices import sharding
from care_jax.devices.flops import GIB
from care_jax.prompts.builder import TokenizedPrompt
from care_jax.prompts.rendering import image_line, rendered, resized_images
from care_jax.rl import carry_over
from care_jax.rl.rollout_programs import rollout_sizes
from care_jax.run import space
from care_jax.run.policy import decode_shardings
from care_jax.run.progress import saved_steps
from care_jax.run.run import (
    Run,
    abstract_params,
    abstract_state,
    compile_to_decode_layout,
    make_adamw,
)
from care_jax.run.workdir import check_workdir, trained_stages

NUM_ROWS = 2  # shown per source
_MOST_TRIED = 64  # rows tokenised to find usable ones
_MOST_READ = 1000  # rows read to count those that are unusable, without decoding their images
_CHEAP = 50e6  # maximum parameters for which the update is compiled, in seconds on a CPU


def describe(
    run: Run, sources: Mapping[str, Sequence[Example]], benchmarks: Sequence[Benchmark] = ()
) -> str:
    """The description, in plain text; `sources` has the examples of each stage.

    Raises:
        ValueError: a source has no usable row among its first `_MOST_TRIED`; the workdir is a file
            or inside one; or its checkpoints are of a run with other settings.
    """
    sections = {
        "Configuration": _configuration(run.config),
        "Devices": _devices(run),
        "Model": _model(run),
        **{f"Data of {stage!r}": _data(run, stage, each) for stage, each in sources.items()},
        **{f"Benchmark {each.name!r}": _benchmark(run, each) for each in benchmarks},
        "Memory of a device": _memory(run),
        "Files": _files(run),
    }
    texts = ((f"## {title}", *(f"  {line}" for line in sections[title]), "") for title in sections)
    return "\n".join(itertools.chain.from_iterable(texts))


def _configuration(config: ConfigDict, prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from _configuration(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key} = {value!r}"


def _devices(run: Run) -> Iterator[str]:
    device = run.mesh.devices.flat[0]
    axes = " x ".join(f"{name} {size}" for name, size in run.mesh.shape.items())
    yield f"{run.mesh.size} of kind {device.device_kind!r} ({device.platform}): {axes}"
    yield f"{jax.process_count()} processes"


def _model(run: Run) -> Iterator[str]:
    policy, params = run.policy, abstract_params(run)
    yield f"{policy.config.family}, {policy.folder or 'random weights'}"
    total, trained = (_num_parameters(tree) for tree in (params, run.partition(params)[0]))
    param_dtype = run.config.model.param_dtype
    yield f"{total:,} parameters, {trained:,} trained; master weights {param_dtype}"


def _data(run: Run, stage: str, examples: Sequence[Example]) -> Iterator[str]:
    parts = examples.sources if isinstance(examples, Mixture) else [examples]
    sizes = " + ".join(f"{len(part):,}" for part in parts)
    yield f"{sizes} rows" + (f" in {len(parts)} sources" if len(parts) > 1 else "")
    for part in parts:
        yield from _rows(run, stage, part)


def _rows(run: Run, stage: str, examples: Sequence[Example]) -> Iterator[str]:
    """The first usable rows, and the reasons why other rows are unusable."""
    left_out, num_shown, builder = LeftOut(), 0, run.policy.prompts
    rows = iter(range(min(len(examples), _MOST_READ)))
    for index in itertools.islice(rows, _MOST_TRIED):
        try:
            example = examples[index]
            prompt = builder.tokenize(example)
            if not builder.fits(prompt):
                raise Unusable(TOO_LONG, size_of(prompt))
        except Unusable as error:
            left_out.add(error, index)
            continue
        yield from _row(run, stage, example, prompt, is_first=not num_shown)
        num_shown += 1
        if num_shown == NUM_ROWS:
            break
    for index in rows:
        try:
            _ = examples[index]
        except Unusable as error:
            left_out.add(error, index)
    if left_out.counts:
        num_read = min(len(examples), _MOST_READ)
        yield f"left out of the first {num_read:,} rows: {left_out}"
    if not num_shown:
        raise ValueError(
            f"the data of stage {stage!r} must have a usable row among its first {_MOST_TRIED}, "
            f"got none ({str(left_out) or 'it is empty'}); change its path, columns or data.buckets"
        )


def _benchmark(run: Run, benchmark: Benchmark) -> Iterator[str]:
    """The number of rows and the first prompt."""
    yield f"{len(benchmark):,} rows, {benchmark.release.num_rows:,} are published"
    example, builder = benchmark[0], run.policy.prompts
    prompt = builder.tokenize(example)
    if not builder.fits(prompt):
        yield f"the first {TOO_LONG}, and would count as wrong ({size_of(prompt)})"
    yield from _row(run, "evaluate", example, prompt, is_first=True)


def _row(
    run: Run, stage: str, example: Example, prompt: TokenizedPrompt, *, is_first: bool
) -> Iterator[str]:
    """A row's lengths, question, answer and images; of the first also what the model reads."""
    builder = run.policy.prompts
    lengths = f"{len(prompt.tokens)} tokens, {len(prompt.patches)} patches"
    if stage == "sft":
        lengths += f", response {len(builder.response_tokens(example.response))} tokens"
        if example.context:
            lengths += f" behind a context of {len(builder.context_tokens(example.context))}"
    question = " ".join(example.question.split())
    yield f"{example.source} {example.id}: {lengths}"
    yield f"  question {question[:100]!r}, answer {example.answer!r}"
    for image in resized_images(example, prompt, run.policy.config):
        yield f"  image {image_line(image)}"
    if is_first:
        yield "  as the model reads it:"
        text = rendered(prompt, run.policy.token_bytes, run.policy.config)
        yield from (f"    {line}" for line in text.split("\n"))


def _memory(run: Run) -> Iterator[str]:
    """GiB of the arrays kept on a device during a stage, and of the update if it is compiled."""
    stages = [stage for stage in TRAINING if stage in run.config.stages]
    if not stages:
        yield f"{_gib(shapes.num_bytes(abstract_params(run)))} weights"
        return
    adamw = make_adamw(run, stages[-1])
    state = abstract_state(run, adamw)
    params = shapes.num_bytes(state.params)
    yield f"{_gib(params)} weights"
    yield f"{_gib(shapes.num_bytes(state) - params)} optimizer state"
    if "rl" in stages:
        if reference := shapes.reference_bytes(run):
            yield f"{_gib(reference)} reference policy"
        layout = decode_shardings(run.policy, run.mesh, run.config.decode_sharding_rules)
        decoding = jax.eval_shape(compile_to_decode_layout(run), state.params)
        num_bytes = shapes.num_bytes(sharding.abstract(decoding, layout))
        yield f"{_gib(num_bytes)} weights for decoding"
        most = max(shapes.slot_bytes(run, sizes) for sizes in rollout_sizes(run))
        yield f"{_gib(most)} KV caches and slots of rl.decode_prompts prompts of the largest bucket"
    stats = run.mesh.local_devices[0].memory_stats() or {}
    if limit := stats.get("bytes_limit"):
        yield f"{_gib(limit)} there are"
    if _num_parameters(abstract_params(run)) <= _CHEAP:
        began = time.perf_counter()
        program = update_program(run, stages[-1])
        seconds = time.perf_counter() - began
        yield f"{_gib(program.own_bytes)} largest {program.name}, compiled in {seconds:.0f} s"
    else:
        yield (
            "python -m care_jax.aot with the same --config and --topology=<chips> compiles all "
            "programs and says what is left"
        )


def _files(run: Run) -> Iterator[str]:
    config, workdir = run.config, run.workdir
    existing = next(path for path in (workdir, *workdir.parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(
            f"--workdir must be a folder or one to create, got {workdir}, and {existing} is a "
            "file; choose another --workdir"
        )
    check_workdir(run, is_dry=True)
    if "rl" in config.stages:
        carry_over.check_resumed(run)
    yield f"{workdir} " + ("exists" if workdir.exists() else "would be created")
    yield "config.json, starts.jsonl, metrics.jsonl, tensorboard/"
    yield "report.html, report.jsonl, rollouts.jsonl"
    for stage in trained_stages(run):
        saved, size = saved_steps(workdir, stage), space.checkpoint_bytes(run, stage)
        yield (
            f"checkpoints/{stage}/: every {config.checkpoint_every} steps and after the "
            f"last of {config[stage].num_steps}, {_gib(size).strip()} each, the last "
            f"{config.keep_checkpoints} kept; "
            + (f"resumes from step {max(saved)}" if saved else "none yet")
        )
    # The weights that an evaluation before any training uses, see `run.weights.find`.
    found = [stage for stage in TRAINING if saved_steps(run.workdir, stage)]
    last = f"{found[-1]} (export.step {config.export.step!r})" if found else "start"
    if any(stage in TRAINING for stage in config.stages):
        last = "start"
    after = set()
    for stage in config.stages:
        last = stage if stage in TRAINING else last
        if stage == "evaluate":
            after.add(last)
    if after:
        yield "samples of the evaluations after " + ", ".join(sorted(after))
    if "export" in config.stages:
        yield "export/, a Hugging Face release"
    if warning := space.check(run):
        yield warning


def _num_parameters(params: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(params))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:8.3f} GiB"
