"""Reward functions that fail: the run ends with their own error, and goes on once they are mended."""

import inspect
import json
import statistics
import time

import numpy as np
import pytest
from small_run import metrics_of, small_config, without_times

import care_jax
from care_jax.rewards.failures import RewardFailed

pytestmark = pytest.mark.usefixtures("one_device")
ROWS = [{"id": f"r{i}", "question": f"{i} and one?", "answer": str(i + 1)} for i in range(8)]


def config_of(**changes):
    config = small_config(stages=("rl", "evaluate"), checkpoint_every=100, **changes)
    config.model.backbone.text_config.num_hidden_layers = 1
    return config


def lengths(responses):
    """Verdicts for a policy that has not learned to answer."""
    return [{"acc": float(len(text) % 3 == 0)} for text in responses]


def raises(question, responses, example):
    return [{"acc": example.extra["size"]} for _ in responses]


def returns_a_number(question, responses, example):
    return 0.5


def hangs(question, responses, example):
    time.sleep(60)


LINE = inspect.getsourcelines(raises)[1] + 1
ALWAYS = {
    "raises": (raises, f"line {LINE}, in raises\n", "KeyError: 'size'\n"),
    "wrong type": (returns_a_number, "returns_a_number must return a list of 4 map", "got 0.5; co"),
    "hangs": (hangs, "hangs took longer than verifier.timeout, 0.1 s for a", "set it higher, or"),
}
