"""An export is what transformers opens: model, tokenizer, processor. A release's files are kept."""

import json
import os
import pathlib
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from care_jax.batch import Example
from care_jax.prompts.release_tokenizer import processor_template
from care_jax.prompts.tokenizer import CHAT_TEMPLATE
from care_jax.run.policy import policy_of
from care_jax.run.weights import Source
from care_jax.stages import export
from configs import tiny
from models import backbone
from models.release import config_json

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WRITTEN = {"config.json", "generation_config.json", "model.safetensors"}
PROCESSOR = ("preprocessor_config.json", "video_preprocessor_config.json")


def run_of(policy):
    return types.SimpleNamespace(policy=policy)


@pytest.fixture(scope="module")
def exported(policy, params, tmp_path_factory):
    """What a policy without a release exports."""
    folder = tmp_path_factory.mktemp("exported") / "export"
    return export.export(run_of(policy), params, folder)


@pytest.fixture
def release(exported, tmp_path):
    """A release with files as only it has them, and its names."""
    folder = tmp_path / "release"
    folder.mkdir()
    for path in exported.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    settings = json.loads((folder / PROCESSOR[0]).read_text())
    (folder / PROCESSOR[0]).write_text(json.dumps(settings | {"max_pixels": 12845056}, indent=4))
    (folder / PROCESSOR[1]).write_text('{"size": {"longest_edge": 12845056}}')
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "sha256.json").unlink()  # releases have none
    return folder


def opened(folder, **changes):
    config = tiny.get_config()
    config.model.path, config.model.backbone = str(folder), {}
    config.update_from_flattened_dict(changes)
    return policy_of(config)


def names_of(folder):
    """The files of a folder, but for the sums that an export adds."""
    return {path.name for path in folder.iterdir()} - {"sha256.json"}


def test_the_model_opens_with_the_policys_bits(exported, policy, params):
    model, report = transformers.AutoModelForImageTextToText.from_pretrained(
        exported, output_loading_info=True
    )
    assert not any(report.values()), report
    assert model.dtype == torch.bfloat16
    table = model.get_input_embeddings().weight.detach().float().numpy()
    expected = params["text"]["embed"]["table"].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(table, expected)
    assert model.generation_config.eos_token_id == policy.config.eos_token_ids[0]


def test_the_processor_gives_the_policys_prompts(exported, policy, examples, open_processor):
    processor = open_processor(exported)
    for example in examples:
        ours = policy.prompts.tokenize(example)
        inputs = processor(text=policy.prompts.chat(example), images=list(example.images) or None)
        np.testing.assert_array_equal(np.array(inputs["input_ids"][0]), ours.tokens)
        if example.images:
            np.testing.assert_array_equal(inputs["pixel_values"], ours.patches)
            np.testing.assert_array_equal(inputs["image_grid_thw"], ours.grids)
    assert processor.chat_template == policy.tokenizer.chat_template


# Beside the environment, not in it: where torch is built for CPU, transformers could not even be
# imported with torchvision in its path, since torchvision's operators are built for CUDA. None of
# them is called here, so declaring them is enough.
TORCHVISION = pathlib.Path(sys.prefix, "torchvision")
STOCK = """
import json, sys, torch
if torch.version.cuda is None:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import transformers
from PIL import Image
folder, text = sys.argv[1:]
processor = transformers.AutoProcessor.from_pretrained(folder)
inputs = processor(text=[text], images=[Image.new("RGB", (48, 32), "red")])
print(json.dumps([type(processor).__name__, processor.video_processor.patch_size]))
print(json.dumps(inputs["input_ids"][0]))
"""


@pytest.mark.parametrize(
    "policy",
    ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.exhaustive)],
    indirect=True,
)
@pytest.mark.skipif(not TORCHVISION.is_dir(), reason=f"needs torchvision in {TORCHVISION}")
def test_the_stock_processor_opens_and_gives_the_policys_tokens(exported, policy):
    image = Image.new("RGB", (48, 32), "red")
    example = Example(id="a", source="s", images=(image,), question="<image>Which?", answer="2")
    result = subprocess.run(
        [sys.executable, "-c", STOCK, exported, policy.prompts.chat(example)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TORCHVISION)},
    )
    lines = result.stdout.splitlines()[-2:]
    assert lines, result.stderr
    name = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
    expected = [name[policy.config.family], policy.config.vision.patch_size]
    assert json.loads(lines[0]) == expected
    assert json.loads(lines[1]) == policy.prompts.tokenize(example).tokens.tolist()


def test_a_releases_tokenizer_and_processor_stay_as_they_are(release, params, tmp_path):
    start = opened(release)
    folder = export.export(run_of(start), params, tmp_path / "export")
    assert names_of(folder) == names_of(release)
    for name in names_of(release):
        assert (folder / name).read_bytes() == (release / name).read_bytes(), name


