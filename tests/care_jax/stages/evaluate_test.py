"""Evaluation around a scripted sampler: who is asked, how, and what the figures mean."""

import json
import threading

import numpy as np
import pytest
from scripted_answers import GRADED, PARAMS, SAMPLED, SETTINGS, T, held_out

from care_jax.batch import Example
from care_jax.report.accuracy import wilson_interval
from care_jax.rewards.failures import RewardFailed
from care_jax.stages import answering, evaluate


def test_figures_are_over_the_examples_that_fit_and_no_padding(make_run, examples, asked):
    """Five fit; the second batch of three is filled up, and a prompt too long is left out."""
    too_long = Example("long", "a", (), "1?" + " 1" * 300, "0")
    run = make_run(SETTINGS)
    metrics = held_out(run, [*examples[:2], too_long, *examples[2:]])
    assert (metrics["num_examples"], metrics["num_dropped"]) == (5, 1)
    assert metrics["acc"] == pytest.approx(3 / 5)
    np.testing.assert_allclose(
        (metrics["acc_low"], metrics["acc_high"]), wilson_interval(3, 5), rtol=1e-6
    )
    assert metrics["fmt"] == pytest.approx(2 / 5)
    assert (metrics["acc/a"], metrics["acc/b"]) == (1, 0)


def test_one_greedy_answer_is_asked_for_each(make_run, examples, asked):
    held_out(make_run(SETTINGS), examples)
    (call,) = asked[1]
    assert (call["temperature"], call["top_p"]) == (0.0, 1.0)
    sizes = call["sizes"]
    assert sizes.num_slots == sizes.period == 3
    assert (sizes.num_rows, sizes.num_rollouts, sizes.max_tokens) == (1, 1, T)
    assert call["asked"] == list(range(5))


