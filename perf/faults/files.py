"""Damaged files: a run ends as an unbroken one, or stops with a line that names the file.

A file is damaged in one of the ways of `WAYS`. Most attempts damage files of a run that was killed
in the middle of RL, and restart it. Files that are read whole and checked are read in this process,
hundreds of times.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import pathlib
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence

from care_jax.benchmarks.samples import read
from care_jax.commands.prepare import prepare
from care_jax.data.readers import shards
from care_jax.run import integrity
from care_jax.run.policy import policy_of
from configs import common, tiny
from perf.faults import runs
from perf.faults.runs import Attempt

WAYS = ("flipped", "cut", "emptied", "removed", "swapped")
_NUM_DRAWN = 200  # damages of files that are read in this process


def damage(path: pathlib.Path, way: str, rng: random.Random, others: Sequence[pathlib.Path]):
    """Damages a file in one of `WAYS`; "swapped" with one of the others."""
    data = path.read_bytes()
    if way == "flipped":
        place = rng.randrange(8 * len(data))
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
    elif way == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif way == "emptied":
        path.write_bytes(b"")
    elif way == "removed":
        path.unlink()
    else:
        other = rng.choice([each for each in others if each != path])
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)


def swept(folder: pathlib.Path, read_all: Callable[[pathlib.Path], str]) -> str:
    """Damages one file after another and reads; returns what was read with another result.

    `read_all` gives the result of an undamaged folder as text, or raises a ValueError of one line.
    """
    rng, expected, problems = random.Random(0), read_all(folder), []
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    for _ in range(_NUM_DRAWN):
        path, way = rng.choice(files), rng.choice(WAYS if len(files) > 1 else WAYS[:-1])
        whole = {each: each.read_bytes() for each in files}
        damage(path, way, rng, files)
        try:
            found = read_all(folder)
            problem = "" if found == expected else "was read with another result"
        except ValueError as error:
            problem = "" if "\n" not in str(error) else f"raised several lines: {error}"
        except Exception as error:
            problem = f"raised {error!r}"
        problems += [f"{path.name} {way}: {problem}"] if problem else []
        for each, data in whole.items():
            each.write_bytes(data)
        for new in {*folder.rglob("*")} - {*files}:
            if new.is_file():
                new.unlink()
    return "; ".join(dict.fromkeys(problems))


def _export(folder: pathlib.Path) -> str:
    source = next(runs.unbroken("small").workdir.glob("export"))
    shutil.copytree(source, folder / "export")
    config = tiny.get_config()
    config.model.path, config.model.backbone = str(folder / "export"), {}

    def opened(export: pathlib.Path) -> str:
        policy_of(config)
        integrity.refuse_damaged(export, integrity.find_damage(export))
        files = sorted(path for path in export.rglob("*") if path.name != integrity.MANIFEST)
        return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()

    return swept(folder / "export", opened)


def _shards(folder: pathlib.Path) -> str:
    config = tiny.get_config()
    config.data.prepare.sources = tuple(
        common.source("synthetic", num_examples=30, seed=seed, split=split)
        for seed, split in ((1, "train"), (2, "test"))
    )
    prepare(config, folder / "prepared")

    def rows(path: pathlib.Path) -> str:
        examples = shards.open_rows(str(path))
        return "".join(repr(examples[index]) for index in range(len(examples)))

    return swept(folder / "prepared", rows)


def _samples(folder: pathlib.Path) -> str:
    """Only whole samples are believed, each once."""
    source = runs.unbroken("small").workdir / "samples_rl.jsonl"
    (folder / "samples").mkdir()
    shutil.copy(source, folder / "samples")
    digest = json.loads(source.read_text().splitlines()[0])["settings"]
    whole = {sample["doc_id"]: sample for sample in read(source, digest)}

    def believed(samples: pathlib.Path) -> str:
        path = samples / source.name
        with contextlib.redirect_stdout(io.StringIO()):
            found = read(path, digest)
        assert all(whole[sample["doc_id"]] == sample for sample in found), "a sample was changed"
        num_lines = path.read_bytes().count(b"\n") if path.exists() else 0
        aside = path.with_name(f"{path.name}.damaged")
        num_aside = aside.read_bytes().count(b"\n") if aside.exists() else 0
        assert num_lines <= len(found) + num_aside, "a sample was dropped"
        return ""

    return swept(folder / "samples", believed)


@functools.cache
def _killed() -> pathlib.Path:
    """The workdir of a run that was killed behind the third step of RL; it has two checkpoints."""
    workdir = pathlib.Path(tempfile.mkdtemp(prefix="care_killed_")) / "run"
    launched = runs.unbroken("small").start(workdir)
    is_met = launched.wait_until((workdir / "checkpoints" / "rl" / "3").exists)
    launched.processes[0].send_signal(signal.SIGKILL)
    statuses, messages = launched.finish()
    assert is_met, f"the run ended with {statuses}: {messages}"
    return workdir


def restarted(
    break_it: Callable[[pathlib.Path], None], folder: pathlib.Path, *, refused: str = ""
) -> str:
    """Damages a killed run's workdir and restarts it; see `Attempt`.

    `refused` is a part of the line with which it must stop, "" if it must end as an unbroken one.
    Then everything that was saved is still there.
    """
    workdir, whole = folder / "run", runs.unbroken("small")
    shutil.copytree(_killed(), workdir)
    break_it(workdir)
    if not refused:
        return whole.end(workdir)
    saved = _contents(workdir / "checkpoints")
    launched = whole.start(workdir)
    statuses, message = launched.finish()
    if statuses != [1] or refused not in message or "Traceback" in launched.stderr[0]:
        return f"ended with {statuses}: {message}"
    return "" if _contents(workdir / "checkpoints") == saved else "saved files were deleted"


def _contents(folder: pathlib.Path) -> list[bytes]:
    """The files of a folder, whatever their names."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(hashlib.sha256(path.read_bytes()).digest() for path in files)


