"""Checks across a configuration's keys, before anything is loaded or compiled."""

from __future__ import annotations

import urllib.parse
from collections.abc import Collection, Iterator, Mapping

from jax.sharding import Mesh
from ml_collections import ConfigDict

from care_jax.config.keys import check_keys, leaves
from care_jax.config.resume import DRAWN_RESPONSES, TRAINING
from care_jax.data.examples import SECTIONS
from care_jax.data.sources import MIXTURE, check_section, has_option, parts_of
from care_jax.devices import distributed, sharding
from care_jax.learning import optimizer
from care_jax.method.objectives import OBJECTIVES
from care_jax.report.accuracy import pass_rates
from care_jax.rewards.reward_function import load_reward


def check_config(
    config: ConfigDict,
    mesh: Mesh,
    overridden: Collection[str] = (),
    given: Collection[str] = (),
    saved: Mapping[str, Collection[int]] | None = None,
) -> None:
    """Rejects a configuration from `fill_in` that cannot run, naming the key to change.

    Args:
        overridden: keys set on the command line, such as "care.beta"; those that other keys switch
            off are rejected, and those of stages that do not run are not.
        given: what is passed from Python instead: "rl" or "evaluate" for a stage's examples, and
            "reward".
        saved: the steps with a checkpoint in the workdir, by training stage; None: there are none.

    Raises:
        ValueError: one line, the first error found.
    """
    for name in ("sharding_rules", "decode_sharding_rules"):
        sharding.check_rules(name, config[name])
        distributed.check_mesh(mesh, config[name])
    trained = [stage for stage in TRAINING if stage in config.stages]
    for stage in trained:
        if config.stages.count(stage) > 1:
            raise ValueError(
                f"stages must name {stage!r} once, got {config.stages}; set {stage}.num_steps "
                "higher, or train an export (model.path) further in another --workdir"
            )
    in_order = [stage for stage in config.stages if stage in TRAINING]
    if in_order != trained:
        raise ValueError(
            f"stages must have the cold start ahead of RL, got {config.stages}; to train an "
            "imitation after RL, set model.path to its export in another --workdir"
        )
    _check_model(config.model, mesh)
    if config.verifier.reward and "reward" in given:
        raise ValueError(
            "expected one reward function, got one from Python and verifier.reward "
            f"{config.verifier.reward!r}; remove one"
        )
    if config.verifier.reward:
        load_reward(config.verifier.reward)
    for key, why in _unread(config, has_function="reward" in given):
        if key in overridden:
            raise ValueError(f"--config.{key} has no effect {why}")
    rules = config.decode_sharding_rules, config.sharding_rules
    batches, rows = (sharding.batch_sharding(mesh, each) for each in rules)
    for stage in trained:
        section = config[stage]
        sharding.check_divides(f"{stage}.microbatch_size", section.microbatch_size, rows)
        _check_row(stage, config)
    if "sft" in trained:
        if config.data.cue_share and f"</{config.data.think_tag}>" in config.care.cue:
            raise ValueError(
                f"data.cue_share {config.data.cue_share} teaches care.cue inside rationales, and "
                f"this cue closes the rationale: {config.care.cue!r}; set data.cue_share to 0"
            )
        sharding.check_divides("sft.batch_size", config.sft.batch_size, batches)
        _check_schedule("sft", config.sft, config.sft.num_steps)
    if "rl" in trained:
        for name in ("prompts_per_update", "decode_prompts"):
            sharding.check_divides(f"rl.{name}", config.rl[name], batches)
        _check_rl_steps(config)
    if is_evaluated(config):
        sharding.check_divides("evaluate.batch_size", config.evaluate.batch_size, batches)
        _check_evaluate(config.evaluate)
    _check_best(config, given)
    _check_export(config, saved or {})
    for stage, section in SECTIONS.items():
        is_held_out = is_evaluated(config) and not has_benchmarks_only(config, given)
        is_used = is_held_out if stage == "evaluate" else stage in trained
        if is_used and stage not in given:
            check_section(f"data.{section}", config.data[section], config.data)


def fill_in(config: ConfigDict, mesh: Mesh) -> ConfigDict:
    """A copy of a configuration, with the sizes that depend on the mesh filled in.

    A microbatch has at least a row per batch shard.

    ValueError: the value of a key is wrong, or a rule names an unknown mesh axis.
    """
    config = config.copy_and_resolve_references()
    check_keys(config)
    sharding.check_rules("sharding_rules", config.sharding_rules)
    num_shards = sharding.num_shards(sharding.batch_sharding(mesh, config.sharding_rules))
    for section in (config.sft, config.rl):
        section.microbatch_size = max(section.microbatch_size, num_shards)
    config.rl.decode_rows = config.rl.decode_rows or (2 if sharding.platform(mesh) == "gpu" else 8)
    return config


