"""The keys that a misspelt one may mean."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_LEAST = 0.65  # likeness of a name to one that is proposed
_BEHIND = 0.3  # keys whose score is lower than the best by more are not proposed
_MOST = 3


def nearest_keys(key: str, keys: Iterable[str]) -> list[str]:
    """At most three dotted keys like `key`, best first; the name counts twice the section.

    A name is like its abbreviations: `lr` is `learning_rate`, `steps` is `num_steps`.
    """
    section, _, name = key.rpartition(".")
    scores = {}
    for known in keys:
        known_section, _, known_name = known.rpartition(".")
        likeness = _likeness(name, known_name)
        if likeness >= _LEAST:
            scores[known] = likeness + _ratio(section, known_section) / 2
    best = max(scores.values(), default=0.0)
    found = sorted(scores, key=lambda known: -scores[known])
    return [known for known in found if scores[known] >= best - _BEHIND][:_MOST]


def did_you_mean(names: Sequence[str]) -> str:
    """The question after a misspelt name, with a leading space; "" if there are no names."""
    return f" Did you mean {' or '.join(names)}?" if names else ""


def _likeness(given: str, name: str) -> float:
    """In [0, 1]."""
    given, words = given.lower(), name.lower().split("_")
    initials = "".join(word[:1] for word in words)
    is_short = given in (initials, *words) and len(given) > 1 and len(words) > 1
    return max(_ratio(given, name.lower()), 0.9 * is_short)


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
