"""README and docs: commands parse, links lead somewhere, the README stays short."""

import ast
import json
import pathlib
import re
import shlex
import sys
import textwrap

import pytest
from absl import flags
from ml_collections import config_flags

import care_jax
from care_jax import from_python
from care_jax.batch import Example
from care_jax.data.examples import open_examples
from care_jax.data.readers import jsonl
from care_jax.prompts.rendering import image_line, rendered, resized_images
from care_jax.rewards.verifier import Verifier, parse_text
from care_jax.run.policy import policy_of
from configs import care_released, common, tiny
from experiments.sweep import __main__ as sweep
from experiments.sweep.experiment import load_experiment

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "deploy" / "README.md"])
# Modules that take the keys of a configuration.
CONFIGURED = (
    *("care_jax.main", "care_jax.aot", "experiments.sweep"),
    *(f"care_jax.commands.{name}" for name in ("prepare", "probe", "repairs")),
)


def commands_of(text):
    """The lines of indented and fenced blocks that call our programs, continuations joined."""
    text = text.replace("\\\n", " ")
    for name, value in re.findall(r'(?m)^ {4}([A-Z]+)="(.+)"$', text):
        text = text.replace(f"${name}", value)
    for line in text.splitlines():
        if re.match(
            r"(?: {4})(?:\$ )?(?:[A-Z_]+=\S+ )*python3? -m (?:care_jax|experiments|perf)", line
        ):
            yield line.strip().removeprefix("$ ").split(" #")[0]


COMMANDS = sorted(
    {
        (str(page.relative_to(ROOT)), command)
        for page in PAGES
        for command in commands_of(page.read_text())
    }
)


def test_commands_are_found():
    assert len(COMMANDS) > 15


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_names_a_module_a_config_and_keys_that_are_there(page, command, monkeypatch):
    words = shlex.split(command)
    module, arguments = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
    path = ROOT / module.replace(".", "/")
    assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
    source = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__main__.py"
    text = source.read_text()
    if "commands.reopened" in text:
        text += (ROOT / "care_jax" / "commands" / "reopened.py").read_text()
    if module not in CONFIGURED:
        for word in arguments:
            if word.startswith("--"):
                name = word[2:].split("=")[0]
                assert f'"--{name}"' in text or f'"{name}"' in text, f"{module} has no {word}"
        return
    keys = [word for word in arguments if word.startswith("--config.")]
    base = next((word.split("=")[1] for word in arguments if word.startswith("--config=")), None)
    base = base or "configs/tiny.py"
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file("config", flag_values=values)
    monkeypatch.setattr(sys, "argv", ["program", f"--config={base}", *keys])  # read there
    values(sys.argv)
    assert holder.value.stages
    if module == "experiments.sweep":
        given = dict(
            word[2:].split("=", 1) for word in arguments if not word.startswith("--config")
        )
        names = {key: given[key] for key in ("arms", "columns", "panels") if key in given}
        load_experiment(ROOT / given["experiment"], **names)
    for word in arguments:
        if word.startswith("--") and not word.startswith("--config"):
            name = word[2:].split("=")[0]
            assert f'"{name}"' in text or f'"--{name}"' in text, f"{module} has no --{name}"


def test_the_sweeps_of_the_pages_refuse_no_folder_of_each_other(tmp_path, monkeypatch):
    def begin(trials, **_):
        for trial in trials:
            trial.workdir.mkdir(parents=True, exist_ok=True)
            (trial.workdir / "trial.json").write_text(json.dumps({"settings": trial.settings}))
        return []

    monkeypatch.setattr(sweep, "run_all", begin)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)
    for _, command in COMMANDS:
        _, _, arguments = command.partition("-m experiments.sweep ")
        if arguments:
            sweep.main(shlex.split(arguments))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page} links to {target}"


def blocks_of(text):
    """The indented blocks, without their indentation."""
    for block in re.findall(r"(?m)(?:^ {4}.*\n|^\n(?= {4}))+", text):
        yield textwrap.dedent(block).strip("\n")


@pytest.fixture
def reward_examples():
    """The Python examples of docs/rewards.md: the module boxes.py, and the run from Python."""
    blocks = list(blocks_of((ROOT / "docs" / "rewards.md").read_text()))
    return [
        next(block for block in blocks if block.startswith(first))
        for first in ("# boxes.py", "import care_jax")
    ]


def test_the_box_example_rewards_overlap(reward_examples, tmp_path, monkeypatch):
    (tmp_path / "boxes.py").write_text(reward_examples[0])
    monkeypatch.syspath_prepend(tmp_path)
    boxes = ("[0, 0, 4, 4]", "[2, 0, 6, 4]", "[0, 0, 4, 2]", "[5, 5, 9, 9]", "[1, 2]", "[1, 'a']")
    texts = [f"<think>a</think><answer> {box} </answer>" for box in boxes] + ["[0, 0, 4, 4]"]
    parsed = [parse_text(text) for text in texts]
    example = Example("0", "made", (), "Where?", [0, 0, 4, 4])
    with Verifier(reward="boxes:iou") as verifier:
        verdicts = verifier.begin(texts, parsed, [example] * 7, group_size=7)()
    expected = [1, 8 / 24, 8 / 16, 0, 0, 0, 0]
    assert [verdict.components for verdict in verdicts] == [
        {"acc": pytest.approx(value, abs=1e-9)} for value in expected
    ]
    assert [verdict.acc for verdict in verdicts] == [1, 0, 1, 0, 0, 0, 0]
    assert [verdict.fmt for verdict in verdicts] == [1] * 6 + [0]


