"""What rationales state of the figure: `docs/experiments/readings.py runs/sweep/repair [0:5]`.

Over the rollouts of the last five of 100 steps, or of those given, of the kinds whose figure the
teacher misreads, by arm and seed, as CSV: the share that states a reading, the share of these that
states the right one, of the answers behind a right and a wrong reading the share that is right, and
the share of the wrong answers that is behind a right reading. A run that an arm shares with another
experiment is in that one's folder.
"""

import json
import pathlib
import re
import sys

from care_jax.data.drawn.readings import KINDS, MISREAD
from experiments.sweep.outcome import NotLogged, logged_groups

STEPS = "95:100"
# The wordings of care_jax/data/drawn/readings.py. "To have 6 of them" states the question's number.
READING = re.compile(r"(?:There are|there are|number of \w+ is|I have) (\d+)")


def true_count(group: dict) -> int:
    """What there is to count in the figure of a question."""
    gold, kind = int(group["gold"]), group["source"].removeprefix("readings/")
    if kind == "twice":
        return gold // 2
    operand = int(re.search(r"\d+", group["question"])[0])
    return {"sum": gold - operand, "difference": gold + operand, "missing": operand - gold}[kind]


def misread_kinds(workdir: pathlib.Path) -> tuple[str, ...]:
    config = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
    return KINDS if config["data"].get("mixed_errors") else MISREAD


def share(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else ""


def main(folder: pathlib.Path, steps: str = STEPS) -> None:
    first, _, end = steps.partition(":")
    names = "states_reading", "reading_right", "right_behind_right_reading"
    names += "right_behind_wrong_reading", "failures_with_right_reading"
    print("arm", "seed", *names, sep=",")
    for workdir in sorted(folder.glob("*/seed_*")):
        kinds = [f"readings/{kind}" for kind in misread_kinds(workdir)]
        accs = {"right": [], "wrong": [], "none": []}  # by the reading that is stated last
        for group in logged_groups(workdir):
            if group["source"] not in kinds or not int(first) <= group["step"] < int(end):
                continue
            count = true_count(group)
            for response in group["responses"]:
                if response["role"] == "reflected":
                    continue
                stated = READING.findall(response["text"])
                kind = "none" if not stated else "right" if int(stated[-1]) == count else "wrong"
                accs[kind].append(response["acc"])
        right, wrong, none = (len(accs[kind]) for kind in ("right", "wrong", "none"))
        is_stated = [1.0] * (right + wrong) + [0.0] * none
        is_right = [1.0] * right + [0.0] * wrong
        failed = [float(kind == "right") for kind in accs for acc in accs[kind] if acc < 1]
        figures = is_stated, is_right, accs["right"], accs["wrong"], failed
        print(workdir.parts[-2], workdir.name.removeprefix("seed_"), *map(share, figures), sep=",")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or not re.fullmatch(r"\d+:\d+", [*sys.argv, STEPS][2]):
        sys.exit(__doc__)
    try:
        main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
    except NotLogged as error:  # a run has no rollouts, as one that has just begun
        sys.exit(f"error: {error}")
