"""What a second evaluation takes over from the first, and what it answers again."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from PIL import Image
from scripted_answers import GRADED, PARAMS, SETTINGS, benchmarked, samples_of

from care_jax.benchmarks.samples import read, to_line
from care_jax.stages import answering, evaluate


def test_an_evaluation_goes_on_behind_the_samples_it_has(benchmark_run, asked):
    run = benchmark_run()
    metrics = benchmarked(run)
    path = run.workdir / "benchmarks_rl" / "samples_mathvision_testmini.jsonl"
    whole = path.read_text()
    first, second, *_ = samples_of(run)
    del first["sha256"], second["sha256"]
    first |= {"acc": 0.0, "input": "\u2028"}
    path.write_text(to_line(first) + to_line(second) + '{"doc_id": 2, "ac')
    again = benchmarked(run)
    # A whole line is believed, so the changed verdict shows; the rest is asked again.
    assert again["mean/acc"] == pytest.approx(metrics["mean/acc"] - 1 / 5)
    assert [sample["doc_id"] for sample in samples_of(run)] == list(range(5))
    assert path.read_text().split("\n")[1:] == whole.split("\n")[1:]


def test_samples_are_taken_over_for_the_same_weights_alone(make_run, examples, asked, monkeypatch):
    monkeypatch.setattr(evaluate, "_AT_ONCE", 2)
    run = make_run(SETTINGS)
    evaluator = evaluate.Evaluator(run, examples, [])
    others = {"w": jnp.ones(3)}
    for step, (params, num_asked) in enumerate(((PARAMS, 5), (others, 10), (PARAMS, 10))):
        evaluator(params, name="rl", step=step)
        assert len(asked[1][0]["asked"]) == num_asked
    before = run.workdir / "samples_rl.jsonl"  # of an evaluation of other weights
    before.write_text((run.workdir / "samples_rl" / "step_0.jsonl").read_text())
    evaluator(others, name="rl")
    assert len(asked[1][0]["asked"]) == 10


def test_samples_of_another_benchmark_are_not_believed(benchmark_run, release, asked):
    """Files that were swapped: weights and settings are the same."""
    benchmarked(benchmark_run())
    run = benchmark_run(**{"evaluate.benchmarks": (("mathvision", str(release)),)})
    folder = run.workdir / "benchmarks_rl"
    (folder / "samples_mathvision_testmini.jsonl").rename(folder / "samples_mathvision.jsonl")
    benchmarked(run)
    assert [call["asked"] for call in asked[1]] == [[*range(5)]] * 2


@pytest.mark.parametrize(
    ("weights", "changes"),
    [
        ({"w": jnp.arange(3.0) + 1e-4}, {}),
        ({"w": jnp.arange(3.0)[::-1]}, {}),
        (PARAMS, {"data.instruction": "Think."}),
        (PARAMS, {"model.compute_dtype": "bfloat16"}),
        (PARAMS, {"model.tokenizer": "another/tokenizer"}),  # whose template makes the prompt
    ],
)
def test_samples_of_other_weights_or_settings_are_not_believed(
    benchmark_run, asked, weights, changes
):
    benchmarked(benchmark_run())
    run = benchmark_run(**changes)
    benchmarked(run, weights)
    assert [call["asked"] for call in asked[1]] == [[*range(5)]] * 2
    # The first ones are kept.
    files = (run.workdir / "benchmarks_rl").glob("samples_mathvision_testmini.*jsonl")
    assert [len(file.read_text().splitlines()) for file in files] == [5, 5]


def test_samples_that_were_set_aside_are_taken_back(benchmark_run, asked):
    others = {"w": jnp.arange(3.0) + 1e-4}
    for params in (PARAMS, others, PARAMS, others):
        benchmarked(benchmark_run(), params)
    assert [call["asked"] for call in asked[1]] == [[*range(5)], [*range(5)], [], []]
    files = benchmark_run().workdir.glob("benchmarks_rl/samples_mathvision_testmini.*jsonl")
    assert [len(file.read_text().splitlines()) for file in files] == [5, 5]


def test_no_file_of_samples_is_overwritten_by_one_that_is_set_aside(tmp_path):
    """Samples that a reward function judged are never taken back."""
    path = tmp_path / "samples.jsonl"
    (tmp_path / "samples.reward.jsonl").write_text("first")
    (tmp_path / "samples.reward.2.jsonl").write_text("second")
    path.write_text(line := to_line({"doc_id": 0, "settings": None}))
    assert read(path, "other") == [] and not path.exists()
    names = ("samples.reward.jsonl", "samples.reward.2.jsonl", "samples.reward.3.jsonl")
    assert [(tmp_path / name).read_text() for name in names] == ["first", "second", line]


def test_samples_of_another_template_of_the_same_path_are_not_believed(
    benchmark_run, asked, monkeypatch
):
    benchmarked(benchmark_run())
    run = benchmark_run()
    template = run.policy.tokenizer.get_chat_template()
    monkeypatch.setattr(run.policy.tokenizer, "chat_template", f"{template} ")
    benchmarked(run)
    assert [call["asked"] for call in asked[1]] == [[*range(5)]] * 2


def test_samples_of_other_rows_are_not_believed(benchmark_run, release, asked):
    """A release may be downloaded in parts, or replaced by another split."""
    benchmarked(benchmark_run())
    first, *rest = release.read_text().splitlines(keepends=True)
    release.write_text("".join(rest))
    benchmarked(benchmark_run())
    release.write_text("".join([first.replace("?", "!"), *rest]))
    benchmarked(benchmark_run())
    assert [call["asked"] for call in asked[1]] == [[*range(n)] for n in (5, 4, 5)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_checksum_of_weights_sees_an_update_and_not_the_mesh(dtype):
    """The update is smaller than the last bit of a sum of the weights, or of their magnitudes."""
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(256, 1024)), dtype)
    before = answering._checksum(weights)
    after = weights.at[3, 5].set(jnp.nextafter(weights[3, 5], jnp.asarray(9, dtype)))
    assert answering._checksum(after) != before
    flipped = weights.at[3, 5].multiply(-1)
    assert answering._checksum(flipped) != before != answering._checksum(weights[::-1])
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    sharded = jax.device_put(weights, NamedSharding(mesh, PartitionSpec("a", "b")))
    assert jax.jit(answering._checksum)(sharded) == before


def test_a_result_of_the_same_weights_keeps_its_line_and_its_place(staged, make_run, capsys):
    first, decoded, _ = staged()
    assert decoded == list(range(5))
    run = make_run(SETTINGS)
    run.metrics.write("rl", 0, {"acc": 1})
    capsys.readouterr()
    assert staged(run=run) == (first, [], ["evaluate_rl", "rl"])
    path = run.workdir / "samples_rl.jsonl"
    assert f"has its answers already: {path} is of these weights" in capsys.readouterr().out
    other = {"w": jnp.arange(3.0) + 1e-4}
    assert staged(params=other)[1] == list(range(5))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["settings"] for line in lines}) == 1  # none is left of the first weights


@pytest.mark.parametrize(
    ("damage", "again"),
    [
        (lambda lines: [*lines[:2], '{"doc_id": 2, "id\n', *lines[3:]], [2]),
        (lambda lines: [lines[0].replace('"acc": 1.0', '"acc": 0.0'), *lines[1:]], [0]),
        (lambda lines: [lines[0].replace('"sha256"', '"sha257"'), *lines[1:]], [0]),
        (lambda lines: lines[::-1], []),
        (lambda lines: [*lines, *lines], []),
        (lambda lines: [*lines[:4], lines[4][:-9]], [4]),
        (lambda lines: [], [0, 1, 2, 3, 4]),
    ],
    ids=["cut inside", "verdict", "sum", "another order", "twice", "cut", "emptied"],
)
def test_what_is_lost_of_the_samples_alone_is_decoded_again(staged, make_run, damage, again):
    first, _, stages = staged()
    path = make_run(SETTINGS).workdir / "samples_rl.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert '"acc": 1.0' in lines[0]
    damaged = damage(lines)
    path.write_text("".join(damaged))
    assert staged() == (first, again, stages)
    assert path.read_text().splitlines(keepends=True) == lines
    aside = path.with_name("samples_rl.jsonl.damaged")
    left_out = [line for line in damaged if line not in lines and line.endswith("\n")]
    assert (aside.read_text() if aside.exists() else "") == "".join(left_out)


def test_a_lost_line_is_written_again_without_decoding(staged, make_run):
    first, _, stages = staged()
    make_run(SETTINGS).metrics.path.unlink()
    assert staged() == (first, [], stages)


def test_a_line_of_other_metrics_is_replaced(staged, make_run):
    """A run may be killed between the last sample of new weights and their line."""
    first, _, _ = staged()
    path = make_run(SETTINGS).metrics.path
    path.write_text(path.read_text().replace('"acc": 0.6', '"acc": 0.5'))
    run = make_run(SETTINGS)
    run.metrics.write("rl", 0, {"acc": 1})
    assert staged(run=run) == (first, [], ["rl", "evaluate_rl"])


def test_what_a_result_depends_on(staged, make_run, examples, monkeypatch):
    """Weights, settings, and rows that were read; a reward function may be anything."""
    monkeypatch.setattr(evaluate, "versions", lambda: {"jax": "1"})
    run = make_run(SETTINGS)

    def is_read(changes=None, params=PARAMS):
        staged()
        return not staged(changes, params)[1]

    assert is_read() and is_read({"rl.learning_rate": 0.1, "log_every": 9})
    assert is_read({"evaluate.batch_size": 4, "evaluate.judge_timeout": 9.0})
    assert not is_read({"evaluate.max_response_tokens": 9})
    assert not is_read({"data.test.seed": 9})
    assert not is_read({"data.system_prompt": "1"})
    assert not is_read({"verifier.timeout": 9.0})
    assert not is_read(params={"w": jnp.arange(3.0) + 1})
    evaluator = evaluate.Evaluator(run, examples[1:], [])
    settings = evaluate.Evaluator(run, examples, [])._held_out_settings
    assert evaluator._held_out_settings != settings
    for changes in ({"units": "matter"}, {"images": (Image.new("RGB", (32, 32)),)}):
        others = [dataclasses.replace(examples[0], **changes), *examples[1:]]
        assert evaluate.Evaluator(run, others, [])._held_out_settings != settings
    assert staged(GRADED)[1] == staged(GRADED)[1] == list(range(5))


def test_a_function_judges_once_what_a_later_stage_is_past(make_run, examples, asked):
    """Else every restart of RL would repeat the evaluation of its start."""

    def evaluated(name="sft", changes=GRADED, is_past=True):
        asked[1].clear()
        run = make_run(SETTINGS | changes)
        evaluator = evaluate.Evaluator(run, examples, [])
        metrics = evaluate.evaluate_stage(run, evaluator, PARAMS, name=name, is_past=is_past)
        return metrics, bool(asked[1])

    first, is_decoded = evaluated()
    assert is_decoded and evaluated() == (first, False)
    assert evaluated("rl")[1]  # has no line yet
    assert evaluated(is_past=False)[1] and evaluated(changes={})[1]
    assert evaluated(changes=GRADED | {"evaluate.temperature": 1.0})[1]
    line = json.loads(make_run({}).metrics.path.read_text().splitlines()[-1])
    assert (line["stage"], line["temperature"], line["num_samples"]) == ("evaluate_sft", 1, 1)
    assert (line["top_p"], line["max_response_tokens"]) == (1, 16)


def test_samples_of_a_reward_function_are_kept_beside_those_of_the_rules(staged, make_run):
    staged(GRADED)
    path = make_run(SETTINGS).workdir / "samples_rl.jsonl"
    judged = path.read_text()
    staged()
    assert path.with_name("samples_rl.reward.jsonl").read_text() == judged
    by_rules, digest = path.read_text(), json.loads(path.read_text().splitlines()[0])["settings"]
    staged(GRADED)
    assert path.with_name(f"samples_rl.{digest}.jsonl").read_text() == by_rules


def test_benchmarks_of_a_past_evaluation_are_still_measured(benchmark_run, release, asked):
    """They have samples and verdicts to go on with, and may be new."""
    run = benchmark_run(**GRADED)
    run.metrics.write("evaluate_rl", 0, {"acc": 0.5, "reward/half": 0.25, "mean/acc": 0.0})
    benchmarks = evaluate.open_benchmarks(run.config)
    evaluator = evaluate.Evaluator(run, None, benchmarks)
    found = evaluate.evaluate_stage(run, evaluator, PARAMS, name="rl", is_past=True)
    assert (found["acc"], found["reward/half"]) == (0.5, 0.25) and found["mean/acc"] > 0
    assert len(asked[1]) == 1
