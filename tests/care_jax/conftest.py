"""A small random policy, prompts and runs for the tests of everything that needs a backbone."""

import dataclasses
import io
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from rollout_script import CUE, LENGTHS, coin
from scripted import LOOP, B, Script, credit_of, groups_of

from care_jax.batch import Example, Rollouts
from care_jax.commands.reopened import Reopened
from care_jax.data.sources import open_source
from care_jax.devices.sharding import make_mesh
from care_jax.prompts.release_tokenizer import load_tokenizer
from care_jax.report.metrics import MetricWriter
from care_jax.rl import dynamic_sampling, update_batch
from care_jax.rl.rollout import asked, gather_groups
from care_jax.run.policy import policy_of
from care_jax.run.run import Run
from care_jax.stages import rl
from configs import tiny
from models import backbone
from models.release import config_json


@pytest.fixture(scope="session")
def picture():
    """Makes the bytes of an image file: smooth noise, another for each seed."""

    def make(seed=0, size=(96, 64), format="PNG", **options):
        noise = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), np.uint8)
        image = Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)
        file = io.BytesIO()
        image.save(file, format, **options)
        return file.getvalue()

    return make


@pytest.fixture(scope="session", params=["qwen2_5_vl", "qwen3_vl"])
def real_release(request, releases):
    """A folder with the real files of a family, less the weights."""
    return releases[request.param]


@pytest.fixture(scope="session")
def real_tokenizer(real_release):
    return load_tokenizer(str(real_release))


