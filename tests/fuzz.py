"""Malformed input of every kind: strategies that make it, and targets that read it as a run does.

A target takes what its strategy drew and returns an outcome:

    accepted    the input can be used, and keeps what the code behind it relies on
    refused     the command would end with this error of one line
    skipped     the row is left out and counted

Anything else is a failure: another exception, an error of several lines, more than `MAX_SECONDS`,
input that is used although it should not be. `tests/fuzz_test.py` runs few examples of each kind,
`python -m perf.faults --fuzz=10000` as many as are asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import io
import itertools
import json
import math
import pathlib
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save

from care_jax.batch import Example, Unusable
from care_jax.benchmarks import mathverse, mathvision, mathvista, mmmu, mmmu_pro
from care_jax.config.checks import check_config, fill_in
from care_jax.config.keys import leaves
from care_jax.data.prompts import open_tokenizer
from care_jax.data.readers import fields, jsonl, parquet, shards
from care_jax.data.rows import with_text_answers
from care_jax.devices.sharding import make_mesh
from care_jax.prompts.builder import PromptBuilder, backbone_config
from care_jax.prompts.images import fingerprint, open_image
from care_jax.report.pictures import data_uri
from care_jax.rewards.verifier import Verifier
from care_jax.run import integrity
from configs import tiny
from models.release import transfer

ACCEPTED, REFUSED, SKIPPED = "accepted", "refused", "skipped"
OUTCOMES = (ACCEPTED, REFUSED, SKIPPED)
MAX_SECONDS = 20.0  # of one example; the verifier's own limit is below it
VERIFIER_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes:
        strategy: draws an input.
        target: reads it, in an empty folder; returns how often each outcome came.
    """

    strategy: st.SearchStrategy
    target: Callable[[Any, pathlib.Path], Counter[str]]


