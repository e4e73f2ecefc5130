"""Small files in the formats of the releases: parquet with embedded images, folders, JSON."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


@pytest.fixture(scope="session")
def write_parquet():
    """Writes columns as the hub stores them: typed, images as structs, in small row groups."""

    def write(path, rows, types, row_group_size=2):
        path.parent.mkdir(parents=True, exist_ok=True)
        schema = pa.schema(list(types.items()))
        pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=row_group_size)
        return path

    return write


@pytest.fixture(scope="session")
def chartqa_parquet(write_parquet, picture):
    """Writes data/<split>-*.parquet of HuggingFaceM4/ChartQA; rows are (query, label, kind)."""

    def write(folder, rows, split="train", pictures=None):
        cells = pictures or [picture(seed) for seed in range(len(rows))]
        return write_parquet(
            folder / "data" / f"{split}-00000-of-00001-49492f364babfa44.parquet",
            [
                {
                    "image": {"bytes": cell, "path": None},
                    "query": query,
                    "label": label,
                    "human_or_machine": kind,
                }
                for (query, label, kind), cell in zip(rows, cells, strict=True)
            ],
            {
                "image": IMAGE,
                "query": pa.string(),
                "label": pa.list_(pa.string()),
                "human_or_machine": pa.int64(),
            },
        )

    return write


@pytest.fixture(scope="session")
def geometry3k_parquet(write_parquet, picture):
    """Writes data/<split>-*.parquet of hiyouga/geometry3k; rows are (problem, answer)."""

    def write(folder, rows, split="train", pictures=None):
        cells = pictures or [picture(100 + seed) for seed in range(len(rows))]
        return write_parquet(
            folder / "data" / f"{split}-00000-of-00001.parquet",
            [
                {
                    "images": [{"bytes": cell, "path": "0.png"}],
                    "problem": problem,
                    "answer": answer,
                    "id": f"g{number}",
                    "choices": ["1", answer, "7", "9"],
                    "ground_truth": "B",
                }
                for number, ((problem, answer), cell) in enumerate(zip(rows, cells, strict=True))
            ],
            {
                "images": pa.list_(IMAGE),
                "problem": pa.string(),
                "answer": pa.string(),
                "id": pa.string(),
                "choices": pa.list_(pa.string()),
                "ground_truth": pa.string(),
            },
        )

    return write


@pytest.fixture(scope="session")
def write_json():
    """Writes a `.json` array, or a file of lines where the name ends in `.jsonl`."""

    def write(path, rows):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            path.write_text("\n".join(json.dumps(row) for row in rows))
        else:
            path.write_text(json.dumps(rows, indent=2))
        return path

    return write
