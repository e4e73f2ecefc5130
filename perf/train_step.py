"""The update's speed: one row per prompt against replicated rows, in our own code.

    python -m perf.train_step

P = 512 prompt tokens with an image, T = 128 response tokens, R = G + 1 = 9 rows. Loss and gradient
are the same; the wall time should shrink as the computed tokens do, (P + R·T) / (R·(P + T)). The
two layouts take turns; the figure is the median of the ratios of neighbouring runs.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from care_jax.logprobs import score_responses
from models import backbone
from perf.backbones import medium_config
from perf.decode import make_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--response-tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    config = medium_config()
    params = backbone.init(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    prompts, _ = make_prompts(config, 1, args.prompt_tokens - 258, rng)
    shape = (1, args.rows, args.response_tokens)
    tokens = rng.integers(0, 30000, shape, np.int32)
    advantages = rng.normal(size=shape).astype(np.float32)

    def loss(params, prompts, tokens, advantages):
        logp, _ = score_responses(
            params,
            prompts,
            tokens,
            jnp.ones(tokens.shape, bool),
            config,
            dtype=jnp.float32,
            chunk=1024,
            remat="layer",
        )
        return (advantages * logp).sum()

    grad = jax.jit(jax.value_and_grad(loss))
    replicated = jax.tree.map(lambda x: np.repeat(x, args.rows, 0), prompts)
    layouts = {
        "tree": (prompts, tokens, advantages),
        "replicated": (
            replicated,
            tokens.reshape(args.rows, 1, -1),
            advantages.reshape(args.rows, 1, -1),
        ),
    }

    def run(name: str) -> tuple[float, tuple]:
        began = time.perf_counter()
        result = jax.block_until_ready(grad(params, *layouts[name]))
        return time.perf_counter() - began, result

    (_, (loss_tree, grad_tree)), (_, (loss_replicated, grad_replicated)) = map(run, layouts)
    difference = max(
        float(jnp.abs(a - b).max() / jnp.abs(b).max())
        for a, b in zip(jax.tree.leaves(grad_tree), jax.tree.leaves(grad_replicated), strict=True)
    )
    print(
        f"loss {loss_tree:.4f} and {loss_replicated:.4f}, "
        f"largest relative gradient difference {difference:.1e}"
    )
    num_tree = args.prompt_tokens + args.rows * args.response_tokens
    num_replicated = args.rows * (args.prompt_tokens + args.response_tokens)
    ratios = []
    for _ in range(args.repeats):
        seconds = {name: run(name)[0] for name in layouts}
        ratios.append(seconds["tree"] / seconds["replicated"])
        shown = "  ".join(f"{name} {s:6.2f} s" for name, s in seconds.items())
        print(f"{shown}  ratio {ratios[-1]:.3f}")
    print(
        f"median ratio {statistics.median(ratios):.3f} of the wall time, "
        f"{num_tree / num_replicated:.3f} of the decoder tokens ({num_tree} of {num_replicated})"
    )


if __name__ == "__main__":
    main()
