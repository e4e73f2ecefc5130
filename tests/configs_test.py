"""Every configuration that is a run of its own can start, and asks for the tags it reads."""

import importlib

import jax
import pytest

from care_jax.checks import check_config
from care_jax.sharding import make_mesh

NAMES = ("mixture", "qwen25vl_3b", "qwen25vl_7b", "qwen3vl_4b", "qwen3vl_8b", "tiny", "real_images")


@pytest.mark.parametrize("name", NAMES)
def test_configuration_passes_the_checks_and_names_its_tags(name):
    config = importlib.import_module(f"configs.{name}").get_config()
    check_config(config, make_mesh(1, -1, 1, devices=jax.devices()[:1]))
    tags = (config.data.think_tag, "answer") if config.data.instruction else ()
    for tag in tags:
        assert f"<{tag}> </{tag}>" in config.data.instruction
    assert (config.data.think_tag == "reasoning") == name.startswith("qwen3")
