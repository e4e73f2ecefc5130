"""Compares the device's attention kernel with XLA before a stage uses it.

The comparison covers forward and backward, on packed rows of tokens and of patches of the stage's
shape. If the two differ or the kernel does not compile, the stage uses XLA. The decode kernel must
also be faster than XLA.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from care_jax.decoding.sampler import DecodingAttention
from care_jax.decoding.schedule import Sizes
from care_jax.devices import distributed, sharding
from care_jax.report.console import print_line
from care_jax.run.run import Run
from models.attention.cached import attend_cached, cache_mask, stored_keys, whole_blocks
from models.attention.packed import AttentionImpl, largest_difference, relative_difference

# Relative to the largest entry. Rounding gives 1e-2 in bfloat16, and 1e-3 if float32 matmuls are
# computed at reduced precision; a wrong mask gives about 1.
TOLERANCE = 5e-2

_TIMED_CALLS = 10


class NotCompiled(Exception):
    """The program of a kernel does not compile; says why in one line."""


def training_attention(run: Run, row_tokens: int, row_patches: int) -> AttentionImpl:
    """The attention implementation for packed rows of `row_tokens` and `row_patches`.

    With model.attention = "auto" it is the device's kernel, if there is one and it agrees with XLA.
    """
    return _checked(run, (row_tokens, row_patches), is_decoding=False)


def decoding_attention(run: Run, sizes: Sizes) -> DecodingAttention:
    """The implementations for prefill at the largest bucket and for decode steps of these sizes.

    With model.attention = "auto" each is the device's kernel, if there is one and it agrees with
    XLA; the decode kernel must also be faster than XLA.
    """
    largest = run.policy.prompts.buckets[-1]
    prefill = _checked(run, largest, is_decoding=True)
    return DecodingAttention(prefill, _steps_attention(run, sizes, largest[0]))


def _checked(run: Run, sizes: tuple[int, int], *, is_decoding: bool) -> AttentionImpl:
    """The implementation for rows of these numbers of tokens and patches."""
    impl = run.attention(is_decoding=is_decoding)
    if run.config.model.attention != "auto" or impl.name == "xla":
        return impl
    num_tokens, num_patches = sizes
    use = "prefill" if is_decoding else "training"
    xla = run.attention(is_decoding=is_decoding, name="xla")
    try:
        on_text, on_images = _differences(run, impl, sizes, is_decoding=is_decoding)
    except NotCompiled as reason:
        return _left_for_xla(use, impl, reason, xla)
    is_close = on_text <= TOLERANCE and on_images <= TOLERANCE  # false for NaN
    print_line(
        f"attention in {use}: the {impl.name} kernel differs from XLA by {on_text:.1e} on rows of "
        f"{num_tokens} tokens and by {on_images:.1e} on rows of {num_patches} patches, so "
        f"{'it' if is_close else 'XLA'} is used"
    )
    return impl if is_close else xla


def _differences(
    run: Run, impl: AttentionImpl, sizes: tuple[int, int], *, is_decoding: bool
) -> tuple[float, float]:
    """The kernel's differences from XLA on rows of text and on rows of images."""
    num_tokens, num_patches = sizes
    num_rows = sharding.num_shards(
        run.decode_batch_sharding if is_decoding else run.train_batch_sharding
    )
    text, vision = run.policy.config.text, run.policy.config.vision
    group, dtype = text.num_heads // text.num_kv_heads, jnp.dtype(run.config.model.compute_dtype)

    def difference(first, last, heads) -> float:
        compare = functools.partial(largest_difference, heads=heads, impl=impl, dtype=dtype)
        rows = [
            None if row is None else sharding.replicate(np.tile(row, (num_rows, 1)), run.mesh)
            for row in (first, last)
        ]
        return float(_compiled(jax.jit(compare), *rows)(*rows))

    on_text = difference(None, trial_reach(num_tokens), (text.num_kv_heads, group, text.head_dim))
    on_images = 0.0
    if num_patches and vision is not None:
        on_images = difference(*trial_images(num_patches), (vision.num_heads, 1, vision.head_dim))
    return on_text, on_images


def _compiled(jitted, *arguments) -> Callable:
    """The compiled program; raises NotCompiled on every process if one cannot compile it."""
    compiled, reason = None, ""
    try:
        compiled = jitted.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0] or "no reason given"
    reasons = list(filter(None, distributed.gather_json(reason)))
    if compiled is None or reasons:
        raise NotCompiled(reasons[0])
    return compiled


def _left_for_xla(
    use: str, impl: AttentionImpl, reason: NotCompiled, xla: AttentionImpl
) -> AttentionImpl:
    print_line(
        f"attention in {use}: the {impl.name} kernel does not compile here ({reason}), so XLA is "
        "used"
    )
    return xla


