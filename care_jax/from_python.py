"""Training from Python: `care_jax.train_on(config, train=rows, reward=function, workdir=folder)`.

The same run as `python -m care_jax.main`, with rows and a reward function from Python instead of
`data.train`, `data.test` and `verifier.reward`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from care_jax import main
from care_jax.config import command_line
from care_jax.config.checks import has_test, is_evaluated
from care_jax.data.readers import jsonl
from care_jax.devices import xla_flags
from care_jax.rewards.reward_function import RewardFunction, check_reward, pickled


@dataclasses.dataclass(frozen=True)
class Trained:
    """The results of a run."""

    workdir: pathlib.Path  # the folder with `report.html`, checkpoints and exports
    evaluations: dict[str, dict[str, float]]  # metrics of each evaluation, by the stage it followed
    metrics: list[dict[str, Any]]  # the lines of `metrics.jsonl`: stage, step, then metrics by name


def train_on(
    config: ConfigDict,
    train: Iterable[Mapping[str, Any]],
    test: Iterable[Mapping[str, Any]] | None = None,
    reward: RewardFunction | None = None,
    *,
    workdir: str | pathlib.Path,
) -> Trained:
    """Runs the stages of a configuration on rows given from Python.

    Called again with the same workdir, it resumes a stopped run, and does not train a finished one.

    Args:
        config: complete, such as `care_jax.configs.tiny.get_config()`; not modified.
        train: rows of the RL stage with the fields of `data.readers.jsonl`; images may be PIL
            images or the bytes of files.
        test: held-out rows of the evaluations; None: `config.data.test`, or if that is not set, no
            evaluation of held-out rows.
        reward: a reward function, see docs/rewards.md; None: `config.verifier.reward`. It runs in
            worker processes with `verifier.timeout`; functions and lambdas of a notebook are sent
            there by cloudpickle.
        workdir: created if it does not exist.

    Raises:
        ValueError: the configuration cannot run, the function cannot be sent to a process, or the
            workdir is the address of a bucket.
        RewardFailed: the reward function judged nothing, or too little; the finished steps are
            saved. A ValueError, see `rewards.failures`.
    """
    if not isinstance(config, ConfigDict):
        raise ValueError(
            "expected config as a ConfigDict, such as care_jax.configs.tiny.get_config(), got a "
            f"{type(config).__name__}; change one of these"
        )
    folder = command_line.folder_of(workdir, flag="workdir")
    if reward is not None:
        check_reward(reward, "reward")
        pickled(reward)  # fails early if it cannot be sent to a process
    config = config.copy_and_resolve_references()
    if "rl" not in config.stages:
        raise ValueError(
            f"expected the stage 'rl', which trains on these rows, in config.stages, got "
            f"{tuple(config.stages)}; add it, or run the configuration with care_jax.main"
        )
    if test is not None and not is_evaluated(config):
        raise ValueError(
            f"expected an evaluation of the rows `test`, got stages {tuple(config.stages)}; add "
            "'evaluate', set rl.eval_every, or leave test out"
        )
    examples = {"rl": jsonl.in_memory(train, "train")}
    if test is not None:
        examples["evaluate"] = jsonl.in_memory(test, "test")
    elif not config.evaluate.benchmarks and not has_test(config):
        config.stages = tuple(stage for stage in config.stages if stage != "evaluate")
    xla_flags.set_defaults(config.xla_preset)
    evaluations = main.run_stages(config, folder, examples=examples, reward=reward)
    path = folder / "metrics.jsonl"  # written by process 0
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return Trained(folder, evaluations, [json.loads(line) for line in lines])
