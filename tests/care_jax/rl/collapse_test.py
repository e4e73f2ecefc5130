"""A collapse is one line, noise none."""

import numpy as np

from care_jax.rl.collapse import CollapseWatch


def said(**series):
    """The warnings of a run with these values per step."""
    watch, names = CollapseWatch(), list(series)
    steps = [dict(zip(names, values, strict=True)) for values in zip(*series.values(), strict=True)]
    return [line for step, metrics in enumerate(steps) for line in watch.warnings(step, metrics)]


def test_format_or_length_that_halves_within_a_few_steps_is_one_line():
    (line,) = said(fmt=[0.96] * 12 + [0.3] * 20, all_wrong_rate=[0.4] * 32)
    assert line.startswith("warning: fmt, the share of well-formed responses, fell from 0.9")
    assert "rl.learning_rate" in line
    (line,) = said(response_tokens=[420.0] * 20 + [60.0] * 20)
    assert "response_tokens fell from" in line
    assert len(said(fmt=[0.9] * 9 + [0.1] * 9, response_tokens=[99.0] * 9 + [9.0] * 9)) == 2


def test_groups_without_a_correct_answer_are_one_line():
    (line,) = said(all_wrong_rate=[1.0] * 40)
    assert "100% of the groups of the 5 steps to step 9 have no correct answer" in line


def test_groups_without_an_update_are_one_line():
    """All correct, or all counted as successes; the same groups are not told twice."""
    (line,) = said(skip_rate=[0.6] * 20 + [0.97] * 20, all_correct_rate=[0.5] * 20 + [0.96] * 20)
    assert "97% of the groups of the 5 steps to step 24 give no update (96% are all correct" in line
    assert len(said(skip_rate=[1.0] * 40, all_wrong_rate=[1.0] * 40)) == 1
    assert said(skip_rate=[0.9] * 40, all_correct_rate=[0.9] * 40) == []


def test_noise_growth_and_a_slow_change_are_no_collapse():
    noise = np.random.default_rng(0)
    fmt = noise.uniform(0.6, 1.0, 200)
    length = np.linspace(400, 100, 200) * noise.uniform(0.8, 1.2, 200)
    wrong = noise.uniform(0.5, 0.95, 200)
    assert said(fmt=fmt, response_tokens=length, all_wrong_rate=wrong) == []
    assert said(fmt=np.linspace(0, 1, 50), response_tokens=np.linspace(5, 900, 50)) == []
    # A few well-formed responses of an untrained policy are no format to lose.
    assert said(fmt=[0.1] * 9 + [0.0] * 9) == []
