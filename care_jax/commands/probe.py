"""Success rates of repairs from a checkpoint: `python -m care_jax.commands.probe --workdir=DIR`.

Reflection can help if failures have wrong rationales and a right rationale leads to the right
answer. The probe samples a group for each question, keeps the groups with both outcomes, and
samples one more answer to their questions, as RL does a reflected one, in each of these ways:

- resample: a fresh rollout.
- cue, no_cue, shuffled: conditioned on the nearest failure's rationale, see `decoding.reflection`.
  A cue of one word cannot be shuffled.
- forced_right: the answer, conditioned on the data's rationale.
- other_words: as cue, with the text of `--other_words` as the cue.

It prints and writes success rates with 95% intervals, overall and by source. A task suits
reflection if forced_right exceeds resample by `GAIN` over the same questions, and the nearest
failure's rationale is wrong in `WRONG` of the groups whose question has a rationale in the data.

A rationale is wrong if its numbers differ from those of the data's rationale, in any order; if that
has no numbers, if its words differ. A wrong operation on the right numbers is therefore missed.
1,000 equals 1000 and .5 equals 0.5, but 1/2 does not.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import flags
from jaxtyping import Float, Int

from care_jax.batch import Example
from care_jax.commands.reopened import (
    Reopened,
    by_accuracy,
    check_reflection,
    file_of,
    run_command,
    sample_groups,
)
from care_jax.decoding import reflection
from care_jax.decoding.queue import DecodeQueue
from care_jax.decoding.rollout_buffer import NO_CONTEXT
from care_jax.devices import streams
from care_jax.devices.device_clock import DeviceClock
from care_jax.devices.standard_streams import outlive_readers
from care_jax.method import spans
from care_jax.report.accuracy import wilson_interval
from care_jax.rl.rollout import contexts_of, verify
from care_jax.rl.rollout_programs import (
    compile_decoder,
    compile_rollout,
    rollout_sizes,
    sampling_of,
)
from care_jax.run.attention_check import decoding_attention
from care_jax.run.run import Run, compile_to_decode_layout, verifier_of
from models import backbone

GAIN = 0.3
WRONG = 0.7
ALL = "all"  # as a source: every question
WAYS = ("first", *reflection.MODES, "forced_right", "other_words")


class Rate(NamedTuple):
    """Successes among the questions of a source: a row of the table and of the CSV.

    `measure` is one of `WAYS`, or "negative_is_wrong": the share of nearest failures with a wrong
    rationale. For "first", the sampled group, a question counts as the group's mean accuracy.
    """

    source: str
    measure: str
    successes: float
    total: int

    @property
    def rate(self) -> float:
        return self.successes / self.total

    @property
    def interval(self) -> tuple[float, ...]:
        """Wilson's 95% interval; () for "first": rollouts of one question are not independent."""
        return () if self.measure == "first" else wilson_interval(self.successes, self.total)


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """Results for the N questions whose group had both outcomes."""

    num_questions: int  # different questions sampled; N of them are in the arrays
    sources: list[str]  # name of the source of each question
    # By measure, see `Rate`: each question's value in [0, 1]. NaN: for "forced_right" and
    # "negative_is_wrong", the data has no rationale; for "forced_right", the answer does not fit
    # after it; for any second answer, the reward function failed.
    values: dict[str, Float[np.ndarray, " N"]]

    def rates(self) -> list[Rate]:
        """The rates over all questions, then those by source."""
        sources, found = np.array(self.sources), []
        for source in (ALL, *sorted(set(self.sources) - {ALL})):
            for measure, values in self.values.items():
                chosen = ~np.isnan(values) & ((sources == source) | (source == ALL))
                if chosen.any():
                    total = int(chosen.sum())
                    found.append(Rate(source, measure, float(values[chosen].sum()), total))
        return found


def probe(
    run: Run,
    params: backbone.Params,
    examples: Sequence[Example],
    num_questions: int,
    *,
    other_words: str = "",
) -> Outcomes:
    """Samples groups for the first shuffled questions and answers those with both outcomes again.

    Single-process. `params` are in the training layout; empty `other_words` are skipped.

    Raises:
        ValueError: no group has both outcomes, or `other_words` leave no tokens to decode.
    """
    run = by_accuracy(run)
    config = run.config
    if other_words:
        check_reflection(run, other_words)
    first_rng, again_rng = jax.random.split(streams.key_of(config.seed, streams.PROBE))
    clock, attention = DeviceClock(), decoding_attention(run, rollout_sizes(run)[0])
    programs = compile_rollout(run, clock, attention)
    decode_params = compile_to_decode_layout(run)(params)
    with verifier_of(run) as verifier:
        tried = sample_groups(
            run, programs, decode_params, first_rng, examples, num_questions, verifier
        )
        asked = tried.asked
        failures = tried.texts[np.arange(len(asked)), tried.subgroup.hard_negative]
        values = {"first": tried.accs.mean(1)}
        forced = {mode: contexts_of(run, failures, mode) for mode in _modes(config.care.cue)}
        right = [_right_context(run, example) for example in asked]
        has_right = np.array([len(context) > 0 for context in right])
        if has_right.any():
            forced["forced_right"] = right
        if other_words:
            said = config.copy_and_resolve_references()
            said.care.cue = other_words
            said_run = dataclasses.replace(run, config=said)
            forced["other_words"] = contexts_of(said_run, failures, "cue")
        longest = max(len(context) for contexts in forced.values() for context in contexts)
        sizes = dataclasses.replace(rollout_sizes(run)[1], num_context_tokens=longest)
        decoding = compile_decoder(run, **sampling_of(run)[1]._asdict(), attention=attention)
        queue = DecodeQueue(decoding, run.policy.prompts, sizes, clock)
        for way, contexts in forced.items():
            again = [
                dataclasses.replace(request, context=context)
                for request, context in zip(tried.requests, contexts, strict=True)
            ]
            way_rng = jax.random.fold_in(again_rng, WAYS.index(way))
            repaired = verify(run, queue.decode(decode_params, way_rng, again), asked, verifier)
            assert repaired is not None
            is_judged = repaired.is_judged[:, 0]
            values[way] = np.where(is_judged, repaired.scores.acc[:, 0], np.nan)
    if has_right.any():
        values["forced_right"] = np.where(has_right, values["forced_right"], np.nan)
    has_rationale = np.array([bool(example.rationale) for example in asked])
    if has_rationale.any():
        rationale_of = functools.partial(spans.rationale_of, think_tag=run.policy.think_tag)
        is_wrong = [
            is_other(rationale_of(text), rationale_of(example.rationale))
            for text, example in zip(failures, asked, strict=True)
        ]
        values["negative_is_wrong"] = np.where(has_rationale, is_wrong, np.nan)
    return Outcomes(tried.num_asked, [example.source for example in asked], values)


