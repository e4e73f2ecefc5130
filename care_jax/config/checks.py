"""Checks of a configuration, done before anything is loaded or compiled."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any

from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from care_jax.benchmarks.suite import RELEASES
from care_jax.config.forms import check_forms
from care_jax.config.keys import check_ranges
from care_jax.data.sources import check_section
from care_jax.decoding import reflection
from care_jax.devices import distributed, sharding, xla_flags
from care_jax.learning import optimizer
from care_jax.method import select
from care_jax.method.objectives import OBJECTIVES
from care_jax.report.metrics import pass_rates
from care_jax.rewards.reward_function import load_reward
from models import layers

STAGES = ("sft", "rl", "evaluate", "export")
DTYPES = ("float32", "bfloat16")
OFFLOADS = ("reference", "optimizer")
CREDITS = ("as_sampled", "prompt_only")
OLD_LOGPS = ("sampler", "trainer")
ATTENTIONS = ("auto", "xla", "kernel")
# Values of the keys of an objective's section.
OBJECTIVE_CHOICES = {
    "rule": select.RULES,
    "anchor_rule": select.ANCHOR_RULES,
    "reflect_mode": reflection.MODES,
    "reflect_credit": CREDITS,
}


def check_config(
    config: ConfigDict,
    mesh: Mesh,
    overridden: Collection[str] = (),
    given: Collection[str] = (),
) -> None:
    """Refuses a configuration that cannot run, naming the key to change.

    Args:
        config: the run's configuration, from `fill_in`.
        mesh: the run's devices.
        overridden: keys set on the command line, such as "care.beta"; those without effect under
            the chosen objective are refused.
        given: what comes from Python and not from the configuration: the examples of the stages
            "rl" or "evaluate", and "reward".

    Raises:
        ValueError: one line, the first error found.
    """
    check_ranges(config)
    for name in ("sharding_rules", "decode_sharding_rules"):
        sharding.check_rules(name, config[name])
        distributed.check_mesh(mesh, config[name])
    _check_stages(tuple(config.stages))
    _check_choice("xla_preset", config.xla_preset, xla_flags.PRESETS)
    _check_model(config.model, mesh)
    _check_verifier(config.verifier, overridden, has_function="reward" in given)
    _check_prompts(config.data)
    if "sft" in config.stages:
        _check_sft(config, mesh)
    if "rl" in config.stages:
        _check_rl(config, mesh, overridden)
    if is_evaluated(config):
        _check_evaluate(config, mesh)
    _check_best(config)
    _check_export(config)
    _check_data(config, given)


def evaluated_stages(config: ConfigDict) -> tuple[str, ...]:
    """The stages of the run inside which is evaluated."""
    return tuple(
        name for name in ("sft", "rl") if name in config.stages and config[name].eval_every
    )


def is_evaluated(config: ConfigDict) -> bool:
    """Whether the run evaluates anything, as a stage or inside one."""
    return "evaluate" in config.stages or bool(evaluated_stages(config))


def evaluation_metrics(config: ConfigDict) -> tuple[str, ...]:
    """The metrics that can tell which checkpoint is the best; more is better in each."""
    num_samples = config.evaluate.num_samples
    accs = ("acc", "acc_low", "acc_high")
    rates = tuple(pass_rates([0], num_samples))
    names = () if has_benchmarks_only(config) else (*accs, "fmt", *rates)
    for benchmark, _ in config.evaluate.benchmarks:
        names += tuple(f"{benchmark}/{key}" for key in (*accs, *rates))
    return names + (tuple(f"mean/{key}" for key in accs) if config.evaluate.benchmarks else ())


def has_benchmarks_only(config: ConfigDict) -> bool:
    """Whether benchmarks are evaluated, but no held-out questions: data.test is not set."""
    return bool(config.evaluate.benchmarks) and not has_test(config)


def has_test(config: ConfigDict) -> bool:
    """Whether data.test is set."""
    test = config.data.test
    return bool(test.path) if test.source == "jsonl" else bool(test.source)


def _check_stages(stages: tuple[str, ...]) -> None:
    if not stages:
        raise ValueError(
            f"stages must name at least one of {', '.join(STAGES)}, got (); write ('rl','evaluate')"
        )
    for stage in stages:
        _check_choice("stages", stage, STAGES)
    for stage in ("sft", "rl"):
        if stages.count(stage) > 1:
            raise ValueError(
                f"stages must name {stage!r} once, got {stages}; set {stage}.num_steps higher, or "
                "train on from an export in another --workdir"
            )


def _check_data(config: ConfigDict, given: Collection[str]) -> None:
    data = config.data
    for stage, name, is_used in (
        ("sft", "sft", "sft" in config.stages),
        ("rl", "train", "rl" in config.stages),
        ("evaluate", "test", is_evaluated(config) and not has_benchmarks_only(config)),
    ):
        if is_used and stage not in given:
            check_section(
                f"data.{name}",
                data[name],
                min_pixels=data.min_pixels,
                max_pixels=data.max_pixels,
            )


def _check_prompts(data: ConfigDict) -> None:
    if not re.fullmatch(r"\w+", data.think_tag) or data.think_tag == "answer":
        raise ValueError(
            "data.think_tag must be one word of letters, digits and _, other than 'answer', got "
            f"{data.think_tag!r}; set it to 'think', or to 'reasoning' for Qwen3-VL"
        )


def fill_in(config: ConfigDict, mesh: Mesh) -> ConfigDict:
    """A copy of a configuration, with the sizes that depend on the mesh filled in.

    Raises:
        ValueError: a value has another form than its key needs, or a rule names no mesh axis.
    """
    config = config.copy_and_resolve_references()
    check_forms(config)
    sharding.check_rules("sharding_rules", config.sharding_rules)
    num_shards = sharding.num_shards(sharding.batch_sharding(mesh, config.sharding_rules))
    for section in (config.sft, config.rl):
        section.microbatch_size = section.microbatch_size or num_shards
    return config


def _check_model(model: ConfigDict, mesh: Mesh) -> None:
    _check_choice("model.remat", model.remat, layers.REMATS)
    _check_choice("model.attention", model.attention, ATTENTIONS)
    if model.attention == "kernel" and sharding.platform(mesh) == "cpu":
        raise ValueError(
            "model.attention 'kernel' needs a TPU or a GPU, the devices are CPUs; set it to 'auto'"
        )
    for name in ("compute_dtype", "param_dtype", "moments_dtype"):
        _check_choice(f"model.{name}", model[name], DTYPES)
    for name in model.offload:
        _check_choice("model.offload", name, OFFLOADS)
    if model.offload and not sharding.has_host_memory(mesh):
        raise ValueError(
            f"model.offload {tuple(model.offload)} needs devices that can keep arrays in host "
            f"memory, which {mesh.local_devices[0].device_kind} cannot; set it to ()"
        )
    if model.freeze_decoder and (model.freeze_vision or model.lora_rank):
        raise ValueError(
            "model.freeze_decoder leaves nothing to train with model.freeze_vision "
            f"{model.freeze_vision} and model.lora_rank {model.lora_rank}, whose adapters are the "
            "decoder's; set freeze_decoder to False, or the others to False and 0"
        )


def _check_verifier(
    verifier: ConfigDict, overridden: Collection[str], *, has_function: bool
) -> None:
    _check_weights(verifier.weights)
    if verifier.reward and has_function:
        raise ValueError(
            f"a reward function was given beside verifier.reward {verifier.reward!r}; clear one"
        )
    if verifier.reward:
        load_reward(verifier.reward)
    elif not has_function:
        for key in ("verifier.weights", "verifier.success", "verifier.concurrency"):
            if key in overridden:
                raise ValueError(
                    f"--config.{key} has no effect without a reward function; leave it out or set "
                    "verifier.reward"
                )


def _check_weights(weights: Any) -> None:
    is_pairs = isinstance(weights, tuple) and all(
        isinstance(pair, tuple)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], int | float)
        and math.isfinite(pair[1])
        for pair in weights
    )
    names = [pair[0] for pair in weights] if is_pairs else []
    if not names or len(set(names)) < len(names):
        raise ValueError(
            "verifier.weights must be pairs of a component and its weight, each component once, "
            f"got {weights!r}; write (('acc', 0.8), ('short', 0.2))"
        )
    if "fmt" in names:
        raise ValueError(
            "verifier.weights names fmt, whose weight is rl.format_weight; set that key, and leave "
            "fmt out here"
        )


def _check_evaluate(config: ConfigDict, mesh: Mesh) -> None:
    evaluate = config.evaluate
    decoding, _ = _batch_shardings(config, mesh)
    sharding.check_divides("evaluate.batch_size", evaluate.batch_size, decoding)
    _check_sampling(evaluate)
    for pair in evaluate.benchmarks:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise ValueError(
                f"evaluate.benchmarks must be pairs (name, path), got {pair!r}; write "
                "(('mmmu', 'path/of/MMMU'),)"
            )
        _check_choice("a name in evaluate.benchmarks", pair[0], tuple(RELEASES))
    names = [name for name, _ in evaluate.benchmarks]
    if len(names) != len(set(names)):
        raise ValueError(
            f"evaluate.benchmarks names a benchmark twice: {', '.join(names)}; name each once"
        )
    if evaluate.judge_url and not (evaluate.judge_model and evaluate.benchmarks):
        raise ValueError(
            "evaluate.judge_url needs evaluate.judge_model and evaluate.benchmarks; set them or "
            "clear it"
        )


def _check_sampling(evaluate: ConfigDict) -> None:
    if evaluate.temperature == 0 and evaluate.num_samples > 1:
        raise ValueError(
            f"evaluate.num_samples {evaluate.num_samples} needs evaluate.temperature above 0, as "
            "greedy samples are all alike; set the temperature to that of rl, or num_samples to 1"
        )
    if evaluate.temperature == 0 and evaluate.top_p < 1:
        raise ValueError(
            f"evaluate.top_p {evaluate.top_p} has no effect at evaluate.temperature 0; set the "
            "temperature above 0, or evaluate.top_p to 1"
        )


def _check_best(config: ConfigDict) -> None:
    evaluated = evaluated_stages(config)
    if config.keep_best and {"sft", "rl"} & {*config.stages} and not evaluated:
        raise ValueError(
            f"keep_best {config.keep_best} needs evaluations inside a stage; set rl.eval_every or "
            "sft.eval_every, or keep_best to 0"
        )
    if config.keep_best and evaluated:
        _check_choice("best_metric", config.best_metric, evaluation_metrics(config))


def _check_export(config: ConfigDict) -> None:
    """Refuses a checkpoint to export that the run would not have after days of training."""
    step, stages = config.export.step, tuple(config.stages)
    if step not in ("last", "best") and not step.isdecimal():
        raise ValueError(
            f"export.step must be 'last', 'best' or the number of a saved step, got {step!r}"
        )
    before = stages[: stages.index("export")] if "export" in stages else ()
    trained = [stage for stage in before if stage in ("sft", "rl")]
    if step == "best" and trained and not (config.keep_best and config[trained[-1]].eval_every):
        raise ValueError(
            f"export.step 'best' needs {trained[-1]}.eval_every and keep_best above 0, got "
            f"{config[trained[-1]].eval_every} and {config.keep_best}; set them, or export.step to "
            "'last'"
        )
    if step.isdecimal() and trained and int(step) > config[trained[-1]].num_steps:
        raise ValueError(
            f"export.step {step} lies behind the last of {trained[-1]}.num_steps "
            f"{config[trained[-1]].num_steps}; name a step that is saved, or 'last'"
        )


def _check_sft(config: ConfigDict, mesh: Mesh) -> None:
    sft = config.sft
    decoding, training = _batch_shardings(config, mesh)
    sharding.check_divides("sft.batch_size", sft.batch_size, decoding)
    sharding.check_divides("sft.microbatch_size", sft.microbatch_size, training)
    _check_row("sft", config, num_response=1)
    _check_schedule("sft", sft, sft.num_steps)


def _batch_shardings(config: ConfigDict, mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """How batches are sharded in decoding and in training."""
    rules = config.decode_sharding_rules, config.sharding_rules
    decoding, training = (sharding.batch_sharding(mesh, each) for each in rules)
    return decoding, training


def _check_row(section: str, config: ConfigDict, num_response: int) -> None:
    """Refuses rows that are too short for the largest bucket and one response."""
    num_tokens, num_patches = max(map(tuple, config.data.buckets))
    for name, size in (("row_tokens", num_tokens + num_response), ("row_patches", num_patches)):
        if config[section][name] < size:
            raise ValueError(
                f"{section}.{name} {config[section][name]} does not hold the largest of "
                f"data.buckets, {num_tokens} tokens and {num_patches} patches, and a response of "
                f"{num_response} tokens; set it to {size} or more"
            )


def _check_rl(config: ConfigDict, mesh: Mesh, overridden: Collection[str]) -> None:
    rl = config.rl
    _check_choice("rl.objective", rl.objective, OBJECTIVES)
    _check_choice("rl.old_logp", rl.old_logp, OLD_LOGPS)
    for key in overridden:
        section = key.split(".")[0]
        if section in OBJECTIVES and section != rl.objective:
            raise ValueError(
                f"--config.{key} has no effect under rl.objective {rl.objective!r}; leave it out "
                f"or set rl.objective to {section!r}"
            )
    decoding, training = _batch_shardings(config, mesh)
    sharding.check_divides("rl.microbatch_size", rl.microbatch_size, training)
    for name in ("prompts_per_update", "decode_prompts"):
        sharding.check_divides(f"rl.{name}", rl[name], decoding)
    _check_multiple(
        "rl.prompts_per_step", rl.prompts_per_step, "rl.prompts_per_update", rl.prompts_per_update
    )
    _check_schedule("rl", rl, rl.num_steps * rl.prompts_per_step // rl.prompts_per_update)
    _check_profile(tuple(config.profile_steps), rl.num_steps)
    _check_row("rl", config, num_response=rl.max_response_tokens)
    _check_objective(rl.objective, config[rl.objective], overridden)


def _check_objective(name: str, section: ConfigDict, overridden: Collection[str]) -> None:
    """Checks the keys that the section of the objective has."""
    for key, choices in OBJECTIVE_CHOICES.items():
        if key in section:
            _check_choice(f"{name}.{key}", section[key], choices)
    if "region_weights" in section:
        _check_region_weights(name, section, overridden)
    if "reflect_mode" in section:
        _check_reflection(name, section, overridden)


def _check_profile(steps: tuple[int, ...], num_steps: int) -> None:
    is_pair = len(steps) == 2 and all(isinstance(step, int) for step in steps)
    if steps and not (is_pair and 0 <= steps[0] <= steps[1] < num_steps):
        raise ValueError(
            f"profile_steps {steps} must be the first and the last step to trace, between 0 and "
            f"rl.num_steps - 1 = {num_steps - 1}, such as (3, 5)"
        )


def _check_reflection(name: str, section: ConfigDict, overridden: Collection[str]) -> None:
    unread = {"no_cue": ("cue",), "resample": ("cue", "max_context", "reflect_credit")}
    for key in unread.get(section.reflect_mode, ()):
        if f"{name}.{key}" in overridden:
            raise ValueError(
                f"--config.{name}.{key} has no effect under {name}.reflect_mode "
                f"{section.reflect_mode!r}; leave it out or set {name}.reflect_mode to 'cue'"
            )


def _check_region_weights(name: str, section: ConfigDict, overridden: Collection[str]) -> None:
    for key in ("gamma_pos", "gamma_neg", "gamma_share"):
        if not section.region_weights and f"{name}.{key}" in overridden:
            raise ValueError(
                f"--config.{name}.{key} has no effect without {name}.region_weights; leave it out "
                f"or set {name}.region_weights to True"
            )
    if section.gamma_share and f"{name}.gamma_pos" in overridden:
        raise ValueError(
            f"--config.{name}.gamma_pos has no effect with {name}.gamma_share "
            f"{section.gamma_share}; leave one of them out"
        )


def _check_schedule(name: str, section: ConfigDict, num_updates: int) -> None:
    try:
        optimizer.make_schedule(
            learning_rate=section.learning_rate,
            warmup_steps=section.warmup_steps,
            num_steps=num_updates,
            schedule=section.schedule,
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _check_multiple(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(
            f"{name} {value} must be a multiple of {divisor_name} {divisor}; set it to "
            f"{max(value // divisor, 1) * divisor}"
        )
