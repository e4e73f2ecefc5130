"""Option letters: the one, or the set, that an answer chooses."""

from __future__ import annotations

import re

from care_jax.rewards.equivalence import free_text

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LETTER = re.compile(r"(?:OPTION |CHOICE )?[(\[]?([A-Z])[)\]]?[.:)]?")
_NAMES_LETTER = re.compile(
    r"[(\[]?[A-Z][)\].:]{1,2} \S|[A-Z] ?= ?[A-Z]$|[(\[]?[a-d][)\]]?$"
    r"|[A-Z](?:, | (?:is|because|since)(?![a-zA-Z]))"
    r"|.*(?<![a-zA-Z])(?i:option|choice|answer|choose|pick|select) (?!\d)"
    r"|(?!.*[不非没错除])(?:.*(?:选项?|答案[是为:]?) ?\(?[A-Z](?![a-zA-Z\d])"
    r"|[A-Z] ?(?:选?项|是|正确))"
)
_LABELLED = re.compile(r"[(\[]?([A-Z]|[a-z](?=\W+ ))(?:[)\]][.:]?|[.:)])(?= ?\S)")
# What follows the letter of an option in a sentence about it, and not its text.
_PREDICATE = re.compile(
    r"(?:is|was|does|has|seems|must|should|would|could|cannot be (?:right|correct|true)"
    r"|can't|isn't|wasn't|doesn't)(?![a-zA-Z])"
)
_OF_OPTIONS = re.compile(r"(?i:both|neither|either) [A-Z] (?i:and|n?or) [A-Z]\W*")
# In the text of an option another letter follows a noun, `Point A`, or is in a formula, `F = ma`.
_OTHER_OPTION = re.compile(
    r"(?:^|[.,;:?!/|&(\[。]|(?<![a-zA-Z])(?:or|and|but|not|no|maybe|perhaps|possibly|probably|rather|instead"
    r"|wait|actually|hmm|now|so|thus|then|hence|therefore|is|it's|be|to|than|think|choose|pick|option"
    r"|choice|answer)) ?[(\[]?(?!I(?![a-zA-Z]))(?-i:[A-Z])(?![\w'])(?! ?[=+\-*/^\\<>(])"
    r"|(?<![\w(\[])[(\[]?[A-Za-z](?:[)\]][.:]?|[.:])(?= ?\S)",
    re.IGNORECASE,
)
# An A or I before a lower-case word, except a few such as "is", is an article or a pronoun.
_STANDALONE = re.compile(
    r"(?<![a-zA-Z\d\\'_])([B-HJ-Z]|[AI](?! (?!(?:and|or|is|because)\b)(?-i:[a-z])))(?![a-zA-Z\d'_])"
)
_STANDALONE_IN_ANY_CASE = re.compile(_STANDALONE.pattern, re.IGNORECASE)
_BRACKETED = re.compile(r"[(\[]([a-zA-Z])[)\]]")
_CLAUSE = re.compile(r"[.,;:?()。\n]|(?<![a-zA-Z])(?:so|because|since|as)(?![a-zA-Z])")
_BETWEEN_LETTERS = re.compile(r"(?<![a-zA-Z])and(?![a-zA-Z])|[ ,;&.()\[\]]")
_AFTER_BUT = re.compile(r"(?<![a-zA-Z])but(?![a-zA-Z]).*")
_DENIED = re.compile(r"(?:(?<![a-zA-Z])(?:but )?(?:not|non)(?= )|不是) ?[A-Z](?![a-zA-Z]).*")


def choice_letter(text: str, num_choices: int) -> str:
    """The single option letter that the text chooses; empty if it names none or several.

    Clauses with a negation do not count: "C, not A" and "it can't be A, so C" give C, and "A is
    wrong" and "A, but C" nothing. A small letter chooses as a label alone, "b) 45", but makes "A
    and b" two.
    """
    text = text.strip()
    allowed = set(LETTERS[:num_choices])
    if match := _LETTER.fullmatch(text.upper()):
        return match.group(1) if match.group(1) in allowed else ""
    clauses = _CLAUSE.split(_BRACKETED.sub(r" \1 ", text))
    clauses = [_DENIED.sub("", clause) for clause in clauses]
    affirmed = " . ".join(clause for clause in clauses if not free_text.NEGATION.search(clause))
    # "A? No" and "wrong: A" deny a letter outside of their clause.
    is_denied = any(free_text.NEGATION.fullmatch(clause.strip()) for clause in clauses)
    if is_denied or free_text.HEDGE.search(affirmed):
        return ""
    chosen = set(_STANDALONE.findall(affirmed))
    if label := _LABELLED.match(text):
        chosen.add(label.group(1).upper())
    turn = " . ".join(_AFTER_BUT.findall("\n".join(clauses)))
    if not chosen.issuperset(_STANDALONE.findall(turn)):
        return ""
    named = {letter.upper() for letter in _STANDALONE_IN_ANY_CASE.findall(affirmed)} & allowed
    return named.pop() if len(named) == 1 and named <= chosen else ""


def without(text: str, option: str) -> str:
    """The text without that of an option, with words folded, where it stands apart from others."""
    pattern = rf"(?<![\w.])(?<!\d/){re.escape(option)}(?![\w%]|\.\d)"
    kept, start = [], 0
    for match in re.finditer(pattern, free_text.fold_words(text)):
        kept.append(text[start : match.start()])
        start = match.end()
    return " ".join([*kept, text[start:]])


def is_letter(text: str) -> bool:
    """Whether a text is one capital letter, which may name an option that is not known."""
    letter = text.strip("()[]")
    return len(letter) == 1 and "A" <= letter <= "Z"


def letter_of(text: str) -> str | None:
    """The letter of `A. 15`, `option A` or `a`, of options that are not known.

    Empty if it is in doubt, as of `A. 15 or B` and `B = A`; None for a text that is a value.
    """
    text = text.replace("*", "")
    letter, rest = label(text)
    is_sentence = _PREDICATE.match(rest) is not None
    if letter and is_sentence and free_text.NEGATION.search(rest):
        return ""
    is_other = not _OF_OPTIONS.fullmatch(rest) and _OTHER_OPTION.search(rest)
    if letter and not (is_sentence or is_other):
        return letter
    return choice_letter(text, len(LETTERS)) if letter or _NAMES_LETTER.match(text) else None


def spelled_letters(text: str) -> str:
    """The letters of `A, C` or `AC`, in their order; empty for any other text."""
    letters = _BETWEEN_LETTERS.sub("", text)
    return letters if len(choice_letters(letters, len(LETTERS))) > 1 and letters.isupper() else ""


def label(text: str) -> tuple[str, str]:
    """The letter and the rest of `b) 45`; ("", text) for other texts."""
    match = _LABELLED.match(text)
    return (match.group(1).upper(), text[match.end() :].strip()) if match else ("", text)


def choice_letters(text: str, num_choices: int) -> frozenset[str]:
    """The option letters of a text such as `AC` or `A, C and D`; empty for any other text."""
    letters = _BETWEEN_LETTERS.sub("", text).upper()
    allowed = LETTERS[:num_choices]
    is_choice = len(set(letters)) == len(letters) and all(letter in allowed for letter in letters)
    return frozenset(letters if is_choice else "")
