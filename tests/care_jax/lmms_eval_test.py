"""An export under the calls of lmms-eval's stock Qwen-VL classes, and the task files for it."""

import importlib.util
import inspect
import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import pytest
import yaml
from PIL import Image

from care_jax.batch import Example
from care_jax.benchmarks import response
from care_jax.decoding.rollout_buffer import Request
from care_jax.devices import sharding
from care_jax.report.metrics import MetricWriter
from care_jax.run import weights
from care_jax.run.policy import policy_of
from care_jax.run.run import Run
from care_jax.stages import answering, export
from configs import common, qwen3vl_8b, tiny
from models import backbone

ROOT = pathlib.Path(__file__).parents[2]
TASKS = ROOT / "docs" / "lmms_eval"
TORCHVISION = pathlib.Path(sys.prefix, "torchvision")  # see export_test.py
NUM_TOKENS = 12

# What `lmms_eval.models.simple.qwen2_5_vl` and `qwen3_vl` load and call, in their order.
STOCK = """
import base64, io, json, sys, torch
if torch.version.cuda is None:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import transformers
from PIL import Image
folder, name, image, question, min_pixels, max_pixels, num_tokens = sys.argv[1:]
limits = {"max_pixels": int(max_pixels), "min_pixels": int(min_pixels)}
processor = transformers.AutoProcessor.from_pretrained(folder, **limits)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
uri = "data:image/png;base64," + base64.b64encode(open(image, "rb").read()).decode()
messages = [[
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": [
        {"type": "image", "image": uri, **limits}, {"type": "text", "text": question}]},
]]
texts = [processor.apply_chat_template(m, tokenize=False, add_generation_prompt=True)
         for m in messages]
inputs = processor(text=texts, images=[Image.open(image).convert("RGB")], videos=None,
                   padding=True, return_tensors="pt")
found = []
for dtype in ("float32", "bfloat16"):
    model = getattr(transformers, name).from_pretrained(folder, torch_dtype=dtype).eval()
    with torch.no_grad():
        out = model.generate(
            **inputs, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
            do_sample=False, temperature=None, top_p=None, num_beams=1,
            max_new_tokens=int(num_tokens), use_cache=True)
    trimmed = [o[len(i):] for i, o in zip(inputs.input_ids, out)]
    answers = processor.batch_decode(
        trimmed, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    found.append([inputs.input_ids[0].tolist(), trimmed[0].tolist(), answers[0]])
print(json.dumps(found))
"""
CLASSES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}


@pytest.fixture
def exported(policy, params, tmp_path):
    folder = export.export(types.SimpleNamespace(policy=policy), params, tmp_path / "export")
    Image.new("RGB", (48, 32), "red").save(tmp_path / "red.png")
    return folder


def greedy(folder, example, tmp_path):
    """Our own decoder on the exported weights."""
    config = tiny.get_config()
    config.model.path, config.model.backbone = str(folder), {}
    config.evaluate.batch_size, config.evaluate.max_response_tokens = 1, NUM_TOKENS
    policy = policy_of(config)
    mesh = sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    with MetricWriter(tmp_path) as metrics:
        run = Run(config, policy, mesh, tmp_path, metrics)
        params = weights.start(run)
        decode = answering.make_decoder(run, params, answering.compile_answering(run))
        prompt = policy.prompts.tokenize(example)
        ((_, rollouts),) = decode([Request(0, prompt)])
    return prompt.tokens, rollouts.tokens[0, 0][rollouts.is_valid[0, 0]]


@pytest.mark.exhaustive
@pytest.mark.skipif(not TORCHVISION.is_dir(), reason=f"needs torchvision in {TORCHVISION}")
def test_the_stock_classes_calls_give_our_greedy_answer(exported, policy, tmp_path):
    assert_stock_calls_agree(exported, policy, tmp_path)


@pytest.mark.parametrize(
    "real_release",
    ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.exhaustive)],
    indirect=True,
)
@pytest.mark.skipif(not TORCHVISION.is_dir(), reason=f"needs torchvision in {TORCHVISION}")
def test_the_stock_classes_calls_give_our_greedy_answer_on_a_real_release(small_release, tmp_path):
    """Its tokenizer, template and settings, with a small backbone."""
    config = tiny.get_config()
    config.model.path, config.model.backbone = str(small_release), {}
    policy = policy_of(config)
    params = backbone.load(small_release, policy.config)[0]
    folder = export.export(types.SimpleNamespace(policy=policy), params, tmp_path / "export")
    Image.new("RGB", (48, 32), "red").save(tmp_path / "red.png")
    assert_stock_calls_agree(folder, policy, tmp_path)


