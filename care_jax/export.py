"""Writes a trained policy as a Hugging Face folder: weights, config, tokenizer and processor.

`generation_config.json` says how the policy was trained and evaluated: it ends at the backbone's
end-of-sequence token and has no sampling settings. Those of a release, such as a repetition
penalty, are left out.
"""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp

from care_jax.policy import Policy
from care_jax.run import Run
from models import backbone

_CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    *_CHAT_TEMPLATES,
)
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)


def export(run: Run, params: backbone.Params, folder: pathlib.Path) -> pathlib.Path:
    """Exports parameters in bfloat16, the releases' own type.

    In a run of several processes all of them call this and the first one writes.

    Args:
        run: the run.
        params: in the training layout; gathered one tensor at a time.
        folder: made where it does not exist.
    """
    backbone.export(folder, params, run.policy.config, dtype=jnp.bfloat16)
    if jax.process_index() == 0:
        save_processor(run.policy, folder)
    return folder


def save_processor(policy: Policy, folder: pathlib.Path) -> None:
    """Writes what turns text and images into inputs, for AutoTokenizer and AutoProcessor.

    The files of the release that the policy started from are copied as they are, its limits on
    image sizes included. What it lacks, or a policy without a release, gets the run's own.
    """
    source = policy.folder
    if source and source.resolve() == folder.resolve():
        return
    has_own_tokenizer = source and policy.tokenizer.name_or_path == str(source)
    names = _PROCESSOR_FILES + (_TOKENIZER_FILES if has_own_tokenizer else ())
    present = [name for name in names if source and (source / name).is_file()]
    has_processor = {"preprocessor_config.json", "processor_config.json"} & set(present)
    if "tokenizer_config.json" not in present or not has_processor:
        policy.prompts.save_processor(folder)
    for name in present:
        shutil.copyfile(source / name, folder / name)
    if not _has_chat_template(folder):
        (folder / "chat_template.jinja").write_text(policy.tokenizer.chat_template)


def _has_chat_template(folder: pathlib.Path) -> bool:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    in_file = any((folder / name).is_file() for name in _CHAT_TEMPLATES)
    return in_file or bool(config.get("chat_template"))