def _steps(workdir: pathlib.Path) -> list[pathlib.Path]:
    folder = workdir / "checkpoints" / "rl"
    return sorted(path for path in folder.iterdir() if path.name.isdecimal())


def _largest(folder: pathlib.Path) -> pathlib.Path:
    files = (path for path in folder.rglob("*") if path.is_file())
    return max(files, key=lambda path: path.stat().st_size)


def _last_flipped(workdir: pathlib.Path) -> None:
    damage(_largest(_steps(workdir)[-1]), "flipped", random.Random(1), ())


def _manifest(way: str, workdir: pathlib.Path) -> None:
    files = [step / integrity.MANIFEST for step in _steps(workdir)]
    damage(files[-1], way, random.Random(2), files)


def _all_flipped(workdir: pathlib.Path) -> None:
    for step in _steps(workdir):
        damage(_largest(step), "flipped", random.Random(3), ())


def _steps_swapped(workdir: pathlib.Path) -> None:
    steps = _steps(workdir)
    for path in steps:
        path.rename(path.with_name(f"{path.name}.x"))
    for path, other in zip(steps, [*steps[1:], steps[0]], strict=True):
        path.with_name(f"{path.name}.x").rename(other)


def _logs(workdir: pathlib.Path) -> None:
    """All that a run writes for people. The damaged lines of metrics.jsonl are further ones."""
    rng = random.Random(4)
    metrics = workdir / "metrics.jsonl"
    metrics.write_bytes(b'{"stage": "rl", "st\xff\n[[[\n' + metrics.read_bytes() + b'{"stage"')
    for name in ("rollouts.jsonl", "report.jsonl", "starts.jsonl"):
        for _ in range(5):
            damage(workdir / name, "flipped", rng, ())
    for name in ("config.json", "report.html"):
        damage(workdir / name, "cut", rng, ())
    (workdir / "run.lock").write_bytes(b"\xff\x00" * 50)