def test_samples_hold_each_example_with_its_own_response(make_run, examples, asked):
    run = make_run(SETTINGS)
    held_out(run, examples, "sft")
    lines = (run.workdir / "samples_sft.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert [sample["id"] for sample in samples] == [example.id for example in examples]
    assert [sample["resps"] for sample in samples] == [[text] for text in asked[0]]
    assert [sample["acc"] for sample in samples] == [1, 0, 1, 1, 0]
    assert [sample["target"] for sample in samples] == ["0", "1", "2", "3", "4"]


def test_several_samples_give_their_mean_and_pass_at_k(make_run, examples, asked, capsys):
    """Of the three questions that are answered at all, two of four samples are right."""
    run = make_run(SETTINGS | SAMPLED)
    metrics = held_out(run, examples)
    (call,) = asked[1]
    assert (call["temperature"], call["top_p"]) == (0.7, 0.9)
    assert (call["sizes"].num_rows, call["sizes"].num_rollouts) == (3, 4)
    assert metrics["acc"] == pytest.approx(metrics["pass@1"]) == pytest.approx(3 / 5 * 2 / 4)
    assert "sampled accuracy after rl: 30.0% (" in (line := capsys.readouterr().out)
    assert line.endswith("5 held-out examples, format 20.0%, pass@4 60.0%)\n")
    assert metrics["pass@2"] == pytest.approx(3 / 5 * 5 / 6)
    assert metrics["pass@4"] == pytest.approx(3 / 5)
    assert "pass@3" not in metrics and metrics["acc/a"] == pytest.approx(2 / 4)
    assert metrics["fmt"] == pytest.approx(2 / 5 * 2 / 4)
    np.testing.assert_allclose(
        (metrics["acc_low"], metrics["acc_high"]), wilson_interval(1.5, 5), rtol=1e-6
    )
    first = json.loads((run.workdir / "samples_rl.jsonl").read_text().splitlines()[0])
    assert first["resps"] == [asked[0][0], "<answer>9</answer>"] * 2
    assert (first["acc"], first["accs"]) == (0.5, [1, 0, 1, 0])


FORGETFUL = GRADED | {"verifier.reward": "graded:forgetful"}


def test_a_reward_function_judges_every_sample(make_run, examples, asked):
    run = make_run(SETTINGS | SAMPLED | GRADED)
    metrics = held_out(run, examples)
    samples = [
        json.loads(line) for line in (run.workdir / "samples_rl.jsonl").read_text().splitlines()
    ]
    rights = [sample["accs"] for sample in samples]
    assert metrics["acc"] == metrics["reward/acc"] == np.mean(rights) > 0
    assert [[each["acc"] for each in sample["components"]] for sample in samples] == rights
    assert metrics["reward/half"] == 0.5
    run = make_run(SETTINGS | GRADED)
    held_out(run, examples, "sft")
    first = json.loads((run.workdir / "samples_sft.jsonl").read_text().splitlines()[0])
    assert first["components"] == [{"acc": first["acc"], "half": 0.5}]


def test_a_question_that_was_not_judged_is_no_wrong_answer(make_run, examples, asked, capsys):
    """Of five questions the function grades all but e1, and only e4 as right."""
    run = make_run(SETTINGS | FORGETFUL)
    metrics = held_out(run, examples)
    assert (metrics["num_examples"], metrics["num_not_judged"]) == (4, 1)
    assert (metrics["acc"], metrics["reward/acc"], metrics["fmt"]) == (1 / 4, 1 / 4, 1 / 4)
    assert (metrics["acc_low"], metrics["acc_high"]) == wilson_interval(1, 4)
    assert (metrics["acc/a"], metrics["acc/b"]) == (0, 1)
    assert "(95% interval 4.6% to 69.9%, 4 held-out examples, 1 not judged, format 25.0%)" in (
        capsys.readouterr().out
    )
    samples = [json.loads(x) for x in (run.workdir / "samples_rl.jsonl").read_text().splitlines()]
    assert [sample["acc"] for sample in samples] == [0, None, 0, 0, 1]
    assert [sample["components"] for sample in samples[:2]] == [[{"acc": 0, "half": 0.5}], [{}]]

    # Mended, the function is asked about every question again.
    mended = make_run(SETTINGS | GRADED)
    metrics = held_out(mended, examples)
    assert (metrics["acc"], metrics["num_examples"], metrics["num_not_judged"]) == (1 / 5, 5, 0)
    assert "not judged" not in capsys.readouterr().out
    assert asked[1][-1]["asked"] == list(range(5))


def test_a_question_counts_if_all_its_samples_were_judged(make_run, examples, asked):
    run = make_run(SETTINGS | SAMPLED | FORGETFUL)
    metrics = held_out(run, examples)
    samples = [json.loads(x) for x in (run.workdir / "samples_rl.jsonl").read_text().splitlines()]
    accs = [sample["accs"] for sample in samples]
    assert (accs[1], accs[3]) == ([None] * 4, [0, 1, 0, None])
    assert [sample["acc"] for sample in samples] == [0.5, None, 0.5, None, 1]
    assert (metrics["num_examples"], metrics["num_not_judged"]) == (3, 2)
    assert metrics["acc"] == pytest.approx(metrics["pass@1"]) == pytest.approx(2 / 3)
    assert metrics["pass@4"] == 1


def test_an_evaluation_without_any_verdict_ends_with_the_functions_error(staged, make_run):
    message = (
        "evaluation after rl: none of 5 held-out questions was judged. The reward function "
        "graded:silent must return a list of 1 mappings, .* got None; correct the function\nFini"
    )
    with pytest.raises(RewardFailed, match=message):
        staged(GRADED | {"verifier.reward": "graded:silent"})
    assert not make_run(SETTINGS).metrics.path.exists()
    assert staged(GRADED)[1] == list(range(5))


def test_one_sample_may_be_drawn(make_run, examples, asked):
    """As the paper evaluates; there is no pass@k of it."""
    run = make_run(SETTINGS | SAMPLED | {"evaluate.num_samples": 1})
    metrics = held_out(run, examples)
    assert metrics["acc"] == pytest.approx(3 / 5) and "pass@1" not in metrics
    assert (asked[1][0]["temperature"], asked[1][0]["sizes"].num_rows) == (0.7, 1)


def test_an_evaluation_inside_a_stage_leaves_the_files_of_its_step(benchmark_run, asked, examples):
    run = benchmark_run()
    evaluator = evaluate.Evaluator(run, examples, evaluate.open_benchmarks(run.config))
    metrics = [evaluator(PARAMS, name="rl", step=step) for step in (0, 50)]
    assert metrics[0] == metrics[1]
    assert metrics[0]["acc"] == metrics[0]["mean/acc"] == pytest.approx(3 / 5)
    assert len(asked[1]) == 1  # compiled once, for both kinds of questions and both steps
    assert len(asked[1][0]["asked"]) == 2 * len(examples)  # the weights are the same at both steps
    left = {str(path.relative_to(run.workdir)) for path in run.workdir.rglob("*.jsonl")}
    assert left == {
        f"{folder}/step_{step}{rest}"
        for step in (0, 50)
        for folder, rest in (
            ("samples_rl", ".jsonl"),
            ("benchmarks_rl", "/samples_mathvision_testmini.jsonl"),
        )
    }


def test_the_next_prompts_are_prepared_while_some_are_decoded(make_run, examples):
    """Of three groups; those of the first two are there before the first is decoded."""
    seen, both = [], threading.Event()

    class Questions(list):
        def __getitem__(self, place):
            seen.append(place)
            if {0, 1, 2, 3} <= {*seen}:
                both.set()
            return super().__getitem__(place)

    run = make_run(SETTINGS)
    groups = answering._prepared(run, Questions(examples), [[0, 1], [2, 3], [4]])
    assert list(next(groups)[0]) == [0, 1] and both.wait(60) and 4 not in seen
    assert [list(examples) for examples, _ in groups] == [[2, 3], [4]]
    assert not list(answering._prepared(run, examples, []))


def test_prompts_that_all_exceed_the_buckets_are_refused(make_run, asked):
    too_long = Example("long", "a", (), "1?" + " 1" * 300, "0")
    with pytest.raises(ValueError, match=r"none of the 1 prompts of held_out fits data\.buckets"):
        held_out(make_run(SETTINGS), [too_long])


REAL = {
    "evaluate.temperature": 1.0,
    "evaluate.num_samples": 3,
    "evaluate.max_response_tokens": 5,
    "seed": 4,
}


def test_draws_depend_on_question_and_sample_alone(make_run, params, questions):
    """One question at a time or four, one sample or all; compiled once for two evaluations."""
    held_out, responses = questions((0, 3, 1, 5, 2)), []
    for size, rows in ((1, 1), (4, 3)):
        changes = {"evaluate.batch_size": size, "evaluate.decode_rows": rows}
        run = make_run(REAL | changes, f"{size}")
        evaluator = evaluate.Evaluator(run, held_out, [])
        programs = evaluator._programs()
        for step in (0, 1):
            evaluator(params, name="rl", step=step)
            lines = (run.workdir / "samples_rl" / f"step_{step}.jsonl").read_text().splitlines()
            responses.append([json.loads(line)["resps"] for line in lines])
            decoding = programs.queue.programs
            counts = [f._cache_size() for f in (decoding.admit, decoding.advance)]
            if step == 0:
                first = counts
        assert counts == first
        assert programs.to_decode_layout._cache_size() == 1
    assert all(each == responses[0] for each in responses[1:])
    assert len({text for texts in responses[0] for text in texts}) > 10  # 15 draws
