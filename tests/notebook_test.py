"""The notebook runs from top to bottom, and is committed with the outputs of such a run.

`python tests/notebook_test.py` runs it and writes its outputs into it.
"""

import os
import pathlib
import re
import sys
import tempfile
import types

import jax
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "experiments" / "colab.ipynb"
nbformat = pytest.importorskip("nbformat", reason="needs nbformat: pip install -e '.[test]'")
SHORT = """
config.sft.num_steps, config.rl.num_steps, config.log_every = 2, 1, 1
config.sft.warmup_steps, config.rl.warmup_steps, config.rl.prompts_per_step = 0, 0, 32
train, test = train[:64], test[:64]
"""


def run(notebook, folder, config=""):
    """Executes a notebook in a folder; `config` is a cell inserted after the configuration's."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient: pip install -e '.[test]'")
    pytest.importorskip("ipykernel", reason="needs ipykernel: pip install -e '.[test]'")
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[test]'")
    for cell in code_of(notebook):  # what a run of some other day left proves nothing
        cell.outputs, cell.execution_count = [], None
    if config:
        (place,) = (i for i, x in enumerate(notebook.cells) if "get_config()" in x.source)
        notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(config))
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(
        notebook, timeout=3600, coalesce_streams=True, resources=resources
    ).execute()


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs_of(notebook):
    return [out for cell in notebook.cells for out in cell.get("outputs", ())]


def text_of(outputs):
    """What the outputs say, as one text; pictures left out."""
    shown = [out.get("data", {}).get("text/html", out.get("text", "")) for out in outputs]
    return "\n".join(shown)


def check_outputs(notebook, sft_steps, rl_steps):
    """Every cell ran; the run's lines, pictures, curves and a group are there.

    The numbers of steps are those of the configuration.
    """
    code = code_of(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = outputs_of(notebook)
    assert not [out for out in outputs if out.output_type == "error" or out.get("name") == "stderr"]
    # Two rows, the curves, and the question of the group.
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 4
    text = text_of(outputs)
    for stage, number in (("sft", sft_steps), ("rl", rl_steps)):
        steps = [int(step) for step in re.findall(rf"(?m)^{stage} +(\d+)/{number}  \w", text)]
        assert len(steps) >= min(number, 10) and steps[-1] >= 0.9 * (number - 1)
    assert re.search(r"(?m)^objective +care$", text)
    shown = re.search(
        r"(?m)^step (\d+): .+ -> \w+ \((\w|not )*(repaired|contrasted|rescued)\)", text
    )
    assert shown and int(shown[1]) < rl_steps
    assert re.search(r"<td>(pseudo-)?anchor</td><td>(right|wrong)</td><td>[\d.]+</td><td>", text)
    assert "<td>hard negative</td>" in text
    assert {int(row) for row in re.findall(r"<tr><td>(\d)</td>", text)} >= set(range(1, 9))


def intervals(notebook):
    """(lower end, accuracy, upper end) in percent after the cold start and after RL."""
    found = re.findall(
        r"(?m)^after (\w+): ([\d.]+)% right \(95% interval ([\d.]+)% to ([\d.]+)%\)$",
        text_of(outputs_of(notebook)),
    )
    assert [stage for stage, *_ in found] == ["sft", "rl"]
    return [(float(low), float(acc), float(high)) for _, acc, low, high in found]


@pytest.mark.exhaustive
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    settings = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "JAX_COMPILATION_CACHE_DIR": jax.config.values["jax_compilation_cache_dir"] or "",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    run(notebook, tmp_path, SHORT)
    check_outputs(notebook, sft_steps=2, rl_steps=1)
    assert len(intervals(notebook)) == 2
    assert (tmp_path / "runs" / "notebook" / "report.html").is_file()


def test_the_committed_notebook_shows_a_run_and_no_machine():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    check_outputs(notebook, sft_steps=400, rl_steps=100)
    assert NOTEBOOK.stat().st_size < 300_000
    assert not re.search(r"/(tmp|work|home|root|usr|opt)/", NOTEBOOK.read_text())


def test_the_committed_notebook_ends_better_than_it_began():
    (_, before, high), (low, after, _) = intervals(nbformat.read(NOTEBOOK, as_version=4))
    assert before <= high < low <= after


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Runs the first cell where care_jax is missing; returns the requirement that pip gets."""
    two = pytest.importorskip("IPython.core.inputtransformer2", reason="needs ipykernel")
    first = code_of(nbformat.read(NOTEBOOK, as_version=4))[0].source
    folder = tmp_path / "notebooks" / "mine"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    def run_cell(repository=""):
        given, commands = first.replace('REPOSITORY = ""', f"REPOSITORY = {repository!r}"), []
        shell = types.SimpleNamespace(run_line_magic=lambda *command: commands.append(command))
        names = {"get_ipython": lambda: shell}
        exec(two.TransformerManager().transform_cell(given), names)
        assert commands == [("pip", 'install --quiet "{requirement}"')]
        return names["requirement"]

    return folder, run_cell


def test_without_a_source_the_first_cell_names_the_line_to_fill_in(install):
    _, run_cell = install
    with pytest.raises(ValueError, match=r'fill in the line REPOSITORY = "https://..."'):
        run_cell()


@pytest.mark.parametrize("place", ("..", ".", "care_jax"))
def test_the_first_cell_installs_a_checkout_before_a_wheel_before_the_url(install, place):
    folder, run_cell = install
    url = "https://example.org/care_jax"
    assert run_cell(url) == f"care_jax[sweep] @ git+{url}"
    wheel = folder / "care_jax-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert run_cell(url) == f"care_jax[sweep] @ {wheel.as_uri()}"
    package = folder / place / "care_jax"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert run_cell(url) == f"care_jax[sweep] @ {(folder / place).resolve().as_uri()}"


def main():
    """Runs the notebook as a newcomer would, with nothing compiled."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/compiled"
        run(notebook, folder)
        text = nbformat.writes(notebook)
        text = text.replace(f"{pathlib.Path(folder).resolve()}/", "")
    NOTEBOOK.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
