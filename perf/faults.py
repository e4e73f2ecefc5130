"""What goes wrong on purpose, and what comes of it: malformed input of every kind.

    python -m perf.faults --fuzz=10000
    python -m perf.faults --fuzz=1000 --kinds=image,answer --seed=7

Draws that many configurations, JSONL and parquet rows, images, safetensors files, checkpoints and
answers, reads each as a run does (`tests/fuzz.py` has the strategies), and prints how often each
outcome came. Exits with status 1 if one kind fails, with the smallest input that does. Needs the
test extra.
"""

from __future__ import annotations

import argparse
import sys
import traceback

from absl import logging

from tests import fuzz

_COLUMNS = ("kind", "examples", *fuzz.OUTCOMES, "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fuzz", type=int, required=True, help="Examples of each kind.")
    parser.add_argument("--kinds", default=",".join(fuzz.KINDS), help="Separated by commas.")
    parser.add_argument("--seed", type=int, default=0, help="Of what is drawn.")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if unknown := sorted(set(kinds) - fuzz.KINDS.keys()):
        parser.error(f"--kinds must be some of {', '.join(fuzz.KINDS)}, got {', '.join(unknown)}")
    if args.fuzz < 1:
        parser.error(f"--fuzz must be at least 1, got {args.fuzz}")
    logging.set_verbosity(logging.ERROR)
    failed = [kind for kind in kinds if not print_kind(kind, args.fuzz, args.seed, kinds[0])]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def print_kind(kind: str, num_examples: int, seed: int, first: str) -> bool:
    """Prints a row of the table, or the failure; returns whether there was none."""
    if kind == first:
        print(f"| {' | '.join(_COLUMNS)} |\n| --- |{' ---: |' * (len(_COLUMNS) - 1)}")
    try:
        outcomes, seconds = fuzz.timed(kind, num_examples, seed)
    except Exception:
        print(f"| {kind} | {num_examples} | **failed** |\n", flush=True)
        traceback.print_exc()
        return False
    counts = " | ".join(f"{outcomes[name]}" for name in fuzz.OUTCOMES)
    print(f"| {kind} | {num_examples} | {counts} | {seconds:.0f} |", flush=True)
    return True


if __name__ == "__main__":
    main()
