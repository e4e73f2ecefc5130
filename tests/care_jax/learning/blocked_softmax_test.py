"""Log-probabilities by blocks of ids are those of the whole softmax, and so are their gradients.

The entropies beside them have none.
"""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import output_with

from care_jax.devices import placement, sharding
from care_jax.learning import blocked_softmax
from care_jax.learning.blocked_softmax import target_logprobs
from configs import common

NEVER = (5, 7)
SHAPES = [(600, 256), (601, 100), (1000, 4608)]  # vocabulary, block; 601 is prime


def is_never(ids):
    return (ids == NEVER[0]) | (ids == NEVER[1])


@pytest.fixture(autouse=True)
def short_halves(monkeypatch):
    monkeypatch.setattr(blocked_softmax, "_FEWEST", 4)


def example(vocab, num_tokens=37, width=32, scored=(20, 3)):
    """(table, hidden, targets, is_wanted, weights of the log-probabilities and of the entropies)"""
    keys = jax.random.split(jax.random.key(vocab), 5)
    table = jax.random.normal(keys[0], (vocab, width))
    hidden = jax.random.normal(keys[1], (len(scored), num_tokens, width))
    targets = jax.random.randint(keys[2], hidden.shape[:2], 8, vocab)
    is_wanted = jnp.arange(num_tokens) < jnp.array(scored)[:, None]
    weights = jax.random.normal(keys[3], (2, *targets.shape)) * is_wanted
    return table, hidden, targets, is_wanted, weights


def whole(table, hidden, targets):
    logits = jnp.where(is_never(jnp.arange(len(table))), -1e30, hidden @ table.T)
    logp = jax.nn.log_softmax(logits)
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    return jnp.take_along_axis(logp, targets[..., None], -1)[..., 0], jax.lax.stop_gradient(entropy)


def blocked(table, hidden, targets, is_wanted):
    return target_logprobs(table, hidden, targets, is_wanted, is_never)


def weighted(scores, weights):
    """The weighted sum of `scores`(table, hidden), and the scores where they are wanted."""

    def total(table, hidden):
        scored = jnp.stack(scores(table, hidden))
        return (scored * weights).sum(), scored * (weights != 0)

    return jax.value_and_grad(total, (0, 1), has_aux=True)


def assert_close(ours, theirs, rtol=2e-5):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=rtol * np.abs(np.asarray(b)).max())


@pytest.mark.parametrize(("vocab", "block"), SHAPES)
def test_blocks_change_nothing(monkeypatch, vocab, block):
    monkeypatch.setattr(blocked_softmax, "BLOCK", block)
    table, hidden, targets, is_wanted, weights = example(vocab)
    ours = weighted(lambda t, h: blocked(t, h, targets, is_wanted), weights)
    theirs = weighted(lambda t, h: whole(t, h, targets), weights)(table, hidden)
    assert_close(jax.jit(ours)(table, hidden), theirs)
    if vocab == SHAPES[0][0]:
        assert_close(ours(table, hidden), theirs)


@pytest.mark.parametrize("num_scored", [0, 1, 19, 20, 37])
def test_the_columns_after_the_last_scored_token_are_skipped(num_scored):
    table, hidden, targets, is_wanted, _ = example(600, scored=(num_scored, 0))
    logp, entropy = jax.jit(blocked)(table, hidden, targets, is_wanted)
    expected = whole(table, hidden, targets)
    computed = 19 if num_scored <= 19 else 37
    for a, b in zip((logp, entropy), expected, strict=True):
        np.testing.assert_allclose(a[:, :computed], b[:, :computed], atol=1e-5)
        assert not np.any(a[:, computed:])


def test_of_large_logits_a_certain_target_keeps_its_small_log_probability():
    """The target's logit is 100 and nine others are 90: -log π = log(1 + 9·exp(-10))."""
    table = jnp.zeros((64, 1)).at[10:20, 0].set(90.0).at[10, 0].set(100.0)
    ones = jnp.ones((1, 1, 1)), jnp.full((1, 1), 10), jnp.ones((1, 1), bool)
    logp, entropy = blocked(table, *ones)
    q = 9 * np.exp(-10.0)
    assert float(logp[0, 0]) == pytest.approx(-np.log1p(q), rel=1e-3)
    assert float(entropy[0, 0]) == pytest.approx(np.log1p(q) + 10 * q / (1 + q), rel=1e-3)


def num_matmuls(jaxpr):
    """Matmuls in a jaxpr, each counted once."""
    inner = [x for eqn in jaxpr.eqns for x in jax.extend.core.jaxprs_in_params(eqn.params)]
    return sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns) + sum(
        map(num_matmuls, inner)
    )


def test_a_frozen_table_costs_no_gradient(monkeypatch):
    """Logits forward and backward, and the hidden states' gradient; else the table's too."""
    monkeypatch.setattr(blocked_softmax, "_FEWEST", 1000)  # one length
    table, hidden, targets, is_wanted, weights = example(600)

    def loss(table, hidden):
        return (blocked(table, hidden, targets, is_wanted)[0] * weights[0]).sum()

    for argnums, expected in (((0, 1), 4), ((1,), 3)):
        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums))(table, hidden)
        assert num_matmuls(jaxpr.jaxpr) == expected


