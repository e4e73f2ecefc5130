"""Where gradients point, by objective: `python -m care_jax.commands.gradients --workdir=DIR`.

From a checkpoint, groups are sampled for `--questions` questions of the training data, in steps of
`rl.prompts_per_step`. Each objective's gradient of every step is computed from the same rollouts by
the update program of training, and compared with the gradient of expected accuracy, which RLOO
estimates without bias from acc (arXiv 2402.14740).

Both are noisy, so products are taken only between gradients of different steps. With u_i an
objective's gradient of step i, g_j that of accuracy, and means over i ≠ j,

    cosine = mean u_i·g_j / √(mean u_i·u_j · mean g_i·g_j)

estimates the cosine of the two expectations. Its error is the jackknife's over the steps.

- norm: √(mean u_i·u_i), before clipping; signal: the share of its square that is not noise.
- gain: accuracy gained, to first order, by an update of a given norm along u_i, divided by that of
  an update along g_i; gain, Adam: likewise along the signs of u_i, as in Adam's first update.

The KL term is left out: its gradient is 0 where the checkpoint is the reference. GSPO's gradient is
that of GRPO while policy and sampler are equal. A part of an objective is its gradient if only some
tokens keep their advantage; the parts add up to the whole.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from jaxtyping import Bool, Float

from care_jax.batch import Credit, Example, Groups, TrainBatch
from care_jax.commands.reopened import Reopened, file_of, run_command
from care_jax.data.pipeline import Batches
from care_jax.devices import sharding, streams
from care_jax.devices.device_clock import DeviceClock
from care_jax.devices.standard_streams import outlive_readers
from care_jax.method import credit
from care_jax.method.advantages import is_mixed
from care_jax.method.objectives import objective_of
from care_jax.packing.layout import at_rows, at_tokens
from care_jax.packing.plan import RowPlan
from care_jax.report.console import show_part
from care_jax.rl.rollout import asked, gather_groups, roll_out
from care_jax.rl.rollout_programs import compile_rollout, rollout_sizes
from care_jax.rl.update_batch import train_batch
from care_jax.run.attention_check import decoding_attention, training_attention
from care_jax.run.run import Run, compile_to_decode_layout, start_state, verifier_of
from care_jax.stages.rl import compile_update
from models import backbone

ACCURACY = "accuracy"
WHOLE = ""  # as a part: all of an objective
_UNIFORM = {"care.region_weights": False}
# Name -> keys that differ from the run's. The rollouts are the same under all of them.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {"rl.objective": "grpo"},
    "dapo": {"rl.objective": "dapo"},
    "dr_grpo": {"rl.objective": "dr_grpo"},
    "care": {},
    "care, uniform": _UNIFORM,
    "care, share 0.2": {"care.gamma_share": 0.2},
    "care, gamma_neg": {"care.gamma_neg": 0.005},
    "care, s 1": {"care.s": 1.0, "care.s_refl": 0.5},
    "care, not equalised": {"care.equalize": False},
    "care, mean over S*": {"care.mean": "batch"},
    "care, mean over tokens": {"care.mean": "tokens", "care.kl_rows": "all"},
    "care, no reflection": {"care.reflect": False},
    "care, no rescue": {"care.rescue": False},
    "uniform, s 1": _UNIFORM | {"care.s": 1.0, "care.s_refl": 0.5},
    "uniform, not equalised": _UNIFORM | {"care.equalize": False},
    "uniform, mean over S*": _UNIFORM | {"care.mean": "batch"},
    "uniform, no reflection": _UNIFORM | {"care.reflect": False},
}
IN_PARTS = ("care", "care, uniform")  # objectives whose parts are told apart


class Alignment(NamedTuple):
    """Of one objective or a part of it, a row of the table and of the CSV."""

    objective: str
    part: str  # WHOLE, or one of `parts_of`
    norm: float
    signal: float
    cosine: float  # NaN if the signal is lost in noise, as its error
    error: float
    gain: float
    adam_gain: float


class Step(NamedTuple):
    """The rollouts of one step, with the packed batches of its updates."""

    groups: Groups
    packed: list[tuple[TrainBatch, RowPlan]]  # of all responses, whoever trains on them


def align(
    run: Run, params: backbone.Params, examples: Sequence[Example], num_questions: int
) -> list[Alignment]:
    """Samples the steps, and compares every objective with the gradient of accuracy.

    Single-process; `params` are in the training layout and must not be used afterwards.

    Raises:
        ValueError: the questions do not fill three steps or more, or the temperature or top-p of
            the rollouts is not 1, or no group has both right and wrong responses.
    """
    run = _with(run, {"rl.objective": "care", "care.reflect": True, "care.beta": 0.0})
    run = _with(run, {"rl.correction": "none", "rl.carry_over": 0.0, "rl.row_lengths": 1})
    run = _with(run, {"care.reflect_credit": "as_sampled", "rl.old_logp": "sampler"})
    rl = run.config.rl
    if num_questions % rl.prompts_per_step or num_questions < 3 * rl.prompts_per_step:
        raise ValueError(
            f"--questions must be three or more times rl.prompts_per_step {rl.prompts_per_step}, "
            f"got {num_questions}; set it to {8 * rl.prompts_per_step} or a larger multiple"
        )
    if (rl.temperature, rl.top_p) != (1, 1):
        raise ValueError(
            f"rl.temperature and rl.top_p must be 1, got {rl.temperature} and {rl.top_p}: the "
            "gradient is of the accuracy at temperature 1; set them to 1"
        )
    steps = [*_sampled(run, params, examples, num_questions // rl.prompts_per_step)]
    if not any(jax.vmap(is_mixed)(_first_decode(step.groups)[1].acc).any() for step in steps):
        raise ValueError(
            f"no group of {num_questions} questions has both right and wrong responses, so that "
            "the gradient of the accuracy is 0; raise --questions or take another checkpoint"
        )
    gradient = _compile_gradient(run, params)

    def gradients(credit_of: Callable[[Groups], Credit]) -> list[Any]:
        return [gradient(step, credit_of(step.groups)) for step in steps]

    show_part(ACCURACY)
    truth = gradients(_accuracy_credit)
    measured = [_measure(ACCURACY, WHOLE, truth, truth)]
    for name, changes in OBJECTIVES.items():
        credit_of = _credit_of(_with(run, changes))
        shown = [WHOLE, *(parts_of(steps[0].groups, run) if name in IN_PARTS else ())]
        for part in shown:
            show_part(f"{name} {part}")
            kept = functools.partial(_part_of, run, credit_of, part)
            measured.append(_measure(name, part, gradients(kept), truth))
    return _in_units_of_the_first(measured)


def _in_units_of_the_first(measured: Sequence[Alignment]) -> list[Alignment]:
    """Gains relative to those of the true gradient; NaN if these are not above 0, being noise."""
    gain, adam_gain = (x if x > 0 else math.nan for x in (measured[0].gain, measured[0].adam_gain))
    return [
        each._replace(gain=each.gain / gain, adam_gain=each.adam_gain / adam_gain)
        for each in measured
    ]


def _with(run: Run, changes: dict[str, Any]) -> Run:
    """The run with some keys changed."""
    config = run.config.copy_and_resolve_references()
    config.update_from_flattened_dict(changes)
    return dataclasses.replace(run, config=config)


def _sampled(
    run: Run, params: backbone.Params, examples: Sequence[Example], num_steps: int
) -> Iterator[Step]:
    """Samples steps as RL does, and packs all responses."""
    rl, clock = run.config.rl, DeviceClock()
    programs = compile_rollout(run, clock, decoding_attention(run, rollout_sizes(run)[0]))
    decode_params = compile_to_decode_layout(run)(params)
    options = {"seed": run.config.seed, "num_workers": run.config.data.num_workers}
    batches = Batches(examples, run.policy.prompts, batch_size=rl.prompts_per_step, **options)
    rng = streams.key_of(run.config.seed, streams.GRADIENTS)
    with verifier_of(run) as verifier:
        for number in range(num_steps):
            show_part(f"step {number + 1} of {num_steps}")
            given = asked(np.arange(rl.prompts_per_step), *batches.batch(number))
            step_rng = jax.random.fold_in(rng, number)
            groups = roll_out(run, programs, decode_params, step_rng, given, verifier)
            rollouts = groups.rollouts
            nothing, ones = (np.full(groups.scores.acc.shape, x, np.float32) for x in (0, 1))
            everything = Credit(
                advantage=nothing,
                token_advantage=np.zeros(rollouts.tokens.shape, np.float32),
                row_weight=ones,
                prompt_weight=ones[:, 0],
                is_trained=rollouts.is_valid & ~rollouts.is_forced,
            )
            groups = dataclasses.replace(groups, credit=everything)
            parts = groups.split(rl.prompts_per_step // rl.prompts_per_update)
            yield Step(groups, [train_batch(run, part, gather_groups(part)) for part in parts])


def _compile_gradient(run: Run, params: backbone.Params) -> Callable[[Step, Credit], Any]:
    """A function that gives the mean over a step's updates of the gradient, to be followed.

    The program is that of training, with an optimizer that adds up gradients and changes nothing.
    """
    rl = run.config.rl
    summing = optax.GradientTransformation(
        init=lambda params: jax.tree.map(jnp.zeros_like, params),
        update=lambda grads, total, _: (
            jax.tree.map(jnp.zeros_like, grads),
            jax.tree.map(jnp.subtract, total, grads),  # the loss falls along it
        ),
    )
    attention = training_attention(run, rl.row_tokens, rl.row_patches)
    state = start_state(run, params, summing, "rl")
    update = compile_update(run, summing, sharding.of(state), attention).update
    num_updates = rl.prompts_per_step // rl.prompts_per_update

    def gradient(step: Step, credit: Credit) -> Any:
        nonlocal state
        total = jax.tree.map(jnp.zeros_like, state.opt_state)
        state = dataclasses.replace(state, opt_state=total)
        for number, (batch, plan) in enumerate(step.packed):
            chosen = slice(number * rl.prompts_per_update, (number + 1) * rl.prompts_per_update)
            part = jax.tree.map(lambda x, chosen=chosen: np.asarray(x)[chosen], credit)
            batch = dataclasses.replace(
                batch,
                token_advantage=at_tokens(part.token_advantage, plan),
                row_weight=at_tokens(part.row_weight, plan),
                prompt_weight=at_rows(part.prompt_weight, plan),
            )
            state, *_ = update(state, sharding.put_batch(batch, run.train_batch_sharding))
        return jax.tree.map(lambda x: x / num_updates, state.opt_state)

    return gradient


def _credit_of(run: Run) -> Callable[[Groups], Credit]:
    """The credit that an objective gives all rows, the reflected ones included."""
    objective = objective_of(run.config)

    def credit_of(groups: Groups) -> Credit:
        if objective.raw_advantages is None:
            return _padded(objective.credit(*_first_decode(groups)))
        has_reflection = groups.has_reflection & objective.has_reflection
        scores = groups.trained_scores
        return objective.credit(groups.rollouts, scores, groups.subgroup, has_reflection)

    return credit_of


def _accuracy_credit(groups: Groups) -> Credit:
    """RLOO's, of acc alone."""
    of_acc = dataclasses.replace(groups.scores, reward=groups.scores.acc)
    rollouts, scores = _first_decode(dataclasses.replace(groups, scores=of_acc))
    return _padded(credit.rloo_credit(rollouts, scores))


