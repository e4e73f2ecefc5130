"""A decode queue around a small policy, whose answers come back in the order of the requests."""

import operator
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from care_jax.decoding.queue import DecodeQueue
from care_jax.decoding.schedule import Sizes
from care_jax.devices.device_clock import DeviceClock
from care_jax.devices.sharding import make_mesh, num_shards
from care_jax.rl.programs import compile_decoding
from care_jax.run.run import Run
from configs import tiny
from models import backbone


def make_answer(
    policy,
    params,
    *,
    num_seats,
    num_rows,
    num_rollouts,
    max_tokens,
    context_tokens=0,
    temperature=1.0,
    top_p=1.0,
    stops=True,
    mesh=None,
    period=8,
    attention=None,
):
    """(requests, key) -> Rollouts of all of them; the queue is its attribute `queue`."""
    mesh = mesh or make_mesh(1, 1, 1, devices=jax.devices()[:1])
    run = Run(tiny.get_config(), policy, mesh, pathlib.Path())
    shards = num_shards(run.decode_batch_sharding)
    sizes = Sizes(num_seats, num_rows, num_rollouts, max_tokens, context_tokens, shards, period)
    choice = dict(temperature=temperature, top_p=top_p, stops=stops)
    programs = compile_decoding(run, **choice, attention=attention)
    queue = DecodeQueue(run, programs, sizes, DeviceClock())
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
