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


def test_bad_element_costs_itself_alone(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"a": 1}, {"a": "\xff"}, {"a": nope}, [1, 2], {"a": 5}]')
    rows = JsonRows(path)
    assert len(rows) == 5 and rows[0] == {"a": 1} and rows[4] == {"a": 5}
    for index, reason in ((1, "not UTF-8"), (2, "not JSON"), (3, "not an object")):
        with pytest.raises(Unusable, match=reason):
            _ = rows[index]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_byte_order_mark_costs_no_row(tmp_path, name):
    text = json.dumps(ROWS) if name.endswith(".json") else "\n".join(map(json.dumps, ROWS))
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    rows = JsonRows(tmp_path / name)
    assert [rows[i] for i in range(len(rows))] == ROWS


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_a_file_in_another_encoding_is_refused_with_the_way_out(tmp_path, encoding):
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n', encoding=encoding)
    with pytest.raises(ValueError, match=r"to be in UTF-8, got .*; convert it: iconv"):
        JsonRows(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(("depth", "is_kept"), [(63, True), (64, False), (900, False)])
def test_a_row_is_nested_64_deep_at_most(tmp_path, depth, is_kept):
    (tmp_path / "rows.jsonl").write_text(f'{{"a": {"[" * depth}{"]" * depth}}}')
    rows = JsonRows(tmp_path / "rows.jsonl")
    if is_kept:
        assert "a" in rows[0]
    else:
        with pytest.raises(Unusable, match="nested more than 64 deep"):
            _ = rows[0]


@pytest.mark.parametrize("text", ["", "{}", '[{"a": 1}, {"a"', '[{"a": "never closed}]', "5"])
def test_array_cut_short_is_refused(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="to be one complete JSON array; it may be truncated"):
        JsonRows(path)


def test_empty_array_and_file_have_no_rows(tmp_path):
    for name, text in (("a.json", " [ ] "), ("a.jsonl", "")):
        (tmp_path / name).write_text(text)
        assert len(JsonRows(tmp_path / name)) == 0
