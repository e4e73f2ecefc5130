"""ChartQA: both releases give the same questions, human and augmented ones apart."""

import pytest

from care_jax.data.readers import chartqa
from care_jax.data.sources import open_source
from care_jax.prompts.images import open_image
from care_jax.rewards.verifier import Verifier

ROWS = [
    ("How many bars are blue?", ["3"], 0),
    ("What is the share of Chile?", ["0.39"], 1),
    ("Is the red line above 40?", ["Yes"], 0),
    ("Which two values are equal?", ["[63, 26]"], 0),
    ("Name the two least.", ["Peru", "Chile"], 1),
]


@pytest.fixture
def parquet(tmp_path, chartqa_parquet):
    chartqa_parquet(tmp_path / "hub", ROWS)
    return str(tmp_path / "hub")


@pytest.fixture(params=["", "ChartQA Dataset"])
def folder(request, tmp_path, write_json, picture):
    """The authors' release: a folder per split."""
    split = tmp_path / "original" / request.param / "train"
    for kind, name in enumerate(chartqa.SUBSETS):
        rows = [(i, row) for i, row in enumerate(ROWS) if row[2] == kind]
        write_json(
            split / f"train_{name}.json",
            [{"imgname": f"{i}.png", "query": q, "label": ", ".join(a)} for i, (q, a, _) in rows],
        )
    (split / "png").mkdir()
    for i in range(len(ROWS)):
        (split / "png" / f"{i}.png").write_bytes(picture(i))
    return str(tmp_path / "original")


def said(rows):
    return sorted((row.question, row.answer) for row in map(rows.__getitem__, range(len(rows))))


def test_both_releases_give_the_same_questions_and_pictures(parquet, folder):
    hub, original = (
        chartqa.open_rows(path, split="train", subset="") for path in (parquet, folder)
    )
    assert said(hub) == said(original)
    assert said(hub)[0] == ("<image>How many bars are blue?", "3")
    assert ("<image>Name the two least.", "Peru, Chile") in said(hub)
    (a,), (b,) = hub[0].images, original[0].images
    assert isinstance(a, bytes) and open_image(a).tobytes() == open_image(b).tobytes()
    ids = [hub[i].id for i in range(len(hub))]
    assert len(set(ids)) == len(ROWS)
    assert hub[0].source == original[0].source == "chartqa"


def test_subsets_share_no_row(parquet, folder):
    for path in (parquet, folder):
        human = chartqa.open_rows(path, split="train", subset="human")
        augmented = chartqa.open_rows(path, split="train", subset="augmented")
        assert (len(human), len(augmented)) == (3, 2)
        assert said(augmented)[1] == ("<image>What is the share of Chile?", "0.39")
        assert not {row for row in said(human)} & {row for row in said(augmented)}


def test_numbers_within_five_percent_are_right_where_the_source_says_so(parquet):
    exact = open_source("chartqa", path=parquet, split="train")
    relaxed = open_source("chartqa", path=parquet, split="train", tolerance=0.05)
    answers = ("3.1", "3.2", "3")
    responses = [f"<think>.</think><answer>{answer}</answer>" for answer in answers]
    with Verifier() as verifier:
        for source, expected in ((exact, [0, 0, 1]), (relaxed, [1, 0, 1])):
            verdicts = verifier.verify(responses, [source[0]] * 3)
            assert [verdict.acc for verdict in verdicts] == expected


@pytest.mark.parametrize(
    ("split", "subset", "message"),
    [
        ("", "", "split must be one of train, val, test, got ''"),
        ("train", "machine", "subset must be one of human, augmented or '', got 'machine'"),
        ("val", "", r"expected parquet files of split 'val' in .*, got data/train-0"),
    ],
)
def test_what_is_not_there_is_named(parquet, split, subset, message):
    with pytest.raises(ValueError, match=message):
        chartqa.open_rows(parquet, split=split, subset=subset)
