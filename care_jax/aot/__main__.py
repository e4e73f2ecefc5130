"""Memory and least time of a run on TPUs or GPUs, compiled without one.

    python -m care_jax.aot --config=configs/qwen25vl_7b.py --topology=v5e:8x8 --mean_response=600
    python -m care_jax.aot --config=configs/qwen25vl_7b.py --topology=v5e:8x8 --slices=4
    python -m care_jax.aot --config=configs/qwen3vl_4b.py --topology=h100:8
    python -m care_jax.aot --config=configs/qwen25vl_7b.py --topology=h100:2x8
    python -m care_jax.aot --config=configs/qwen25vl_3b_lora.py:24 --topology=rtx4090:1

Prints a row for every program of the stages "sft" and "rl" and of evaluations, in GiB per chip:

    arguments, outputs, temporaries   of the program, as the compiler allocates them
    beside                            other arrays that the run keeps on the chip meanwhile
    headroom                          free memory of the chip; negative if the program does not fit
    TFLOPs, least time, tokens/s      of its largest call, from the roofline at peak rates
    bound                             what limits the least time: compute, memory, the network
                                      between chips, or that between slices or nodes

and the bytes that one chip receives, by collective, as compiled; with several slices or nodes, also
the bytes per step that cross between them. Prompts and responses of the worst step have maximum
length. With --mean_response, a step with drawn lengths is added, see `step_sizes` and `lengths`,
and the rows and prompts in flight that decode it fastest, see `in_flight`. With rl.carry_over that
is a step after many.
With --price, the list price of a chip hour, the last line has the least cost of all "rl" steps.

    python -m care_jax.aot --config=... --topology=v5e:8x8 --mean_response=600 --estimate

prints instead the estimated seconds of a step of "rl" by part beside the least: from the compiler's
cycles on TPUs, from prices of the kernels on GPUs; see `estimate`. It does not compare memory. The
last line is "estimated <seconds> least <seconds>".

Needs a compiler: `pip install 'care_jax[tpu]'` or `'care_jax[cuda]'`. Exits with status 1 if the
run does not fit, 2 if flags, configuration or topology are invalid.
"""

from __future__ import annotations

import logging as python_logging
import math
import sys
from collections.abc import Sequence
from typing import NoReturn

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from care_jax.aot.collectives import COLLECTIVES
from care_jax.aot.compile import Fit, Program, fit
from care_jax.aot.estimate import Estimate, assumptions, estimate, rows
from care_jax.aot.step_sizes import StepSizes
from care_jax.aot.topology import GPUS
from care_jax.config import command_line
from care_jax.devices.flops import GIB
from care_jax.devices.sharding import MESH_AXES
from care_jax.devices.standard_streams import outlive_readers

_COLUMNS = "program,arguments,outputs,temporaries,beside,total,headroom"
_COLUMNS += ",TFLOPs,least time,bound,tokens/s,compiled in"
_GPU_LIMITS = (
    "The GPU compiler refuses no program for its size and does not count cuDNN's workspace; a chip "
    "is taken to have 90% of its memory for programs. No kernel is autotuned. Between nodes every "
    "GPU is taken to have a network card of its own."
)


def report(result: Fit) -> str:
    """The tables, in Markdown with aligned columns, and the conclusions."""
    sizes = result.mesh.shape
    mesh_shape = " x ".join(f"{name} {sizes[name]}" for name in MESH_AXES if sizes[name] > 1)
    is_named = result.num_slices > 1 and not _is_gpu(result)
    lines = [
        f"{f'{result.num_slices} slices of ' if is_named else ''}{result.topology}: "
        f"{result.mesh.size} chips ({mesh_shape or 'one'}), {result.chip.hbm / GIB:.2f} GiB each",
        "",
        *_table([_COLUMNS.split(","), *(_row(result, program) for program in result.programs)]),
        "",
    ]
    programs = result.programs if result.mesh.size > 1 else ()
    if received := [_received_row(result, each) for each in programs if each.received]:
        names = ["program", *COLLECTIVES, "total", "calls", "worst step"]
        names += ["mean step"] * bool(result.expected)
        names += ["of it from other slices"] * (result.num_slices > 1)
        unit = "GB received by one chip, in the largest call of a program and in all of a step"
        lines += [f"{unit}:", "", *_table([names, *received]), ""]
    return "\n".join([*lines, *_conclusions(result)])


