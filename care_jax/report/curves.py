"""Metrics as charts: metrics.jsonl grouped into a few charts per stage.

A metric is assigned to a chart by name. A metric that matches no chart gets a separate one, so that
everything logged is shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import math
import pathlib
from collections.abc import Sequence
from typing import Any, BinaryIO

from care_jax.report.records import DAMAGED, record_of

# (title, unit, name patterns in drawing order).
CHARTS = (
    ("Reward", "", ("reward", "fmt")),
    ("Accuracy", "", ("acc", "acc_low", "acc_high", "all_correct_rate", "all_wrong_rate")),
    ("Entropy", "nats", ("entropy",)),
    ("Response length", "tokens", ("response_tokens", "think_tokens", "answer_tokens")),
    ("Loss", "", ("loss", "nll")),
    ("Gradient norm", "", ("grad_norm",)),
    ("Clipped gradients", "share of updates", ("grad_clipped",)),
    ("Accuracy by source", "", ("acc/*",)),
    ("Reward by component", "", ("reward/*",)),
    ("pass@k", "share of questions", ("pass@*",)),
    ("Benchmarks", "", ("*/acc", "*/acc_low", "*/acc_high")),
    ("Benchmarks, pass@k", "share of questions", ("*/pass@*",)),
    ("Questions", "count", ("num_examples", "num_dropped", "num_not_judged")),
    ("Sampling", "", ("temperature", "top_p", "num_samples", "max_response_tokens")),
    ("Groups", "share of prompts", ("anchor_rate", "rescue_rate", "skip_rate")),
    ("Reflection", "", ("reflect_rate", "reflect_success", "reflect_first_try")),
    ("KL", "nats", ("kl_ref", "kl_old")),
    ("Clip rate", "share of tokens", ("clip_rate", "clip_rate_*")),
    ("Sampler against trainer", "|Δp|", ("mismatch/mean", "mismatch/p99", "mismatch/max")),
    ("Sampler against trainer, KL", "nats", ("mismatch/kl",)),
    (
        "Sampler against trainer, tokens",
        "share of tokens",
        ("mismatch/beyond_clip", "correction/capped"),
    ),
    ("Correction", "mean weight", ("correction/weight",)),
    ("The rationale's credit", "share of the positive", ("rationale_share",)),
    ("Policy loss", "", ("policy_loss",)),
    ("Truncated", "share of responses", ("truncated_rate",)),
    ("Learning rate", "", ("learning_rate",)),
    ("Negatives per group", "share of prompts", ("negatives/*",)),
    ("√K′ signature", "", ("signature/ratio", "signature/alpha", "signature/alpha_appendix")),
    ("A_raw by K′", "", ("signature/*",)),
    ("A_raw", "", ("a_raw/*",)),
    ("Var(A⁻) / Var(A⁺)", "", ("variance_ratio",)),
    ("Throughput", "tokens/s", ("*tokens_per_second",)),
    ("Time", "seconds", ("*_seconds", "seconds")),
    ("Arithmetic", "TFLOP/s per device", ("*tflops_per_second",)),
    ("Utilisation", "share of peak", ("*_mfu",)),
    ("Fill", "share of what is computed", ("train_fill", "patch_fill")),
    ("Devices idle", "share of the time", ("device_idle",)),
    ("Device memory", "GiB", ("device_memory_gib",)),
    ("Host memory", "GiB", ("host/memory_gib",)),
    ("Host", "count", ("host/open_files", "host/threads", "host/programs_*")),
    ("Decoded so far", "tokens", ("decoded_tokens",)),
    ("Verifier", "calls", ("verifier/*",)),
    ("Not judged", "share of responses", ("not_judged",)),
    ("Age of tokens", "share of tokens", ("age/*",)),
    ("Left out so far", "examples", ("left_out/*",)),
)
_SMALL_MULTIPLES = ("Accuracy by source",)  # a panel per metric, all with one scale


class Curves:
    """The curves of a metrics.jsonl that may be growing: `read` goes on where the last one ended.

    Of more than `max_points` steps of a stage, every n-th and the last are held and drawn; n is a
    power of two.
    """

    def __init__(self, path: pathlib.Path, *, max_points: int):
        self._path, self._max_points = path, max_points
        self._stages: dict[str, _Steps] = {}
        self._end, self._last = 0, b""  # of the last line: its end in the file, and its bytes

    def read(self) -> list[dict[str, Any]]:
        """The stages of the file, if it exists, in the order they began, each with its charts.

        Returns:
            {"name", "stride", "steps", "charts": [{"title", "unit", "is_split", "series": [{"name",
            "values"}]}]}; a value is None if the step does not have the metric, and a chart that is
            split has a panel per metric, all with one scale.
        """
        if self._path.exists():
            with self._path.open("rb") as lines:
                self._read_on(lines)
        began = list(dict.fromkeys(name.removesuffix("_eval") for name in self._stages))

        def rank(name: str) -> tuple[int, bool]:
            """The evaluations inside a stage follow it directly."""
            return began.index(name.removesuffix("_eval")), name.endswith("_eval")

        return [_stage(name, self._stages[name]) for name in sorted(self._stages, key=rank)]

    def _read_on(self, lines: BinaryIO) -> None:
        lines.seek(self._end - len(self._last))
        if lines.read(len(self._last)) != self._last:  # a resumed stage dropped lines
            self._stages, self._end, self._last = {}, lines.seek(0), b""
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self._end, self._last = self._end + len(line), line
            with contextlib.suppress(*DAMAGED):
                record = record_of(line)
                name = record.pop("stage", "?")
                self._stages.setdefault(name, _Steps(self._max_points)).add(record)


def merge(runs: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The stages of several runs, from `Curves.read`, as stages whose series have a "run".

    The steps of a stage are those of all runs; a value is None where its run lacks the step.
    """
    whole = max(runs, key=len, default=[])
    order = dict.fromkeys(stage["name"] for stages in (whole, *runs) for stage in stages)
    return [
        _merged([(run, s) for run, stages in enumerate(runs) for s in stages if s["name"] == name])
        for name in order
    ]


