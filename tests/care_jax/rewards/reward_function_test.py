"""The form of reward functions, and what their results must be."""

import functools
import re
import sys

import pytest

from care_jax.rewards.reward_function import check_reward, load_reward, read_reply

REWARDS = """
def reward(question, responses, example):
    return [{"acc": 1.0}] * len(responses)

def one(question, response, example):
    return 1.0, 1.0

def two(question, responses):
    return [{"acc": 1.0}]

constant = 1.0
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    (tmp_path / "some_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_rewards", raising=False)


def test_a_function_is_found_by_its_name(rewards):
    assert load_reward("some_rewards:reward")("?", ["a", "b"], None) == [{"acc": 1.0}] * 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("some_rewards:absent", "expected verifier.reward as module:function .* correct it, run"),
        ("no_such_module:f", "expected verifier.reward as module:function .*No module named"),
        (":f", "expected verifier.reward as module:function .*Empty module name"),
        (".rewards:f", "expected verifier.reward as module:function .*relative name"),
        ("some_rewards:constant", "'some_rewards:constant' must be a function, got a float"),
        ("some_rewards:one", "takes a single `response`; it must have the form def reward"),
        ("some_rewards:two", "must have the form def reward.*, but: too many positional arguments"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(rewards, name, message):
    with pytest.raises(ValueError, match=message):
        load_reward(name)


@pytest.mark.parametrize("source", ["1 / 0", "raise SystemExit", "def f(", "import no_such_module"])
def test_a_module_that_cannot_be_imported_is_refused_in_one_line(tmp_path, monkeypatch, source):
    (tmp_path / "broken_rewards.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"expected verifier\.reward as") as refused:
        load_reward("broken_rewards:f")
    assert "\n" not in str(refused.value)


def test_whatever_takes_three_arguments_is_a_function():
    check_reward(functools.partial(lambda a, b, c, d: None, 0), "reward")
    check_reward(lambda *arguments: None, "reward")


def rows(*found):
    return {"rows": list(found), "result": repr(found)}


@pytest.mark.parametrize(
    ("reply", "expected", "message"),
    [
        (rows({"acc": 0.5, "b": 1.0}, {"acc": 0.0, "b": 0.0}), None, ""),
        ({"timeout": True}, ["timeout"] * 2, "took longer than verifier.timeout, 3 s for a group"),
        ({"crash": True}, ["crash"] * 2, "ended its worker process"),
        (
            {"error": "Trace\nKeyError", "name": "KeyError"},
            ["failed: KeyError"] * 2,
            "failed:\nTra",
        ),
        (
            {"error": "took over 1 s", "name": "no worker"},
            ["failed: no worker"] * 2,
            "failed:\ntook over",
        ),
        ({"result": "(0.5, 1.0)"}, ["failed: result"] * 2, "a list of 2 mappings, .* got .0.5, 1"),
        (rows({"acc": 0.5, "b": 1.0}), ["failed: result"] * 2, "a list of 2 mappings"),
        (rows("0.5", "1.0"), ["failed: result"] * 2, "must return a mapping such as .* got 0.5"),
    ],
)
def test_a_reply_has_components_or_a_reason_for_each_response(reply, expected, message):
    found, told = read_reply(reply, 2, ["acc", "b"], 3.0)
    assert found == (expected or reply["rows"])
    assert re.search(message, told) and bool(message) == bool(told)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"b": 1.0}, r"must return the components acc, b .* got b without acc"),
        ({"acc": 1.0}, r"must return the components acc, b .* got acc without b"),
        ({}, "got none without acc, b"),
        ({"acc": 1.01, "b": 0.0}, r"components in \[0, 1\], got acc = 1.01"),
        ({"acc": -0.1, "b": 0.0}, r"got acc = -0.1"),
        ({"acc": float("nan"), "b": 0.0}, "got acc = nan"),
        ({"acc": "None", "b": 0.0}, "got acc = None"),
        ({"acc": 1.0, "b": 0.0, "a/b": 0.0}, "letters, digits and _, got 'a/b'"),
    ],
)
def test_a_wrong_row_loses_its_reward_alone(row, message):
    good = {"acc": 1.0, "b": 0.5, "further": 0.25}
    found, told = read_reply(rows(good, row), 2, ["acc", "b"], 3.0)
    assert found == [good, "failed: result"]
    assert told.endswith("; correct the function")
    assert re.search(message, told)
