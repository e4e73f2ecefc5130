"""Fault injection: malformed inputs, damaged files, kills, hostile surroundings, and a soak test.

    python -m perf.faults --fuzz=10000                         malformed input of every kind
    python -m perf.faults --fuzz=1000 --kinds=image,answer --seed=7
    python -m perf.faults --kills=20                           kill -9 at random moments
    python -m perf.faults --soak=2000                          that many small RL steps
    python -m perf.faults --try=files                          a module of attempts, see MODULES
    python -m perf.faults --try=files --only=cache             those whose description has the word

--fuzz draws that many configurations, JSONL and parquet rows, images, safetensors files,
checkpoints and answers, reads each as a run does (`tests/fuzz.py` has the strategies), and counts
the outcomes. --kills kills short complete runs (`runs.SHORT`: all stages, evaluations inside RL) at
uniformly drawn times, restarts them, and compares them with an uninterrupted run. --soak compares
memory, file handles and threads at the end with those at step 200. --try makes the attempts of
modules, one by one. All but --fuzz print a table: promise, how tried, how often, result. Exits with
status 1 if a promise does not hold. Needs the test
extra.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence

from absl import logging

from perf.faults import killing, soaking
from perf.faults.runs import Attempt
from tests import fuzz

# Each `perf.faults.<name>` has ATTEMPTS, a tuple of `runs.Attempt`.
MODULES = ("files", "killing", "surroundings", "numerics")
Row = tuple[str, str, int, int]  # promise, how tried, how often, how often it did not hold


def fuzzed(kinds: Sequence[str], num_examples: int, seed: int) -> list[str]:
    """Prints a row of a table for each kind of malformed input; returns the kinds that failed."""
    columns, failed = ("kind", "examples", *fuzz.OUTCOMES, "seconds"), []
    print(f"| {' | '.join(columns)} |\n| --- |{' ---: |' * (len(columns) - 1)}")
    for kind in kinds:
        try:
            outcomes, seconds = fuzz.timed(kind, num_examples, seed)
        except Exception:
            print(f"| {kind} | {num_examples} | **failed** |\n", flush=True)
            traceback.print_exc()
            failed.append(kind)
            continue
        counts = " | ".join(f"{outcomes[name]}" for name in fuzz.OUTCOMES)
        print(f"| {kind} | {num_examples} | {counts} | {seconds:.0f} |", flush=True)
    return failed


def tried(attempts: Sequence[Attempt], folder: pathlib.Path) -> tuple[list[Row], list[str]]:
    """Makes attempts, each in its own folder; returns a row of the table for each, and failures."""
    rows, failed = [], []
    for number, attempt in enumerate(attempts):
        own = folder / str(number)
        own.mkdir(parents=True)
        try:
            problem = attempt.run(own)
        except Exception as error:  # the other attempts are made all the same
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error}"
        print(f"{attempt.promise}: {attempt.how}: {problem or 'holds'}", flush=True)
        rows.append((attempt.promise, attempt.how, 1, int(bool(problem))))
        if problem:
            failed.append(f"{attempt.how}: {problem}; see {own}")
        else:
            shutil.rmtree(own, ignore_errors=True)
    return rows, failed


def main() -> None:
    parser = argparse.ArgumentParser("python -m perf.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--fuzz", type=int, default=0, help="examples of each kind")
    parser.add_argument("--kinds", default=",".join(fuzz.KINDS), help="separated by commas")
    parser.add_argument("--kills", type=int, default=0, help="of all cases together")
    parser.add_argument("--soak", type=int, default=0, help="RL steps")
    parser.add_argument("--try", dest="modules", default="", help=f"of {', '.join(MODULES)}")
    parser.add_argument("--only", default="", help="attempts of --try whose description has this")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if unknown := sorted(set(kinds) - set(fuzz.KINDS)):
        parser.error(f"--kinds must be some of {', '.join(fuzz.KINDS)}, got {unknown[0]}")
    modules = [*filter(None, args.modules.split(","))]
    if unknown := sorted(set(modules) - set(MODULES)):
        parser.error(f"--try must be some of {', '.join(MODULES)}, got {unknown[0]}")
    numbers = args.fuzz, args.kills, args.soak
    if min(numbers) < 0 or not (any(numbers) or modules):
        parser.error(f"--fuzz, --kills or --soak must be at least 1, got {numbers}; or give --try")
    if 0 < args.soak <= soaking.SETTLED:
        parser.error(f"--soak must be above {soaking.SETTLED}, got {args.soak}")
    logging.set_verbosity(logging.ERROR)
    failed = fuzzed(kinds, args.fuzz, args.seed) if args.fuzz else []
    rows = []
    folder = pathlib.Path(tempfile.mkdtemp(prefix="care_faults_"))
    for number, case in enumerate(killing.CASES if args.kills else ()):
        # The first case gets half of the kills.
        share = args.kills // 4 if number else args.kills - 2 * (args.kills // 4)
        if not share:
            continue
        print(f"{case.promise}:", flush=True)
        killed, faults = killing.run(case, share, folder / str(number), args.seed + number)
        failed += faults
        rows.append((case.promise, "kill -9 at random moments", killed, len(faults)))
    if args.soak:
        messages, grown = soaking.run(args.soak, folder)
        failed += grown
        promise = f"memory, handles and threads stay: {'; '.join(messages)}"
        rows.append((promise, "small RL steps", args.soak, len(grown)))
    for name in modules:
        attempts: Sequence[Attempt] = importlib.import_module(f"perf.faults.{name}").ATTEMPTS
        chosen = [each for each in attempts if args.only in f"{each.promise} {each.how}"]
        found, faults = tried(chosen, folder / name)
        rows += found
        failed += faults
    if rows:
        print("\n| promise | how tried | times | did not hold |\n|---|---|---:|---:|")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    if failed:
        sys.exit("failed: " + "\n".join(failed))


if __name__ == "__main__":
    main()