def run(name: str, num_examples: int, seed: int | None = None) -> Counter[str]:
    """Reads that many examples of a kind; raises for the smallest one that fails.

    Args:
        name: of the kind.
        num_examples: to draw.
        seed: of what is drawn; None draws the same examples every time.

    Returns:
        how often each outcome came; an input of several rows has several.
    """
    kind, outcomes = KINDS[name], Counter()

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=seed is None,
        suppress_health_check=list(HealthCheck),
    )
    @given(kind.strategy)
    def read(drawn):
        with tempfile.TemporaryDirectory() as folder, time_limit():
            outcomes.update(kind.target(drawn, pathlib.Path(folder)))

    (read if seed is None else hypothesis.seed(seed)(read))()
    return outcomes


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Fails if what is inside takes too long; code that never comes back ends the process."""

    def fail(*_):
        raise AssertionError(f"took more than {MAX_SECONDS:g} seconds")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    faulthandler.dump_traceback_later(6 * MAX_SECONDS, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


def outcome_of(read: Callable[[], Any], *, names: tuple[str, ...] = ()) -> str:
    """The outcome of reading once; raises if it is none.

    Args:
        read: reads the input, and checks what it gets.
        names: texts of which an error must name one; () for no demand.
    """
    try:
        read()
        return ACCEPTED
    except Unusable as reason:
        check_line(reason)
        return SKIPPED
    except ValueError as error:
        check_line(error, names)
        return REFUSED


def check_line(error: Exception, names: tuple[str, ...] = ()) -> None:
    line = str(error)
    if not line or "\n" in line:
        raise AssertionError(f"expected an error of one line, got {line!r}") from error
    if names and not any(name in line for name in names):
        raise AssertionError(f"expected an error that names {names}, got {line!r}") from error


# What is drawn everywhere.

TEXTS = st.one_of(
    st.text(max_size=40),
    st.text("\u200b\ufeff\u2060 \t\n", max_size=5),
    st.sampled_from(["<image>", "<image1>?", "<image>" * 3, "<|image_pad|>", "\ud800", "A", "3"]),
    st.sampled_from(["<image" + "9" * 5000 + ">", "x" * 20_000, "../a.png", "/etc/hosts", "\0"]),
)
NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -math.inf, 0, -1, 1e308, 10**400, 2**63]),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Bytes of a good file with a few places changed, cut, or pasted twice."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["set", "cut", "insert", "truncate", "repeat"]))
        length = draw(st.integers(1, 16))
        if kind == "set":
            data[place : place + 1] = draw(st.binary(min_size=1, max_size=1))
        elif kind == "cut":
            del data[place : place + length]
        elif kind == "insert":
            data[place:place] = draw(st.binary(max_size=8))
        elif kind == "truncate":
            del data[place:]
        else:
            data[place:place] = data[place : place + length]
    return bytes(data)


# Configurations


@functools.cache
def _defaults() -> dict[str, Any]:
    return dict(sorted(_flat(tiny.get_config().to_dict()).items()))


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, each in value.items():
        name = f"{prefix}{key}"
        is_section = isinstance(each, dict) and each
        found |= _flat(each, f"{name}.") if is_section else {name: each}
    return found


_WORDS = st.sampled_from(
    ["", "rl", "sft", "care", "dapo", "synthetic", "mixture", "jsonl", "auto", "fsdp", "mmmu"]
)
_VALUES = {
    bool: st.booleans(),
    int: st.integers(-2, 600) | st.integers() | NUMBERS,
    float: st.floats(0, 2) | st.floats() | NUMBERS,
    str: _WORDS | TEXTS,
    tuple: st.recursive(
        st.integers(-2, 600) | st.floats() | _WORDS,
        lambda inner: st.lists(inner, max_size=3).map(tuple),
        max_leaves=6,
    ),
}


@st.composite
def _changes(draw: st.DrawFn) -> dict[str, Any]:
    """Values of one to three keys, mostly of the type that the key has."""
    names = draw(st.lists(st.sampled_from(list(_defaults())), min_size=1, max_size=3, unique=True))
    others = st.one_of(*_VALUES.values())
    return {name: draw(_VALUES.get(type(_defaults()[name]), others) | others) for name in names}


def read_config(changes: dict[str, Any], folder: pathlib.Path) -> Counter[str]:
    config = tiny.get_config()
    for key, value in changes.items():
        try:
            config.update_from_flattened_dict({key: value})
        except (
            TypeError,
            ValueError,
            OverflowError,
        ):  # of another type: `command_line` tells it in one line
            return Counter([REFUSED])

    def check() -> None:
        mesh = make_mesh(**config.mesh, devices=jax.devices()[:1])
        filled = fill_in(config, mesh)
        check_config(filled, mesh, list(changes))
        for key, value in leaves(filled):
            is_number = isinstance(value, int | float)
            assert not is_number or math.isfinite(value), f"{key} {value} was accepted"

    # An error may be about the other end of a rule that ties keys of one section together.
    names = tuple({part for key in changes for part in key.split(".")})
    return Counter([outcome_of(check, names=names)])


# Rows of data

GOOD = {"id": "good", "question": "<image>How many?", "answer": "3", "image": "a.png"}
FIELDS = (*itertools.chain(*fields.FIELDS.values()), "size")


@functools.cache
def _picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(file, "PNG")
    return file.getvalue()


@functools.cache
def _prompts() -> PromptBuilder:
    config = tiny.get_config()
    tokenizer = open_tokenizer("")
    return PromptBuilder(
        tokenizer,
        backbone_config(config.model.backbone.to_dict(), tokenizer),
        min_pixels=256,
        max_pixels=4096,
        buckets=config.data.buckets,
    )


def check_example(example: Example) -> None:
    """What the code behind a source relies on, without asking again."""
    assert example.question.count("<image>") == len(example.images)
    assert isinstance(example.answer, list | dict) or example.answer.strip("\u200b\ufeff\u2060 ")
    answer = json.dumps(example.answer, allow_nan=False)  # raises ValueError for NaN
    assert answer and example.question.strip()
    _prompts().tokenize(example)
    example.response and _prompts().response_tokens(example.response)
    record = shards.to_record(example)
    copy = shards.from_record(record)
    assert (copy.question, copy.id) == (example.question, example.id)


def read_row(source: Any, index: int) -> str:
    """Reads a row of an open source; an error that ends the run is a failure."""
    outcome = outcome_of(lambda: check_example(source[index]))
    assert outcome != REFUSED, "a row must be left out, not end the run"
    return outcome


def _lines() -> st.SearchStrategy[bytes]:
    objects = st.builds(
        lambda changes: GOOD | changes,
        st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=4),
    ).map(lambda row: json.dumps(row).encode())
    nested = st.sampled_from([1, 63, 64, 900, 100_000]).map(
        lambda depth: b'{"question": "?", "answer": %s%s}' % (b"[" * depth, b"]" * depth)
    )
    line = objects | st.binary(max_size=60) | damaged(objects) | nested
    return line.map(lambda text: text.replace(b"\n", b" ").replace(b"\r", b" "))


def read_jsonl(drawn: tuple[list[bytes], bytes, bool], folder: pathlib.Path) -> Counter[str]:
    lines, mark, has_reward = drawn
    (folder / "a.png").write_bytes(_picture())
    good = json.dumps(GOOD).encode()
    (folder / "rows.jsonl").write_bytes(mark + b"\n".join([good, *lines, good]))
    source = jsonl.open_rows(str(folder / "rows.jsonl"))
    source = source if has_reward else with_text_answers(source)
    outcomes = [read_row(source, index) for index in range(len(source))]
    assert outcomes[0] == outcomes[-1] == ACCEPTED, "a good row was lost"
    return Counter(outcomes[1:-1])


def read_json(data: bytes, folder: pathlib.Path) -> Counter[str]:
    (folder / "a.png").write_bytes(_picture())
    (folder / "rows.json").write_bytes(data)
    sources = []
    path = str(folder / "rows.json")
    outcome = outcome_of(lambda: sources.append(jsonl.open_rows(path)), names=(path,))
    if outcome == REFUSED:
        return Counter([REFUSED])
    return Counter(read_row(sources[0], index) for index in range(len(sources[0])))


_CELLS = {
    "string": (
        pa.string(),
        st.sampled_from(["How many?", "3", "<image>Which?"])
        | TEXTS.map(lambda text: text.encode(errors="replace").decode()),
    ),
    "not UTF-8": (pa.binary(), st.binary(max_size=12)),
    "int": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "float": (pa.float64(), st.floats()),
    "bool": (pa.bool_(), st.booleans()),
    "decimal": (pa.decimal128(30, 2), st.decimals(-999, 999, places=2)),
    "time": (pa.timestamp("ns"), st.integers(-(2**63) + 1, 2**63 - 1)),
    "date": (pa.date64(), st.integers(-(2**36), 2**36).map(lambda day: day * 86_400_000)),
    "duration": (pa.duration("s"), st.integers(-(2**62), 2**62)),
    "list": (pa.list_(pa.string()), st.lists(st.text("ab<image>1", max_size=9), max_size=3)),
    "floats": (pa.list_(pa.float32()), st.lists(st.floats(width=32), max_size=3)),
    "map": (pa.map_(pa.string(), pa.int64()), st.lists(st.tuples(st.text(max_size=3), st.just(1)))),
    "null": (pa.null(), st.none()),
    "image": (
        pa.struct({"bytes": pa.binary(), "path": pa.string()}),
        st.fixed_dictionaries(
            {
                "bytes": st.builds(_picture) | st.none() | st.binary(max_size=20),
                "path": st.none() | st.sampled_from(["a.png", "../a.png", "/etc/hosts", "gone"]),
            }
        ),
    ),
}
_COLUMNS = ("question", "answer", "images", "extra")


@st.composite
def _tables(draw: st.DrawFn) -> tuple[dict[str, pa.Array], bytes | None]:
    """Columns of one type each, and the bytes of the file in place of a whole one."""
    num_rows = draw(st.integers(1, 4))
    usual = {"question": "string", "answer": "string", "images": "image"}
    columns = {}
    for name in _COLUMNS:
        kinds = st.sampled_from(sorted(_CELLS))
        is_usual = name in usual and draw(st.integers(0, 3)) > 0
        kind = usual[name] if is_usual else draw(kinds)
        type_, cells = _CELLS[kind]
        values = draw(st.lists(st.none() | cells, min_size=num_rows, max_size=num_rows))
        column = pa.array(values, type_)
        if kind == "not UTF-8":  # bytes that the file calls text
            column = pa.Array.from_buffers(pa.string(), num_rows, column.buffers())
        columns[name] = column
    is_whole = draw(st.integers(0, 3)) > 0
    return columns, None if is_whole else draw(damaged(st.just(_written(columns))))


def _written(columns: dict[str, pa.Array]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, row_group_size=2)
    return file.getvalue()


def read_parquet(
    drawn: tuple[dict[str, pa.Array], bytes | None], folder: pathlib.Path
) -> Counter[str]:
    columns, bad = drawn
    (folder / "a.png").write_bytes(_picture())
    path = folder / "rows.parquet"
    path.write_bytes(_written(columns) if bad is None else bad)
    named = dict.fromkeys(fields.FIELDS, "") | {name: name for name in _COLUMNS[:3]}
    sources = []
    outcome = outcome_of(
        lambda: sources.append(parquet.open_rows(str(path), split="", columns=named)),
        names=(str(path),),
    )
    if outcome == REFUSED:
        assert bad is not None, "a whole file was refused"
        return Counter([REFUSED])
    outcomes = Counter()
    for index in range(len(sources[0])):
        # A broken row group ends the run, with the file's name: its rows cannot be told apart.
        outcome = outcome_of(lambda: check_example(sources[0][index]), names=(str(path),))  # noqa: B023
        assert bad is not None or outcome != REFUSED, "a row must be left out, not end the run"
        outcomes[outcome] += 1
    return outcomes


# Images


@functools.cache
def _image_files() -> tuple[bytes, ...]:
    """A small file of every format and mode that Pillow writes."""
    files = []
    for format_ in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "MPO"):
        for mode in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "I;16", "I", "F", "LAB"):
            noise = np.random.default_rng(0).integers(0, 256, 24 * 20 * 8, np.uint8).tobytes()
            image = Image.new(mode, (24, 20))
            image.frombytes(noise[: len(image.tobytes())])
            for options in ({}, {"transparency": 0}, {"compression": "tiff_lzw"}):
                file = io.BytesIO()
                with contextlib.suppress(Exception):  # not every format has every mode
                    image.save(file, format_, **options)
                    files.append(file.getvalue())
    return tuple(dict.fromkeys(files))


def _images() -> st.SearchStrategy[bytes]:
    whole = st.deferred(lambda: st.sampled_from(_image_files()))
    return whole | damaged(whole) | st.binary(max_size=60)


def read_image(data: bytes, folder: pathlib.Path) -> Counter[str]:
    def read() -> None:
        image = open_image(data)
        assert image.mode not in ("I", "F", "LAB") and "16" not in image.mode
        fingerprint(data)
        example = Example("i", "", (data,), "<image>?", "1")
        _prompts().tokenize(example)
        assert data_uri(data, max_side=32)

    outcome = outcome_of(read)
    assert outcome != REFUSED, "a row must be left out, not end the run"
    return Counter([outcome])


# Weights of a release

_TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(6, dtype=np.float16),
}


def _headers() -> st.SearchStrategy[bytes]:
    """Safetensors files with another header in front of the same bytes."""
    whole = save(_TENSORS)
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])

    def with_header(changes: dict[str, Any]) -> bytes:
        text = json.dumps(header | changes).encode(errors="replace")
        return struct.pack("<Q", len(text)) + text + whole[8 + length :]

    numbers_ = st.integers(-2, 100) | st.sampled_from([2**63, 2**64, 10**30])
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F16", "BF16", "I64", "F8_E4M3", "", "F31"]) | JSON,
            "shape": st.lists(numbers_, max_size=4) | JSON,
            "data_offsets": st.lists(numbers_, max_size=3) | JSON,
        }
    )
    names = st.sampled_from(["a", "b", "c", "__metadata__", "", "a/../b"])
    changed = st.dictionaries(names, entry | JSON, min_size=1, max_size=3).map(with_header)
    return changed | damaged(st.just(whole)) | st.binary(max_size=40)


def read_release(drawn: tuple[bytes, bytes | None], folder: pathlib.Path) -> Counter[str]:
    data, index = drawn
    name = transfer.SINGLE if index is None else "part.safetensors"
    (folder / name).write_bytes(data)
    if index is not None:
        (folder / transfer.INDEX).write_bytes(index)

    def read() -> None:
        for entry in transfer.read_headers(folder).values():
            with transfer.open_tensor(entry) as tensor:
                assert tuple(tensor.get_shape()) == entry.shape

    return Counter([outcome_of(read, names=(str(folder),))])


def _indices() -> st.SearchStrategy[bytes]:
    files = st.sampled_from(["part.safetensors", "gone", "", "../x", "."])
    maps = st.dictionaries(st.sampled_from("abc"), files | JSON) | JSON
    index = maps.map(lambda found: json.dumps({"weight_map": found}).encode())
    return index | damaged(index) | JSON.map(lambda value: json.dumps(value).encode())


# Checkpoints

_FILES = {"state/manifest.ocdbt": b"\x0c\xdb" + bytes(range(60)), "state/d/0": b"x" * 90, "m": b""}


@st.composite
def _damages(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file of a checkpoint and what stands in it now, at least one byte of it another."""
    name = draw(st.sampled_from([*_FILES, integrity.MANIFEST]))
    with tempfile.TemporaryDirectory() as folder:
        whole = (_checkpoint(pathlib.Path(folder)) / name).read_bytes()
    if whole and draw(st.booleans()):
        place, other = draw(st.integers(0, len(whole) - 1)), draw(st.integers(1, 255))
        return name, whole[:place] + bytes([whole[place] ^ other]) + whole[place + 1 :]
    bad = draw(damaged(st.just(whole)) | st.binary(max_size=80))
    return name, bad if bad != whole else bad + b"x"


