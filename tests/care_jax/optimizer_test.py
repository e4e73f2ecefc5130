import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from care_jax.optimizer import make_optimizer, make_schedule

SCHEDULE = dict(learning_rate=0.1, warmup_steps=0, num_steps=10, schedule="constant")


def optimizer_of(weight_decay=0.01, max_grad_norm=1.0, trainable_mask=None, **changes):
    return make_optimizer(
        make_schedule(**SCHEDULE | changes),
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        trainable_mask=trainable_mask,
    )


def params():
    return {
        "vision": {"w": jnp.ones((2, 3))},
        "text": {"w": jnp.full((3, 2), 2.0), "b": jnp.ones(2)},
    }


def run(optimizer, start, grads):
    state = optimizer.init(start)
    for grad in grads:
        updates, state = optimizer.update(grad, state, start)
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
    optimizer = optimizer_of(warmup_steps=2, schedule="cosine", num_steps=4, weight_decay=0.0)
    end, _ = run(optimizer, jnp.zeros(()), [jnp.ones(())] * 4)
    np.testing.assert_allclose(end, -(0.05 + 0.1 + 0.1 + 0.05), rtol=1e-5)


@pytest.mark.parametrize("mask", [{"vision": False, "text": True}, "full"])
def test_frozen_parameters_have_no_update_no_state_and_no_share_in_the_norm(mask):
    if mask == "full":
        mask = {"vision": {"w": False}, "text": {"w": True, "b": True}}
    start = params()
    grads = jax.tree.map(jnp.ones_like, start)
    grads["vision"]["w"] *= 1e6
    masked, state = run(optimizer_of(trainable_mask=mask), start, [grads] * 2)
    np.testing.assert_array_equal(masked["vision"]["w"], start["vision"]["w"])
    assert sorted({leaf.shape for leaf in jax.tree.leaves(state)}) == [(), (2,), (3, 2)]

    text = {"text": start["text"]}
    alone, _ = run(optimizer_of(), text, [{"text": grads["text"]}] * 2)
    jax.tree.map(np.testing.assert_array_equal, masked["text"], alone["text"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "linear"}, "schedule must be one of constant, cosine, not 'linear'"),
        ({"warmup_steps": 10}, "warmup_steps 10 must be .* below the 10 updates"),
        ({"warmup_steps": -1}, "warmup_steps -1 must be from 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive, not 0.0"),
    ],
)
def test_impossible_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        optimizer_of(**change)
