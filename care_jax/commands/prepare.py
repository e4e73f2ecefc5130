"""Cleans sources into one folder: `python -m care_jax.commands.prepare --config=FILE --out=FOLDER`.

Reads `data.prepare.sources` in order. Drops rows that are unusable, that duplicate an earlier row,
that match a benchmark of `data.prepare.benchmarks`, or that do not fit `data.buckets` or, with
their response, `sft.row_tokens`. Writes the rest to ArrayRecord shards, with a manifest (counts by
source and reason, sizes, checksums) and a list of every dropped row.

The same configuration and files give the same bytes. The folder is written under a temporary name
and renamed at the end, so it is complete if it exists. Only one process at a time may write it.
Memory: a few dozen images and about a kilobyte per kept row.
"""

from __future__ import annotations

import collections
import json
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TextIO

from absl import flags
from ml_collections import ConfigDict, config_flags

from care_jax.batch import Example, Unusable
from care_jax.commands.benchmark_rows import open_questions
from care_jax.commands.dedup import Content, DuplicateIndex, content_of
from care_jax.config import command_line
from care_jax.config.keys import check_keys
from care_jax.data.pipeline import TOO_LONG
from care_jax.data.prompts import open_prompts
from care_jax.data.readers import shards
from care_jax.data.rows import LeftOut
from care_jax.data.sources import check_section, open_section
from care_jax.devices.standard_streams import outlive_readers
from care_jax.devices.whole_file import sha256
from care_jax.report.console import print_line
from care_jax.run import lock

LEFT_OUT = "left_out.jsonl"  # rows by their number, from 1
RESPONSE_TOO_LONG = "response too long"
# Keys of `data` that determine the output.
_DECISIVE = ("prepare", "min_pixels", "max_pixels", "buckets")
_DECISIVE += ("system_prompt", "instruction", "think_tag")
_AHEAD = 4  # rows per worker inspected in advance
# Row, its example if readable, and its content or the reason why it is unusable.
_Inspected = tuple[int, Example | None, Content | Unusable]


def prepare(config: ConfigDict, out: pathlib.Path) -> dict[str, Any]:
    """Writes the folder and returns its manifest.

    If `out` was prepared with the same configuration, only its manifest is read.

    Raises:
        ValueError: the configuration is invalid, no example is left, or `out` was prepared with
            another configuration.
    """
    data = config.data
    _check(config)
    whole = json.loads(data.to_json_best_effort())
    expected = {key: whole[key] for key in _DECISIVE} | {
        "model": {"path": config.model.path, "tokenizer": config.model.tokenizer},
        "row_tokens": config.sft.row_tokens,
    }
    is_empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty:
        manifest = shards.read_manifest(out)
        if manifest["config"] != expected:
            raise ValueError(
                f"{str(out)!r} was prepared with another configuration; remove it, or choose "
                "another --out"
            )
        print_line(f"{out} was prepared before, and nothing is read again; remove it to repeat it")
        return manifest
    settings = {"think_tag": data.think_tag}
    sources, benchmarks = (
        {
            name_of(section): open_rows(f"data.prepare.{name}.{number}", section, settings)
            for number, section in enumerate(data.prepare[name])
        }
        for name, open_rows in (("sources", open_section), ("benchmarks", open_questions))
    )
    inspect = _make_inspect(config)
    index = DuplicateIndex(data.prepare.near_bits)
    manifest = {"config": expected, "num_examples": 0, "sources": {}, "benchmarks": {}}
    dropped: dict[str, LeftOut] = {}
    with lock.new_folder(out) as partial:
        with (
            ThreadPoolExecutor(data.num_workers, "prepare") as workers,
            (partial / LEFT_OUT).open("w", encoding="utf-8") as left_out,
        ):
            ahead = _AHEAD * data.num_workers
            for name, examples in benchmarks.items():
                rows = _in_order(examples, content_of, workers, ahead)
                manifest["benchmarks"][name] = _index_benchmark(name, rows, index)
            for name, examples in sources.items():
                rows = _in_order(examples, inspect, workers, ahead)
                shard_bytes = data.prepare.shard_megabytes * 2**20
                writer = shards.ShardWriter(partial, name, shard_bytes=shard_bytes)
                dropped[name] = LeftOut()
                report = _clean(name, rows, index, writer, left_out, dropped[name])
                manifest["sources"][name] = report
                manifest["num_examples"] += report["kept"]
                for benchmark, count in report.pop("in_benchmarks").items():
                    manifest["benchmarks"][benchmark]["removed"][name] = count
        if not manifest["num_examples"]:
            found = "; ".join(f"{name}: {told}" for name, told in dropped.items())
            raise ValueError(f"no example is left of {found}; check the sources' paths")
        manifest["left_out_sha256"] = sha256(partial / LEFT_OUT)
        shards.write_manifest(partial, manifest)
    return shards.read_manifest(out)


def summary(manifest: Mapping[str, Any]) -> list[str]:
    """The manifest's counts as lines of text, by source and benchmark."""
    lines = []
    for name, report in manifest["sources"].items():
        num_bytes = sum(shard["num_bytes"] for shard in report["shards"])
        lines.append(
            f"{name}: {report['kept']} of {report['rows']} rows kept, {len(report['shards'])} "
            f"shards of {num_bytes / 2**20:.1f} MiB"
        )
        lines += _reasons("left out", report)
        lines += [f"  repaired {count}: {reason}" for reason, count in report["repaired"].items()]
    for name, report in manifest["benchmarks"].items():
        lines.append(
            f"benchmark {name}: {report['usable']} of {report['rows']} questions read, "
            f"{sum(report['removed'].values())} matches removed"
        )
        lines += _reasons("not compared", report)
    return [*lines, f"{manifest['num_examples']} examples in all"]


