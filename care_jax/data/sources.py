"""Opens a source of examples by its name in the configuration."""

from __future__ import annotations

from collections.abc import Sequence

from care_jax.batch import Example
from care_jax.data import jsonl
from care_jax.data.synthetic import KINDS, SyntheticSource

SOURCES = ("synthetic", "jsonl")


def open_source(
    name: str,
    *,
    path: str = "",
    num_examples: int = 0,
    seed: int = 0,
    split: str = "train",
    kinds: Sequence[str] = KINDS,
    teacher_error: float = 0.0,
    cue_share: float = 0.0,
    cue: str = "",
    think_tag: str = "think",
) -> Sequence[Example]:
    """A random-access sequence of examples.

    Args:
        name: "synthetic" (drawn on demand) or "jsonl" (a file).
        path: the file; jsonl alone.
        num_examples: examples to draw; or the first so many of a file, 0 for all.
        seed, split, kinds, teacher_error, cue_share, cue, think_tag: of `SyntheticSource`. A file
            is a split of its own and is read as it stands.

    Raises:
        ValueError: no such source, or an argument that the source does not take.
    """
    if name == "synthetic":
        if path:
            raise ValueError(f"the synthetic source reads no file, got path {path!r}; clear it")
        return SyntheticSource(
            num_examples,
            seed=seed,
            split=split,
            kinds=tuple(kinds),
            teacher_error=teacher_error,
            cue_share=cue_share,
            cue=cue,
            think_tag=think_tag,
        )
    if name == "jsonl":
        if teacher_error or cue_share:
            raise ValueError(
                f"teacher_error {teacher_error} and cue_share {cue_share} shape the synthetic "
                "source only; set both to 0 for a jsonl source"
            )
        if num_examples < 0:
            raise ValueError(f"num_examples must not be negative, got {num_examples}")
        examples, _ = jsonl.load(path)
        return examples[: num_examples or None]
    raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {name!r}")
