"""Opens the examples of each stage, as the configuration names them."""

from __future__ import annotations

from collections.abc import Sequence

from ml_collections import ConfigDict

from care_jax.batch import Example
from care_jax.data.mixture import Mixture
from care_jax.data.rows import NO_RESPONSE, checked, first_usable, with_responses, with_text_answers
from care_jax.data.sources import MIXTURE, is_drawn, named, open_section, parts_of

SECTIONS = {"sft": "sft", "rl": "train", "evaluate": "test"}  # stage -> its section of data


def open_examples(config: ConfigDict, stage: str, has_reward: bool = False) -> Sequence[Example]:
    """The examples of a stage; unusable examples are removed from held-out files.

    With `has_reward` a reward function judges, so answers need not be text.
    """
    name = f"data.{SECTIONS[stage]}"
    section = config.data[SECTIONS[stage]]
    parts = parts_of(section)
    keys = [f"{name}.parts.{number}" for number in range(len(parts))]
    keys = keys if section.source == MIXTURE else [name]
    sources = []
    for key, part in zip(keys, parts, strict=True):
        sources.append(_open_part(key, config, part, stage))
        if not len(sources[-1]):
            raise ValueError(
                f"{key} must have rows, got a source {part.source!r} without any in "
                f"{part.path!r}; change its path, split or num_examples"
            )
    if stage == "sft":
        sources = [
            with_responses(
                source,
                instruction=config.data.instruction,
                think_tag=config.data.think_tag,
                are_right=not has_reward and not is_drawn(part.source),  # data.teacher_error
            )
            for part, source in zip(parts, sources, strict=True)
        ]
        for key, part, source in zip(keys, parts, sources, strict=True):
            with named(key):
                _check_responses(part.source, source)
    elif not has_reward and not is_drawn(section.source):
        sources = [with_text_answers(source) for source in sources]
    if stage == "rl":
        for key, source in zip(keys, sources, strict=True):
            with named(key):
                first_usable(source)
    examples = sources[0]
    if len(sources) > 1:
        examples = Mixture(sources, [part.weight for part in parts])
    is_checked = stage == "evaluate" and not is_drawn(section.source)
    return checked(examples, name)[0] if is_checked else examples


def given_examples(examples: Sequence[Example], stage: str, has_reward: bool) -> Sequence[Example]:
    """`open_examples` for examples that were given from Python."""
    examples = examples if has_reward else with_text_answers(examples)
    if stage == "rl":
        with named("train"):
            first_usable(examples)
        return examples
    return checked(examples, "test")[0]


def _open_part(key: str, config: ConfigDict, part: ConfigDict, stage: str) -> Sequence[Example]:
    """Opens one source. Only the cold start has the settings of the teacher and the cue."""
    settings = {"think_tag": config.data.think_tag}
    if stage == "sft":
        settings = {**config.data, "cue": config.care.cue}
    if is_drawn(part.source):
        settings["split"] = "test" if stage == "evaluate" else "train"
    return open_section(key, part, settings)


def _check_responses(source: str, examples: Sequence[Example]) -> None:
    """Rejects a source without responses to imitate among its first rows."""
    try:
        first_usable(examples)
    except ValueError as error:
        if NO_RESPONSE not in str(error):
            raise
        raise ValueError(
            f"source {source!r} has no responses to imitate ({error}); give rows a `response`, or "
            'leave "sft" out of stages'
        ) from error