def _reasons(what: str, report: Mapping[str, Any]) -> list[str]:
    return [f"  {what} {count}: {reason}" for reason, count in report["left_out"].items()]


def _in_order(
    examples: Sequence[Example],
    inspect: Callable[[Example], Content],
    workers: ThreadPoolExecutor,
    ahead: int,
) -> Iterator[_Inspected]:
    """Reads and inspects rows in parallel, `ahead` in advance; yields the results in order."""

    def inspected(row: int) -> _Inspected:
        example = None
        try:
            example = examples[row]
            return row, example, inspect(example)
        except Unusable as reason:
            return row, example, reason

    waiting: collections.deque[Future[_Inspected]] = collections.deque()
    for row in range(len(examples)):
        waiting.append(workers.submit(inspected, row))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    yield from (each.result() for each in waiting)


def _clean(
    name: str,
    rows: Iterator[_Inspected],
    index: DuplicateIndex,
    writer: shards.ShardWriter,
    left_out: TextIO,
    dropped: LeftOut,
) -> dict[str, Any]:
    """Writes the rows of a source that are kept, and counts the dropped ones by reason."""
    repaired, in_benchmarks = Counter(), Counter()
    num_kept = 0
    for row, example, content in rows:
        benchmark, problem = "", None
        if isinstance(content, Unusable):
            problem = content
        else:
            reason, benchmark = index.in_benchmark(content)
            if reason := reason or index.duplicate(content):
                problem = Unusable(reason)
        if problem:
            dropped.add(problem, row)
            in_benchmarks.update([benchmark] if benchmark else [])
            id = example.id if example else ""
            line = {"source": name, "row": row + 1, "id": id, "reason": str(problem)}
            line |= {"detail": problem.detail} if problem.detail else {}
            left_out.write(json.dumps(line, ensure_ascii=False) + "\n")
            continue
        assert example is not None and not isinstance(content, Unusable)  # else there is a reason
        index.add(name, content)
        writer.write(example)
        num_kept += 1
        repaired.update([example.repair] if example.repair else [])
    writer.close()
    return {
        "rows": num_kept + dropped.counts.total(),
        "kept": num_kept,
        "left_out": dict(sorted(dropped.counts.items())),
        "repaired": dict(sorted(repaired.items())),
        "in_benchmarks": dict(in_benchmarks),
        "shards": writer.shards,
    }


def _index_benchmark(
    name: str, rows: Iterator[_Inspected], index: DuplicateIndex
) -> dict[str, Any]:
    reasons, num_usable = Counter(), 0
    for _, _, content in rows:
        if isinstance(content, Unusable):
            reasons[str(content)] += 1
        else:
            index.add_benchmark(name, content)
            num_usable += 1
    if not num_usable:
        raise ValueError(
            f"no question of benchmark {name} can be read: {dict(reasons) or 'it has no rows'}; "
            "correct its path and columns in data.prepare.benchmarks"
        )
    return {
        "rows": num_usable + reasons.total(),
        "usable": num_usable,
        "left_out": dict(sorted(reasons.items())),
        "removed": {},
    }


def _make_inspect(config: ConfigDict) -> Callable[[Example], Content]:
    """The check of every row: its pictures decode, and its prompt and response fit."""
    prompts, _ = open_prompts(config)

    def inspect(example: Example) -> Content:
        content = content_of(example)
        num_tokens, num_patches = prompts.measure(example)
        if prompts.bucket_of(num_tokens, num_patches) is None:
            raise Unusable(TOO_LONG, f"{num_tokens} tokens and {num_patches} patches")
        if example.response:
            num_tokens += len(prompts.response_tokens(example.context + example.response))
            if num_tokens > config.sft.row_tokens:
                raise Unusable(RESPONSE_TOO_LONG, f"{num_tokens} tokens with its prompt")
        return content

    return inspect


def name_of(section: ConfigDict) -> str:
    """The name of a source in a prepared folder: chartqa-human, or its file's or folder's name."""
    is_any = section.source in ("jsonl", "parquet", "arrayrecord")
    name = pathlib.Path(section.path).stem if is_any else section.source
    split = "" if section.split == "train" else section.split
    return "-".join(filter(None, [name, section.subset, split]))


def _check(config: ConfigDict) -> None:
    check_keys(config)
    prepare = config.data.prepare
    if not prepare.sources:
        raise ValueError("expected at least one source in data.prepare.sources, got none; add one")
    sections = [*prepare.sources, *prepare.benchmarks]
    for kind in ("sources", "benchmarks"):
        for number, section in enumerate(prepare[kind]):
            check_section(f"data.prepare.{kind}.{number}", section, config.data)
            if section.parts:
                raise ValueError(
                    f"data.prepare.{kind} must not be mixtures, got one of {len(section.parts)} "
                    "parts; list its parts instead"
                )
    for name, count in Counter(map(name_of, sections)).items():
        if count > 1:
            raise ValueError(
                f"data.prepare's sources must have different names, got {count} called {name!r}; "
                "rename their files or folders"
            )


def run_main() -> None:
    """Parses flags and prepares; user errors print one line, not a traceback."""
    # Not at module level: other modules define flags of the same names.
    config = config_flags.DEFINE_config_file("config", None, "Configuration with data.prepare.")
    out = flags.DEFINE_string("out", None, "Folder to write.")

    def act() -> None:
        if config.value is None or not out.value:
            raise ValueError("expected --config=FILE --out=FOLDER and --config.<key>=<value> alone")
        folder = command_line.folder_of(out.value, flag="--out")
        print("\n".join(summary(prepare(config.value, folder))))

    command_line.run_command(act, out, config)


if __name__ == "__main__":
    outlive_readers()
    run_main()
