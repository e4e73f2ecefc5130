"""What all stages of one run share."""

from __future__ import annotations

import dataclasses
import pathlib

from jax.sharding import Mesh
from ml_collections import ConfigDict

from care_jax.metrics import MetricWriter
from care_jax.policy import Policy


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's configuration and the things that live as long as it does.

    Attributes:
        config: complete, see `configs/common.py`.
        policy: what is trained.
        mesh: the devices.
        workdir: where metrics, checkpoints and exports go.
        metrics: writes them.
    """

    config: ConfigDict
    policy: Policy
    mesh: Mesh
    workdir: pathlib.Path
    metrics: MetricWriter
