"""A decode queue around a small policy, whose answers come back in the order of the requests."""

import operator

import jax
import jax.numpy as jnp
import numpy as np

from care_jax.decoding.queue import DecodeQueue, compile_decoding
from care_jax.decoding.sampler import DecodeOptions, DecodingAttention
from care_jax.decoding.schedule import Sizes
from care_jax.devices.device_clock import DeviceClock
from care_jax.devices.sharding import attention_impl, make_mesh
from configs import tiny
from models import backbone


def make_answer(
    policy,
    params,
    *,
    num_slots,
    num_rows,
    num_rollouts,
    max_tokens,
    num_context_tokens=0,
    temperature=1.0,
    top_p=1.0,
    stops=True,
    mesh=None,
    period=8,
    attention=None,
    keeps_routes=False,
):
    """(requests, key) -> Rollouts of all of them; the queue is its attribute `queue`."""
    mesh = mesh or make_mesh(1, 1, 1, devices=jax.devices()[:1])
    rules = tiny.get_config().decode_sharding_rules
    xla = attention_impl("xla", rules, mesh)
    options = DecodeOptions(
        config=policy.config,
        mesh=mesh,
        rules=rules,
        dtype=jnp.float32,
        closing_tag=policy.closing_tag,
        temperature=temperature,
        top_p=top_p,
        attention=attention or DecodingAttention(xla, xla),
        stops=stops,
        keeps_routes=keeps_routes,
    )
    shape = num_slots, num_rows, num_rollouts, max_tokens, num_context_tokens
    sizes, programs = Sizes(*shape, options.num_shards, period), compile_decoding(options)
    queue = DecodeQueue(programs, policy.prompts, sizes, DeviceClock())
    decode_params = backbone.to_decode_layout(params, policy.config, jnp.float32)

    def answer(requests, rng):
        answered = {}
        for indices, rollouts in queue.decode(decode_params, rng, requests):
            for row, index in enumerate(indices):
                assert index not in answered
                answered[index] = jax.tree.map(operator.itemgetter(row), rollouts)
        rows = [answered[index] for index in range(len(requests))]
        return jax.tree.map(lambda *rows: np.stack(rows), *rows)

    answer.queue = queue
    return answer
