"""JSON files: rows found without parsing them, a bad one costing itself alone."""

import json

import pytest

from care_jax.batch import Unusable
from care_jax.data.readers.json_rows import JsonRows

ROWS = [
    {"text": 'brackets ] } in "quotes" and \\'},
    {"nested": {"list": [1, [2, {"deep": "]"}]], "empty": {}}},
    {},
    {"unicode": "√ \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")},
]


@pytest.mark.parametrize("indent", [None, 2])
def test_elements_of_an_array_are_those_json_reads(tmp_path, indent):
    path = tmp_path / "rows.json"
    for escaped in (True, False):
        path.write_text(json.dumps(ROWS, indent=indent, ensure_ascii=escaped))
        rows = JsonRows(path)
        assert [rows[i] for i in range(len(rows))] == ROWS
        assert list(rows.numbers) == [1, 2, 3, 4]


def test_lines_keep_their_numbers(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + "\n\n".join(json.dumps(row) for row in ROWS) + "\n")
    rows = JsonRows(path)
    assert [rows[i] for i in range(len(rows))] == ROWS
    assert list(rows.numbers) == [2, 4, 6, 8]


UNUSABLE = {
    "bytes": (b'{"a": "\xff"}', "not UTF-8"),
    "word": (b'{"a": nope}', "not JSON"),
    "brackets": (b"[" * 100_000 + b"]" * 100_000, "not JSON"),
    "list": (b"[1, 2]", "not an object"),
    "deep": (b'{"a": %s}' % (b"[" * 64 + b"]" * 64), "nested more than 64 deep"),
    "lone surrogate": (b'{"a": [{"\\ud800": 1}]}', "lone surrogate in the text"),
}


@pytest.mark.parametrize(("row", "reason"), UNUSABLE.values(), ids=UNUSABLE)
@pytest.mark.parametrize("form", [b'[{"a": 1}, %s, {"a": 5}]', b'{"a": 1}\n%s\n{"a": 5}'])
def test_bad_row_costs_itself_alone(tmp_path, row, reason, form):
    path = tmp_path / ("rows.json" if form.startswith(b"[") else "rows.jsonl")
    path.write_bytes(form % row)
    rows = JsonRows(path)
    assert len(rows) == 3 and rows[0] == {"a": 1} and rows[2] == {"a": 5}
    with pytest.raises(Unusable, match=reason):
        _ = rows[1]


def test_a_row_may_be_nested_64_deep(tmp_path):
    (tmp_path / "rows.jsonl").write_text(f'{{"a": {"[" * 63}{"]" * 63}}}')
    assert "a" in JsonRows(tmp_path / "rows.jsonl")[0]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_byte_order_mark_costs_no_row(tmp_path, name):
    text = json.dumps(ROWS) if name.endswith(".json") else "\n".join(map(json.dumps, ROWS))
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    rows = JsonRows(tmp_path / name)
    assert [rows[i] for i in range(len(rows))] == ROWS


CUT = "to be one complete JSON array; it may be truncated"
REFUSED = {
    "absent": (
        None,
        "expected a file of JSON rows, got .*rows.json', which does not exist; correct",
    ),
    "UTF-16": ("[]".encode("utf-16"), "to be in UTF-8, got .*; convert it: iconv"),
    "UTF-32": ("[]".encode("utf-32"), "to be in UTF-8, got .*; convert it: iconv"),
    "empty": (b"", CUT),
    "an object": (b'{"data": [{}]}', "JSON array; it is an object with 'data'; write the rows"),
    "rows in lines": (b'{"a": 1}\n{"a": 2}', CUT),
    "Arrow": (b"ARROW1", "an Arrow file; write it with pyarrow"),
    "a stream of Arrow": (b"\xff" * 4 + bytes(8), "an Arrow stream; write it with datasets"),
    "tar": (b"a.json".ljust(257, b"\0") + b"ustar", "a tar archive; unpack it"),
    "no end": (b'[{"a": 1}, {"a"', CUT),
    "no quotation mark": (b'[{"a": "never closed}]', CUT),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_file_that_is_not_a_whole_array_is_refused(tmp_path, content, message):
    path = tmp_path / "rows.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        JsonRows(path)


def test_empty_array_and_file_have_no_rows(tmp_path):
    for name, text in (("a.json", " [ ] "), ("a.jsonl", "")):
        (tmp_path / name).write_text(text)
        assert len(JsonRows(tmp_path / name)) == 0
