"""Measures of runs against numbers worked out by hand."""

import math

import pytest

from experiments.sweep.curves import gain_after
from experiments.sweep.measures import columns_of, mean_interval, measure_named
from experiments.sweep.outcome import NoReference, NotLogged, with_shared_tokens


def value(name, outcome, reference=None):
    return measure_named(name).of(outcome, reference)


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
    leads = columns_of(("benchmarks:lead",), [outcome])
    assert [each.label for each in leads.values()] == [
        "mathvista, %: lead over {reference}",
        "mean, %: lead over {reference}",
    ]
    other = make_outcome("other", final={"mathvista/acc": 0.6})
    assert leads["mathvista/acc:lead"].of(other, outcome) == pytest.approx(10)


def test_a_fluctuating_metric_is_averaged_over_the_last_tenth(make_outcome):
    lengths = [0.0] * 90 + [10.0, 20.0] * 5
    assert value("response_tokens", make_outcome(response_tokens=lengths)) == 15
    assert value("think_tokens", make_outcome(think_tokens=[None] * 100)) is None
    assert value("think_tokens", make_outcome(think_tokens=[None] * 99 + [0.5])) == 0.5
    assert value("grad_clipped", make_outcome(grad_clipped=[1.0] * 30 + [0.0] * 70)) == 0.3
    ratios = [2.0] * 25 + [None] * 50 + [4.0] * 25
    assert value("variance_ratio", make_outcome(variance_ratio=ratios)) == 3
    clipped = make_outcome(clip_rate_negative_answer=[0.5] * 10 + [0.0] * 90)
    assert value("clip_rate", clipped) == pytest.approx(5)


def test_the_share_of_reflected_groups_may_rise_or_fall(make_outcome):
    rates = [0.1] * 10 + [0.9] * 80 + [0.4] * 10
    assert value("reflect_rise", make_outcome(reflect_rate=rates)) == pytest.approx(30)
    assert value("reflect_rise", make_outcome(reflect_rate=rates[::-1])) == pytest.approx(-30)
    assert value("reflect_rise", make_outcome(reflect_rate=[None] * 100)) is None


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
    assert value("kl_per_trigger", make_outcome("two", num_steps=0), theirs) is None


def test_where_a_reference_policy_is_kept_its_kl_at_the_end_is_taken(make_outcome):
    kl_ref = [9.0] * 90 + [0.5] * 10
    ours = make_outcome("full", rescue_rate=0.25, kl_ref=kl_ref, kl_old=1.0)
    theirs = make_outcome("off", rescue_rate=0.0, kl_ref=0.1, kl_old=1.0)
    assert value("kl_per_trigger", ours, theirs) == pytest.approx(1000 * 0.4 / 1600)


def test_no_kl_is_compared_with_an_arm_that_keeps_no_reference_policy(make_outcome):
    ours = make_outcome("full", rescue_rate=0.25, kl_ref=0.5, kl_old=1.0)
    theirs = make_outcome("off", rescue_rate=0.0, kl_old=1.0)
    assert value("kl_per_trigger", ours, theirs) is None


def test_held_out_accuracy_during_the_run(make_outcome):
    """Trapezoids of width 2 and 6: (.2 + .4)·1 + (.4 + .5)·3 over 8 is 41.25%."""
    outcome = make_outcome(num_steps=8, held_out={0: 0.2, 2: 0.4, 8: 0.5})
    assert value("held_out_area", outcome) == pytest.approx(41.25)
    assert value("held_out_area", make_outcome(held_out={0: 0.2})) == 20


TOKENS = {"num_steps": 4, "decoded_tokens": [100, 200, 300, 400], "shared_tokens": 400.0}
NOT_LOGGED = (  # measure, metrics of a run, the key to set
    ("acc_at_50", {"num_steps": 49, "acc": 0.5}, r"set rl\.num_steps to at least 50"),
    (
        "rescue_gain@50",
        {"num_steps": 50, "acc": 0.5, "rescue_rate": 0.5},
        r"rl\.num_steps above 50",
    ),
    ("held_out_area", {}, r"set rl\.eval_every above 0"),
    ("held_out_area:lead", {}, r"set rl\.eval_every above 0"),
    ("held_out_equal_tokens", {"shared_tokens": 100.0}, r"set rl\.eval_every above 0"),
    (
        *("held_out_equal_tokens", {"held_out": {0: 0.1, 2: 0.4}} | TOKENS),
        r"evaluate\.at_start and an rl\.eval_every that divides",
    ),
)


@pytest.mark.parametrize(("name", "metrics", "message"), NOT_LOGGED)
def test_what_was_not_measured_names_the_key_to_set(make_outcome, name, metrics, message):
    with pytest.raises(NotLogged, match=message):
        value(name, make_outcome("two", **metrics), make_outcome("one", acc=0.5))


