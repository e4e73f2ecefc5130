"""Extracts from a recorded answer the text that a benchmark's published rules expect.

The rules were written for responses without tags. We therefore extract the answer span first, and
unwrap a box around all of it. Otherwise the rules of MMMU find no letter in
`<answer> \\boxed{A} </answer>` and draw one at random.
"""

from __future__ import annotations

import re

from care_jax.rewards.equivalence import boxes, notation

_CLOSED = re.compile(r"</(?:think|thinking|reasoning)>")
_OPENED = re.compile(r"<(?:think|thinking|reasoning)>")
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|tt)|mbox|operatorname) ?\{([^{}]*)\}"
)


def span_of(answer: str) -> tuple[str, bool]:
    """The final answer in a recorded answer, and whether it is the content of an answer span.

    The last `<answer>` span, else the text after the rationale, else the whole text. Empty if the
    rationale is never closed.
    """
    _, opening, last = answer.rpartition("<answer>")
    if opening and "</answer>" in last:
        return last.partition("</answer>")[0].strip(), True
    rationales = list(_CLOSED.finditer(answer))
    if rationales:
        answer = answer[rationales[-1].end() :]
    elif _OPENED.search(answer):
        return "", False
    return answer.replace("<answer>", "").strip(), False


def last_box(text: str) -> str | None:
    """Content of the last balanced box, nested boxes and text commands unwrapped; None without."""
    contents = [content for *_, content in boxes.find_boxes(text)]
    if not contents:
        return None
    inner = last_box(contents[-1]) if len(contents[-1]) <= notation.MAX_CHARS else None
    return _TEXT.sub(r"\1", contents[-1] if inner is None else inner).strip()


def is_one_box(text: str) -> bool:
    """Whether the text is a single box, apart from punctuation."""
    start, end, _ = next(boxes.find_boxes(text), (0, 0, ""))
    is_alone = not text[:start].strip(" $*\n\\([") and not text[end:].strip(" $*\n.\\)]")
    return end > 0 and is_alone


def unwrap(answer: str) -> str:
    """`span_of`, reduced to its last box if it is an answer span or nothing but a box."""
    text, is_span = span_of(answer)
    if (is_span or is_one_box(text)) and (content := last_box(text)) is not None:
        return content
    return text
