"""Every configuration that is a run of its own can start, and asks for the tags it reads."""

import importlib

import jax
import pytest

from care_jax.config.checks import check_config, fill_in
from care_jax.devices.sharding import make_mesh
from configs import common

NAMES = (
    "mixture",
    "qwen25vl_3b",
    "qwen25vl_7b",
    "qwen3vl_4b",
    "qwen3vl_8b",
    "real_images",
    "small",
    "smollm_charts",
    "smollm_words",
    "tiny",
)


@pytest.mark.parametrize("name", NAMES)
def test_configuration_passes_the_checks_and_names_its_tags(name):
    config = importlib.import_module(f"configs.{name}").get_config()
    num_devices = config.mesh.tensor * config.mesh.sequence
    mesh = make_mesh(**config.mesh, devices=jax.devices()[:num_devices])
    check_config(fill_in(config, mesh), mesh)
    tags = (config.data.think_tag, "answer") if config.data.instruction else ()
    for tag in tags:
        told = config.data.instruction.replace("{tag}", config.data.think_tag)
        assert f"<{tag}> </{tag}>" in told
    assert (config.data.think_tag == "reasoning") == name.startswith("qwen3")


def test_sizes_left_to_the_mesh_are_one_for_each_device_of_the_batch():
    config = common.get_config()
    config.rl.microbatch_size = 16
    mesh = make_mesh(2, 2, 2)
    filled = fill_in(config, mesh)
    assert (filled.sft.microbatch_size, filled.rl.microbatch_size) == (8, 16)
    assert config.sft.microbatch_size == 0