def _programs(folder: pathlib.Path) -> str:
    """Programs in the cache, in all ways by turns; they are put back, as other attempts need them.

    JAX's keys depend on the path of the cache, so that it cannot be copied.
    """
    whole, rng = runs.unbroken("small"), random.Random(5)
    programs = sorted(whole.cache.glob("*-cache"), key=lambda path: path.stat().st_size)[::6]
    before = {path: path.read_bytes() for path in programs}
    for number, path in enumerate(programs):
        if path.exists() and path.stat().st_size:
            there = [each for each in programs if each.exists()]
            damage(path, WAYS[number % len(WAYS)], rng, there)
    damaged = {path: path.read_bytes() if path.exists() else b"" for path in programs}
    problem = whole.end(folder / "run")
    kept = [path.name for path in _used(programs) if path.read_bytes() == damaged[path]]
    for path, data in before.items():
        path.write_bytes(data)
    return problem or (f"damaged programs were kept: {kept}" if kept else "")


def _used(programs: Sequence[pathlib.Path]) -> Iterator[pathlib.Path]:
    """Those of the update, which every run uses."""
    return (path for path in programs if path.name.startswith("jit_update") and path.exists())


def _verdicts(folder: pathlib.Path) -> str:
    """A verdict with a flipped bit, in an evaluation that is done: it is answered again."""
    whole, workdir = runs.unbroken("small"), folder / "run"
    shutil.copytree(whole.workdir, workdir)
    path = workdir / "samples_rl.jsonl"
    text = path.read_text()
    first, *rest = text.splitlines(keepends=True)
    changed = first.replace('"acc": 0.0', '"acc": 1.0')
    path.write_text("".join([changed, *rest]))
    if changed == first:
        return "there was no wrong answer to change"
    statuses, message = whole.start(workdir, {"stages": "('evaluate',)"}).finish()
    if statuses != [0]:
        return f"ended with {statuses}: {message}"
    if path.read_text() != text:
        return "the samples differ"
    same = runs.metrics(workdir) == runs.metrics(whole.workdir)
    return "" if same else "other accuracies were written"


def _from_damaged_export(folder: pathlib.Path) -> str:
    """A run that starts from an export with one other digit in its config.json."""
    whole = runs.unbroken("small")
    shutil.copytree(whole.workdir / "export", folder / "export")
    path = folder / "export" / "config.json"
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    changes = {"model.path": folder / "export", "stages": "('evaluate',)", "model.backbone": "{}"}
    launched = whole.start(folder / "run", changes)
    statuses, message = launched.finish()
    is_told = "is damaged: config.json has another SHA-256" in message
    is_line = launched.stderr[0].count("\n") == 1
    is_refused = statuses == [1] and is_told and is_line
    return "" if is_refused else f"ended with {statuses}: {launched.stderr[0][-500:]}"


_SAME = "a damaged file never changes a result: it is not believed, and the run ends bit for bit"
_REFUSED = "a damaged file stops the run with a line that names it; nothing that was saved is lost"
_ANY = f"one of {', '.join(WAYS)}; {_NUM_DRAWN} times"
ATTEMPTS = (
    Attempt(_REFUSED, f"a file of an export: {_ANY}", _export),
    Attempt(_REFUSED, f"a file of prepared data: {_ANY}", _shards),
    Attempt(_SAME, f"evaluated samples: {_ANY}", _samples),
    Attempt(_SAME, "every sixth program in the compilation cache, in all ways", _programs),
    Attempt(_SAME, "an evaluated sample with another verdict", _verdicts),
    Attempt(
        _SAME, "the last checkpoint, a bit flipped", functools.partial(restarted, _last_flipped)
    ),
    *(
        Attempt(
            _SAME,
            f"sha256.json of the last checkpoint {way}",
            functools.partial(restarted, functools.partial(_manifest, way)),
        )
        for way in ("flipped", "removed")
    ),
    Attempt(
        _SAME,
        "metrics, rollouts, report, starts, config.json, run.lock at once",
        functools.partial(restarted, _logs),
    ),
    Attempt(
        _REFUSED,
        "all kept checkpoints, a bit flipped",
        functools.partial(restarted, _all_flipped, refused="is damaged ("),
    ),
    Attempt(
        _REFUSED,
        "every kept checkpoint in the place of another",
        functools.partial(restarted, _steps_swapped, refused="is damaged ("),
    ),
    Attempt(_REFUSED, "config.json of an export, a digit changed", _from_damaged_export),
)
