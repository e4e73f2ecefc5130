"""Configurations that cannot run, or set what nobody reads, are refused in one line."""

import jax
import pytest

from care_jax.config.checks import check_config, fill_in
from care_jax.devices.sharding import make_mesh
from care_jax.method.objectives import OBJECTIVES
from care_jax.run.policy import check_policy
from configs import common, tiny

MMMU = (("mmmu", "releases/MMMU"),)
# Of a run whose checkpoints after steps 60 and 100 of 100 are kept, and one is exported.
EXPORTED = {"stages": ("rl", "export"), "rl.num_steps": 100, "checkpoint_every": 60}
# Of a run that keeps the best checkpoint and exports it.
BEST = {"stages": ("rl", "export"), "rl.eval_every": 5, "keep_best": 1, "export.step": "best"}
SAMPLED = {"evaluate.temperature": 0.6, "evaluate.num_samples": 8}
GREEDY = {"rl.eval_every": 5, "evaluate.temperature": 0.0, "evaluate.top_p": 1.0}
JUDGED = {"stages": ("evaluate",), "evaluate.benchmarks": MMMU, "evaluate.judge_url": "http://x"}


PARTS = (common.source("synthetic", num_examples=9), common.source("word_problems"))
OF_PARTS = {"num_examples": 9, "tolerance": 0.05, "max_pixels": 64, "split": "train"}
OF_PARTS |= {"columns.id": "uid"}
FROM_FILE = {"stages": ("sft",), "data.sft.source": "jsonl", "data.sft.path": "a.jsonl"}


def reward(question, responses, example):
    return [{"acc": 1.0}] * len(responses)


REWARD = {"verifier.reward": f"{__name__}:reward"}
OF_REWARD = {
    "verifier.weights": (("acc", 0.5), ("short", -0.5)),
    "verifier.success": 0.5,
    "verifier.concurrency": 2,
}


def check(changes, *, given=(), overridden=None, saved=None):
    """Checks configs/tiny.py with only the stage "rl"; the changes are set on the command line."""
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    config = tiny.get_config()
    config.stages = ("rl",)
    config.update_from_flattened_dict(changes)
    overridden = [*changes] if overridden is None else overridden
    check_config(fill_in(config, mesh), mesh, overridden, given, saved)


