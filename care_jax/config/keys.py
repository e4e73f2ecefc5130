"""The range of every numeric key of a configuration, checked before anything else is done.

A test demands that each key of configs/common.py has a range and that its default lies in it. What
depends on several keys, or on the devices, is in `config.checks`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

# Pattern of keys -> interval; of several patterns that match, the first decides. NaN is in none.
RANGES = {
    "seed": "[0, 2147483647]",
    "data.*.seed": "[0, 2147483647]",
    "log_every": "[1, inf)",
    "checkpoint_every": "[1, inf)",
    "keep_checkpoints": "[1, inf)",
    "keep_best": "[0, inf)",
    "state_check.max_*_factor": "[1, inf]",
    "mesh.*": "[-1, inf)",
    "model.logprob_chunk": "[0, inf)",
    "model.lora_rank": "[0, inf)",
    "model.lora_alpha": "(0, inf)",
    "data.num_workers": "[1, inf)",
    "data.teacher_error": "[0, 1]",
    "data.misread_share": "[0, 1]",
    "data.cue_share": "[0, 1]",
    "data.prepare.near_bits": "[0, 144]",
    "data.prepare.shard_megabytes": "(0, inf)",
    "data.min_pixels": "[1, inf)",
    "data.max_pixels": "[1, inf)",
    "data.*.min_pixels": "[0, inf)",
    "data.*.max_pixels": "[0, inf)",
    "data.*.num_examples": "[0, inf)",
    "data.*.tolerance": "[0, 1)",
    "data.*.weight": "[0, inf)",
    "*.num_steps": "[1, inf)",
    "*.batch_size": "[1, inf)",
    "*.microbatch_size": "[0, inf)",
    "*.row_tokens": "[1, inf)",
    "*.row_patches": "[0, inf)",
    "*.learning_rate": "[0, 1]",
    "*.warmup_steps": "[0, inf)",
    "*.weight_decay": "[0, inf)",
    "*.max_grad_norm": "(0, inf]",
    "*.max_skipped": "[0, inf)",
    "*.eval_every": "[0, inf)",
    "sft.answer_weight": "[0, inf)",
    "rl.num_rollouts": "[2, inf)",
    "rl.prompts_per_*": "[1, inf)",
    "*.decode_prompts": "[1, inf)",
    "*.decode_rows": "[1, inf)",
    "*.max_response_tokens": "[1, inf)",
    "*.temperature": "[0, inf)",
    "*.top_p": "(0, 1]",
    "rl.format_weight": "[0, 1]",
    "care.K": "[1, inf)",
    "care.M": "[1, inf)",
    "care.s": "[0, inf)",
    "care.s_refl": "[0, inf)",
    "care.delta": "[0, inf)",
    "care.gamma_pos": "[0, 1]",
    "care.gamma_neg": "[0, 1]",
    "care.gamma_share": "[0, 1)",
    "care.rescue_scale": "[0, inf)",
    "care.max_context": "[1, inf)",
    "dapo.max_tries": "[1, inf)",
    "dapo.overlong_share": "[0, 1)",
    "*.clip_low": "(0, 1]",
    "*.clip_high": "(0, inf)",
    "*.beta": "[0, inf)",
    "*.ddof": "[0, 1]",
    "*.eps": "[0, inf)",
    "*.eps_w": "[0, inf)",
    "evaluate.num_samples": "[1, inf)",
    "evaluate.judge_timeout": "(0, inf)",
    "evaluate.judge_retries": "[0, inf)",
    "report.groups_per_step": "[0, inf)",
    "report.max_megabytes": "[1, inf)",
    "report.rollouts_megabytes": "[0, inf)",
    "report.image_side": "[1, inf)",
    "verifier.num_workers": "[1, inf)",
    "verifier.timeout": "(0, inf)",
    "verifier.success": "(0, 1]",
    "verifier.concurrency": "[1, inf)",
}


def check_ranges(config: Mapping[str, Any]) -> None:
    """Compares every numeric key with its range.

    Raises:
        ValueError: names the first key whose value lies outside, its range and the value.
    """
    for key, value in numbers(config):
        interval = range_of(key)
        if interval is not None and not lies_in(value, interval):
            raise ValueError(f"{key} must lie in {interval}, got {value}; set --config.{key}")


def numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """(dotted key, value) of all numbers, also in the parts of a mixture."""
    for key, value in scalars(config):
        if not isinstance(value, bool):
            yield key, value


def scalars(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """(dotted key, value) of all numbers, and of True and False, which are numbers in Python."""
    for key, value in config.items():
        if isinstance(value, Mapping) or hasattr(value, "items"):
            yield from scalars(value, f"{prefix}{key}.")
        elif isinstance(value, tuple | list) and value and hasattr(value[0], "items"):
            for number, each in enumerate(value):
                yield from scalars(each, f"{prefix}{key}.{number}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", value


def range_of(key: str) -> str | None:
    """The interval of a key; None if it has none."""
    matching = (text for pattern, text in RANGES.items() if fnmatch.fnmatchcase(key, pattern))
    return next(matching, None)


def lies_in(value: float, interval: str) -> bool:
    """Whether a value lies in an interval such as "(0, 1]"."""
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    is_above = value >= low if interval[0] == "[" else value > low
    is_below = value <= high if interval[-1] == "]" else value < high
    return is_above and is_below and value == value  # NaN is not
