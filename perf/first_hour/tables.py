"""The rows of the steps as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from care_jax.devices.flops import GIB

Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[Row]]  # by step


def report(rows: Rows) -> str:
    """A section for each step that was begun, with what failed below its table."""
    rates: dict[str, Any] = {"devices": 1}
    for row in (*rows.get("device", ()), *rows.get("rates", ())):
        rates |= row
    lines = _title(rates)
    for step, found in rows.items():
        if step == "device":
            continue
        took = next((f": {row['took']:.0f} s" for row in found if "took" in row), "")
        lines += [f"## {step}{took}", ""]
        good = [row for row in found if "failed" not in row and "took" not in row]
        if good:
            lines += [*_TABLES.get(step, _any_table)(good, rates), ""]
        for row in found:
            if "failed" in row:
                labels = [_text(value) for name, value in row.items() if name not in _NO_LABELS]
                lines += [f"- {': '.join([', '.join(labels)] * bool(labels) + [row['failed']])}"]
        lines += [""] * (lines[-1] != "")
    return "\n".join(lines)


_NO_LABELS = "step", "failed", "heads"


def _title(rates: Row) -> list[str]:
    versions, size = rates.get("versions", {}), (rates.get("bytes") or 0) / GIB
    known = ", ".join(f"{name} {version}" for name, version in versions.items())
    of_each = f", {size:.1f} GiB each" if size else ""
    return [f"# {rates['devices']} x {rates.get('kind', 'unknown')}{of_each}", "", known, ""]


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; the first row is the header."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return [head, f"|{'---|' * len(rows[0])}", *body]


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _any_table(rows: Sequence[Row], _: Row) -> list[str]:
    names = [name for name in rows[0] if name != "step"]
    return markdown([names, *([_text(row.get(name)) for name in names] for row in rows)])


def _rates(_: Sequence[Row], rates: Row) -> list[str]:
    rate, copies, peak = (
        rates.get(name) for name in ("matmul_rate", "copy_bandwidth", "peak_flops")
    )
    share = f" ({rate / peak:.0%} of the published peak)" if rate and peak else ""
    return [
        f"Matmuls {(rate or 0) / 1e12:.3g} TFLOP/s{share}, copies {(copies or 0) / 1e9:.4g} GB/s."
    ]


def _kernels(rows: Sequence[Row], _: Row) -> list[str]:
    cells = [["kernel", "heads", "releases", "dtype", "size", "forward", "backward", "ms", "XLA"]]
    for row in rows:
        apart = (f"{row[name]:.1e}" if name in row else "" for name in ("forward", "backward"))
        times = (f"{1e3 * row[name]:.3f}" for name in ("seconds", "xla_seconds"))
        heads = "x".join(map(str, row["heads"]))
        labels = (row["kernel"], heads, ", ".join(row["releases"]), row["dtype"], str(row["size"]))
        cells.append([*labels, *apart, *times])
    return markdown(cells)


def _share(amount: float | None, seconds: float, rate: float | None) -> str:
    return f"{amount / seconds / rate:.0%}" if amount and seconds and rate else ""


def _work(row: Row, rates: Row) -> list[str]:
    """Seconds, tokens/s, share of matmuls and of copies, compiled programs and their seconds."""
    seconds = row["seconds"]
    return [
        f"{seconds:.3g}",
        f"{row['tokens'] / seconds:.0f}" if seconds else "",
        _share(row["flops"] / rates["devices"], seconds, rates.get("matmul_rate")),
        _share(row["hbm_bytes"], seconds, rates.get("copy_bandwidth")),
        f"{(row['peak_bytes'] or 0) / GIB:.1f}" if row["peak_bytes"] else "",
        f"{row['compiled']}, {row['compiled_s']:.0f} s",
    ]


_WORK = ["seconds", "tokens/s", "of matmuls", "of copies", "peak GiB", "compiled"]


def _decoding(rows: Sequence[Row], rates: Row) -> list[str]:
    cells = [["attention", "case", "part", "calls", *_WORK]]
    for row in rows:
        if "part" in row:
            labels = row["attention"], row["case"], row["part"], str(row["calls"])
            cells.append([*labels, *_work(row, rates)])
    return [*(markdown(cells) if len(cells) > 1 else ()), *_trace(rows)]


def _trace(rows: Sequence[Row]) -> list[str]:
    """The rows of `tracing.by_kernel` among these, after an empty line."""
    cells = [["kernel", "ms", "calls", "share"]]
    for row in rows:
        if "kernel" in row:
            name = f"`{row['kernel'][:80]}`" if "`" not in row["kernel"] else row["kernel"][:80]
            own = f"{1e3 * row['seconds']:.2f}", str(row["calls"]), f"{row['share']:.1%}"
            cells.append([name.replace("|", "/"), *own])
    return ["", *markdown(cells)] if len(cells) > 1 else []


def _updating(rows: Sequence[Row], rates: Row) -> list[str]:
    predicted: Row = next((row["programs"] for row in rows if "programs" in row), {})
    lines, reached = [], predicted.get("rl reshard", 0.0)
    cells = [["part", "case", "calls", *_WORK, "predicted GiB"]]
    for row in rows:
        if "parameters" in row:
            rank = row["lora_rank"]
            trained = f"adapters of rank {rank}" if rank else "all parameters"
            lines += [f"{row['parameters'] / 1e9:.2f} G parameters, {trained} trained.", ""]
        elif "part" in row:
            # The device's peak is cumulative too.
            reached = max(reached, predicted.get(f"rl {row['part']}", 0.0))
            of_aot = f"{reached / GIB:.1f}" if reached else ""
            labels = row["part"], row["case"], str(row["calls"])
            cells.append([*labels, *_work(row, rates), of_aot])
    return [*lines, *markdown(cells), *_trace(rows)]


_TABLES: dict[str, Callable[[Sequence[Row], Row], list[str]]] = {
    "rates": _rates,
    "kernels": _kernels,
    "decode_3b": _decoding,
    "update_3b": _updating,
    "update_7b": _updating,
}
