"""Does a run fit, and how fast can it be? Compiles its programs for TPUs, without any TPU.

Every program of a run is compiled for the chips of a topology from the shapes of its largest batch.
What a chip must hold while one runs is what the compiler says of the program itself, and what the
run keeps meanwhile without the program seeing it: optimizer state, reference, another wave, later
batches.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.experimental import topologies
from jax.sharding import Mesh
from jaxtyping import Int
from ml_collections import ConfigDict

from care_jax import roofline, sft, shapes, sharding, train
from care_jax.checks import check_config, fill_in
from care_jax.roofline import CHIPS, Chip, Layout, Packed, Rows, Work
from care_jax.row_plan import RowPlan, TreeSizes, plan_rows
from care_jax.run import Run, abstract_state, make_adamw
from care_jax.sharding import make_mesh
from care_jax.train_step import TrainState
from models import lora

_NONE = np.zeros((1, 0), int)  # responses of a tree without any
_EXHAUSTED = re.compile(r"Used ([\d.]+)([GM]) of|temporaries \(([\d.]+)([GM])\)")
_UNITS = {"G": 2**30, "M": 2**20}
# What libtpu would else ask the network, about a host that is none of a TPU's.
_HOST = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a compiler need not be the only one
}


@dataclasses.dataclass(frozen=True)
class Program:
    """One program of a run.

    Attributes:
        name: its stage and what it does.
        arguments, outputs, temporaries: bytes on one chip; an output that takes the place of an
            argument is counted once. Of a program that the compiler refused for its size only
            the sum is known, as temporaries.
        beside: bytes that the run keeps on one chip meanwhile.
        work: what it computes and moves.
        num_calls: in one step of its stage.
        seconds: that compiling took.
        is_refused: it alone is too large for the chip.
    """

    name: str
    arguments: int
    outputs: int
    temporaries: int
    beside: int
    work: Work
    num_calls: int
    seconds: float
    is_refused: bool = False

    @property
    def total(self) -> int:
        """Bytes on one chip while it runs."""
        return self.arguments + self.outputs + self.temporaries + self.beside


@dataclasses.dataclass(frozen=True)
class Fit:
    """What compiling a run for a topology showed.

    Attributes:
        topology: as it was asked for.
        chip: its kind.
        mesh: its chips.
        programs: in the order of a run; where one was refused, those that need its results lack.
        decode_prompts: the largest wave that should fit; None without rollouts.
    """

    topology: str
    chip: Chip
    mesh: Mesh
    programs: tuple[Program, ...]
    decode_prompts: int | None

    @property
    def fullest(self) -> Program:
        """The program that decides whether the run fits."""
        return max(self.programs, key=lambda program: program.total)

    @property
    def is_fitting(self) -> bool:
        return self.fullest.total <= self.chip.hbm and not any(p.is_refused for p in self.programs)

    def step_seconds(self, stage: str) -> float:
        """The least time of a step of "sft" or "rl"."""
        return sum(
            program.num_calls * program.work.seconds(self.chip, self.mesh.size)
            for program in self.programs
            if program.name.startswith(stage)
        )


def fit(config: ConfigDict, topology: str) -> Fit:
    """Compiles the programs of a configuration's stages "sft" and "rl".

    Args:
        config: complete, see `configs/common.py`.
        topology: such as "v5e:4x4"; its chips are the mesh.

    Raises:
        ValueError: no such topology, or a configuration that cannot run on it.
    """
    chip, devices = find_topology(topology)
    mesh = make_mesh(**config.mesh, devices=devices)
    config = fill_in(config, mesh)
    check_config(config, mesh)
    run = Run(config, shapes.policy(config), mesh, pathlib.Path(), None)
    programs, decode_prompts = [], None
    if "sft" in config.stages:
        programs += _sft_programs(run)
    if "rl" in config.stages:
        rollout, decode_prompts = _rollout_programs(run, chip)
        programs += rollout + _update_programs(run)
    if not programs:
        raise ValueError(f'stages {tuple(config.stages)} train nothing; add "sft" or "rl"')
    return Fit(topology, chip, mesh, tuple(programs), decode_prompts)


def find_topology(name: str) -> tuple[Chip, Sequence[jax.Device]]:
    """The kind of chip and the devices of a topology.

    Raises:
        ValueError: there is none of that name, or no compiler for it.
    """
    kind = name.partition(":")[0]
    if kind not in CHIPS:
        raise ValueError(
            f"--topology must be one of {', '.join(CHIPS)} and its shape, such as v5e:4x4, got "
            f"{name!r}"
        )
    for question, answer in _HOST.items():
        os.environ.setdefault(question, answer)
    shape = [int(size) for size in re.findall(r"\d+", name.partition(":")[2])]
    host = {}
    if math.prod(shape) < 4:  # less than a host of four
        host = {"chips_per_host_bounds": [*shape, 1, 1, 1][:3]}
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **host)
    except Exception as error:
        reason = " ".join(str(error).split())
        if "not installed" in reason:
            reason = "its compiler is not there; run: pip install 'care_jax[tpu]'"
        raise ValueError(f"--topology {name!r} cannot be compiled for: {reason}") from error
    return CHIPS[kind], found.devices


def _sft_programs(run: Run) -> list[Program]:
    config, model = run.config.sft, run.config.model
    _, adamw = make_adamw(run, "sft")
    state = abstract_state(run, adamw)
    # As many rows as examples, all of them full: no step has more.
    num_rows = max(config.batch_size, config.microbatch_size)
    batch = shapes.imitation_batch(run, num_rows)
    num_tokens = num_rows * config.row_tokens
    num_patches = num_rows * config.row_patches
    packed = Packed(
        tokens=num_tokens,
        patches=num_patches,
        pairs=num_rows * int(roofline.tree_pairs(np.array([config.row_tokens]), _NONE).sum()),
        patch_pairs=num_rows * config.row_patches**2,
        scored=num_tokens,
    )
    work = roofline.train_work(
        run.policy.config,
        packed,
        _layout(run),
        num_microbatches=num_rows // config.microbatch_size,
        remat=model.remat,
        freeze_vision=model.freeze_vision,
        has_adapters=bool(model.lora_rank),
    )
    step = sft.compile_step(run, adamw, jax.tree.map(lambda x: x.sharding, state))
    # The next batch is put on the devices while a step runs.
    beside = shapes.num_bytes(batch)
    return [_compile("sft step", step, (state, batch), beside, work, 1)[0]]


def _rollout_programs(run: Run, chip: Chip) -> tuple[list[Program], int | None]:
    """Reshard, prefill, decode and reflect, each of what the one before gives; the largest wave."""
    rl, config = run.config.rl, run.policy.config
    _, adamw = make_adamw(run, "rl")
    state = abstract_state(run, adamw)
    kept = shapes.num_bytes(state) + _reference_bytes(run, state)
    size, num_waves = rl.decode_prompts, rl.prompts_per_step // rl.decode_prompts
    bucket, layout = shapes.largest_bucket(run), _layout(run, is_decoding=True)
    rows = Rows(size, *bucket, rl.num_rollouts, rl.max_response_tokens)
    programs = train.compile_rollout(run)
    compiled: list[Program] = []

    def add(name, jitted, arguments, beside, work, num_calls=num_waves):
        program, results = _compile(name, jitted, arguments, beside, work, num_calls)
        compiled.append(program)
        return results

    reshard = train.compile_update(run, adamw, jax.tree.map(lambda x: x.sharding, state))
    moved = Work(ici_bytes=roofline.decoder_weights(config.text) * layout.itemsize)
    beside = kept - shapes.num_bytes(state.params)
    params = add("rl reshard", reshard.to_decode_layout, (state.params,), beside, moved, 1)
    if params is None:
        return compiled, None
    prompts = shapes.prompts(run, size)
    places = shapes.on_batch(run.decode_batch_place, size)(jnp.int32)
    work = roofline.prefill_work(config, rows, layout)
    prefix = add("rl prefill", programs.prefill, (params, prompts), kept, work)
    if prefix is None:
        return compiled, None
    rng = jax.eval_shape(lambda: jax.random.key(0))
    work = roofline.decode_work(config, rows, layout)
    rollouts = add("rl decode", programs.decode, (params, prefix, rng, places), kept, work)
    if rollouts is None:
        return compiled, None
    if shapes.num_rows(run) > rl.num_rollouts:
        forced = shapes.forced(run, size)
        work = roofline.decode_work(
            config, dataclasses.replace(rows, rows=1), layout, num_forced=forced.tokens.shape[1]
        )
        add("rl reflect", programs.reflect, (params, prefix, rng, places, forced), kept, work)
    # A wave is dispatched before the one before it is verified and repaired.
    waiting = shapes.num_bytes((prefix, rollouts)) if num_waves > 1 else 0
    compiled[1:] = [dataclasses.replace(p, beside=p.beside + waiting) for p in compiled[1:]]

    # What a prompt takes is taken to be the same in a wave of any size.
    fixed = kept + shapes.num_bytes(params)
    per_prompt = (max(p.total for p in compiled[1:]) - fixed) / size
    most = (chip.hbm - fixed) / per_prompt
    sizes = range(layout.batch_parts, rl.prompts_per_step + 1, layout.batch_parts)
    fitting = (n for n in sizes if n <= most and rl.prompts_per_step % n == 0)
    return compiled, max(fitting, default=0)


def _update_programs(run: Run) -> list[Program]:
    """The update, and the forward that scores its batch for the reference or for π_old."""
    rl, care, model = run.config.rl, run.config.care, run.config.model
    _, adamw = make_adamw(run, "rl")
    state = abstract_state(run, adamw)
    plan, packed = packed_update(run, *shapes.largest_update(run))
    batch = shapes.train_batch(run, len(plan.rows))
    layout = _layout(run)
    num_updates = rl.prompts_per_step // rl.prompts_per_update
    programs = train.compile_update(run, adamw, jax.tree.map(lambda x: x.sharding, state))
    # The next batch is put on the devices while one is worked on.
    later = shapes.num_bytes(batch) if num_updates > 1 else 0
    compiled = []
    is_reframed = rl.objective == "care" and care.reflect_credit == "prompt_only"
    num_scores = bool(run.objective.beta) + (rl.old_logp == "trainer" or is_reframed)
    if num_scores:
        params = lora.without(state.params)
        beside = shapes.num_bytes(state) + later
        if not run.objective.beta or model.lora_rank:  # the parameters scored with are the state's
            beside -= shapes.num_bytes(params)
        work = roofline.score_work(
            run.policy.config, packed, layout, num_microbatches=plan.num_microbatches
        )
        score = programs.score, (params, batch)
        compiled.append(_compile("rl score", *score, beside, work, num_updates * num_scores)[0])
    work = roofline.train_work(
        run.policy.config,
        packed,
        layout,
        num_microbatches=plan.num_microbatches,
        remat=model.remat,
        freeze_vision=model.freeze_vision,
        has_adapters=bool(model.lora_rank),
    )
    beside = _reference_bytes(run, state) + later
    update = programs.update, (state, batch)
    return [*compiled, _compile("rl update", *update, beside, work, num_updates)[0]]


def packed_update(
    run: Run, prompt_sizes: Int[np.ndarray, "N 2"], num_tokens: Int[np.ndarray, "N R"]
) -> tuple[RowPlan, Packed]:
    """The rows of an update and what a forward over them computes.

    Args:
        run: the run.
        prompt_sizes: tokens and patches of each prompt.
        num_tokens: of each response.
    """
    rl = run.config.rl
    sizes = TreeSizes(*prompt_sizes.T, num_tokens)
    plan = plan_rows(
        sizes,
        row_tokens=rl.row_tokens,
        row_patches=rl.row_patches,
        microbatch_size=rl.microbatch_size,
    )
    parts = [part for row in plan.rows for part in row]
    prompts, patches = prompt_sizes[[part.tree for part in parts]].T
    responses = [num_tokens[part.tree, list(part.branches)][None] for part in parts]
    pairs = sum(
        int(roofline.tree_pairs(prompt, response)[0])
        for prompt, response in zip(prompts[:, None], responses, strict=True)
    )
    return plan, Packed(
        tokens=plan.computed_tokens,
        patches=plan.computed_patches,
        pairs=pairs,
        patch_pairs=int((patches.astype(np.int64) ** 2).sum()),
        scored=int(num_tokens.sum()),
    )


def _compile(
    name: str, jitted: Callable, arguments: tuple, beside: int, work: Work, num_calls: int
) -> tuple[Program, Any]:
    """The program, and its results as abstract arrays; None where it was refused for its size."""
    logging.info("compiling %s", name)
    began = time.perf_counter()
    lowered = jitted.trace(*arguments).lower(lowering_platforms=("tpu",))
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = _EXHAUSTED.search(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or needed is None:
            raise
        size, unit = (part for part in needed.groups() if part)
        seconds, needed = time.perf_counter() - began, int(float(size) * _UNITS[unit])
        return Program(name, 0, 0, needed, beside, work, num_calls, seconds, True), None
    seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    results = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        lowered.out_info,
        compiled.output_shardings,
    )
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporaries = memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    sizes = memory.argument_size_in_bytes, outputs, temporaries
    return Program(name, *sizes, beside, work, num_calls, seconds), results


def _layout(run: Run, is_decoding: bool = False) -> Layout:
    """How many shards batches, gathered weights and products have, as the rules say."""
    rules = run.config.decode_sharding_rules if is_decoding else run.config.sharding_rules

    def shards(axis: str) -> int:
        return sharding.num_shards_of(axis, rules, run.mesh)

    return Layout(
        batch_parts=shards("batch"),
        weight_parts=shards("embed"),
        product_parts=shards("mlp"),
        itemsize=jnp.dtype(run.config.model.compute_dtype).itemsize,
    )


def _reference_bytes(run: Run, state: TrainState) -> int:
    """Of the reference policy that stays on the devices, see `update_batch.copy_reference`."""
    model = run.config.model
    has_copy = run.objective.beta and not model.lora_rank and "reference" not in model.offload
    return shapes.num_bytes(state.params) if has_copy else 0