def evaluated_stages(config: ConfigDict) -> tuple[str, ...]:
    """The stages of the run with evaluations during training."""
    return tuple(name for name in TRAINING if name in config.stages and config[name].eval_every)


def is_evaluated(config: ConfigDict) -> bool:
    """Whether the run evaluates anything, as a stage or during training."""
    return "evaluate" in config.stages or bool(evaluated_stages(config))


def evaluation_metrics(config: ConfigDict, given: Collection[str] = ()) -> tuple[str, ...]:
    """The metrics that `best_metric` may name; higher is better in each."""
    accs = ("acc", "acc_low", "acc_high")
    rates = tuple(pass_rates([0], config.evaluate.num_samples))
    names = () if has_benchmarks_only(config, given) else (*accs, "fmt", *rates)
    for benchmark, _ in config.evaluate.benchmarks:
        names += tuple(f"{benchmark}/{key}" for key in (*accs, *rates))
    return names + (tuple(f"mean/{key}" for key in accs) if config.evaluate.benchmarks else ())


def has_benchmarks_only(config: ConfigDict, given: Collection[str] = ()) -> bool:
    """Whether benchmarks are evaluated, but no held-out questions, set in data.test or `given`."""
    return bool(config.evaluate.benchmarks) and not (has_test(config) or "evaluate" in given)


def has_test(config: ConfigDict) -> bool:
    """Whether data.test is set."""
    test = config.data.test
    return bool(test.path) if test.source == "jsonl" else bool(test.source)


def _unread(config: ConfigDict, *, has_function: bool) -> Iterator[tuple[str, str]]:
    """(key that the run does not read, why and what to do): errors on the command line."""
    if not (config.verifier.reward or has_function):
        for name in ("weights", "success", "concurrency", "max_failed"):
            why = "without a reward function; leave it out or set verifier.reward"
            yield f"verifier.{name}", why
    if not config.model.lora_rank:
        for name in ("lora_alpha", "lora_experts"):
            yield f"model.{name}", "without model.lora_rank; leave it out or set that above 0"
    elif not config.model.freeze_vision:
        why = "with model.lora_rank, which trains adapters alone; leave it out or set that to 0"
        yield "model.freeze_vision", why
    if not config.evaluate.judge_url:
        why = "without evaluate.judge_url; leave it out or set that"
        names = ("judge_model", "judge_timeout", "judge_retries", "judge_prices")
        yield from ((f"evaluate.{name}", why) for name in names)
    yield from _unread_data(config)
    if "rl" not in config.stages:
        yield "profile_steps", "without the stage 'rl'; leave it out or add that to stages"
        return
    teaches_cue = "sft" in config.stages and config.data.cue_share
    taught = {"care.cue"} if teaches_cue else set()
    objective = config.rl.objective
    for other in OBJECTIVES:
        why = f"under rl.objective {objective!r}; leave it out or set rl.objective to {other!r}"
        keys = [f"{other}.{name}" for name in config[other] if other != objective]
        yield from ((key, why) for key in keys if key not in taught)
    if config.rl.correction == "none":
        why = "without rl.correction; leave it out or set rl.correction to 'truncate' or 'mask'"
        yield "rl.correction_cap", why
    if not config.rl.carry_over:
        yield "rl.max_age", "without rl.carry_over; leave it out or set that above 0"
        if "rollouts" in config.model.offload:
            yield "model.offload", "on 'rollouts' without rl.carry_over; leave them out"
    if "reference" in config.model.offload:
        if not config[objective].beta:
            yield "model.offload", f"on 'reference' without {objective}.beta; leave it out"
        elif config.model.lora_rank:
            yield "model.offload", "on 'reference' with LoRA, which has no copy; leave it out"
    for name, why in _unread_of(objective, config[objective]):
        if (key := f"{objective}.{name}") not in taught:
            yield key, why


def _unread_data(config: ConfigDict) -> Iterator[tuple[str, str]]:
    """`_unread` within `data`."""
    for section in SECTIONS.values():
        if config.data[section].source == MIXTURE:
            keys = {key for key, _ in leaves(config.data[section])} - {"source", "parts"}
            why = f"on a mixture; leave it out or set data.{section}.parts[0]"
            yield from ((f"data.{section}.{key}", f"{why}.{key}") for key in sorted(keys))
    if "sft" in config.stages:
        sources = [part.source for part in parts_of(config.data.sft)]
        why = f"on the responses of data.sft, from {', '.join(sources)}; leave it out"
        for name in DRAWN_RESPONSES:
            if config.data[name] and not any(has_option(source, name) for source in sources):
                yield f"data.{name}", why


