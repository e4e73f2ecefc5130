"""Small runs at the ends of what numbers can be: each ends with finite metrics, or with one line.

They run in this process, so that they share what is compiled; one that hangs ends it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import jax.numpy as jnp
from ml_collections import ConfigDict
from PIL import Image

from care_jax import main
from care_jax.data.prompts import open_tokenizer
from care_jax.method.objectives import OBJECTIVES
from care_jax.rewards.reward_function import RewardFunction
from care_jax.stages import rl
from configs import common
from perf.faults.runs import Attempt
from tests.small_run import small_config

LONGEST = 1800  # seconds after which a run hangs
Keys = Mapping[str, Any]
# Few programs, which take most of the time.
SMALL = {"model.backbone.text_config.num_hidden_layers": 1, "rl.row_lengths": 1}
SMALL |= {"sft.row_lengths": 1, "rl.num_steps": 2, "sft.num_steps": 2, "verifier.num_workers": 1}
RL = {"stages": ("rl",)}
LONG = RL | {"rl.num_steps": 50, "checkpoint_every": 25, "log_every": 10}
ENDS = "ends with finite metrics"
REFUSED = "is refused with one line before it trains"
STOPS = "ends with one line, and all that it wrote is finite"


def always(acc: float) -> RewardFunction:
    """One verdict on everything."""
    return lambda question, responses, example: [{"acc": acc} for _ in responses]


def by_group() -> RewardFunction:
    """Groups all wrong, all half right and all right."""
    return lambda question, responses, example: [{"acc": len(question) % 3 / 2} for _ in responses]


def by_response() -> RewardFunction:
    """Groups that are mixed."""
    return lambda question, responses, example: [{"acc": len(text) % 3 / 2} for text in responses]


def tried(
    folder: pathlib.Path,
    keys: Keys,
    promise: str,
    *,
    reward: RewardFunction | None = None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    prepare: Callable[[ConfigDict, pathlib.Path], None] | None = None,
) -> str:
    """Runs `small_config` with these keys; returns what is not as promised, or "".

    Args:
        reward: judges the responses; None: the built-in verifier.
        around: what the run is made in.
        prepare: changes the configuration, and may write files to the folder.
    """
    error, workdir = None, folder / "run"
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    try:
        config = small_config(**SMALL | keys)
        if prepare is not None:
            prepare(config, folder)
        with around():
            main.run_stages(config, workdir, overridden=[*keys], reward=reward)
    except (ValueError, FloatingPointError) as found:  # what a command prints as one line
        error = str(found)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return _problem(workdir, promise, error)


def _problem(workdir: pathlib.Path, promise: str, error: str | None) -> str:
    """What is not as promised of a run that ended with this error."""
    if (error is None) != (promise == ENDS):
        return f"ended with {error or 'no error'}"
    if error is not None and len(error.splitlines()) != 1:
        return f"more than one line: {error}"
    numbers = [path for path in workdir.glob("*.jsonl") if _num_broken(path)]
    if numbers:
        return f"{numbers[0].name} has a number that is not finite"
    path = workdir / "metrics.jsonl"
    num_lines = path.read_bytes().count(b"\n") if path.exists() else 0
    if promise == REFUSED and num_lines:
        return f"refused after {num_lines} lines of metrics: {error}"
    return ""


def _num_broken(path: pathlib.Path) -> int:
    """Number of NaNs and infinities in a file of JSON lines."""
    found = []
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=found.append)
    return len(found)


@contextlib.contextmanager
def broken_credit(step: int) -> Iterator[None]:
    """NaN in the advantages of one step."""
    calls, assign = iter(range(10**6)), rl.assign_credit

    def assigned(*args):
        groups = assign(*args)
        if next(calls) != step:
            return groups
        broken = groups.credit.token_advantage * math.nan
        return dataclasses.replace(groups, credit=groups.credit.replace(token_advantage=broken))

    with mock.patch.object(rl, "assign_credit", assigned):
        yield


@contextlib.contextmanager
def ended_at_once() -> Iterator[None]:
    """Every sampled token is EOS."""
    from care_jax.decoding import sampler

    end = open_tokenizer("").eos_token_id
    draw = sampler.sample_token

    def drawn(logits, u, **settings):
        at_end = jnp.arange(logits.shape[-1]) == end
        return draw(jnp.where(at_end, logits, -1e9), u, **settings)

    with mock.patch.object(sampler, "sample_token", drawn):
        yield


def text_alone(config: ConfigDict, folder: pathlib.Path) -> None:
    """Questions without images for a model that has a vision tower."""
    for number, name in enumerate(("sft", "train", "test")):
        config.data[name] = common.source("word_problems", num_examples=64, seed=number)
    config.data.test.num_examples = 12
    config.data.teacher_error = 0.0
    config.data.buckets = ((96, 0), (192, 0))
    config.sft.row_tokens, config.rl.row_tokens = 384, 512
    config.sft.row_patches = config.rl.row_patches = 0


def smallest_images(config: ConfigDict, folder: pathlib.Path) -> None:
    """Images of one pixel, of one row, and of one column."""
    for number, size in enumerate(((1, 1), (150, 1), (1, 150))):
        Image.new("RGB", size, "red").save(folder / f"{number}.png")
    rows = [
        {
            "image": f"{number % 3}.png",
            "question": f"{number}?",
            "answer": "1",
            "response": "<think>one</think><answer>1</answer>",
        }
        for number in range(16)
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("sft", "train", "test"):
        config.data[name] = common.source("jsonl", path=str(path))


def small_vocabulary(config: ConfigDict, folder: pathlib.Path, size: int = 300) -> None:
    """A tokenizer of `size` tokens: the bytes, the first merges, and the special tokens."""
    open_tokenizer("").save_pretrained(folder / "tokenizer")
    path = folder / "tokenizer" / "tokenizer.json"
    fields = json.loads(path.read_text())
    special = fields["added_tokens"]
    kept = sorted(fields["model"]["vocab"].items(), key=lambda item: item[1])[: size - len(special)]
    vocab = dict(kept)
    merges = [m for m in fields["model"]["merges"] if "".join(m) in vocab]
    for number, token in enumerate(special, len(vocab)):
        token["id"] = vocab[token["content"]] = number
    fields["model"] |= {"vocab": vocab, "merges": merges}
    path.write_text(json.dumps(fields))
    config.model.tokenizer = str(folder / "tokenizer")
    config.data.buckets = ((192, 64),)
    config.sft.row_tokens = config.rl.row_tokens = 384


def _attempts() -> Iterator[Attempt]:
    def attempt(how: str, keys: Keys, promise: str = ENDS, **options: Any) -> Attempt:
        return Attempt(promise, how, lambda folder: tried(folder, keys, promise, **options))

    wide = {f"model.{name}_dtype": "bfloat16" for name in ("compute", "param", "moments")}
    yield attempt("bfloat16 on a CPU: activations, weights, moments", wide)
    yield attempt("no image", {}, prepare=text_alone)
    yield attempt("images of 1 x 1, 150 x 1 and 1 x 150 pixels", {}, prepare=smallest_images)
    yield attempt("a vocabulary of 300", {}, prepare=small_vocabulary)
    yield attempt("50 steps all right", LONG, reward=always(1.0))
    yield attempt("50 steps all wrong", LONG, reward=always(0.0))
    for name in OBJECTIVES:
        keys = RL | {"rl.objective": name} | ({"dapo.max_tries": 2} if name == "dapo" else {})
        yield attempt(f"{name}, equal rewards in each group", keys, reward=by_group())
        spread = {f"{name}.eps": 0.0} if "eps" in common.get_config()[name] else {}
        weights = {"care.eps_w": 0.0, "care.gamma_pos": 0.0} if name == "care" else {}
        pair = {"rl.num_rollouts": 2, f"{name}.beta": 0.0, **spread, **weights}
        yield attempt(f"{name}, G = 2, ε = 0, β = 0", keys | pair, reward=by_response())
    yield attempt("every response ends at once", RL, around=ended_at_once)
    yield attempt("one rollout", RL | {"rl.num_rollouts": 1}, REFUSED)
    yield attempt(
        "K = 100,000 negatives of 4 rollouts",
        RL | {"care.K": 10**5, "care.M": 10**5},
        reward=by_response(),
    )
    for temperature in (1e-45, 1e-6, 100.0):
        sampled = {"stages": ("rl", "evaluate"), "rl.temperature": temperature}
        sampled |= {"evaluate.temperature": temperature}
        yield attempt(f"temperature {temperature:g}", RL | sampled)
    for temperature in (0.0, 1e30):
        hot = RL | {"rl.temperature": temperature}
        yield attempt(f"temperature {temperature:g} in RL", hot, REFUSED)
    yield attempt("top-p 1e-45", RL | {"rl.top_p": 1e-45})
    one = {"rl.num_steps": 1, "rl.warmup_steps": 0, "rl.schedule": "cosine"}
    few = {f"rl.{name}": 1 for name in ("prompts_per_step", "prompts_per_update", "decode_prompts")}
    yield attempt("one step of one prompt", RL | one | few | {"rl.microbatch_size": 1})
    yield attempt("learning rate 0", RL | {"rl.learning_rate": 0.0})
    token = RL | {"rl.max_response_tokens": 1}
    yield attempt("responses of one token", token | {"care.reflect": False})
    yield attempt("one token, and a context for reflection", token, REFUSED)
    yield attempt("answers of weight 0 in SFT", {"stages": ("sft",), "sft.answer_weight": 0.0})
    wild = {"rl.learning_rate": 1.0, "rl.weight_decay": 1e30, "rl.max_grad_norm": math.inf}
    yield attempt("weights that leave float32", LONG | wild, STOPS)
    yield attempt("β = 1e38", RL | {"care.beta": 1e38}, STOPS)
    nan = functools.partial(broken_credit, 2)
    yield attempt("NaN in the third step", RL | {"rl.num_steps": 4}, STOPS, around=nan)
    skipped = RL | {"rl.num_steps": 4, "rl.max_skipped": 1, "rl.prompts_per_update": 8}
    yield attempt("NaN in the third step, one may be skipped", skipped, around=nan)


ATTEMPTS = tuple(_attempts())
