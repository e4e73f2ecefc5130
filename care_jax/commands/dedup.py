"""Detects duplicate examples across corpora, and contamination by evaluation benchmarks.

An exact duplicate has the same text and the same pictures. A near duplicate has the same text up to
case, spaces and punctuation, similar pictures, and the same answer. The answer is compared because
short questions ("Find x.") recur with many diagrams that differ in one label.

Matches with a benchmark ignore the answer. An equal picture is enough, whatever the question; with
the same text one similar picture is, whatever their number and order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
import unicodedata

from care_jax.batch import Example, answer_text
from care_jax.prompts.images import Fingerprint, fingerprint, num_different_bits
from care_jax.rewards.equivalence import notation, options, quantities

# `rows.make_example` writes "(picture 2)" for a second placeholder of one image.
_PLACEHOLDER = re.compile(r"<image ?\d*>|\(picture \d+\)")
_KEPT = re.compile(r"\d+(?:[.,]\d+)*|[^\W_]|[-+*/^<>=%°√π]")


@dataclasses.dataclass(frozen=True)
class Content:
    """Digests of an example, a few dozen bytes."""

    exact: bytes  # digest of the question (whitespace collapsed) and the pictures' pixels
    text: bytes  # digest of the question without choices, case, spaces and punctuation
    answer: bytes  # digest of the normalised answer, a letter resolved to its choice
    pictures: tuple[Fingerprint, ...]  # fingerprint of each picture, in order


def content_of(example: Example) -> Content:
    """Decodes the pictures of an example and computes its digests; may raise `Unusable`."""
    pictures, question = tuple(map(fingerprint, example.images)), example.question
    if example.choices:
        question = "\n".join(question.split("\n")[: -len(example.choices)]) or question
    words = " ".join(example.question.split())
    return Content(
        exact=_digest(words.encode(), *(picture.digest for picture in pictures)),
        text=_digest(normalized_text(question).encode()),
        answer=_digest(_answer_key(example).encode()),
        pictures=pictures,
    )


def normalized_text(text: str) -> str:
    """The text without case, spaces, punctuation and placeholders; keeps numbers and operators."""
    text = unicodedata.normalize("NFKC", _PLACEHOLDER.sub(" ", text)).casefold()
    return "".join(_KEPT.findall(text))


class DuplicateIndex:
    """An index of the examples kept so far and of the benchmarks' questions.

    Two pictures are similar if at most `near_bits` of their 144 perceptual-hash bits differ.
    """

    def __init__(self, near_bits: int):
        self._near_bits = near_bits
        self._exact: dict[bytes, tuple[str, bytes]] = {}
        self._near: dict[tuple[bytes, bytes], list[tuple[str, Content]]] = {}
        self._benchmark: dict[bytes, list[tuple[str, Content]]] = {}
        self._benchmark_pictures: dict[bytes, str] = {}

    def add_benchmark(self, name: str, content: Content) -> None:
        """Adds a benchmark question, which must not be trained on."""
        self._benchmark.setdefault(content.text, []).append((name, content))
        for picture in content.pictures:
            self._benchmark_pictures.setdefault(picture.digest, name)

    def in_benchmark(self, content: Content) -> tuple[str, str]:
        """(reason, name) of the benchmark with the question or a picture; empty if none."""
        for name, other in self._benchmark.get(content.text, ()):
            pairs = [*itertools.product(content.pictures, other.pictures)]
            has_none = not content.pictures and not other.pictures
            if has_none or any(self._is_similar(*pair) for pair in pairs):
                return f"question of benchmark {name}", name
        for picture in content.pictures:
            if name := self._benchmark_pictures.get(picture.digest):
                return f"picture of benchmark {name}", name
        return "", ""

    def duplicate(self, content: Content) -> str:
        """The reason to drop an example as a duplicate of a kept one; empty if there is none."""
        if content.exact in self._exact:
            name, answer = self._exact[content.exact]
            conflict = "" if answer == content.answer else " with another answer"
            return f"duplicate of {name}{conflict}"
        for name, other in self._near.get((content.text, content.answer), ()):
            if self._has_similar_pictures(content, other):
                return f"near duplicate of {name}"
        return ""

    def add(self, name: str, content: Content) -> None:
        """Adds an example that is kept."""
        self._exact[content.exact] = name, content.answer
        self._near.setdefault((content.text, content.answer), []).append((name, content))

    def _has_similar_pictures(self, one: Content, other: Content) -> bool:
        return len(one.pictures) == len(other.pictures) and all(
            self._is_similar(*pair) for pair in zip(one.pictures, other.pictures, strict=True)
        )

    def _is_similar(self, one: Fingerprint, other: Fingerprint) -> bool:
        return num_different_bits(one.hash, other.hash) <= self._near_bits


def _answer_key(example: Example) -> str:
    answer = notation.clean(answer_text(example.answer))
    choices = [notation.clean(choice) for choice in example.choices]
    keys = [notation.caseless_key(choice) for choice in choices]
    if choices and notation.caseless_key(answer) not in keys:
        letter = options.choice_letter(answer, len(choices))
        answer = choices[ord(letter) - ord("A")] if letter else answer
    number = quantities.read_number(answer)
    if number is None:
        return notation.caseless_key(answer)
    return f"{number.value}{'%' * number.is_percent} {number.unit}"


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()