def _unread_of(objective: str, section: ConfigDict) -> Iterator[tuple[str, str]]:
    """`_unread` within the section of the objective."""
    switches = {
        "region_weights": ("gamma_pos", "gamma_neg", "gamma_share"),
        "rescue": ("delta", "rescue_scale"),
        "reflect": ("cue", "max_context", "s_refl", *(k for k in section if "reflect_" in k)),
    }
    for switch, names in switches.items():
        if not section.get(switch, True):
            why = f"without {objective}.{switch}; leave it out or set that to True"
            yield from ((name, why) for name in names)
    if section.get("region_weights") and section.gamma_share:
        why = f"with {objective}.gamma_share {section.gamma_share}; leave one of them out"
        yield "gamma_pos", why
    if section.get("rule", "nearest_diverse") != "nearest_diverse":
        why = f"under {objective}.rule {section.rule!r}; leave it out or set that to "
        yield "M", f"{why}'nearest_diverse'"
    if not section.beta and section.get("mean") != "tokens":
        yield "kl_rows", f"without {objective}.beta; leave it out or set that above 0"
    mode = section.get("reflect_mode")
    unread = {"no_cue": ("cue",), "resample": ("cue", "max_context", "reflect_credit")}
    why = f"under {objective}.reflect_mode {mode!r}; leave it out or set that to 'cue'"
    yield from ((name, why) for name in unread.get(mode, ()))


def _check_model(model: ConfigDict, mesh: Mesh) -> None:
    if model.attention == "kernel" and sharding.platform(mesh) == "cpu":
        raise ValueError(
            "model.attention 'kernel' needs a TPU or a GPU, the devices are CPUs; set it to 'auto'"
        )
    if model.offload and not sharding.has_host_memory(mesh):
        raise ValueError(
            f"model.offload {tuple(model.offload)} needs devices that list pinned host memory, "
            f"which {mesh.local_devices[0].device_kind} does not (a GPU does in a run, but not "
            "where care_jax.aot compiles without it); set it to ()"
        )


def _check_row(stage: str, config: ConfigDict) -> None:
    """Rejects rows that are too short for the largest bucket and one response."""
    num_response = 1 if stage == "sft" else config.rl.max_response_tokens
    num_tokens, num_patches = max(map(tuple, config.data.buckets))
    for name, size in (("row_tokens", num_tokens + num_response), ("row_patches", num_patches)):
        if config[stage][name] < size:
            raise ValueError(
                f"{stage}.{name} {config[stage][name]} is too small for the largest of "
                f"data.buckets ({num_tokens} tokens, {num_patches} patches) and a response of "
                f"{num_response} tokens; set it to {size} or more"
            )


