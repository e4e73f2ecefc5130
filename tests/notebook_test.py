"""The notebook runs from top to bottom, and is committed with the outputs of such a run."""

import os
import pathlib
import re
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "experiments" / "colab.ipynb"
nbformat = pytest.importorskip("nbformat", reason="needs nbformat: pip install -e '.[test]'")


def outputs_of(notebook):
    return [out for cell in notebook.cells for out in cell.get("outputs", ())]


def text_of(outputs):
    """What the outputs say, as one text; pictures left out."""
    shown = [out.get("data", {}).get("text/html", out.get("text", "")) for out in outputs]
    return "\n".join(shown)


def check_outputs(notebook, num_steps):
    """Every cell ran, and drew curves, a picture, and a group with its roles and rewards."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = outputs_of(notebook)
    assert not [out for out in outputs if out.output_type == "error"]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 2  # curves, and a question
    text = text_of(outputs)
    assert re.search(r"accuracy after sft: \d+\.\d% of 128\naccuracy after rl: \d+\.\d%", text)
    assert (shown := re.search(r"step (\d+): ", text)) and int(shown[1]) < num_steps
    assert re.search(
        r"right answer: .+; the group is (\w|not )*(repaired|contrasted|rescued)", text
    )
    assert re.search(r"(?m)^(pseudo-)?anchor: answer \d$", text)
    assert re.search(r"(?m)^hard negative: answer \d", text)
    assert {int(row) for row in re.findall(r"<tr><td>(\d)</td>", text)} >= set(range(1, 9))


@pytest.mark.exhaustive
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient: pip install -e '.[test]'")
    pytest.importorskip("ipykernel", reason="needs ipykernel: pip install -e '.[test]'")
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[test]'")
    settings = {
        "CARE_JAX_NOTEBOOK_STEPS": "2,1",
        "CARE_JAX_NOTEBOOK_WORKDIR": str(tmp_path / "run"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "JAX_COMPILATION_CACHE_DIR": jax.config.values["jax_compilation_cache_dir"] or "",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:  # what a run of some other day left proves nothing
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    check_outputs(notebook, num_steps=1)
    assert (tmp_path / "run" / "report.html").is_file()


def test_the_committed_notebook_shows_a_run_and_no_machine():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    check_outputs(notebook, num_steps=1000)
    assert NOTEBOOK.stat().st_size < 300_000
    assert not re.search(r"/(tmp|work|home|root|usr|opt)/", NOTEBOOK.read_text())
    assert not [out for out in outputs_of(notebook) if out.get("name") == "stderr"]
