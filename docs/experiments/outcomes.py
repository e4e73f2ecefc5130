"""What came of the groups of every run: `python docs/experiments/outcomes.py runs/sweep/repair`.

Prints the share of each outcome in `rollouts.jsonl` as CSV, by arm and seed. A run that an arm
shares with another experiment is in that one's folder.
"""

import collections
import pathlib
import sys

from experiments.sweep.outcome import NotLogged, logged_groups

OUTCOMES = (
    "repaired",
    "not repaired",
    "contrasted",
    "rescued",
    "mixed",
    "equal acc",
    "all correct",
    "all wrong",
    "no update",
)


def main(folder: pathlib.Path) -> None:
    print("arm", "seed", "groups", *OUTCOMES, sep=",")
    for workdir in sorted(folder.glob("*/seed_*")):
        counts = collections.Counter(group["outcome"] for group in logged_groups(workdir))
        arm, seed = workdir.parts[-2], workdir.name.removeprefix("seed_")
        shares = [f"{counts[outcome] / counts.total():.4f}" for outcome in OUTCOMES]
        print(arm, seed, counts.total(), *shares, sep=",")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(pathlib.Path(sys.argv[1]))
    except NotLogged as error:  # a run has no rollouts, as one that has just begun
        sys.exit(f"error: {error}")
