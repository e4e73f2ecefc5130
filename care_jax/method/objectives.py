"""Registry of the objectives: credit function, clip range and settings by name.

WORKSPACE.md ("To add") lists what else a new objective needs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

from ml_collections import ConfigDict

from care_jax.batch import Credit, RawAdvantages
from care_jax.method import credit


@dataclasses.dataclass(frozen=True)
class Objective:
    """The settings selected by `rl.objective` and its config section, and those of `rl`."""

    # (rollouts, scores), then (subgroup, has_reflection) if `raw_advantages` is set -> Credit.
    credit: Callable[..., Credit]
    clip_low: float  # clip range of the importance ratio below 1
    clip_high: float  # above 1
    beta: float  # β, weight of the KL to the reference policy; 0 keeps no reference
    # The KL is a mean over all trained tokens (CARE). Else it is part of the surrogate's mean.
    has_token_kl: bool = False
    # (scores, subgroup, has_reflection) -> A_raw, for metrics; None if it uses the whole group.
    raw_advantages: Callable[..., RawAdvantages] | None = None
    has_reflection: bool = False  # groups have a reflected row, in the last slot
    # Reflected rows are trained without the context they were sampled with, so that the sampler's
    # log-probabilities cannot serve as π_old.
    drops_context: bool = False
    dual_clip: float = 0.0  # bound of the ratio where the advantage is negative; 0: none
    has_sequence_ratio: bool = False  # one importance ratio per response, not per token (GSPO)
    correction: str = "none"  # rl.correction, as the next; see `objective.correction_weight`
    correction_cap: float = 2.0
    replays_routes: bool = False  # tokens use the experts that the sampler chose for them
    max_tries: int = 1  # maximum rollout batches to fill a step with mixed groups
    overlong: Mapping[str, int] | None = None  # keyword arguments of `advantages.overlong_penalty`


def objective_of(config: ConfigDict) -> Objective:
    """The objective named `rl.objective`, with the settings of its config section and of `rl`."""
    name = config.rl.objective
    settings = {key: config[name][key] for key in ("clip_low", "clip_high", "beta")}
    settings |= {key: config.rl[key] for key in ("dual_clip", "correction", "correction_cap")}
    settings["replays_routes"] = config.rl.replay_routes
    return Objective(**OBJECTIVES[name](config[name], config.rl.max_response_tokens), **settings)


def _care(section, max_tokens):
    keys = (field.name for field in dataclasses.fields(credit.CareSettings))
    settings = credit.CareSettings(**{key: section[key] for key in keys})
    return {
        "credit": functools.partial(credit.care_credit, settings=settings),
        "raw_advantages": functools.partial(credit.care_raw_advantages, settings=settings),
        "has_token_kl": True,
        "has_reflection": section["reflect"],
        "drops_context": section["reflect"]
        and section["reflect_credit"] == "prompt_only"
        and section["reflect_mode"] != "resample",
    }


def _grpo(section, max_tokens):
    moments = {"eps": section["eps"], "ddof": section["ddof"]}
    return {"credit": functools.partial(credit.grpo_credit, **moments)}


def _dapo(section, max_tokens):
    cache_tokens = round(section["overlong_share"] * max_tokens)
    overlong = {"max_tokens": max_tokens, "cache_tokens": cache_tokens}
    moments = {"eps": section["eps"], "ddof": section["ddof"]}
    return {
        "credit": functools.partial(credit.dapo_credit, **moments, **overlong),
        "max_tries": section["max_tries"],
        "overlong": overlong,
    }


def _dr_grpo(section, max_tokens):
    return {"credit": functools.partial(credit.dr_grpo_credit, max_tokens=max_tokens)}


# (config section, maximum tokens of a response) -> fields of `Objective`, by name.
OBJECTIVES = {
    "care": _care,
    "grpo": _grpo,
    "dapo": _dapo,
    "gspo": lambda *arguments: _grpo(*arguments) | {"has_sequence_ratio": True},
    "dr_grpo": _dr_grpo,
    "rloo": lambda *_: {"credit": credit.rloo_credit},
}