def _modes(cue: str) -> list[str]:
    """The modes of reflection; a cue of one word cannot be shuffled."""
    can_shuffle = len(set(cue.split())) > 1
    return [mode for mode in reflection.MODES if mode != "shuffled" or can_shuffle]


def is_other(rationale: str, right: str) -> bool:
    """Whether a rationale's numbers, or words if `right` has no numbers, differ from `right`'s."""
    if numbers := _numbers(right):
        return _numbers(rationale) != numbers
    return rationale.lower().split() != right.lower().split()


def _numbers(text: str) -> list[float]:
    """A text's numbers, sorted. A comma may group digits; a minus after a number is no sign."""
    text = text.replace("\N{MINUS SIGN}", "-")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<=[\d)])\s*-|(?<=[^\W\d])-", " ", text)
    return sorted(map(float, re.findall(r"-?(?:\d+(?:\.\d+)?|\.\d+)", text)))


def _right_context(run: Run, example: Example) -> Int[np.ndarray, " c"]:
    """The data's rationale as context; empty if there is none, or if the answer would not fit.

    The model samples the final ">", because that token may include the next "<".
    """
    if not example.rationale:
        return NO_CONTEXT
    encode = functools.partial(run.policy.tokenizer.encode, add_special_tokens=False)
    tag = run.policy.think_tag
    context = f"<{tag}>{spans.rationale_of(example.rationale, tag)}</{tag}"
    whole = f"{context}><answer>{example.answer}</answer>"
    has_room = len(encode(whole)) < run.config.rl.max_response_tokens  # with the end of the turn
    return np.array(encode(context), np.int32) if has_room else NO_CONTEXT


def summary(outcomes: Outcomes, rates: Sequence[Rate], name: str) -> list[str]:
    """The table over all questions, and whether the task suits reflection."""
    values = outcomes.values
    of_all = {rate.measure: rate for rate in rates if rate.source == ALL}
    lines = [
        f"{name}: {len(outcomes.sources)} of {outcomes.num_questions} groups have both outcomes",
        f"{'answered':<18}{'right':>8}   95% interval",
    ]
    for rate in of_all.values():
        interval = " to ".join(f"{bound:.1%}" for bound in rate.interval)
        lines.append(f"{rate.measure:<18}{rate.rate:>8.1%}   {interval}".rstrip())
    why = ""
    if "negative_is_wrong" not in values:
        why = "the data has no rationales"
    elif "forced_right" not in values:
        why = "no rationale of the data leaves room for the answer; raise rl.max_response_tokens"
    elif np.isnan(gains := values["forced_right"] - values["resample"]).all():
        why = "the reward function judged no question under both forced_right and resample"
    if why:
        return [*lines, f"{why}: the gain of a repair is unknown"]
    gain, num_gains = round(float(np.nanmean(gains)), 9), int((~np.isnan(gains)).sum())
    wrong = of_all["negative_is_wrong"].rate
    is_task = gain >= GAIN and wrong >= WRONG
    return [
        *lines,
        f"over {num_gains} questions forced_right exceeds resample by {gain:.2f} (a task for "
        f"reflection: {GAIN} or more), and {wrong:.0%} of the nearest failures have a wrong "
        f"rationale ({WRONG:.0%} or more): "
        + ("a task for reflection" if is_task else "not a task for reflection"),
    ]


def write_csv(path: pathlib.Path, rates: Sequence[Rate], name: str) -> None:
    """Writes every rate, with its interval if it has one."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["checkpoint", "source", "measure", "rate", "low", "high", "questions"])
        for rate in rates:
            interval = [f"{bound:.4f}" for bound in rate.interval] or ["", ""]
            row = [name, rate.source, rate.measure, f"{rate.rate:.4f}", *interval, rate.total]
            rows.writerow(row)


def run_main() -> None:
    """Parses flags and probes; user errors print one line, not a traceback."""
    out = flags.DEFINE_string("out", "", "CSV to write; empty: WORKDIR/probe_<stage>.csv.")
    other = flags.DEFINE_string("other_words", "", "Text to try in the place of the cue.")

    def probe_and_write(opened: Reopened) -> None:
        run, params, stage, name, examples, num_questions = opened
        path = file_of(out.value or run.workdir / f"probe_{stage}.csv")
        outcomes = probe(run, params, examples, num_questions, other_words=other.value)
        rates = outcomes.rates()
        print("\n".join(summary(outcomes, rates, name)))
        write_csv(path, rates, name)
        print(f"wrote {path}")

    run_command(probe_and_write)


if __name__ == "__main__":
    outlive_readers()
    run_main()
