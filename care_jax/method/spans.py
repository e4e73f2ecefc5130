"""Finds the token spans of the rationale and the answer in a response (host, numpy).

The policy writes `<think> rationale </think><answer> answer </answer>`. Tags are found in the
response's bytes and mapped back to tokens, since byte-level BPE tokens can cross tag boundaries:
b"><" of `</think><answer>` can be one token, and so can b".</". T is the number of tokens of one
response without padding.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, UInt8


@dataclasses.dataclass(frozen=True)
class Spans:
    """The spans of one response."""

    # Tokens that share a byte with the span, its tags included. A token may be in both spans. The
    # final EOS belongs to the answer span, if there is one.
    is_think: Bool[np.ndarray, " T"]
    is_answer: Bool[np.ndarray, " T"]
    # Strictly between the tags; a token that contains any byte of a tag is not counted.
    num_think: int
    num_answer: int
    # 1.0 for one think span, one non-empty answer span, then EOS, with only whitespace around them.
    fmt: float
    has_answer: bool  # there is a well-formed answer span (see `parse`)
    answer: str  # text between the tags, stripped; empty without a well-formed span


def token_bytes(tokenizer: Any, vocab_size: int | None = None) -> list[bytes]:
    """The bytes of each token id of a byte-level BPE tokenizer of transformers.

    Added (special) tokens give their UTF-8 text, ids without a token b"". `vocab_size` is the
    model's, which is often padded beyond the tokenizer's; None means the largest id + 1.

    Raises:
        ValueError: the vocabulary is not byte-level, or does not fit into `vocab_size`.
    """
    vocab, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    num_ids = max(vocab.values(), default=-1) + 1
    if vocab_size is not None and vocab_size < num_ids:
        raise ValueError(
            f"vocab_size {vocab_size} must cover the tokenizer's {num_ids} ids; "
            "use the tokenizer that belongs to the model"
        )
    byte_of = _byte_of_character()
    table = [b""] * (num_ids if vocab_size is None else vocab_size)
    for token, index in vocab.items():
        if token in added:
            table[index] = token.encode()
            continue
        try:
            table[index] = bytes([byte_of[character] for character in token])
        except KeyError as error:
            raise ValueError(
                f"expected a byte-level BPE vocabulary, got token {token!r} (id {index}); "
                "use a tokenizer with a ByteLevel decoder"
            ) from error
    return table


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE's alphabet: a printable byte maps to chr(byte), the n-th other to 256 + n."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    return byte_of | {chr(256 + n): byte for n, byte in enumerate(others)}


def parse(
    tokens: Sequence[int] | Int[np.ndarray, " T"],
    token_bytes: Sequence[bytes],
    *,
    eos_token_ids: Collection[int],
    think_tag: str = "think",
) -> Spans:
    """Finds the think and the answer span of one response, in linear time.

    A think span is well-formed if each think tag occurs once, in order. An answer span is
    well-formed if each answer tag occurs once, in order, with non-whitespace text and no other tag
    between them, and the rationale before it, if any, is closed. A response with two answers, an
    empty answer, a truncated answer, or an answer inside the rationale has no answer span. An
    answer without a rationale, or with text around it, is read, but `fmt` is 0.

    Args:
        tokens: one response without padding, including EOS if it was reached. Ids beyond
            `token_bytes` have no text.
        token_bytes: bytes of each token id, from the function of that name.
        eos_token_ids: the tokens that end a response; only the last token is checked.
        think_tag: name of the rationale's tag, "reasoning" for Qwen3-VL.
    """
    is_complete = len(tokens) > 0 and int(tokens[-1]) in eos_token_ids
    ids = np.asarray(tokens, np.int64).tolist()
    pieces = [token_bytes[t] if t < len(token_bytes) else b"" for t in ids]
    if is_complete:
        pieces[-1] = b""
    text = b"".join(pieces)
    lengths = np.array([*map(len, pieces)], np.int64)
    ends = lengths.cumsum()
    starts = ends - lengths

    tags = [*_tags(think_tag).finditer(text)]
    names = [tag.group() for tag in tags]
    open_think, close_think = b"<%s>" % think_tag.encode(), b"</%s>" % think_tag.encode()

    is_think, num_think = np.zeros(len(tokens), bool), 0
    if pair := _single_pair(names, open_think, close_think):
        opening, closing = (tags[i] for i in pair)
        is_think = _overlaps(starts, ends, opening.start(), closing.end())
        num_think = _count_within(starts, ends, opening.end(), closing.start())

    is_answer, num_answer, answer = np.zeros(len(tokens), bool), 0, ""
    pair = _single_pair(names, b"<answer>", b"</answer>")
    if pair and pair[1] == pair[0] + 1 and names[: pair[0]][-1:] != [open_think]:
        opening, closing = (tags[i] for i in pair)
        answer = _decode(text[opening.end() : closing.start()]).strip()
    if has_answer := answer != "":
        is_answer = _overlaps(starts, ends, opening.start(), closing.end())
        is_answer[-1] |= is_complete
        num_answer = _count_within(starts, ends, opening.end(), closing.start())

    is_formatted = False
    if is_complete and names == [open_think, close_think, b"<answer>", b"</answer>"]:
        between = text[tags[1].end() : tags[2].start()]
        around = text[: tags[0].start()] + between + text[tags[3].end() :]
        is_formatted = has_answer and not _decode(around).strip()
    return Spans(
        is_think=is_think,
        is_answer=is_answer,
        num_think=num_think,
        num_answer=num_answer,
        fmt=float(is_formatted),
        has_answer=has_answer,
        answer=answer,
    )


def rationale_of(response: str, think_tag: str) -> str:
    """The text of a response's rationale, whether or not it is closed.

    From the first opening think tag, or the start of a response without one, to the next tag of the
    format, opening or closing.
    """
    opening, tag = f"<{think_tag}>", re.escape(think_tag)
    _, found, behind = response.partition(opening)
    return re.split(rf"</?(?:{tag}|answer)>", behind if found else response, maxsplit=1)[0]


def closing_tag_table(
    token_bytes: Sequence[bytes], think_tag: str = "think"
) -> UInt8[np.ndarray, "states V"]:
    """Transition table that detects the rationale's closing tag in any tokenisation, for decoding.

    The Knuth-Morris-Pratt automaton over the bytes of `</think>`, run over whole tokens:
    state' = table[state, token]. State 0 is the start. State i has matched the tag's first i bytes.
    The last state has matched the whole tag and is absorbing.
    """
    tag = f"</{think_tag}>".encode()
    step = np.full((len(tag) + 1, 256), len(tag), np.uint8)
    for state in range(len(tag)):
        for byte in range(256):
            seen = tag[:state] + bytes([byte])
            step[state, byte] = max(n for n in range(state + 2) if seen.endswith(tag[:n]))

    lengths = np.array([len(piece) for piece in token_bytes], np.int64)
    starts = np.cumsum(lengths) - lengths
    text = np.frombuffer(b"".join(token_bytes), np.uint8)
    table = np.repeat(np.arange(len(tag) + 1, dtype=np.uint8)[:, None], len(lengths), axis=1)
    for i in range(lengths.max(initial=0)):
        tokens = np.flatnonzero(lengths > i)  # tokens of more than i bytes: all advance by byte i
        table[:, tokens] = step[table[:, tokens], text[starts[tokens] + i]]
    return table


@functools.cache
def _tags(think_tag: str) -> re.Pattern[bytes]:
    return re.compile(rb"</?(?:%s|answer)>" % re.escape(think_tag.encode()))


def _overlaps(starts: np.ndarray, ends: np.ndarray, start: int, end: int) -> np.ndarray:
    """Tokens with a byte in [start, end), and tokens without text strictly inside it."""
    return (starts < end) & (ends > start)


def _count_within(starts: np.ndarray, ends: np.ndarray, start: int, end: int) -> int:
    """Number of tokens with all their bytes in [start, end)."""
    return int(np.count_nonzero((starts >= start) & (ends <= end)))


def _decode(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")


def _single_pair(names: list[bytes], opening: bytes, closing: bytes) -> tuple[int, int] | None:
    """Indices of the two tags if each occurs once, in order; else None."""
    if [name for name in names if name in (opening, closing)] != [opening, closing]:
        return None
    return names.index(opening), names.index(closing)
