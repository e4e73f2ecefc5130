"""The kernels of decoding equal the dense products, and read no block that no row sees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from models.attention.cached import attend_cached, cache_mask, stored_keys
from models.attention.packed import XLA, AttentionImpl

# No power of two, no multiple of a block; a GPU reads two pieces of each.
B, R, K, G, H, P, S = 4, 3, 2, 3, 24, 101, 72
KERNELS = {name: AttentionImpl(name, interpret=True, key_block=16) for name in ("tpu", "gpu")}


def step(seed=0, num_read=None):
    """Queries, prefix, suffix, visible slots of both, of a step of rows that read the ring."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    if num_read is None:
        num_read = rng.integers(0, S, (B, R))
    age = (rng.integers(100) - np.arange(S)) % S
    on_suffix = age <= np.asarray(num_read)[..., None]
    on_prefix = np.arange(P) >= rng.integers(0, P, (B, 1))
    prefix, suffix = (
        (normal(B, K, H, P), normal(B, K, P, H)),
        (
            normal(B, R, K, H, S),
            normal(B, R, K, S, H),
        ),
    )
    return normal(B, R, 1, K, G, H), prefix, suffix, on_prefix, on_suffix[:, :, None]


@functools.partial(jax.jit, static_argnums=0)
def attended(impl, q, prefix, suffix, on_prefix, on_suffix):
    """Prefix and suffix are as XLA stores them."""
    prefix, suffix = ((stored_keys(k.mT, impl), v) for k, v in (prefix, suffix))
    return attend_cached(q, prefix, suffix, cache_mask(on_prefix, on_suffix, impl))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("seed", range(3))
def test_a_kernel_equals_dense_attention(name, seed):
    arguments = step(seed)
    expected = attended(XLA, *arguments)
    np.testing.assert_allclose(attended(KERNELS[name], *arguments), expected, atol=2e-6)


@pytest.mark.parametrize("name", KERNELS)
def test_rows_that_have_just_begun_and_full_rings_are_exact(name):
    arguments = step(num_read=np.where(np.arange(R) % 2, 0, S - 1)[None].repeat(B, 0))
    expected = attended(XLA, *arguments)
    np.testing.assert_allclose(attended(KERNELS[name], *arguments), expected, atol=2e-6)


@pytest.mark.parametrize("name", KERNELS)
def test_a_slot_without_a_prompt_reads_only_its_rows(name):
    q, prefix, suffix, on_prefix, on_suffix = step()
    on_prefix[1] = False
    out = attended(KERNELS[name], q, prefix, suffix, on_prefix, on_suffix)
    moved = tuple(a.at[1].add(1.0) for a in prefix)
    again = attended(KERNELS[name], q, moved, suffix, on_prefix, on_suffix)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(out, again)


@pytest.mark.parametrize("name", KERNELS)
def test_rows_that_see_nothing_are_finite_and_change_no_other_row(name):
    q, prefix, suffix, on_prefix, on_suffix = step()
    is_idle = np.zeros((B, R), bool)
    is_idle[0], is_idle[2, 1] = True, True  # a free slot, and a row of a busy one
    prompt, rows = on_prefix & ~is_idle.all(1, keepdims=True), on_suffix & ~is_idle[..., None, None]
    out = attended(KERNELS[name], q, prefix, suffix, prompt, rows)
    expected = attended(XLA, q, prefix, suffix, on_prefix, on_suffix)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[~is_idle], expected[~is_idle], atol=2e-6)


def test_the_tpu_kernel_reads_nothing_for_rows_that_see_nothing():
    q, prefix, suffix, on_prefix, on_suffix = step()
    nothing = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), (prefix, suffix))
    seen = np.zeros_like(on_prefix), np.zeros_like(on_suffix)
    out = attended(KERNELS["tpu"], q, *nothing, *seen)
    np.testing.assert_array_equal(out, np.zeros_like(out))


@pytest.mark.parametrize("name", KERNELS)
def test_blocks_that_no_row_sees_are_not_read(name):
    """NaN in such a block would spread: a weight of 0 times NaN is NaN."""
    q, prefix, suffix, on_prefix, on_suffix = step()

    def poisoned(a, is_seen, axis):
        padded = np.pad(is_seen, [(0, 0)] * (is_seen.ndim - 1) + [(0, -is_seen.shape[-1] % 16)])
        blocks = padded.reshape(*is_seen.shape[:-1], -1, 16)
        is_read = np.broadcast_to(blocks.any(-1, keepdims=True), blocks.shape)
        is_read = is_read.reshape(padded.shape)[..., : is_seen.shape[-1]]
        assert not is_read.all()
        shape = [1] * a.ndim
        shape[: is_seen.ndim - 1], shape[axis] = is_seen.shape[:-1], is_seen.shape[-1]
        return jnp.where(is_read.reshape(shape), a, jnp.nan)

    prefix_kv = [poisoned(a, on_prefix, axis) for a, axis in zip(prefix, (3, 2), strict=True)]
    suffix_kv = [
        poisoned(a, on_suffix[:, :, 0], axis) for a, axis in zip(suffix, (4, 3), strict=True)
    ]
    out = attended(KERNELS[name], q, prefix_kv, suffix_kv, on_prefix, on_suffix)
    expected = attended(XLA, q, prefix, suffix, on_prefix, on_suffix)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("heads", [2, 4])
def test_a_kernel_on_a_mesh_equals_dense_attention_on_one_device(name, heads):
    """Four devices for two kv heads: each head is computed twice."""
    mesh = jax.make_mesh((2, heads), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    impl = AttentionImpl(name, mesh, ("data",), ("tensor",), interpret=True, key_block=16)
    arguments = step()
    out = attended(impl, *arguments)
    np.testing.assert_allclose(out, attended(XLA, *arguments), atol=2e-6)


def test_several_new_tokens_of_a_row_are_left_to_dense_attention():
    q, prefix, suffix, on_prefix, on_suffix = step()
    q, on_suffix = jnp.tile(q, (1, 1, 2, 1, 1, 1)), np.tile(on_suffix, (1, 1, 2, 1))
    two = [
        attended(impl, q, prefix, suffix, on_prefix, on_suffix) for impl in (XLA, KERNELS["tpu"])
    ]
    np.testing.assert_array_equal(*two)
