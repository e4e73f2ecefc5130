"""Every metric that has a chart or is written has a definition."""

import pytest

from care_jax.report import curves, terms
from care_jax.report.groups import OUTCOMES, ROLES


@pytest.mark.parametrize("pattern", [p for _, _, patterns in curves.CHARTS for p in patterns])
def test_every_metric_of_a_chart_is_defined(pattern):
    names = {
        "*_seconds": ["rollout_seconds", "train_seconds"],
        "*tokens_per_second": ["rollout_tokens_per_second", "train_tokens_per_second"],
        "*tflops_per_second": ["train_tflops_per_second"],
        "*_mfu": ["train_mfu"],
        "clip_rate_*": ["clip_rate_negative_answer"],
        "host/programs_*": ["host/programs_compiled", "host/programs_found"],
        "a_raw/*": ["a_raw/anchor", "a_raw/negative"],
        "signature/*": ["signature/anchor_3", "signature/negative_3"],
    }
    for name in names.get(pattern, [pattern.replace("*", "x")]):
        assert terms.define(name), name


def test_a_metric_takes_the_first_row_that_matches():
    assert terms.define("verifier/crashes") != terms.define("verifier/new")
    assert "source" in terms.define("acc/made") and "benchmark" in terms.define("mmmu/acc")
    assert terms.define("nobody knows") == ""


def test_no_row_is_hidden_by_an_earlier_one():
    for number, (pattern, text) in enumerate(terms.METRICS):
        assert terms.define(pattern.replace("*", "x")) == text, number


def test_roles_and_outcomes_are_defined():
    assert {*ROLES, *OUTCOMES, "right", "wrong", "partly right"} <= terms.ROLLOUTS.keys()


def test_a_definition_is_a_line_with_a_full_stop():
    for text in (*(text for _, text in terms.METRICS), *terms.ROLLOUTS.values()):
        assert text.endswith(".") and "\n" not in text and len(text) < 110
