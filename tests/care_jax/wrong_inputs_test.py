"""What a newcomer types wrong, and the decisive word of the line that ends the command."""

import gzip
import json

import pytest

ROW = {"question": "How many?", "answer": "3"}
TRAIN = ("--config.data.train.source=jsonl", "--config.data.train.path=FOLDER/rows.jsonl")


def lines(*rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def with_row(**fields):
    return lines(ROW | fields)


# Content of rows.jsonl, the training data, and what must be said.
CONTENTS = {
    "other keys": (
        lines({"problem": "?", "solution": "3"}),
        "data.train: none of the first 1 rows can be used: 1 x no question (first is row 1: it has "
        "problem, solution; expected question and answer",
    ),
    "no answer": (lines({"question": "?", "label": 3}), "no answer (first is row 1: it has questi"),
    "an empty answer": (with_row(answer=None), "no answer (first is row 1: it has question, answ"),
    "a list as answer": (with_row(answer=["3"]), "answer is a list or an object, which needs ver"),
    "a truth value as answer": (with_row(answer=True), "nor a number (first is row 1: True)"),
    "a list as question": (with_row(question=["a"]), "question is not text (first is row 1: ['a']"),
    "no image there": (
        with_row(image="img/a.png"),
        "image missing (first is row 1: FOLDER/img/a.p",
    ),
    "a number as image": (with_row(image=5), "neither a path nor bytes (first is row 1: 5)"),
    "an object as images": (with_row(images={"a": 1}), "nor bytes (first is row 1: {'a': 1})"),
    "numbers as images": (with_row(images=[1, 2]), "neither a path nor bytes (first is row 1: 1)"),
    "a URL": (with_row(image="https://x.org/a.png"), "image is a URL, which is not read; save it"),
    "another folder": (with_row(image="/tmp/a.png"), "needs images_outside (first is row 1: /tmp/"),
    "no picture": (with_row(image="rows.jsonl"), "TIFF, or damaged (first is row 1: FOLDER"),
    "placeholders": (with_row(question="<image>?"), "differ in number (first is row 1: 0 and 1)"),
    "a text as options": (with_row(options="1,2"), "texts and numbers (first is row 1: '1,2')"),
    "no such option": (with_row(options=["1", "2"]), "among the choices (first is row 1: '3')"),
    "too long": (with_row(question="word " * 99), "fits no bucket (first is row 1: "),
    "single quotes": (
        b"\n{'question': 'a'}\n",
        "1 x not JSON (first is row 1: line 2 of FOLDER/rows.jsonl begins \"{'question': 'a'}\")",
    ),
    "CSV": (b"question,answer\n?,3\n", "2 x not JSON (first is row 1: line 1 of FOLDER/rows.jsonl"),
    "an array": (json.dumps([ROW]).encode(), "not an object (first is row 1: line 1 of FOLDER"),
    "Latin-1": ('{"question": "é"}'.encode("latin-1"), "not UTF-8 (first is row 1: line 1 of FOLD"),
    "UTF-16": (lines(ROW).decode().encode("utf-16"), "the byte order mark of UTF-16"),
    "empty": (
        b"",
        "data.train must have rows, got a source 'jsonl' without any in 'FOLDER/rows.js",
    ),
    "gzip": (gzip.compress(lines(ROW)), "compressed with gzip; decompress it with gunzip"),
    "zip": (b"PK\x03\x04", "a zip archive; unpack it"),
    "parquet": (b"PAR1", "a parquet file; set the source to 'parquet'"),
}
DATA = "--config.data"
OTHER = (
    *(f"{DATA}.test.source=jsonl", f"{DATA}.test.path=FOLDER/other.jsonl"),
    f"{DATA}.test.num_examples=0",
)
# Flags, and what must be said; FOLDER has rows.jsonl with one row.
FLAGS = {
    "no such file": ([f"{DATA}.train.path=nowhere.jsonl"], "'nowhere.jsonl', which does not exist"),
    "a folder": (
        [f"{DATA}.train.path=FOLDER"],
        "data.train: expected a file of JSON rows, got 'FO",
    ),
    "no training path": (
        [f"{DATA}.train.path="],
        "data.train.path must name a file, a folder or a",
    ),
    "no cold start's path": (
        [f"{DATA}.sft.source=jsonl", f"{DATA}.sft.path=", "--config.stages=sft"],
        "data.sft.path must name a file, a folder or a hub id for the source 'jsonl', got ''; set",
    ),
    "no held-out path": (
        [f"{DATA}.test.source=jsonl", f"{DATA}.test.path=", "--config.stages=evaluate"],
        "data.test.path must name",
    ),
    "no held-out row": (
        [*OTHER, "--config.stages=evaluate"],
        "no row of data.test can be used: 1 x no question (first is row 1: it has a; expected",
    ),
    "no cold start's source": (
        [f"{DATA}.sft.source=", "--config.stages=sft"],
        "mixture, got ''; set config.data.sft.source, or leave 'sft' out of --config.stages",
    ),
    "no responses": (
        [
            *(f"{DATA}.sft.source=jsonl", f"{DATA}.sft.path=FOLDER/rows.jsonl"),
            *(f"{DATA}.sft.num_examples=0", "--config.stages=sft"),
        ],
        "data.sft: source 'jsonl' has no responses to imitate",
    ),
    "a misspelt source": ([f"{DATA}.train.source=JSON"], "mixture, got 'JSON'; write 'jsonl'"),
    "CSV as source": ([f"{DATA}.train.source=csv"], "got 'csv'; set config.data.train.source"),
    "too many rows": ([f"{DATA}.train.num_examples=9"], "num_examples 9 exceeds the 1 rows of 'FO"),
    "a file as section": ([f"{DATA}.test=rows.jsonl"], "--config.data.test is a section; write -"),
    "no columns": (
        [f"{DATA}.train.source=parquet", f"{DATA}.train.path=FOLDER/rows.parquet"],
        "data.train: columns.question must name a column of FOLDER/rows.parquet (it has q, gold), ",
    ),
    "no such column": (
        [
            *(f"{DATA}.train.source=parquet", f"{DATA}.train.path=FOLDER/rows.parquet"),
            *(f"{DATA}.train.columns.question=q", f"{DATA}.train.columns.answer=a"),
        ],
        "data.train: expected columns a in FOLDER/rows.parquet, got q, gold; change",
    ),
    "no such objective": (["--config.rl.objective=ppo"], "must be one of care, grpo, dapo, gspo"),
    "no such stage": (["--config.stages=train"], "one of sft, rl, evaluate, export, as in ('sft',"),
    "a fraction of steps": (
        ["--config.rl.num_steps=1.5"],
        "--config.rl.num_steps=1.5: invalid lit",
    ),
    "negative steps": (["--config.rl.num_steps=-1"], "rl.num_steps must lie in [1, inf), got -1"),
    "no truth value": (["--config.care.robust=maybe"], "--config.care.robust=maybe: ('Non-boolean"),
    "flat buckets": (["--config.data.buckets=(512,99)"], "of ((512, 2048), (1024, 4096)), got (51"),
    "no such release": (
        ["--config.model.backbone={}", "--config.model.path=nowhere"],
        "got 'nowhere', which does not exist; correct model.path",
    ),
    "a dash": (["--dry-run"], "Unknown command line flag 'dry-run'. Did you mean: dry_run ?"),
    "an address": (["--workdir=gs://bucket/w"], "expected a folder, got --workdir=gs://bucket/w; "),
    "a file as workdir": (
        ["--nodry_run", "--workdir=FOLDER/rows.jsonl"],
        "File exists: FOLDER/rows.jsonl, which is a file; choose another --workdir",
    ),
    "no workdir": (["--workdir="], "--workdir must name a folder, got ''"),
}


@pytest.fixture
def ended(one_device, run_command, tmp_path):
    """The last line of a dry run that fails, on rows.jsonl and with further flags."""

    def ended(content, flags=()):
        (tmp_path / "rows.jsonl").write_bytes(content)
        given = ("--config=configs/tiny.py", "--workdir=FOLDER/run", "--dry_run", *TRAIN)
        given += ("--config.stages=rl", f"{DATA}.train.num_examples=0")
        status, error = run_command(
            *(each.replace("FOLDER", str(tmp_path)) for each in (*given, *flags))
        )
        assert not (tmp_path / "run").exists() and "Traceback" not in error
        assert status == 1
        return error.replace(str(tmp_path), "FOLDER").splitlines()[-1]

    return ended


@pytest.mark.parametrize(("content", "said"), CONTENTS.values(), ids=CONTENTS)
def test_wrong_rows_are_told_with_what_was_found(ended, content, said):
    assert said in ended(content)


@pytest.mark.parametrize(("flags", "said"), FLAGS.values(), ids=FLAGS)
def test_wrong_flags_are_told_with_what_to_write(ended, tmp_path, flags, said):
    (tmp_path / "other.jsonl").write_bytes(lines({"a": 1}))
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    pa.parquet.write_table(pa.table({"q": ["?"], "gold": ["1"]}), tmp_path / "rows.parquet")
    assert said in ended(lines(ROW), flags)
