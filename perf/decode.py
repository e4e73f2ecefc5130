"""Rollout speed: continuous decoding against transformers' `generate` with the same weights.

    python -m perf.decode
    python -m perf.decode --lengths=lognormal --rows 2 4 8
    python -m perf.decode --lengths=lognormal --steps=4

Prompts have 283 tokens with a 448 x 448 image, and G = 8 rollouts each; prefill and vision tower
are included. Response lengths are fixed and the same on both sides (EOS ends no row): "equal" is 4
prompts with 64 sampled tokens per rollout, "lognormal" is 16 prompts with mean 128, σ 0.8 and at
most 512 tokens. transformers decodes a batch until its longest row ends, with the batch size and
cache that were fastest in a warm-up round. Both sides run in one process and alternate. Ratios are
of consecutive runs; medians are reported.

Also printed: our row steps (decode steps x rows) per sampled token, about 1 if no row is ever idle.

With `--steps` that many batches are decoded in a row, each with lengths of its own. A step of ours
leaves `--carry_over` times its prompts to the next, as `rl.carry_over` does; transformers decodes
one batch after the other. Figures are of the steps after the first. Each is just before
transformers' batch of that step, and ratios are of tokens per second.

The last line is `row_steps <row steps a token> ratio <ratio>` of the fastest R.
"""

import argparse
import itertools
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

try:
    import torch
except ImportError:
    sys.exit("error: this compares with PyTorch; run: pip install -e '.[perf]'")
import transformers

from care_jax.aot.lengths import draw_responses
from care_jax.decoding.queue import DecodePrograms, DecodeQueue
from care_jax.decoding.rollout_buffer import Request
from care_jax.decoding.schedule import Sizes, WaitingPrompt
from care_jax.decoding.simulation import Schedule, Simulation
from care_jax.devices import xla_flags
from care_jax.devices.device_clock import DeviceClock
from care_jax.prompts.builder import TokenizedPrompt
from care_jax.rl.rollout_programs import compile_decoder
from care_jax.run.run import Run, open_run
from configs import tiny
from models import backbone
from models.config import BackboneConfig
from models.release import config_json
from perf.backbones import IMAGE_SIDE, medium_config

NUM_TEXT = 25  # text tokens of a prompt
MEAN, SIGMA, CAP = 128, 0.8, 512  # of log-normal response lengths


def make_run(dtype: str, num_tokens: int, num_patches: int) -> Run:
    """A run of the medium backbone; only its decoding is used."""
    config = tiny.get_config()
    config.stages = ("evaluate",)
    config.model.backbone = config_json.to_hf(medium_config())
    config.model.compute_dtype = dtype
    config.data.buckets = ((num_tokens, num_patches),)
    return open_run(config, pathlib.Path())


