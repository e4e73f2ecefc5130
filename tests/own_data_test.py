"""`configs/small.py` runs on JSONL rows of any size, with nothing set but paths and few steps."""

import json

import pytest
from PIL import Image
from small_run import metrics_of

from care_jax import main
from care_jax.data.examples import open_examples
from care_jax.run.policy import policy_of
from configs import small

pytestmark = pytest.mark.usefixtures("one_device")
SIZES = ((640, 480), (24, 24), (3000, 60), (50, 900), (2016, 1512))
TEXT = "Sie zählt 日本語 and x^2. "


def write_rows(folder, name, num_rows, text="", **more):
    """Rows with no image, one or two, some behind a text; one row that is not JSON."""
    rows = []
    for number in range(num_rows):
        images = [f"{k}.png" for k in (number % 5, (number + 1) % 5)][: number % 3]
        before = text if number % 4 == 3 else ""
        question = f"{before}{'<image>' * len(images)}How many?"
        rows.append({"images": images, "question": question, "answer": str(number), **more})
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "not JSON\n")
    return str(path)


@pytest.fixture
def images(tmp_path):
    for number, size in enumerate(SIZES):
        Image.new("RGB", size, "red").save(tmp_path / f"{number}.png")


def test_a_run_on_own_rows_needs_only_their_paths(images, tmp_path):
    config = small.get_config("sft")
    config.data.train.path = write_rows(tmp_path, "train", 8, text := TEXT * 6)
    config.data.test.path = write_rows(tmp_path, "test", 4, text)
    response = "<think>I see one.</think><answer>1</answer>"
    config.data.sft.path = write_rows(tmp_path, "sft", 16, text, response=response)
    config.sft.num_steps, config.sft.warmup_steps = 1, 0
    config.rl.num_steps, config.rl.warmup_steps = 1, 0
    results = main.run_stages(config, tmp_path / "run")
    assert {"acc", "fmt"} <= results["rl"].keys()
    (step,) = (line for line in metrics_of(tmp_path / "run") if line["stage"] == "rl")
    assert "left_out/prompt_fits_no_bucket" not in step
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").open()]
    assert len(rows) == 8 and any(len(row["rendered"]) > len(text) for row in rows)
    assert {len(row["images"]) for row in rows} == {0, 1, 2}
    assert all(image["tokens"] <= 64 for row in rows for image in row["images"])


def test_a_long_row_fits_the_second_bucket(images, tmp_path):
    config = small.get_config()
    config.data.test.path = write_rows(tmp_path, "test", 8, TEXT * 60)
    prompts, examples = policy_of(config).prompts, open_examples(config, "evaluate")
    assert len(examples) == 8
    tokenized = map(prompts.tokenize, examples)
    buckets = {prompts.bucket_of(len(x.tokens), len(x.patches)) for x in tokenized}
    assert buckets == set(config.data.buckets[:2])


def test_another_start_is_refused():
    with pytest.raises(ValueError, match=r"has :sft or nothing, not 'cold'"):
        small.get_config("cold")
