"""README and docs: commands parse, links lead somewhere, the README stays short."""

import pathlib
import re
import shlex
import sys

import pytest
from absl import flags
from ml_collections import config_flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "deploy" / "README.md"])
# Modules that take the keys of a configuration.
CONFIGURED = ("care_jax.main", "care_jax.aot", "care_jax.data.prepare", "care_jax.sweep")


def commands_of(text):
    """The lines of indented and fenced blocks that call our programs, continuations joined."""
    text = text.replace("\\\n", " ")
    for line in text.splitlines():
        if re.match(r"(?: {4})(?:\$ )?(?:[A-Z_]+=\S+ )*python3? -m (?:care_jax|perf)", line):
            yield line.strip().removeprefix("$ ").split(" #")[0]


COMMANDS = sorted(
    {(page.name, command) for page in PAGES for command in commands_of(page.read_text())}
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
    if module not in CONFIGURED:
        for word in arguments:
            if word.startswith("--"):
                assert f'"{word.split("=")[0]}"' in text, f"{module} has no {word}"
        return
    keys = [word for word in arguments if word.startswith("--config.")]
    base = next((word.split("=")[1] for word in arguments if word.startswith("--config=")), None)
    base = base or "configs/tiny.py"
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file("config", flag_values=values)
    monkeypatch.setattr(sys, "argv", ["program", f"--config={base}", *keys])  # read there
    values(sys.argv)
    assert holder.value.stages
    for word in arguments:
        if word.startswith("--") and not word.startswith("--config"):
            name = word[2:].split("=")[0]
            assert f'"{name}"' in text or f'"--{name}"' in text, f"{module} has no --{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170