ACCEPTED = {
    "every stage": {"stages": ("evaluate", "sft", "evaluate", "rl", "export", "evaluate")},
    "traced steps": {"profile_steps": (3, 99), "rl.num_steps": 100},
    "the best": BEST,
    "the last step": BEST | {"export.step": "100"},
    "a step that may be the best": BEST | {"export.step": "35"},
    "a step before the last": EXPORTED | {"export.step": "60"},
    "the best of a benchmark": BEST | {"evaluate.benchmarks": MMMU, "best_metric": "mmmu/acc"},
    "the best of several samples": BEST | SAMPLED | {"best_metric": "pass@2"},
    # The stage "export" alone does not read what only training reads.
    "an export of a finished run": {"stages": ("export",), "keep_best": 1, "export.step": "12"},
    "sampling": {"rl.eval_every": 5, "evaluate.top_p": 0.95} | SAMPLED,
    "greedy": GREEDY | {"evaluate.num_samples": 1},
    "a judge": JUDGED | {"evaluate.judge_model": "m"},
    "a share": {"care.gamma_share": 0.2},
    "fixed weights": {"care.gamma_pos": 0.5, "care.gamma_neg": 0.5},
    "uniform weights": {"care.region_weights": False},
    "a cue": {"care.cue": "No.", "care.max_context": 9, "care.reflect_credit": "prompt_only"},
    "a cue of the cold start alone": {
        **{"rl.objective": "grpo", "stages": ("sft", "rl"), "care.cue": "No."},
    },
    "a reward function": REWARD | OF_REWARD,
    "no responses that are drawn": {
        **FROM_FILE,
        **{"data.cue_share": 0.0, "data.teacher_error": 0.0},
    },
    "a frozen tower beside adapters": {"model.lora_rank": 4, "model.freeze_vision": True},
    "a correction": {
        **{"rl.old_logp": "trainer", "rl.correction": "mask", "rl.correction_cap": 5.0},
        **{"rl.temperature": 0.7, "care.reflect_credit": "prompt_only"},
    },
}
REFUSED = {
    "a stage twice": (
        {"stages": ("rl", "sft", "rl")},
        r"stages must name 'rl' once, .*; set rl\.n",
    ),
    "a cold start after RL": ({"stages": ("rl", "sft")}, "stages must have the cold start ahead"),
    "more negatives than candidates": (
        {"care.K": 20},
        r"care\.M 6 candidates must hold care\.K 20 .*; add --config\.care\.M=20",
    ),
    "a dual clip of unchanged policies": (
        {"rl.dual_clip": 1.0},
        r"dual_clip 1\.0 would clip .*; set it above 1, such as 3, or to 0",
    ),
    "a mean over rollouts that are not in the batch": (
        {"care.mean": "tokens"},
        r"mean 'tokens' counts .*kl_rows 'subgroup' leaves .*; add --config\.care\.kl_rows=all",
    ),
    "a rationale that teaches a cue which ends it": (
        {"data.cue_share": 0.1, "care.cue": "Fix:</think><answer>", "stages": ("sft",)},
        r"teaches care\.cue inside rationales, .* closes .*; set data\.cue_share to 0",
    ),
    "greedy rollouts, which are all the same": (
        {"rl.temperature": 0},
        r"rl\.temperature must lie in \(0, 100\]",
    ),
    "a judge without a model": (JUDGED, "judge_url needs evaluate.judge_model and"),
    "a judge without a benchmark": (
        JUDGED | {"evaluate.judge_model": "m", "evaluate.benchmarks": ()},
        "judge_url needs evaluate.judge_model and evaluate.benchmarks",
    ),
    "a key in the judge's address": (
        JUDGED | {"evaluate.judge_model": "m", "evaluate.judge_url": "https://us:KEY@x/v1"},
        r"judge_url must have no user, password and query, [^K]*; put the key .*JUDGE_API_KEY",
    ),
    "a key in its query": (
        JUDGED | {"evaluate.judge_model": "m", "evaluate.judge_url": "https://x/v1?key=KEY"},
        r"judge_url must have no user, password and query, [^K]*; put the key .*JUDGE_API_KEY",
    ),
    "a judge's address of another kind": (
        JUDGED | {"evaluate.judge_model": "m", "evaluate.judge_url": "file:///etc/passwd"},
        r"judge_url must start with http:// or https://, got 'file:///etc/passwd'; give the",
    ),
    "equal samples": (
        GREEDY | {"evaluate.num_samples": 4},
        "num_samples 4 needs .*temperature above",
    ),
    "top_p of a greedy choice": (GREEDY | {"evaluate.top_p": 0.9}, "top_p 0.9 has no effect"),
    "the best without evaluations": (
        BEST | {"rl.eval_every": 0},
        "keep_best 1 needs evaluations inside a stage; set rl.eval_every",
    ),
    "a metric that is not written": (
        BEST | {"best_metric": "eval/acc"},
        "best_metric must be one of acc, .*, fmt, got 'eval/acc'",
    ),
    "pass@2 of one sample": (
        BEST | {"best_metric": "pass@2"},
        "must be one of acc, .* got 'pass@2'",
    ),
    "a mean of no benchmarks": (BEST | {"best_metric": "mean/acc"}, "must be .* got 'mean/acc'"),
    "no held-out data": (BEST | {"data.test.source": ""}, "data.test.source"),
    "an export before the training": (
        {"stages": ("export", "rl")},
        r"'export' behind a training stage, got \('export', 'rl'\), .* move it to the end",
    ),
    "an export after the last step": (
        BEST | {"export.step": "101"},
        "export.step 101 must be a checkpoint of rl that is kept after its last step, 50, 100 or "
        "one of every 5 as the best; set it to",
    ),
    "an export of a step that is not saved": (
        EXPORTED | {"export.step": "7"},
        "export.step 7 must be a checkpoint of rl that is kept after its last step, 60, 100; set "
        "it to one of these or to 'last', or change checkpoint_every and keep_checkpoints",
    ),
    "an export of a step that is deleted": (
        EXPORTED | {"export.step": "60", "keep_checkpoints": 1},
        "export.step 60 must be .*, 100; set it to",
    ),
    "the best of a stage without evaluations": (
        EXPORTED | {"export.step": "35", "rl.eval_every": 5},
        "export.step 35 must be .*, 60, 100; set it to",
    ),
    "an export of the best of none": (
        BEST | {"rl.eval_every": 0, "keep_best": 0},
        "'best' needs rl.eval_every and keep_best above 0, got 0 and 0; set them",
    ),
    "a module that is not there": (
        {"stages": ("export",), "verifier.reward": "no_such:f"},
        "expected verifier.reward as module:function",
    ),
    "steps in the wrong order": ({"profile_steps": (5, 3)}, "the first and the last step to trace"),
    "steps before the first": ({"profile_steps": (-1, 2)}, "the first and the last step to trace"),
    "steps after the last": ({"profile_steps": (0, 100)}, "between 0 and rl.num_steps - 1 = 99"),
    # Even where the trainer's probabilities are there for another reason.
    "a correction of the sampler's own probabilities": (
        {"rl.correction": "truncate", "care.reflect_credit": "prompt_only"},
        r"correction 'truncate' weighs .* rl\.old_logp 'sampler' .*; set rl\.old_logp to 'trainer'",
    ),
    "a cap of no correction": (
        {"rl.correction_cap": 3.0, "rl.old_logp": "trainer"},
        r"config\.rl\.correction_cap has no effect without rl\.correction",
    ),
    "a cap that leaves nothing": (
        {"rl.correction": "mask", "rl.old_logp": "trainer", "rl.correction_cap": 1.0},
        r"rl\.correction_cap must lie in \(1, inf\)",
    ),
    "a fixed weight beside a share": (
        {"care.gamma_share": 0.2, "care.gamma_pos": 0.1},
        r"gamma_pos has no effect with care\.gamma_share 0\.2",
    ),
    **{
        f"{name} under uniform weights": (
            {f"care.{name}": 0.5, "care.region_weights": False},
            f"config.care.{name} has no effect without care.region_weights",
        )
        for name in ("gamma_pos", "gamma_neg", "gamma_share")
    },
    **{
        f"{key} without {switch}": (
            {key: value, switch: off},
            rf"config\.{key} has no effect without {switch}; leave it out",
        )
        for switch, off, key, value in (
            ("care.reflect", False, "care.cue", "No."),
            ("care.reflect", False, "care.s_refl", 0.1),
            ("care.reflect", False, "care.reflect_top_p", 0.9),
            ("care.rescue", False, "care.rescue_scale", 0.1),
            ("rl.carry_over", 0.0, "rl.max_age", 3),
            ("model.lora_rank", 0, "model.lora_alpha", 8.0),
        )
    },
    **{
        f"{key} of a mixture": (
            {key: value, "data.train.source": "mixture", "data.train.parts": PARTS},
            rf"{key} has no effect on a mixture; .* set data\.train\.parts\[0\]\.{name}$",
        )
        for name, value in OF_PARTS.items()
        for key in [f"data.train.{name}"]
    },
    **{
        f"{key} of responses from a file": (
            FROM_FILE | {key: value},
            rf"{key} has no effect on the responses of data\.sft, from jsonl; leave it out",
        )
        for key, value in {"data.cue_share": 0.5, "data.teacher_error": 0.9}.items()
    },
    "wrong readings of a source that has none": (
        {"stages": ("sft",), "data.misread_share": 0.5},
        r"data\.misread_share has no effect on the responses of data\.sft, from synthetic",
    ),
    "a judge's model without its address": (
        {"evaluate.judge_model": "m"},
        r"evaluate\.judge_model has no effect without evaluate\.judge_url",
    ),
    "a trace of a cold start": (
        {"profile_steps": (3, 5), "stages": ("sft",)},
        "profile_steps has no effect without the stage 'rl'",
    ),
    "a trained tower beside adapters": (
        {"model.lora_rank": 4, "model.freeze_vision": False},
        r"model\.freeze_vision has no effect with model\.lora_rank, which",
    ),
    "the KL's rows without a KL": (
        {"care.kl_rows": "all", "care.beta": 0.0},
        r"care\.kl_rows has no effect without care\.beta",
    ),
    **{
        f"offloaded {name}": (
            {"model.offload": (what,), **changes},
            rf"model\.offload has no effect on '{what}' with",
        )
        for name, what, changes in (
            ("rollouts that are not carried over", "rollouts", {"rl.carry_over": 0.0}),
            ("reference without a KL", "reference", {"care.beta": 0.0}),
            ("reference of adapters", "reference", {"care.beta": 0.1, "model.lora_rank": 4}),
        )
    },
    "candidates that the rule does not take": (
        {"care.rule": "nearest", "care.M": 5},
        r"care\.M has no effect under care\.rule 'nearest'",
    ),
    **{
        f"{key} under {mode}": (
            {key: value, "care.reflect_mode": mode},
            rf"config\.{key} has no effect under care\.reflect_mode",
        )
        for mode, key, value in (
            ("no_cue", "care.cue", "No."),
            ("resample", "care.max_context", 9),
            ("resample", "care.reflect_credit", "prompt_only"),
        )
    },
    **{
        f"{key} without a function": ({key: value}, f"config.{key} has no effect without a reward")
        for key, value in OF_REWARD.items()
    },
}