def names(stages: Sequence[dict[str, Any]]) -> set[str]:
    """The metrics that stages have."""
    charts = [chart for stage in stages for chart in stage["charts"]]
    return {series["name"] for chart in charts for series in chart["series"]}


def chart_of(name: str) -> tuple[str, str, int]:
    """(title, unit, order) of the chart that a metric belongs to."""
    for title, unit, patterns in CHARTS:
        for order, pattern in enumerate(patterns):
            if fnmatch.fnmatchcase(name, pattern):
                return title, unit, order
    return name, "", 0


@dataclasses.dataclass
class _Steps:
    """Every n-th record of a stage, and the last."""

    max_points: int
    stride: int = 1  # n
    number: int = 0  # of the records so far
    spread: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    last: dict[str, Any] = dataclasses.field(default_factory=dict)

    def add(self, record: dict[str, Any]) -> None:
        if self.number % self.stride == 0:
            self.spread.append(record)
        self.number, self.last = self.number + 1, record
        if len(self.spread) > self.max_points:
            self.spread, self.stride = self.spread[::2], 2 * self.stride


def _stage(name: str, steps: _Steps) -> dict[str, Any]:
    kept = [*steps.spread]
    if kept[-1] is not steps.last:
        kept.append(steps.last)
    metrics = sorted({key for record in kept for key in record} - {"step"})
    charts: dict[str, dict[str, Any]] = {}
    for metric in sorted(metrics, key=lambda metric: (chart_of(metric)[2], metric)):
        title, unit, _ = chart_of(metric)
        is_split = title in _SMALL_MULTIPLES
        new = {"title": title, "unit": unit, "is_split": is_split, "series": []}
        chart = charts.setdefault(title, new)
        values = [_rounded(record.get(metric)) for record in kept]
        chart["series"].append({"name": metric, "values": values})
    return {
        "name": name,
        "stride": steps.stride,
        "steps": [record["step"] for record in kept],
        "charts": sorted(charts.values(), key=_rank),
    }


def _rank(chart: dict[str, Any]) -> int:
    """CHARTS in their order, then the metrics that are in none."""
    titles = [title for title, *_ in CHARTS]
    return titles.index(chart["title"]) if chart["title"] in titles else len(titles)


def _merged(stages: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """One stage of the runs that have it, as (run, stage)."""
    steps = sorted({step for _, stage in stages for step in stage["steps"]})
    charts: dict[str, dict[str, Any]] = {}
    for run, stage in stages:
        for chart in stage["charts"]:
            series = charts.setdefault(chart["title"], chart | {"series": []})["series"]
            for each in chart["series"]:
                known = dict(zip(stage["steps"], each["values"], strict=True))
                series.append(each | {"run": run, "values": [known.get(step) for step in steps]})
    return {
        "name": stages[0][1]["name"],
        "stride": max(stage["stride"] for _, stage in stages),
        "steps": steps,
        "charts": sorted(charts.values(), key=_rank),
    }


def _rounded(value: Any) -> float | None:
    """The value with five digits; None if it is no number, as a damaged line may have."""
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.5g}")
    return value if isinstance(value, int) else None
