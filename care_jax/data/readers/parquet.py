"""Parquet files: random access to rows, and questions from any release given its column names.

Image cells are structs {bytes, path}, paths, or lists of either. Columns that are not named become
`Example.extra`, for reward functions, except those that hold bytes. Row groups are read whole, so
sequential access is cheap and random access is not: train on shards from `commands.prepare`.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import pathlib
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from care_jax.batch import Example, Unusable
from care_jax.data.readers import formats, hub
from care_jax.data.readers.fields import FIELDS, example_of, names_of, value_at
from care_jax.data.rows import Rows, locate

# Columns that are read without being named.
_DEFAULTS = {part: (part,) if part in ("context", "units") else () for part in FIELDS}
MAX_GROUP_BYTES = 2**31  # of the columns that are read of a row group, decoded
MAX_CELL_BYTES = 2**28
_DECODED_BYTES = 2**29  # at a time, if every row had all values of the group
_NUM_CACHED = 2  # row groups
_SLOW_GROUP_BYTES = 2**26


class ParquetRows:
    """Random access to some or all columns of several files of one schema; caches row groups."""

    def __init__(self, paths: Sequence[pathlib.Path], columns: Sequence[str] | None = None):
        self._columns = None if columns is None else list(columns)
        self._groups: list[tuple[pathlib.Path, int]] = []
        counts = []
        for path in paths:
            file = _open(path)
            absent = set(self._columns or ()) - set(file.schema_arrow.names)
            if absent:
                raise ValueError(
                    f"expected columns {', '.join(sorted(absent))} in {path}, got "
                    f"{', '.join(file.schema_arrow.names)}; change the source's columns"
                )
            for group in range(file.num_row_groups):
                self._groups.append((path, group))
                counts.append(file.metadata.row_group(group).num_rows)
        if min(counts, default=0) < 0:
            raise ValueError(
                f"the row groups of {paths[0].parent} must have 0 rows or more, got {min(counts)}; "
                "download the files again"
            )
        self._ends = list(itertools.accumulate(counts))
        self._group = functools.lru_cache(_NUM_CACHED)(self._read)
        self._were_read: set[int] = set()
        self._has_warned = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        group, row = locate(self._ends, index)
        with self._lock:  # so that threads do not read the same group twice
            cells = self._group(group)
        if cells is None:
            raise Unusable(
                f"in a row group of more than {MAX_GROUP_BYTES >> 30} GiB, or "
                f"{MAX_CELL_BYTES >> 20} MiB a row; write the file with smaller ones"
            )
        if any(column.slice(row, 1).nbytes > MAX_CELL_BYTES for column in cells.values()):
            raise Unusable(f"a cell of more than {MAX_CELL_BYTES >> 20} MiB")
        try:
            return {name: column[row].as_py() for name, column in cells.items()}
        except UnicodeDecodeError as error:
            raise Unusable("not UTF-8") from error
        except (ValueError, ArithmeticError) as error:
            raise Unusable("a date or time that Python cannot hold") from error

    def _read(self, group: int) -> dict[str, Any] | None:
        """The row group's pyarrow columns by name; None if they are too large."""
        path, number = self._groups[group]
        try:
            table = _read_group(path, number, self._columns)
        except (OSError, ValueError, MemoryError) as error:
            raise ValueError(
                f"row group {number} of {path} cannot be read ({_first_line(error)}); download "
                "the file again"
            ) from error
        if table is None:
            return None
        if group in self._were_read and table.nbytes > _SLOW_GROUP_BYTES and not self._has_warned:
            self._has_warned = True
            logging.warning(
                "%s is slow to train on: each row drawn from it reads up to %d MiB again; "
                "python -m care_jax.commands.prepare writes files for training",
                *(path, table.nbytes >> 20),
            )
        self._were_read.add(group)
        columns = zip(table.column_names, map(_with_shortest_numbers, table.columns), strict=True)
        return dict(columns)


def _with_shortest_numbers(column: Any) -> Any:
    """The column; float32 numbers, or lists of them, have the fewest digits that identify them.

    The float64 nearest to the float32 0.1 is 0.10000000149011612, which no answer equals.
    """
    import pyarrow
    import pyarrow.types as kinds

    def replaced(kind: Any, by: Any) -> Any:
        if kinds.is_float32(kind):
            return by
        is_list = kinds.is_list(kind) or kinds.is_large_list(kind)
        return pyarrow.list_(replaced(kind.value_type, by)) if is_list else kind

    whole = replaced(column.type, pyarrow.float64())
    if whole == column.type:
        return column
    return column.cast(replaced(column.type, pyarrow.string())).cast(whole)


