"""Parameters with logical axes, and the layers that all parts of a backbone share.

Flax NNX modules only declare parameters: shape, initial value and logical axes (metadata `axes`).
Functions compute on the plain dict that `nnx.split` gives, so the same code serves stacked layers
under a scan and single layers in decoding. Weights are cast to the input's dtype when they are
used; norms and rotary embeddings run in float32.

The dimension alphabet, here and in every einsum of this package: B batch, T query, S key, D model,
N heads, K kv heads, G query heads per kv head, H head dim, F mlp, V vocab, P patches or prompt
tokens, R rows per prompt, W window bins, C values of a patch, M patches merged into a feature.
Logical axes of parameters: layers, embed, heads, kv_heads, head_dim, mlp, vocab, expert,
expert_embed, or None; of activations and caches also batch, tokens, and attended_heads (kv heads
inside attention).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from models.config import VISION_ROPE_THETA, RopeScaling, TextConfig, VisionConfig

Params = dict[str, Any]  # nested dicts of arrays
Axes = tuple[str | None, ...]
Shape = tuple[int, ...]

REMATS = ("none", "dots", "layer")
ATTENDED = "attended"  # names attention's output and log-sum-exp, see `checkpointed`

Shard = Callable[[Array, Axes], Array]  # (x, its logical axes) -> x with a sharding constraint
# (inputs, cotangent of the outputs) -> gradient of a kernel, summed over the rows.
KernelGradient = Callable[[Array, Array], Array]
# (gradient of a kernel, its logical axes) -> the same, computed from local rows and then reduced.
Reduce = Callable[[KernelGradient, Axes], KernelGradient]
# (tokens, kernels of consecutive experts, index of the first) -> what these add to the output.
OfExperts = Callable[[Any, Any, Any], Array]
# (`OfExperts`, logical axes of the kernels) -> (tokens, kernels) -> the output of all experts.
OverExperts = Callable[[OfExperts, Sequence[Axes]], Callable[[Any, Any], Array]]


class _Placement(NamedTuple):
    """What `activation_sharding` was given."""

    shard: Shard
    reduce: Reduce
    over_experts: OverExperts


_placement: contextvars.ContextVar[_Placement | None] = contextvars.ContextVar(
    "placement", default=None
)


def _on_one_device(of: OfExperts, axes: Sequence[Axes]) -> Callable[[Any, Any], Array]:
    def outputs(tokens: Any, kernels: Any) -> Array:
        return of(tokens, [kernel.astype(tokens[0].dtype) for kernel in kernels], 0)

    return outputs


@contextlib.contextmanager
def activation_sharding(
    shard: Shard, reduce: Reduce = lambda of, _: of, experts: OverExperts = _on_one_device
) -> Iterator[None]:
    """Code traced inside constrains its activations with `shard`, sums gradients by `reduce`.

    `experts` distributes the experts of a sparse MLP.
    """
    token = _placement.set(_Placement(shard, reduce, experts))
    try:
        yield
    finally:
        _placement.reset(token)


def constrain(x: Array, *axes: str | None) -> Array:
    """x, sharded by its logical axes inside `activation_sharding`; unchanged outside."""
    placement = _placement.get()
    return x if placement is None else placement.shard(x, axes)


def over_experts(of: OfExperts, axes: Sequence[Axes]) -> Callable[[Any, Any], Array]:
    """The output of all experts; inside `activation_sharding` each device computes its own."""
    placement = _placement.get()
    return (_on_one_device if placement is None else placement.over_experts)(of, axes)


def normal(rngs: nnx.Rngs, shape: Shape, axes: Axes, dtype: Any, *, fan_in: int) -> nnx.Param:
    """A parameter drawn from N(0, 1/fan_in).

    Hugging Face initialises with σ = 0.02, about 1/√fan_in at the widths of released models. At
    width 96 that makes image features and positions too small to learn from.
    """
    value = fan_in**-0.5 * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value.astype(dtype), axes=axes)


class Norm(nnx.Module):
    """Scale of an RMSNorm, or scale and bias of a LayerNorm, over all axes of `shape`."""

    def __init__(self, *shape: int, dtype: Any, axes: Axes = ("embed",), bias: bool = False):
        self.scale = nnx.Param(jnp.ones(shape, dtype), axes=axes)
        if bias:
            self.bias = nnx.Param(jnp.zeros(shape, dtype), axes=axes)


class Linear(nnx.Module):
    """A kernel from input axes to output axes, and a bias over the output axes."""

    def __init__(
        self, rngs: nnx.Rngs, inputs: Shape, outputs: Shape, axes: Axes, dtype: Any, *, bias: bool
    ):
        self.kernel = normal(rngs, inputs + outputs, axes, dtype, fan_in=math.prod(inputs))
        if bias:
            self.bias = nnx.Param(jnp.zeros(outputs, dtype), axes=axes[len(inputs) :])


class Table(nnx.Module):
    """A vector of the model width for each of `num_rows`."""

    def __init__(self, rngs: nnx.Rngs, num_rows: int, size: int, axis: str | None, dtype: Any):
        self.table = normal(rngs, (num_rows, size), (axis, "embed"), dtype, fan_in=size)


GRADIENT = "kernel_gradient"  # see `linear`


def is_linear(path: tuple[str, ...]) -> bool:
    """Whether a parameter is a kernel of `linear`; those of experts are not."""
    return path[-1] == "kernel" and "experts" not in path


MLP_UP, MLP_DOWN = ("embed", "mlp"), ("mlp", "embed")


class MLP(nnx.Module):
    """An MLP of width F, see `mlp`."""

    def __init__(
        self, rngs: nnx.Rngs, size: int, width: int, dtype: Any, *, bias: bool, gated: bool = True
    ):
        if gated:
            self.gate = Linear(rngs, (size,), (width,), MLP_UP, dtype, bias=bias)
        self.up = Linear(rngs, (size,), (width,), MLP_UP, dtype, bias=bias)
        self.down = Linear(rngs, (width,), (size,), MLP_DOWN, dtype, bias=bias)


def stack(make: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """`num_layers` modules from `make`, stacked into one with a leading "layers" axis."""
    layers = nnx.vmap(make)(rngs.split(num_layers))
    for _, node in nnx.iter_graph(layers):
        if isinstance(node, nnx.Param):
            node.set_metadata(axes=("layers", *node.get_metadata("axes")))
    return layers


def norm(p: Params, x: Float[Array, "..."], eps: float) -> Float[Array, "..."]:
    """LayerNorm if the norm has a bias, otherwise RMSNorm."""
    return layer_norm(p, x, eps) if "bias" in p else rms_norm(p, x, eps)


def rms_norm(p: Params, x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """x / sqrt(mean(x²) + ε), normalised in float32, cast back, then scaled."""
    return _rms_norm(p["scale"], x, eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(scale, x, eps):
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def _rms_norm_fwd(scale, x, eps):
    return _rms_norm(scale, x, eps), (scale, x)


def _rms_norm_bwd(eps, saved, g):
    """Recomputes from x alone: without remat, autodiff would also save float32 copies of x."""
    scale, x = saved
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    unit = wide * inverse
    dunit = (g * scale.astype(g.dtype)).astype(jnp.float32)
    along = jnp.mean(dunit * unit, axis=-1, keepdims=True)
    dscale = (g.astype(jnp.float32) * unit).sum(range(x.ndim - 1))
    return dscale.astype(scale.dtype), (inverse * (dunit - along * unit)).astype(x.dtype)


_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)


def layer_norm(p: Params, x: Float[Array, "..."], eps: float) -> Float[Array, "..."]:
    """(x - mean) / sqrt(var + ε) over the axes of the scale, scaled and shifted, in float32."""
    axes = tuple(range(-p["scale"].ndim, 0))
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=axes, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=axes, keepdims=True) + eps)
    scale, bias = (p[name].astype(jnp.float32) for name in ("scale", "bias"))
    return (wide * scale + bias).astype(x.dtype)


def linear(p: Params, x: Array, axes: Axes, num_inputs: int = 1) -> Array:
    """Contracts the last `num_inputs` axes of x with the first of the kernel; adds any bias.

    `axes` are the kernel's logical axes. A parameter named "transposed" is a kernel
    [*outputs, inputs] (the decode layout). "lora_a" and "lora_b" are a LoRA adapter, see
    `models.lora`. `GRADIENT` are zeros of the kernel's shape in float32, which then receive its
    gradient.
    """
    if "transposed" in p:
        y = outputs_first(p["transposed"].astype(x.dtype), x, num_inputs)
    else:
        y = product(x, p["kernel"], num_inputs, axes, p.get(GRADIENT))
    if "lora_a" in p:
        narrow = product(x, p["lora_a"], num_inputs, (*axes[:num_inputs], None))
        change = product(narrow, p["lora_b"], 1, (None, *axes[num_inputs:]))
        y = y + p["lora_scale"].astype(x.dtype) * change
    # The type of `product` is lost in functools.partial.
    return add_bias(y, p["bias"]) if "bias" in p else y  # pyright: ignore[reportReturnType]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def product(
    x: Array, kernel: Array, num_inputs: int, axes: Axes, zeros: Array | None = None
) -> Array:
    """Contracts the last `num_inputs` axes of x with the first of the kernel, in x's dtype.

    A device accumulates in float32 for every dtype. The kernel's gradient is summed over tokens and
    devices in float32. The kernel receives it in its own dtype, unless there are float32 `zeros` to
    receive it. `axes` are the kernel's logical axes.
    """
    return jnp.tensordot(x, kernel.astype(x.dtype), num_inputs)


def _product_fwd(x, kernel, num_inputs, axes, zeros):  # `product` would hide the matmul from remat
    receiver = None if zeros is None else ()  # of the gradient; a bool would be traced
    return jnp.tensordot(x, kernel.astype(x.dtype), num_inputs), (x, kernel, receiver)


def _product_bwd(num_inputs, axes, saved, g):
    x, kernel, receiver = saved
    num_rows = x.ndim - num_inputs
    outputs = tuple(range(num_rows, g.ndim)), tuple(range(num_inputs, kernel.ndim))
    # A TPU would compute a cheap producer of g or h again for every tile of each matmul.
    g = jax.lax.optimization_barrier(g)
    dx = jax.lax.dot_general(g, kernel.astype(g.dtype), (outputs, ((), ())))
    placement = _placement.get()
    if placement is None and x.dtype == jnp.float32:  # merging axes would lose their sharding
        # XLA:CPU takes about half the time to contract one merged row axis: 58 instead of 110 ms.
        # It has no such fast matmul for bfloat16 accumulated in float32.
        num_rows, merged = 1, math.prod(x.shape[:num_rows])
        x, g = (
            a.reshape(merged, *a.shape[-n:]) for a, n in ((x, num_inputs), (g, len(outputs[0])))
        )
    rows = tuple(range(num_rows)), tuple(range(num_rows))
    gradient = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(rows, ((), ())),
        preferred_element_type=jnp.float32,
    )
    if placement is not None:
        gradient = placement.reduce(gradient, axes)
    total = gradient(x, g)
    return (dx, total.astype(kernel.dtype), None) if receiver is None else (dx, None, total)


product.defvjp(_product_fwd, _product_bwd)


@jax.custom_vjp
def add_bias(y: Array, bias: Array) -> Array:
    """y + bias, broadcast over the leading axes; the bias's gradient is summed in float32."""
    return y + bias.astype(y.dtype)