def _checkpoint(folder: pathlib.Path) -> pathlib.Path:
    for name, data in _FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    integrity.write_manifest(folder)
    return folder


def read_checkpoint(drawn: tuple[str, bytes], folder: pathlib.Path) -> Counter[str]:
    name, data = drawn
    path = _checkpoint(folder) / name
    before = path.read_bytes()
    path.write_bytes(data)
    damage = integrity.find_damage(folder)
    if not damage:  # a space more in the manifest's JSON changes nothing
        assert name == integrity.MANIFEST and json.loads(data) == json.loads(before)
        return Counter([ACCEPTED])
    check_line(ValueError(damage), (name,))
    return Counter([REFUSED])


# Answers

GOLD = "7319"
_PIECES = (
    *("\\frac", "\\sqrt", "\\boxed{", "\\left(", "\\right)", "\\text{", "\\begin{matrix}", "\\pi"),
    *("{", "}", "(", ")", "[", "]", "^", "_", "$", "&", "\\\\", "|", "!", "=", "<", ">", "\\le"),
    *("0", "1", "9", "7319", "999999999", ".", ",", "+", "-", "*", "/", "%", "e", "x", "sin"),
    *("<answer>", "</answer>", "<think>", "</think>", "\u200b", "\ud800", "\n", " ", "½", "²", "π"),
    *("A", "B", "cm", "^\\circ", "factorial", "__import__('os')", "**", "∞", "\\infty", "nan"),
)
_FORMS = (
    *("\\frac{{{}}}{{{}}}", "({})^{{{}}}", "{}+{}", "{}-{}", "{}\\cdot {}", "{}, {}", "({}, {}]"),
    *("\\begin{{pmatrix}}{}&{}\\end{{pmatrix}}", "{} = {}", "{} < {}", "\\binom{{{}}}{{{}}}"),
    *("\\sqrt{{{}}}", "({})!", "\\{{{}\\}}", "|{}|", "\\sin {}", "\\log {}", "{} cm", "{}\\%"),
    *("\\int {} dx", "\\sum_{{n=1}}^{{{}}} n", "\\boxed{{{}}}", "$ {} $", "-{}"),
)
_FORMULAS = st.recursive(
    st.sampled_from(["1", "2", "0", "3.5", GOLD, "x", "\\pi", "10^{100}", "99999999999", "e"]),
    lambda inner: st.builds(
        lambda form, one, other: form.format(one, other), st.sampled_from(_FORMS), inner, inner
    ),
    max_leaves=6,
)
GOLDS = (GOLD, "\\frac{1}{2}", "x^2+1", "(1, 2]", "\\sqrt{3}", "12 cm", "\\{1, 2\\}", "x < 3")
ANSWERS = st.one_of(
    st.none(),  # the gold answer itself
    _FORMULAS,
    st.sampled_from(GOLDS),
    st.lists(st.sampled_from(_PIECES), max_size=30).map("".join),
    st.tuples(st.sampled_from(_PIECES), st.integers(1, 3000)).map(lambda pair: pair[0] * pair[1]),
    st.text(max_size=60),
)