def _steps_attention(run: Run, sizes: Sizes, num_prompt_tokens: int) -> AttentionImpl:
    impl = run.attention(is_decoding=True)
    if run.config.model.attention != "auto" or impl.name == "xla":
        return impl
    xla = run.attention(is_decoding=True, name="xla")
    try:
        apart, ours, theirs = compare_steps(run, sizes, num_prompt_tokens)
    except NotCompiled as reason:
        return _left_for_xla("decode steps", impl, reason, xla)
    is_used = apart <= TOLERANCE and ours < theirs  # false for NaN
    print_line(
        f"attention in decode steps: the {impl.name} kernel differs from XLA by {apart:.1e} and "
        f"takes {ours:.2f} ms against {theirs:.2f} ms, so {'it' if is_used else 'XLA'} is used"
    )
    return impl if is_used else xla


def compare_steps(run: Run, sizes: Sizes, num_prompt_tokens: int) -> tuple[float, float, float]:
    """Compares the device's kernel and XLA in one decode step.

    Returns the `relative_difference` of a layer's outputs, and the times of all layers in ms. A
    call of one layer would take no longer than the host to start it, and the list of blocks to read
    is made once for all layers.

    Raises:
        NotCompiled: on every process, if the kernel does not compile on one of them.
    """
    impl, xla = (run.attention(is_decoding=True, name=name) for name in ("auto", "xla"))
    trial = _trial_step(run, sizes, num_prompt_tokens)
    num_layers = run.policy.config.text.num_layers

    def attended(impl: AttentionImpl) -> Callable[[int], jax.Array]:
        def store(q, *arrays):
            prefix, suffix = ((stored_keys(k, impl), v) for k, v in arrays[:2])
            return q, prefix, suffix, *arrays[2:]

        def attend(num_layers, q, prefix, suffix, on_prefix, on_suffix):
            mask = cache_mask(on_prefix, on_suffix, impl)
            layer = lambda _, q: attend_cached(q, prefix, suffix, mask)  # noqa: E731
            return jax.lax.fori_loop(0, num_layers, layer, q)

        stored = jax.jit(store)(*trial)
        attend = jax.jit(attend, static_argnums=0)
        if impl.name != "xla":
            for layers in (1, num_layers):
                _compiled(attend, layers, *stored)
        return lambda num_layers: attend(num_layers, *stored)

    both = attended(impl), attended(xla)
    apart = float(jax.jit(relative_difference)(*(of(1) for of in both)))
    times = [_milliseconds(functools.partial(of, num_layers)) for of in both]
    return apart, *distributed.gather_json(times)[0]  # every process must use the same


def _milliseconds(function: Callable[[], jax.Array]) -> float:
    """Time of a compiled call: the minimum of three means."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        jax.block_until_ready([function() for _ in range(_TIMED_CALLS)])
        times.append(1e3 * (time.perf_counter() - began) / _TIMED_CALLS)
    return min(times)


def _trial_step(run: Run, sizes: Sizes, num_prompt_tokens: int) -> tuple:
    """Random arguments of one layer's attention in a decode step, on the mesh; keys are [S, H].

    Prompts have a quarter to all of `num_prompt_tokens` tokens. Rows attend to up to the whole ring
    of the suffix cache, a third of it on average.
    """
    text, B, R = run.policy.config.text, sizes.num_slots, sizes.num_rows
    P, S = map(whole_blocks, (num_prompt_tokens, sizes.max_tokens))
    K, H = text.num_kv_heads, text.head_dim
    dtype = jnp.dtype(run.config.model.compute_dtype)

    def arrays():
        keys = iter(jax.random.split(jax.random.key(0), 7))
        normal = lambda *shape: jax.random.normal(next(keys), shape, dtype)  # noqa: E731
        part = jax.random.uniform(next(keys), (B, R, 1, 1))
        age = (S // 3 - jnp.arange(S)) % S
        prompt = P * jax.random.uniform(next(keys), (B, 1), minval=0.25)
        q = normal(B, R, 1, K, text.num_heads // K, H)
        prefix = normal(B, K, P, H), normal(B, K, P, H)
        suffix = normal(B, R, K, S, H), normal(B, R, K, S, H)
        return q, prefix, suffix, jnp.arange(P) >= P - prompt, age <= part**2 * (S - 1)

    return jax.jit(arrays, out_shardings=run.decode_batch_sharding)()


def trial_images(num_patches: int) -> tuple[Int[np.ndarray, " S"], Int[np.ndarray, " S"]]:
    """First and last patch of each patch's image, for images of unequal size, then padding."""
    first = np.arange(num_patches, dtype=np.int32)
    last, start = first.copy(), 0
    for part in (3, 8, 4, 16):
        stop = start + max(num_patches // part, 1)
        first[start:stop], last[start:stop] = start, stop - 1
        start = stop
    return first, last


def trial_reach(num_tokens: int) -> Int[np.ndarray, " S"]:
    """`batch.TreeRows.reach` of a row of trees with unequal lengths, padded to `num_tokens`."""
    rng = np.random.default_rng(0)
    reach, start = np.arange(num_tokens, dtype=np.int32), 0
    while True:
        prompt = int(rng.integers(num_tokens // 32, num_tokens // 8) + 1)
        branches = rng.integers(1, num_tokens // 16 + 2, 5).tolist()
        stop = start + prompt + sum(branches)
        if stop > num_tokens:
            return reach
        reach[start : start + prompt] = stop - 1
        end = start + prompt
        for length in branches:
            reach[end : end + length] = end + length - 1
            end += length
        start = stop