def test_a_file_with_more_negatives_than_candidates_is_refused_where_they_are_selected():
    with pytest.raises(ValueError, match=r"care\.M 6 candidates must hold care\.K 20 "):
        check({"care.K": 20}, overridden=())
    check({"rl.objective": "grpo", "care.K": 20}, overridden=())


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_a_configuration_that_can_run_is_accepted(changes):
    check(changes)


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_configuration_that_cannot_run_is_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        check(changes)
    assert "\n" not in str(error.value)


def test_a_step_that_is_saved_already_may_be_exported():
    """Such as one saved by SIGTERM; the steps after the last are those of the schedule."""
    changes = EXPORTED | {"export.step": "73"}
    check(changes, saved={"rl": [60, 73]})
    with pytest.raises(ValueError, match="after its last step, 73, 100; set"):
        check(changes | {"export.step": "74"}, saved={"rl": [60, 73]})
    with pytest.raises(ValueError, match="after its last step, 90, 100; set"):
        check(changes | {"export.step": "60"}, saved={"rl": [90]})
    with pytest.raises(ValueError, match="after its last step, 73, 100; set"):  # 60 makes room
        check(changes | {"export.step": "60"}, saved={"rl": [60, 73]})
    check(changes | {"export.step": "60", "keep_checkpoints": 1}, saved={"rl": [60, 100]})