def _check_schedule(name: str, section: ConfigDict, num_updates: int) -> None:
    keys = ("learning_rate", "warmup_steps", "schedule")
    try:
        optimizer.make_schedule(num_steps=num_updates, **{key: section[key] for key in keys})
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _check_rl_steps(config: ConfigDict) -> None:
    rl, steps = config.rl, tuple(config.profile_steps)
    if rl.prompts_per_step % rl.prompts_per_update:
        multiple = max(rl.prompts_per_step // rl.prompts_per_update, 1) * rl.prompts_per_update
        raise ValueError(
            f"rl.prompts_per_step {rl.prompts_per_step} must be a multiple of "
            f"rl.prompts_per_update {rl.prompts_per_update}; set it to {multiple}"
        )
    _check_schedule("rl", rl, rl.num_steps * rl.prompts_per_step // rl.prompts_per_update)
    if rl.correction != "none" and rl.old_logp != "trainer":
        raise ValueError(
            f"rl.correction {rl.correction!r} weighs tokens by the ratio of the trainer's "
            f"probability to the sampler's, and rl.old_logp {rl.old_logp!r} leaves out the former; "
            "set rl.old_logp to 'trainer', or rl.correction to 'none'"
        )
    if 0 < rl.dual_clip <= 1:
        raise ValueError(
            f"rl.dual_clip {rl.dual_clip} would clip the ratios of an unchanged policy; set it "
            "above 1, such as 3, or to 0"
        )
    care = config.care
    if rl.objective == "care" and care.rule == "nearest_diverse" and care.M < care.K:
        raise ValueError(
            f"care.M {care.M} candidates must hold care.K {care.K} hard negatives; add "
            f"--config.care.M={care.K}"
        )
    section = config[rl.objective]
    if section.get("mean") == "tokens" and section.kl_rows != "all":
        raise ValueError(
            f"{rl.objective}.mean 'tokens' counts the tokens of all rollouts, and "
            f"{rl.objective}.kl_rows {section.kl_rows!r} leaves some out of the batch; add "
            f"--config.{rl.objective}.kl_rows=all"
        )
    if steps and not 0 <= steps[0] <= steps[1] < rl.num_steps:
        raise ValueError(
            f"profile_steps {steps} must be the first and the last step to trace, between 0 and "
            f"rl.num_steps - 1 = {rl.num_steps - 1}, such as (3, 5)"
        )


def _check_evaluate(evaluate: ConfigDict) -> None:
    if evaluate.judge_url and not (evaluate.judge_model and evaluate.benchmarks):
        raise ValueError(
            "evaluate.judge_url needs evaluate.judge_model and evaluate.benchmarks; set them or "
            "clear it"
        )
    if evaluate.judge_url and not evaluate.judge_url.startswith(("http://", "https://")):
        raise ValueError(
            f"evaluate.judge_url must start with http:// or https://, got {evaluate.judge_url!r}; "
            "give the endpoint up to /chat/completions"
        )
    judge = urllib.parse.urlsplit(evaluate.judge_url)
    if judge.username is not None or judge.query or judge.fragment:
        raise ValueError(
            "evaluate.judge_url must have no user, password and query, which would be logged and "
            "saved with the configuration; put the key into the environment as JUDGE_API_KEY"
        )
    if evaluate.temperature == 0 and evaluate.num_samples > 1:
        raise ValueError(
            f"evaluate.num_samples {evaluate.num_samples} needs evaluate.temperature above 0, as "
            "greedy samples are identical; set the temperature to that of rl, or num_samples to 1"
        )
    if evaluate.temperature == 0 and evaluate.top_p < 1:
        raise ValueError(
            f"evaluate.top_p {evaluate.top_p} has no effect at evaluate.temperature 0; set the "
            "temperature above 0, or evaluate.top_p to 1"
        )


def _check_best(config: ConfigDict, given: Collection[str]) -> None:
    evaluated = evaluated_stages(config)
    if config.keep_best and {*TRAINING} & {*config.stages} and not evaluated:
        raise ValueError(
            f"keep_best {config.keep_best} needs evaluations inside a stage; set rl.eval_every or "
            "sft.eval_every, or keep_best to 0"
        )
    metrics = evaluation_metrics(config, given)
    if config.keep_best and evaluated and config.best_metric not in metrics:
        raise ValueError(
            f"best_metric must be one of {', '.join(metrics)}, got {config.best_metric!r}"
        )


def _check_export(config: ConfigDict, saved: Mapping[str, Collection[int]]) -> None:
    """Rejects an export.step that the run will not have saved, and exports of what is untrained."""
    step, stages = config.export.step, tuple(config.stages)
    before = stages[: stages.index("export")] if "export" in stages else ()
    trained = [stage for stage in before if stage in TRAINING]
    if not trained and "export" in stages and {*stages} & {*TRAINING}:
        raise ValueError(
            f"stages must have 'export' behind a training stage, got {stages}, where it would "
            "export the initial weights; move it to the end"
        )
    if not trained:
        return
    last, section = trained[-1], config[trained[-1]]
    if step == "best" and not (config.keep_best and section.eval_every):
        raise ValueError(
            f"export.step 'best' needs {last}.eval_every and keep_best above 0, got "
            f"{section.eval_every} and {config.keep_best}; set them, or export.step to 'last'"
        )
    if not step.isdecimal():
        return
    done = [*saved.get(last, ())]
    later = [each for each in _kept_steps(config, last) if each > max(done, default=0)]
    kept = [*done, *later][-config.keep_checkpoints :] if later else done
    is_best = config.keep_best and section.eval_every
    best = range(section.eval_every, section.num_steps + 1, section.eval_every) if is_best else ()
    if int(step) not in kept and int(step) not in best:
        more = f" or one of every {section.eval_every} as the best" if best else ""
        raise ValueError(
            f"export.step {step} must be a checkpoint of {last} that is kept after its last step, "
            f"{', '.join(map(str, kept))}{more}; set it to one of these or to 'last', or change "
            "checkpoint_every and keep_checkpoints"
        )


def _kept_steps(config: ConfigDict, stage: str) -> list[int]:
    """The newest checkpoints after a stage that neither stops nor saves a best one in between."""
    every, last, keep = config.checkpoint_every, config[stage].num_steps, config.keep_checkpoints
    return [*range(every, last, every)[-keep:], last][-keep:]