def _first_decode(groups: Groups) -> Any:
    """Rollouts and scores without the reflected rows."""
    return jax.tree.map(lambda x: x[:, :-1], (groups.rollouts, groups.trained_scores))


def _padded(credit: Credit) -> Credit:
    """With nothing for the reflected rows."""

    def pad(x):
        x = np.asarray(x)
        return np.pad(x, ((0, 0), (0, 1), *((0, 0),) * (x.ndim - 2))) if x.ndim > 1 else x

    return jax.tree.map(pad, credit)


def parts_of(groups: Groups, run: Run) -> dict[str, Bool[np.ndarray, "B R T"]]:
    """The parts of CARE's credit, and the tokens of each.

    An answer is the answer span with its tags, the rest all other tokens; also those of responses
    without an answer span, which have uniform weights.
    """
    raw_of = objective_of(run.config).raw_advantages
    assert raw_of is not None  # CARE's
    raw = jax.device_get(raw_of(groups.trained_scores, groups.subgroup, groups.has_reflection))
    is_rescue = groups.subgroup.is_rescue[:, None]
    is_sampled = ~raw.is_reflected & ~is_rescue
    is_answer = np.asarray(groups.scores.is_answer)
    rows = {
        "anchors": raw.is_positive & is_sampled,
        "negatives": raw.is_negative & is_sampled,
    }
    parts = {}
    for name, chosen in rows.items():
        parts[f"{name}: answers"] = chosen[..., None] & is_answer
        parts[f"{name}: rest"] = chosen[..., None] & ~is_answer
    whole = np.ones(is_answer.shape, bool)
    for name, chosen in (("right", raw.is_positive), ("wrong", raw.is_negative)):
        parts[f"repairs: {name}"] = (chosen & raw.is_reflected)[..., None] & whole
    return parts | {"rescued groups": is_rescue[..., None] & whole}


