"""Vision-R1-cold (Osilly/Vision-R1-cold): long rationales for the cold start (sec:setup).

Two JSON arrays with different columns: {id, image, conversations} with roles human and gpt, and
{images, conversations} with roles user and assistant. They hold only paths: the images are those of
LLaVA-CoT-100k and Mulberry-SFT. A response is `<think>`, the rationale, `</think>`, and a text that
ends in an answer. It becomes `<{think_tag}>rationale</{think_tag}><answer>answer</answer>`.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from care_jax.batch import Example, Unusable
from care_jax.data.readers import hub
from care_jax.data.readers.json_rows import JsonRows
from care_jax.data.rows import Rows, images_of, locate, make_example
from care_jax.rewards.equivalence import boxes, free_text, notation

_ASKING, _ANSWERING = ("human", "user"), ("gpt", "assistant")
_MAX_ANSWER_CHARS = 300  # longer ones are explanations
_FORMULA = re.compile(r"\$+([^$]+)\$+|\\\(((?:(?!\\\)).)+)\\\)|\\\[((?:(?!\\\]).)+)\\\]")


def open_rows(
    path: str, *, images: str = "", images_outside: bool = False, think_tag: str = "think"
) -> Rows:
    """The questions of a release's folder, file or hub id, with their rationales inside the tag.

    `images` and `images_outside` are those of `hub.image_folder` and `rows.images_of`.

    Raises:
        ValueError: there is no JSON file, or a `.json` file is not one complete array.
    """
    release = hub.find(path, ["*.json", "**/*.json"])
    files = [release]
    if release.is_dir():
        files = sorted(release.glob("*.json")) + sorted(release.glob("*.jsonl"))
    if not files:
        raise ValueError(f"expected JSON files in {str(release)!r}, got none; change the path")
    tables = [JsonRows(file) for file in files]
    ends = list(itertools.accumulate(map(len, tables)))
    folder = hub.image_folder(images, release)

    def example(index: int) -> Example:
        number, row_index = locate(ends, index)
        row = tables[number][row_index]
        question, response = _turns(row)
        rationale, answer = _parts(response)
        cell = row.get("image") if row.get("image") is not None else row.get("images")
        return make_example(
            id=row.get("id"),
            position=f"{files[number].stem}-{tables[number].numbers[row_index]}",
            source="vision_r1_cold",
            question=question,
            answer=answer,
            images=images_of(cell, folder, images_outside),
            rationale=rationale,
            response=f"<{think_tag}>{rationale}</{think_tag}><answer>{answer}</answer>",
            needs_placeholder=True,
        )

    return Rows(ends[-1], example)


def _turns(row: dict[str, Any]) -> tuple[str, str]:
    """(question, response) of a conversation with one turn each."""
    turns = row.get("conversations", row.get("messages"))
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise Unusable("no conversation")
    messages = [(t.get("from", t.get("role")), t.get("value", t.get("content"))) for t in turns]
    if messages and messages[0][0] == "system":
        messages = messages[1:]
    is_pair = len(messages) == 2 and messages[0][0] in _ASKING and messages[1][0] in _ANSWERING
    if not is_pair or not all(isinstance(text, str) for _, text in messages):
        raise Unusable("not one question and one response")
    return messages[0][1], messages[1][1]


def _parts(response: str) -> tuple[str, str]:
    """(rationale, answer) of a response."""
    opening, found, rest = response.partition("<think>")
    rationale, closed, conclusion = rest.partition("</think>")
    if not found or not closed or opening.strip() or "<think>" in rest or "</think>" in conclusion:
        raise Unusable("not exactly one rationale")
    if not rationale.strip():
        raise Unusable("rationale empty")
    _, is_tagged, tagged = conclusion.partition("<answer>")
    if is_tagged:
        answer = tagged.partition("</answer>")[0].strip()
    else:
        answer = _bare(free_text.final_answer(conclusion.strip()))
        answer = answer if notation.clean(answer) else ""
    if len(answer) > _MAX_ANSWER_CHARS:
        raise Unusable(f"answer longer than {_MAX_ANSWER_CHARS} characters")
    return rationale.strip(), answer


def _bare(answer: str) -> str:
    """An answer as it is written, without its box, delimiters, `**` and final full stop."""
    answer = boxes.unbox(answer).strip("* \n")
    if not answer.endswith(".."):
        answer = answer.removesuffix(".").strip("* \n")
    formula = _FORMULA.fullmatch(answer)
    return next(filter(None, formula.groups())).strip() if formula else answer