def test_held_out_rows_from_python_have_metrics_beside_those_of_benchmarks():
    """`data.test` is empty."""
    changes = BEST | {"evaluate.benchmarks": MMMU, "data.test.source": "", "best_metric": "acc"}
    check(changes, given=["evaluate"])
    with pytest.raises(ValueError, match=r"best_metric must be one of mmmu.*, got 'acc'"):
        check(changes)


def test_a_function_from_python_takes_the_place_of_the_one_of_the_configuration():
    check(OF_REWARD, given=["reward"])
    with pytest.raises(
        ValueError, match=r"got one from Python and verifier\.reward '.*; remove one"
    ):
        check(REWARD, given=["reward"])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objective_takes_its_own_keys_and_no_others(objective):
    """Clip range and β belong to an objective: GSPO's range says nothing to DAPO."""
    for section in OBJECTIVES:
        for key in common.get_config()[section]:
            options = {"overridden": [f"{section}.{key}"]}
            if section == objective:
                check({"rl.objective": objective, f"{objective}.beta": 0.02}, **options)
                continue
            with pytest.raises(ValueError, match=f"config.{section}.{key} has no effect under"):
                check({"rl.objective": objective}, **options)


PUBLISHED = {  # clip range and β
    "care": (0.2, 0.28, 0.02),
    "grpo": (0.2, 0.2, 0.02),
    "dapo": (0.2, 0.28, 0.0),
    "gspo": (3e-4, 4e-4, 0.0),
    "dr_grpo": (0.2, 0.2, 0.0),
    "rloo": (0.2, 0.2, 0.0),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objective_by_its_name_alone_has_the_published_settings(objective):
    config = common.get_config()[objective]
    assert (config.clip_low, config.clip_high, config.beta) == PUBLISHED[objective]


def test_a_reflected_context_that_leaves_no_room_is_refused(policy):
    """The cue counts by its tokens, so only the tokenizer can tell."""
    config = common.get_config()
    config.rl.max_response_tokens = config.care.max_context + 40
    with pytest.raises(ValueError, match=r"a cue of 68 tokens .* care\.max_context to 498 or"):
        check_policy(config, policy)
    config.care.reflect_mode = "no_cue"
    check_policy(config, policy)
    config.care.max_context = config.rl.max_response_tokens
    with pytest.raises(ValueError, match="a cue of 0 tokens"):
        check_policy(config, policy)
    config.care.reflect_mode = "resample"
    check_policy(config, policy)
