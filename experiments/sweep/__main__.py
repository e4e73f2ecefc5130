"""Runs an experiment: `python -m experiments.sweep --experiment=experiments/repair.py --seeds=5`.

Each arm and seed is one run, in `workdir/<experiment>/<arm>/seed_<i>`; arms share the cold start of
their seed. Finished runs are skipped: the same command resumes an interrupted sweep, and a larger
--seeds adds runs. Afterwards `workdir/<experiment>/` has `table.md` (mean ± 95% interval over the
seeds), `table.csv` (each seed), `figure.png` and `figure.csv`.

--arms runs a subset of the arms. --reference, --columns and --panels replace the experiment's arm
of comparison and its measures, also for finished runs: --columns=acc,held_out_area,acc:lead. Flags
such as --config.rl.num_steps=50 are passed to every run.
"""

from __future__ import annotations

import argparse
import pathlib
import signal
import sys
from collections.abc import Sequence

try:
    import matplotlib  # noqa: F401
except ImportError:
    sys.exit("error: a sweep draws with matplotlib; run: pip install -e '.[sweep]'")

from care_jax.config import command_line, config_file
from care_jax.devices.standard_streams import outlive_readers
from experiments.sweep.experiment import Experiment, load_experiment
from experiments.sweep.figures import write_figure
from experiments.sweep.measures import columns_of
from experiments.sweep.outcome import with_shared_tokens
from experiments.sweep.tables import write_table
from experiments.sweep.trials import Trial, plan, read_outcome, run_all

_SET_BY_SWEEP = ("--config.seed", "--config.stages")  # set per trial


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the unfinished trials, writes table and figure; returns 1 if a run failed."""
    args, overrides = _parse(argv)
    workdir = command_line.folder_of(args.workdir)
    chosen = {name: getattr(args, name) for name in ("arms", "reference", "columns", "panels")}
    experiment = load_experiment(args.experiment, **chosen)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    trials = plan(experiment, workdir, base=args.base, seeds=seeds, overrides=overrides)
    missing = sum(not trial.is_done for trial in trials)
    print(
        f"{experiment.name}: {len(experiment.arms)} arms x {args.seeds} seeds on {args.base}, "
        f"{missing} of {len(trials)} runs to do",
        flush=True,
    )
    failures = run_all(trials, num_processes=args.processes, on_done=_print_done)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    flags = [f"--{name}={text}" for name, text in chosen.items() if text]
    if done := [trial for trial in trials if trial.is_done]:
        write_results(experiment, done, workdir, args.base, [*flags, *overrides])
    return 1 if failures else 0


def write_results(
    experiment: Experiment,
    trials: Sequence[Trial],
    workdir: pathlib.Path,
    base: str,
    flags: Sequence[str],
) -> None:
    """Writes table and figure of finished trials to `workdir/<experiment>`; prints the table.

    `flags` are quoted in the note below the table.
    """
    folder, reference, title = workdir / experiment.name, experiment.reference, experiment.title
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = with_shared_tokens([read_outcome(trial) for trial in trials])
    arms = {arm: [outcome for outcome in outcomes if outcome.arm == arm] for arm in experiment.arms}
    arms = {arm: of_arm for arm, of_arm in arms.items() if of_arm}
    commits = dict.fromkeys(commit for trial in trials for commit in trial.record["commits"])
    seeds = sorted({trial.seed for trial in trials})
    first = f" --first_seed={seeds[0]}" if seeds[0] else ""
    command = (
        f"python -m experiments.sweep --experiment={experiment.path} --base={base} "
        f"--seeds={seeds[-1] - seeds[0] + 1}{first}"
    )
    leads = "leads are differences under the same seed."
    if reference not in arms:
        leads = f"without runs of {reference} there are no leads."
    notes = (
        f"Mean ± 95% interval (Student's t over the seeds); {leads}",
        "",
        f"`{' '.join([command, *flags])}` at commit {', '.join(filter(None, commits)) or '?'}.",
    )
    columns = columns_of(experiment.columns, outcomes)
    print(write_table(folder, arms, reference, columns, title, notes), flush=True)
    write_figure(folder, arms, reference, experiment.panels, title)


def _print_done(trial: Trial) -> None:
    minutes, seconds = divmod(trial.record["seconds"], 60)
    print(f"done: {trial.workdir} ({minutes} min {seconds:02d} s)", flush=True)


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.sweep",
        usage="%(prog)s --experiment=FILE [options] [--config.KEY=VALUE ...]",
        description=str(__doc__).splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--experiment", type=pathlib.Path, required=True, default=argparse.SUPPRESS, help="file")
    add("--seeds", type=int, default=5, help="number of seeds")
    add("--first_seed", type=int, default=0, help="the first seed")
    add("--base", default="tiny", help="file of configs/ that the arms change")
    add("--processes", type=int, default=1, help="runs at a time")
    add("--workdir", default="runs/sweep", help="folder of runs, tables and figures")
    for name, text in (
        ("--arms", "some of the arms, separated by commas"),
        ("--reference", "the arm that leads are over, in place of the experiment's REFERENCE"),
        ("--columns", "measures of the table, in place of the experiment's COLUMNS"),
        ("--panels", "panels of the figure, likewise; a measure is one too"),
    ):
        add(name, default=argparse.SUPPRESS, help=text)
    args, overrides = parser.parse_known_args(
        argv, argparse.Namespace(arms="", reference="", columns="", panels="")
    )
    for name, least in (("seeds", 1), ("processes", 1), ("first_seed", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(args, name)}")
    given = set()
    for flag in overrides:
        key, equals, _ = flag.partition("=")
        if not key.startswith("--config.") or not equals:
            parser.error(f"expected flags of this command or --config.key=value, got {flag!r}")
        if key in _SET_BY_SWEEP:
            parser.error(f"{key} is set by the sweep for each of its runs; leave it out")
        if key in given:
            parser.error(f"{key} is given twice; leave one of them out")
        given.add(key)
    return args, overrides


if __name__ == "__main__":
    outlive_readers()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        sys.exit(main())
    except (ValueError, config_file.Refused) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        command_line.exit_interrupted()
