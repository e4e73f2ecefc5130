"""Metrics of a run, under the same names in metrics.jsonl, TensorBoard and wandb.

Steps are counted from 0 within each stage ("sft", "rl", "evaluate_rl", ...). A line of
metrics.jsonl is one flat object: stage, step, then the metrics by name. A resumed run drops the
lines of the steps that it will repeat, so that every step appears once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import psutil
import tensorboardX
from PIL import Image

from care_jax.devices import compilation, distributed
from care_jax.devices.whole_file import write_whole
from care_jax.report import pictures
from care_jax.report.console import print_line

# Shown for a response on TensorBoard and wandb.
_COLUMNS = ("role", "acc", "reward", "advantage", "tokens", "reason", "components", "text")
Scalar = Any  # int, float, or an array of one element, on the host or on a device


def on_host(metrics: Mapping[str, Scalar]) -> dict[str, int | float]:
    """Python numbers, fetched in one transfer."""
    fetched = jax.device_get(dict(metrics))  # sorts the names
    return {name: np.asarray(fetched[name]).item() for name in metrics}


def check_finite(
    step: int,
    stage: str,
    metrics: Mapping[str, Scalar],
    advice: str = "lower the learning rate or resume from an earlier checkpoint",
) -> None:
    """Raises a FloatingPointError that names stage, step and the NaN or infinite metrics."""
    values = on_host(metrics)
    bad = [f"{name}={value}" for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise FloatingPointError(
            f"{stage} step {step}: expected finite metrics, got {', '.join(bad)}; {advice}"
        )


def device_memory() -> dict[str, float]:
    """Peak memory of the first local device in GiB, if its backend reports it."""
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return {} if peak is None else {"device_memory_gib": peak / 2**30}


def host_usage() -> dict[str, float]:
    """Of this process: resident memory in GiB, open files, threads, compiled programs so far."""
    process = psutil.Process()
    return {
        "host/memory_gib": process.memory_info().rss / 2**30,
        "host/open_files": process.num_fds(),
        "host/threads": process.num_threads(),
        **{f"host/programs_{name}": number for name, number in compilation.counts().items()},
    }


def wilson_interval(num_correct: float, num_examples: int) -> tuple[float, float]:
    """The 95% Wilson score interval (low, high) of an accuracy in [0, 1].

        (p + z²/2n ± z·√(p(1-p)/n + z²/4n²)) / (1 + z²/n),  z = 1.96

    `num_correct` may include partial credit.
    """
    if num_examples < 1 or not 0 <= num_correct <= num_examples:
        raise ValueError(
            f"expected 0 <= num_correct <= num_examples and at least one example, got "
            f"{num_correct} of {num_examples}"
        )
    z, n, p = 1.959964, num_examples, num_correct / num_examples
    center = p + z**2 / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    scale = 1 + z**2 / n
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)


def pass_rates(num_correct: Sequence[int], num_samples: int) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ..., at most `num_samples`: the mean over questions of

        1 - C(n - c, k) / C(n, k),   n samples of a question, c of them correct,

    the unbiased estimator of Chen et al. (arXiv 2107.03374, eq. 1). `num_correct` has c of each
    question, `num_samples` is n; {} for n = 1.
    """
    if num_samples == 1 or not num_correct:
        return {}
    rates = {}
    for k in (2**i for i in range(num_samples.bit_length())):
        wrong = [math.comb(num_samples - c, k) / math.comb(num_samples, k) for c in num_correct]
        rates[f"pass@{k}"] = 1 - sum(wrong) / len(wrong)
    return rates