def _read_group(path: pathlib.Path, number: int, columns: Sequence[str] | None) -> Any:
    """A row group as a pyarrow table; None if it is too large.

    The footer tells the size of its pages. A dictionary page of a few large values may stand for
    many cells, so decoding takes few rows at a time and ends at the limit.
    """
    file = _open(path)
    claimed = file.metadata.row_group(number)
    chunks = map(claimed.column, range(claimed.num_columns))
    num_bytes = sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if columns is None or chunk.path_in_schema.split(".")[0] in columns
    )
    if num_bytes > min(MAX_GROUP_BYTES, claimed.num_rows * MAX_CELL_BYTES):
        return None
    import pyarrow

    batches, decoded = [], 0
    num_rows = max(1, min(claimed.num_rows, _DECODED_BYTES // max(num_bytes, 1)))
    for batch in file.iter_batches(num_rows, row_groups=[number], columns=columns):
        batches.append(batch)
        decoded += batch.nbytes
        if decoded > MAX_GROUP_BYTES:
            return None
    table = pyarrow.Table.from_batches(batches, batches[0].schema if batches else None)
    table = table.combine_chunks()  # a row is looked for in every chunk
    if table.num_rows != claimed.num_rows:
        raise ValueError(f"{table.num_rows} rows, expected {claimed.num_rows}")
    return table


def open_columns(paths: Sequence[pathlib.Path], names: Sequence[str]) -> ParquetRows:
    """The columns with these fields, see `fields.value_at`; ValueError if there are none."""
    schema = _open(paths[0]).schema_arrow
    roots = [_column_of(schema, name, paths[0]) for name in names]
    return ParquetRows(paths, [*dict.fromkeys(roots)])


def open_rows(
    path: str,
    *,
    split: str = "",
    columns: Mapping[str, str] | None = None,
    images: str = "",
    images_outside: bool = False,
) -> Rows:
    """Questions from parquet files, given the names of their columns.

    Args:
        path: a file, a folder, or a hub id.
        split: selects files with that prefix (train-00000-of-00001.parquet) or in a folder of that
            name; "all" for all files; empty if they are of one split.
        columns: maps parts of `fields.FIELDS` to a column of the files, or to a field of its
            structs; question and answer are required, context and units are found by their names.
            Several image columns are separated by commas, and "none" is none.
        images, images_outside: see `hub.image_folder` and `rows.images_of`.

    Raises:
        ValueError: the files or columns do not exist, or hold images while columns.images is empty.
    """
    release = hub.find(path, ["*.parquet", "**/*.parquet", "images/**"])
    files = find_files(release, split)
    schema = _open(files[0]).schema_arrow
    names = names_of(columns, _DEFAULTS)
    for part in ("question", "answer"):
        if not names[part]:
            raise ValueError(
                f"columns.{part} must name a column of {files[0]} (it has "
                f"{', '.join(schema.names)}), got ''; set it"
            )
    has_image_names = bool(columns and columns.get("images"))
    used = [
        name
        for part, own_names in names.items()
        for name in own_names
        if name in schema.names or own_names != _DEFAULTS[part]
    ]
    roots = [_column_of(schema, name, files[0]) for name in used]
    without_bytes = columns_without_bytes(files)
    with_bytes = [name for name in schema.names if name not in (*without_bytes, *roots)]
    if with_bytes and not has_image_names:
        raise ValueError(
            f"columns.images must name the columns of images in {files[0]}, where "
            f"{', '.join(with_bytes)} has bytes, got ''; set it, or set it to none to read no image"
        )
    table = ParquetRows(files, [*dict.fromkeys([*roots, *without_bytes])])
    read = functools.partial(
        example_of,
        names=names,
        source=release.stem if release.is_file() else pathlib.PurePath(path).name,
        folder=hub.image_folder(images, release),
        images_outside=images_outside,
        has_image_names=has_image_names,
    )
    (answer,) = names["answer"]

    def example(index: int) -> Example:
        cells = table[index]
        row = {name: value_at(cells, name) for name in used}
        row |= {name: _plain(cells[name]) for name in without_bytes if name not in used}
        if isinstance(gold := row[answer], list | dict):
            is_one_text = isinstance(gold, list) and len(gold) == 1 and isinstance(gold[0], str)
            row[answer] = gold[0] if is_one_text else _plain(gold)
        return read(row, position=index)

    return Rows(len(table), example)


def _column_of(schema: Any, name: str, path: pathlib.Path) -> str:
    """The column of a name, which may lead into its structs; ValueError if there is none."""
    import pyarrow.types as kinds

    root, *inner = [name] if name in schema.names else name.split(".")
    kind, found = None, list(schema.names)
    for key in (root, *inner):
        if key not in found:
            raise ValueError(
                f"expected columns {name} in {path}, got {', '.join(schema.names)}; change the "
                "source's columns"
            )
        kind = (schema if kind is None else kind).field(key).type
        found = [field.name for field in kind] if kinds.is_struct(kind) else []
    return root


def find_files(path: pathlib.Path, split: str) -> list[pathlib.Path]:
    """The parquet files of a release and its split, at least one, sorted by path.

    Raises:
        ValueError: there are none, or no split is given and the files are of several.
    """
    if path.is_file():
        return [path]
    files = sorted(path.rglob("*.parquet"))

    def is_of_split(file: pathlib.Path) -> bool:
        return split in ("", hub.ALL, re.split("[-.]", file.name)[0], file.parent.name)

    found = list(filter(is_of_split, files))
    if not found:
        names = ", ".join(str(file.relative_to(path)) for file in files[:8])
        other = "" if files else formats.told(path)
        raise ValueError(
            f"expected parquet files of split {split!r} in {str(path)!r}, got {names or 'none'}"
            f"{other}; change the source's path or split"
        )
    hub.check_files(found, path, split)
    return found


def columns_without_bytes(paths: Sequence[pathlib.Path]) -> list[str]:
    """The columns without bytes that all files have, in order."""
    schemas = [_open(path).schema_arrow for path in paths]
    import pyarrow.types as kinds

    def has_bytes(kind: Any) -> bool:
        tests = kinds.is_binary, kinds.is_large_binary, kinds.is_fixed_size_binary
        inner = (kind.field(i).type for i in range(kind.num_fields))
        return any(test(kind) for test in tests) or any(map(has_bytes, inner))

    common = set.intersection(*(set(schema.names) for schema in schemas))
    return [each.name for each in schemas[0] if each.name in common and not has_bytes(each.type)]


def _plain(value: Any) -> Any:
    """A cell in JSON types; dates and the like become text."""
    return json.loads(json.dumps(value, default=str))


def _open(path: pathlib.Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            "parquet files need pyarrow; install it with: pip install 'care_jax[data]'"
        ) from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        advice = formats.told(path) or f" ({_first_line(error)}); download it again"
        raise ValueError(f"{path} is not a complete parquet file{advice}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
