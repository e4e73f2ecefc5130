"""What a run is, from config.json and starts.jsonl of its workdir: model, objective, command, time.

The report shows it on top. Trackers name and tag their runs with it.
"""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

_SHOWN_VERSIONS = ("care_jax", "commit", "jax", "python")


def describe_run(workdir: pathlib.Path) -> dict[str, Any]:
    """The facts of a run in JSON types; those of files that are missing or damaged are left out.

    Returns:
        {"facts": [(label, text)], "changed": [(key, value)], "settings": [(key, value)],
        "versions": [(package, version)]}: stages are those of all starts, so that an export hides
        no training; changed are the keys that the last start that trained set on the command line,
        settings are all keys; values are JSON.
    """
    config = _object(_text(workdir / "config.json"))
    starts = [
        start for line in _text(workdir / "starts.jsonl").split("\n") if (start := _start(line))
    ]
    versions, _ = config.pop("versions", {}), config.pop("given", None)
    all_stages = [start.get("stages", ()) for start in starts]
    if any(all_stages):
        config["stages"] = _in_order(all_stages)
    training = [start for start in starts if {"sft", "rl"} & {*start.get("stages", ())}]
    last = (training or starts or [{}])[-1]
    facts = {
        "Model": lambda: model_of(config),
        "Objective": lambda: objective_of(config),
        "Stages": lambda: " → ".join(config.get("stages", ())),
        "Data": lambda: ", ".join(dict.fromkeys(_sources(config, last.get("given", ())))),
        "Devices": lambda: last.get("devices", ""),
        "Duration": lambda: _duration(workdir, starts),
        "Versions": lambda: ", ".join(
            f"{n} {versions[n]}" for n in _SHOWN_VERSIONS if n in versions
        ),
        "Command": lambda: last.get("command", ""),
    }
    told = [(label, _undamaged(fact, "")) for label, fact in facts.items()]
    return {
        "facts": [(label, text) for label, text in told if text],
        "changed": _undamaged(lambda: _as_json(last.get("changed", {})), []),
        "settings": _as_json(dict(flat(config))),
        "versions": _undamaged(lambda: sorted(versions.items()), []),
    }


def _undamaged(read: Callable[[], Any], default: Any) -> Any:
    """What `read` reads, or the default if a file has other fields than it was written with."""
    try:
        return read()
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return default


def model_of(config: Mapping[str, Any]) -> str:
    """The model of a configuration, such as `Qwen2.5-VL-7B-Instruct, LoRA of rank 64`."""
    if not (model := config.get("model", {})):
        return ""
    name = pathlib.PurePath(model["path"]).name
    if not name:
        text = model["backbone"].get("text_config", {})
        size = f"{text.get('num_hidden_layers', '?')} layers, width {text.get('hidden_size', '?')}"
        name = f"random {model['backbone'].get('model_type', '')} ({size})"
    return name + (f", LoRA of rank {model['lora_rank']}" if model["lora_rank"] else "")


def objective_of(config: Mapping[str, Any]) -> str:
    """The objective of a configuration that has the RL stage, in capitals; else empty."""
    is_trained = "rl" in config.get("stages", ())
    return config["rl"]["objective"].upper().replace("_", " ") if is_trained else ""


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def hyperparameters(config: Mapping[str, Any], stage: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of what a stage depends on: its section, the objective's, the model."""
    section = stage.partition("_")[0]  # "rl_eval" and "evaluate_rl" too
    sections = {"model", section, config["rl"]["objective"] if section == "rl" else section}
    chosen = {key: value for key, value in config.items() if key in (*sections, "seed")}
    return ((key, value) for key, value in flat(chosen) if not key.startswith("model.backbone."))


def _in_order(all_stages: list[Sequence[str]]) -> list[str]:
    """The stages of several starts: the longest list, then those that it lacks."""
    longest = max(all_stages, key=len)
    more = (stage for stages in all_stages for stage in stages if stage not in longest)
    return [*longest, *dict.fromkeys(more)]


def _sources(config: Mapping[str, Any], given: Collection[str]) -> Iterator[str]:
    data, stages = config.get("data", {}), config.get("stages", ())
    for section, stage in (("sft", "sft"), ("train", "rl"), ("test", "evaluate")):
        found: Mapping[str, Any] = data.get(section, {}) if stage in stages else {}
        if stage in given:
            found = {"source": "rows given from Python"}
        for part in found.get("parts") or [found]:
            if source := part.get("path") or part.get("source"):
                yield str(source)


def _duration(workdir: pathlib.Path, starts: list[dict[str, Any]]) -> str:
    """The time from the first start to the last line of metrics.jsonl, pauses included."""
    metrics = workdir / "metrics.jsonl"
    if not starts or not metrics.exists():
        return ""
    began = datetime.datetime.fromisoformat(starts[0]["time"])
    minutes = max(round((metrics.stat().st_mtime - began.timestamp()) / 60), 0)
    took = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
    again = f", {len(starts)} starts with the pauses between" if len(starts) > 1 else ""
    return f"{took}{again}; began {began:%Y-%m-%d %H:%M} UTC"


def _as_json(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(key, json.dumps(value, ensure_ascii=False)) for key, value in values.items()]


def _text(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _start(line: str) -> dict[str, Any]:
    """A line of starts.jsonl; {} if it is damaged."""
    start = _object(line)
    is_whole = isinstance(stages := start.get("stages", []), list) and all(
        isinstance(stage, str) for stage in stages
    )
    return start if is_whole else {}


def _object(text: str) -> dict[str, Any]:
    """A JSON object; {} if the text is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