def _part_of(run: Run, credit_of: Callable[[Groups], Credit], part: str, groups: Groups) -> Credit:
    """The credit of a part; other tokens get 0, and denominators stay."""
    found = credit_of(groups)
    if part == WHOLE:
        return found
    is_kept = parts_of(groups, run)[part]
    return dataclasses.replace(found, token_advantage=found.token_advantage * is_kept)


def _measure(objective: str, part: str, u: Sequence[Any], g: Sequence[Any]) -> Alignment:
    """Compares the gradients of the steps; the gains are in acc by an update of unit norm."""
    uu, ug, gg = _products(u, u), _products(u, g), _products(g, g)
    signs = [jax.tree.map(jnp.sign, each) for each in u]
    sizes = np.sqrt(np.diag(uu))[:, None]
    norm = float(np.sqrt(np.diag(uu).mean()))
    if not norm:  # nothing was in this part
        nan = float("nan")
        return Alignment(objective, part, norm, nan, nan, nan, gain=0.0, adam_gain=0.0)
    leave_out = [_cosine(*(_without(x, i) for x in (uu, ug, gg))) for i in range(len(u))]
    spread = np.array(leave_out)
    error = float(np.sqrt((len(u) - 1) * ((spread - spread.mean()) ** 2).mean()))
    return Alignment(
        objective=objective,
        part=part,
        norm=norm,
        signal=max(_between(uu), 0.0) / norm**2,
        cosine=_cosine(uu, ug, gg),
        error=error,
        gain=_between(ug / np.where(sizes, sizes, 1)),
        adam_gain=_between(_products(signs, g)),
    )