def read_records(path: pathlib.Path, *, says: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a JSONL file, each with its object, which has a step; none without a file.

    Damaged lines are skipped, and reported if `says`. A last line without newline is ignored.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    # Not `splitlines`, which also splits at U+2028 in a response.
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            record = json.loads(line)
            _ = str.encode(record.get("stage", "")), int(record["step"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if says:
                print_line(f"{path}:{number} is damaged ({error!r}) and is ignored")
        else:
            yield line, record


def keep_records(path: pathlib.Path, is_kept: Callable[[dict[str, Any]], bool]) -> None:
    """Atomically rewrites a file with the kept records only; reports damaged lines."""
    if path.exists():
        records = read_records(path, says=True)
        write_whole(path, "".join(f"{line}\n" for line, record in records if is_kept(record)))


def _import_wandb() -> Any:
    try:
        import wandb  # pyright: ignore[reportMissingImports]  # an extra
    except ImportError as error:
        raise ValueError(
            "metrics.wandb_project needs wandb, which is not installed; pip install "
            "'care_jax[wandb]' or leave the project empty"
        ) from error
    return wandb


def _rows(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The responses of a group by column."""
    return [
        {name: response[name] for name in _COLUMNS}
        | {"components": ", ".join(f"{key} {x}" for key, x in response["components"].items())}
        for response in group["responses"]
    ]


def _markdown(group: Mapping[str, Any]) -> str:
    """A heading, and each response as an indented block below its figures."""
    name = f"{group['source']} {group['id']}"
    parts = [f"**{name}** {group['question']}\n\ngold answer: {group['gold']}"]
    for row in _rows(group):
        text = "\n".join(f"    {line}" for line in row.pop("text").splitlines())
        parts.append(" · ".join(f"{key} {x}" for key, x in row.items()) + f"\n\n{text}")
    return "\n\n".join(parts)


def _image(group: Mapping[str, Any]) -> Image.Image | None:
    """The first picture of a group, if it has one that can be read."""
    return pictures.opened(group["pictures"][0]) if any(group["pictures"][:1]) else None


class MetricWriter:
    """Writes workdir/metrics.jsonl and workdir/tensorboard/<stage>, on the first process only.

    With `wandb_project`, each stage is a wandb run in a group named after the workdir, and a
    resumed stage continues its run. Steps logged there cannot be dropped; repeated steps have the
    same values, and wandb ignores them. ValueError if wandb is not installed.
    """

    def __init__(self, workdir: str | pathlib.Path, wandb_project: str = ""):
        self.path = pathlib.Path(workdir) / "metrics.jsonl"
        self._is_writer = jax.process_index() == 0
        self._boards: dict[str, tensorboardX.SummaryWriter] = {}
        self._refused: OSError | None = None  # the first one in a TensorBoard thread
        self._wandb: Any = _import_wandb() if wandb_project and self._is_writer else None
        self._project = wandb_project
        self._online: dict[str, Any] = {}
        self._counters: dict[str, dict[str, Counter[str]]] = {}

    def begin(self, stage: str, start_step: int = 0) -> None:
        """Starts or resumes a stage; its lines from `start_step` on are dropped."""
        if not self._is_writer:
            return
        if stage in self._boards:
            raise ValueError(f"stage {stage} has begun already; call begin once per stage")
        keep_records(self.path, lambda r: r.get("stage") != stage or r["step"] < start_step)
        folder = str(self.path.parent / "tensorboard" / stage)
        self._boards[stage] = tensorboardX.SummaryWriter(folder, purge_step=start_step)
        self._keep_refusals(self._boards[stage], folder)
        if self._wandb:
            workdir = self.path.parent.resolve()
            self._online[stage] = self._wandb.init(
                project=self._project,
                group=workdir.name,
                name=f"{workdir.name}/{stage}",
                id=hashlib.sha256(f"{workdir}/{stage}".encode()).hexdigest()[:16],
                resume="allow",
                reinit="create_new",  # stages follow one another in one process
                dir=str(workdir),
            )

    def has_line(self, stage: str, step: int) -> bool:
        """Whether metrics.jsonl has the line of a step; the same on all processes."""
        found = False
        if self._is_writer:
            records = (record for _, record in read_records(self.path))
            found = any((r.get("stage"), r["step"]) == (stage, step) for r in records)
        return distributed.gather_json(found)[0]

    def counter(self, stage: str, name: str) -> Counter[str]:
        """A counter by reason, updated by the caller and written with every line of the stage.

        Counts are written as `name/reason`, summed over the processes. All processes must create
        the same counters.
        """
        return self._counters.setdefault(stage, {}).setdefault(name, Counter())

    def write(self, stage: str, step: int, metrics: Mapping[str, Scalar]) -> None:
        """Appends one line of finite scalars; begins the stage if it has not begun.

        Raises:
            FloatingPointError: a metric is NaN or infinite.
            ValueError: a metric is named "stage" or "step".
        """
        values = on_host(metrics) | self._counted(stage)
        check_finite(step, stage, values)
        if reserved := metrics.keys() & {"stage", "step"}:
            raise ValueError(f"no metric may be named {sorted(reserved)[0]!r}; rename it")
        if not self._is_writer:
            return
        if stage not in self._boards:
            self.begin(stage, step)
        # Opened for each line: a mounted bucket has a line only once the file is closed.
        with self.path.open("a") as file:
            file.write(json.dumps({"stage": stage, "step": step, **values}) + "\n")
        for name, value in values.items():
            self._boards[stage].add_scalar(name, value, step)
        if self._refused is not None:
            raise self._refused
        if stage in self._online:
            self._online[stage].log(values, step=step)

    def show(self, stage: str, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Sends prompts and responses to TensorBoard, as images and text, and to wandb, as a table.

        The stage has begun. `groups` are from `Report.add`; each is stored whole.
        """
        if not self._is_writer or not groups:
            return
        for number, group in enumerate(groups):
            self._boards[stage].add_text(f"rollouts/{number}", _markdown(group), step)
            if (image := _image(group)) is not None:
                pixels = np.asarray(image.convert("RGB"))
                self._boards[stage].add_image(f"rollouts/{number}", pixels, step, dataformats="HWC")
        if stage in self._online:
            table = self._wandb.Table(columns=["name", "image", "question", "gold", *_COLUMNS])
            for group in groups:
                image = _image(group)
                shown = None if image is None else self._wandb.Image(image)
                head = f"{group['source']} {group['id']}", shown, group["question"], group["gold"]
                for row in _rows(group):
                    table.add_data(*head, *row.values())
            self._online[stage].log({"rollouts": table}, step=step)

    def _counted(self, stage: str) -> dict[str, int]:
        values: Counter[str] = Counter()
        for name, counter in self._counters.get(stage, {}).items():
            for counts in distributed.gather_json(dict(counter)):
                for reason, count in counts.items():
                    values[f"{name}/{reason.replace(' ', '_')}"] += count
        return dict(sorted(values.items()))

    def close(self) -> None:
        for board in self._boards.values():
            board.close()
        for online in self._online.values():
            online.finish()
        if self._refused is not None:
            raise self._refused

    def _keep_refusals(self, board: tensorboardX.SummaryWriter, folder: str) -> None:
        """Keeps an OSError of the board's writer thread, for `write` and `close` to raise.

        Otherwise the thread would end, and the main thread would block when its queue is full.
        """

        def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                try:
                    return function(*args)
                except OSError as error:
                    error.filename = error.filename or folder
                    self._refused = self._refused or error
                    return None

            return call

        assert board.file_writer is not None  # until it is closed
        record = board.file_writer.event_writer._ev_writer
        for name in ("write_event", "flush", "close"):
            setattr(record, name, guarded(getattr(record, name)))

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # On a full disk closing fails too, and would hide the first error.
        with contextlib.suppress(*() if kind is None else (Exception,)):
            self.close()
