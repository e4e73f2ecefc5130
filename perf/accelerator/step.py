"""One RL step of a backbone with random weights: prefill, decoding, scoring, update, each timed.

Programs, queue, packing and the arrays on the devices are those of a run. Calls that compile are
excluded from the times; the compiled programs are counted.

Letters: N prompts, R responses of a prompt.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from care_jax.aot import roofline, shapes, step_sizes, workload
from care_jax.aot.roofline import Work
from care_jax.batch import TrainBatch
from care_jax.decoding.queue import DecodeQueue, Request
from care_jax.devices import flops, sharding
from care_jax.devices.device_clock import DeviceClock
from care_jax.packing.layout import at_rows, at_tokens, lay_out
from care_jax.packing.plan import RowPlan
from care_jax.prompts.builder import TokenizedPrompt, prompt_sizes
from care_jax.rl.rollout import compile_decoder, rollout_sizes
from care_jax.rl.update_batch import copy_reference
from care_jax.run.run import Run, make_adamw, params_of, start_state
from care_jax.stages.rl import compile_update
from models import lora
from models.backbone import Params
from models.config import RELEASES, BackboneConfig
from models.release import config_json

BYTES_OF_FULL_TRAINING = 14  # per parameter: weights, moments, gradient, reference, decode layout
SHARE_OF_STATE = 0.6  # of the memory; the rest is for caches and activations
LORA_RANK = 64


def configuration(name: str, num_bytes: float, *, is_quick: bool) -> ConfigDict:
    """A shipped configuration, scaled down to the memory of these devices.

    Weights and moments are bfloat16. If the state of full training does not fit, LoRA is used.
    `name` is a file of `configs`, such as "qwen25vl_7b", `num_bytes` the memory of all devices.
    """
    config = importlib.import_module(f"configs.{name}").get_config()
    backbone = RELEASES[config.model.path]
    config.stages = ("rl",)
    config.model.path, config.model.backbone = "", config_json.to_hf(backbone)
    config.model.param_dtype = config.model.moments_dtype = "bfloat16"
    weights = roofline.decoder_weights(backbone.text)
    if BYTES_OF_FULL_TRAINING * weights > SHARE_OF_STATE * num_bytes:
        config.model.lora_rank = LORA_RANK
    config.mesh.update(data=0, fsdp=-1, tensor=1, sequence=1)
    config.rl.update(
        prompts_per_step=16 if is_quick else 32,
        prompts_per_update=8,
        decode_prompts=16 if is_quick else 32,
        max_response_tokens=512 if is_quick else 2048,
    )
    return config


class Compilations:
    """Counts compiled programs, and the seconds of tracing and compiling."""

    def __init__(self) -> None:
        self.number, self.seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, seconds: float, **_) -> None:
        if event.startswith("/jax/core/compile/"):
            self.seconds += seconds
            self.number += event.endswith("backend_compile_duration")


class Timed:
    """A jitted function that blocks on its result; `calls` has seconds, None if it compiled."""

    def __init__(self, function: Callable, compilations: Compilations):
        self._function, self._compilations = function, compilations
        self.calls: list[float | None] = []

    def __call__(self, *args):
        number, began = self._compilations.number, time.perf_counter()
        result = jax.block_until_ready(self._function(*args))
        seconds = time.perf_counter() - began
        self.calls.append(seconds if number == self._compilations.number else None)
        return result

    def row(self, part: str, works: Sequence[Work], num_tokens: Sequence[int]) -> dict[str, Any]:
        """Seconds, work and tokens, summed over the calls that did not compile."""
        row = {"part": part, "calls": 0, "seconds": 0, "tokens": 0, "flops": 0, "hbm_bytes": 0}
        for seconds, work, tokens in zip(self.calls, works, num_tokens, strict=True):
            if seconds is not None:
                call = 1, seconds, tokens, work.flops, work.hbm_bytes
                row |= {name: row[name] + x for name, x in zip([*row][1:], call, strict=True)}
        return row


def measure(run: Run, cases: dict[str, float | None], until: float) -> Iterator[dict[str, Any]]:
    """Rows of measurements for prefill, decode, score and update, or the reason of a failure.

    `cases` maps a name to the mean tokens of a response, None for the worst case; `until` is the
    `time.time()` after which no further part starts.
    """
    compilations = Compilations()
    step = Step(run, compilations)
    yield {
        "part": "start",
        "parameters": sum(x.size for x in jax.tree.leaves(step.state.params)),
        "lora_rank": run.config.model.lora_rank,
        "compiled_s": compilations.seconds,
    }
    parts = {"decode": step.decode, "score": step.score, "update": step.update}
    for part, case in itertools.product(parts, cases):
        labels = {"part": part, "case": case}
        if time.time() > until:
            yield {**labels, "failed": "not begun: out of time"}
            continue
        number, spent = compilations.number, compilations.seconds
        try:
            rows = parts[part](cases[case])
        except jax.errors.JaxRuntimeError as error:
            yield {**labels, "failed": str(error).splitlines()[0][:200]}
            if part == "update":
                return  # its state was donated
            continue
        stats = [device.memory_stats() or {} for device in run.mesh.local_devices]
        counted = {
            "compiled": compilations.number - number,
            "compiled_s": compilations.seconds - spent,
            "peak_bytes": max(each.get("peak_bytes_in_use", 0) for each in stats) or None,
        }
        yield from ({**labels, **row, **counted} for row in rows)


class Step:
    """The arrays that a step keeps on the devices, and its parts as methods.

    Each part takes the mean tokens of a response, None for the worst case, and returns its rows:
    part, seconds, calls, and the tokens, FLOPs and bytes of these calls.
    """

    def __init__(self, run: Run, compilations: Compilations):
        self._run, self._compilations = run, compilations
        _, adamw = make_adamw(run, "rl")
        self.state = start_state(run, random_params(run), adamw)
        self._reference = copy_reference(run, self.state.params)
        self._programs = compile_update(run, adamw, sharding.of(self.state))
        self._decode_params = self._programs.to_decode_layout(self.state.params)

    def decode(self, mean: float | None) -> list[dict[str, Any]]:
        """The prefills and decode steps; every response has its drawn length."""
        run, rl, (first, _) = self._run, self._run.config.rl, rollout_sizes(self._run)
        sizes, responses = draw(run, rl.prompts_per_step, rl.num_rollouts, mean)
        programs = compile_decoder(run, temperature=rl.temperature, top_p=rl.top_p, stops=False)
        both = programs.admit, programs.advance
        admit, advance = (Timed(function, self._compilations) for function in both)
        programs = dataclasses.replace(programs, admit=admit, advance=advance)
        prompts = prompts_of(run.policy.config, sizes)
        requests = [
            Request(index, prompt, limits=limits)
            for index, (prompt, limits) in enumerate(zip(prompts, responses, strict=True))
        ]
        queue = DecodeQueue(programs, run.policy.prompts, first, DeviceClock())
        decoded = queue.decode(self._decode_params, jax.random.key(0), requests)
        num_tokens = sum(int(rollouts.is_valid.sum()) for _, rollouts in decoded)
        schedule, _ = step_sizes.schedules(run, prompt_sizes(prompts), responses)
        assert (num_tokens, queue.num_steps) == (responses.sum(), schedule.num_steps)
        rules = run.config.decode_sharding_rules
        impl = sharding.attention_impl(run.config.model.attention, rules, run.mesh)
        prefills = [workload.prefill(run, first, bucket) for bucket in schedule.prefills]
        steps = [workload.decode(run, first, call, impl) for call in schedule.calls]
        prompt_tokens = [first.num_new * num_tokens for num_tokens, _ in schedule.prefills]
        return [
            admit.row("prefill", prefills, prompt_tokens),
            advance.row("decode", steps, [call.num_tokens for call in schedule.calls]),
        ]

    def score(self, mean: float | None) -> list[dict[str, Any]]:
        """The log-probabilities of an update's responses under the reference."""
        self._decode_params = None
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
            self.state, _ = timed(self.state, batch)
        model = self._run.config.model
        frozen = {"freeze_vision": model.freeze_vision, "freeze_decoder": model.freeze_decoder}
        frozen["has_adapters"] = bool(model.lora_rank)
        num_flops = flops.model_flops(self._run.policy.config, sizes, responses, **frozen)
        row = timed.row("update", [Work(flops=num_flops)] * 2, [int(responses.sum())] * 2)
        return [row | {"fill": plan.real_tokens / plan.computed_tokens}]

    def _batch(self, mean: float | None) -> tuple[TrainBatch, np.ndarray, np.ndarray, RowPlan]:
        """A batch of random tokens and advantages; sizes of prompts and responses; row plan."""
        run, rl, config = self._run, self._run.config.rl, self._run.policy.config
        sizes, responses = draw(run, rl.prompts_per_update, shapes.num_rows(run), mean)
        prompts, rng = prompts_of(config, sizes), np.random.default_rng(1)
        sizes = prompt_sizes(prompts)
        plan, _ = step_sizes.plan_update(run, "rl", sizes, responses)
        shape = (*responses.shape, rl.max_response_tokens)
        is_valid = np.arange(shape[-1]) < responses[..., None]
        tokens = np.where(is_valid, rng.integers(0, 256, shape), config.pad_token_id)
        ones = at_tokens(is_valid.astype(np.float32), plan)
        batch = TrainBatch(
            rows=lay_out(prompts, tokens.astype(np.int32), plan, config),
            token_advantage=at_tokens(rng.normal(size=shape).astype(np.float32) * is_valid, plan),
            old_logp=-10 * ones,
            ref_logp=-10 * ones,
            row_weight=ones,
            is_trained=ones.astype(bool),
            is_answer=np.zeros_like(ones, bool),
            prompt_weight=at_rows(np.ones(len(prompts), np.float32), plan),
        )
        return sharding.put_batch(batch, run.train_batch_sharding), sizes, responses, plan


