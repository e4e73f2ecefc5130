"""Every arm of every experiment can start, at the size of the demo and at full size."""

import importlib
import pathlib

import jax
import pytest

from care_jax.config.checks import check_config, fill_in
from care_jax.devices.sharding import make_mesh
from configs.arms import with_arm

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "experiments"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
BASES = ("tiny", "tiny:qwen3_vl", "qwen25vl_3b", "qwen25vl_7b", "qwen3vl_4b", "qwen3vl_8b")


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", NAMES)
def test_every_arm_passes_the_checks_and_is_no_other(name, base):
    """Every key has an effect under its objective."""
    experiment = importlib.import_module(f"experiments.{name}")
    assert experiment.__doc__ and len(experiment.ARMS) > 1
    configs = []
    for arm, changes in experiment.ARMS.items():
        config = experiment.get_config(f"{arm}@{base}")
        config.stages = ("rl",)
        num_devices = config.mesh.tensor * config.mesh.sequence
        mesh = make_mesh(**config.mesh, devices=jax.devices()[:num_devices])
        check_config(fill_in(config, mesh), mesh, overridden=list(changes))
        configs.append(config.to_json_best_effort(sort_keys=True))
    assert len(set(configs)) == len(configs)


@pytest.mark.parametrize("name", NAMES)
def test_the_arm_that_is_taken_by_default_is_one_of_them(name):
    experiment = importlib.import_module(f"experiments.{name}")
    assert experiment.get_config().rl.num_rollouts == 8


ARMS = {"one": {"rl.num_rollouts": 3}}


def test_an_arm_changes_its_keys_alone_in_the_base_that_is_named():
    config, base = with_arm(ARMS, "one@tiny:qwen3_vl"), with_arm({"none": {}}, "none@tiny:qwen3_vl")
    assert base.model.backbone.model_type == "qwen3_vl"
    base.rl.num_rollouts = 3
    assert config.to_json_best_effort() == base.to_json_best_effort()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("two", "arm must be one of one, got 'two'; write arm or arm@base"),
        ("one@huge", "'one@huge' names a base that is not in configs/: huge"),
        ("one@tiny:gpt", "not 'gpt'"),
    ],
)
def test_a_name_that_stands_for_nothing_is_refused(argument, message):
    with pytest.raises(ValueError, match=message):
        with_arm(ARMS, argument)


@pytest.mark.parametrize("key", ["rl.nothing", "nowhere.rule"])
def test_a_key_that_does_not_exist_is_refused(key):
    with pytest.raises(ValueError, match=f"'one' changes {key}, which configs/common.py does not"):
        with_arm({"one": {key: 1}}, "one")
