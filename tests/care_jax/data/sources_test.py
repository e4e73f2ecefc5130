"""Sources by name: what each takes, and how a stage opens the ones of its configuration."""

import pytest

from care_jax.batch import Example, Unusable
from care_jax.data.mixture import Mixture
from care_jax.data.rows import first_usable
from care_jax.data.sources import SOURCES, check_section, is_drawn, open_source
from care_jax.data.stages import open_stage
from configs import common, tiny

DATA = {"min_pixels": 256, "max_pixels": 4096}


@pytest.fixture
def rows(tmp_path, write_json, picture):
    """Writes a file of JSON lines beside a picture of 96 x 64."""
    (tmp_path / "a.png").write_bytes(picture())

    def write(name, *rows):
        rows = [{"question": "<image>?", "answer": "1", "image": "a.png"} | row for row in rows]
        return str(write_json(tmp_path / name, rows))

    return write


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("jsonl", {"subset": "human"}, "source 'jsonl' takes no subset, got 'human'; clear it"),
        ("virl39k", {"split": "test"}, "takes no split"),
        ("chartqa", {"columns": {"answer": "label"}}, "takes no columns"),
        ("synthetic", {"images": "x"}, "takes no images"),
        ("readings", {"path": "x", "num_examples": 1}, "takes no path, got 'x'; clear it"),
        ("synthetic", {"misread_share": 0.5}, "'synthetic' takes no misread_share, got 0.5"),
        ("jsonl", {"teacher_error": 0.5}, "'jsonl' takes no teacher_error, got 0.5; clear it"),
        ("chartqa", {"images_outside": True}, "takes no images_outside, got True; clear it"),
        (
            "geometry3k",
            {"path": "/", "split": "dev"},
            "split must be one of train, val, test, got 'dev'",
        ),
        ("virl39k", {"path": "/nowhere"}, "does not exist; correct the source's path"),
    ],
)
def test_option_a_source_does_not_take_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        open_source(name, **options)


def test_source_of_more_examples_than_there_are_is_refused(rows):
    path = rows("a.jsonl", {}, {})
    assert len(open_source("jsonl", path=path, num_examples=2)) == 2
    with pytest.raises(ValueError, match="num_examples 3 exceeds the 2 rows"):
        open_source("jsonl", path=path, num_examples=3)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (common.source("csv"), "must be one of synthetic, readings, .*mixture, got 'csv'"),
        (common.source("mixture"), "got 0 for 'mixture'"),
        (common.source("jsonl", parts=(common.source("jsonl"),)), "got 1 for 'jsonl'"),
        (common.source("jsonl", min_pixels=9000), "would have 9000 to 4096 pixels"),
        (
            common.source("mixture", parts=(common.source("csv"),)),
            "must be one of synthetic, .* got 'csv'",
        ),
        (
            common.source("mixture", parts=(common.source("jsonl", weight=1.0),) * 2),
            None,
        ),
        (
            common.source(
                "mixture", parts=(common.source("jsonl"), common.source("jsonl", weight=1.0))
            ),
            "a weight above 0 for every part of the mixture",
        ),
    ],
)
def test_section_that_cannot_be_opened_is_refused(section, message):
    if message is None:
        check_section("data.train", section, DATA)
        return
    with pytest.raises(ValueError, match=message):
        check_section("data.train", section, DATA)


def test_stage_draws_from_its_mixture(rows):
    config = tiny.get_config()
    config.data.train = common.source(
        "mixture",
        parts=(
            common.source("jsonl", path=rows("a.jsonl", {}, {}), weight=1.0, max_pixels=1024),
            common.source("synthetic", num_examples=5, weight=3.0),
        ),
    )
    examples = open_stage(config, "rl")
    assert isinstance(examples, Mixture) and examples.weights == [1.0, 3.0]
    assert examples[0].max_pixels == 1024 and examples[2].max_pixels == 0
    assert examples[2].id.startswith("train-")


def test_images_of_a_source_keep_to_its_range_of_pixels(rows, policy):
    path = rows("a.jsonl", {})
    builder = policy.prompts
    num_patches = {}
    for limit in (0, 1024):
        example = open_source("jsonl", path=path, max_pixels=limit)[0]
        prompt = builder.tokenize(example)
        assert builder.measure(example) == (len(prompt.tokens), len(prompt.patches))
        num_patches[limit] = len(prompt.patches)
    assert num_patches[1024] * 64 <= 1024 < num_patches[0] * 64 <= builder.max_pixels