def random_params(run: Run) -> Params:
    """Parameters with the stage's shapes and shardings, without adapters.

    A hash of the indices, because random bits would need memory beside the weights.
    """

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        def values():
            index = jnp.zeros(leaf.shape, jnp.uint32)
            for axis in range(len(leaf.shape)):
                along = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
                index = index * np.uint32(2654435761) + along
            index = (index ^ (index >> 15)) * np.uint32(2246822519)
            return (((index >> 8).astype(jnp.float32) / 2**23 - 1) / 25).astype(leaf.dtype)

        return jax.jit(values, out_shardings=leaf.sharding)()

    config = run.config.copy_and_resolve_references()
    config.model.lora_rank = 0
    return jax.tree.map(fill, params_of(dataclasses.replace(run, config=config)))


def draw(
    run: Run, num_prompts: int, num_rows: int, mean: float | None
) -> tuple[Int[np.ndarray, "N 2"], Int[np.ndarray, "N R"]]:
    """Tokens and patches of prompts, tokens of responses; all at their maximum if mean is None."""
    cap = run.config.rl.max_response_tokens
    if mean is None:
        sizes = np.tile(shapes.largest_bucket(run), (num_prompts, 1))
        return sizes, np.full((num_prompts, num_rows), cap)
    return step_sizes.draw(run, num_prompts, num_rows, mean, cap)


def prompts_of(config: BackboneConfig, sizes: Int[np.ndarray, "N 2"]) -> list[TokenizedPrompt]:
    """Prompts of about these sizes: a square image, if there are patches, and random text."""
    rng, vision, prompts = np.random.default_rng(0), config.vision, []
    for num_tokens, num_patches in sizes.tolist():
        side = int((num_patches / vision.merge_size**2) ** 0.5)
        grid, image = np.zeros((0, 3), np.int32), []
        if side:
            grid = np.array([[1, side * vision.merge_size, side * vision.merge_size]], np.int32)
            image = [config.image_token_id] * side**2
            image = [config.vision_start_token_id, *image, config.vision_end_token_id]
        text = rng.integers(0, 256, max(num_tokens - len(image), 1))
        tokens = np.array([*image, *text], np.int32)
        num_patches = int(grid.prod(-1).sum())
        patches = rng.normal(size=(num_patches, vision.patch_dim)).astype(np.float32)
        prompts.append(TokenizedPrompt(tokens, grid, patches))
    return prompts
