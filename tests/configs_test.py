"""Every configuration that is a run of its own can start, and asks for the tags it reads."""

import importlib

import jax
import pytest

from care_jax.config import resume
from care_jax.config.checks import check_config, fill_in
from care_jax.devices.sharding import make_mesh
from configs import common

NAMES = (
    "care_released",
    "mixture",
    "qwen25_7b",
    "qwen25vl_3b",
    "qwen25vl_32b",
    "qwen25vl_3b_lora",
    "qwen25vl_72b",
    "qwen25vl_7b",
    "qwen25vl_7b_lora",
    "qwen3_8b",
    "qwen3vl_2b",
    "qwen3vl_30b",
    "qwen3vl_32b",
    "qwen3vl_4b",
    "qwen3vl_4b_lora",
    "qwen3vl_8b",
    "qwen3vl_8b_lora",
    "real_images",
    "small",
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
    assert (config.data.think_tag == "reasoning") == name.startswith("qwen3vl")


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("name", ["repair", "small", "tiny"])
def test_what_is_tried_on_a_laptop_runs_on_a_host_s_devices_too(name, num_devices):
    config = importlib.import_module(f"configs.{name}").get_config()
    mesh = make_mesh(**config.mesh, devices=jax.devices()[:num_devices])
    check_config(fill_in(config, mesh), mesh)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_lora")])
def test_a_run_may_go_on_on_a_gpu_of_another_size(name):
    """The memory changes no key that the weights depend on, and every size runs on one device."""
    module = importlib.import_module(f"configs.{name}")
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    configs = [module.get_config(memory) for memory in module.SIZES]
    for config in configs:
        check_config(fill_in(config, mesh), mesh)
    for stage in resume.TRAINING:
        first, *others = [resume.settings(config, stage) for config in configs]
        assert first["model.lora_rank"] and all(other == first for other in others)
    assert configs[0].rl.decode_prompts == min(config.rl.decode_prompts for config in configs)
    with pytest.raises(ValueError, match=r"one of .*80 GB, got '16'; write it .*FILE.py:"):
        module.get_config("16")


@pytest.mark.parametrize("size", [0, 2])
def test_a_microbatch_has_a_row_for_each_device_of_the_batch_at_least(size):
    config = common.get_config()
    config.sft.microbatch_size, config.rl.microbatch_size = size, 16
    mesh = make_mesh(2, 2, 2)
    filled = fill_in(config, mesh)
    assert (filled.sft.microbatch_size, filled.rl.microbatch_size) == (8, 16)
    assert config.sft.microbatch_size == size
