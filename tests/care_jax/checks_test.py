"""Configurations that cannot run are refused in one line."""

import jax
import pytest

from care_jax.checks import check_config
from care_jax.sharding import make_mesh
from configs import common

MMMU = (("mmmu", "releases/MMMU"),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"benchmarks": ("mmmu",)}, r"must be pairs \(name, path\), got 'mmmu'; write"),
        ({"benchmarks": (("chartqa", "x"),)}, "must be one of mathvista, .* got 'chartqa'"),
        ({"benchmarks": MMMU + MMMU}, "names a benchmark twice: mmmu, mmmu"),
        ({"benchmarks": MMMU, "judge_url": "http://x"}, "needs evaluate.judge_model"),
        ({"judge_url": "http://x", "judge_model": "m"}, "needs .* and evaluate.benchmarks"),
        ({"judge_timeout": 0.0}, "judge_timeout must be positive"),
        ({"judge_retries": -1}, "judge_retries not negative"),
        ({"max_response_tokens": 0}, "evaluate.max_response_tokens must be at least 1"),
    ],
)
def test_an_evaluation_that_cannot_run_is_refused(changes, message):
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    config = common.get_config()
    config.stages = ("evaluate",)
    config.evaluate.benchmarks = MMMU
    check_config(config, mesh)
    config.evaluate.benchmarks = ()
    config.evaluate.update(changes)
    with pytest.raises(ValueError, match=message) as error:
        check_config(config, mesh)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups_per_step": -1}, "groups_per_step must be 0 or more, got -1"),
        ({"max_megabytes": 0.5}, "max_megabytes must be at least 1, got 0.5; .*groups_per_step"),
        ({"image_side": 0}, "report.image_side must be at least 1"),
    ],
)
def test_a_report_that_cannot_be_is_refused(changes, message):
    config = common.get_config()
    config.stages = ()
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    check_config(config, mesh)
    config.report.update(changes)
    with pytest.raises(ValueError, match=message):
        check_config(config, mesh)
