"""Opens boxes, with what belongs to their content outside: a sign, a unit, a negation.

Works on text and evaluates nothing; every scan is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from care_jax.rewards.equivalence import free_text, quantities

_MAX_NESTED = 2000  # characters of a box in a box

TEXT_NAMES = r"\\(?:text(?:bf|it|rm|sf|tt|sc|md|up|normal)?|emph|[mh]box|framebox|ce)"
FONT_NAMES = r"\\(?:math(?:rm|bf|it|sf|tt|normal)|boldsymbol|bm|pmb|ensuremath|operatorname)"
TEXT = re.compile(rf"({TEXT_NAMES}|{FONT_NAMES})\*? ?\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}")
_BRACKETS = {"{": re.compile(r"\\.|[{}]"), "(": re.compile(r"[()]")}
_BOX = re.compile(r"\\(?:boxed|fbox) ?\{")
# Around a box: delimiters, what separates it from other values, and what is part of its value.
_DELIMITER = re.compile(r"\$+|\\[()\[\],;:! ]|\*\*|\\left(?![a-z])|\\right(?![a-z])")
_RELATION_SIGN = r"(?:(?<![-=])[<>≤≥≠]=?|!=|\\(?:leq?|geq?|neq?|lt|gt)(?![a-z]))"
_SEPARATOR = re.compile(
    r"(?<![<>!])=|[:;,.&。，]|\\\\|\\(?:approx|equiv|implies|Rightarrow|therefore|to|end)(?![a-z])"
)
_END_AFTER = re.compile(rf"{_SEPARATOR.pattern}|{_RELATION_SIGN}")
# The predicate of the clause before a box follows a verb or a conjunction: "not 4 but".
_PREDICATE = re.compile(
    r"(?<![a-zA-Z])(?:is|are|was|were|equals|gives|yields|gets?|obtains?|ha(?:s|ve)|(?:must|should"
    r"|will) be|so|thus|hence|then|therefore|(?<!all )(?<!thing )but(?: rather)?|(?-i:^ ?or))"
    r"(?![a-zA-Z'])",
    re.IGNORECASE,
)
_SPOILED = re.compile(
    rf"{free_text.NEGATION.pattern}|{free_text.HEDGE.pattern}"
    r"|(?<![a-zA-Z])(?:than|at least|at most|up to|above|below|over|under|between .*and) ?$",
    re.IGNORECASE,
)
_DOUBTED = re.compile(
    r"(?:n't|not|never) (?:think|believe|say|sure|certain)"
    rf"|(?<![a-zA-Z])(?:{free_text.DENIAL})(?![a-zA-Z])",
    re.IGNORECASE,
)
_OPERATION = r"\\(?:pm|mp|times|cdot|div|sqrt|frac|pi|sin|cos|tan|log|ln|circ)(?![a-z])"
_BEFORE_BOX = re.compile(
    rf"(?:[+*/^_({{\[]|\S ?-|{_OPERATION}|\S ?{_RELATION_SIGN}) ?$|[-\d)}}]$|\S and ?$"
)
_AFTER_BOX = re.compile(
    rf"[\w)}}\](]| ?(?:[-+*/](?! |[a-zA-Z]{{2}}|$)|[+*/] ?[\d\\]|[\^_!]|\\?%|{_OPERATION}"
    r"|(?:or|and|nor)(?![a-zA-Z]))"
)
_IS_DENIED = re.compile(
    rf" (?:is|was|seems|can)(?![a-z]).*?(?:{free_text.NEGATION.pattern})", re.IGNORECASE
)
_PROSE_BEFORE = re.compile(r"^.*(?<![\\a-zA-Z])[a-zA-Z]{2,}(?![a-zA-Z{]) ?")
_PROSE_AFTER = re.compile(r" (?!or |and |nor )[a-zA-Z]{3,}.*")


def unbox(text: str) -> str:
    """The content of the last `\\boxed{}`, joined with boxes that only a few words separate."""
    found = list(find_boxes(text))
    if not found:
        return text.replace("\\boxed", "").replace("\\fbox", "")
    start, _, inner = found[-1]
    for (first, end, content), (begin, _, _) in zip(found[-2::-1], found[:0:-1], strict=True):
        gap = TEXT.sub(r" \1 ", text[end:begin]) if begin - end <= 80 else ". "
        if free_text.SENTENCE_END.search(gap) or len(free_text.PLAIN_WORD.findall(gap)) > 4:
            break
        inner = f"{content}{' or ' if free_text.HEDGE.search(gap) else ', '}{inner}"
        start = first
    inner = _with_outside(text[:start], inner, text[found[-1][1] :])
    # A box around a box is the same as the inner one.
    return unbox(inner) if _BOX.match(inner) and len(inner) <= _MAX_NESTED else inner


def _with_outside(before: str, inner: str, after: str) -> str:
    """The content of a box with what belongs to it outside: a sign, factor, unit or doubt."""
    before, after = (
        TEXT.sub(r" \2 ", _DELIMITER.sub("", part)) for part in (before[-200:], after[:200])
    )
    before = _SEPARATOR.split(before)[-1]
    predicate = before if _DOUBTED.search(before) else _PREDICATE.split(before)[-1]
    is_doubted = _SPOILED.search(predicate)
    has_before = is_doubted or _BEFORE_BOX.search(before)
    has_after = _AFTER_BOX.match(after)
    after = _END_AFTER.split(after)[0].rstrip()
    if _IS_DENIED.match(after):
        return f"{inner}{after}"
    if not has_before and not has_after:
        is_unit = quantities.split_unit(f"1 {after.strip()}")[0] == "1"
        return f"{inner} {after.strip()}" if is_unit else inner
    before = predicate.lstrip() if is_doubted else _PROSE_BEFORE.sub("", before)
    before = before if has_before else ""
    after = _PROSE_AFTER.sub("", after) if has_after else ""
    is_sum = re.search(r"\S ?[-+,]", inner) is not None
    return f"{before}({inner}){after}" if is_sum else f"{before}{inner}{after}"


def find_boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and content of each balanced box, up to one that is not closed."""
    start = 0
    while match := _BOX.search(text, start):
        end = closing(text, match.end())
        if end < 0:
            return
        yield match.start(), (start := end + 1), text[match.end() : end]


def closing(text: str, start: int, opening: str = "{") -> int:
    """Index of the brace, or round bracket, that closes the one just before `start`; -1 if none."""
    depth = 1
    for match in _BRACKETS[opening].finditer(text, start):
        depth += (match.group() == opening) - (match.group() in ("}", ")"))
        if depth == 0:
            return match.start()
    return -1