def test_gradients_in_bfloat16_are_added_in_float32():
    """Of 4096 tokens with one sign, whose rounding errors average out unless a sum is rounded."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(1 + 0.1 * rng.normal(size=(1, 4096, 16)), jnp.bfloat16)
    table = jnp.asarray(0.1 * rng.normal(size=(640, 16)), jnp.float32)
    targets = jnp.zeros((1, 4096), jnp.int32)
    every = jnp.ones(targets.shape, bool)
    found = jax.jit(jax.grad(lambda t: blocked(t, hidden, targets, every)[0].sum()))(table)
    assert found.dtype == jnp.float32
    x, w = np.asarray(hidden, np.float64)[0], np.asarray(table.astype(jnp.bfloat16), np.float64)
    logits = x @ w.T
    logits[:, NEVER] = -np.inf
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    expected = -p.T @ x
    expected[0] += x.sum(0)
    # The gradient of the target's logit, 1 - π, is itself rounded to 1.
    others = np.setdiff1d(np.arange(1, 640), NEVER)
    np.testing.assert_allclose(found[others], expected[others], rtol=2e-4)


RULES = {
    "FSDP": common.get_config().sharding_rules,
    "tensor parallel": (("batch", "fsdp"), ("embed", "fsdp"), ("vocab", "tensor")),
    "sequence": (("batch", "data"), ("tokens", "sequence"), ("vocab", ("tensor", "fsdp"))),
}


@pytest.mark.parametrize("name", RULES)
def test_shards_change_nothing(monkeypatch, name):
    monkeypatch.setattr(blocked_softmax, "BLOCK", 256)
    monkeypatch.setattr(blocked_softmax, "_FEWEST", 20)
    sizes = (1, 2, 2, 2) if name == "sequence" else (1, 4, 2, 1)
    mesh = sharding.make_mesh(*sizes, devices=jax.devices()[:8])
    table, hidden, targets, is_wanted, weights = example(1000, 40, scored=(20, 3, 9, 1, 0, 0, 7, 2))
    [place] = jax.tree.leaves(
        sharding.param_shardings({"table": ("vocab", "embed")}, {"table": table}, RULES[name], mesh)
    )
    rows = sharding.batch_sharding(mesh, RULES[name])
    ours = weighted(lambda t, h: blocked(t, h, targets, is_wanted), weights)
    ours = jax.jit(placement.placed(ours, RULES[name], mesh), out_shardings=(None, (place, rows)))
    found = ours(jax.device_put(table, place), jax.device_put(hidden, rows))
    assert_close(found, weighted(lambda t, h: whole(t, h, targets), weights)(table, hidden))


SCRIPT = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec
from care_jax.aot import collectives
from care_jax.aot.topology import find_topology
from care_jax.devices import placement, sharding
from care_jax.learning.blocked_softmax import target_logprobs
from configs import common

rules = common.get_config().sharding_rules
mesh = sharding.make_mesh(1, -1, 1, devices=find_topology("v5e:2x2").devices)
table, rows = (
    jax.NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((None, "fsdp"), ("fsdp",))
)

def loss(table, hidden, targets):
    scored = target_logprobs(table, hidden, targets, targets >= 0, lambda ids: ids == 7)
    return scored[0].sum()

arguments = (
    jax.ShapeDtypeStruct((4 * 4608, 512), jnp.float32, sharding=table),
    jax.ShapeDtypeStruct((4, 4096, 512), jnp.bfloat16, sharding=rows),
    jax.ShapeDtypeStruct((4, 4096), jnp.int32, sharding=rows),
)
grad = jax.jit(placement.placed(jax.grad(loss, (0, 1)), rules, mesh), out_shardings=(table, rows))
compiled = grad.trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
received = collectives.received(compiled.as_text()).by_collective(1)
gathered = received.pop("all-gather")
print(gathered, sum(received.values()))
print(compiled.memory_analysis().temp_size_in_bytes)
"""


@pytest.mark.exhaustive
def test_each_pass_gathers_the_table_once_and_keeps_the_logits_of_one_block():
    """Of four blocks on four chips, compiled for TPUs; the longest of four lengths."""
    numbers = output_with("libtpu", "-c", SCRIPT).split()[-3:]
    gathered, reduced, temporaries = map(int, numbers)
    block = 4608 * 512 * 3 // 4  # weights of a block that a chip receives
    # Four blocks in each pass, and one ahead.
    assert 2 * block * 8 <= gathered <= 2 * block * 9
    # The gradient of each block once, in float32; an all-reduce receives it twice.
    assert 4 * block * 4 <= reduced <= 1.01 * 4 * block * 8
    assert temporaries < 4 * 4096 * 4608  # the float32 logits of a block