def test_held_out_rows_are_checked_before_the_stage_starts(rows, caplog):
    config = tiny.get_config()
    path = rows("a.jsonl", {"image": "gone.png"}, {}, {"answer": ""})
    config.data.test = common.source("jsonl", path=path)
    with caplog.at_level("WARNING"):
        examples = open_stage(config, "evaluate")
    assert [example.id for example in examples] == ["2"]
    assert "data.test: left out 1 rows: image missing (first is row 1)" in caplog.text
    config.data.test.path = rows("b.jsonl", {"answer": ""})
    with pytest.raises(ValueError, match=r"no row of data.test can be used: 1 x no answer"):
        open_stage(config, "evaluate")


def test_the_cold_start_is_not_trained_on_rows_without_responses(rows):
    """Nor are its parts of a mixture, whichever comes first."""
    config = tiny.get_config()
    path = rows("a.jsonl", {}, {"response": "<think>x</think><answer>1</answer>"})
    config.data.sft = common.source("jsonl", path=path)
    examples = open_stage(config, "sft")
    assert first_usable(examples).id == "2"
    with pytest.raises(Unusable, match="no response to imitate"):
        _ = examples[0]
    parts = (common.source("synthetic", num_examples=4), common.source("jsonl", path=path))
    parts[1].path = rows("b.jsonl", {})
    config.data.sft = common.source("mixture", parts=parts)
    with pytest.raises(ValueError, match=r"source 'jsonl' has no responses to imitate \(none of"):
        open_stage(config, "sft")


def test_responses_in_another_tag_are_refused(rows):
    config = tiny.get_config()
    response = "<think>x</think><answer>1</answer>"
    config.data.sft = common.source("jsonl", path=rows("a.jsonl", {"response": response}))
    assert first_usable(open_stage(config, "sft")).response == response
    config.data.think_tag = "reasoning"
    half = {"context": "<think>x. Wait, ", "response": "y</think><answer>1</answer>"}
    for row in ({"response": response}, half):
        config.data.sft.path = rows("a.jsonl", row)
        with pytest.raises(
            ValueError, match=r"responses in <think>, but data.think_tag is 'reasoning'"
        ):
            open_stage(config, "sft")
    config.data.sft.path = rows("b.jsonl", {"answer": ""}, {})
    with pytest.raises(ValueError, match="has no responses to imitate"):
        open_stage(config, "sft")


def test_each_stage_reads_its_own_section_and_the_cold_start_alone_has_a_teacher():
    config = tiny.get_config()
    config.data.teacher_error = 1.0
    for section, seed in (("sft", 11), ("train", 12), ("test", 13)):
        config.data[section] = common.source("synthetic", num_examples=80, seed=seed)
    stages = {stage: open_stage(config, stage) for stage in ("sft", "rl", "evaluate")}
    ids = {stage: examples[0].id for stage, examples in stages.items()}
    assert ids == {"sft": "train-11-0", "rl": "train-12-0", "evaluate": "test-13-0"}
    is_taught_right = {
        stage: all(f"<answer>{each.answer}<" in each.response for each in examples)
        for stage, examples in stages.items()
    }
    assert is_taught_right == {"sft": False, "rl": True, "evaluate": True}


def test_the_options_of_a_source_are_the_parameters_of_its_factory(monkeypatch):
    """A setting of the run goes to the sources that take it; an option of its own must be taken."""

    def numbers(num_examples, seed=0, think_tag="think", low=1):
        return [Example(f"{seed}-{low + i}", think_tag, (), "?", "1") for i in range(num_examples)]

    monkeypatch.setitem(SOURCES, "numbers", numbers)
    settings = {"think_tag": "reasoning", "cue": "Wait.", "low": 5}
    (example,) = open_source("numbers", num_examples=1, low=7, settings=settings)
    assert (example.id, example.source) == ("0-7", "reasoning") and is_drawn("numbers")
    with pytest.raises(ValueError, match="source 'numbers' takes no split, got 'test'; clear it"):
        open_source("numbers", num_examples=1, split="test")
