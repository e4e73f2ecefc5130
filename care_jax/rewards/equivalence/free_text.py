"""Finds the answer in sentences, and what denies or hedges it; folds the case of words."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence

from care_jax.rewards.equivalence import quantities

PLAIN_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]+")
SENTENCE_END = re.compile(r"[.!?](?: |$)|\n")
# What denies a clause before its verb.
DENIAL = (
    r"none|nothing|nobody|no one|hardly|scarcely|doubt(?:s|ed|ful)?|far from|fail(?:s|ed)? to"
    r"|used to (?:be|equal|have)"
)
NEGATION = re.compile(
    r"(?<![a-zA-Z])(?:no[tnr]?|neither|never|cannot|without|but|except|exclud\w*|eliminat\w*|wrong"
    rf"|incorrect|false|untrue|unlikely|impossible|instead|rather|ruled? out|{DENIAL})(?![a-zA-Z])"
    r"|n't|[不非没错]",
    re.IGNORECASE,
)
HEDGE = re.compile(
    r"(?<![a-zA-Z])(?:or|either|maybe|perhaps|possibly|probably)(?![a-zA-Z])|可能|也许|大概",
    re.IGNORECASE,
)
# What says that a value is computed from the one asked for: `twice the number`, `the square of x`.
# `The square root of the area` or `the root of the equation` may itself be asked for.
_COMPUTED = re.compile(
    r"(?<![a-zA-Z])(?i:twice|thrice|double|triple|half|(?:two|three|four|five|six|ten) times"
    r"|(?:half|double|(?:an?|one)[ -](?:third|quarter|fifth)|(?:square|cube)(?: root)?|opposite"
    r"|negative|reciprocal) of|(?:more|less|greater) than)"
    r" (?:(?i:the number|it|them|this|that)|[a-zA-Z])$"
    r"|(?<![a-zA-Z])(?:plus|minus) (?:one|two|three|four|five|six|seven|eight|nine|ten)$"
    r"|(?<!in )(?<![a-zA-Z])[a-zA-Z] (?:squared|cubed|doubled)$"
    r"|(?:[这该]个?数|[a-zA-Z])的(?:一半|平方|立方|.倍|相反数|倒数)$"
)
_IS = re.compile(r"(?: (?:is|equals|is equal to)|[是为=]|等于) *$")

_PHRASE = re.compile(
    r"(?:answer|solution|result|réponse)(?: is| est| ?:)(?: (?:therefore|thus|then))? ?:?|"
    r"答案(?:是|为|:|：)?",
    re.IGNORECASE,
)
_FORMULA = re.compile(
    r"\$\$[^$]+\$\$|\$[^$]+\$|\\\((?:[^\\\n]|\\[^()\n])*\\\)|\\\[(?:[^\\]|\\[^\[\]])*\\\]"
)
# Mathematics without delimiters: 5√3, 2x + 1, 2.5 × 10^3, x > 3.
_NUMERAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
_POWER = r"(?:[²³°]|\^\{?-?\w{1,8}\}?)?"
_ROOT = rf"(?:√ ?(?:{_NUMERAL}|\w)|\\sqrt ?(?:\{{[^{{}}]*\}}|\d)|π|\\pi(?![a-z])){_POWER}"
_FACTOR = rf"(?:{_ROOT}|(?:[a-z](?![a-zA-Z])|\([^()\s]{{1,30}}\)){_POWER})"
_PRODUCT = rf"(?:{_NUMERAL}{_POWER}|{_ROOT}|[a-z](?=\^){_POWER}){_FACTOR}*"
_VALUE = re.compile(
    _FORMULA.pattern + r"|\\[dt]?frac ?\{[^{}]*\} ?\{[^{}]*\}"
    rf"|(?<![a-zA-Z0-9.])(?:[a-zA-Z] ?[<>≤≥] ?)?[-−]?{_PRODUCT}(?: ?[×·*/+−-] ?{_PRODUCT})*"
    r"(?: ?\\?%| (?:thousand|million|billion|trillion)(?![a-zA-Z]))?"
)
_TAIL = 8000  # characters at the end of a text that are searched for its answer
_NEAR = 15  # at most this many characters between "the answer is" and the answer
_COPULA = re.compile(r"(?<!\w)(?:is|est)(?!\w)|[=是为]")
_JOIN = re.compile(
    r" ?(?:[-–/:]| to |,|,? ?(?<![a-zA-Z])(?:and|or|but)(?![a-zA-Z])(?: not(?![a-zA-Z]))?) ?"
    r"(?:[a-zA-Z]\w* ?= ?)?"
)
_BEFORE = re.compile(
    rf"(?:{NEGATION.pattern})[^.,;:\n]*$|(?<!\w)[(\[]?[A-Z][)\]] ?$", re.IGNORECASE
)
_HALF_OF_DAY = re.compile(r" ?[ap]\.?m(?:\.|(?![a-z]))", re.IGNORECASE)
_SUM = re.compile(r"[\d\s.,+*/×·÷()−-]*=")
# The end of a sentence up to the value that it states.
_STATES = re.compile(
    r"(?:(?<![a-zA-Z])(?:is|are|was|be|equals?|equal to|gets?|obtains?|ha(?:s|ve)|finds?|gives?"
    r"|yields?|conclude|becomes?|that)|[:=]) *$",
    re.IGNORECASE,
)


_POWER_OF_UNIT = re.compile(r"(?<=[a-zA-Z])\$ ?\^ ?\{?([23])\}? ?\$")  # cm$^2$
# A single capital before `is` may be the letter of an option.
_SENTENCE = re.compile(
    r"(?!\W*[A-Z]\W* (?:is|equals) )"
    r"([^.!?:;,\d\n]+ (?:is|equals|is equal to) |[^.!?:;,\d\n]*[\u4e00-\u9fff][^.!?:;,\d\n]*?"
    r"(?:是|(?<![因认作])为|等于)) ?(?=[-+$€£¥\\\d])(\S.*)"
)
_CONDITION = re.compile(
    r"(?<![a-zA-Z])(?:if|whether|unless|when|suppos\w*|assum\w*|(?:probability|chance) that|option"
    r"|choice)(?![a-zA-Z])"
    r"|[若当约设]|如果|假如|选项",
    re.IGNORECASE,
)


_LETTERS = "a-zA-ZÀ-ɏЀ-ӿ"  # not of Greek, whose letters are symbols
_WORD = re.compile(rf"(?<![\\{_LETTERS}\d_])[{_LETTERS}]+(?![{_LETTERS}\d_^])")
_SHORT_WORDS = frozenset({
    "am", "an", "as", "at", "be", "by", "do", "eu", "go", "he", "hi", "if", "in", "is", "it", "me",
    "my", "no", "of", "ok", "on", "or", "pc", "pm", "so", "to", "tv", "uk", "up", "us", "we",
})  # fmt: skip
_ARTICLE = re.compile(r"(?<![\w'])A(?= (?!(?:and|because)(?!\w))[a-z]{3})")
# In `a sin x` the a is a factor.
_LEADING_ARTICLE = re.compile(
    r"the (?=\w)|an? (?=[a-z]{3})(?!(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|exp|sqrt|mod)h?[a-z]?\b)"
)
FORMULA_SIGN = re.compile(r"[\\^_=+*<>|]|/ ?(?:[\d(]|[^\W\d_](?![^\W\d_]))")
_ONLY_PAIRS = re.compile(r"(?:(.)\1)+")


def fold_words(text: str) -> str:
    """The text with its words in lower case; other letters are symbols, and R is not r.

    A word is short and common, or has three letters or more, in a formula five, of which only the
    first or all may be capitals. `Mgh` is a product, because it has no vowel, and AA is a genotype.
    The length does not change.
    """
    if text == text.lower():
        return text
    min_letters = 5 if FORMULA_SIGN.search(text) else 3

    def fold(match: re.Match) -> str:
        word, lower = match.group(), match.group().lower()
        if lower in _SHORT_WORDS and min_letters == 3:
            return lower
        is_title = word[0] != lower[0] and word[1:] == lower[1:]
        is_symbols = _ONLY_PAIRS.fullmatch(lower) or (
            is_title and lower.isascii() and not any(vowel in lower for vowel in "aeiouy")
        )
        is_word = len(lower) == len(word) >= min_letters and (
            is_title or word.islower() or word.isupper()
        )
        return lower if is_word and not is_symbols else word

    return _ARTICLE.sub("a", _WORD.sub(fold, text))


_REASON = re.compile(r"(?:[,.;(] ?| )because(?![a-zA-Z])|[,(] ?since(?![a-zA-Z])")
_PRONOUN = re.compile(r"(?:it|they) (?=[a-z])", re.IGNORECASE)
_VERDICTS = frozenset({"yes", "no", "true", "false"})
_VERDICT = re.compile(r"(yes|no|true|false)[,.;:!] (?=[a-z])", re.IGNORECASE)
_TURN = re.compile(
    rf"{HEDGE.pattern}|(?<![a-z])(?:but|so|thus|hence|therefore|wait|actually|instead|rather)(?![a-z])",
    re.IGNORECASE,
)


def statement(text: str, expected: Sequence[str]) -> str:
    """What a text states: `5` of `5, because 2 + 3 = 5`, `Yes` of `Yes, it falls`.

    The rest is kept if it may state something else, or if an expected answer has one like it.
    """
    if (subject := _PRONOUN.match(text)) and not any(map(_PRONOUN.match, expected)):
        text = text[subject.end() :]
    reason = _REASON.search(text)
    if reason and not any(map(_REASON.search, expected)):
        rest = text[reason.end() :]
        if not _TURN.search(rest) and not SENTENCE_END.search(rest.rstrip(" .)")):
            text = text[: reason.start()]
    verdict = _VERDICT.match(text)
    if verdict and any(each.strip(" .").lower() in _VERDICTS for each in expected):
        rest = text[verdict.end() :]
        words = PLAIN_WORD.findall(rest.lower())
        if not _TURN.search(rest) and _VERDICTS.isdisjoint(words):
            text = verdict.group(1)
    return text


def without_article(text: str) -> str:
    """A text with folded words, without an article before them."""
    article = _LEADING_ARTICLE.match(text)
    return text[article.end() :] if article else text


def final_answer(text: str) -> str:
    """The final answer of free text: its boxes, "the answer is ...", or last formula or number.

    A value that is joined to others is given with them, and with what denies or labels it: "2 and
    3", "12/5/2010", "10:30 AM", "not 5 but 6", "(B) 15".
    """
    if "\\boxed" in text or "\\fbox" in text:
        return text
    text = text[-_TAIL:]
    phrase = next(iter(collections.deque(_PHRASE.finditer(text), maxlen=1)), None)
    rest = text[phrase.end() :] if phrase else text
    if phrase and (end := SENTENCE_END.search(rest.lstrip())):
        rest = rest.lstrip()[: end.start()]
    values = list(_VALUE.finditer(rest))
    if "\\(" in _FORMULA.sub("", rest):
        return text  # a formula that is not closed on its line: do not pick a number from it
    if not values:
        return rest.strip()
    if not phrase or values[0].start() > _NEAR:
        return _with_joined(rest, values, len(values) - 1)
    first = values[0]
    # In "The volume of $V$ is 12" and "3 + 4 = 7" the answer is a later value.
    if not any(c.isdigit() for c in first.group()) and len(values) > 1:
        gap = rest[first.end() : values[1].start()]
        return _with_joined(rest, values, int(_COPULA.search(gap) is not None))
    if (chain := _SUM.match(rest, first.start())) and (value := _VALUE.search(rest, chain.end())):
        return value.group()
    return _with_joined(rest, values, 0)


def _with_joined(text: str, values: list[re.Match], index: int) -> str:
    """The part of the text from the first to the last value that is joined to a given one.

    A negation or a label before them belongs to it.
    """
    first = last = index
    while first and _JOIN.fullmatch(text, values[first - 1].end(), values[first].start()):
        first -= 1
    while last + 1 < len(values) and _JOIN.fullmatch(
        text, values[last].end(), values[last + 1].start()
    ):
        last += 1
    begin = values[first].start()
    near = max(0, begin - _NEAR)
    if before := _BEFORE.search(text[near:begin]):
        begin = near + before.start()
    half = _HALF_OF_DAY.match(text, values[last].end())
    return text[begin : half.end() if half else values[last].end()]


def formula_of_sentence(text: str) -> str:
    """The formula at the end of a sentence ("We find that $x < 3$."), else the whole text.

    A unit may follow it.
    """
    joined = _POWER_OF_UNIT.sub(r"^\1", text)
    formulas = list(_FORMULA.finditer(joined))
    if len(formulas) != 1:
        return text
    before, after = joined[: formulas[0].start()], joined[formulas[0].end() :].strip(" .")
    is_sentence = len(PLAIN_WORD.findall(before)) >= 2 and (
        not after or quantities.split_unit(f"1 {after}")[0] == "1"
    )
    if not (is_sentence and _STATES.search(before)) or _changes_value(before):
        return text
    return f"{formulas[0].group()} {after}".strip()


def value_of_sentence(text: str, expected: Sequence[str]) -> str:
    """The value at the end of a sentence, 24 cm of `The perimeter is 24 cm`, else the whole text.

    The sentence is kept if an expected answer is one, as only their values would be compared.
    """
    match = _SENTENCE.fullmatch(text)
    if match is None or any(map(_SENTENCE.fullmatch, expected)):
        return text
    before, value = match.groups()
    is_value = quantities.read_number(value) or _VALUE.fullmatch(quantities.split_unit(value)[0])
    return value if is_value and not _changes_value(before) else text


def _changes_value(before: str) -> bool:
    """Whether words before a value say that it is another, as in `less than 5` and `six or 5`."""
    if any(c.isdigit() for c in before):
        return True
    name = _IS.sub("", before)
    if name != before and _COMPUTED.search(name):
        return True
    return any(pattern.search(before) for pattern in (NEGATION, HEDGE, _CONDITION))
