"""One run: `python -m care_jax.main --config=configs/tiny.py --workdir=runs/demo`.

The stages of `config.stages` run in order, each from the parameters of the previous one. A stopped
run resumes if it is started again with the same workdir, which all of its processes must be able to
write to; see `devices.distributed`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import traceback
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from care_jax.aot import dry_run
from care_jax.batch import Example
from care_jax.config import command_line
from care_jax.config.checks import has_benchmarks_only, is_evaluated
from care_jax.config.keys import check_keys
from care_jax.config.resume import TRAINING
from care_jax.data.examples import SECTIONS, given_examples, open_examples
from care_jax.devices import compilation, distributed, limits, xla_flags
from care_jax.devices.standard_streams import outlive_readers
from care_jax.report.console import print_line
from care_jax.report.metrics import MetricWriter
from care_jax.report.report import Report
from care_jax.rewards.reward_function import RewardFunction
from care_jax.rl import carry_over
from care_jax.run import interrupts, lock, space, terminal, weights
from care_jax.run.progress import saved_steps
from care_jax.run.reward_trial import check_reward
from care_jax.run.run import Run, open_run, verifier_of
from care_jax.run.versions import write_config, write_start
from care_jax.run.workdir import check_given, check_workdir, is_cold_start_unread, read_by
from care_jax.stages import evaluate, export, rl, sft
from models.backbone import Params

_DEFAULT = "configs/tiny.py"


def define_flags() -> flags.FlagHolder[ConfigDict]:
    """Defines the command's flags; returns the configuration's.

    Not at import, since a program that calls `run_stages` may define flags of these names.
    """
    config = config_flags.DEFINE_config_file("config", None, f"Configuration; else {_DEFAULT}.")
    flags.DEFINE_string("workdir", "runs/tiny", "Folder of metrics, checkpoints and exports.")
    flags.DEFINE_bool("dry_run", False, "Say what the run would do, and do nothing.")
    # JAX detects these on TPU pods, Slurm and Open MPI; a single process needs none of them.
    flags.DEFINE_string("coordinator_address", None, "host:port of process 0.")
    flags.DEFINE_integer("num_processes", None, "Processes of the whole run.")
    flags.DEFINE_integer("process_id", None, "Number of this process, from 0.")
    return config


def main(_: Sequence[str]) -> None:
    given = flags.FLAGS
    if not given.workdir:
        raise ValueError("--workdir must name a folder, got ''; write --workdir=runs/<name>")
    limits.check_limits()
    defaults = xla_flags.set_defaults(given.config.xla_preset)
    workdir = command_line.folder_of(given.workdir)
    distributed.start(given.coordinator_address, given.num_processes, given.process_id)
    if defaults:
        print_line(f"XLA: {', '.join(defaults)}")
    overridden = config_flags.get_override_values(given["config"])
    run_stages(given.config, workdir, overridden, is_dry=given.dry_run)


def run_stages(
    config: ConfigDict,
    workdir: pathlib.Path,
    overridden: Sequence[str] = (),
    *,
    is_dry: bool = False,
    examples: Mapping[str, Sequence[Example]] | None = None,
    reward: RewardFunction | None = None,
) -> dict[str, dict[str, float]]:
    """Runs every stage of a configuration; returns metrics by the stage that was evaluated.

    Args:
        config: complete, see `configs/common.py`.
        workdir: created if it does not exist.
        overridden: keys set on the command line, see `config.checks.check_config`.
        is_dry: only print what the run would do, see `dry_run`.
        examples: for the stages "rl" and "evaluate", instead of the sources of `config.data`.
        reward: a reward function, instead of `verifier.reward`.
    """
    given = examples or {}
    from_python = [*given, *(["reward"] if reward else [])]
    check_keys(config)
    check_given(config, workdir, from_python, read_by(config, given))
    run = open_run(config, workdir, reward=reward, overridden=overridden, given=[*given])
    sources = open_sources(run, given)
    benchmarks = evaluate.open_benchmarks(run.config) if is_evaluated(run.config) else []
    try_reward(run, sources)
    if is_dry:
        print_line(dry_run.describe(run, sources, benchmarks))
        return {}
    workdir.mkdir(parents=True, exist_ok=True)
    with lock.held(workdir):
        check_workdir(run)
        if "rl" in config.stages:
            carry_over.check_resumed(run)
        if warning := space.check(run):
            print_line(warning)
        if run.config.compilation_cache:
            compilation.keep_programs()
        else:
            compilation.keep_no_programs()
        # As given: read on other devices, config.json must not have the sizes filled in for these.
        if jax.process_index() == 0:
            write_config(config, workdir, from_python)
            write_start(config, workdir, run.mesh, overridden, given)
        print_line(terminal.banner(run, sources, given))
        settings = json.loads(config.to_json_best_effort())
        with (
            MetricWriter(workdir, settings, **run.config.metrics) as writer,
            compilation.Announcer(print_line, terminal.PROGRAMS, terminal.num_programs(run.config)),
        ):
            run = dataclasses.replace(run, writer=writer)
            evaluator = evaluate.Evaluator(run, sources.get("evaluate"), benchmarks)
            results = _run_each(run, sources, evaluator)
    print_line(terminal.ending(run))
    return results


def open_sources(run: Run, given: Mapping[str, Sequence[Example]]) -> dict[str, Sequence[Example]]:
    """The examples of each stage that trains, and the held-out ones if they are evaluated."""
    config = run.config
    opened = [stage for stage in TRAINING if stage in config.stages]
    if is_evaluated(config) and not has_benchmarks_only(config, given):
        opened.append("evaluate")
    sources = {
        stage: given_examples(given[stage], stage, run.has_reward)
        if stage in given
        else open_examples(config, stage, run.has_reward)
        for stage in opened
    }
    _check_same_rows(sources)
    return sources


def _check_same_rows(sources: Mapping[str, Sequence[Example]]) -> None:
    """Refuses other rows on other processes, as an index names the same row on all of them."""

    def rows_of(examples: Sequence[Example]) -> list[int]:
        ids = [example.id for example in examples] if isinstance(examples, list) else []
        return [len(examples), zlib.crc32(json.dumps(ids).encode())]

    every = distributed.gather_json({stage: rows_of(rows) for stage, rows in sources.items()})
    for stage in sources:
        found = [rows[stage] for rows in every]
        if any(rows != found[0] for rows in found):
            counts = ", ".join(str(number) for number, _ in found)
            raise ValueError(
                f"expected the same rows of data.{SECTIONS[stage]} on all processes, got {counts} "
                "by process, or as many with other ids; give all hosts the same files"
            )


def try_reward(run: Run, sources: Mapping[str, Sequence[Example]]) -> None:
    """Calls the reward function, if there is one, on rows of the first stage that needs it."""
    sizes = {"rl": run.config.rl.num_rollouts, "evaluate": run.config.evaluate.num_samples}
    stage = next((stage for stage in sizes if stage in sources), None)
    if stage is None or not run.has_reward:
        return
    with verifier_of(run) as verifier:
        section = f"data.{SECTIONS[stage]}"
        check_reward(verifier, sources[stage], section, group_size=sizes[stage])


def _run_each(
    run: Run, sources: Mapping[str, Sequence[Example]], evaluator: evaluate.Evaluator
) -> dict[str, dict[str, float]]:
    """Runs the stages of a run whose workdir is locked and checked; see `run_stages`."""
    stages, results = run.config.stages, {}
    # Raises before weights are loaded if the step to evaluate or export is missing.
    found = None if set(stages) & {*TRAINING} else weights.find(run, ())
    params = weights.load(run, found) if found else weights.start_of(run, stages[0])
    last, trained = found.name if found else "start", ()
    for number, stage in enumerate(stages):
        if stage in TRAINING:
            params = _trained(run, stage, params, sources[stage], evaluator)
            last, trained = stage, (*trained, stage)
        elif stage == "evaluate":
            later = [name for name in stages[number:] if name in TRAINING]
            is_past = any(saved_steps(run.workdir, name) for name in later)
            results[last] = evaluate.evaluate_stage(
                run, evaluator, params, name=last, is_past=is_past
            )
        else:
            source = found or weights.find(run, trained)
            is_held = found or source.step is None
            export.export_stage(run, params if is_held else weights.load(run, source), source)
        Report(run.workdir, **run.config.report).write()
    return results


def _trained(
    run: Run,
    stage: str,
    params: Params,
    examples: Sequence[Example],
    evaluator: evaluate.Evaluator,
) -> Params:
    """The weights after a stage that trains; those before a cold start that RL is past."""
    if stage == "sft" and is_cold_start_unread(run):
        if not saved_steps(run.workdir, stage):
            print_line("the cold start's checkpoints are gone; RL goes on from its own")
        return params
    if (done := weights.finished(run, stage)) is not None:
        return done
    train = sft.train if stage == "sft" else rl.train
    return train(run, params, examples, evaluator)


def run_main() -> None:
    """Parses flags and runs; user errors are printed in one line, without a traceback.

    Exits with status 75 if the run was preempted, 130 after Ctrl-C.
    """
    logging.set_verbosity(logging.WARNING)
    logging.use_absl_handler()
    # Errors in threads of orbax and TensorStore are raised again when the save is awaited.
    logging.get_absl_handler().addFilter(
        lambda record: record.levelname != "ERROR" or "/orbax/" not in record.pathname
    )
    sys.unraisablehook = _unraisable
    config = define_flags()
    interrupts.watch()
    try:
        app.run(main, flags_parser=lambda argv: command_line.parse(argv, config, _DEFAULT))
    except distributed.Preempted as stopped:
        message = f"stopped by SIGTERM {stopped}; run the same command to resume"
        distributed.exit_run(message, is_preempted=True)
    except KeyboardInterrupt:
        given = flags.FLAGS
        trains = not {*TRAINING}.isdisjoint(given.config.stages)
        workdir = pathlib.Path(given.workdir).expanduser()
        interrupts.exit_run(interrupts.message(workdir, trains=trains, is_dry=given.dry_run))
    except (ValueError, FloatingPointError) as error:
        distributed.exit_run(f"error: {error}")
    except OSError as error:
        distributed.exit_run(f"error: {command_line.os_error(error, flags.FLAGS.workdir)}")
    except MemoryError as error:
        reason = " ".join(str(error).split()) or "an allocation failed"
        advice = "use a host with more, or raise its limit (ulimit -v), then run the same command"
        distributed.exit_run(f"error: out of host memory: {reason}; {advice} to resume")
    except Exception as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            distributed.exit_run(f"error: {_out_of_memory(error)}")
        distributed.exit_run(traceback.format_exc())


def _out_of_memory(error: jax.errors.JaxRuntimeError) -> str:
    reason = str(error).split("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ").rstrip(".")
    return (
        f"a device has no memory left: {reason}; `python -m care_jax.aot` says what each program "
        "of a configuration needs, and docs/one_gpu.md what to lower; if that fits on a GPU, its "
        "memory is in pieces: set XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async; then run the same "
        "command to resume"
    )


def _unraisable(unraisable: Any) -> None:
    """Acts on an exception that Python drops."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        interrupts.raise_again()
    elif str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    outlive_readers()
    run_main()