def test_the_example_of_a_run_from_python_is_one(reward_examples, monkeypatch):
    """All but the training itself, which `from_python_test` does."""
    asked = {}

    def train_on(config, **arguments):
        asked.update(arguments)
        metrics = [{"step": 0}]
        return from_python.Trained(pathlib.Path(arguments["workdir"]), {"rl": {"acc": 1}}, metrics)

    monkeypatch.setattr(care_jax, "train_on", train_on)
    exec(reward_examples[1], {})
    row = jsonl.in_memory(asked["train"], "train")[0]
    assert asked["reward"](row.question, ["4", "5"], row) == [{"acc": True}, {"acc": False}]


def test_the_example_of_a_configuration_is_a_mixture():
    page = (ROOT / "docs" / "data.md").read_text()
    names = {}
    exec(next(block for block in blocks_of(page) if "def get_config" in block), names)
    parts = names["get_config"]().data.train.parts
    assert [(part.path, part.weight) for part in parts] == [("a.jsonl", 0.7), ("b.jsonl", 0.3)]


def test_the_papers_hyperparameters_are_those_of_the_configuration():
    """The last two columns of its tables: a key and its default."""
    page = (ROOT / "docs" / "hyperparameters.md").read_text()
    stated = re.findall(r"\| `([a-z]+\.\w+)` \| `(.+)` \|$", page, re.MULTILINE)
    assert len(stated) > 40
    defaults = common.get_config()
    for key, value in stated:
        section, _, name = key.partition(".")
        assert defaults[section][name] == ast.literal_eval(value), key
    # Every value that the paper leaves open and the configuration marks so.
    source = (ROOT / "configs" / "common.py").read_text()
    for key in re.findall(r"^    (\w+\.\w+) = .*# \(open\)", source, re.MULTILINE):
        assert key in dict(stated), key


def test_our_names_of_the_keys_of_verl_and_trl_are_keys():
    page = (ROOT / "docs" / "coming_from.md").read_text()
    ours = " ".join(re.findall(r"^\| (`[^|]+)", page, re.MULTILINE))
    names = re.findall(r"`(\w+)\.(\w+)`", ours)
    assert len(names) > 15
    defaults = common.get_config()
    assert [pair for pair in names if pair[1] not in defaults[pair[0]]] == []


def test_the_differences_of_the_released_code_are_the_arms_of_its_experiment():
    page = (ROOT / "docs" / "hyperparameters.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", page, re.MULTILINE)
    stated = {arm: re.findall(r"`([^`]+)`", keys) for arm, keys in rows}
    assert stated == {arm: [*keys] for arm, keys in care_released.DIFFERENCES.items()}


def test_the_prompt_shown_is_what_the_model_reads():
    config = tiny.get_config()
    policy, example = policy_of(config), open_examples(config, "rl", False)[0]
    prompt = policy.prompts.tokenize(example)
    page = (ROOT / "docs" / "prompts.md").read_text()
    shown = next(block for block in blocks_of(page) if block.startswith("synthetic/"))
    text = rendered(prompt, policy.token_bytes, policy.config)
    assert shown.endswith(textwrap.indent(text.rstrip("\n"), "    "))
    (image,) = resized_images(example, prompt, policy.config)
    assert f"image {image_line(image)}" in shown


# Maximum number of words of a page.
WORDS = {
    "README.md": 900,
    "WORKSPACE.md": 2000,
    "docs/README.md": 270,
    "docs/coming_from.md": 450,
    "docs/data.md": 1100,
    "docs/evaluation.md": 900,
    "docs/experiments.md": 2500,
    "docs/faults.md": 800,
    "docs/gradients.md": 1400,
    "docs/hyperparameters.md": 1200,
    "docs/method.md": 1900,
    "docs/models.md": 1150,
    "docs/one_gpu.md": 880,
    "docs/operations.md": 1850,
    "docs/paper.md": 2500,
    "docs/performance.md": 1850,
    "docs/prompts.md": 640,
    "docs/report.md": 600,
    "docs/rewards.md": 1050,
    "docs/security.md": 650,
    "docs/serving.md": 700,
    "docs/smollm.md": 900,
}


def test_pages_are_short():
    pages = [ROOT / "README.md", ROOT / "WORKSPACE.md", *(ROOT / "docs").glob("*.md")]
    counts = {str(page.relative_to(ROOT)): len(page.read_text().split()) for page in pages}
    assert counts.keys() == WORDS.keys()
    assert all(count <= WORDS[name] for name, count in counts.items()), counts
