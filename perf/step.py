"""Time of a whole RL step against TRL's `GRPOTrainer`: same weights, prompts and lengths.

    pip install -e '.[perf]'
    python -m perf.step

4 prompts of 283 tokens with a 448 x 448 image, G = 8 rollouts each, and one GRPO update with
β = 0.02 over all 32 rows. A step covers image preprocessing, decoding, rewards, reference
log-probabilities and the update. The backbone is a random Qwen2.5-VL of 107M parameters in float32.
Response lengths are fixed and the same on both sides (EOS ends no row): "equal" is 64 tokens each,
"lognormal" has mean 64, σ 0.8 and at most 256 tokens, in a different order in every step, and our
side leaves `--carry_over` times its prompts to the next step, as `rl.carry_over` does. Rewards are
a hash of the response, so that every group has nonzero advantages.

TRL runs with its defaults, which rematerialise activations in the backward pass; with
`--keep-activations` it stores them, as our side does (`remat="none"`). It decodes all 32 rows in
one batch and trains with microbatches of `--rows-per-device`. A stopping criterion ends its rows in
`generate`. Its processor lacks the video part, which needs torchvision. Both sides run in one
process, each of our steps just before TRL's. All our steps are run once before, to compile the
sizes that occur. The first step, which also fills the slots, does not count. Ratios are medians
over the steps; the last line is `equal <ratio> lognormal <ratio>`.

On a GPU both sides use it, with TF32 matmuls; JAX takes 40% of its memory.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from PIL import Image

try:
    import torch
except ImportError:
    sys.exit("error: this compares with PyTorch; run: pip install -e '.[perf]'")
import transformers

from care_jax.batch import Example
from care_jax.data.pipeline import Batches
from care_jax.decoding.queue import DecodeQueue
from care_jax.devices import sharding, xla_flags
from care_jax.devices.device_clock import DeviceClock
from care_jax.report.metrics import MetricWriter
from care_jax.rewards.verifier import Verifier
from care_jax.rl import carry_over
from care_jax.rl.dynamic_sampling import choose_mixed, draw_groups
from care_jax.rl.rollout import gather_groups
from care_jax.rl.rollout_programs import (
    RolloutPrograms,
    compile_decoder,
    compile_rollout,
    rollout_sizes,
)
from care_jax.rl.update_batch import copy_reference, put_scored, train_batch
from care_jax.run import weights
from care_jax.run.policy import policy_of
from care_jax.run.run import make_adamw, open_run, start_state
from care_jax.stages import rl
from care_jax.stages.export import save_processor
from configs import tiny
from models import backbone
from models.release import config_json
from perf.backbones import IMAGE_SIDE, medium_config
from perf.decode import AtLengths


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the backbone, the prompts and the responses."""

    num_layers: int
    num_rollouts: int
    image_side: int  # pixels
    prompt_tokens: int
    row: int  # tokens, and patches
    equal: int  # tokens of every response, and the mean of log-normal lengths
    longest: int  # tokens, of log-normal lengths


SIZES = Sizes(12, 8, IMAGE_SIDE, 283, 4096, equal=64, longest=256)
SMALL = Sizes(1, 2, 112, 43, 512, equal=4, longest=16)
NUM_PROMPTS = 4
SIGMA = 0.8  # of log-normal response lengths
BETA, LEARNING_RATE = 0.02, 1e-6


def reward(question: str, responses: list[str], example: Example) -> list[dict[str, float]]:
    """Numbers in [0, 1] that differ between the rollouts of a group."""
    return [{"acc": _hash(response), "fmt": 1.0} for response in responses]


def _hash(text: str) -> float:
    return zlib.crc32(text.encode()) % 1000 / 999