def _add_bias_bwd(bias, g):
    total = g.sum(range(g.ndim - bias.ndim), dtype=jnp.float32)
    return g, total.astype(bias.dtype)


add_bias.defvjp(lambda y, bias: (y + bias.astype(y.dtype), bias), _add_bias_bwd)


def outputs_first(kernel: Array, x: Array, num_inputs: int) -> Array:
    """x times a kernel [*outputs, inputs], in x's dtype.

    The kernel has the last `num_inputs` axes of x merged into one; a TPU would copy it otherwise.
    On a CPU a decode step takes 0.8 times as long as with kernels [inputs, *outputs].
    """
    x = x.reshape(*x.shape[: x.ndim - num_inputs], -1)
    y = jnp.tensordot(kernel, x, (-1, -1))
    num_outputs = kernel.ndim - 1
    return jnp.moveaxis(y, range(num_outputs), range(-num_outputs, 0))


def mlp(p: Params, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """down(silu(gate(x)) * up(x)); without a gate down(gelu(up(x))), with the tanh GELU.

    "gate_up" is gate and up fused (the decode layout).
    """
    if "gate_up" in p:
        both = linear(p["gate_up"], x, MLP_UP)
        h = jax.nn.silu(both[..., 0, :]) * both[..., 1, :]
    elif "gate" in p:
        h = jax.nn.silu(linear(p["gate"], x, MLP_UP)) * linear(p["up"], x, MLP_UP)
        h = jax.lax.optimization_barrier(h)  # see `_product_bwd`
    else:
        h = jax.nn.gelu(linear(p["up"], x, MLP_UP), approximate=True)
    return linear(p["down"], h, MLP_DOWN)


Rotary = tuple[Float[Array, "... half"], Float[Array, "... half"]]  # cosine and sine


def text_rotary(positions: Int[Array, "... 3"], config: TextConfig) -> Rotary:
    """Cosine and sine of the angles of a text head, by M-RoPE.

    Each frequency belongs to time, height or width. Sectioned: consecutive frequencies, for the
    sections (3, 2, 2) 0 0 0 1 1 2 2. Interleaved: height and width have every third frequency each,
    up to their section sizes, and time the rest, 0 1 2 0 1 2 0.
    """
    component = np.repeat(np.arange(3), config.mrope_section)
    if config.mrope_interleaved:
        component = np.zeros(config.head_dim // 2, int)
        for axis in (1, 2):
            component[axis : 3 * config.mrope_section[axis] : 3] = axis
    frequencies = _frequencies(config.head_dim, config.rope_theta)
    if config.rope_scaling:
        frequencies = _stretched(frequencies, config.rope_scaling)
    return _cos_sin(positions[..., component], frequencies)


def _stretched(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1's frequencies for long contexts, see `RopeScaling`."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = np.clip((turns - low) / (high - low), 0, 1)
    return share * frequencies + (1 - share) * frequencies / scaling.factor


def vision_rotary(coordinates: Int[Array, "... 2"], config: VisionConfig) -> Rotary:
    """Cosine and sine of the angles of a vision head: half rotate with rows, half with columns."""
    component = np.repeat(np.arange(2), config.head_dim // 4)
    frequencies = np.tile(_frequencies(config.head_dim // 2, VISION_ROPE_THETA), 2)
    return _cos_sin(coordinates[..., component], frequencies)


def _frequencies(dim: int, theta: float) -> np.ndarray:
    """θ^(-2i/dim), i = 0..dim/2-1."""
    return theta ** -(np.arange(0, dim, 2) / dim)


def _cos_sin(positions: Int[Array, "... half"], frequencies: np.ndarray) -> Rotary:
    """Cosine and sine of positions · frequencies."""
    angle = positions.astype(jnp.float32) * frequencies.astype(np.float32)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Float[Array, "... heads H"], rotary: Rotary) -> Float[Array, "... heads H"]:
    """Rotates the pairs (x_i, x_{i + H/2}) by angles that all heads share."""
    cos, sin = (a[..., None, :] for a in rotary)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def checkpointed(layer: Callable, remat: str) -> Callable:
    """`layer`, the body of a scan over layers, with rematerialisation.

    `remat` "none" saves everything; "layer" saves only the layer's input; "dots" saves matmuls with
    weights, and the output and log-sum-exp of attention unless it is dense.
    """
    if remat not in REMATS:
        raise ValueError(f"remat must be one of {', '.join(REMATS)}, got {remat!r}")
    if remat == "none":
        return layer
    keeps_dots = jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(ATTENDED),
    )
    return jax.checkpoint(layer, policy=keeps_dots if remat == "dots" else None)