def test_the_gain_after_all_failed_groups_is_weighted_by_them(make_outcome):
    """Over two steps: +0.2 after step 0 with one part of them, +0.4 after step 1 with three.

    Steps 3 and 4 have no two steps after them.
    """
    acc, rates = [0.1, 0.1, 0.3, 0.5, 0.9], [0.1, 0.3, 0.0, 0.9, 0.9]
    outcome = make_outcome(num_steps=5, acc=acc, all_wrong_rate=rates)
    assert gain_after("all_wrong_rate", outcome, 2) == pytest.approx((0.2 + 3 * 0.4) / 4)
    late = make_outcome(acc=[0.1] * 50 + [0.4] * 50, all_wrong_rate=0.5)
    assert value("rescue_gain@50", late) == pytest.approx(30)
    assert value("rescue_gain@50", make_outcome(acc=0.5, all_wrong_rate=0.0)) is None
    repaired = make_outcome(num_steps=400, acc=[0.1] * 300 + [0.3] * 100, reflect_rate=0.5)
    assert value("reflect_gain@300", repaired) == pytest.approx(20)


@pytest.fixture
def unequal(make_outcome):
    """One arm decodes 100 tokens a step, the other 200; each has two evaluations or three."""
    one = make_outcome(
        "one",
        num_steps=4,
        acc=[0.1, 0.2, 0.3, 0.4],
        decoded_tokens=[100, 200, 300, 400],
        held_out={0: 0.1, 4: 0.5},
    )
    two = make_outcome(
        "two",
        num_steps=4,
        acc=[0.2, 0.4, 0.6, 0.8],
        decoded_tokens=[200, 400, 600, 800],
        held_out={0: 0.1, 1: 0.3, 4: 0.9},
    )
    other_seed = make_outcome("one", 1, num_steps=1, acc=0.5, decoded_tokens=150)
    return with_shared_tokens([one, two, other_seed])


def test_an_arm_without_rl_takes_no_part_in_the_tokens_of_its_seed(unequal, make_outcome):
    one, two, _ = unequal
    rows = with_shared_tokens([one, make_outcome("base", num_steps=0), two])
    assert [rows[0].shared_tokens, rows[2].shared_tokens] == [400, 400]
    assert math.isnan(rows[1].shared_tokens)


def test_arms_are_compared_at_the_tokens_that_all_of_the_seed_have_reached(unequal):
    """At 400 tokens, `one` is at its end, and `two` at half of its run."""
    one, two, other_seed = unequal
    assert [each.shared_tokens for each in unequal] == [400, 400, 150]
    assert value("shared_tokens", other_seed) == pytest.approx(150e-6)
    assert value("rollout_equal_tokens", other_seed) == pytest.approx(50)
    # The last 40 tokens lie in the fourth step of `one`, in the second of `two`.
    assert value("rollout_equal_tokens", one) == pytest.approx(40)
    assert value("rollout_equal_tokens", two) == pytest.approx(40)
    # `two`: 0.3 at 200 tokens and 0.9 at 800, so 0.5 at 400.
    assert value("held_out_equal_tokens", one) == pytest.approx(50)
    assert value("held_out_equal_tokens", two) == pytest.approx(50)
    assert value("held_out_equal_tokens:lead", two, one) == pytest.approx(0)


def test_a_window_of_tokens_takes_its_part_of_every_step(make_outcome):
    """Of 1000 tokens the last 100: 40 of a step at 0.2, 60 of one at 0.7."""
    outcome = make_outcome(
        num_steps=3, acc=[0.9, 0.2, 0.7], decoded_tokens=[500, 940, 2000], shared_tokens=1000.0
    )
    assert value("rollout_equal_tokens", outcome) == pytest.approx(40 * 0.2 + 60 * 0.7)


def test_equal_tokens_need_tokens(make_outcome):
    assert value("rollout_equal_tokens", make_outcome(acc=0.5, decoded_tokens=100)) is None


def test_a_lead_is_the_difference_under_the_same_seed(make_outcome):
    ours, theirs = (
        make_outcome(arm, held_out={0: 0.1, 2: acc}) for arm, acc in (("two", 0.6), ("one", 0.4))
    )
    name = "held_out_area:lead"
    assert value(name, ours, theirs) == pytest.approx(10)
    assert value(name, theirs, theirs) is None
    with pytest.raises(NoReference):
        value(name, ours, None)
    label = "held-out acc, mean over the steps, %: lead over {reference}"
    assert measure_named(name).label == label


@pytest.mark.parametrize("name", ["fun", "acc@3", "acc:gain", "acc:", "fun:lead", "acc:lead:lead"])
def test_a_name_that_stands_for_nothing_is_refused(name):
    with pytest.raises(KeyError):
        measure_named(name)
