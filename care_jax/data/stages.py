"""Which source each stage reads, opened and checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from care_jax.batch import Example
from care_jax.data.mixture import Mixture
from care_jax.data.rows import NO_RESPONSE, checked, first_usable, with_responses, with_text_answers
from care_jax.data.sources import DRAWN, MIXTURE, open_source, options_of


def open_stage(config: ConfigDict, stage: str, has_reward: bool = False) -> Sequence[Example]:
    """The examples of a stage; unusable held-out examples of files are found and left out here.

    Args:
        config: of the run.
        stage: "sft", "rl" or "evaluate".
        has_reward: a reward function judges, so answers need not be texts.
    """
    name = {"sft": "sft", "rl": "train", "evaluate": "test"}[stage]
    section = config.data[name]
    parts = section.parts if section.source == MIXTURE else (section,)
    opened = [
        open_source(part.source, **options_of(part) | _stage_options(config, part, stage))
        for part in parts
    ]
    for number, source in enumerate(opened):
        if not len(source):
            part = f"data.{name}" + (f".parts.{number}" if len(opened) > 1 else "")
            raise ValueError(
                f"{part} must have rows, got a source {parts[number].source!r} without any; change "
                "its path, split or num_examples"
            )
    if stage == "sft":
        opened = [with_responses(source) for source in opened]
    elif not has_reward and section.source not in DRAWN:
        opened = [with_text_answers(source) for source in opened]
    for part, source in zip(parts, opened, strict=True):
        if stage == "sft":
            _check_responses(part.source, source, config.data.think_tag)
        elif stage == "rl":
            first_usable(source)
    examples = Mixture(opened, [part.weight for part in parts]) if len(opened) > 1 else opened[0]
    if stage == "evaluate" and section.source not in DRAWN:
        examples, _ = checked(examples, f"data.{name}")
    return examples


def given_stage(examples: Sequence[Example], stage: str, has_reward: bool) -> Sequence[Example]:
    """`open_stage` for examples that were given from Python."""
    examples = examples if has_reward else with_text_answers(examples)
    if stage == "rl":
        first_usable(examples)
        return examples
    return checked(examples, "test")[0]


def _stage_options(config: ConfigDict, part: ConfigDict, stage: str) -> dict[str, Any]:
    options: dict[str, Any] = {"think_tag": config.data.think_tag}
    if part.source in DRAWN:
        if not part.split:
            options["split"] = "test" if stage == "evaluate" else "train"
        if stage == "sft":
            options |= {option: config.data[option] for option in DRAWN[part.source][1]}
            options["cue"] = config.care.cue
    return options


def _check_responses(source: str, examples: Sequence[Example], think_tag: str) -> None:
    """Refuses a source without responses, or with responses in another tag than the prompts'."""
    try:
        example = first_usable(examples)
    except ValueError as error:
        if NO_RESPONSE not in str(error):
            raise
        raise ValueError(
            f"data.sft source {source!r} has no responses to imitate ({error}); give rows a "
            '`response`, or leave "sft" out of stages'
        ) from error
    tag = re.match(r"\s*<(\w+)>", example.context + example.response)
    if tag and tag.group(1) != think_tag:
        raise ValueError(
            f"data.sft has responses in <{tag.group(1)}>, but data.think_tag is {think_tag!r}; "
            "change it, or prepare the data again with it"
        )