@pytest.fixture(scope="session")
def small_release(real_release, tmp_path_factory):
    """The real files with a backbone of 5M parameters, whose vocabulary and patches are real."""
    folder = tmp_path_factory.mktemp("small") / real_release.name
    shutil.copytree(real_release, folder)
    fields = json.loads((folder / "config.json").read_text())
    text, vision = fields.get("text_config", fields), fields["vision_config"]
    text |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}
    if "head_dim" in text:
        text["head_dim"] = 16
    text["rope_scaling"]["mrope_section"] = [4, 2, 2]
    vision |= {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    vision |= {"out_hidden_size": 32}
    layers = {"fullatt_block_indexes": [1], "deepstack_visual_indexes": [0]}
    vision |= {name: layers[name] for name in layers.keys() & vision.keys()}
    (folder / "config.json").write_text(json.dumps(fields))
    config = config_json.from_folder(folder)
    weights = tmp_path_factory.mktemp("weights")
    backbone.export(weights, backbone.init(config, jax.random.key(0)), config, jnp.float32)
    shutil.move(weights / "model.safetensors", folder)
    return folder


@pytest.fixture
def open_processor(monkeypatch):
    """Opens a folder as AutoProcessor does, less the video part, which asks for torchvision."""
    transformers = pytest.importorskip("transformers")

    def open_processor(folder):
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        stock = getattr(transformers, settings["processor_class"])

        class ImageProcessorOnly(stock):
            def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
                self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
                self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
                self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
                transformers.ProcessorMixin.__init__(
                    self, image_processor, tokenizer, chat_template=chat_template
                )

        auto = transformers.models.auto.processing_auto
        classes = {stock.__name__: ImageProcessorOnly}
        monkeypatch.setattr(auto, "processor_class_from_name", classes.get)
        processor = transformers.AutoProcessor.from_pretrained(folder)
        processor.image_processor = transformers.AutoImageProcessor.from_pretrained(
            folder, backend="pil"
        )
        return processor

    return open_processor


@pytest.fixture(scope="session")
def policy(request):
    """Of Qwen2.5-VL's form; a test of the other family asks for it:

    @pytest.mark.parametrize("policy", ["qwen3_vl"], indirect=True)
    """
    config = tiny.get_config(getattr(request, "param", "qwen2_5_vl"))
    config.data.buckets = ((48, 96), (64, 96), (96, 192))
    return policy_of(config)


@pytest.fixture(scope="session")
def params(policy):
    return backbone.init(policy.config, jax.random.key(0))


@pytest.fixture(scope="session")
def examples():
    """One image, another size, two images, none."""
    source = open_source("synthetic", num_examples=8, seed=5)
    two = Example(
        id="two",
        source="made",
        images=(Image.new("RGB", (48, 32), "red"), source[4].images[0]),
        question="<image><image>Which?",
        answer="2",
    )
    none = Example(id="none", source="made", images=(), question="1 + 1?", answer="2")
    return [source[0], source[5], two, none]


@pytest.fixture(scope="session")
def image_prompts(policy, examples):
    return [policy.prompts.tokenize(example) for example in examples]


@pytest.fixture(scope="session")
def prompts(policy, image_prompts):
    prompts = policy.prompts.batch(image_prompts)
    return jax.tree.map(jnp.asarray, prompts)


@pytest.fixture(scope="session")
def responses(policy):
    """Four prompts' three rows of random tokens, of every length from 1 to 9."""
    rng = np.random.default_rng(0)
    shape = (4, 3, 9)
    lengths = rng.permutation(np.arange(12) % 9 + 1).reshape(4, 3)
    is_valid = np.arange(9) < lengths[..., None]
    tokens = np.where(is_valid, rng.integers(0, 600, shape), policy.config.pad_token_id)
    rollouts = Rollouts(
        tokens=tokens.astype(np.int32),
        is_valid=is_valid,
        is_forced=np.zeros(shape, bool),
        logp=np.where(is_valid, rng.normal(-7, 0.1, shape), 0).astype(np.float32),
        embedding=rng.normal(size=(4, 3, policy.config.text.hidden_size)).astype(np.float32),
        is_complete=np.ones((4, 3), bool),
    )
    return jax.tree.map(jnp.asarray, rollouts)


@pytest.fixture
def make_run(policy, tmp_path):
    """Makes runs of the tiny configuration with some keys changed, each in a named folder."""
    runs = []

    def make(changes, folder="run"):
        config = tiny.get_config()
        config.update_from_flattened_dict(changes)
        mesh, workdir = make_mesh(1, 1, 1, devices=jax.devices()[:1]), tmp_path / folder
        workdir.mkdir(exist_ok=True)
        runs.append(Run(config, policy, mesh, workdir, MetricWriter(workdir)))
        return runs[-1]

    yield make
    for run in runs:
        run.metrics.close()


@pytest.fixture(scope="session")
def questions():
    """Makes text-only questions whose answers are their numbers, no two prompts of one length."""

    def make(lengths):
        return [
            Example(f"q{i}", "made", (), "1?" + " 1" * length, str(i))
            for i, length in enumerate(lengths)
        ]

    return make


@pytest.fixture
def opened(make_run, questions, params):
    """A run with random weights, for commands that sample groups; a coin judges the answers."""
    run = make_run(
        {
            "rl.num_rollouts": 6,
            "rl.decode_prompts": 4,
            "rl.max_response_tokens": 24,
            "care.max_context": 6,
            "care.cue": CUE,
        }
    )
    run = dataclasses.replace(run, reward=coin)
    examples = [
        dataclasses.replace(example, rationale=f"So {example.answer}.")
        for example in questions(LENGTHS)
    ]
    return Reopened(run, params, "sft", "sft 7", examples, len(examples))


@pytest.fixture
def groups(responses, policy, questions):
    examples = questions((7, 0, 5, 2))
    prompts = [policy.prompts.tokenize(example) for example in examples]
    return groups_of(responses, questions=asked(np.arange(B), examples, prompts))


@pytest.fixture
def whole_batch():
    """Makes the batch of one update over all B prompts, of one process, and its plan."""

    def whole_batch(run, groups):
        run.config.rl.update(prompts_per_step=B, prompts_per_update=B)
        groups = groups.replace(credit=credit_of(groups.rollouts.tokens.shape))
        return update_batch.train_batch(run, groups, gather_groups(groups))

    return whole_batch


@pytest.fixture
def run_loop(make_run, questions, responses, monkeypatch):
    """Runs the loop of STEPS steps, two updates in each, or until a script dies."""

    def run_loop(folder="run", dies_at=None, make_script=Script, changes=(), evaluate=None):
        script = make_script(responses, dies_at)
        run = make_run(LOOP | dict(changes), folder)
        monkeypatch.setattr(dynamic_sampling, "roll_out", script.roll_out)
        monkeypatch.setattr(rl, "compile_rollout", lambda *args: args)
        monkeypatch.setattr(rl, "compile_update", lambda *_: script.programs())
        params = {"vision": {"w": jnp.zeros(2)}, "text": {"w": jnp.float32(10)}}
        params = rl.train(run, params, questions(range(30)), evaluate)
        records = map(json.loads, run.metrics.path.read_text().splitlines())
        return script, params, list(records)

    return run_loop
