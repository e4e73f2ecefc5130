"""CPU cost of attention over packed trees and images, against padded rows and dense attention.

    python -m perf.attention

CPU seconds of forward and backward in float32. Text has 12 query heads, 4 kv heads and head dim 64;
the vision tower has 16 heads of 80. A row of 4096 tokens holds trees of 256 prompt tokens and 8
responses, with exponential lengths of mean 160 clipped to 448. It is compared with the same trees
padded to equal branches, one row [256 | 8 x 448] each, and with one dense masked matmul. A row of
3072 patches holds images of 256 to 1024. The programs are interleaved; ratios are medians.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from models.attention.packed import XLA, AttentionImpl, attend, block_mask, segment_spans

PROMPT, NUM_RESPONSES, LONGEST, ROW = 256, 8, 448, 4096
IMAGES = (1024, 256, 576, 400, 784)
BLOCKS = (32, 64, 128, 256)


def tree_reach(start: int, branches: list[int], padded: int = 0) -> list[int]:
    """Last query that sees each key of a tree at `start`; pads each branch to `padded` tokens."""
    ends = start + PROMPT + np.cumsum([max(length, padded) for length in branches])
    reach = [int(ends[-1]) - 1] * PROMPT
    for end, length in zip(ends, branches, strict=True):
        first = int(end) - max(length, padded)
        reach += [first + length - 1] * length + [*range(first + length, int(end))]
    return reach


def program(first, last, shape: tuple[int, ...], impl: AttentionImpl):
    """() -> output and gradients for random q [B, S, K, G, H], k and v [B, S, K, H]."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, g = (jax.random.normal(key, shape) for key in keys[:2])
    k, v = (jax.random.normal(key, (*shape[:3], shape[4])) for key in keys[2:])

    @jax.jit
    def values_and_gradients(q, k, v, g):
        mask = block_mask(first, last, shape[3], impl)
        out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
        return out, *pull_back(g)

    return lambda: jax.block_until_ready(values_and_gradients(q, k, v, g))


def compare(name: str, programs: dict, repeats: int) -> None:
    """Prints each program's least CPU seconds, and its median ratio to the first program."""
    seconds = {label: [] for label in programs}
    for _ in range(repeats):
        for label, run in programs.items():
            run()  # warm-up: compiles, and reclaims memory from the previous program
            began = time.process_time()
            run()
            seconds[label].append(time.process_time() - began)
    base = next(iter(seconds.values()))
    for label, own in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(own, base, strict=True))
        print(f"{name}, {label}: {min(own):.2f} CPU s, ratio {ratio:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    packed, padded = [], []
    while True:
        branches = [int(n) for n in np.clip(rng.exponential(160, NUM_RESPONSES), 8, LONGEST)]
        if len(packed) + PROMPT + sum(branches) > ROW:
            break
        packed += tree_reach(len(packed), branches)
        padded.append(tree_reach(0, branches, LONGEST))
    print(f"{len(padded)} trees, {len(packed)} real tokens; {np.size(padded)} padded to equal ones")
    packed = np.array([[*packed, *range(len(packed), ROW)]])
    padded = np.array(padded)

    blocks = {f"blocks of {n}": AttentionImpl(query_block=n, key_block=n) for n in BLOCKS}
    dense = AttentionImpl(dense_tokens=ROW)
    text = (*packed.shape, 4, 3, 64)
    programs = {"packed": program(None, packed, text, XLA)}
    programs |= {label: program(None, packed, text, impl) for label, impl in blocks.items()}
    programs["equal branches"] = program(None, padded, (*padded.shape, 4, 3, 64), XLA)
    programs["dense"] = program(None, packed, text, dense)
    compare("trees", programs, args.repeats)

    segments = np.repeat([*range(len(IMAGES)), -1], [*IMAGES, 3072 - sum(IMAGES)])[None]
    spans = segment_spans(jnp.asarray(segments))
    tower = (*segments.shape, 16, 1, 80)
    impls = {"packed": XLA, **blocks, "dense": dense}
    programs = {label: program(*spans, tower, impl) for label, impl in impls.items()}
    compare("images", programs, args.repeats)


if __name__ == "__main__":
    main()