def make_config(cap: int, args: argparse.Namespace, folder: str = "", carries: float = 0.0):
    """A GRPO run with one update per step; starts from random weights if no folder is given."""
    config = tiny.get_config()
    config.stages = ("rl",)
    sizes = args.sizes
    shape = medium_config(num_layers=sizes.num_layers)
    config.model.backbone = {} if folder else config_json.to_hf(shape)
    config.model.path = folder
    config.data.buckets = ((sizes.prompt_tokens, (sizes.image_side // 14) ** 2),)
    config.data.max_pixels = sizes.image_side**2
    config.data.system_prompt = "Answer."
    rl = config.rl
    rl.objective = "grpo"
    rl.num_rollouts = sizes.num_rollouts
    rl.prompts_per_step = rl.prompts_per_update = NUM_PROMPTS
    rl.decode_prompts, rl.decode_rows = args.slots, args.rows
    rl.row_tokens = rl.row_patches = sizes.row
    rl.microbatch_size = 1
    rl.max_response_tokens = cap
    rl.carry_over, rl.max_age = carries, args.repeats + 1  # no step has to wait for a prompt
    rl.learning_rate, rl.warmup_steps, rl.schedule = LEARNING_RATE, 0, "constant"
    config.grpo.beta = BETA
    return config


def make_examples(builder, sizes: Sizes) -> list[Example]:
    """Questions of random digits that give every prompt `prompt_tokens` tokens."""
    rng, side = np.random.default_rng(0), sizes.image_side

    def example(place, num_digits):
        image = Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8))
        digits = "".join(map(str, rng.integers(0, 10, num_digits)))
        return Example(str(place), "perf", (image,), f"<image>{digits}", answer="0")

    num_digits = sizes.prompt_tokens - len(builder.tokenize(example(0, 0)).tokens)
    return [example(place, num_digits) for place in range(NUM_PROMPTS)]


def draw_lengths(num_steps: int, sizes: Sizes) -> dict[str, list[np.ndarray]]:
    """Tokens of every response [B, G] of each step; the log-normal ones are shuffled quantiles."""
    num_rows, rng = NUM_PROMPTS * sizes.num_rollouts, np.random.default_rng(0)
    quantiles = scipy.stats.norm.ppf((np.arange(num_rows) + 0.5) / num_rows)
    drawn = sizes.equal * np.exp(SIGMA * quantiles - SIGMA**2 / 2)
    drawn = np.clip(np.round(drawn), 1, sizes.longest).astype(int)
    shape = NUM_PROMPTS, sizes.num_rollouts
    shuffled = [rng.permutation(drawn).reshape(shape) for _ in range(num_steps)]
    return {"equal": [np.full(shape, sizes.equal)] * num_steps, "lognormal": shuffled}


class Ours:
    """Runs training steps of one case, as `care_jax.stages.rl` does."""

    def __init__(
        self,
        folder: str,
        lengths: list[np.ndarray],
        carries: float,
        args: argparse.Namespace,
        workdir: pathlib.Path,
        stack: contextlib.ExitStack,
    ):
        config = make_config(max(int(each.max()) for each in lengths), args, folder, carries)
        writer = stack.enter_context(MetricWriter(workdir))
        self.run = open_run(config, workdir, writer=writer)
        params = weights.start(self.run)
        adamw = make_adamw(self.run, "rl")
        self.reference = copy_reference(self.run, params)
        self.state = start_state(self.run, params, adamw, "rl")
        self.update = rl.compile_update(self.run, adamw, sharding.of(self.state))
        self.lengths, self.clock = lengths, DeviceClock()
        self.rollout = self._forced(compile_rollout(self.run, self.clock))
        prompts = self.run.policy.prompts
        examples, offset = make_examples(prompts, args.sizes), carry_over.num_carried(self.run)
        self.batches = Batches(
            examples, prompts, batch_size=NUM_PROMPTS, seed=0, num_workers=2, offset=offset
        )
        verifier = Verifier(1, 10.0, think_tag=self.run.policy.think_tag, reward=reward)
        self.verifier = stack.enter_context(verifier)
        for number in range(len(lengths)):  # compiles
            self.step(number)

    def _forced(self, programs: RolloutPrograms) -> RolloutPrograms:
        """The programs, with rollouts of exactly the lengths of `self.lengths`."""
        decoder = compile_decoder(self.run, temperature=1.0, top_p=1.0, stops=False)
        sizes, prompts = rollout_sizes(self.run)[0], self.run.policy.prompts
        max_age = self.run.config.rl.max_age
        queue = DecodeQueue(decoder, prompts, sizes, DeviceClock(), max_age=max_age)

        def decode(params, rng, requests, **in_flight):
            # Those that the first step draws beyond its batch have the lengths of the last step.
            limits = np.concatenate([self.lengths[self.number], self.lengths[-1]])
            limited = [dataclasses.replace(r, limits=limits[r.index]) for r in requests]
            return queue.decode(params, rng, limited, **in_flight)

        return dataclasses.replace(programs, decode=decode, queue=queue)

    def step(self, number: int) -> tuple[float, float]:
        """(seconds of the rollouts, seconds of the rest) of one step."""
        began = time.perf_counter()
        run, update, self.number = self.run, self.update, number
        if number == 0:
            is_carrying = carry_over.num_carried(run) > 0
            self.carried = carry_over.drawn_first(run, self.batches) if is_carrying else None
        first = (number, *self.batches.batch(number))
        params = update.to_decode_layout(self.state.params)
        index = np.arange(NUM_PROMPTS)
        sources = self.batches, first, index, self.verifier
        draws, carried = draw_groups(run, self.rollout, params, *sources, self.carried)
        del params
        rolled_out = time.perf_counter()
        groups = rl.assign_credit(run, update, choose_mixed(draws))
        everyone = gather_groups(groups)
        self.carried = carried and carried.aged()
        assert (everyone.num_trained > 0).all()
        if carried is None:
            assert everyone.num_trained.sum() == self.lengths[number].sum()
        packed, params = [train_batch(run, groups, everyone)], self.state.params
        scored = put_scored(run, update.score, packed, params, self.reference, self.clock)
        [(_, _, placed)] = scored
        self.state, metrics, _ = update.update(self.state, placed)
        assert np.isfinite(jax.device_get(metrics)["grad_norm"])
        return rolled_out - began, time.perf_counter() - rolled_out


class ImageProcessor(transformers.Qwen2_5_VLProcessor):
    """The processor without its video part, which needs torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]

    def __init__(self, image_processor, tokenizer, chat_template=None):
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template)


def make_trainer(folder: str, examples, lengths_of_step, args, workdir):
    """TRL's trainer on the same prompts; `lengths_of_step()` returns the next step's lengths."""
    import datasets
    import trl

    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    images = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder)
    processor = ImageProcessor(images, tokenizer, chat_template=tokenizer.chat_template)
    system, sizes = {"role": "system", "content": "Answer."}, args.sizes
    num_rows, prompt_tokens = NUM_PROMPTS * sizes.num_rollouts, sizes.prompt_tokens
    asked = (example.question.removeprefix("<image>") for example in examples)
    users = ({"role": "user", "content": question} for question in asked)
    rows = [
        {"prompt": [system, user], "image": example.images[0]}
        for user, example in zip(users, examples, strict=True)
    ]
    eos = tokenizer.eos_token_id
    settings = trl.GRPOConfig(
        output_dir=str(workdir),
        per_device_train_batch_size=args.rows_per_device,
        gradient_accumulation_steps=num_rows // args.rows_per_device,
        num_generations=sizes.num_rollouts,
        max_completion_length=sizes.longest,
        beta=BETA,
        loss_type="grpo",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=2 * (args.repeats + 1),  # of both cases
        gradient_checkpointing=not args.keep_activations,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        generation_kwargs={"suppress_tokens": [eos]},
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [_hash(c[0]["content"]) for c in completions],
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=processor,
    )
    generate = model.generate

    @functools.wraps(generate)
    def at_lengths(input_ids, **inputs):
        lengths = lengths_of_step().ravel()
        assert input_ids.shape == (num_rows, prompt_tokens), input_ids.shape
        ends = AtLengths(prompt_tokens + lengths)
        out = generate(input_ids=input_ids, stopping_criteria=[ends], **inputs)
        # TRL ends a row at its first EOS, so a shorter row gets one as its last token.
        for row, length in zip(out, lengths, strict=True):
            if prompt_tokens + length < out.shape[1]:
                row[prompt_tokens + length - 1] = eos
        return out

    model.generate = at_lengths
    return trainer


class Turns(transformers.TrainerCallback):
    """Runs our step just before each of TRL's, and times both."""

    def __init__(self, ours: dict[str, Ours], report: Callable[[dict[str, Any]], None]):
        self.ours, self.names, self.case, self.repeat = ours, list(ours), next(iter(ours)), 0
        self.seconds, self.report = {name: [] for name in ours}, report

    def on_step_begin(self, args, state, control, **_):
        self.repeat, index = divmod(state.global_step, len(self.names))
        self.case = self.names[index]
        self.mine = self.ours[self.case].step(self.repeat)
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        theirs = time.perf_counter() - self.began
        is_first = state.global_step <= len(self.names)
        self.report(step_row(self.case, self.mine, is_first) | {"trl": theirs})
        if not is_first:
            self.seconds[self.case].append((sum(self.mine), theirs))


def step_row(case: str, ours: tuple[float, float], is_first: bool) -> dict[str, Any]:
    """Seconds of our rollouts and of the rest of a step."""
    return {"case": case, "rollouts": ours[0], "rest": ours[1], "is_first": is_first}


def print_row(row: dict[str, Any], path: str | None) -> None:
    ours = row["rollouts"] + row["rest"]
    line = f"{row['case']}: ours {ours:.2f} s ({row['rollouts']:.2f} + {row['rest']:.2f})"
    if "trl" in row:
        line += f", TRL {row['trl']:.2f} s, {row['trl'] / ours:.2f}x"
    print(line + "  the first, not counted" * row["is_first"], flush=True)
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="steps after the first")
    parser.add_argument(
        "--carry_over", type=float, default=1.0, help="at log-normal lengths, as rl.carry_over"
    )
    parser.add_argument("--slots", type=int, default=4, help="our prompts in flight")
    parser.add_argument("--rows", type=int, default=8, help="our rows of a prompt in flight")
    parser.add_argument("--rows-per-device", type=int, default=8, help="TRL's microbatch")
    parser.add_argument("--keep-activations", action="store_true", help="TRL's, for the gradient")
    parser.add_argument("--ours", action="store_true", help="without TRL")
    parser.add_argument(
        "--small",
        dest="sizes",
        action="store_const",
        const=SMALL,
        default=SIZES,
        help="tiny sizes, to try this program",
    )
    parser.add_argument("--json", help="file to which a line of JSON is added for each step")
    args = parser.parse_args()
    if not args.ours and importlib.util.find_spec("trl") is None:
        sys.exit("error: TRL is not installed; run: pip install -e '.[perf]', or add --ours")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")
    xla_flags.set_defaults()
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    report = functools.partial(print_row, path=args.json)

    lengths = draw_lengths(args.repeats + 1, args.sizes)
    for name, steps in lengths.items():
        print(f"{name}: {steps[0].sum()} tokens, longest {steps[0].max()}")
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = make_config(args.sizes.equal, args)
        policy, start = policy_of(config), str(folder / "start")
        params = backbone.init(policy.config, jax.random.key(0))
        backbone.export(start, params, policy.config, dtype=jnp.float32)
        save_processor(policy, folder / "start")
        carries = {"equal": 0.0, "lognormal": args.carry_over}
        ours = {
            name: Ours(start, steps, carries[name], args, folder / name, stack)
            for name, steps in lengths.items()
        }
        if args.ours:
            for repeat in range(args.repeats + 1):
                for name, side in ours.items():
                    report(step_row(name, side.step(repeat), repeat == 0))
            return
        turns = Turns(ours, report)
        examples = make_examples(policy.prompts, args.sizes)
        trainer = make_trainer(
            start, examples, lambda: lengths[turns.case][turns.repeat], args, folder / "trl"
        )
        trainer.add_callback(turns)
        trainer.train()
    ratios = {
        name: statistics.median(theirs / mine for mine, theirs in pairs)
        for name, pairs in turns.seconds.items()
    }
    print(" ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))


if __name__ == "__main__":
    main()
