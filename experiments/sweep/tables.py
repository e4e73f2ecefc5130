"""An experiment's table, as markdown and as CSV: a row per arm, mean ± 95% interval over seeds.

A cell is "–" if a measure is undefined, and "not logged" if a run did not log what it needs. The
notes below the table then say which key to set.
"""

from __future__ import annotations

import csv
import math
import pathlib
from collections.abc import Mapping, Sequence

from experiments.sweep.measures import Measure, mean_interval
from experiments.sweep.outcome import NoReference, NotLogged, Outcome

NOT_LOGGED = "not logged"


def write_table(
    folder: pathlib.Path,
    arms: Mapping[str, Sequence[Outcome]],
    reference: str,
    columns: Mapping[str, Measure],
    title: str,
    notes: Sequence[str],
) -> str:
    """Writes `table.md`, whose text it returns, and `table.csv`, with the value of every seed.

    Leads are over the arm `reference`. A column that is undefined in every cell is left out.
    """
    references = {outcome.seed: outcome for outcome in arms.get(reference, ())}

    def value_of(measure: Measure, outcome: Outcome) -> float | NotLogged | None:
        try:
            value = measure.of(outcome, references.get(outcome.seed))
        except NotLogged as lacking:
            return None if isinstance(lacking, NoReference) and not references else lacking
        return None if value is None or not math.isfinite(value) else float(value)

    shown, cells, lacking = {}, {}, {}  # measures, (arm, name) to values, (name, key) to arms
    for name, measure in columns.items():
        found = {arm: [value_of(measure, each) for each in arms[arm]] for arm in arms}
        if all(value is None for values in found.values() for value in values):
            continue
        shown[name] = measure
        for arm, values in found.items():
            cells[arm, name] = values
            for key in dict.fromkeys(str(x) for x in values if isinstance(x, NotLogged)):
                lacking.setdefault((name, key), []).append(arm)

    heads = ["arm", "seeds"] + [each.label.format(reference=reference) for each in shown.values()]
    lines = [heads, ["---"] * len(heads)]
    for arm, outcomes in arms.items():
        row = [_cell(cells[arm, name], measure.format) for name, measure in shown.items()]
        lines.append([arm, str(len(outcomes)), *row])
    rows = [f"| {' | '.join(line)} |" for line in lines]
    advice = [
        f"{NOT_LOGGED}: {name} of {', '.join(of)}; {key}.\n" for (name, key), of in lacking.items()
    ]
    markdown = "\n".join([f"# {title}", "", *rows, "", *advice, *notes, ""])
    (folder / "table.md").write_text(markdown, encoding="utf-8")

    with (folder / "table.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "seed", *shown])
        for arm, outcomes in arms.items():
            for outcome, *values in zip(outcomes, *(cells[arm, x] for x in shown), strict=True):
                plain = [NOT_LOGGED if isinstance(each, NotLogged) else each for each in values]
                writer.writerow([arm, outcome.seed, *plain])
    return markdown


def _cell(found: Sequence[float | NotLogged | None], spec: str) -> str:
    values = [value for value in found if isinstance(value, float)]
    num_lacking = sum(isinstance(value, NotLogged) for value in found)
    if not values:
        return NOT_LOGGED if num_lacking else "–"
    mean, half = mean_interval(values)
    text = f"{mean:{spec}}" if math.isnan(half) else f"{mean:{spec}} ± {half:{spec}}"
    return f"{text} ({num_lacking} {NOT_LOGGED})" if num_lacking else text
