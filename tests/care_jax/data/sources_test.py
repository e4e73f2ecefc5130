"""Sources by name: what each takes, and how a stage opens the ones of its configuration."""

import pytest

from care_jax.batch import Example, Unusable
from care_jax.data.examples import open_examples
from care_jax.data.mixture import Mixture
from care_jax.data.rows import first_usable
from care_jax.data.sources import SOURCES, check_section, is_drawn, open_source
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


REFUSED_OPTIONS = [
    ("csv", {}, r"source must be one of synthetic, readings, .*, got 'csv'"),
    ("jsonl", {"subset": "human"}, "source 'jsonl' takes no subset, got 'human'; clear it"),
    ("jsonl", {"teacher_error": 0.5}, "'jsonl' takes no teacher_error, got 0.5; clear it"),
    ("synthetic", {"path": "x", "num_examples": 1}, "takes no path, got 'x'; set source to its re"),
    ("jsonl", {"num_examples": 3}, "num_examples 3 exceeds the 2 rows of .*a.jsonl"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED_OPTIONS)
def test_wrong_source_or_option_is_refused(rows, name, options, message):
    path = {"path": rows("a.jsonl", {}, {})} if name == "jsonl" else {}
    with pytest.raises(ValueError, match=message):
        open_source(name, **path | options)


def test_a_file_without_rows_is_told_whatever_number_is_wanted(rows):
    with pytest.raises(ValueError, match=r"source 'jsonl' must have rows, got none in .*a\.jsonl"):
        open_source("jsonl", path=rows("a.jsonl"), num_examples=3)


def test_num_examples_of_a_file_are_its_first(rows):
    examples = open_source("jsonl", path=rows("a.jsonl", {}, {}, {}), num_examples=2)
    assert [example.id for example in examples] == ["1", "2"]


JSONL, WEIGHTED = common.source("jsonl"), common.source("jsonl", weight=1.0)
CSV = common.source("csv")
REFUSED_SECTIONS = {
    "unknown": (common.source("mixture", parts=(JSONL, CSV)), "one of .*, mixture, got 'csv'"),
    "no parts": (common.source("mixture"), "got 0 for 'mixture'; change source or parts"),
    "parts of a file": (common.source("jsonl", parts=(JSONL,)), "got 1 for 'jsonl'"),
    "pixels": (common.source("jsonl", min_pixels=9000), "got min_pixels 9000 and max_pixels 4096"),
    "one weight": (common.source("mixture", parts=(JSONL, WEIGHTED)), "above 0 for every part"),
}


@pytest.mark.parametrize(("section", "message"), REFUSED_SECTIONS.values(), ids=REFUSED_SECTIONS)
def test_wrong_section_is_refused(section, message):
    check_section("data.train", common.source("mixture", parts=(WEIGHTED,) * 2), DATA)
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
    examples = open_examples(config, "rl")
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
        examples = open_examples(config, "evaluate")
    assert [example.id for example in examples] == ["2"]
    first = f"(first is row 1: {path.replace('a.jsonl', 'gone.png')})"
    assert f"data.test: left out 1 rows: image missing {first}" in caplog.text


def test_the_cold_start_is_not_trained_on_rows_without_responses(rows):
    config = tiny.get_config()
    path = rows("a.jsonl", {}, {"response": "<think>x</think><answer>1</answer>"})
    config.data.sft = common.source("jsonl", path=path)
    examples = open_examples(config, "sft")
    assert first_usable(examples).id == "2"
    with pytest.raises(Unusable, match="no response to imitate"):
        _ = examples[0]


OTHER_TAG = r"data.sft.parts.1: .* 1 x response in another tag .*: <think>, expected <reasoning>"
CONTINUED = {"context": "<think>x. Wait, ", "response": "y</think><answer>1</answer>"}
REFUSED_ROWS = {
    "no row": ("rl", [], "data.train must have rows, got a source 'jsonl' without any"),
    "no row of a part": ("sft", [], r"data.sft.parts.1 must have rows"),
    "unusable": ("rl", [{"answer": ""}], "none of the first 1 rows can be used: 1 x no answer"),
    "unusable held-out": ("evaluate", [{"answer": ""}], "no row of data.test .*: 1 x no answer"),
    "unusable cold start": ("sft", [{"answer": ""}], "none of the first 1 rows can be used"),
    "no response": ("sft", [{"answer": ""}, {}], r"'jsonl' has no responses to imitate \(none of"),
    "no answer tags": (
        "sft",
        [{"response": "<reasoning>x</reasoning> 1"}],
        "1 x response without the <answer> tags that data.instruction asks for",
    ),
    "another tag": ("sft", [{"response": "<think>x</think><answer>1</answer>"}], OTHER_TAG),
    "another tag in the context": ("sft", [CONTINUED], OTHER_TAG),
}


@pytest.mark.parametrize(("stage", "given", "message"), REFUSED_ROWS.values(), ids=REFUSED_ROWS)
def test_rows_that_a_stage_cannot_use_are_refused(rows, stage, given, message):
    """The cold start's are the second part of a mixture."""
    config = tiny.get_config()
    config.data.think_tag = "reasoning"
    config.data.instruction = common.get_config().data.instruction
    section = common.source("jsonl", path=rows("a.jsonl", *given))
    parts = (common.source("synthetic", num_examples=4), section)
    config.data.sft = common.source("mixture", parts=parts)
    config.data.train = config.data.test = section
    with pytest.raises(ValueError, match=message):
        open_examples(config, stage)


def test_each_stage_reads_its_own_section_and_the_cold_start_alone_has_a_teacher():
    config = tiny.get_config()
    config.data.teacher_error = 1.0
    for section, seed in (("sft", 11), ("train", 12), ("test", 13)):
        config.data[section] = common.source("synthetic", num_examples=80, seed=seed)
    stages = {stage: open_examples(config, stage) for stage in ("sft", "rl", "evaluate")}
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
