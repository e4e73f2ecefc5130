"""Evaluation around a scripted sampler: who is asked, how, and what the figures mean."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from care_jax.batch import Example, Rollouts
from care_jax.benchmarks import mathvision
from care_jax.benchmarks.rows import Question
from care_jax.benchmarks.samples import to_line
from care_jax.devices import distributed
from care_jax.report.metrics import wilson_interval
from care_jax.rewards.failures import RewardFailed
from care_jax.stages import answering, evaluate

T = 16
# By length of the question: source, answer of the policy, whether it keeps to the format.
ROWS = (
    ("a", "0", True),
    ("b", "9", True),
    ("a", "2", False),
    ("a", "3", False),
    ("b", "9", False),
)


@pytest.fixture
def examples():
    return [
        Example(f"e{i}", source, (), "1?" + " 1" * i, str(i))
        for i, (source, _, _) in enumerate(ROWS)
    ]


@pytest.fixture
def asked(policy, examples, monkeypatch):
    """What the sampler was called with; it answers a prompt by its length.

    Every second sample of a prompt is wrong.
    """
    texts = [
        f"<think>a</think><answer>{answer}</answer>"
        if is_formatted
        else f"<answer>{answer}</answer>"
        for _, answer, is_formatted in ROWS
    ]
    table = np.full((200, T), policy.config.pad_token_id, np.int32)
    lengths = np.zeros(200, int)
    for example, text in zip(examples, texts, strict=True):
        tokens = policy.prompts.response_tokens(text)
        row = len(policy.prompts.tokenize(example).tokens)
        table[row, : len(tokens)], lengths[row] = tokens, len(tokens)
    wrong = policy.prompts.response_tokens("<answer>9</answer>")
    table[0, : len(wrong)], lengths[0] = wrong, len(wrong)
    calls = []

    def compile_decoder(run, **choice):
        calls.append(choice)

    class Queue:
        def __init__(self, programs, prompts, sizes, clock):
            calls[-1] |= {"sizes": sizes, "asked": []}
            self.asked, self.num_samples = calls[-1]["asked"], sizes.num_rollouts

        def decode(self, params, rng, requests):
            """The last first, one at a time."""
            self.asked += [request.index for request in requests]
            for index, request in reversed(list(enumerate(requests))):
                length = len(request.prompt.tokens)
                rows = [0 if sample % 2 else length for sample in range(self.num_samples)]
                tokens = table[rows][None]
                is_valid = (np.arange(T) < lengths[rows][:, None])[None]
                yield (
                    [index],
                    Rollouts(
                        tokens=tokens,
                        is_valid=is_valid,
                        is_forced=np.zeros_like(is_valid),
                        logp=np.zeros(tokens.shape, np.float32),
                        embedding=np.zeros((1, self.num_samples, 2), np.float32),
                        is_complete=is_valid.any(-1),
                    ),
                )

    monkeypatch.setattr(answering, "compile_decoder", compile_decoder)
    monkeypatch.setattr(answering, "DecodeQueue", Queue)
    monkeypatch.setattr(answering, "compile_to_decode_layout", lambda _: lambda params: params)
    return texts, calls


PARAMS = {"w": jnp.arange(3.0)}


def held_out(run, examples, name="rl", params=PARAMS):
    return evaluate.Evaluator(run, examples, [])(params, name=name)


SETTINGS = {"evaluate.batch_size": 3, "evaluate.max_response_tokens": T, "rl.temperature": 0.7}


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


SAMPLED = {
    "evaluate.temperature": 0.7,
    "evaluate.top_p": 0.9,
    "evaluate.num_samples": 4,
    "evaluate.decode_rows": 3,
}


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


GRADED = {"verifier.reward": "graded:graded", "verifier.num_workers": 1}
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


def test_samples_are_taken_over_for_the_same_weights_alone(make_run, examples, asked):
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


@pytest.fixture
def release(tmp_path, examples, policy):
    """The questions as a benchmark of their own, with prompts as long as the examples'."""
    rows = [
        {"id": i, "question": example.question, "answer": example.answer, "subject": example.source}
        for i, example in enumerate(examples)
    ]
    (tmp_path / "testmini.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "testmini.jsonl"


@pytest.fixture
def benchmark_run(make_run, release, monkeypatch):
    """Makes runs that evaluate the release, asked without a picture or a preamble."""

    def question(row):
        return Question(row["question"], ())

    monkeypatch.setattr(mathvision, "question", question)

    def make(**changes):
        benchmarks = (("mathvision_testmini", str(release)),)
        return make_run(SETTINGS | {"evaluate.benchmarks": benchmarks} | changes)

    return make


def benchmarked(run, params=PARAMS):
    benchmarks = evaluate.open_benchmarks(run.config)
    return evaluate.Evaluator(run, None, benchmarks)(params, name="rl")


def samples_of(run):
    path = run.workdir / "benchmarks_rl" / "samples_mathvision_testmini.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def test_a_benchmark_is_scored_by_its_own_rules(benchmark_run, asked):
    run = benchmark_run()
    metrics = benchmarked(run)
    assert metrics["mathvision_testmini/acc"] == metrics["mean/acc"] == pytest.approx(3 / 5)
    assert metrics["mathvision_testmini/acc_low"] == wilson_interval(3, 5)[0]
    results = json.loads((run.workdir / "benchmarks_rl" / "results.json").read_text())
    figures = results["benchmarks"]["mathvision_testmini"]
    assert figures["categories"]["subject/a"]["acc"] == 1
    assert "judge" not in results
    assert "| 60.0 |" in (run.workdir / "benchmarks_rl" / "results.md").read_text()
    samples = samples_of(run)
    assert [sample["doc_id"] for sample in samples] == list(range(5))
    assert [sample["resps"] for sample in samples] == [[text] for text in asked[0]]
    assert [sample["filtered_resps"] for sample in samples] == [[x] for _, x, _ in ROWS]
    assert [sample["target"] for sample in samples] == ["0", "1", "2", "3", "4"]
    assert samples[2]["doc"]["question"] == samples[2]["input"] == "1? 1 1"


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


def test_samples_of_another_benchmark_are_not_believed(benchmark_run, release, asked):
    """Files that were swapped: weights and settings are the same."""
    benchmarked(benchmark_run())
    run = benchmark_run(**{"evaluate.benchmarks": (("mathvision", str(release)),)})
    folder = run.workdir / "benchmarks_rl"
    (folder / "samples_mathvision_testmini.jsonl").rename(folder / "samples_mathvision.jsonl")
    benchmarked(run)
    assert [call["asked"] for call in asked[1]] == [[*range(5)]] * 2


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


@pytest.mark.parametrize(
    ("weights", "changes"),
    [
        ({"w": jnp.arange(3.0) + 1e-4}, {}),
        ({"w": jnp.arange(3.0)[::-1]}, {}),
        (PARAMS, {"data.instruction": "Think."}),
        (PARAMS, {"model.compute_dtype": "bfloat16"}),
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


def test_benchmarks_count_the_mean_of_a_rows_samples(benchmark_run, asked):
    run = benchmark_run(**SAMPLED)
    metrics = benchmarked(run)
    assert metrics["mathvision_testmini/acc"] == metrics["mean/acc"] == pytest.approx(0.3)
    assert metrics["mathvision_testmini/pass@2"] == pytest.approx(3 / 5 * 5 / 6)
    assert samples_of(run)[0]["accs"] == [1, 0, 1, 0] and samples_of(run)[0]["acc"] == 0.5
    assert len(samples_of(run)[0]["resps"]) == len(samples_of(run)[0]["filtered_resps"]) == 4
    results = (run.workdir / "benchmarks_rl" / "results.md").read_text()
    assert "mathvision_testmini: pass@1 30.0, pass@2 50.0, pass@4 60.0" in results
    # Samples of another temperature are not believed.
    asked[1].clear()
    other = benchmark_run(**SAMPLED | {"evaluate.temperature": 0.8})
    benchmarked(other)
    assert asked[1][0]["asked"] == list(range(5))


def test_samples_of_other_rows_are_not_believed(benchmark_run, release, asked):
    """A release may be downloaded in parts, or replaced by another split."""
    benchmarked(benchmark_run())
    first, *rest = release.read_text().splitlines(keepends=True)
    release.write_text("".join(rest))
    benchmarked(benchmark_run())
    release.write_text("".join([first.replace("?", "!"), *rest]))
    benchmarked(benchmark_run())
    assert [call["asked"] for call in asked[1]] == [[*range(n)] for n in (5, 4, 5)]


def test_a_prompt_that_fits_no_bucket_counts_as_wrong(benchmark_run, release, asked, capsys):
    row = {"id": 9, "question": "1?" + " 1" * 300, "answer": "0", "subject": "c"}
    release.write_text(json.dumps(row) + "\n" + release.read_text())
    run = benchmark_run()
    metrics = benchmarked(run)
    assert metrics["mean/acc"] == pytest.approx(3 / 6)
    assert [sample["is_dropped"] for sample in samples_of(run)] == [True] + [False] * 5
    assert "1 of 6 prompts of mathvision_testmini fit no bucket" in capsys.readouterr().out


def test_the_judge_is_asked_about_wrong_free_answers_alone(benchmark_run, asked):
    """Two of five answers are wrong; the judge takes both."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"choices": [{"message": {"content": "1"}}]}')

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    run = benchmark_run(**{"evaluate.judge_url": url, "evaluate.judge_model": "m"})
    benchmarked(run)
    server.shutdown()
    server.server_close()
    results = json.loads((run.workdir / "benchmarks_rl" / "results.json").read_text())
    figures = results["benchmarks"]["mathvision_testmini"]
    assert (figures["acc"], figures["acc_judged"]) == (pytest.approx(3 / 5), 1.0)
    assert results["judge"]["requests"] == len(seen) == 2
    assert all("Model's answer:\n9" in body["messages"][1]["content"] for body in seen)


def test_the_judge_is_asked_about_each_wrong_sample(benchmark_run, asked, monkeypatch):
    """It takes every second answer it is asked about, and right ones count without it."""
    seen = []

    def verdicts(self, cases):
        seen.extend(cases)
        return [number % 2 == 0 for number in range(len(cases))]

    monkeypatch.setattr(evaluate.Judge, "verdicts", verdicts)
    judge = {"evaluate.judge_url": "http://x", "evaluate.judge_model": "m"}
    run = benchmark_run(**SAMPLED | judge | {"evaluate.num_samples": 2})
    benchmarked(run)
    assert [case.answer for case in seen] == ["9"] * 7  # one of three questions, two of two
    figures = [(sample["acc"], sample["acc_judged"]) for sample in samples_of(run)]
    assert figures == [(0.5, 1.0), (0.0, 0.5), (0.5, 0.5), (0.5, 1.0), (0.0, 0.5)]


JUDGE = {"evaluate.judge_url": "http://x", "evaluate.judge_model": "m"}


@pytest.fixture
def words(monkeypatch):
    """What the judge says, in order, and what it is asked; None is a failure."""
    said, seen = [], []

    def verdicts(self, cases):
        seen.extend(case.gold for case in cases)
        found = [said.pop(0) for _ in cases]
        self.counts["failures"] += found.count(None)
        return found

    monkeypatch.setattr(evaluate.Judge, "verdicts", verdicts)
    return said, seen


def test_a_restart_asks_the_judge_only_for_the_verdicts_that_it_did_not_give(
    benchmark_run, asked, words, capsys
):
    said, seen = words
    run = benchmark_run(**JUDGE)
    said += [True, None]  # on questions 1 and 4
    benchmarked(run)
    assert [sample["acc_judged"] for sample in samples_of(run)] == [None, 1.0, None, None, None]
    assert "the judge gave no verdict on 1 answers" in capsys.readouterr().out
    for word, judged in ((None, None), (True, 1.0)):
        said.append(word)
        seen.clear()
        benchmarked(run)
        assert seen == ["4"] and samples_of(run)[4]["acc_judged"] == judged
    seen.clear()
    before = samples_of(run)
    benchmarked(run)
    assert not seen and samples_of(run) == before


def test_the_judges_of_all_processes_are_counted(benchmark_run, asked, words, monkeypatch, capsys):
    gather = distributed.gather_json

    def of_two(value):
        if value and isinstance(value, list) and "failures" in value[0]:  # no list of samples
            return [value, [value[0] | {"failures": 3}, 0.5, "503 busy"]]
        return gather(value)

    monkeypatch.setattr(distributed, "gather_json", of_two)
    words[0].extend([True, None])
    run = benchmark_run(**JUDGE)
    benchmarked(run)
    results = json.loads((run.workdir / "benchmarks_rl" / "results.json").read_text())
    assert (results["judge"]["failures"], results["judge"]["cost"]) == (4, 0.5)
    assert "the judge gave no verdict on 4 answers (503 busy)" in capsys.readouterr().out


def test_another_judge_changes_no_verdict_of_the_first(benchmark_run, asked, words):
    said, seen = words
    said += [True, False]
    first = benchmark_run(**JUDGE)
    benchmarked(first)
    before, decoded = samples_of(first), [list(call["asked"]) for call in asked[1]]
    for other in ({"evaluate.judge_model": "n"}, {"evaluate.judge_url": "http://y"}):
        said += [False, None]
        run = benchmark_run(**JUDGE | other)
        benchmarked(run)
        after = samples_of(run)
        assert [sample["acc_judged"] for sample in after] == [None, 0.0, None, None, None]
        for old, new in zip(before, after, strict=True):
            assert old.get("judges", {}).items() <= new.get("judges", {}).items()
        before = after
    benchmarked(benchmark_run())  # without a judge
    assert {sample["acc_judged"] for sample in samples_of(first)} == {None}
    seen.clear()
    benchmarked(first)
    assert [sample["acc_judged"] for sample in samples_of(first)] == [None, 1.0, None, None, 0.0]
    assert not seen
    # Nothing was decoded again.
    assert [call["asked"] for call in asked[1] if call["asked"]] == decoded


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


@pytest.fixture
def staged(make_run, examples, asked):
    """Runs the stage in a workdir: metrics, indices decoded, and the stages of all lines."""

    def staged(changes=None, params=PARAMS, run=None):
        asked[1].clear()
        run = run or make_run(SETTINGS | (changes or {}))
        evaluator = evaluate.Evaluator(run, examples, [])
        metrics = evaluate.evaluate_stage(run, evaluator, params, name="rl")
        lines = [json.loads(line) for line in run.metrics.path.read_text().splitlines()]
        decoded = [place for call in asked[1] for place in call["asked"]]
        return metrics, decoded, [line["stage"] for line in lines]

    return staged


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
    assert evaluator._held_out_settings != evaluate.Evaluator(run, examples, [])._held_out_settings
    assert staged(GRADED)[1] == staged(GRADED)[1] == list(range(5))
