"""What rationales state of the figure: `python docs/experiments/readings.py runs/sweep/repair`.

Over the rollouts of the last five of 100 steps, of the kinds whose figure the teacher misreads, by
arm and seed, as CSV: the share that states a reading, the share of these that states the right one,
and of the answers behind a right and a wrong reading the share that is right. A run that an arm
shares with another experiment is in that one's folder.
"""

import pathlib
import re
import sys

from experiments.sweep.outcome import NotLogged, logged_groups

FIRST_STEP = 95
# The wordings of care_jax/data/drawn/readings.py. "To have 6 of them" states the question's number.
READING = re.compile(r"(?:There are|there are|number of \w+ is|I have) (\d+)")


def true_count(group: dict) -> int | None:
    """What there is to count in the figure of a question; None for the other kinds."""
    if group["source"] not in ("readings/sum", "readings/missing"):
        return None
    operand, gold = int(re.search(r"\d+", group["question"])[0]), int(group["gold"])
    return gold - operand if group["source"] == "readings/sum" else operand - gold


def share(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else ""


def main(folder: pathlib.Path) -> None:
    names = "states_reading", "reading_right", "right_behind_right_reading"
    print("arm", "seed", *names, "right_behind_wrong_reading", sep=",")
    for workdir in sorted(folder.glob("*/seed_*")):
        accs = {"right": [], "wrong": [], "none": []}  # by the reading that is stated last
        for group in logged_groups(workdir):
            if group["step"] < FIRST_STEP or (count := true_count(group)) is None:
                continue
            for response in group["responses"]:
                if response["role"] == "reflected":
                    continue
                stated = READING.findall(response["text"])
                kind = "none" if not stated else "right" if int(stated[-1]) == count else "wrong"
                accs[kind].append(response["acc"])
        right, wrong, none = (len(accs[kind]) for kind in ("right", "wrong", "none"))
        is_stated = [1.0] * (right + wrong) + [0.0] * none
        is_right = [1.0] * right + [0.0] * wrong
        figures = is_stated, is_right, accs["right"], accs["wrong"]
        print(workdir.parts[-2], workdir.name.removeprefix("seed_"), *map(share, figures), sep=",")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(pathlib.Path(sys.argv[1]))
    except NotLogged as error:  # a run has no rollouts, as one that has just begun
        sys.exit(f"error: {error}")
