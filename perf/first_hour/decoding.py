"""Prefill and decode steps of a backbone with random weights, with the device's kernel and XLA's.

Programs, queue and arrays are those of a run; every response has its drawn length.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax

from care_jax.aot import step_sizes, workload
from care_jax.decoding.queue import DecodePrograms, DecodeQueue
from care_jax.decoding.rollout_buffer import Request
from care_jax.devices.device_clock import DeviceClock
from care_jax.prompts.builder import prompt_sizes
from care_jax.rl.rollout_programs import compile_decoder, rollout_sizes
from care_jax.run.run import Run, compile_to_decode_layout
from models.attention.packed import AttentionImpl
from models.backbone import Params
from perf.first_hour import backbone, tracing
from perf.first_hour.parts import Compilations, Timed, attempt

TRACED_MEAN = 12.0  # tokens of a response in the trace: about a hundred decode steps


def measure(name: str, *, is_small: bool, until: float) -> Iterator[dict[str, Any]]:
    """Rows of prefill and decode, by case and attention, and of the kernels of a trace."""
    params = None
    with Compilations() as compilations:
        cases = backbone.cases(is_small).items()
        for (case, mean), attention in itertools.product(cases, ("auto", "xla")):
            run = backbone.open_backbone(name, is_small=is_small, attention=attention, lora_rank=0)
            if params is None:
                params = compile_to_decode_layout(run)(backbone.random_params(run))
            labels = {"attention": attention_of(run).name}
            programs = programs_of(run)
            part = functools.partial(decode, run, programs, params, mean, compilations)
            yield from attempt({**labels, "case": case}, part, until, compilations)
            if mean is not None and attention == "auto":
                part = functools.partial(decode, run, programs, params, TRACED_MEAN, compilations)
                traced = functools.partial(tracing.trace, part)
                yield from attempt({**labels, "case": "trace"}, traced, until)


def attention_of(run: Run) -> AttentionImpl:
    """The implementation in decode steps."""
    return run.attention(is_decoding=True)


def programs_of(run: Run) -> DecodePrograms:
    """Those of its rollouts, in which no token ends a response."""
    rl = run.config.rl
    return compile_decoder(run, temperature=rl.temperature, top_p=rl.top_p, stops=False)


def decode(
    run: Run,
    programs: DecodePrograms,
    params: Params,
    mean: float | None,
    compilations: Compilations,
) -> list[dict[str, Any]]:
    """The row of all prefills and that of all decode steps of a step's rollouts."""
    rl, (first, _) = run.config.rl, rollout_sizes(run)
    sizes, responses = backbone.draw(run, rl.prompts_per_step, rl.num_rollouts, mean)
    both = programs.admit, programs.advance
    admit, advance = (Timed(function, compilations) for function in both)
    programs = dataclasses.replace(programs, admit=admit, advance=advance)
    prompts = backbone.prompts_of(run.policy.config, sizes)
    requests = [
        Request(index, prompt, limits=limits)
        for index, (prompt, limits) in enumerate(zip(prompts, responses, strict=True))
    ]
    queue = DecodeQueue(programs, run.policy.prompts, first, DeviceClock())
    decoded = queue.decode(params, jax.random.key(0), requests)
    num_tokens = sum(int(rollouts.is_valid.sum()) for _, rollouts in decoded)
    schedule, _ = step_sizes.schedules(run, prompt_sizes(prompts), responses)
    assert (num_tokens, queue.num_steps) == (responses.sum(), schedule.num_steps)
    prefills = [workload.prefill(run, first, bucket) for bucket in schedule.prefills]
    steps = [workload.decode(run, first, call, attention_of(run)) for call in schedule.calls]
    prompt_tokens = [first.num_new * num_tokens for num_tokens, _ in schedule.prefills]
    prefill = admit.row("prefill", prefills, prompt_tokens)
    decode = advance.row("decode", steps, [call.num_tokens for call in schedule.calls])
    return [prefill, decode | {"num_steps": schedule.num_steps}]
