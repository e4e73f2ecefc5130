"""What came of the groups of every run: `python docs/experiments/outcomes.py runs/sweep/repair`.

Prints the share of each outcome in `rollouts.jsonl` as CSV, by arm and seed.
"""

import collections
import json
import pathlib
import sys

OUTCOMES = (
    "repaired",
    "not repaired",
    "contrasted",
    "rescued",
    "mixed",
    "all correct",
    "all wrong",
    "no update",
)


def main(folder: pathlib.Path) -> None:
    print("arm", "seed", "groups", *OUTCOMES, sep=",")
    for path in sorted(folder.glob("*/seed_*/rollouts.jsonl")):
        with path.open() as file:
            counts = collections.Counter(json.loads(line)["outcome"] for line in file)
        arm, seed = path.parts[-3], path.parts[-2].removeprefix("seed_")
        shares = [f"{counts[outcome] / counts.total():.4f}" for outcome in OUTCOMES]
        print(arm, seed, counts.total(), *shares, sep=",")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