@functools.cache
def _verifier() -> Verifier:
    return Verifier(num_workers=1, timeout=VERIFIER_SECONDS)


def read_answer(drawn: tuple[str | None, str, bool, bool], folder: pathlib.Path) -> Counter[str]:
    answer, gold_answer, is_spanned, has_choices = drawn
    answer = gold_answer if answer is None else answer
    text = f"<think>x</think><answer>{answer}</answer>" if is_spanned else answer
    choices = ("12", gold_answer, "x") if has_choices else ()
    gold = Example("a", "", (), "?", gold_answer, choices=choices)
    (verdict,) = _verifier().verify([text], [gold])
    check_line(ValueError(verdict.reason))
    assert verdict.acc in (0.0, 1.0) and verdict.fmt in (0.0, 1.0)
    if verdict.acc and gold_answer == GOLD:
        is_letter = has_choices and "B" in answer.upper()
        assert is_letter or any(c.isnumeric() for c in answer), f"{answer!r} passed for {GOLD}"
    return Counter([ACCEPTED if verdict.acc else REFUSED])


_PARTS = st.lists(
    st.sampled_from(
        (
            *_PIECES,
            "\t",
            "so ",
            "is ",
            "Answer:",
            "answer ",
            "(A)",
            "oxed{",
            "E9",
            "1,111",
            "٣",
            "㎝",
            "\ufdfa",
        )
    ),
    max_size=3,
).map("".join)
# A row per benchmark and kind of answer; A or 7 is right.
_RIGHT = st.sampled_from(("", "7", "A", "The answer is 7.", "Answer: A"))
RESPONSES = st.builds(
    lambda before, repeated, number, after, right: before + repeated * number + after + right,
    *(_PARTS, _PARTS, st.integers(0, 3000), _PARTS, _RIGHT),
)
_CHOICE = {"options": "['7', '8']", "answer": "A"}
_ROWS = (
    *((mathvista, {"answer_type": kind, "answer": "7"}) for kind in ("integer", "float", "list")),
    (mathvista, {"answer_type": "text", "choices": ["7", "8"], "answer": "7"}),
    *((mathvision, row) for row in ({"options": [], "answer": "7"}, _CHOICE)),
    (mathverse, {"question_type": "free-form", "answer": "7"}),
    (mathverse, _CHOICE | {"question_type": "multi-choice", "question": "Choices:\nA:7\nB:8"}),
    (mmmu, {"question_type": "open", "options": "[]", "answer": "7"}),
    *((scorer, _CHOICE) for scorer in (mmmu, mmmu_pro)),
)


