"""The shipped configurations on TPUs they fit, proven by compilation: the README's table.

    JAX_PLATFORMS=cpu python -m perf.fit

Compiles every program of each for the topology named here, at its real batch sizes, and prints a
row as soon as it is known. Needs libtpu (`pip install 'care_jax[tpu]'`), no TPU, and minutes a row.
"""

import argparse
import importlib

from care_jax.fit import Fit, fit
from care_jax.roofline import GIB

CASES = (
    ("qwen25vl_3b", "v5e:4x4"),
    ("qwen25vl_3b", "v5p:2x2x1"),
    ("qwen25vl_3b", "v6e:2x4"),
    ("qwen25vl_7b", "v5e:8x8"),
    ("qwen25vl_7b", "v5p:2x2x2"),
    ("qwen25vl_7b", "v6e:4x4"),
    ("qwen3vl_4b", "v5e:4x8"),
    ("qwen3vl_4b", "v5p:2x2x1"),
    ("qwen3vl_4b", "v6e:2x4"),
    ("qwen3vl_8b", "v5e:8x8"),
    ("qwen3vl_8b", "v5p:2x2x2"),
    ("qwen3vl_8b", "v6e:4x4"),
)
COLUMNS = (
    "config",
    "topology",
    "mesh",
    "fullest program",
    "GiB of",
    "largest wave",
    "least SFT step",
    "least RL step",
    "decoding, tokens/s",
    "compiled in",
)


def row(name: str, result: Fit) -> tuple[str, ...]:
    """What the table says of one configuration on one topology."""
    mesh, fullest = result.mesh.shape, result.fullest
    decode = next((p for p in result.programs if p.name == "rl decode"), None)
    rate = decode.work.tokens / decode.work.seconds(result.chip, result.mesh.size) if decode else 0
    verdict = "" if result.is_fitting else " **does not fit**"
    return (
        name,
        result.topology,
        " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1),
        f"{fullest.name}{verdict}",
        f"{fullest.total / GIB:.1f} of {result.chip.hbm / GIB:.2f}",
        str(result.decode_prompts),
        f"{result.step_seconds('sft'):.1f} s",
        f"{result.step_seconds('rl'):.0f} s",
        f"{rate:,.0f}",
        f"{sum(program.seconds for program in result.programs):.0f} s",
    )


def line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="configurations and topologies that hold this")
    args = parser.parse_args()
    print(line(COLUMNS), line(("---",) * len(COLUMNS)), sep="\n", flush=True)
    for name, topology in CASES:
        if args.only in f"{name} {topology}":
            config = importlib.import_module(f"configs.{name}").get_config()
            print(line(row(name, fit(config, topology))), flush=True)


if __name__ == "__main__":
    main()