def make_prompts(config: BackboneConfig, num_prompts: int, rng) -> list[TokenizedPrompt]:
    """Prompts with an image followed by text."""
    side = IMAGE_SIDE // config.vision.patch_size
    image = np.full((side // config.vision.merge_size) ** 2, config.image_token_id)
    wrapped = [config.vision_start_token_id, *image, config.vision_end_token_id]
    grid = np.array([[1, side, side]])
    shape = side * side, config.vision.patch_dim

    def prompt() -> TokenizedPrompt:
        tokens = np.array([*wrapped, *rng.integers(0, 256, NUM_TEXT)], np.int32)
        return TokenizedPrompt(tokens, grid, rng.normal(size=shape).astype(np.float32))

    return [prompt() for _ in range(num_prompts)]


def torch_inputs(prompts: list[TokenizedPrompt], config: BackboneConfig, dtype) -> dict:
    """The inputs of `generate`."""
    tokens = np.stack([prompt.tokens for prompt in prompts])
    return {
        "input_ids": torch.tensor(tokens, dtype=torch.long),
        "attention_mask": torch.ones(tokens.shape, dtype=torch.long),
        "pixel_values": torch.tensor(np.concatenate([p.patches for p in prompts])).to(dtype),
        "image_grid_thw": torch.tensor(np.concatenate([p.grids for p in prompts])),
        "mm_token_type_ids": torch.tensor((tokens == config.image_token_id).astype(np.int64)),
    }


class AtLengths(transformers.StoppingCriteria):
    """Stops each row at its given length, prompt included."""

    def __init__(self, lengths: np.ndarray):
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids, scores, **_):
        return input_ids.shape[1] >= self.lengths.to(input_ids.device)


class Step(NamedTuple):
    """One step of ours."""

    seconds: float
    busy_seconds: float  # of the devices
    schedule: Schedule  # simulated

    @property
    def rate(self) -> float:
        """Sampled tokens per second."""
        return sum(call.num_tokens for call in self.schedule.calls) / self.seconds


class Ours:
    """Steps of our decoding, one after the other; the prompts recur, the lengths do not.

    Args:
        lengths: of the rollouts [N, G] of each step, and of those that the first step decodes
            beyond them.
    """

    def __init__(
        self,
        run: Run,
        programs: DecodePrograms,
        sizes: Sizes,
        prompts: list[TokenizedPrompt],
        lengths: list[np.ndarray],
        more: np.ndarray,
    ):
        self.num_wanted = len(prompts) if len(more) else None
        max_age = len(lengths)  # no step has to wait for a prompt
        policy = run.policy
        self.queue = DecodeQueue(programs, policy.prompts, sizes, DeviceClock(), max_age=max_age)
        self.simulation = Simulation(sizes, policy.prompts.buckets, max_age)
        self.steps = [np.concatenate([lengths[0], more]), *lengths[1:]]
        self.prompts, self.number = prompts, 0

    def step(self, params: backbone.Params, seed: int) -> Step:
        """The next step."""
        lengths, before = self.steps[self.number], self.queue.num_steps
        prompts = [self.prompts[index % len(self.prompts)] for index in range(len(lengths))]
        requests = [Request(i, p, limits=lengths[i]) for i, p in enumerate(prompts)]
        in_flight = self.queue.in_flight and self.queue.in_flight.aged()
        goal = {"in_flight": in_flight, "num_wanted": self.num_wanted}
        began, was_busy = time.perf_counter(), self.queue.clock.busy_seconds()
        decoded = list(self.queue.decode(params, jax.random.key(seed), requests, **goal))
        seconds = time.perf_counter() - began
        busy = self.queue.clock.busy_seconds() - was_busy
        scheduler = self.simulation.scheduler
        if self.number:
            scheduler.grow_older()
        first = scheduler.next_uid
        waiting = [
            WaitingPrompt(len(p.tokens), first + i, len(p.patches)) for i, p in enumerate(prompts)
        ]
        lengths_of = {first + i: each for i, each in enumerate(lengths)}
        schedule = self.simulation.step(waiting, lengths_of, self.num_wanted)
        assert schedule.num_steps == self.queue.num_steps - before
        assert sum(len(places) for places, _ in decoded) == len(self.prompts)
        self.number += 1
        return Step(seconds, busy, schedule)


class Theirs:
    """transformers' decoding of the same prompts with the same weights, in batches."""

    def __init__(
        self,
        params: backbone.Params,
        config: BackboneConfig,
        prompts: list[TokenizedPrompt],
        dtype: str,
    ):
        self.config, self.prompts = config, prompts
        with tempfile.TemporaryDirectory() as folder:
            backbone.export(folder, params, config, dtype=jnp.float32)
            model = transformers.Qwen2_5_VLForConditionalGeneration
            self.model = model.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def seconds(self, lengths: np.ndarray, batch: int, cache: str, seed: int) -> float:
        """The time of rollouts of these lengths [N, G], `batch` prompts at once."""
        torch.manual_seed(seed)
        began = time.perf_counter()
        for start in range(0, len(self.prompts), batch):
            part = slice(start, start + batch)
            inputs = torch_inputs(self.prompts[part], self.config, self.model.dtype)
            num_prompt_tokens = inputs["input_ids"].shape[1]
            wanted = lengths[part].ravel()
            with torch.inference_mode():
                out = self.model.generate(
                    **inputs,
                    do_sample=True,
                    temperature=1.0,
                    top_p=1.0,
                    top_k=0,
                    num_return_sequences=lengths.shape[1],
                    max_new_tokens=int(wanted.max()),
                    eos_token_id=None,
                    pad_token_id=self.config.pad_token_id,
                    stopping_criteria=[AtLengths(num_prompt_tokens + wanted)],
                    cache_implementation=cache,
                )
            assert out.shape[1] - num_prompt_tokens == wanted.max()
        return time.perf_counter() - began

    def fastest(
        self, lengths: np.ndarray, batches: Iterable[int], caches: Iterable[str]
    ) -> tuple[int, str]:
        """The batch size and cache that are fastest in one round each, which is printed."""
        candidates = [*itertools.product(sorted(batches), caches)]
        if len(candidates) == 1:
            return candidates[0]
        found = {each: self.seconds(lengths, *each, -1) for each in candidates}
        for (batch, cache), seconds in found.items():
            print(f"transformers, {batch} prompts, {cache}: {seconds:.1f} s", flush=True)
        return min(found, key=found.__getitem__)


def parse_arguments() -> argparse.Namespace:
    """The command's flags, with the defaults that depend on others filled in."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", choices=("equal", "lognormal"), default="equal")
    parser.add_argument("--prompts", type=int, help="4, or 16 of log-normal lengths")
    parser.add_argument("--rollouts", type=int, default=8, help="rollouts per prompt, G")
    parser.add_argument("--tokens", type=int, default=64, help="of a response, at equal lengths")
    parser.add_argument("--rows", type=int, nargs="+", help="rows of a prompt in flight, R")
    parser.add_argument("--slots", type=int, help="prompts in flight; by default for 32 rows")
    parser.add_argument("--repeats", type=int, help="3, or 1 of several steps or with --ours")
    parser.add_argument("--steps", type=int, default=1, help="consecutive RL steps")
    parser.add_argument("--carry_over", type=float, default=1.0, help="of several steps")
    parser.add_argument("--batches", type=int, nargs="+", help="prompts per batch of transformers")
    parser.add_argument(
        "--caches", nargs="+", default=("dynamic", "static"), help="caches that transformers tries"
    )
    parser.add_argument("--ours", action="store_true", help="do not run transformers")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    is_equal, is_single = args.lengths == "equal", args.steps == 1
    args.prompts = args.prompts or (4 if is_equal else 16)
    args.rows = args.rows or ([args.rollouts] if is_equal else [2, 4, 8] if is_single else [1, 2])
    args.repeats = args.repeats or (3 if is_single and not args.ours else 1)
    args.batches = args.batches or {max(args.prompts // n, 1) for n in (1, 2, 4)}
    return args


def main() -> None:
    xla_flags.set_defaults()
    args, rng = parse_arguments(), np.random.default_rng(0)
    is_single = args.steps == 1

    def draw(num_prompts: int) -> np.ndarray:
        shape = num_prompts, args.rollouts
        if args.lengths == "equal":
            return np.full(shape, args.tokens)
        return draw_responses(shape, MEAN, CAP, rng, sigma=SIGMA)

    lengths = [draw(args.prompts) for _ in range(args.steps)]
    more = draw(0 if is_single else round(args.carry_over * args.prompts))
    longest = int(max(each.max() for each in [*lengths, *more]))
    side = IMAGE_SIDE // 14
    run = make_run(args.dtype, side * side // 4 + 2 + NUM_TEXT, side * side)
    config = run.policy.config
    prompts = make_prompts(config, args.prompts, rng)
    params = backbone.init(config, jax.random.key(0))
    dtype = jnp.dtype(args.dtype)
    decode_params = jax.jit(lambda p: backbone.to_decode_layout(p, config, dtype))(params)
    programs = compile_decoder(run, temperature=1.0, top_p=1.0, stops=False)

    def ours(num_rows: int) -> Ours:
        slots = args.slots or max((32 if is_single else 64) // num_rows, 1)
        sizes = Sizes(slots, num_rows, args.rollouts, longest, 0, 1, args.prompts)
        return Ours(run, programs, sizes, prompts, lengths, more)

    num_params = sum(x.size for x in jax.tree.leaves(params))
    tokens = np.concatenate(lengths)
    print(
        f"{num_params / 1e6:.0f}M parameters, {args.prompts} prompts of {len(prompts[0].tokens)} "
        f"tokens, G = {args.rollouts}, {args.lengths} lengths of mean {tokens.mean():.0f}, "
        f"longest {tokens.max()}, {args.dtype}, {torch.get_num_threads()} threads"
    )
    theirs = None if args.ours else Theirs(params, config, prompts, args.dtype)
    best = theirs.fastest(lengths[0], args.batches, args.caches) if theirs else ()
    found, ratios = ({num_rows: [] for num_rows in args.rows} for _ in range(2))
    for repeat in range(-1 if is_single else 0, args.repeats):
        sides = {num_rows: ours(num_rows) for num_rows in args.rows}
        for number, drawn in enumerate(lengths):
            steps = {num_rows: side.step(decode_params, repeat) for num_rows, side in sides.items()}
            if repeat < 0 or (number == 0 and not is_single):
                continue  # it compiles
            rate, line = None, []
            if theirs is not None:
                rate = drawn.sum() / theirs.seconds(drawn, *best, repeat)
                line.append(f"transformers {rate:.1f} tok/s")
            for num_rows, step in steps.items():
                found[num_rows].append(step)
                line.append(f"R = {num_rows} {step.rate:.1f}")
                if rate is not None:
                    ratios[num_rows].append(step.rate / rate)
                    line[-1] += f" ({step.rate / rate:.2f}x)"
            print("  ".join(line), flush=True)
    row_steps = {num_rows: print_steps(num_rows, steps) for num_rows, steps in found.items()}
    if theirs is None:
        best = max(found, key=lambda num_rows: statistics.median(s.rate for s in found[num_rows]))
        print(f"row_steps {row_steps[best]:.2f}")
        return
    medians = {num_rows: statistics.median(found) for num_rows, found in ratios.items()}
    for num_rows, ratio in medians.items():
        print(f"R = {num_rows}: median ratio {ratio:.2f}")
    best = max(medians, key=medians.__getitem__)
    print(f"row_steps {row_steps[best]:.2f} ratio {medians[best]:.2f}")


def print_steps(num_rows: int, steps: list[Step]) -> float:
    """A line of our steps with R rows of a prompt; returns row steps per sampled token."""
    calls = [call for step in steps for call in step.schedule.calls]
    taken = sum(call.num_steps * call.num_slots * num_rows for call in calls)
    row_steps = taken / sum(call.num_tokens for call in calls)
    seconds = sum(step.seconds for step in steps)
    idle = 1 - sum(step.busy_seconds for step in steps) / seconds
    num_steps = sum(call.num_steps for call in calls) / len(steps)
    print(
        f"R = {num_rows}: up to {max(call.num_slots for call in calls)} slots, {num_steps:.0f} "
        f"decode steps, {row_steps:.2f} row steps a token, {seconds / len(steps):.1f} s, devices "
        f"idle {idle:.1%}"
    )
    return row_steps


if __name__ == "__main__":
    main()
