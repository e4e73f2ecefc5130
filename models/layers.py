"""Parameters with their logical axes, and the layers every part of a backbone shares.

A Flax NNX module declares: each parameter's shape, initial value and logical axes stand together,
the axes in the parameter's `axes` metadata. Functions compute: they take the plain dict that the
module splits into, so the same code serves stacked layers under a scan and single layers in
decoding. Weights are cast to the input's dtype where they are used; norms run in float32.

The dimension alphabet, here and in every einsum of this package: B batch, T query, S key, D model,
N heads, K kv heads, G query heads per kv head, H head dim, F mlp, V vocab, P patches or prompt
tokens, R rows per prompt, W window bins, C values of a patch, M patches merged into a feature.
Logical axes: layers, embed, heads, kv_heads, head_dim, mlp, vocab, or None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

Params = dict[str, Any]  # nested dicts of arrays
Axes = tuple[str | None, ...]


def normal(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: Axes, dtype: Any, *, fan_in: int
) -> nnx.Param:
    """A parameter drawn from N(0, 1/fan_in).

    At the releases' widths that is their fixed deviation of 0.02; at width 96 theirs would leave
    images, and what token stands where, all but unheard.
    """
    value = fan_in**-0.5 * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value.astype(dtype), axes=axes)


class Norm(nnx.Module):
    """Scale of an RMSNorm over one axis, the model's unless another is named."""

    def __init__(self, size: int, dtype: Any, axis: str = "embed"):
        self.scale = nnx.Param(jnp.ones((size,), dtype), axes=(axis,))


class LayerNorm(nnx.Module):
    """Scale and bias of a LayerNorm over all axes of `shape`."""

    def __init__(self, shape: tuple[int, ...], axes: Axes, dtype: Any):
        self.scale = nnx.Param(jnp.ones(shape, dtype), axes=axes)
        self.bias = nnx.Param(jnp.zeros(shape, dtype), axes=axes)


class Linear(nnx.Module):
    """A kernel from input axes to output axes, and a bias over the output axes."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: Axes,
        dtype: Any,
        *,
        bias: bool,
    ):
        self.kernel = normal(rngs, inputs + outputs, axes, dtype, fan_in=math.prod(inputs))
        if bias:
            self.bias = nnx.Param(jnp.zeros(outputs, dtype), axes=axes[len(inputs) :])


class MLP(nnx.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, rngs: nnx.Rngs, size: int, mlp_size: int, dtype: Any, *, bias: bool):
        self.gate = Linear(rngs, (size,), (mlp_size,), ("embed", "mlp"), dtype, bias=bias)
        self.up = Linear(rngs, (size,), (mlp_size,), ("embed", "mlp"), dtype, bias=bias)
        self.down = Linear(rngs, (mlp_size,), (size,), ("mlp", "embed"), dtype, bias=bias)


def stack(make: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """`num_layers` of what `make` declares, as one module with a leading "layers" axis."""
    layers = nnx.vmap(make)(rngs.split(num_layers))
    for _, node in nnx.iter_graph(layers):
        if isinstance(node, nnx.Param):
            node.set_metadata(axes=("layers", *node.get_metadata("axes")))
    return layers


def rms_norm(p: Params, x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """x / sqrt(mean(x²) + ε), normalised in float32, cast back, then scaled."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * p["scale"].astype(x.dtype)


def layer_norm(p: Params, x: Float[Array, "..."], eps: float) -> Float[Array, "..."]:
    """(x - mean) / sqrt(var + ε) over the axes that the scale has, scaled and shifted; float32."""
    axes = tuple(range(-p["scale"].ndim, 0))
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=axes, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=axes, keepdims=True) + eps)
    scale, bias = (p[name].astype(jnp.float32) for name in ("scale", "bias"))
    return (wide * scale + bias).astype(x.dtype)


def linear(p: Params, x: Array, num_inputs: int = 1) -> Array:
    """Product of the last `num_inputs` axes of x with the first of the kernel, plus any bias.

    A parameter named "transposed" is a kernel with its output axes first (the decode layout).
    """
    if "transposed" in p:
        y = _outputs_first(p["transposed"].astype(x.dtype), x, num_inputs)
    else:
        y = jnp.tensordot(x, p["kernel"].astype(x.dtype), num_inputs)
    return y + p["bias"].astype(x.dtype) if "bias" in p else y


def _outputs_first(kernel: Array, x: Array, num_inputs: int) -> Array:
    """`linear` with a kernel [*outputs, *inputs], computed outputs first and then turned.

    For the few tokens of a decoding step a CPU takes 0.6 of the time that x @ kernel takes. The
    barrier keeps the compiler from folding the turning of the small result into the product.
    """
    inputs = tuple(range(kernel.ndim - num_inputs, kernel.ndim))
    contracted = tuple(range(x.ndim - num_inputs, x.ndim))
    y = jax.lax.dot_general(kernel, x, ((inputs, contracted), ((), ())))
    num_outputs = kernel.ndim - num_inputs
    outputs = range(num_outputs)
    return jnp.moveaxis(jax.lax.optimization_barrier(y), outputs, range(-num_outputs, 0))


def mlp(p: Params, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """The gated MLP, from separate weights or from gate and up fused as "gate_up"."""
    if "gate_up" in p:
        both = linear(p["gate_up"], x)
        gate, up = both[..., 0, :], both[..., 1, :]
    else:
        gate, up = linear(p["gate"], x), linear(p["up"], x)
    return linear(p["down"], jax.nn.silu(gate) * up)
