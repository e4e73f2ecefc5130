"""Prompts of real releases are transformers' rendering of their templates, token for token.

The processor is AutoProcessor's own, opened from the release's files; the conversations are written
out here, not taken from the prompt builder.
"""

import json

import numpy as np
import pytest
from PIL import Image

from care_jax.batch import Example
from care_jax.data.drawn import synthetic
from care_jax.data.rows import make_example
from care_jax.prompts.builder import PromptBuilder
from care_jax.prompts.release_tokenizer import load_tokenizer
from care_jax.prompts.tokenizer import CHAT_TEMPLATE, build_tokenizer
from care_jax.run.policy import policy_of
from configs import common, mixture, qwen3vl_8b, qwen25vl_7b
from models.release import config_json

transformers = pytest.importorskip("transformers")

LIMITS = {"min_pixels": 65536, "max_pixels": 262144}
IMAGE = {"type": "image"}
MARKUP = "{{ 1 }} {% x %} <b>a</b> <think> 'q' </answer>"
# Question, sizes of its images as (width, height) in pixels, content of the user's turn.
QUESTIONS = {
    "text alone": ("What is 17 + 25?", (), ["What is 17 + 25?"]),
    "one image": ("<image>Which is taller?", [(850, 600)], [IMAGE, "Which is taller?"]),
    "an image alone": ("<image>", [(300, 300)], [IMAGE]),
    "in the text": ("As in <image>, find x.", [(400, 300)], ["As in ", IMAGE, ", find x."]),
    "several": (
        "<image><image>\nWhich differs from\n<image>?",
        [(300, 200), (200, 300), (512, 512)],
        [IMAGE, IMAGE, "\nWhich differs from\n", IMAGE, "?"],
    ),
    "several lines": (
        "  <image>\n\nGiven: $\\angle A = 30^\\circ$\r\n\tFind ∠B — ½ of it.\n\n",
        [(500, 400)],
        ["  ", IMAGE, "\n\nGiven: $\\angle A = 30^\\circ$\r\n\tFind ∠B — ½ of it.\n\n"],
    ),
    "markup": (MARKUP, (), [MARKUP]),
}


TOLD = common.get_config().data.instruction.replace("{tag}", "think")


def example_of(question, sizes):
    rng = np.random.default_rng(len(question))
    images = tuple(
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        for width, height in sizes
    )
    return Example("7", "made", images, question, "1")


def builder_of(folder, **settings):
    settings = {"buckets": ((8192, 32768),)} | LIMITS | settings
    return PromptBuilder(load_tokenizer(str(folder)), config_json.from_folder(folder), **settings)


def conversation(content, system_prompt, instruction):
    """The turns as transformers takes them."""
    items = [item if isinstance(item, dict) else {"type": "text", "text": item} for item in content]
    if instruction and items[-1]["type"] == "text":
        items[-1] = {"type": "text", "text": f"{items[-1]['text']}\n{instruction}"}
    elif instruction:
        items.append({"type": "text", "text": f"\n{instruction}"})
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": items}]


def assert_rendered_as(builder, processor, example, messages):
    """Text, tokens and patches of our prompt are the processor's of these messages."""
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert builder.chat(example) == text
    inputs = processor(
        text=[text],
        images=list(example.images) or None,
        size={"shortest_edge": builder.min_pixels, "longest_edge": builder.max_pixels},
    )
    ours = builder.tokenize(example)
    np.testing.assert_array_equal(ours.tokens, inputs["input_ids"][0])
    assert builder.measure(example) == (len(ours.tokens), len(ours.patches))
    if example.images:
        np.testing.assert_array_equal(ours.grids, inputs["image_grid_thw"])
        patches = inputs["pixel_values"].astype(builder.patch_dtype)
        np.testing.assert_array_equal(ours.patches, patches)


@pytest.mark.parametrize("instruction", ["", TOLD], ids=["", "told"])
@pytest.mark.parametrize("system_prompt", ["", "You are a helpful assistant.", "Be\nbrief. é"])
def test_every_prompt_is_transformers_rendering(
    real_release, open_processor, system_prompt, instruction
):
    processor = open_processor(real_release)
    builder = builder_of(real_release, system_prompt=system_prompt, instruction=instruction)
    for question, sizes, content in QUESTIONS.values():
        messages = conversation(content, system_prompt, instruction)
        assert_rendered_as(builder, processor, example_of(question, sizes), messages)


def test_choices_are_lines_of_the_question(real_release, open_processor):
    image = Image.new("RGB", (300, 300), "red")
    row = {"id": 1, "source": "made", "question": "Which colour?", "answer": "B"}
    example = make_example(**row, images=[image], choices=["blue", "red", "1/2"])
    text = "Which colour?\n(A) blue\n(B) red\n(C) 1/2"
    messages = conversation([IMAGE, text], "", "")
    builder = builder_of(real_release, system_prompt="")
    assert_rendered_as(builder, open_processor(real_release), example, messages)


def test_without_a_system_prompt_there_is_no_system_turn_of_ours(real_release):
    """Qwen2.5-VL's template puts its own, Qwen3-VL's none."""
    text = builder_of(real_release, system_prompt="").chat(example_of("Why?", ()))
    own = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    has_own = config_json.from_folder(real_release).family == "qwen2_5_vl"
    rest = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert text == own * has_own + rest


