"""Scoring and update of a backbone with random weights, with memory beside `care_jax.aot`'s.

Programs, packing and arrays are those of a run.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from care_jax.aot import shapes, step_sizes
from care_jax.aot.roofline import Work
from care_jax.aot.topology import GPUS
from care_jax.batch import TrainBatch
from care_jax.devices import flops, sharding
from care_jax.packing.layout import at_rows, at_tokens, lay_out
from care_jax.packing.plan import RowPlan
from care_jax.prompts.builder import prompt_sizes
from care_jax.rl.update_batch import copy_reference
from care_jax.run.run import Run, make_adamw, start_state
from care_jax.stages.rl import compile_update
from models import lora
from perf.first_hour import backbone, tracing
from perf.first_hour.parts import Compilations, Timed, attempt

# TPU topologies of one host, by its number of chips.
_SHAPES = {1: "1x1", 4: "2x2", 8: "2x4"}
# JAX's names of cards that GPUS has under the name of a similar one.
_GPUS_BY_ANOTHER_NAME = {"a10g": "NVIDIA A10G", "l40s": "NVIDIA L40S"}
_TPUS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e"}


def measure(name: str, *, is_small: bool, until: float) -> Iterator[dict[str, Any]]:
    """Rows of what is trained, of scoring and updates, of a trace, and of the predicted memory."""
    num_bytes, devices = backbone.total_bytes(), jax.local_devices()
    topology = "h100:1" if is_small else topology_of(devices[0].device_kind, len(devices))
    predicting = _start_prediction(name, num_bytes, topology, is_small) if topology else None
    try:
        with Compilations() as compilations:
            run = backbone.open_backbone(name, is_small=is_small)
            update = Update(run, compilations)
            yield {
                "parameters": sum(x.size for x in jax.tree.leaves(update.state.params)),
                "lora_rank": run.config.model.lora_rank,
            }
            for case, mean in backbone.cases(is_small).items():
                for part, measured in (("score", update.score), ("update", update.update)):
                    work = functools.partial(measured, mean)
                    yield from attempt({"part": part, "case": case}, work, until, compilations)
                if mean is not None:
                    work = functools.partial(update.update, mean)
                    traced = functools.partial(tracing.trace, work)
                    yield from attempt({"case": "trace"}, traced, until)
        if predicting:
            predicted = functools.partial(_predicted, predicting, until)
            yield from attempt({"predicted for": topology}, predicted, until)
    finally:
        if predicting:
            predicting.kill()


class Update:
    """The state of an update on the devices; each part returns its rows.

    A part takes the mean tokens of a response, None for the worst case.
    """

    def __init__(self, run: Run, compilations: Compilations):
        self._run, self._compilations = run, compilations
        adamw = make_adamw(run, "rl")
        self.state = start_state(run, backbone.random_params(run), adamw, "rl")
        self._reference = copy_reference(run, self.state.params)
        self._programs = compile_update(run, adamw, sharding.of(self.state))

    def score(self, mean: float | None) -> list[dict[str, Any]]:
        """The log-probabilities of an update's responses under the reference."""
        params = lora.without(self.state.params) if self._reference is None else self._reference
        batch, sizes, responses, _ = self._batch(mean)
        timed = Timed(self._programs.score, self._compilations)
        for _ in range(2):
            timed(params, batch)
        num_flops = flops.model_flops(self._run.policy.config, sizes, responses) / 3
        return [timed.row("score", [Work(flops=num_flops)] * 2, [int(responses.sum())] * 2)]

    def update(self, mean: float | None) -> list[dict[str, Any]]:
        """One update."""
        batch, sizes, responses, plan = self._batch(mean)
        timed = Timed(self._programs.update, self._compilations)
        for _ in range(2):
            self.state, *_ = timed(self.state, batch)
        model = self._run.config.model
        frozen = {"freeze_vision": model.freeze_vision, "has_adapters": bool(model.lora_rank)}
        num_flops = flops.model_flops(self._run.policy.config, sizes, responses, **frozen)
        row = timed.row("update", [Work(flops=num_flops)] * 2, [int(responses.sum())] * 2)
        return [row | {"fill": plan.real_tokens / plan.computed_tokens}]

    def _batch(self, mean: float | None) -> tuple[TrainBatch, np.ndarray, np.ndarray, RowPlan]:
        """A batch of random tokens and advantages; sizes of prompts and responses; row plan."""
        run, rl, config = self._run, self._run.config.rl, self._run.policy.config
        sizes, responses = backbone.draw(run, rl.prompts_per_update, shapes.num_rows(run), mean)
        prompts, rng = backbone.prompts_of(config, sizes), np.random.default_rng(1)
        sizes = prompt_sizes(prompts)
        plan, _ = step_sizes.plan_update(run, "rl", sizes, responses)
        shape = (*responses.shape, rl.max_response_tokens)
        is_valid = np.arange(shape[-1]) < responses[..., None]
        tokens = np.where(is_valid, rng.integers(0, 256, shape), config.pad_token_id)
        ones = at_tokens(is_valid.astype(np.float32), plan)
        batch = TrainBatch(
            rows=lay_out(prompts, tokens.astype(np.int32), plan, run.policy.prompts),
            token_advantage=at_tokens(rng.normal(size=shape).astype(np.float32) * is_valid, plan),
            old_logp=-10 * ones,
            ref_logp=-10 * ones,
            row_weight=ones,
            is_trained=ones.astype(bool),
            is_compared=ones.astype(bool),
            is_answer=np.zeros_like(ones, bool),
            prompt_weight=at_rows(np.ones(len(prompts), np.float32), plan),
            drawn_logp=-10 * ones,
        )
        return sharding.put_batch(batch, run.train_batch_sharding), sizes, responses, plan


def topology_of(device_kind: str, num_devices: int) -> str | None:
    """The devices as a topology of `care_jax.aot`; None if there is no such topology."""
    for kind, (name, *_) in GPUS.items():
        if device_kind in (name, _GPUS_BY_ANOTHER_NAME.get(kind)):
            return f"{kind}:{num_devices}"
    if device_kind not in _TPUS or num_devices not in _SHAPES:
        return None
    shape = _SHAPES[num_devices] + ("x1" if _TPUS[device_kind] == "v5p" else "")
    return f"{_TPUS[device_kind]}:{shape}"


def print_prediction(name: str, num_bytes: str, topology: str, is_small: str) -> None:
    """Prints the bytes of each program according to `care_jax.aot`, as JSON.

    Of a process of its own, on the CPU, while another measures the devices.
    """
    from care_jax.aot.compile import fit

    config = backbone.configuration(name, float(num_bytes), is_small=is_small == "True")
    programs = {program.name: program.total for program in fit(config, topology).programs}
    print(json.dumps(programs))


def _start_prediction(*arguments) -> subprocess.Popen:
    code = "import sys; from perf.first_hour import updating; "
    code += "updating.print_prediction(*sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        # No cache: an entry for devices that are not there cannot be read again.
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"},
    )


def _predicted(process: subprocess.Popen, until: float) -> list[dict[str, Any]]:
    out, _ = process.communicate(timeout=max(until - time.time() - 5, 1))
    if process.returncode:
        raise RuntimeError("care_jax.aot ended with an error, see log.txt")
    return [{"programs": json.loads(out.splitlines()[-1])}]