def read_response(drawn: tuple[str, int], folder: pathlib.Path) -> Counter[str]:
    text, number = drawn
    scorer, row = _ROWS[number]
    is_right = scorer.is_correct(text, row)
    assert is_right in (True, False) and (scorer.parse(text, row) is not None or not is_right)
    return Counter([ACCEPTED if is_right else REFUSED])


KINDS: dict[str, Kind] = {
    "config": Kind(_changes(), read_config),
    "jsonl": Kind(
        st.tuples(
            st.lists(_lines(), min_size=1, max_size=3),
            st.sampled_from([b"", b"\xef\xbb\xbf"]),
            st.booleans(),
        ),
        read_jsonl,
    ),
    "json": Kind(
        damaged(
            st.lists(JSON.map(lambda row: GOOD | {"answer": row}), max_size=3).map(
                lambda rows: json.dumps(rows).encode()
            )
        ),
        read_json,
    ),
    "parquet": Kind(_tables(), read_parquet),
    "image": Kind(_images(), read_image),
    "safetensors": Kind(st.tuples(_headers(), st.none() | _indices()), read_release),
    "checkpoint": Kind(_damages(), read_checkpoint),
    "answer": Kind(
        st.tuples(
            ANSWERS,
            st.sampled_from(GOLDS),
            st.integers(0, 7).map(bool),  # has an answer span
            st.integers(0, 3).map(lambda number: not number),  # has choices
        ),
        read_answer,
    ),
    "response": Kind(st.tuples(RESPONSES, st.sampled_from(range(len(_ROWS)))), read_response),
}


def timed(name: str, num_examples: int, seed: int | None) -> tuple[Counter[str], float]:
    """`run`, and the seconds it took."""
    began = time.perf_counter()
    return run(name, num_examples, seed), time.perf_counter() - began
