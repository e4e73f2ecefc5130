"""An experiment's table, as markdown and as CSV: a row per arm, mean ± 95% interval over seeds."""

from __future__ import annotations

import csv
import math
import pathlib
from collections.abc import Mapping, Sequence

from care_jax.sweep.measures import Measure, Outcome, mean_interval


def values_of(
    measure: Measure, outcomes: Sequence[Outcome], references: Mapping[int, Outcome]
) -> list[float]:
    """A measure for each seed of one arm, without the seeds for which it is undefined.

    Args:
        references: outcome of the reference arm by seed.
    """
    values = [measure.of(outcome, references.get(outcome.seed)) for outcome in outcomes]
    return [value for value in values if value is not None and math.isfinite(value)]


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
        columns: by name; a column without any value is left out.
        title, notes: above and below the markdown's table.

    Returns:
        the markdown.
    """
    references = {outcome.seed: outcome for outcome in arms.get(reference, ())}
    values = {
        (arm, name): values_of(measure, outcomes, references)
        for arm, outcomes in arms.items()
        for name, measure in columns.items()
    }
    shown = {name: each for name, each in columns.items() if any(values[arm, name] for arm in arms)}
    heads = ["arm", "seeds"] + [each.label.format(reference=reference) for each in shown.values()]
    lines = [heads, ["---"] * len(heads)]
    for arm, outcomes in arms.items():
        cells = [_cell(values[arm, name], measure.format) for name, measure in shown.items()]
        lines.append([arm, str(len(outcomes)), *cells])
    rows = [f"| {' | '.join(line)} |" for line in lines]
    markdown = "\n".join([f"# {title}", "", *rows, "", *notes, ""])
    (folder / "table.md").write_text(markdown)

    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "seed", *shown])
        for arm, outcomes in arms.items():
            for outcome in outcomes:
                of_seed = [values_of(measure, [outcome], references) for measure in shown.values()]
                writer.writerow([arm, outcome.seed, *(each[0] if each else "" for each in of_seed)])
    return markdown


def _cell(values: Sequence[float], spec: str) -> str:
    if not values:
        return "–"
    mean, half = mean_interval(values)
    return f"{mean:{spec}}" if math.isnan(half) else f"{mean:{spec}} ± {half:{spec}}"
