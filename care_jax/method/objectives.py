"""The objectives by name, each with all that a run asks of it.

An objective is added here, in `credit`, and as a section of `configs/common.py`. Nothing else of
the program compares names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from care_jax.method import credit
from care_jax.method.advantages import RawAdvantages
from care_jax.method.credit import Credit


@dataclasses.dataclass(frozen=True)
class Objective:
    """What `rl.objective` and its section of the configuration choose.

    Attributes:
        credit: (rollouts, scores) -> Credit; where there is `raw_advantages`, of (rollouts, scores,
            subgroup, has_reflection).
        clip_low, clip_high: how far the importance ratio may fall below 1 and rise above it.
        beta: β, weight of the KL to the reference policy; 0 keeps no reference.
        raw_advantages: (scores, subgroup, has_reflection) -> A_raw for the metrics; None where the
            whole group is credited.
        has_reflection: groups have a reflected row, which stands last.
        is_reframed: reflected rows are trained without the context they were sampled with, so that
            π_old is not what the sampler reports.
        has_sequence_ratio: the importance ratio is the response's, not the token's (GSPO).
        max_tries: rollout batches that are drawn at most to fill a step with mixed groups.
        overlong: `max_tokens` and `cache_tokens` of `advantages.overlong_penalty`; None for none.
    """

    credit: Callable[..., Credit]
    clip_low: float
    clip_high: float
    beta: float
    raw_advantages: Callable[..., RawAdvantages] | None = None
    has_reflection: bool = False
    is_reframed: bool = False
    has_sequence_ratio: bool = False
    max_tries: int = 1
    overlong: Mapping[str, int] | None = None


def make_objective(name: str, section: Mapping[str, Any], *, max_tokens: int) -> Objective:
    """The objective of a configuration.

    Args:
        name: of `OBJECTIVES`.
        section: its section.
        max_tokens: of a response.
    """
    clip = {key: section[key] for key in ("clip_low", "clip_high", "beta")}
    return Objective(**_MAKERS[name](section, max_tokens), **clip)


def _care(section, max_tokens):
    credit_keys = (
        *("K", "s", "s_refl", "delta", "equalize", "rescue"),
        *("rescue_scale", "robust", "region_weights", "gamma_pos", "gamma_neg", "eps_w"),
    )
    chosen = {key: section[key] for key in credit_keys}
    raw = {key: section[key] for key in ("delta", "robust")}
    eps = section["eps"]
    return {
        "credit": functools.partial(credit.care_credit, eps=eps, **chosen),
        "raw_advantages": functools.partial(credit.care_raw_advantages, eps=eps, **raw),
        "has_reflection": section["reflect"],
        "is_reframed": section["reflect"] and section["reflect_credit"] == "prompt_only",
    }


def _grpo(section, max_tokens):
    moments = {"eps": section["eps"], "ddof": section["ddof"]}
    return {"credit": functools.partial(credit.grpo_credit, **moments)}


def _gspo(section, max_tokens):
    return _grpo(section, max_tokens) | {"has_sequence_ratio": True}


def _dapo(section, max_tokens):
    overlong = {
        "max_tokens": max_tokens,
        "cache_tokens": round(section["overlong_share"] * max_tokens),
    }
    moments = {"eps": section["eps"], "ddof": section["ddof"]}
    return {
        "credit": functools.partial(credit.dapo_credit, **moments, **overlong),
        "max_tries": section["max_tries"],
        "overlong": overlong,
    }


def _dr_grpo(section, max_tokens):
    return {"credit": functools.partial(credit.dr_grpo_credit, max_tokens=max_tokens)}


def _rloo(section, max_tokens):
    return {"credit": credit.rloo_credit}


_MAKERS = {
    "care": _care,
    "grpo": _grpo,
    "dapo": _dapo,
    "gspo": _gspo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
}
OBJECTIVES = tuple(_MAKERS)
