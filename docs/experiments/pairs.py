"""Two arms of figures that were drawn apart, paired by seed at the tokens that both have decoded.

    python docs/experiments/pairs.py FIGURE.csv:ARM[,FIGURE.csv:ARM] FIGURE.csv:ARM[,FIGURE.csv:ARM]

Reads the panel `held_out_by_tokens`. Prints a CSV of both accuracies and their difference seed by
seed, then the mean difference with its 95% interval, Student's t over the seeds. The cold starts
must be the same: accuracies before the first step that differ by more than `TOLERANCE` are refused.
"""

import csv
import sys

import numpy as np

from experiments.sweep.measures import mean_interval

TOLERANCE = 0.1  # points: a cold start that is trained again on another machine differs by rounding
Curves = dict[int, list[tuple[float, float]]]  # by seed: (decoded tokens, M; accuracy, %)


def curves_of(figures: str) -> Curves:
    """The held-out curves of an arm, from one file or several with other seeds."""
    curves: Curves = {}
    for figure in figures.split(","):
        path, _, arm = figure.rpartition(":")
        found: Curves = {}
        with open(path) as file:
            for row in csv.DictReader(file):
                if (row["panel"], row["arm"]) == ("held_out_by_tokens", arm) and row["seed"]:
                    point = float(row["x"]), float(row["y"])
                    found.setdefault(int(row["seed"]), []).append(point)
        if not found:
            sys.exit(f"expected an arm of the panel held_out_by_tokens of {path}, got {arm!r}")
        if twice := sorted(curves.keys() & found):
            sys.exit(f"expected every seed once, got {twice} again in {path}")
        curves |= found
    return curves


def main(one: str, other: str) -> None:
    ours, theirs = curves_of(one), curves_of(other)
    differences = []
    print("seed", "tokens", "one", "other", "difference", sep=",")
    for seed in sorted(ours.keys() & theirs):
        starts = [curve[seed][0][1] for curve in (ours, theirs)]
        if abs(starts[0] - starts[1]) > TOLERANCE:
            sys.exit(f"expected one cold start of seed {seed}, got accuracies of {starts} after it")
        tokens = min(ours[seed][-1][0], theirs[seed][-1][0])
        a, b = (float(np.interp(tokens, *np.transpose(curve[seed]))) for curve in (ours, theirs))
        differences.append(a - b)
        print(f"{seed},{tokens:.3f},{a:.2f},{b:.2f},{a - b:.2f}")
    if not differences:
        sys.exit(f"expected seeds in common, got {sorted(ours)} and {sorted(theirs)}")
    mean, half = mean_interval(differences)
    ahead = sum(difference > 0 for difference in differences)
    print(f"one leads by {mean:.1f} ± {half:.1f}, on {ahead} of {len(differences)} seeds")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
