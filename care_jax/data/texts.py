"""Reads a field of a row as text: numbers, the messages of a chat, an answer in tags."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any

from care_jax.batch import Unusable

LONE_SURROGATE = "a lone surrogate in the text, which UTF-8 cannot encode"
IMAGE_IN_MESSAGE = "image inside a message without a path; put its file's path in `image`"
TAGS_IN_ANSWER = "answer with <think> or <answer> tags that are not one answer"
SURROGATE = re.compile("[\ud800-\udfff]")
_TAG = re.compile(r"(</?(?:think|answer)>)", re.IGNORECASE)
_ANSWER_TAGS = ["<answer>", "</answer>"]
_USERS = ("user", "human")
_IMAGES = ("image", "image_url")  # types of a part of a message


def text_of(value: Any, name: str, *, is_number_allowed: bool = False) -> str:
    """A field without surrounding whitespace; "" if it is absent or has no visible character.

    Some exports leave zero-width characters in an empty field.
    """
    if value is None:
        return ""
    if is_number_allowed and isinstance(value, int | float) and not isinstance(value, bool):
        return number_text(value, name)
    if not isinstance(value, str):
        raise Unusable(
            f"{name} is {'neither text nor a number' if is_number_allowed else 'not text'}",
            shown(value),
        )
    is_visible = any(unicodedata.category(c)[0] in "LNPS" for c in value)
    return value.strip() if is_visible or SURROGATE.search(value) else ""


def number_text(value: float, name: str) -> str:
    """A finite number as text."""
    if not is_finite(value):
        raise Unusable(f"{name} is not a finite number")
    try:
        return str(value)
    except ValueError as error:  # Python converts integers of at most 4300 digits
        raise Unusable("text too long") from error


def is_finite(value: Any) -> bool:
    """Whether no number in a value is NaN or infinite, which Python's JSON parser accepts."""
    if isinstance(value, list | dict):
        return all(map(is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def shown(value: Any) -> str:
    """The beginning of a value, for the detail of `Unusable`."""
    return f"{value!r:.60}"


def asked(question: Any, *, has_images: bool = True) -> Any:
    """Of the messages of a chat what the user said last, `<image>` for each image in it.

    Any other question is returned unchanged. `has_images`: the row has images, in its messages or
    beside them.
    """
    if not _is_chat(question):
        return question
    content = _last_of_user(question)
    if not isinstance(content, list):
        return content
    return "".join(_part(part, has_images) for part in content)


def images_in(question: Any) -> list[Any]:
    """The images in what the user said last in a chat, in the forms of Qwen and of OpenAI."""
    content, found = _last_of_user(question) if _is_chat(question) else (), []
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") in _IMAGES:
            names = (part["type"], "path", "url")
            image = next((part[name] for name in names if part.get(name)), None)
            image = image.get("url", image) if isinstance(image, dict) else image
            found.append(image.removeprefix("file://") if isinstance(image, str) else image)
    return found


def _is_chat(question: Any) -> bool:
    return isinstance(question, list) and all(isinstance(turn, dict) for turn in question)


def _last_of_user(chat: list[dict[str, Any]]) -> Any:
    turns = [turn for turn in chat if turn.get("role", turn.get("from")) in _USERS]
    if not turns:
        raise Unusable("messages without one of the user", shown(chat))
    return turns[-1].get("content", turns[-1].get("value"))


def _part(part: Any, has_images: bool) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind in _IMAGES:
        if not has_images:
            raise Unusable(IMAGE_IN_MESSAGE, shown(part))
        return "<image>"
    raise Unusable("a part of a message is neither text nor an image", shown(part))


def answer_of(value: Any) -> Any:
    """A gold answer: text outside of tags, or for a reward function a list or an object."""
    if isinstance(value, list | dict):
        if not is_finite(value):
            raise Unusable("a number in the answer is not finite")
        return value
    answer = _without_tags(text_of(value, "answer", is_number_allowed=True))
    if not answer:
        raise Unusable("no answer")
    return answer


def _without_tags(answer: str) -> str:
    """The answer inside of `<answer>` tags, which a rationale in `<think>` tags may precede."""
    parts = _TAG.split(answer)
    tags = [tag.lower() for tag in parts[1::2]]
    if not tags:
        return answer
    if tags not in (_ANSWER_TAGS, ["<think>", "</think>", *_ANSWER_TAGS]):
        raise Unusable(TAGS_IN_ANSWER, shown(answer))
    return parts[-3].strip()
