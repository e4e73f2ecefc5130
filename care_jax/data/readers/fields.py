"""Examples from rows whose fields may have any name: JSON lines, rows from Python and parquet.

A name may lead into an object: `reward_model.ground_truth`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from care_jax.batch import Example, Unusable
from care_jax.data.rows import AnyFolder, images_of, leaves, make_example
from care_jax.data.texts import images_in, shown

# What an example is made of, and the names that it has if no other is given.
FIELDS = {
    "id": ("id",),
    "question": ("question", "messages", "prompt"),
    "answer": ("answer",),
    "images": ("image", "images"),
    "choices": ("options", "choices"),
    "rationale": ("rationale",),
    "response": ("response",),
    "context": ("context",),
    "units": ("units",),
}
NONE = "none"
_UNREAD = "an image in a field that is not read"
_IMAGE_NAME = re.compile(r"image|img|picture|file_?name", re.IGNORECASE)
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
Names = Mapping[str, tuple[str, ...]]  # of each part of an example the fields that may hold it


def names_of(columns: Mapping[str, str] | None, defaults: Names = FIELDS) -> Names:
    """The given names, or the default ones; "none" is no name, and images may have "a,b"."""

    def split(part: str, name: str) -> tuple[str, ...]:
        return tuple(filter(None, name.split(","))) if part == "images" else (name,)

    given = {part: name for part, name in (columns or {}).items() if name}
    chosen = {part: () if name == NONE else split(part, name) for part, name in given.items()}
    return {**defaults, **chosen}


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """The value of a field, or of one in an object; None if there is none."""
    if name in row or "." not in name:
        return row.get(name)
    value: Any = row
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def example_of(
    row: Mapping[str, Any],
    names: Names,
    *,
    position: int,
    source: str,
    folder: AnyFolder,
    images_outside: bool,
    has_image_names: bool,
) -> Example:
    """The example of a row; fields that are no part of it become `Example.extra`.

    Args:
        position: the id of a row without one.
        folder, images_outside: see `rows.images_of`.
        has_image_names: the names of images were chosen, so that no other field has any.
    """
    found = {part: first_of(row, names[part]) for part in names if part != "images"}
    for part in ("question", "answer"):
        if found[part][1] is None:
            raise Unusable(
                f"no {part}",
                f"it has {', '.join(map(str, row)) or 'no keys'}; expected question and answer, "
                f"and image, images or options if there are any; or name columns.{part}",
            )
    cells = [cell for name in names["images"] if not _is_empty(cell := value_at(row, name))]
    if len(cells) > 1 and not has_image_names:
        raise Unusable("both image and images")
    if not cells and not has_image_names:
        cells = [image for image in images_in(found["question"][1]) if image]
    read = {name for part, all_names in names.items() if part != "question" for name in all_names}
    read.update(names["question"][: names["question"].index(found["question"][0]) + 1])
    extra = {name: value for name, value in row.items() if name not in read}
    if not cells and not has_image_names:
        _check_for_images(extra)
    return make_example(
        **{part: value for part, (_, value) in found.items()},
        position=position,
        source=source,
        images=images_of(cells, folder, images_outside),
        extra=extra,
        needs_image=False,
    )


def first_of(row: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    """The first of these fields that is not empty and its value, else the first that is there."""
    pairs = [(name, value) for name in names if (value := value_at(row, name)) is not None]
    filled = (pair for pair in pairs if not _is_empty(pair[1]))
    return next(filled, pairs[0] if pairs else ("", None))


def _is_empty(value: Any) -> bool:
    return next(leaves(value), None) is None


def _check_for_images(fields: Mapping[str, Any]) -> None:
    """Raises `Unusable` if a field has an image by its name, or by that of a file."""
    for name, value in fields.items():
        is_named = _IMAGE_NAME.match(str(name)) and not isinstance(value, int | float)
        is_file = (
            isinstance(value, str)
            and "://" not in value
            and value.lower().endswith(_IMAGE_SUFFIXES)
        )
        if (is_named or is_file) and not _is_empty(value):
            advice = "call the field image, or name it in columns.images (none: it has no images)"
            raise Unusable(_UNREAD, f"{name!r} has {shown(value)}; {advice}")
