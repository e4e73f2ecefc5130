"""The √K' signature over all groups, against numbers worked out by hand."""

import json

import numpy as np
import pytest

from experiments.sweep.measures import measure_named
from experiments.sweep.outcome import NotLogged
from experiments.sweep.signature import r2, sample_of, sample_points, slope


def value(name, outcome):
    return measure_named(name).of(outcome, None)


def test_no_line_goes_through_points_of_one_abscissa():
    for fit in (slope, r2):
        assert fit(np.ones(5), np.arange(5.0)) is None
        assert fit(np.arange(2.0), np.arange(2.0)) is None


def response(role, reward, raw):
    return {"role": role, "reward": reward, "raw": raw}


def group(anchor, *negatives, step=0, more=()):
    """A line of rollouts.jsonl, with A_raw as the program computes it."""
    rewards = np.array([anchor, *negatives])
    raw = (rewards - rewards.mean()) / rewards.std()
    rows = [response("anchor", anchor, float(raw[0]))]
    rows += [
        response("hard negative", reward, float(each))
        for reward, each in zip(negatives, raw[1:], strict=True)
    ]
    return {"step": step, "responses": [*rows, response("unused", 1.0, 0.0), *more]}


@pytest.fixture
def write(tmp_path, make_outcome):
    """An outcome whose rollouts.jsonl has these groups."""

    def write(*groups, name="rollouts.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(each) + "\n" for each in groups))
        return make_outcome(workdir=tmp_path)

    return write


# Rewards 1, 0.6, 0.3, 0: mean 0.3 and variance 0.06 of the negatives, Δ = 0.7.
GRADED = group(1.0, 0.6, 0.3, 0.0)
TEXT, APPENDIX = (1 + 4 * 0.06 / 0.49) ** -0.5, (1 + 3 * 0.06 / 0.49) ** -0.5


def test_a_group_of_graded_negatives_by_hand(write):
    sample = sample_of(write(GRADED))
    assert sample.num_negatives == [3]
    assert sample.text == pytest.approx(TEXT)
    assert sample.appendix == pytest.approx(APPENDIX)
    assert sample.anchor == pytest.approx(3**0.5 * TEXT)
    assert sample.negative == pytest.approx(-(3**-0.5) * TEXT)


def test_every_contrasted_group_is_one_point_and_no_other_group_is(write):
    outcome = write(
        group(1.0, 0.0),
        GRADED,
        group(1.0, 0.0, 0.0, step=1, more=[response("reflected", 0.0, -1.0)]),
        {"step": 1, "responses": [response("pseudo-anchor", 0.0, 1.0),
                                  response("hard negative", 0.0, -1.0)]},
        {"step": 1, "responses": [response("unused", 1.0, 0.0)]},
        {"step": 1, "responses": [response("", 1.0, None)]},
        group(0.9, 1.0, 1.0, step=1),  # the anchor's reward is below its negatives'
    )  # fmt: skip
    assert value("groups", outcome) == 2
    x, y = sample_points(outcome, "anchor")
    np.testing.assert_allclose(x, [1, 3**0.5])
    np.testing.assert_allclose(y, [1, 3**0.5 * TEXT])
    x, y = sample_points(outcome, "negative")
    np.testing.assert_allclose(x, [1, 3**-0.5])
    np.testing.assert_allclose(y, [-1, -(3**-0.5) * TEXT])
    x, y = sample_points(outcome, "appendix")
    np.testing.assert_allclose(x, [1, APPENDIX])
    np.testing.assert_allclose(y, [1, TEXT])


def test_the_formula_of_the_text_is_exact_and_the_appendixs_is_not(write):
    outcome = write(group(1.0, 0.0), GRADED, group(1.0, 0.5, 0.1), group(1.0, 0.8, 0.4))
    assert value("alpha_text_slope", outcome) == pytest.approx(1)
    assert value("alpha_text_r2", outcome) == pytest.approx(1)
    assert value("alpha_text_error", outcome) == pytest.approx(0, abs=1e-12)
    assert value("alpha_appendix_slope", outcome) != pytest.approx(1, abs=0.01)


def test_means_and_errors_of_both_formulas_by_hand(write):
    outcome = write(group(1.0, 0.0), GRADED)
    assert value("alpha_text", outcome) == pytest.approx((1 + TEXT) / 2)
    assert value("alpha_appendix", outcome) == pytest.approx((1 + APPENDIX) / 2)
    assert value("alpha_appendix_error", outcome) == pytest.approx((APPENDIX - TEXT) / 2**0.5)


def test_least_squares_over_the_sample_by_hand(write):
    """K' = 1, 1, 4 with A⁺ = 1, 1, 2 and, of unequal negatives, 2·β: x = 1, 1, 2, 2."""
    four = group(1.0, 0.5, 0.5, 0.0, 0.0)  # Δ = 3/4, variance 1/16: 1 + 5/9
    beta = (14 / 9) ** -0.5
    outcome = write(group(1.0, 0.0), group(1.0, 0.3), group(1.0, 0, 0, 0, 0), four)
    # Means 1 and 1 + β at the two abscissas: slope β. SST = (1-m)²·2 + (2-m)² + (2β-m)².
    assert value("anchor_sample_slope", outcome) == pytest.approx(beta)
    y = np.array([1, 1, 2, 2 * beta])
    r2 = beta**2 / ((y - y.mean()) ** 2).sum()
    assert value("anchor_sample_r2", outcome) == pytest.approx(r2)
    # 1/√K' = 1, 1, 1/2, 1/2 and A⁻ = -1, -1, -1/2, -β/2.
    assert value("negative_sample_slope", outcome) == pytest.approx((-1 + (1 + beta) / 4) / 0.5)
    y = np.array([-1, -1, -0.5, -beta / 2])
    r2 = (-1 + (1 + beta) / 4) ** 2 / ((y - y.mean()) ** 2).sum()
    assert value("negative_sample_r2", outcome) == pytest.approx(r2)


def test_all_files_of_a_run_are_read(write):
    write(group(1.0, 0.0), name="rollouts.1.jsonl")
    write(group(1.0, 0.0), name="rollouts_1.jsonl")
    assert value("groups", write(group(1.0, 0.0, step=1))) == 3


def test_rollouts_that_were_not_kept_or_are_dropped_are_told(write, make_outcome, tmp_path):
    with pytest.raises(NotLogged, match=r"set report\.rollouts_megabytes above 0"):
        sample_of(make_outcome(workdir=tmp_path))
    write(group(1.0, 0.0))
    outcome = write(group(1.0, 0.0, step=7), name="rollouts_1.jsonl")
    with pytest.raises(NotLogged, match="megabytes higher: the rollouts before step 7 are dropped"):
        value("anchor_sample_r2", outcome)


def test_a_run_without_contrast_has_no_signature(write):
    outcome = write({"step": 0, "responses": [response("", 1.0, None)]})
    for name in ("anchor_sample_slope", "alpha_text", "alpha_appendix_error"):
        assert value(name, outcome) is None
    assert value("groups", outcome) == 0