@pytest.mark.parametrize("get_config", [qwen25vl_7b.get_config, qwen3vl_8b.get_config])
def test_the_shipped_configs_prompts(releases, open_processor, get_config):
    """The 7B and the 8B differ from the files at hand in sizes alone."""
    config = get_config()
    family = "qwen2_5_vl" if "2.5" in config.model.path else "qwen3_vl"
    config.model.path = str(releases[family])
    policy = policy_of(config)
    question, sizes, content = QUESTIONS["several lines"]
    instruction = config.data.instruction.replace("{tag}", config.data.think_tag)
    messages = conversation(content, config.data.system_prompt, instruction)
    processor = open_processor(releases[family])
    assert_rendered_as(policy.prompts, processor, example_of(question, sizes), messages)
    assert policy.config.eos_token_ids == (151645, 151643)


# As the mixture's sets ask, with sizes of their images.
KINDS = {
    "chartqa": ("<image>What is the difference in value between mutton and corn?", [(850, 600)]),
    "virl39k": (
        "<image>As shown in the figure, in $\\triangle ABC$, $\\angle C = 90^\\circ$ and "
        "$AC = BC = 3$. Point $D$ lies on $AB$ with $CD = \\sqrt{5}$. What is $AD$?",
        [(1654, 1240)],
    ),
    "several": ("<image> and <image>: which of them is a net of a cube?", [(640, 480), (480, 640)]),
    "a thin strip": ("<image>Read the scale.", [(3000, 40)]),
    "text alone": ("A train travels 120 km in 1.5 hours. How fast is it, in km/h?", ()),
}


def test_prompts_of_the_mixtures_kinds_fit_its_buckets(real_release):
    data = mixture.get_config().data
    names = ("min_pixels", "max_pixels", "buckets", "system_prompt", "instruction")
    builder = builder_of(real_release, **{name: data[name] for name in names})
    for question, sizes in KINDS.values():
        example = example_of(question, sizes)
        num_tokens, num_patches = builder.measure(example)
        assert builder.fits(builder.tokenize(example))
        assert num_patches // 4 < num_tokens < num_patches // 4 + 200


def test_a_template_for_text_alone_is_one_line(releases, tmp_path):
    """The tokenizer's own template of Qwen2.5-VL, without the file beside it."""
    for path in releases["qwen2_5_vl"].iterdir():
        if path.name != "chat_template.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="so it may be text-only") as error:
        builder_of(tmp_path)
    message = str(error.value)
    assert "\n" not in message
    assert repr(str(tmp_path)) in message and "chat_template.json" in message


NO_IMAGE = r"must write <\|image_pad\|> for an image, got "
TEXT_ONLY = {
    "fails": ("{{ '<|im_start|>' + messages[1].content }}", NO_IMAGE + "TypeError"),
    "no template": ("{% for m in messages %}", NO_IMAGE + "TemplateSyntaxError"),
    "drops images": ("{{ messages[1].content[-1].text }}", NO_IMAGE + "0 of them for two images"),
    "no default": ({"rag": CHAT_TEMPLATE}, "multiple chat templates with no default"),
}


@pytest.mark.parametrize(("template", "message"), TEXT_ONLY.values(), ids=TEXT_ONLY)
def test_a_template_that_shows_no_images_is_refused(template, message, policy):
    tokenizer = build_tokenizer(synthetic.texts())
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message) as error:
        PromptBuilder(tokenizer, policy.config, **LIMITS, buckets=((64, 64),))
    assert "\n" not in str(error.value)


def marked(name):
    """A template of images and text that can be told from others."""
    return f"{{# {name} #}}{CHAT_TEMPLATE}"


# Files of a folder -> the template that is taken; None where transformers refuses them.
FOLDERS = {
    "tokenizer's": ({"tokenizer_config.json": marked("own")}, "own"),
    "tokenizer's by name": (
        {"tokenizer_config.json": [{"name": "tool_use", "template": marked("tool")},
                                   {"name": "default", "template": marked("own")}]},
        "own",
    ),
    "jinja": (
        {"tokenizer_config.json": marked("own"), "chat_template.jinja": marked("jinja")}, "jinja"
    ),
    "json": (
        {"tokenizer_config.json": marked("own"), "chat_template.json": marked("json")}, "json"
    ),
    "json and jinja": (
        {"chat_template.jinja": marked("jinja"), "chat_template.json": marked("json")}, "json"
    ),
    "jinja and more": (
        {"chat_template.jinja": marked("jinja"),
         "additional_chat_templates/tool_use.jinja": marked("tool")},
        "jinja",
    ),
    "json and more": (
        {"chat_template.json": marked("json"),
         "additional_chat_templates/tool_use.jinja": marked("tool")},
        None,
    ),
    "processor's": (
        {"processor_config.json": marked("processor"), "chat_template.json": marked("json")},
        "processor",
    ),
    "by name in the processor's": (
        {"processor_config.json": {"default": marked("processor"), "rag": marked("rag")}},
        "processor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_the_template_is_the_one_autoprocessor_takes(name, policy, open_processor, tmp_path):
    files, expected = FOLDERS[name]
    policy.prompts.save_processor(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    for file, template in files.items():
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        if file.endswith(".json"):
            fields = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps(fields | {"chat_template": template}))
        else:
            path.write_text(template)
    if expected is None:
        with pytest.raises(ValueError, match="conflicting files"):
            open_processor(tmp_path)
        with pytest.raises(ValueError, match=r"a chat template in .*conflicting files") as e:
            load_tokenizer(str(tmp_path))
        assert "\n" not in str(e.value)
        return
    found = load_tokenizer(str(tmp_path)).get_chat_template()
    assert found == marked(expected)
    processor = open_processor(tmp_path)
    if processor.chat_template:  # it has none where the tokenizer's is the only one
        assert processor._resolve_chat_template(None) == found


def test_a_folder_without_any_template_gets_qwens(policy, tmp_path):
    policy.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert load_tokenizer(str(tmp_path)).chat_template == CHAT_TEMPLATE