def _products(a: Sequence[Any], b: Sequence[Any]) -> Float[np.ndarray, "K K"]:
    """The products of all pairs of steps."""
    return np.array([[float(optax.tree.vdot(x, y)) for y in b] for x in a])


def _between(products: Float[np.ndarray, "K K"]) -> float:
    """The mean over pairs of different steps."""
    number = len(products)
    return float((products.sum() - np.trace(products)) / (number * (number - 1)))


def _cosine(uu, ug, gg) -> float:
    squares = _between(uu), _between(gg)
    if min(squares) <= 0:
        return float("nan")
    return _between(ug) / float(np.sqrt(squares[0] * squares[1]))


def _without(products: Float[np.ndarray, "K K"], step: int) -> Float[np.ndarray, "k k"]:
    return np.delete(np.delete(products, step, 0), step, 1)


def table(alignments: Sequence[Alignment], name: str) -> list[str]:
    """The table as lines of text."""
    lines = [
        f"{name}: gradients against that of expected accuracy; gains are shares of its own",
        f"{'objective':<24}{'part':<22}{'norm':>9}{'signal':>8}{'cosine':>16}"
        f"{'gain':>7}{'gain, Adam':>12}",
    ]
    for each in alignments:
        cosine = f"{each.cosine:.2f} ± {each.error:.2f}"
        lines.append(
            f"{each.objective:<24}{each.part:<22}{each.norm:>9.2g}{each.signal:>8.2f}{cosine:>16}"
            f"{each.gain:>7.2f}{each.adam_gain:>12.2f}"
        )
    return lines


def write_csv(path: pathlib.Path, alignments: Sequence[Alignment], name: str) -> None:
    """Writes every row of the table."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["checkpoint", *Alignment._fields])
        for each in alignments:
            rows.writerow([name, *each[:2], *(f"{value:.4g}" for value in each[2:])])


def run_main() -> None:
    """Parses flags, measures and writes; user errors print one line, not a traceback."""
    out = flags.DEFINE_string("out", "", "CSV to write; empty: WORKDIR/gradients_<stage>.csv.")

    def align_and_write(opened: Reopened) -> None:
        run, params, stage, name, examples, num_questions = opened
        path = file_of(out.value or run.workdir / f"gradients_{stage}.csv")
        alignments = align(run, params, examples, num_questions)
        print("\n".join(table(alignments, name)))
        write_csv(path, alignments, name)
        print(f"wrote {path}")

    run_command(align_and_write)


if __name__ == "__main__":
    outlive_readers()
    run_main()
