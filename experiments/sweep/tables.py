"""An experiment's table, as markdown and as CSV: a row per arm, mean ± 95% interval over seeds.

A cell is "–" where a measure is undefined, and "not logged" where a run lacks the rows it needs;
below the table stands which key to set.
"""

from __future__ import annotations

import csv
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from experiments.sweep.measures import Measure, mean_interval
from experiments.sweep.outcome import NotLogged, Outcome

NOT_LOGGED = "not logged"


def value_of(
    measure: Measure, outcome: Outcome, references: Mapping[int, Outcome]
) -> float | NotLogged | None:
    """A measure of one run, None if it is undefined, or what it lacks.

    Args:
        measure: what is measured.
        outcome: of the run.
        references: outcome of the reference arm by seed; empty without it.
    """
    try:
        value = measure.of(outcome, references.get(outcome.seed))
    except NotLogged as lacking:
        return lacking
    return None if value is None or not math.isfinite(value) else float(value)


def write_table(
    folder: pathlib.Path,
    arms: Mapping[str, Sequence[Outcome]],
    reference: str,
    columns: Mapping[str, Measure],
    title: str,
    notes: Sequence[str],
) -> str:
    """Writes `table.md` and `table.csv`; the CSV has the value of every seed.

    Args:
        folder: for both.
        arms: outcomes by arm, rows in this order.
        reference: the arm that leads are measured against.
        columns: by name; a column that is undefined in every cell is left out.
        title, notes: above and below the markdown's table.

    Returns:
        the markdown.
    """
    references = {outcome.seed: outcome for outcome in arms.get(reference, ())}
    cells = {
        (arm, name): [value_of(measure, outcome, references) for outcome in outcomes]
        for arm, outcomes in arms.items()
        for name, measure in columns.items()
    }
    shown = {
        name: measure
        for name, measure in columns.items()
        if any(value is not None for arm in arms for value in cells[arm, name])
    }
    heads = ["arm", "seeds"] + [each.label.format(reference=reference) for each in shown.values()]
    lines = [heads, ["---"] * len(heads)]
    for arm, outcomes in arms.items():
        row = [_cell(cells[arm, name], measure.format) for name, measure in shown.items()]
        lines.append([arm, str(len(outcomes)), *row])
    rows = [f"| {' | '.join(line)} |" for line in lines]
    advice = _advice(arms, cells, shown)
    markdown = "\n".join([f"# {title}", "", *rows, "", *advice, *notes, ""])
    (folder / "table.md").write_text(markdown)

    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "seed", *shown])
        for arm, outcomes in arms.items():
            for index, outcome in enumerate(outcomes):
                of_seed = [_plain(cells[arm, name][index]) for name in shown]
                writer.writerow([arm, outcome.seed, *of_seed])
    return markdown


def _advice(
    arms: Iterable[str],
    cells: Mapping[tuple[str, str], Sequence[float | NotLogged | None]],
    names: Iterable[str],
) -> list[str]:
    """A line for each measure and each key that was not set, with the arms; then an empty one."""
    lacking: dict[tuple[str, str], list[str]] = {}
    for name in names:
        for arm in arms:
            for message in dict.fromkeys(
                str(value) for value in cells[arm, name] if isinstance(value, NotLogged)
            ):
                lacking.setdefault((name, message), []).append(arm)
    lines = [
        f"{NOT_LOGGED}: {name} of {', '.join(found)}; {message}."
        for (name, message), found in lacking.items()
    ]
    return [line for each in lines for line in (each, "")]


def _cell(found: Sequence[float | NotLogged | None], spec: str) -> str:
    values = [value for value in found if isinstance(value, float)]
    num_lacking = sum(isinstance(value, NotLogged) for value in found)
    if not values:
        return NOT_LOGGED if num_lacking else "–"
    mean, half = mean_interval(values)
    text = f"{mean:{spec}}" if math.isnan(half) else f"{mean:{spec}} ± {half:{spec}}"
    return f"{text} ({num_lacking} {NOT_LOGGED})" if num_lacking else text


def _plain(value: float | NotLogged | None) -> float | str:
    if isinstance(value, NotLogged):
        return NOT_LOGGED
    return "" if value is None else value
