"""The table of the configuration's keys: the check of each value, and whether it may change.

A test requires a row for every key of configs/common.py, and a key for every row. Checks across
keys or of the devices are in `config.checks`. Changes concern resumed runs, see `config.resume`.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from care_jax.benchmarks.releases import RELEASES
from care_jax.decoding import reflection
from care_jax.devices import xla_flags
from care_jax.learning.optimizer import SCHEDULES
from care_jax.method import advantages, credit, select
from care_jax.method.objective import CORRECTIONS
from care_jax.method.objectives import OBJECTIVES
from models import layers

STAGES = ("sft", "rl", "evaluate", "export")
_DTYPES = ("float32", "bfloat16")
_MAX_INT = 2**31 - 1  # of int32 on the devices

# Whether a key may change on resume, in the words that `python -m care_jax.config.keys` prints.
FIXED = ""  # weights depend on it
STEPS = (
    "to any number not below the steps already done, that of `sft` only before RL has checkpoints; "
    "a cosine schedule then follows the new one"
)
MOVED = (
    "if the last part of the path stays the same: `a/rows.jsonl` may become `b/rows.jsonl`, not "
    "`a/other.jsonl`"
)
_BEFORE = "if each stage with checkpoints still follows the same training stages, or is left out"
_BACKBONE = "if the backbone stays the same; its resolved shape is compared"
_EVALUATIONS = "freely: evaluations change no weight"
_SKIPPED = "freely: how many non-finite updates in a row are skipped"
_DIVIDED = (
    "freely: how the work of a step is divided; without rl.carry_over results differ by rounding"
)
_PACKED = "freely: likewise, but for examples that fit a row under one of the values only"
_COMPUTED = "freely: how the same values are computed"
_SPREAD = "freely: how the work is spread over devices and threads"
_VERIFIED = "freely: how the verifier works"
_OUTPUT = "freely: what is logged, saved, checked and cached"
_READ = "freely: no weight depends on them"


class Check(NamedTuple):
    """A check of one value, and the requirement in words that follow "must" in a message."""

    holds: Callable[[Any], bool]
    requirement: str


def interval(text: str) -> Check:
    """A number in an interval such as "(0, 1]"; NaN is in none."""
    low, high = (float(bound) for bound in text[1:-1].split(","))

    def holds(value: Any) -> bool:
        is_above = _is_number(value) and (value >= low if text[0] == "[" else value > low)
        return is_above and (value <= high if text[-1] == "]" else value < high)

    return Check(holds, f"lie in {text}")


def _one_of(*choices: str) -> Check:
    return Check(lambda value: value in choices, f"be one of {', '.join(choices)}")


def _each(
    holds: Callable[[Any], bool], requirement: str, *, at_least: int = 0, is_once: bool = False
) -> Check:
    """A tuple whose elements satisfy a condition; with `is_once` their first entries differ."""

    def all_hold(value: Any) -> bool:
        is_long = isinstance(value, tuple | list) and len(value) >= at_least
        if not is_long or not all(map(holds, value)):
            return False
        return not is_once or len({first for first, _ in value}) == len(value)

    return Check(all_hold, requirement)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_section(value: Any) -> bool:
    return hasattr(value, "items")


def _matches(value: Any, example: Any) -> bool:
    """Whether a value has the type of an example; a tuple needs its length and types."""
    if isinstance(example, tuple):
        is_tuple = isinstance(value, tuple | list) and len(value) == len(example)
        return is_tuple and all(map(_matches, value, example))
    return _is_number(value) if isinstance(example, float) else type(value) is type(example)


def _is_rule(value: Any) -> bool:
    is_pair = isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], str)
    axes = value[1] if is_pair else 0
    several = axes if isinstance(axes, tuple | list) else (axes,)
    return axes is None or all(isinstance(name, str) for name in several)


_ANY = Check(lambda value: not isinstance(value, float) or math.isfinite(value), "be finite")
_RULES = _each(_is_rule, "have the form of (('batch', ('data', 'fsdp')),)")
_SOURCES = _each(_is_section, "have the form of (common.source('jsonl', path='a.jsonl'),)")
_STAGES = _each(
    lambda stage: stage in STAGES,
    f"name at least one of {', '.join(STAGES)}, as in ('sft', 'rl', 'evaluate')",
    at_least=1,
)
_OFFLOADED = _each(
    lambda name: name in ("reference", "optimizer", "rollouts"),
    "have the form of ('reference', 'optimizer', 'rollouts'), of which each may be left out",
)
_BUCKETS = _each(
    lambda bucket: _matches(bucket, (512, 2048)) and bucket[0] >= 1 and bucket[1] >= 0,
    "have the form of ((512, 2048), (1024, 4096))",
    at_least=1,
)
_BENCHMARKS = _each(
    lambda pair: _matches(pair, ("mmmu", "path")) and pair[0] in RELEASES,
    "be pairs (name, path), as in (('mmmu', 'path/of/MMMU'),), each name once and one of "
    + ", ".join(RELEASES),
    is_once=True,
)
_WEIGHTS = _each(
    lambda pair: _matches(pair, ("acc", 0.8)) and math.isfinite(pair[1]) and pair[0] != "fmt",
    "be pairs of a component and its weight, each component once, as in "
    "(('acc', 0.8), ('short', 0.2)), without fmt, whose weight is rl.format_weight",
    at_least=1,
    is_once=True,
)
_PROFILED = Check(
    lambda value: value == () or _matches(value, (3, 5)), "have the form of (3, 5), or be ()"
)
_PRICES = Check(lambda value: _matches(value, (0.15, 0.6)), "have the form of (0.15, 0.6)")
_TAG = Check(
    lambda value: bool(re.fullmatch(r"\w+", value)) and value != "answer",
    "be one word of letters, digits and _, other than 'answer', such as 'think', or 'reasoning' "
    "for Qwen3-VL",
)
_STEP = Check(
    lambda value: value in ("last", "best") or value.isdecimal(),
    "be 'last', 'best' or the number of a saved step",
)

# (Patterns of keys, check, may it change). The first pattern that matches decides. A check is an
# interval, choices, or a form.
_ROWS: tuple[tuple[str, str | tuple[str, ...] | Check, str], ...] = (
    ("stages", _STAGES, _BEFORE),
    ("seed", "[0, 2147483647]", FIXED),
    ("log_every", "[1, inf)", _OUTPUT),
    ("checkpoint_every", "[1, inf)", _OUTPUT),
    ("keep_checkpoints", "[1, inf)", _OUTPUT),
    ("keep_best", "[0, inf)", _OUTPUT),
    ("best_metric", _ANY, _OUTPUT),
    ("xla_preset", xla_flags.PRESETS, _OUTPUT),
    ("state_check.*", "[1, inf]", _OUTPUT),
    ("compilation_cache", _ANY, _OUTPUT),
    ("profile_steps", _PROFILED, _OUTPUT),
    ("model.path model.tokenizer", _ANY, MOVED),
    ("model.backbone*", _ANY, _BACKBONE),
    ("model.compute_dtype", _DTYPES, FIXED),
    ("model.attention", ("auto", "xla", "kernel"), _COMPUTED),
    ("model.freeze_* model.lora_experts", _ANY, FIXED),
    ("model.remat", layers.REMATS, _COMPUTED),
    ("model.*_dtype", _DTYPES, FIXED),
    ("model.lora_rank", "[0, inf)", FIXED),
    ("model.lora_alpha", "(0, inf)", FIXED),
    ("model.offload", _OFFLOADED, _COMPUTED),
    ("mesh.*", "[-1, inf)", _SPREAD),
    ("*sharding_rules", _RULES, _SPREAD),
    ("data.prepare.sources data.prepare.benchmarks", _SOURCES, _READ),
    ("data.prepare.near_bits", "[0, 144]", _READ),
    ("data.prepare.shard_megabytes", "(0, inf)", _READ),
    ("data.*.columns.*", _ANY, FIXED),
    ("data.*.path data.*.images", _ANY, MOVED),
    ("data.*.source data.*.split data.*.subset data.*.images_outside", _ANY, FIXED),
    ("data.*.num_examples data.*.weight data.*.m??_pixels", "[0, inf)", FIXED),
    ("data.*.seed", "[0, 2147483647]", FIXED),
    ("data.*.tolerance", "[0, 1)", FIXED),
    ("data.*.parts", _SOURCES, FIXED),
    ("data.num_workers", "[1, inf)", _SPREAD),
    ("data.teacher_error data.misread_share data.lucky_share data.cue_share", "[0, 1]", FIXED),
    ("data.mixed_errors", _ANY, FIXED),
    ("data.m??_pixels", "[1, inf)", FIXED),
    ("data.buckets", _BUCKETS, FIXED),
    ("data.system_prompt data.instruction", _ANY, FIXED),
    ("data.think_tag", _TAG, FIXED),
    ("*.num_steps", "[1, inf)", STEPS),
    ("*.eval_every", "[0, inf)", _EVALUATIONS),
    ("evaluate.batch_size evaluate.max_response_tokens", "[1, inf)", _READ),
    ("evaluate.temperature", "[0, 100]", _READ),
    ("evaluate.top_p", "(0, 1]", _READ),
    ("evaluate.num_samples evaluate.decode_rows", "[1, inf)", _READ),
    ("evaluate.at_start", _ANY, _READ),
    ("evaluate.benchmarks", _BENCHMARKS, _READ),
    ("evaluate.judge_url evaluate.judge_model", _ANY, _READ),
    ("evaluate.judge_timeout", "(0, inf)", _READ),
    ("evaluate.judge_retries", "[0, inf)", _READ),
    ("evaluate.judge_prices", _PRICES, _READ),
    ("export.step", _STEP, _READ),
    ("*.batch_size", "[1, inf)", FIXED),
    ("sft.row_tokens", "[1, inf)", _PACKED),
    ("sft.row_patches", "[0, inf)", _PACKED),
    ("*.microbatch_size", "[0, inf)", _DIVIDED),
    ("*.row_tokens", "[1, inf)", _DIVIDED),
    ("*.row_patches", "[0, inf)", _DIVIDED),
    ("*.row_lengths", "[1, inf)", _DIVIDED),
    ("*.decode_prompts", "[1, inf)", _DIVIDED),
    ("*.decode_rows", "[0, inf)", _DIVIDED),
    ("*.learning_rate", "[0, 1]", FIXED),
    ("*.warmup_steps *.weight_decay", "[0, inf)", FIXED),
    ("*.schedule", SCHEDULES, FIXED),
    ("*.max_grad_norm", "(0, inf]", FIXED),
    ("*.max_skipped", "[0, inf)", _SKIPPED),
    ("sft.answer_weight", "[0, inf)", FIXED),
    ("rl.objective", tuple(OBJECTIVES), FIXED),
    ("rl.num_rollouts", "[2, inf)", FIXED),
    ("rl.prompts_per_* rl.max_response_tokens", "[1, inf)", FIXED),
    ("rl.carry_over", "[0, 1]", FIXED),
    ("rl.max_age", "[1, 127]", FIXED),
    ("rl.temperature", "(0, 100]", FIXED),
    ("rl.top_p", "(0, 1]", FIXED),
    ("rl.format_weight", "[0, 1]", FIXED),
    ("rl.old_logp", ("sampler", "trainer"), FIXED),
    ("rl.dual_clip", "[0, inf)", FIXED),
    ("rl.correction", CORRECTIONS, FIXED),
    ("rl.correction_cap", "(1, inf)", FIXED),
    ("rl.replay_routes", _ANY, FIXED),
    ("care.anchor_rule", select.ANCHOR_RULES, FIXED),
    ("care.K care.M care.max_context", "[1, inf)", FIXED),
    ("care.rule", select.RULES, FIXED),
    ("care.s care.s_refl care.delta care.rescue_scale", "[0, inf)", FIXED),
    ("care.equalize care.robust care.rescue care.region_weights care.reflect", _ANY, FIXED),
    ("care.gamma_share", "[0, 1)", FIXED),
    ("care.gamma_*", "[0, 1]", FIXED),
    ("care.reflect_mode", reflection.MODES, FIXED),
    ("care.mean", credit.MEANS, FIXED),
    ("care.kl_rows", credit.KL_ROWS, FIXED),
    ("care.success", credit.SUCCESSES, FIXED),
    ("care.reflect_replaces", advantages.REPLACES, FIXED),
    ("care.reflect_temperature", "[0, 100]", FIXED),
    ("care.reflect_top_p", "[0, 1]", FIXED),
    ("care.reflect_credit", ("as_sampled", "prompt_only"), FIXED),
    ("care.cue", _ANY, FIXED),
    ("dapo.max_tries", "[1, 100]", FIXED),  # `streams` has keys for 127
    ("dapo.overlong_share", "[0, 1)", FIXED),
    ("*.clip_low", "(0, 1]", FIXED),
    ("*.clip_high", "(0, inf)", FIXED),
    ("*.ddof", "[0, 1]", FIXED),
    ("*.beta *.eps *.eps_w", "[0, inf)", FIXED),
    ("report.groups_per_step", "[0, inf)", _OUTPUT),
    ("report.max_megabytes report.image_side", "[1, inf)", _OUTPUT),
    ("report.rollouts_megabytes", "[0, inf)", _OUTPUT),
    ("metrics.*", _ANY, _OUTPUT),
    ("verifier.num_workers", "[1, inf)", _VERIFIED),
    ("verifier.timeout", "(0, inf)", _VERIFIED),
    ("verifier.reward", _ANY, FIXED),
    ("verifier.weights", _WEIGHTS, FIXED),
    ("verifier.success", "(0, 1]", FIXED),
    ("verifier.max_failed", "[0, 1]", _VERIFIED),
    ("verifier.concurrency", "[1, inf)", _VERIFIED),
)
KEYS = {
    pattern: (check, change) for patterns, check, change in _ROWS for pattern in patterns.split()
}


def check_keys(config: Mapping[str, Any]) -> None:
    """Checks each value by itself; the ValueError names the first bad key, its value, its check."""
    for key, value in leaves(config):
        check = check_of(key)
        if isinstance(value, int) and abs(value) > _MAX_INT:
            shown = f"a number of {value.bit_length()} bits"
            raise ValueError(
                f"{key} must be a number from -{_MAX_INT} to {_MAX_INT}, got {shown}; "
                f"set --config.{key}"
            )
        # A release's config.json, which model.backbone may be, has null for what is not used.
        if value is None and not key.startswith("model.backbone."):
            advice = "; write '' or False for none" if check is _ANY else ""
            raise ValueError(f"{key} must have a value, got None{advice}")
        if not check.holds(value):
            raise ValueError(
                f"{key} must {check.requirement}, got {value!r:.200}; set --config.{key}"
            )


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every key that is not a section, also in the parts of a mixture."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if _is_section(value):
            yield from leaves(value, f"{key}.")
            continue
        yield key, value
        if isinstance(value, Sequence) and value and _is_section(value[0]):
            yield from leaves({str(number): part for number, part in enumerate(value)}, f"{key}.")


def row_of(key: str) -> str:
    """The first pattern of `KEYS` that matches a key; "" if none does."""
    return next((pattern for pattern in KEYS if fnmatch.fnmatchcase(key, pattern)), "")


def check_of(key: str) -> Check:
    """The check of a key; without a row, that a number is finite."""
    check, _ = _entry(key)
    if isinstance(check, Check):
        return check
    return interval(check) if isinstance(check, str) else _one_of(*check)


def change_of(key: str) -> str:
    """Whether a resumed run may change a key, as in `KEYS`."""
    return _entry(key)[1]


def _entry(key: str) -> tuple[Check | str | tuple[Any, ...], str]:
    return KEYS.get(row_of(key), (_ANY, FIXED))


def resume_table() -> str:
    """A Markdown table of the keys that may change on resume, which this module prints."""
    keys: dict[str, list[str]] = {}
    for pattern, (_, change) in KEYS.items():
        keys.setdefault(change, []).append(f"`{pattern}`")
    rows = [f"| {', '.join(keys[change])} | {change} |" for change in keys if change]
    return "\n".join(["| key | may change |", "|---|---|", *rows])


if __name__ == "__main__":
    print(resume_table())
