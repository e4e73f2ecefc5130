"""Which examples are the same: across corpora, and against the evaluation benchmarks.

Two questions are the same where their texts and pictures are (exact), or where their texts are but
for case, spaces and punctuation, their pictures look alike and their answers agree (near). Short
questions ("Find x.") stand under many diagrams that differ in a label alone, so looking alike does
not make two of them one unless the answers agree.

Against a benchmark the answers do not count, and a picture of a benchmark is enough by itself,
whatever is asked about it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import unicodedata

from care_jax.batch import Example
from care_jax.prompts.images import Look, look, num_different_bits
from care_jax.rewards import notation, quantities

_PLACEHOLDER = re.compile(r"<image>")
_SPOKEN = re.compile(r"\d+(?:[.,]\d+)*|[^\W_]|[-+*/^<>=%°√π]")


@dataclasses.dataclass(frozen=True)
class Content:
    """What an example asks, in a few dozen bytes.

    Attributes:
        exact: of the question as it stands and the pictures' pixels.
        text: of the question without choices, case, spaces and punctuation.
        answer: of the normalised answer, a letter resolved to its choice.
        digests: of the pictures' pixels.
        hashes: perceptual, of the pictures in order.
    """

    exact: bytes
    text: bytes
    answer: bytes
    digests: tuple[bytes, ...]
    hashes: tuple[int, ...]


def content_of(example: Example) -> Content:
    """Decodes the pictures of an example and says what it asks.

    Raises:
        Unusable: a picture cannot be decoded.
    """
    looks: list[Look] = [look(image) for image in example.images]
    digests = tuple(one.digest for one in looks)
    question = example.question
    if example.choices:
        question = "\n".join(question.split("\n")[: -len(example.choices)]) or question
    return Content(
        exact=_digest(" ".join(example.question.split()).encode(), *digests),
        text=_digest(spoken(question).encode()),
        answer=_digest(_answer_key(example).encode()),
        digests=digests,
        hashes=tuple(one.hash for one in looks),
    )


def spoken(text: str) -> str:
    """A text without case, spaces, punctuation and placeholders; numbers and operators stay."""
    text = unicodedata.normalize("NFKC", _PLACEHOLDER.sub(" ", text)).casefold()
    return "".join(_SPOKEN.findall(text))


class Seen:
    """The examples kept so far and the benchmarks, by what they ask.

    Args:
        near_bits: of 144 that may differ between the hashes of two pictures that look alike.
    """

    def __init__(self, near_bits: int):
        self._near_bits = near_bits
        self._exact: dict[bytes, tuple[str, bytes]] = {}
        self._near: dict[bytes, list[tuple[str, Content]]] = {}
        self._benchmark: dict[bytes, list[tuple[str, Content]]] = {}
        self._benchmark_pictures: dict[bytes, str] = {}

    def add_benchmark(self, name: str, content: Content) -> None:
        """Takes note of a question that must not be trained on."""
        self._benchmark.setdefault(content.text, []).append((name, content))
        for digest in content.digests:
            self._benchmark_pictures.setdefault(digest, name)

    def in_benchmark(self, content: Content) -> tuple[str, str]:
        """(reason, name) of the benchmark that holds the question; empty where none does."""
        for name, other in self._benchmark.get(content.text, ()):
            if self._looks_alike(content, other):
                return f"question of benchmark {name}", name
        for digest in content.digests:
            if name := self._benchmark_pictures.get(digest):
                return f"picture of benchmark {name}", name
        return "", ""

    def duplicate(self, content: Content) -> str:
        """Why an example is left out as the same as one that was kept; empty where it is not."""
        if content.exact in self._exact:
            name, answer = self._exact[content.exact]
            conflict = "" if answer == content.answer else " with another answer"
            return f"duplicate of {name}{conflict}"
        for name, other in self._near.get(content.text, ()):
            if content.answer == other.answer and self._looks_alike(content, other):
                return f"near duplicate of {name}"
        return ""

    def add(self, name: str, content: Content) -> None:
        """Takes note of an example that is kept."""
        self._exact[content.exact] = name, content.answer
        self._near.setdefault(content.text, []).append((name, content))

    def _looks_alike(self, one: Content, other: Content) -> bool:
        return len(one.hashes) == len(other.hashes) and all(
            num_different_bits(a, b) <= self._near_bits
            for a, b in zip(one.hashes, other.hashes, strict=True)
        )


def _answer_key(example: Example) -> str:
    answer = notation.clean(example.answer)
    choices = [notation.clean(choice) for choice in example.choices]
    keys = [notation.key(choice) for choice in choices]
    if choices and notation.key(answer) not in keys:
        letter = notation.choice_letter(answer, len(choices))
        answer = choices[ord(letter) - ord("A")] if letter else answer
    number = quantities.read_number(answer)
    if number is None:
        return notation.key(answer)
    return f"{number.value}{'%' * number.is_percent} {number.unit}"


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()
