"""Writes a trained policy as a Hugging Face folder: weights, config, tokenizer and processor.

`export.step` chooses the checkpoint, see `run.weights.find`. With LoRA the adapters are exported to
a second folder, for peft and vLLM.

`generation_config.json` matches training and evaluation: any of the backbone's EOS tokens ends a
response, and a release's sampling settings, such as a repetition penalty, are left out.
`sha256.json` has the SHA-256 of all files, which runs that start from the folder verify.
"""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp

from care_jax.prompts.release_tokenizer import processor_template
from care_jax.report.console import print_line
from care_jax.run import integrity
from care_jax.run.policy import Policy
from care_jax.run.progress import checkpoint_folder, read_progress, saved_steps
from care_jax.run.run import Run
from care_jax.run.weights import Source, restore
from models import backbone, lora
from models.release import peft_folder

_MORE_TEMPLATES = "additional_chat_templates"  # a folder
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
)
_PROCESSOR_FILES = (
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
)


def export_stage(run: Run, params: backbone.Params, source: Source) -> None:
    """Exports weights of `source` to `workdir/export`, and their adapters to `workdir/adapter`."""
    folder = export(run, params, run.workdir / "export")
    what = "the initial weights, as the workdir has no checkpoint,"
    if source.stages:
        which = "the weights" if source.step is None else f"step {source.step}"
        what = f"{which} of {source.stages[-1]}"
    print_line(f"exported {what} to {folder}")
    if run.config.model.lora_rank and source.stages:
        folder = export_adapters(run, source)
        print_line(f"exported its adapters to {folder}")


def export_adapters(run: Run, source: Source) -> pathlib.Path:
    """Writes the run's total change of its initial weights as one adapter.

    Each stage trains a new adapter on the merged weights of the previous one. The total change is
    the sum of their products: one adapter with the ranks added up.

    Raises:
        ValueError: the checkpoints of a stage before the last are gone.
    """
    last = source.stages[-1]
    step = source.step or max(saved_steps(run.workdir, last))
    progress = read_progress(checkpoint_folder(run.workdir, last), step, run.fingerprint())
    before = progress.get("settings", {}).get("stages", ())
    if gone := [stage for stage in before if not saved_steps(run.workdir, stage)]:
        raise ValueError(
            f"the adapters of {last} stand on those of {gone[0]}, and the checkpoints in "
            f"{checkpoint_folder(run.workdir, gone[0])} are gone; put them back, or use the "
            "export, which has all weights"
        )
    model, folder = run.config.model, run.workdir / "adapter"
    steps = [*((stage, None) for stage in before), (last, source.step)]
    adapters = [restore(run, stage, step, of=lora.only) for stage, step in steps]
    change, alpha = lora.concatenated(adapters), model.lora_alpha * len(adapters)
    peft_folder.export(folder, change, run.policy.config, alpha=alpha, base=base_of(model.path))
    return folder


def base_of(path: str) -> str:
    """`model.path` as other programs find it from any folder: absolute, or the hub id it is."""
    local = pathlib.Path(path).expanduser()
    return str(local.resolve()) if path and local.exists() else path


def export(run: Run, params: backbone.Params, folder: pathlib.Path) -> pathlib.Path:
    """Exports parameters in the training layout as bfloat16, the dtype of the releases.

    With several processes, all of them must call this; the first one writes. Tensors are gathered
    one at a time. The folder is created if it does not exist.
    """
    backbone.export(folder, params, run.policy.config, dtype=jnp.bfloat16)
    if jax.process_index() == 0:
        save_processor(run.policy, folder)
        integrity.write_manifest(folder)
    return folder


def save_processor(policy: Policy, folder: pathlib.Path) -> None:
    """Writes the tokenizer and processor files that AutoTokenizer and AutoProcessor read.

    The files of the release that the policy started from, including its limits on image sizes, and
    of its tokenizer's folder are copied unchanged: what transformers 5 writes, 4 does not read.
    Files that are missing there, or all if there is no release, are written from the run's
    tokenizer and settings.
    """
    release, tokenizer = policy.folder, policy.tokenizer.name_or_path
    if release and release.resolve() == folder.resolve():
        return
    has_own_tokenizer = release and tokenizer == str(release)
    files = [pathlib.Path(tokenizer) / name for name in _TOKENIZER_FILES if tokenizer]
    files += [release / name for name in _PROCESSOR_FILES if release]
    files = [file for file in files if file.is_file()]
    present = {file.name for file in files}
    has_processor = {"preprocessor_config.json", "processor_config.json"} & present
    if "tokenizer_config.json" not in present or not has_processor:
        policy.prompts.save_processor(folder)
    for file in files:
        shutil.copyfile(file, folder / file.name)
    more_templates = pathlib.Path(tokenizer) / _MORE_TEMPLATES
    if tokenizer and more_templates.is_dir():
        shutil.copytree(more_templates, folder / _MORE_TEMPLATES, dirs_exist_ok=True)
    if not has_own_tokenizer and "processor_config.json" in present:
        # The release's template, which AutoProcessor would prefer to the run's, is removed.
        path = folder / "processor_config.json"
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields.pop("chat_template", None) is not None:
            path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    if not processor_template(folder) and not config.get("chat_template"):
        (folder / "chat_template.jinja").write_text(
            policy.tokenizer.chat_template, encoding="utf-8"
        )
