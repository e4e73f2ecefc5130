"""SFT rows that teach the repair cue, from failures sampled from a checkpoint.

    python -m care_jax.commands.repairs --config=configs/repair.py --workdir=DIR --out=FOLDER

Reflection needs a policy that responds to the cue (measured by `commands.probe`). This command
samples a group for each question and makes a row of each group with both outcomes:

- `context`, conditioned on and not trained: the rationale of the failure that RL would repair, and
  the cue. In a share of the rows (`--right_share`) it is the rationale of a right response, so that
  the cue does not imply an error.
- `response`, trained: a right rationale and the answer. The rationale is the data's, or the
  anchor's if the data has none.

The folder has the format of `commands.prepare`. A further cold start reads it as a part of
`data.sft`, see docs/data.md.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import flags

from care_jax.batch import Example
from care_jax.commands.reopened import Reopened, Tried, by_accuracy, run_command, sample_groups
from care_jax.config import command_line
from care_jax.data.drawn.splits_and_repairs import spaced
from care_jax.data.readers import shards
from care_jax.data.rows import SPECIAL_TOKEN
from care_jax.devices import streams
from care_jax.devices.device_clock import DeviceClock
from care_jax.devices.standard_streams import outlive_readers
from care_jax.method import spans
from care_jax.rl.rollout_programs import compile_rollout, rollout_sizes
from care_jax.run import lock
from care_jax.run.attention_check import decoding_attention
from care_jax.run.run import Run, compile_to_decode_layout, verifier_of

RIGHT_SHARE = 0.15
_SOURCE = "repairs"  # source name in the folder
_SHARD_BYTES = 256 * 2**20


def repair_rows(run: Run, tried: Tried, *, right_share: float, seed: int) -> Iterator[Example]:
    """A row per group, unless its right rationale lacks tags or a text has a special token.

    `right_share` is the probability in [0, 1] that the context is a right rationale, if the group
    has one other than that of the response.
    """
    tag, rng = run.policy.think_tag, np.random.default_rng(seed)
    for number, example in enumerate(tried.asked):
        texts, accs = tried.texts[number], tried.accs[number]
        anchor = int(tried.subgroup.anchor[number])
        own = _own_ending(example, tag)
        ending = own or _ending_of(texts[anchor], tag)
        others = [int(i) for i in np.flatnonzero(accs >= 1) if own or i != anchor]
        first = int(tried.subgroup.hard_negative[number])
        if rng.random() < right_share and others:
            first = int(rng.choice(others))
        context = _context(run, texts[first])
        if ending is None or SPECIAL_TOKEN.search(context + ending):
            continue
        yield dataclasses.replace(
            example, id=f"{example.id}-repair", context=context, response=spaced(context, ending)
        )


def _own_ending(example: Example, tag: str) -> str | None:
    """The data's rationale, the closing tag and the answer; None if either is not a text."""
    if not example.rationale or not isinstance(example.answer, str):
        return None
    rationale = spans.rationale_of(example.rationale, tag)
    return f"{rationale}</{tag}><answer>{example.answer}</answer>"


def _ending_of(response: str, tag: str) -> str | None:
    """A response after its opening think tag; None if it lacks the opening or closing tag."""
    _, opening, ending = response.partition(f"<{tag}>")
    return ending if opening and f"</{tag}>" in ending else None


def _context(run: Run, response: str) -> str:
    """The opening tag, the rationale of a response, truncated as in RL, and the cue."""
    care, policy = run.config.care, run.policy
    text = f"<{policy.think_tag}>{spans.rationale_of(response, policy.think_tag)}"
    tokens = policy.tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) > care.max_context:
        # The cut may split a character of several tokens.
        text = policy.tokenizer.decode(tokens[: care.max_context]).rstrip("\ufffd")
    return text + care.cue


def write_repairs(opened: Reopened, out: pathlib.Path, *, right_share: float) -> dict[str, Any]:
    """Samples, writes the folder, and returns its manifest.

    The folder is complete if it exists; for `right_share` see `repair_rows`.

    Raises:
        ValueError: `out` exists, `right_share` is outside [0, 1], or no group gives a row.
    """
    run, seed = by_accuracy(opened.run), opened.run.config.seed
    if out.exists():
        raise ValueError(f"{out} exists; remove it, or name another --out")
    if not 0 <= right_share <= 1:
        raise ValueError(f"--right_share must lie in [0, 1], got {right_share}")
    if (closing := f"</{run.policy.think_tag}>") in run.config.care.cue:
        raise ValueError(
            f"expected a cue inside the rationale, got {run.config.care.cue!r}, which has "
            f"{closing}; set care.cue to one without"
        )
    programs = compile_rollout(run, DeviceClock(), decoding_attention(run, rollout_sizes(run)[0]))
    params = compile_to_decode_layout(run)(opened.params)
    rng, questions = streams.key_of(seed, streams.REPAIRS), (opened.examples, opened.num_questions)
    with verifier_of(run) as verifier:
        tried = sample_groups(run, programs, params, rng, *questions, verifier)
    rows = list(repair_rows(run, tried, right_share=right_share, seed=seed))
    if not rows:
        raise ValueError(
            f"expected right rationales in <{run.policy.think_tag}>, got none in "
            f"{len(tried.asked)} groups with both outcomes; give the data a `rationale`"
        )
    with lock.new_folder(out) as partial:
        writer = shards.ShardWriter(partial, _SOURCE, shard_bytes=_SHARD_BYTES)
        for row in rows:
            writer.write(row)
        writer.close()
        manifest = {
            "config": {
                "checkpoint": opened.name,
                "questions": opened.num_questions,
                "right_share": right_share,
                "cue": run.config.care.cue,
                "seed": seed,
            },
            "num_examples": len(rows),
            "groups": {"asked": tried.num_asked, "both_outcomes": len(tried.asked)},
            "rows_by_source": dict(sorted(Counter(row.source for row in rows).items())),
            "sources": {_SOURCE: {"kept": len(rows), "shards": writer.shards}},
        }
        shards.write_manifest(partial, manifest)
    return manifest


def run_main() -> None:
    """Parses flags and writes the folder; user errors print one line, not a traceback."""
    out = flags.DEFINE_string("out", None, "Folder to write.", required=True)
    text = "Share of rows whose first rationale is of a right response."
    share = flags.DEFINE_float("right_share", RIGHT_SHARE, text, lower_bound=0, upper_bound=1)
    flags.register_validator(  # fails before weights are loaded
        "out",
        lambda path: path is None or not pathlib.Path(path).expanduser().exists(),
        "it exists; remove it, or name another folder",
    )

    def act(opened: Reopened) -> None:
        folder = command_line.folder_of(out.value, flag="--out")
        manifest = write_repairs(opened, folder, right_share=share.value)
        groups = manifest["groups"]
        print(
            f"{opened.name}: {groups['both_outcomes']} of {groups['asked']} groups have both "
            f"outcomes; wrote {manifest['num_examples']} rows to {folder}"
        )

    run_command(act)


if __name__ == "__main__":
    outlive_readers()
    run_main()
