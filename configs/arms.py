"""An arm of an experiment: a base configuration with some keys changed.

`--config=experiments/selector.py:farthest` is the arm `farthest` on `configs/tiny.py`,
`...:farthest@qwen25vl_7b` on `configs/qwen25vl_7b.py`, and `...:farthest@tiny:qwen3_vl` on
`configs/tiny.py:qwen3_vl`.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

Arms = Mapping[str, Mapping[str, Any]]


def with_arm(arms: Arms, argument: str) -> ConfigDict:
    """The configuration of an arm.

    Args:
        arms: changed keys of each arm, each in a section, such as "care.rule".
        argument: `arm`, `arm@base` or `arm@base:argument`; the base is a file of configs/.

    Raises:
        ValueError: there is no such arm, no such base, or no such key.
    """
    arm, _, base = argument.partition("@")
    name, _, base_argument = (base or "tiny").partition(":")
    if arm not in arms:
        raise ValueError(
            f"arm must be one of {', '.join(arms)}, got {arm!r}; write arm or arm@base"
        )
    try:
        module = importlib.import_module(f"{__package__}.{name}")
    except ModuleNotFoundError as error:
        raise ValueError(f"{argument!r} names a base that is not in configs/: {name}") from error
    config = module.get_config(base_argument) if base_argument else module.get_config()
    for key, value in arms[arm].items():
        section, _, name = key.partition(".")
        if name not in config.get(section, {}):
            raise ValueError(f"arm {arm!r} changes {key}, which configs/common.py does not have")
        config[section][name] = value
    return config
