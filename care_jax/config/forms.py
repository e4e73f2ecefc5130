"""The form of a configuration's values that Python types do not tell, checked before all else.

A tuple may hold anything, and an integer may have any number of digits. What is checked here is
what the other checks rely on: `config.checks` and `config.keys` compare the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from care_jax.config.keys import range_of, scalars

_MAX_INT = 2**31 - 1  # what a device's integers hold


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or isinstance(value, float)


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping) or hasattr(value, "items")


def _is_several(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple | list) and all(map(of, value))


def _is_pair(*kinds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, tuple | list)
        and len(value) == 2
        and all(of(each) for of, each in zip(kinds, value, strict=True))
    )


def _is_mesh_axes(value: Any) -> bool:
    return value is None or _is_text(value) or _is_several(_is_text)(value)


def _is_buckets(value: Any) -> bool:
    """At least one pair of tokens, one or more, and of patches, none or more."""
    is_pairs = _is_several(_is_pair(_is_whole, _is_whole))(value)
    return is_pairs and len(value) > 0 and all(p >= 1 and n >= 0 for p, n in value)


_RULES = _is_several(_is_pair(_is_text, _is_mesh_axes)), "(('batch', ('data', 'fsdp')),)"
_SOURCES = _is_several(_is_section), "(common.source('jsonl', path='a.jsonl'),)"
# Key -> what its value must satisfy, and a value that does.
FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "stages": (_is_several(_is_text), "('sft', 'rl', 'evaluate')"),
    "model.offload": (_is_several(_is_text), "('optimizer',)"),
    "sharding_rules": _RULES,
    "decode_sharding_rules": _RULES,
    "data.buckets": (_is_buckets, "((512, 2048), (1024, 4096))"),
    "data.sft.parts": _SOURCES,
    "data.train.parts": _SOURCES,
    "data.test.parts": _SOURCES,
    "data.prepare.sources": _SOURCES,
    "data.prepare.benchmarks": _SOURCES,
    "evaluate.benchmarks": (
        _is_several(_is_pair(_is_text, _is_text)),
        "(('mmmu', 'path/of/MMMU'),)",
    ),
    "evaluate.judge_prices": (_is_pair(_is_number, _is_number), "(0.15, 0.6)"),
}


def check_forms(config: Mapping[str, Any]) -> None:
    """Refuses values that the other checks could not compare.

    Raises:
        ValueError: names the key, its value, and one of the expected form.
    """
    for key, (is_well_formed, example) in FORMS.items():
        value: Any = config
        for part in key.split("."):
            value = value[part]
        if not is_well_formed(value):
            raise ValueError(
                f"{key} must have the form of {example}, got {value!r:.200}; set --config.{key}"
            )
    for key, value in scalars(config):
        if isinstance(value, bool) and range_of(key) is not None:
            raise ValueError(f"{key} must be a number, got {value}; set --config.{key}")
        if isinstance(value, float) and range_of(key) is None and not math.isfinite(value):
            raise ValueError(f"{key} must be finite, got {value}; set --config.{key}")
        if isinstance(value, int) and abs(value) > _MAX_INT:
            shown = f"a number of {value.bit_length()} bits"
            raise ValueError(f"{key} must lie within ±{_MAX_INT}, got {shown}; set --config.{key}")
