"""What an experiment's file must declare."""

import pathlib
import re

import pytest

from experiments.sweep.experiment import load_experiment
from experiments.sweep.measures import BENCHMARKS, MEASURES

FOLDER = pathlib.Path(__file__).resolve().parents[3] / "experiments"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_every_experiment_of_the_project_declares_what_it_must(path):
    experiment = load_experiment(path)
    assert experiment.name == path.stem
    assert experiment.get_config(experiment.reference)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"REFERENCE =": "OTHER =", "= REFERENCE": "= OTHER"}, "it lacks REFERENCE"),
        ({'REFERENCE = "one"': 'REFERENCE = "1"'}, "REFERENCE of .* among one, two, same, got '1'"),
        ({"\nREFERENCE": '\nCOLUMNS = "fun"\nREFERENCE'}, "COLUMNS .* acc, .*, got 'fun'"),
        ({"\nREFERENCE": '\nPANELS = "fun"\nREFERENCE'}, "PANELS .* accuracy, .*, got 'fun'"),
        ("nothing.py", "must be a file such as .*, got .*nothing.py"),
        ("text.txt", "must be a file such as .*, got .*text.txt"),
    ],
)
def test_what_a_file_does_not_declare_is_named(write_experiment, tmp_path, change, message):
    (tmp_path / "text.txt").write_text("")
    path = tmp_path / change if isinstance(change, str) else write_experiment(**change)
    with pytest.raises(ValueError, match=message):
        load_experiment(path)


def test_the_documentation_names_every_measure_and_no_other():
    text = (FOLDER.parent / "docs" / "experiments" / "README.md").read_text()
    rows = text.partition("| measure |")[2].partition("\n\n")[0].splitlines()[2:]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    assert named == {*MEASURES, BENCHMARKS}
