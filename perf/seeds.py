"""What the demo learns, over seeds: CARE and GRPO from the same cold start, same budget.

    python -m perf.seeds --seeds=3 --workdir=runs/seeds

Each seed trains its own cold start; both objectives go on from that checkpoint, over the same
prompts. Prints held-out accuracy in percent, mean and 95% interval (Student's t over the seeds).
Runs that are there already are read, not repeated.
"""

import argparse
import json
import math
import pathlib
import shutil
import statistics
import subprocess
import sys

OBJECTIVES = {"care": (), "grpo": ("--config.rl.objective=grpo",)}
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5% quantile for n seeds


def run(workdir: pathlib.Path, seed: int, flags: tuple[str, ...]) -> dict[str, float]:
    """Runs or resumes one demo; returns its accuracies in percent by evaluation."""
    command = [sys.executable, "-m", "care_jax.main", "--config=configs/tiny.py"]
    command += [f"--workdir={workdir}", f"--config.seed={seed}", *flags]
    subprocess.run(command, check=True)
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {r["stage"]: 100 * r["acc"] for r in records if r["stage"].startswith("evaluate")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, choices=sorted(_STUDENT))
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/seeds"))
    args = parser.parse_args()

    columns = {"SFT": []} | {objective: [] for objective in OBJECTIVES}
    for seed in range(args.seeds):
        start = args.workdir / f"care_{seed}"
        for objective, flags in OBJECTIVES.items():
            workdir = args.workdir / f"{objective}_{seed}"
            if not workdir.exists() and workdir != start:
                shutil.copytree(start / "checkpoints" / "sft", workdir / "checkpoints" / "sft")
            accuracy = run(workdir, seed, flags)
            columns[objective].append(accuracy["evaluate_rl"])
        columns["SFT"].append(accuracy["evaluate_sft"])

    print(f"{'':12}" + "".join(f"{'seed ' + str(seed):>9}" for seed in range(args.seeds)))
    gains = {
        f"{name} gain": [a - b for a, b in zip(columns[name], columns["SFT"], strict=True)]
        for name in OBJECTIVES
    }
    for name, values in (columns | gains).items():
        spread = _STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
        shown = "".join(f"{value:9.1f}" for value in values)
        print(f"{name:12}{shown}   mean {statistics.mean(values):5.1f} ± {spread:.1f}")


if __name__ == "__main__":
    main()