def estimate_report(result: Estimate) -> str:
    """The parts of a step, what they are priced with, and the sums."""
    lines = [*_table(rows(result)), "", *assumptions(result)]
    total, least = result.total, sum(result.least.values())
    lines.append(_decode_steps(result.step))
    lines.append("memory was not compared; leave out --estimate to see whether the run fits")
    lines.append(f"MFU of the updates {result.mfu:.0%}, without padding and rematerialisation")
    return "\n".join([*lines, f"estimated {total:.1f} least {least:.1f}"])


def _is_gpu(result: Fit) -> bool:
    return result.topology.startswith(tuple(GPUS))


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *body = rows
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for first, *rest in (head, rule, *body):
        aligned = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        lines.append(f"| {' | '.join([first.ljust(widths[0]), *aligned])} |")
    return lines


def _received_row(result: Fit, program: Program) -> list[str]:
    """Bytes received by one chip, by collective."""
    assert program.received is not None
    sizes = program.received.by_collective(program.work.num_passes).values()
    call = (f"{size / 1e9:.2f}" for size in (*sizes, sum(sizes)))
    cases = [program.works(is_mean) for is_mean in (False, True)[: 1 + bool(result.expected)]]
    steps = [f"{sum(work.ici_bytes for work in works) / 1e9:.1f}" for works in cases]
    if result.num_slices > 1:
        steps.append(f"{sum(work.dcn_bytes for work in cases[-1]) / 1e9:.2f}")
    return [program.name, *call, str(program.num_calls), *steps]


def _row(result: Fit, program: Program) -> list[str]:
    bounds = program.work.bounds(result.chip, result.mesh.size)
    seconds = max(bounds.values())
    sizes = program.arguments, program.outputs, program.temporaries, program.beside, program.total
    return [
        program.name,
        *(f"{size / GIB:.2f}" for size in sizes),
        f"{(result.chip.hbm - program.total) / GIB:+.2f}",
        f"{program.work.flops / 1e12:.3g}",
        f"{seconds:.3g} s",
        max(bounds, key=bounds.__getitem__),
        f"{program.work.tokens / seconds:.0f}" if program.work.tokens else "",
        f"{program.seconds:.0f} s",
    ]


def _conclusions(result: Fit) -> list[str]:
    worst = result.fullest
    missing = (worst.total - result.chip.hbm) / GIB
    if result.is_fitting:
        lines = [f"It fits, with {-missing:.2f} GiB to spare in {worst.name!r}."]
    else:
        refused = [program.name for program in result.programs if program.is_refused]
        by_itself = f" (refused by the compiler: {', '.join(refused)})" if refused else ""
        lines = [
            f"It does not fit: {worst.name!r} needs {worst.total / GIB:.2f} GiB of "
            f"{result.chip.hbm / GIB:.2f}, {missing:.2f} too many{by_itself}. Take more chips, "
            "smaller microbatches or buckets, fewer prompts in flight, mesh.tensor, or a lever of "
            "config.model."
        ]
    if result.decode_prompts is not None:
        lines.append(f"The largest rl.decode_prompts that should fit is {result.decode_prompts}.")
    if (best := result.in_flight) is not None:
        lines.append(
            f"rl.decode_rows={best.num_rows} with rl.decode_prompts={best.num_prompts} should fit "
            f"and takes {best.share:.2f} of the time of decode steps, the least of those tried."
        )
    lines += [_step_line(result, stage) for stage in ("sft", "rl") if result.step_seconds(stage)]
    for name, step in (("worst", result.largest), ("mean", result.expected)):
        if step is not None:
            counts = f"{step.num_microbatches} microbatches in {len(step.updates)} updates"
            lines.append(
                f"The {name} step of 'rl': {counts}, train_fill {step.train_fill:.3f}, "
                f"{_decode_steps(step)}."
            )
    if result.carried:
        lines.append(
            f"rl.carry_over keeps up to {result.carried / GIB:.2f} GiB per chip of slots "
            f"{'in host memory' if result.is_offloaded else 'on it'} between steps."
        )
    return lines + [_GPU_LIMITS] * _is_gpu(result)