def test_an_export_of_a_real_release_opens_as_the_release_does(
    small_release, open_processor, tmp_path
):
    """With its template, both its ends and none of its sampling settings."""
    start = opened(small_release, **{"data.buckets": ((4096, 8192),)})
    params = backbone.load(small_release, dtype=jnp.bfloat16)[0]
    folder = export.export(run_of(start), params, tmp_path / "export")
    assert names_of(folder) == names_of(small_release) and (folder / "sha256.json").exists()
    for name in names_of(small_release) - WRITTEN:
        assert (folder / name).read_bytes() == (small_release / name).read_bytes(), name
    assert config_json.from_folder(folder) == start.config

    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == [151645, 151643]
    assert generation.to_diff_dict().keys() <= {
        *("eos_token_id", "pad_token_id", "transformers_version", "_from_model_config")
    }
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    assert model.generation_config.eos_token_id == [151645, 151643]

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == len(start.tokenizer)
    processor = open_processor(folder)
    assert processor.chat_template == start.tokenizer.chat_template
    assert processor.chat_template == open_processor(small_release).chat_template
    image = Image.new("RGB", (300, 200), "red")
    example = Example("a", "s", (image,), "<image>Which colour?", "red")
    text = start.prompts.chat(example)
    ours = start.prompts.tokenize(example)
    size = {"shortest_edge": start.prompts.min_pixels, "longest_edge": start.prompts.max_pixels}
    inputs = processor(text=[text], images=[image], size=size)
    np.testing.assert_array_equal(ours.tokens, inputs["input_ids"][0])
    np.testing.assert_array_equal(ours.patches, inputs["pixel_values"])


def test_templates_by_name_come_along(release, params, tmp_path):
    (release / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (release / "additional_chat_templates").mkdir()
    (release / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    folder = export.export(run_of(opened(release)), params, tmp_path / "export")
    assert processor_template(folder) == {"default": CHAT_TEMPLATE, "tool_use": "{{ tools }}"}


def test_a_tokenizer_from_elsewhere_brings_its_template(release, policy, params, tmp_path):
    """The release's processor may have one too, which AutoProcessor would prefer."""
    fields = {"processor_class": "Qwen2_5_VLProcessor", "chat_template": "{{ 1 }}"}
    (release / "processor_config.json").write_text(json.dumps(fields))
    own = tmp_path / "tokenizer"
    policy.tokenizer.save_pretrained(own)
    start = opened(release, **{"model.tokenizer": str(own)})
    folder = export.export(run_of(start), params, tmp_path / "export")
    assert processor_template(folder) == start.tokenizer.chat_template == CHAT_TEMPLATE


def test_a_tokenizer_from_elsewhere_is_the_runs(release, policy, params, tmp_path):
    own = tmp_path / "tokenizer"
    policy.tokenizer.save_pretrained(own)
    settings = own / "tokenizer_config.json"  # as transformers 4 writes them
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"pad_token": None}))
    start = opened(release, **{"model.tokenizer": str(own)})
    folder = export.export(run_of(start), params, tmp_path / "export")
    assert "merges.txt" not in names_of(folder) and "chat_template.jinja" in names_of(folder)
    for name in names_of(own):
        assert (folder / name).read_bytes() == (own / name).read_bytes(), name
    for name in PROCESSOR:
        assert (folder / name).read_bytes() == (release / name).read_bytes(), name


def test_a_processor_that_a_release_lacks_is_the_runs(release, params, tmp_path):
    (release / PROCESSOR[0]).unlink()
    start = opened(release)
    folder = export.export(run_of(start), params, tmp_path / "export")
    settings = json.loads((folder / PROCESSOR[0]).read_text())
    assert settings["max_pixels"] == start.prompts.max_pixels
    for name in names_of(release):
        assert (folder / name).read_bytes() == (release / name).read_bytes(), name


def test_a_chat_template_that_a_release_lacks_is_the_runs(release, params, tmp_path):
    tokenizer = json.loads((release / "tokenizer_config.json").read_text())
    del tokenizer["chat_template"]
    (release / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    start = opened(release)
    folder = export.export(run_of(start), params, tmp_path / "export")
    assert names_of(folder) == names_of(release) | {"chat_template.jinja"}
    assert (folder / "chat_template.jinja").read_text() == start.tokenizer.chat_template


def test_an_export_over_its_own_release_keeps_the_files(release, params):
    before = {name: (release / name).read_bytes() for name in names_of(release)}
    export.export(run_of(opened(release)), params, release)
    assert before == {name: (release / name).read_bytes() for name in names_of(release)}


@pytest.mark.parametrize(
    ("stages", "step", "said"),
    [
        ((), None, "exported the initial weights, as the workdir has no checkpoint, to "),
        (("sft", "rl"), None, "exported the weights of rl to "),
        (("sft",), 7, "exported step 7 of sft to "),
    ],
)
def test_a_line_says_which_weights_were_exported(make_run, monkeypatch, capsys, stages, step, said):
    monkeypatch.setattr(export, "export", lambda run, params, folder: folder)
    run = make_run({})
    export.export_stage(run, {}, Source(stages, step, name="x"))
    assert capsys.readouterr().out == f"{said}{run.workdir / 'export'}\n"


def test_an_adapter_names_its_base_as_other_programs_find_it(tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for path in ("base", "~/base", str(tmp_path / "base")):
        assert export.base_of(path) == str(tmp_path / "base")
    for path in ("", "Qwen/Qwen2.5-VL-3B-Instruct"):
        assert export.base_of(path) == path
