"""Compares answers to a question with options, each named by its letter or its text."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from care_jax.rewards.equivalence import assignments, free_text, notation, options, quantities
from care_jax.rewards.symbolic import Comparison, is_equal, outcome_of

# In `\\angle A`, `\\sin A` and `P(A)` the letter is no option.
_NAME_WITH_LETTER = re.compile(
    r"(?:m ?)?(?:\\[a-z]+|angle|sin|cos|tan) ?[({]?[A-Z][)}]?|[a-zA-Z]\([A-Z]\)"
)


class Choices(NamedTuple):
    """Cleaned choices, their lookup keys, and those that are more than a letter, longest first.

    `are_sentences` means that some end in a formula, so that a formula alone is no choice.
    """

    texts: list[str]
    keys: list[str]
    mentions: list[tuple[str, int]]
    are_sentences: bool


@functools.lru_cache(maxsize=4096)
def clean_choices(choices: tuple[str, ...]) -> Choices:
    """The choices as they are compared; cached, as a group of rollouts shares them."""
    texts = [notation.clean(choice, in_sentences=False) for choice in choices]
    are_sentences = any(free_text.formula_of_sentence(choice) != choice for choice in choices)
    mentions = [(free_text.fold_words(text), i) for i, text in enumerate(texts)]
    mentions = [each for each in mentions if len(each[0]) > 1 or each[0].isdigit()]
    mentions.sort(key=lambda each: -len(each[0]))
    return Choices(texts, [notation.key(text) for text in texts], mentions, are_sentences)


def _named_options(text: str, choices: Choices, same: Callable) -> set[int]:
    """The options that a text names, by their letters and texts; empty for any other text."""
    for known, name in ((choices.texts, text), (choices.keys, notation.key(text))):
        if known.count(name) == 1:  # options may differ in case alone
            return {known.index(name)}
    num_choices = len(choices.texts)
    if len(text) == 1 and (index := options.LETTERS.find(text.upper())) >= 0:
        return {index} if index < num_choices else set()
    if quantities.read_number(text):  # 5 A is in amperes
        return set()
    name, value = assignments.split(text)
    is_no_option = options.LETTERS.find(name.upper()) >= num_choices  # I of `I = 5 A`
    is_variable = len(name) == 1 and (is_no_option or "," in value)  # or a point
    if is_variable or _NAME_WITH_LETTER.fullmatch(name):
        return _named_options(value, choices, same)
    label, rest = options.label(text)
    named = set()
    if label and (own := options.LETTERS.index(label)) < num_choices:
        if notation.key(rest) == choices.keys[own]:
            return {own}
        named = _fitting_options(rest, choices.texts, same)  # its text may be another option's
        if own in named:
            return {own}
    # The texts of other options spoil a letter: `A or 15`.
    folded = free_text.fold_words(text)
    for option, index in choices.mentions:
        if option in folded and (rest := options.without(text, option)) != text:
            text = rest
            named.add(index)
    letter = options.choice_letter(text, num_choices)
    return {options.LETTERS.index(letter), *named} if letter else set()


def _fitting_options(text: str, choices: Iterable[str], same: Callable) -> set[int]:
    """The options whose text, if not empty, a text equals by text rules."""
    outcomes = (same(text, choice) if choice else "" for choice in choices)
    return {i for i, each in enumerate(outcomes) if isinstance(each, str) and is_equal(each)}


def compare_choice(
    prediction: str, gold: str, choices: Choices, same: Callable[[str, str], str | Comparison]
) -> str | Comparison:
    """Compares options; both sides may name one by its letter or its text."""
    texts, keys = choices.texts, choices.keys
    named, gold_named = (_named_options(text, choices, same) for text in (prediction, gold))
    if len(named) > 1:
        return "different: several options"
    index, gold_index = (each.pop() if len(each) == 1 else -1 for each in (named, gold_named))
    if gold_index >= 0 and index >= 0:
        return outcome_of(index == gold_index, "option")
    if gold_index < 0 and len(letters := options.choice_letters(gold, len(texts))) > 1:
        same_letters = options.choice_letters(prediction, len(texts)) == letters
        return outcome_of(same_letters, "set of options")
    if gold_index >= 0:
        if keys[gold_index].upper() == options.LETTERS[gold_index]:
            return "different: no option"  # options shown as pictures have no text to compare
        outcome = same(prediction, texts[gold_index])
        if isinstance(outcome, Comparison) or not is_equal(outcome):
            return outcome
        is_only = _fitting_options(prediction, texts, same) == {gold_index}  # 5 fits 5 cm and 5 m
        return outcome if is_only else "different: several options"
    return same(texts[index] if index >= 0 else prediction, gold)
