"""Measures of runs against numbers worked out by hand."""

import math

import numpy as np
import pytest

from care_jax.sweep.measures import MEASURES, columns_of, fit, mean_interval, signature_points


def value(name, outcome, reference=None):
    return MEASURES[name].of(outcome, reference)


def test_the_interval_is_students_t_over_the_seeds():
    # Of 1, 2, 3: s = 1, t(0.975, 2) = 4.302653.
    mean, half = mean_interval([1.0, 2.0, 3.0])
    assert mean == 2
    assert half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert math.isnan(mean_interval([1.0])[1])


def test_accuracy_gain_and_lead_are_points(make_outcome):
    ours = make_outcome("two", start={"acc": 0.5}, final={"acc": 0.75})
    theirs = make_outcome("one", start={"acc": 0.5}, final={"acc": 0.7})
    assert value("acc", ours) == 75
    assert value("gain", ours) == 25
    assert value("lead", ours, theirs) == pytest.approx(5)
    assert value("lead", theirs, theirs) is None
    assert value("gain", make_outcome(final={"acc": 1.0})) is None


def test_without_held_out_questions_the_benchmarks_mean_is_compared(make_outcome):
    start = {"mathvista/acc": 0.2, "mean/acc": 0.2}
    final = {"mathvista/acc": 0.5, "mathvista/acc_low": 0.4, "mean/acc": 0.5}
    outcome = make_outcome(start=start, final=final)
    assert value("gain", outcome) == pytest.approx(30)
    columns = columns_of(("acc", "benchmarks"), [outcome])
    assert [each.label for each in columns.values()] == [
        "held-out acc, %",
        "mathvista, %",
        "mean, %",
    ]
    assert columns["mathvista/acc"].of(outcome, None) == 50


def test_a_fluctuating_metric_is_averaged_over_the_last_tenth(make_outcome):
    lengths = [0.0] * 90 + [10.0, 20.0] * 5
    assert value("response_tokens", make_outcome(response_tokens=lengths)) == 15
    assert value("alpha", make_outcome(**{"signature/alpha": [None] * 100})) is None
    assert value("alpha", make_outcome(**{"signature/alpha": [None] * 99 + [0.5]})) == 0.5


def test_reflections_count_one_by_one_over_the_whole_run(make_outcome):
    """Half of all groups at a success of 20%, an eighth at 70%: 30% of the reflections."""
    steps = {
        "reflect_rate": [0.5] * 50 + [0.125] * 49 + [0.125],
        "reflect_success": [0.2] * 50 + [0.7] * 49 + [0.7],
    }
    assert value("reflect_success", make_outcome(**steps)) == pytest.approx(30)
    first = {"reflect_rate": [0.5, 0.0] * 50, "reflect_first_try": [0.4, None] * 50}
    assert value("reflect_first_try", make_outcome(**first)) == pytest.approx(40)
    assert value("reflect_success", make_outcome(reflect_success=[None] * 100)) is None


def test_the_rescue_is_measured_against_the_run_without_it(make_outcome):
    ours = make_outcome(
        "full",
        acc=[0.0] * 40 + [0.6] * 10 + [0.0] * 50,
        rescue_rate=0.25,
        kl_old=[0.03] * 50 + [0.01] * 50,
    )
    theirs = make_outcome("off", acc=0.5, rescue_rate=0.0, kl_old=0.01)
    assert value("triggers", ours) == 100 * 64 / 4
    assert value("acc_at_50", ours, theirs) == pytest.approx(10)  # steps 40 to 49
    assert value("kl_per_trigger", ours, theirs) == pytest.approx(1000 * 50 * 0.02 / 1600)
    assert value("acc_at_50", theirs, theirs) is None
    assert value("kl_per_trigger", theirs, theirs) is None


def test_where_a_reference_policy_is_kept_its_kl_at_the_end_is_taken(make_outcome):
    kl_ref = [9.0] * 90 + [0.5] * 10
    ours = make_outcome("full", rescue_rate=0.25, kl_ref=kl_ref, kl_old=1.0)
    theirs = make_outcome("off", rescue_rate=0.0, kl_ref=0.1, kl_old=1.0)
    assert value("kl_per_trigger", ours, theirs) == pytest.approx(1000 * 0.4 / 1600)


def test_no_kl_is_compared_with_an_arm_that_keeps_no_reference_policy(make_outcome):
    ours = make_outcome("full", rescue_rate=0.25, kl_ref=0.5, kl_old=1.0)
    theirs = make_outcome("off", rescue_rate=0.0, kl_old=1.0)
    assert value("kl_per_trigger", ours, theirs) is None


@pytest.fixture
def signed(make_outcome):
    """Three steps of a run whose groups have one or four negatives, α = 1, 0.9, 0.8."""
    alpha = [1.0, 0.9, 0.8]
    return make_outcome(
        num_steps=3,
        **{
            "signature/alpha": alpha,
            "signature/ratio": alpha,
            "signature/anchor_1": [1.0, 0.9, None],
            "signature/anchor_4": [2.0, 1.8, 1.6],
            "signature/negative_1": [-1.0, -0.9, None],
            "signature/negative_4": [-0.5, -0.45, -0.4],
        },
    )


def test_points_of_the_signature(signed):
    x, y = signature_points(signed, "anchor")
    np.testing.assert_allclose(x, [1, 1, 2, 2, 2])
    np.testing.assert_allclose(y, [1, 0.9, 2, 1.8, 1.6])
    x, y = signature_points(signed, "negative")
    np.testing.assert_allclose(x, [1, 1, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(y, [-1, -0.9, -0.5, -0.45, -0.4])
    x, y = signature_points(signed, "alpha")
    np.testing.assert_allclose(x, y)


def test_least_squares_of_the_signature(signed):
    # x - 1.6 = -.6, -.6, .4, .4, .4 and y's: Sxy = .4·5.4 - .6·1.9 = 1.02; Sxx = 1.2.
    assert value("anchor_slope", signed) == pytest.approx(1.02 / 1.2)
    y = np.array([1, 0.9, 2, 1.8, 1.6])
    r2 = 1.02**2 / 1.2 / ((y - y.mean()) ** 2).sum()
    assert value("anchor_r2", signed) == pytest.approx(r2)
    assert value("alpha_slope", signed) == pytest.approx(1)
    assert value("alpha_r", signed) == pytest.approx(1)
    assert value("negative_slope", signed) == pytest.approx(-1)  # 0.5·Sxy/0.25·Sxx, Sxy = -0.3
    assert value("alpha", signed) == 0.8


def test_no_line_goes_through_points_of_one_abscissa():
    assert fit(np.ones(5), np.arange(5.0)) is None
    assert fit(np.arange(2.0), np.arange(2.0)) is None
