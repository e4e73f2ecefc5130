"""Aggregates the samples of benchmarks into accuracies with intervals, as JSON and as markdown.

Per benchmark and category: accuracy and its 95% Wilson interval. Over k benchmarks: the unweighted
mean of their accuracies, with an interval combined from theirs (the method of variance estimates
recovery):

    m ± √(Σ (pᵢ - bᵢ)²) / k,   bᵢ the Wilson bound of pᵢ on that side

Rows are treated as independent, even if a release asks the same problem in several versions.

With several samples per row, a row's accuracy is their mean, which has less variance than the first
sample. The interval still counts a row as one trial, and is then too wide.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from care_jax.benchmarks.releases import RELEASES
from care_jax.benchmarks.samples import Sample
from care_jax.report.accuracy import pass_rates, wilson_interval


def score(samples: Sequence[Sample], categories: Callable[[Sample], list[str]]) -> dict[str, Any]:
    """The accuracies, in [0, 1], and counts of one benchmark, from one sample per row.

    Dropped and unparsable rows count as wrong. With several responses to a row (`accs`) there is
    also pass@k, and a row is unparsable or truncated if any response is.
    """
    groups = defaultdict(list)
    for sample in samples:
        for group in categories(sample):
            groups[group].append(sample["acc"])
    figures = _accuracy([sample["acc"] for sample in samples])
    judged = [sample["acc_judged"] for sample in samples]
    if any(acc is not None for acc in judged):
        figures["acc_judged"] = sum(
            sample["acc"] if acc is None else acc
            for sample, acc in zip(samples, judged, strict=True)
        ) / len(samples)
    answered = [sample for sample in samples if not sample["is_dropped"]]
    num_correct = [sum(acc == 1 for acc in sample.get("accs", ())) for sample in samples]
    figures |= pass_rates(num_correct, len(samples[0].get("accs", (0,))))
    return figures | {
        "num_unparsable": sum(not sample["is_parsed"] for sample in answered),
        "num_truncated": sum(not sample["is_complete"] for sample in answered),
        "num_dropped": len(samples) - len(answered),
        "categories": {group: _accuracy(groups[group]) for group in sorted(groups)},
    }


def _accuracy(accs: Sequence[float]) -> dict[str, float]:
    low, high = wilson_interval(sum(accs), len(accs))
    return {"acc": sum(accs) / len(accs), "acc_low": low, "acc_high": high, "num_rows": len(accs)}


def macro_average(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The mean over benchmarks, except subsets of others unless there are only subsets."""
    names = [name for name in scores if RELEASES[name].in_average] or list(scores)
    accs = [scores[name]["acc"] for name in names]
    mean = sum(accs) / len(accs)

    def spread(bound: str) -> float:
        return math.sqrt(sum((scores[name]["acc"] - scores[name][bound]) ** 2 for name in names))

    return {
        "acc": mean,
        "acc_low": max(0.0, mean - spread("acc_low") / len(names)),
        "acc_high": min(1.0, mean + spread("acc_high") / len(names)),
        "benchmarks": names,
    }


def to_markdown(results: Mapping[str, Any]) -> str:
    """Tables of `{"benchmarks": {name: score(...)}, "macro": macro_average(...)}`."""
    benchmarks, macro = results["benchmarks"], results["macro"]
    total = {f"mean of {len(macro['benchmarks'])}": macro}
    lines = _table(benchmarks | total, "rows", "unparsable", "truncated", "dropped")
    for name, figures in benchmarks.items():
        if "acc_judged" in figures:
            lines += ["", f"{name} with the judge's word: {100 * figures['acc_judged']:.1f}"]
    for name, figures in benchmarks.items():
        rates = [f"{key} {100 * rate:.1f}" for key, rate in figures.items() if "pass@" in key]
        if rates:
            lines += ["", f"{name}: {', '.join(rates)}"]
    for name, figures in benchmarks.items():
        if figures["categories"]:
            lines += ["", f"## {name}", "", *_table(figures["categories"], "rows")]
    return "\n".join(lines) + "\n"


def _table(rows: Mapping[str, Mapping[str, Any]], *counts: str) -> list[str]:
    head = f"| | accuracy | 95% interval | {' | '.join(counts)} |"
    lines = [head, f"|{'---|' * (3 + len(counts))}"]
    for name, figures in rows.items():
        acc, low, high = (f"{100 * figures[key]:.1f}" for key in ("acc", "acc_low", "acc_high"))
        cells = [name.replace("|", "\\|"), acc, f"{low} to {high}"]
        cells += [str(figures.get(f"num_{count}", "")) for count in counts]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