def _decode_steps(step: StepSizes) -> str:
    return (
        f"{step.decoding.num_steps} decode steps, {step.least_decode_steps:.0f} if no row were idle"
    )


def _step_line(result: Fit, stage: str) -> str:
    line = f"A step of {stage!r} takes at least {_duration(result.step_seconds(stage))}"
    if result.mean_response is None:
        return f"{line}."
    expected = _duration(result.step_seconds(stage, is_expected=True))
    return f"{line} (worst case), {expected} at a mean of {result.mean_response:g} tokens."


def price_line(result: Fit, num_steps: int, price: float | None) -> str:
    """Least time and cost of all steps of "rl", at the mean length if there is one."""
    seconds = num_steps * result.step_seconds("rl", is_expected=bool(result.expected))
    hours = seconds / 3600
    line = f"{num_steps} steps of 'rl' take at least {hours:.1f} h, {hours * result.mesh.size:.0f} "
    line += f"chip hours, {'at that mean' if result.expected else 'at worst'}"
    if price is None:
        return f"{line}."
    return f"{line}: {hours * result.mesh.size * price:.0f} at {price:g} for a chip hour."


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{math.ceil(seconds / 6) / 10} min"


def run_main() -> None:
    """Parses flags and compiles; user errors are printed as one line."""
    # Not at module level: a process that also imports `main` would define the flags twice.
    config = config_flags.DEFINE_config_file("config", None, "Configuration to compile.")
    topology = flags.DEFINE_string(
        "topology", None, "Chips and their shape: v5e:4x4, h100:8.", required=True
    )
    slices = flags.DEFINE_integer("slices", 1, "Slices of TPUs, each of that topology.")
    mean = flags.DEFINE_float("mean_response", None, "Tokens of a response on average.")
    is_estimated = flags.DEFINE_bool("estimate", False, "Only estimate a step of 'rl'.")
    price = flags.DEFINE_float("price", None, "List price of a chip for an hour.", lower_bound=0)
    flags.mark_flag_as_required("config")
    logging.set_verbosity(logging.INFO)
    logging.use_absl_handler()
    python_logging.getLogger("jax").setLevel(python_logging.WARNING)

    def parse_flags(argv: Sequence[str]) -> Sequence[str]:
        try:
            return command_line.parse(argv, config)
        except ValueError as error:
            _leave(error)

    def main(_: Sequence[str]) -> None:
        jax.config.update("jax_platforms", "cpu")  # do not initialise this machine's accelerators
        # No entry for devices that are not there can be read again.
        jax.config.update("jax_enable_compilation_cache", False)
        settings = config.value, topology.value, mean.value, slices.value
        if is_estimated.value and price.value is not None:
            _leave("--price is of the least time; leave out --price or --estimate")
        try:
            if is_estimated.value:
                print(estimate_report(estimate(*settings)))
                return
            result = fit(*settings)
        except ValueError as error:
            _leave(error)
        print(report(result))
        if "rl" in config.value.stages:
            print(price_line(result, config.value.rl.num_steps, price.value))
        sys.exit(0 if result.is_fitting else 1)

    app.run(main, flags_parser=parse_flags)


def _leave(error: Exception | str) -> NoReturn:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    outlive_readers()
    run_main()
