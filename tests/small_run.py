"""A run shrunk to seconds, and what it leaves behind."""

import contextlib
import functools
import json
import re

import jax
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

from care_jax.devices.sharding import make_mesh
from configs import common, tiny
from models.families import FAMILIES


@contextlib.contextmanager
def on_one_device():
    """Runs have one device, as on a laptop; the suite has eight virtual ones."""
    with pytest.MonkeyPatch.context() as patch:
        one = functools.partial(make_mesh, devices=jax.devices()[:1])
        patch.setattr("care_jax.run.run.make_mesh", one)
        yield


def small_config(family="qwen2_5_vl", **changes):
    """The demo's, or for a family without a tower the same decoder on word problems."""
    has_tower = FAMILIES[family].tower is not None
    config = tiny.get_config(family) if has_tower else _text_config(family)
    config.stages = ("sft", "rl", "evaluate")
    config.log_every = 1
    config.checkpoint_every = 2
    config.data.test.num_examples = 12
    config.sft.num_steps = 3
    config.sft.batch_size, config.sft.microbatch_size = 8, 2
    config.sft.warmup_steps = 1
    rl = config.rl
    rl.num_steps = 4
    rl.num_rollouts = 4
    rl.prompts_per_step = 8
    rl.prompts_per_update = rl.decode_prompts = 4
    rl.microbatch_size = 2
    rl.warmup_steps = 1
    config.care.beta = config.grpo.beta = 0.02
    config.evaluate.batch_size = 8
    config.update_from_flattened_dict(changes)
    return config


def _text_config(family):
    config = tiny.get_config()
    decoder = config.model.backbone.to_dict()["text_config"] | {"rope_scaling": None}
    config.model.backbone = {"model_type": family, "tie_word_embeddings": True, **decoder}
    for number, name in enumerate(("sft", "train", "test")):
        config.data[name] = common.source("word_problems", num_examples=4096, seed=number)
    config.data.buckets = ((96, 0), (192, 0))
    config.data.teacher_error = 0.0
    config.sft.row_tokens, config.rl.row_tokens = 384, 512
    config.sft.row_patches = config.rl.row_patches = 0
    return config


def metrics_of(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def without_times(records):
    return [
        {k: v for k, v in record.items() if not re.search("second|device_idle|host/", k)}
        for record in records
    ]


def state_of(workdir, step):
    """Parameters, optimizer state and step of a checkpoint of RL."""
    folder = workdir / "checkpoints" / "rl" / str(step) / "state"
    return ocp.PyTreeCheckpointer().restore(folder)


def exported(workdir):
    return load_file(workdir / "export" / "model.safetensors")