def assert_stock_calls_agree(exported, policy, tmp_path):
    example = Example("a", "s", (tmp_path / "red.png",), "<image>Which colour?", "red")
    prompt, expected = greedy(exported, example, tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", STOCK, exported, CLASSES[policy.config.family],
         tmp_path / "red.png", "Which colour?", str(policy.prompts.min_pixels),
         str(policy.prompts.max_pixels), str(NUM_TOKENS)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TORCHVISION)},
    )  # fmt: skip
    assert result.stdout, result.stderr
    answers = json.loads(result.stdout.splitlines()[-1])
    for tokens, answered, text in answers:
        assert tokens == prompt.tolist()
        assert 0 < len(answered) <= NUM_TOKENS and isinstance(text, str)
    # bfloat16, the classes' own, may round another way.
    assert len(answers) == 2 and answers[0][1] == expected.tolist()


@pytest.fixture
def unwrap(monkeypatch):
    """The module beside the task files, with stock tasks that tell what they are given."""
    stock = ("doc_to_visual", "doc_to_text", "process_results")
    for task in ("mathvista", "mathverse", "mathvision", "mmmu", "mmmu_pro"):
        module = types.ModuleType(f"lmms_eval.tasks.{task}.utils")
        for name in stock:
            setattr(module, f"{task}_{name}", lambda *given: given)
        setattr(module, f"{task}_doc_to_text", lambda doc, given: f"{doc} {given}")
        for name in ("results", "results_eval"):
            setattr(module, f"{task}_aggregate_{name}", lambda *given: given)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = importlib.util.spec_from_file_location("unwrap", TASKS / "unwrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Function(yaml.YAMLObject):
    yaml_tag, yaml_loader = "!function", yaml.SafeLoader

    @classmethod
    def from_yaml(cls, loader, node):
        return node.value


@pytest.mark.parametrize("path", sorted(TASKS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_task_file_names_functions_with_the_parameters_the_harness_looks_for(path, unwrap):
    task = yaml.safe_load(path.read_text())
    assert task["task"] == path.stem
    assert (
        task["generation_kwargs"]["max_new_tokens"]
        == common.get_config().evaluate.max_response_tokens
    )
    tags = [[f"<{tag}>", f"</{tag}>"] for tag in ("think", "reasoning")]
    assert task["reasoning_tags"] == tags
    kwargs = task["lmms_eval_specific_kwargs"]["default"]

    def function(name):
        module, _, attribute = name.partition(".")
        assert module == "unwrap"
        return getattr(unwrap, attribute)

    assert function(task["doc_to_visual"])("doc") == ("doc",)
    asked = function(task["doc_to_text"])("doc", lmms_eval_specific_kwargs=kwargs)
    assert asked == f"doc {kwargs}\n{unwrap.INSTRUCTION}"
    _, results = function(task["process_results"])({}, ["<think>B?</think><answer>C</answer>"])
    assert results == ["C"]
    (metric,) = task["metric_list"]
    aggregate = function(metric["aggregation"])
    if "args" in inspect.signature(aggregate).parameters:
        assert aggregate([1], args=2) == ([1], 2)
    else:
        assert aggregate([1]) == ([1],)
    assert ("args" in inspect.signature(aggregate).parameters) == (
        "mathver" in path.stem or "mathvista" in path.stem
    )


def test_the_seven_sets_have_a_task_file():
    assert len(list(TASKS.glob("care_*.yaml"))) == 7


def test_the_instruction_is_that_of_training(unwrap, monkeypatch):
    trained = common.get_config().data.instruction
    assert trained.replace("{tag}", "think") == unwrap.INSTRUCTION
    monkeypatch.setenv("CARE_THINK_TAG", "reasoning")
    spec = importlib.util.spec_from_file_location("unwrap", TASKS / "unwrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    data = qwen3vl_8b.get_config().data
    assert data.instruction.replace("{tag}", data.think_tag) == module.INSTRUCTION


@pytest.mark.parametrize(
    "text",
    [
        "<think>so \\boxed{B}</think><answer>A</answer>",
        "<reasoning>x</reasoning><answer> \\boxed{\\text{A}} </answer>",
        "<answer>B</answer> no, <answer>\\boxed{\\boxed{\\frac{1}{2}}}</answer>",
        "<think>x</think> It is A.",
        "A",
        "<answer>A",
        "<answer>\\boxed{A</answer>",
    ],
)
def test_an_answer_is_unwrapped_as_our_own_evaluation_does(unwrap, text):
    assert unwrap.unwrap(text) == response.unwrap(text)


def test_letters_reach_the_stock_scorers_in_the_form_they_take(unwrap):
    doc = {"choices": ["3 cm", "4 cm"]}
    given = ["<answer>(B)</answer>", "<answer>3 cm</answer>", "<answer>C</answer>"]
    assert unwrap.mathvista_process_results(doc, given)[1] == ["4 cm", "3 cm", "C"]
    assert unwrap.mmmu_pro_vision_process_results({}, ["<answer>(J) is it</answer>"])[1] == ["J"]
    with_options = {"options": "[]"}
    assert unwrap.mmmu_pro_vision_process_results(with_options, ["It is J"])[1] == ["It is J"]
