"""Memory and least time of a run, from programs compiled ahead of time without the devices.

Every program that trains or evaluates is compiled for the chips of a topology, with the shapes of
its largest batch. A chip's memory is the compiler's figure for the program, plus the arrays that
the run keeps on the chip but does not pass to it: optimizer state, reference policy, later batches.
The least time of a step is the roofline's, for the largest step and for drawn lengths; the bytes
between chips are those of the compiled collectives.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from care_jax.aot import collectives, roofline, shapes, step_sizes, workload
from care_jax.aot.collectives import Received
from care_jax.aot.in_flight import Concurrency, Memory, fastest
from care_jax.aot.roofline import Work
from care_jax.aot.step_sizes import StepSizes
from care_jax.aot.topology import find_topology, slice_of
from care_jax.config.checks import evaluated_stages, is_evaluated
from care_jax.decoding.queue import DecodePrograms
from care_jax.decoding.schedule import Scheduler, Sizes
from care_jax.decoding.simulation import Schedule
from care_jax.devices import sharding
from care_jax.devices.flops import Chip
from care_jax.devices.sharding import make_mesh
from care_jax.rl.rollout_programs import compile_decoder, rollout_sizes, sampling_of
from care_jax.run.policy import decode_shardings
from care_jax.run.run import (
    Run,
    abstract_params,
    abstract_state,
    compile_to_decode_layout,
    make_adamw,
    open_run,
)
from care_jax.stages import sft
from care_jax.stages.answering import answering_sizes
from care_jax.stages.rl import compile_update
from models import lora
from models.backbone import Params

_EXHAUSTED = re.compile(r"Used ([\d.]+)([GM]) of|temporaries \(([\d.]+)([GM])\)")
_UNITS = {"G": 2**30, "M": 2**20}


@dataclasses.dataclass(frozen=True)
class Program:
    """One program of a run."""

    name: str  # stage and function, such as "rl update"
    work: Work  # of its largest call
    num_calls: int = 1  # per step of its stage
    expected: tuple[Work, ...] = ()  # of every call of a step at the mean length, if one is given
    beside: int = 0  # bytes of other arrays that the run keeps on one chip meanwhile
    # Bytes on one chip; an output aliased to a donated argument is counted once. If the compiler
    # refused the program for its size, only the sum is known, as temporaries.
    arguments: int = 0
    outputs: int = 0
    temporaries: int = 0
    received: Received | None = None  # bytes from other chips; None if it was refused
    hlo: str = dataclasses.field(default="", repr=False)  # as compiled
    is_refused: bool = False  # the program alone is too large for the chip
    seconds: float = 0.0  # compile time

    @property
    def own_bytes(self) -> int:
        """Bytes on one chip, without `beside`."""
        return self.arguments + self.outputs + self.temporaries

    @property
    def total(self) -> int:
        """Bytes on one chip while it runs."""
        return self.own_bytes + self.beside

    def works(self, is_expected: bool) -> tuple[Work, ...]:
        """The work of every call of a step, for the largest or the expected step."""
        return self.expected if is_expected else (self.work,) * self.num_calls


@dataclasses.dataclass(frozen=True)
class Fit:
    """The result of compiling a run for a topology."""

    topology: str
    chip: Chip
    mesh: Mesh
    # In the order of a run; programs that need the results of a refused one are missing.
    programs: tuple[Program, ...]
    decode_prompts: int | None  # maximum prompts in flight that should fit; None without rollouts
    num_slices: int = 1  # TPU slices or GPU nodes
    largest: StepSizes | None = None  # the largest step of "rl"
    expected: StepSizes | None = None  # a step at the mean length, if one is given
    mean_response: float | None = None  # that mean, in tokens per response
    in_flight: Concurrency | None = None  # the fastest at that mean of those that should fit
    carried: int = 0  # bytes of a chip's slots between expected steps
    is_offloaded: bool = False  # they are in host memory

    @property
    def fullest(self) -> Program:
        """The program that needs the most memory."""
        return max(self.programs, key=lambda program: program.total)

    @property
    def is_fitting(self) -> bool:
        """Whether every program fits in the memory of a chip."""
        return self.fullest.total <= self.chip.hbm and not any(p.is_refused for p in self.programs)

    def step_seconds(self, stage: str, is_expected: bool = False) -> float:
        """The least time of the largest or the expected step of "sft" or "rl"."""
        return sum(
            work.seconds(self.chip, self.mesh.size)
            for program in self.programs
            if program.name.startswith(stage)
            for work in program.works(is_expected)
        )


def fit(
    config: ConfigDict, topology: str, mean_response: float | None = None, num_slices: int = 1
) -> Fit:
    """Compiles the programs of a configuration's stages "sft", "rl" and "evaluate".

    Args:
        topology: such as "v5e:4x4"; its chips are the mesh.
        mean_response: mean tokens of a response; None skips the expected step.
        num_slices: number of TPU slices, each of that topology.

    Raises:
        ValueError: the topology is unknown, or the configuration cannot run on it.
    """
    chips = find_topology(topology, num_slices)
    if mean_response is not None and mean_response <= 0:
        raise ValueError(f"--mean_response must be positive, in tokens, got {mean_response}")
    mesh = make_mesh(**config.mesh, devices=chips.devices, slices=chips.slices)
    run = open_run(config, pathlib.Path(), mesh=mesh, policy=shapes.policy(config))
    programs, decode_prompts, in_flight, largest, expected = [], None, None, None, None
    if "rl" in config.stages:
        largest = step_sizes.largest_step(run)
        expected = step_sizes.expected_step(run, mean_response) if mean_response else None
    if "sft" in config.stages:
        programs.append(_sft_program(run, mean_response))
    if largest is not None:
        of_rl, memory = rl_programs(run, chips.chip, largest, expected)
        programs += of_rl
        if memory is not None:
            decode_prompts = memory.most_prompts(run, rollout_sizes(run)[0].num_rows)
        if memory is not None and mean_response is not None:
            in_flight = fastest(run, chips.chip, memory, mean_response)
    if is_evaluated(config):
        programs += _evaluation_programs(run, expected or largest)
    if not programs:
        raise ValueError(
            f'stages must contain "sft", "rl" or "evaluate", got {tuple(config.stages)}; add one'
        )
    return Fit(
        topology=topology,
        chip=chips.chip,
        mesh=mesh,
        programs=tuple(programs),
        decode_prompts=decode_prompts,
        num_slices=len(set(chips.slices)),
        largest=largest,
        expected=expected,
        mean_response=mean_response,
        in_flight=in_flight,
        carried=carried_bytes(run, expected) if expected else 0,
        is_offloaded="rollouts" in config.model.offload,
    )


def carried_bytes(run: Run, step: StepSizes) -> int:
    """Bytes on one chip of the slots that a step leaves to the next, of the longest prompts."""
    sizes, _ = rollout_sizes(run)
    return shapes.slot_bytes(run, sizes) * step.num_left // sizes.num_slots


def update_program(run: Run, stage: str) -> Program:
    """The largest update of "sft" or "rl", compiled for the devices of the run."""
    if stage == "sft":
        return _sft_program(run, None)
    return _update_programs(run, step_sizes.largest_step(run), None)[-1]


def _sft_program(run: Run, mean_response: float | None) -> Program:
    adamw = make_adamw(run, "sft")
    state = abstract_state(run, adamw)
    num_microbatches, packed = step_sizes.largest_imitation(run)
    expected = ()
    if mean_response:
        expected = (workload.train(run, *step_sizes.expected_imitation(run, mean_response)),)
    batch = shapes.imitation_batch(run, num_microbatches * run.config.sft.microbatch_size)
    work = workload.train(run, num_microbatches, packed)
    # The next batch is already on the devices while a step runs.
    program = Program("sft step", work, 1, expected, beside=shapes.num_bytes(batch))
    step = sft.compile_step(run, adamw, sharding.of(state))
    return _compile(program, step, (state, batch))[0]


def rl_programs(
    run: Run, chip: Chip, largest: StepSizes, expected: StepSizes | None
) -> tuple[list[Program], Memory | None]:
    """The programs of a step of "rl", and what their decoding needs; None if no weights fit."""
    rollout, memory = _rollout_programs(run, chip, largest, expected)
    return rollout + _update_programs(run, largest, expected), memory


def _rollout_programs(
    run: Run, chip: Chip, largest: StepSizes, expected: StepSizes | None
) -> tuple[list[Program], Memory | None]:
    """The reshard and decode programs, and what decoding needs, if reshard was not refused."""
    rl, config = run.config.rl, run.policy.config
    adamw = make_adamw(run, "rl")
    state = abstract_state(run, adamw)
    kept = shapes.num_bytes(state) + shapes.reference_bytes(run)
    kept += (between := _slots_between(run, expected or largest))
    layout = workload.layout(run, is_decoding=True)
    moved = Work(ici_bytes=roofline.decoder_weights(config.text) * layout.itemsize)
    beside = kept - shapes.num_bytes(state.params)
    reshard = Program("rl reshard", moved, 1, (moved,) if expected else (), beside)
    reshard, params = _compile(reshard, compile_to_decode_layout(run), (state.params,))
    if params is None:
        return [reshard], None
    keeps_routes = bool(config.text.num_experts)

    def decoding(name, number, kept, *schedules):
        programs = compile_decoder(
            run, **sampling_of(run)[number]._asdict(), keeps_routes=keeps_routes
        )
        sizes = rollout_sizes(run)[number]
        return _decode_programs(run, programs, params, kept, name, sizes, *schedules)

    # DAPO's later draws decode beside the slots of the last step and those of the last draw.
    drawing = kept + between if run.objective.max_tries > 1 else kept
    compiled = decoding("rl decode", 0, drawing, largest.decoding, expected and expected.decoding)
    if shapes.num_rows(run) > rl.num_rollouts:
        schedules = largest.reflecting, expected and expected.reflecting
        compiled += decoding("rl reflect", 1, kept + between, *schedules)  # those of both steps

    fixed = kept + shapes.num_bytes(params)
    needed = [program.total - fixed for program in compiled]
    pairs = tuple(zip(needed[::2], needed[1::2], strict=True))
    return [reshard, *compiled], Memory(chip.hbm, fixed, pairs)


def _evaluation_programs(run: Run, step: StepSizes | None) -> list[Program]:
    """The decode programs of an evaluation; during a stage its state stays on the devices.

    `step` is a step of "rl", which may leave slots to the next.
    """
    base = lora.without(abstract_params(run))
    kept = shapes.num_bytes(base)
    for stage in evaluated_stages(run.config):
        state = abstract_state(run, make_adamw(run, stage))
        beside = 0
        if stage == "rl" and step is not None:
            beside = shapes.reference_bytes(run) + _slots_between(run, step)
        kept = max(kept, shapes.num_bytes(state) + beside)
    layout = decode_shardings(run.policy, run.mesh, run.config.decode_sharding_rules)
    params = sharding.abstract(jax.eval_shape(compile_to_decode_layout(run), base), layout)
    settings = run.config.evaluate
    programs = compile_decoder(run, temperature=settings.temperature, top_p=settings.top_p)
    sizes, schedule = answering_sizes(run), step_sizes.largest_evaluation(run)
    return _decode_programs(run, programs, params, kept, "evaluate", sizes, schedule, None)


def _decode_programs(
    run: Run,
    programs: DecodePrograms,
    params: Params,
    kept: int,
    name: str,
    sizes: Sizes,
    largest: Schedule,
    expected: Schedule | None,
) -> list[Program]:
    """The prefill and decode programs of one pass: "rl decode", "rl reflect" or "evaluate".

    `kept` becomes `Program.beside`.
    """
    rows_sharding, impl = run.decode_batch_sharding, run.attention(is_decoding=True)
    per_prompt = shapes.on_batch(rows_sharding, sizes.num_new)
    prompts = shapes.prompts(run, sizes.num_new, sizes.num_context_tokens)
    num_tokens = prompts.tokens.shape[1]
    slots = shapes.slots(run, sizes, num_tokens)

    def compiled(kind: str, jitted, arguments: tuple, work_of, calls_of) -> Program:
        """One program; each call of the worst step is counted as the largest one."""
        calls = calls_of(largest)
        work = max(map(work_of, calls), key=lambda work: (work.hbm_bytes, work.flops))
        works = tuple(map(work_of, calls_of(expected))) if expected else ()
        program = Program(f"{name}{kind}", work, len(calls), works, kept)
        return _compile(program, jitted, arguments)[0]

    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    key_data = shapes.on_batch(rows_sharding, sizes.num_new, *key.shape)(key.dtype)
    budget = shapes.on_batch(rows_sharding, sizes.num_new, sizes.num_rollouts)(jnp.int32)
    chosen = shapes.on_batch(rows_sharding, sizes.num_slots)(jnp.int32)
    return [
        compiled(
            " prefill",
            programs.admit,
            (params, slots, prompts, key_data, per_prompt(jnp.int32), budget, chosen),
            lambda bucket: workload.prefill(run, sizes, bucket),
            lambda schedule: schedule.prefills,
        ),
        compiled(
            "",
            programs.advance,
            (params, slots, jax.eval_shape(lambda: Scheduler(sizes).refill)),
            lambda call: workload.decode(run, sizes, call, impl),
            lambda schedule: schedule.calls,
        ),
    ]


def _update_programs(run: Run, largest: StepSizes, expected: StepSizes | None) -> list[Program]:
    """The update, and the forward that scores its batch under the reference or π_old."""
    adamw = make_adamw(run, "rl")
    state = abstract_state(run, adamw)
    plan, packed = largest.updates[0]
    batch = shapes.train_batch(run, len(plan.rows))
    num_updates = len(largest.updates)
    programs = compile_update(run, adamw, sharding.of(state))
    # The next batch is already on the devices while an update runs.
    later = shapes.num_bytes(batch) if num_updates > 1 else 0
    later += _slots_between(run, expected or largest)

    def compiled(name, jitted, params, beside, work_of, num_scores=1) -> Program:
        """A program that every update calls `num_scores` times."""
        work = work_of(run, plan.num_microbatches, packed)
        updates = expected.updates if expected else ()
        works = tuple(work_of(run, plan.num_microbatches, packed) for plan, packed in updates)
        program = Program(
            name,
            work,
            num_calls=num_updates * num_scores,
            expected=works * num_scores,
            beside=beside + later,
        )
        return _compile(program, jitted, (params, batch))[0]

    scored = []
    if num_scores := bool(run.objective.beta) + run.has_trainer_logp:
        beside = shapes.num_bytes(state)
        if run.has_reference_copy:
            params = shapes.reference(run)
        else:  # scored with the parameters of the state
            params = lora.without(state.params)
            beside -= shapes.num_bytes(params)
        scored = [compiled("rl score", programs.score, params, beside, workload.score, num_scores)]
    beside = shapes.reference_bytes(run)
    return [*scored, compiled("rl update", programs.update, state, beside, workload.train)]


def _compile(program: Program, jitted: Callable, arguments: tuple) -> tuple[Program, Any]:
    """The program with its compiled memory and collectives, and its results as abstract arrays.

    The results are None if the compiler refused it for its size.
    """
    logging.info("compiling %s", program.name)
    began = time.perf_counter()
    mesh = jax.tree.leaves(arguments)[0].sharding.mesh
    devices = mesh.devices.flat
    platform = {"gpu": "cuda"}.get(devices[0].platform, devices[0].platform)
    # Pallas asks the mesh for the kind of GPU that it lowers a kernel for, as there is none.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jitted.trace(*arguments).lower(lowering_platforms=(platform,))
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = _EXHAUSTED.search(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or needed is None:
            raise
        size, unit = filter(None, needed.groups())
        temporaries, seconds = int(float(size) * _UNITS[unit]), time.perf_counter() - began
        refused = {"temporaries": temporaries, "is_refused": True, "seconds": seconds}
        return dataclasses.replace(program, **refused), None
    seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    results = sharding.abstract(lowered.out_info, compiled.output_shardings)
    num_slices = len(set(map(slice_of, devices)))
    hlo = compiled.as_text()
    received = collectives.received(hlo, num_slices, len(devices) // num_slices)
    work, *expected = (
        dataclasses.replace(
            each,
            ici_bytes=received.total(each.num_passes),
            dcn_bytes=received.between_slices(each.num_passes),
        )
        for each in (program.work, *program.expected)
    )
    program = dataclasses.replace(
        program,
        work=work,
        expected=tuple(expected),
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        received=received,
        hlo=hlo,
        seconds=seconds,
    )
    return program, results


def _slots_between(run: Run, step: StepSizes) -> int:
    """Bytes on one chip of the slots that rl.carry_over keeps on it, see `decoding.queue`."""
    return 0 if "rollouts" in run.config.model.offload else carried_bytes(run, step)
