"""Sampled answers of a sweep's evaluations, by kind of question and in pairs.

    python docs/experiments/samples.py runs/words_sweep/components runs/words_sweep

The folder of the sweep has the cold starts too, one for each seed. Writes `by_kind.csv`: for each
arm and seed, and the cold start before it, the share of sampled answers that is right and of
questions with a right answer. And `paired.csv`: differences between two arms of a seed over the
same questions, with 95% intervals of the mean over the questions.
"""

import csv
import itertools
import json
import math
import pathlib
import sys

Question = tuple[str, str]  # source and id
Answers = dict[Question, tuple[str, float, float]]  # source, share right, any right


def answers_of(path: pathlib.Path) -> Answers:
    with path.open() as file:
        rows = [json.loads(line) for line in file]
    rows = [row for row in rows if not row.get("is_dropped")]
    return {
        (row["source"], row["id"]): (
            row["source"],
            row["acc"],
            float(max(row.get("accs", [row["acc"]])) >= 1),
        )
        for row in rows
    }


def evaluations(folder: pathlib.Path) -> dict[tuple[str, str], Answers]:
    """(arm, seed) to its answers; the arm "cold_start" is what the arms of a seed start from."""
    found = {}
    for stage, pattern in (("sft", "../cold_start/*/seed_*"), ("rl", "*/seed_*")):
        for path in sorted(folder.glob(f"{pattern}/samples_{stage}.jsonl")):
            arm = "cold_start" if stage == "sft" else path.parts[-3]
            run = arm, path.parts[-2].removeprefix("seed_")
            if run in found:
                sys.exit(f"expected one cold start of seed {run[1]}, got another in {path.parent}")
            found[run] = answers_of(path)
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def write(path: pathlib.Path, names: str, rows: list[list[object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names.split())
        writer.writerows(rows)


def main(folder: pathlib.Path, out: pathlib.Path) -> None:
    found = evaluations(folder)
    rows = []
    for (arm, seed), answers in found.items():
        kinds = sorted({source for source, *_ in answers.values()})
        for kind in ("all", *kinds):
            chosen = [row for row in answers.values() if kind in ("all", row[0])]
            shares = [f"{mean([row[i] for row in chosen]):.4f}" for i in (1, 2)]
            rows.append([arm, seed, kind, *shares, len(chosen)])
    write(out / "by_kind.csv", "arm seed kind right any_right questions", rows)
    rows = []
    for other, one in itertools.combinations(found, 2):
        if one[1] != other[1]:
            continue
        if found[one].keys() != found[other].keys():
            sys.exit(f"expected the same questions of {other[0]} and {one[0]}, got others")
        ids = sorted(found[one])
        for place, measure in ((1, "right"), (2, "any_right")):
            gaps = [found[one][id_][place] - found[other][id_][place] for id_ in ids]
            centre = mean(gaps)
            spread = math.sqrt(sum((gap - centre) ** 2 for gap in gaps) / (len(gaps) - 1))
            half = 1.96 * spread / math.sqrt(len(gaps))
            figures = [f"{value:.4f}" for value in (centre, centre - half, centre + half)]
            rows.append([one[0], other[0], one[1], measure, *figures, len(gaps)])
    write(out / "paired.csv", "arm over seed measure difference low high questions", rows)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*map(pathlib.Path, sys.argv[1:]))
