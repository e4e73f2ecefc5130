import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from care_jax.learning import optimizer
from care_jax.learning.optimizer import make_optimizer, make_schedule

SCHEDULE = dict(learning_rate=0.1, warmup_steps=0, num_steps=10, schedule="constant")


def optimizer_of(weight_decay=0.01, max_grad_norm=1.0, **changes):
    return make_optimizer(
        make_schedule(**SCHEDULE | changes), weight_decay=weight_decay, max_grad_norm=max_grad_norm
    )


def params():
    return {
        "vision": {"w": jnp.ones((2, 3))},
        "text": {"w": jnp.full((3, 2), 2.0), "b": jnp.ones(2)},
    }


def run(adamw, start, grads):
    state = adamw.init(start)
    for grad in grads:
        updates, state = adamw.update(grad, state, start)
        start = optax.apply_updates(start, updates)
    return start, state


def test_updates_equal_torch_adamw_with_decay_on_every_parameter():
    rng = np.random.default_rng(0)
    start = [rng.normal(size=shape).astype(np.float32) for shape in ((3, 4), (4,))]
    grads = [[3 * rng.normal(size=p.shape).astype(np.float32) for p in start] for _ in range(4)]
    theirs = [torch.nn.Parameter(torch.tensor(p)) for p in start]
    adamw = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.3)
    for step in grads:
        for parameter, grad in zip(theirs, step, strict=True):
            parameter.grad = torch.tensor(grad)
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        adamw.step()
    ours, _ = run(optimizer_of(weight_decay=0.3), start, grads)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other.detach().numpy(), atol=1e-5)


def test_warmup_moves_from_the_first_update_and_constant_stays():
    rate = make_schedule(learning_rate=8.0, warmup_steps=4, num_steps=10, schedule="constant")
    assert [float(rate(step)) for step in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_cosine_falls_from_the_peak_to_zero():
    rate = make_schedule(learning_rate=8.0, warmup_steps=2, num_steps=6, schedule="cosine")
    np.testing.assert_allclose(
        [rate(step) for step in (0, 1, 2, 4, 6, 9)], [4, 8, 8, 4, 0, 0], atol=1e-12
    )


def test_learning_rate_is_the_same_on_host_and_device():
    rate = make_schedule(learning_rate=1e-3, warmup_steps=3, num_steps=9, schedule="cosine")
    with jax.transfer_guard("disallow"):
        host = [float(rate(step)) for step in range(9)]
    np.testing.assert_allclose(jax.jit(jax.vmap(rate))(jnp.arange(9)), host, rtol=1e-5)


def test_optimizer_follows_the_schedule():
    """With a constant gradient AdamW's step is the learning rate itself."""
    adamw = optimizer_of(warmup_steps=2, schedule="cosine", num_steps=4, weight_decay=0.0)
    end, _ = run(adamw, jnp.zeros(()), [jnp.ones(())] * 4)
    np.testing.assert_allclose(end, -(0.05 + 0.1 + 0.1 + 0.05), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["text", "vision"]),
        ({"freeze_vision": True}, ["text"]),
    ],
)
def test_the_tower_is_frozen_on_request(options, expected):
    trained, frozen = optimizer.partition(params(), **options)
    assert sorted(trained) == expected and sorted([*trained, *frozen]) == ["text", "vision"]
    jax.tree.map(np.testing.assert_array_equal, optimizer.combine(trained, frozen), params())


def test_adapters_alone_are_trained():
    tree = params()
    tree["text"] |= {"lora_a": jnp.ones(2), "lora_b": jnp.ones(3), "lora_scale": jnp.ones(())}
    trained, frozen = optimizer.partition(tree)
    assert trained.keys() == {"text"} and trained["text"].keys() == {"lora_a", "lora_b"}
    jax.tree.map(np.testing.assert_array_equal, optimizer.combine(trained, frozen), tree)


def test_stochastic_rounding_keeps_the_mean_and_never_leaves_the_neighbours():
    value = np.float32(1 + 2**-7 * 0.3)  # three tenths of the way to the next bfloat16
    new = jnp.full((20000,), value)
    old = jnp.zeros((20000,), jnp.bfloat16)
    rounded = optimizer.round_like({"w": new}, {"w": old}, jax.random.key(0))["w"]
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.unique(rounded.astype(jnp.float32)), [1.0, 1 + 2**-7])
    np.testing.assert_allclose(rounded.astype(jnp.float32).mean(), value, atol=2e-4)


def test_rounding_keeps_what_it_need_not_change():
    exact = jnp.array([0.0, -1.5, jnp.inf, -jnp.inf, jnp.nan])
    rounded = optimizer.round_like(exact, exact.astype(jnp.bfloat16), jax.random.key(0))
    np.testing.assert_array_equal(rounded.astype(jnp.float32), exact)
    wide = jnp.array([1 + 2**-20])
    np.testing.assert_array_equal(optimizer.round_like(wide, wide, jax.random.key(0)), wide)
    count = jnp.int32(3)
    assert optimizer.round_like(count, count, jax.random.key(0)).dtype == jnp.int32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "linear"}, "schedule must be one of constant, cosine, got 'linear'"),
        ({"warmup_steps": 10}, "warmup_steps 10 must be .* below the 10 updates"),
        ({"warmup_steps": -1}, "warmup_steps -1 must be from 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive, got 0.0"),
    ],
)
def test_impossible_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        optimizer_of(**change)
