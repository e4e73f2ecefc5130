"""What the scripted sampler of conftest.py answers, and an evaluation by it."""

import json

import jax.numpy as jnp

from care_jax.stages import evaluate

T = 16
# By length of the question: source, answer of the policy, whether it keeps to the format.
ROWS = (
    ("a", "0", True),
    ("b", "9", True),
    ("a", "2", False),
    ("a", "3", False),
    ("b", "9", False),
)
PARAMS = {"w": jnp.arange(3.0)}
SETTINGS = {"evaluate.batch_size": 3, "evaluate.max_response_tokens": T, "rl.temperature": 0.7}
SAMPLED = {
    "evaluate.temperature": 0.7,
    "evaluate.top_p": 0.9,
    "evaluate.num_samples": 4,
    "evaluate.decode_rows": 3,
}
GRADED = {"verifier.reward": "graded:graded", "verifier.num_workers": 1}


def held_out(run, examples, name="rl", params=PARAMS):
    return evaluate.Evaluator(run, examples, [])(params, name=name)


def benchmarked(run, params=PARAMS, step=None):
    benchmarks = evaluate.open_benchmarks(run.config)
    return evaluate.Evaluator(run, None, benchmarks)(params, name="rl", step=step)


def samples_of(run):
    path = run.workdir / "benchmarks_rl" / "samples_mathvision_testmini.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]
