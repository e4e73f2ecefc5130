"""The table of docs/memory.md: each shipped configuration compiled for the chips it fits on.

    python -m perf.fit
    python -m perf.fit --only=7b,h100

Compiles every program of each configuration for the topologies listed here, at its real batch
sizes, and prints each row once it is compiled. Step times are given for the worst case (every
prompt and response at its maximum length) and for a mean response length, see
`care_jax.aot.step_sizes`. "fill" is the share of computed tokens that is real at that mean. Needs
the compilers (`pip install 'care_jax[tpu]'` and `'care_jax[cuda]'`) but no TPU or GPU, and takes
minutes per row. Exits with status 1 if a row is missing or a run does not fit.
"""

import argparse
import importlib
import sys

import jax

from care_jax.aot.compile import Fit, fit
from care_jax.devices.flops import GIB

CASES = (
    ("qwen25vl_3b", "v5e:4x4"),
    ("qwen25vl_3b", "v5p:2x2x1"),
    ("qwen25vl_3b", "v6e:2x4"),
    ("qwen25vl_3b", "h100:8"),
    ("qwen25vl_7b", "v5e:8x8"),
    ("qwen25vl_7b", "v5p:2x2x2"),
    ("qwen25vl_7b", "v6e:4x4"),
    ("qwen25vl_7b", "h100:8"),
    ("qwen3vl_4b", "v5e:4x8"),
    ("qwen3vl_4b", "v5p:2x2x1"),
    ("qwen3vl_4b", "v6e:2x4"),
    ("qwen3vl_4b", "h100:8"),
    ("qwen3vl_8b", "v5e:8x8"),
    ("qwen3vl_8b", "v5p:2x2x2"),
    ("qwen3vl_8b", "v6e:4x4"),
    ("qwen3vl_8b", "h100:8"),
)
COLUMNS = (
    "config",
    "topology",
    "mesh",
    "fullest program",
    "GiB of",
    "most prompts in flight",
    "RL step, worst",
    "RL step, mean {mean:g}",
    "fill",
    "decoding, tokens/s, worst and mean",
    "SFT step, worst and mean",
    "compiled in",
)


def row(name: str, result: Fit) -> tuple[str, ...]:
    """The table row of one configuration on one topology."""
    mesh, fullest = result.mesh.shape, result.fullest
    verdict = "" if result.is_fitting else " **does not fit**"
    return (
        name,
        result.topology,
        " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1),
        f"{fullest.name}{verdict}",
        f"{fullest.total / GIB:.1f} of {result.chip.hbm / GIB:.2f}",
        str(result.decode_prompts),
        *(f"{result.step_seconds('rl', is_mean):.0f} s" for is_mean in (False, True)),
        f"{result.expected.train_fill:.2f}" if result.expected else "",
        ", ".join(f"{decoding_rate(result, is_mean):,.0f}" for is_mean in (False, True)),
        ", ".join(f"{result.step_seconds('sft', is_mean):.1f} s" for is_mean in (False, True)),
        f"{sum(program.seconds for program in result.programs):.0f} s",
    )


def decoding_rate(result: Fit, is_mean: bool) -> float:
    """Upper bound on sampled tokens per second; steps of a finished row add time but no tokens."""
    works = [
        work
        for program in result.programs
        if program.name == "rl decode"
        for work in program.works(is_mean)
    ]
    seconds = sum(work.seconds(result.chip, result.mesh.size) for work in works)
    return sum(work.tokens for work in works) / seconds if seconds else 0.0


def line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows that hold all of these, as 7b,v5e")
    parser.add_argument("--mean", type=float, default=600.0, help="tokens of a response")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # leaves any accelerator alone
    columns = tuple(column.format(mean=args.mean) for column in COLUMNS)
    print(line(columns), line(("---",) * len(columns)), sep="\n", flush=True)
    is_complete = True
    for name, topology in CASES:
        if not all(part in f"{name} {topology}" for part in args.only.split(",")):
            continue
        # At O0 the TPU compiler is several times faster and reports a few 0.1 GiB less memory.
        jax.config.update("jax_optimization_level", "O0" if topology[0] == "v" else "UNKNOWN")
        config = importlib.import_module(f"configs.{name}").get_config()
        try:
            result = fit(config, topology, args.mean)
        except ValueError as error:
            print(f"{name} {topology}: {error}", file=sys.stderr)
            is_complete = False
            continue
        print(line(row(name, result)), flush=True)
        is_complete &= result.is_fitting
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
