"""The RL loop around scripted programs: what each update is given, what is logged, what resumes.

The whole loop with real programs runs in tests/end_to_end_test.py.
"""

import dataclasses
import gc
import json
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from report_page import data_of
from scripted import LOOP, STEPS, B, R, Script, T, credit_of, scripted_update

from care_jax.decoding.schedule import Sizes
from care_jax.devices import flops, sharding
from care_jax.learning import optimizer
from care_jax.learning.logprobs import ForwardOptions
from care_jax.learning.train_step import TrainState
from care_jax.method import credit
from care_jax.report.metrics import MetricWriter
from care_jax.rl import rollout_programs, step_metrics
from care_jax.run import checkpoint, weights
from care_jax.run import stage as run_stage
from care_jax.stages import rl, sft

CARE = dict(
    K=3,
    s=0.6,
    s_refl=0.7,
    delta=0.11,
    equalize=False,
    rescue=False,
    rescue_scale=0.8,
    robust=True,
    region_weights=False,
    gamma_pos=0.02,
    gamma_neg=0.03,
    gamma_share=0.0,
    mean="tokens",
    kl_rows="all",
    success="reward",
    reflect_replaces="always",
    eps_w=2e-6,
)
CLIP = dict(beta=0.3, clip_low=0.1, clip_high=0.4)
RL = dict(
    microbatch_size=2,
    num_rollouts=6,
    decode_rows=3,
    max_response_tokens=33,
    temperature=0.7,
    top_p=0.9,
)


NORMAL = dict(ddof=1, eps=4e-6)
MOMENTS = dict(ddof=1, eps=4e-6)


def test_every_key_reaches_the_function_it_is_for(make_run, monkeypatch):
    """Each key has a value of its own; the functions note what they are called with."""
    changes = {f"care.{key}": value for key, value in (CARE | CLIP).items()}
    changes |= {f"rl.{key}": value for key, value in RL.items()}
    changes |= {"care.M": 5, "care.rule": "mixed", "care.eps": 3e-6}
    changes |= {"care.anchor_rule": "random", "rl.dual_clip": 3.0}
    changes |= {"care.reflect_temperature": 0.6, "care.reflect_top_p": 0.8}
    changes |= {"model.remat": "layer", "rl.max_skipped": 2, "rl.warmup_steps": 8}
    run = make_run(changes)
    seen, given, decoders = {}, {}, []
    for module, name in (
        (rollout_programs, "compile_decoder"),
        (credit, "select_subgroups"),
        (credit, "care_credit"),
        (credit, "care_raw_advantages"),
        (rl, "train_step"),
    ):

        def noted(*args, name=name, **kwargs):
            seen[name], given[name] = kwargs, args
            decoders.extend([kwargs] * (name == "compile_decoder"))
            return jnp.zeros((2, R, T)), {}, None

        monkeypatch.setattr(module, name, noted)

    meanwhile = lambda: None  # noqa: E731
    rolled = rollout_programs.compile_rollout(run, None, None, meanwhile)
    update = rl.compile_update(run, None, None)
    rng, index = jax.eval_shape(lambda: jax.random.key(0)), jnp.arange(2)
    rest = {"attention": None, "keeps_routes": False}
    sampling = {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.8}
    assert sorted(decoders, key=lambda each: -each["top_p"]) == [rest | each for each in sampling]
    queues = [program.__self__ for program in (rolled.decode, rolled.reflect)]
    assert all(queue.meanwhile is meanwhile for queue in queues)
    first, second = (queue.sizes for queue in queues)
    updated = run.config.rl.prompts_per_update
    assert first == Sizes(
        num_slots=run.config.rl.decode_prompts,
        num_rows=3,
        num_rollouts=6,
        max_tokens=33,
        num_context_tokens=0,
        num_shards=1,
        period=updated,
    )
    context = rollout_programs.num_context_tokens(run)
    one = {"num_rows": 1, "num_rollouts": 1, "num_context_tokens": context}
    assert second == dataclasses.replace(first, **one) and context > 11
    jax.eval_shape(rolled.select, 0, 0, rng, index)
    selection = {"K": 3, "M": 5, "rule": "mixed", "anchor_rule": "random", "success": "reward"}
    assert seen["select_subgroups"] == selection
    jax.eval_shape(update.credit, 0, 0, 0, 0)
    settings = credit.CareSettings(**CARE, eps=3e-6)
    assert seen["care_credit"] == {"settings": settings}
    jax.eval_shape(update.raw_advantages, 0, 0, 0)
    assert seen["care_raw_advantages"] == {"settings": settings}
    attention = sharding.attention_impl("xla", run.config.sharding_rules, run.mesh)
    options = ForwardOptions(jnp.dtype("float32"), remat="layer", attention=attention)
    rest = {"microbatch_size": 2, "freeze_vision": False, "skip_nonfinite": True}
    state = TrainState(0, 0, step=jnp.int32(1))
    _, metrics, _ = update.update(state, 0)
    assert metrics == {"learning_rate": run.config.rl.learning_rate * 2 / 8}
    assert seen["train_step"] == rest
    assert given["train_step"][-2:] == (run.objective, options)
    clip = CLIP | {"dual_clip": 3.0}
    assert {key: getattr(run.objective, key) for key in clip} == clip


@pytest.mark.parametrize(
    ("name", "changes", "function", "keys"),
    [
        ("grpo", NORMAL, "grpo_credit", MOMENTS),
        ("gspo", NORMAL, "grpo_credit", MOMENTS),
        (
            "dapo",
            NORMAL | {"overlong_share": 0.25},
            "dapo_credit",
            MOMENTS | {"max_tokens": 33, "cache_tokens": 8},  # a quarter of 33, rounded
        ),
        ("dr_grpo", {}, "dr_grpo_credit", {"max_tokens": 33}),
        ("rloo", {}, "rloo_credit", {}),
    ],
)
def test_each_baseline_is_called_with_the_keys_of_its_section(
    make_run, monkeypatch, name, changes, function, keys
):
    """Its clip range and β too, and no other section's."""
    changes = {f"{name}.{key}": value for key, value in (CLIP | changes).items()}
    run = make_run(changes | {"rl.objective": name, "rl.max_response_tokens": 33})
    seen = {}

    def noted(called):
        return lambda *args, **kwargs: seen.update({called: kwargs}) or (jnp.zeros(2), None)

    for called in ("care_credit", "grpo_credit", "dapo_credit", "dr_grpo_credit", "rloo_credit"):
        monkeypatch.setattr(credit, called, noted(called))
    update = rl.compile_update(run, None, None)
    jax.eval_shape(update.credit, 0, 0)
    assert seen == {function: keys}
    assert {key: getattr(run.objective, key) for key in CLIP} == CLIP
    assert run.objective.has_sequence_ratio == (name == "gspo")


def test_log_probabilities_come_back_in_the_order_of_the_rows(
    make_run, groups, whole_batch, monkeypatch
):
    """Scored in microbatches of two rows; the scorer gives the tokens themselves."""
    run = make_run({"rl.row_tokens": 64, "rl.microbatch_size": 2})
    batch, plan = whole_batch(run, groups)
    assert plan.num_microbatches > 1

    def score_rows(params, rows, *args, **kwargs):
        return jnp.where(rows.predictor >= 0, rows.tokens, 0).astype(jnp.float32), None, None

    monkeypatch.setattr(run_stage, "score_rows", score_rows)
    logp = rl.compile_update(run, None, None).score(0, batch)
    is_scored = batch.rows.predictor >= 0
    np.testing.assert_array_equal(logp, np.where(is_scored, batch.rows.tokens, 0))


@pytest.mark.parametrize(("stage", "module"), [("rl", rl), ("sft", sft)])
def test_each_stage_makes_its_optimizer_of_its_own_keys(make_run, monkeypatch, stage, module):
    keys = {"weight_decay": 0.3, "max_grad_norm": 0.7}
    run = make_run({f"{stage}.{key}": value for key, value in keys.items()})
    seen = {}

    def make_optimizer(schedule, **settings):
        seen.update(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(optimizer, "make_optimizer", make_optimizer)
    with pytest.raises(KeyboardInterrupt):
        module.train(run, None, [])
    assert seen == keys


def test_utilisation_is_the_share_of_all_devices_peak(make_run, groups, monkeypatch):
    run = make_run({})
    groups = groups.replace(credit=credit_of(groups.rollouts.tokens.shape))
    worth = flops.model_flops(run.policy.config, groups.sizes, groups.num_trained)
    kind = jax.devices()[0].device_kind
    monkeypatch.setitem(flops.PEAK_FLOPS, kind, worth)
    metrics = step_metrics.utilisation(run, groups, 4.0)
    assert metrics == {"train_tflops_per_second": pytest.approx(worth / 4e12), "train_mfu": 0.25}


def test_the_report_shows_dapos_penalty_for_length(groups):
    """|y| beyond 5 of 8 tokens costs up to 0.5; other objectives show components as they are."""
    overlong = {"max_tokens": 8, "cache_tokens": 3}
    assert step_metrics.with_penalty(groups, None) is groups
    is_valid = groups.rollouts.is_valid
    num_tokens = np.resize([5, 8], is_valid.shape[:2])
    is_valid = np.arange(is_valid.shape[-1]) < num_tokens[..., None]
    given = groups.replace(rollouts=groups.rollouts.replace(is_valid=is_valid))
    found = step_metrics.with_penalty(given, overlong).components
    assert [*found.flat] == [{}, {"overlong penalty": -0.5}] * (num_tokens.size // 2)


def test_a_dapo_run_logs_the_penalty_with_its_rollouts(run_loop, make_run):
    changes = {"rl.objective": "dapo", "dapo.overlong_share": 0.9, "rl.max_response_tokens": 9}
    run_loop(changes=changes)
    path = make_run(LOOP).workdir / "rollouts.jsonl"
    groups = map(json.loads, path.read_text().splitlines())
    names = {name for group in groups for row in group["responses"] for name in row["components"]}
    assert names == {"overlong penalty"}


@pytest.fixture
def unbroken(run_loop):
    return run_loop()


def test_each_step_samples_from_the_newest_parameters_with_a_key_of_its_own(unbroken):
    script, params, _ = unbroken
    assert script.seen["decoded_with"] == [10, 12, 14, 16]
    assert float(params["text"]["w"]) == 18 and float(params["vision"]["w"][0]) == 8
    keys = [jax.random.fold_in(jax.random.key(3), step) for step in range(STEPS)]
    assert script.seen["rng"] == [jax.random.key_data(key).tolist() for key in keys]


def test_reference_stays_where_the_stage_began(unbroken):
    assert unbroken[0].seen["reference"] == [10] * 2 * STEPS


def test_updates_take_all_prompts_of_their_step_with_their_responses(unbroken, responses):
    """Two prompts an update, in whatever order; every response has some token that is trained."""
    seen = unbroken[0].seen
    rows = [
        [tokens[mask].tolist() for tokens, mask in zip(*group, strict=True)]
        for group in zip(np.asarray(responses.tokens), np.asarray(responses.is_valid), strict=True)
    ]
    is_trained = credit_of((B, R, T)).is_trained.any(-1)
    for step in range(STEPS):
        for index, places in enumerate(((0, 1), (2, 3))):
            expected = {
                tuple(seen["prompts"][step][place]): sorted(
                    row for row, used in zip(rows[place], is_trained[place], strict=True) if used
                )
                for place in places
            }
            assert seen["updated"][2 * step + index] == expected


def test_metrics_are_means_over_updates_and_count_what_was_sampled(unbroken, responses):
    _, _, metrics = unbroken
    assert [record["step"] for record in metrics] == list(range(STEPS))
    assert [record["loss"] for record in metrics] == [10.5, 12.5, 14.5, 16.5]
    norms = [(record["grad_norm"], record["grad_clipped"]) for record in metrics]
    assert norms == [(1.5, 1.0), (0.5, 0.0), (0.5, 0.0), (0.5, 0.0)]
    num_sampled = int(responses.is_valid[:, [0, 2]].sum() + responses.is_valid[:, 1, 2:].sum())
    assert [record["decoded_tokens"] for record in metrics] == [
        num_sampled * (step + 1) for step in range(STEPS)
    ]
    assert [record["verifier/fast_calls"] for record in metrics] == [3] * STEPS
    for record in metrics:  # the peak of a CPU is not known
        assert (
            record["train_tflops_per_second"] * record["train_seconds"] > 0
            and "train_mfu" not in record
        )


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_rows_that_cannot_change_the_parameters_are_not_trained_on(make_run, groups, beta):
    """Without a KL term rows whose advantage is 0."""
    credited = credit_of(groups.rollouts.tokens.shape)
    credited.advantage[1] = 0.0
    run = make_run({"rl.objective": "grpo", "grpo.beta": beta})
    programs = scripted_update(credit=lambda rollouts, scores: credited)
    found = rl.assign_credit(run, programs, groups)
    is_trained = found.credit.is_trained.any((1, 2)).tolist()
    assert is_trained == [True, beta > 0, True, True]


def test_credit_is_told_which_responses_were_not_judged(make_run, groups):
    components = np.array([[{"acc": 1.0}] * R] * B, object)
    components[2, 1] = {}
    seen = []

    def credit(rollouts, scores):
        seen.append(scores.acc)
        return credit_of(rollouts.tokens.shape)

    run = make_run({"rl.objective": "grpo"})
    rl.assign_credit(run, scripted_update(credit=credit), groups.replace(components=components))
    np.testing.assert_array_equal(np.argwhere(seen[0] == 0.5), [[2, 1]])


def test_the_log_holds_no_images_of_the_draws(run_loop, monkeypatch):
    """It is written while the next step decodes; DAPO's draws would fill a host."""
    held, write = [], rl.StepLog.write

    def noted(self, step, draws, *rest):
        held.extend(draw.prompts for draw in draws)
        write(self, step, draws, *rest)

    monkeypatch.setattr(rl.StepLog, "write", noted)
    run_loop()
    assert held == [None] * STEPS


def test_the_log_holds_no_routes_of_the_draws(groups):
    routes = np.zeros((*groups.rollouts.tokens.shape, 1, 1), np.int16)
    routed = groups.replace(rollouts=groups.rollouts.replace(routes=routes))
    assert rl._for_the_log(routed).rollouts.routes is None


class SecondStepIsSkipped(Script):
    """No response of the second step has credit."""

    def programs(self):
        def credit(rollouts, scores):
            made = credit_of(rollouts.tokens.shape)
            return made.replace(is_trained=made.is_trained & (len(self.seen["rng"]) != 2))

        return dataclasses.replace(super().programs(), credit=credit)


def test_an_update_without_a_response_is_not_called(run_loop):
    script, params, metrics = run_loop(make_script=SecondStepIsSkipped)
    assert script.seen["decoded_with"] == [10, 12, 12, 14]
    assert all(script.seen["updated"]) and float(params["text"]["w"]) == 16
    assert ["loss" in record for record in metrics] == [True, False, True, True]


class StatesAreWatched(Script):
    """Notes every state that an update returns, by weak reference."""

    def update(self, state, batch):
        state, *rest = super().update(state, batch)
        self.seen["states"].append(weakref.ref(state))
        return state, *rest


def test_no_cycle_keeps_the_state_behind_the_stage(run_loop):
    """It would stay on the devices, beside the evaluation, until the collector runs."""
    gc.disable()
    try:
        script, *_ = run_loop(make_script=StatesAreWatched)
        assert [state() for state in script.seen["states"]] == [None] * 2 * STEPS
    finally:
        gc.enable()


@pytest.mark.parametrize("old_logp", ["sampler", "trainer"])
def test_the_first_update_of_a_step_shows_the_mismatch(run_loop, responses, old_logp):
    """The scripted forward gives each token e^-10, and e times less from update to update."""
    _, _, records = run_loop(changes={"rl.old_logp": old_logp})
    is_trained = credit_of((B, R, T)).is_trained & np.asarray(responses.is_valid)
    logp = np.asarray(responses.logp, np.float64)[:2][is_trained[:2]]  # of the first of two updates
    for step, record in enumerate(records):
        change = np.abs(np.exp(-10.0 - 2 * step) - np.exp(logp))
        assert record["mismatch/mean"] == pytest.approx(change.mean(), rel=1e-4)
        assert record["mismatch/max"] == pytest.approx(change.max(), rel=1e-4)


def test_resumed_loop_does_what_the_unbroken_one_did(run_loop, unbroken):
    """Killed in its last step; the checkpoint before it is two steps old."""
    with pytest.raises(KeyboardInterrupt):
        run_loop("broken", dies_at=3)
    resumed, params, metrics = run_loop("broken")
    whole, expected_params, expected = unbroken
    for name in ("rng", "examples", "prompts", "decoded_with"):
        assert resumed.seen[name] == whole.seen[name][2:], name
    assert resumed.seen["updated"] == whole.seen["updated"][2 * 2 :]
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)
    kept = ("step", "loss", "decoded_tokens")
    for got, want in zip(metrics, expected, strict=True):
        assert {name: got[name] for name in kept} == {name: want[name] for name in kept}


@pytest.mark.parametrize("wanted", ["last", "best"])
def test_a_damaged_newest_checkpoint_is_left_for_the_one_before(
    run_loop, make_run, unbroken, tmp_path, monkeypatch, capfd, wanted
):
    """By an export, and by the loop, which does the steps behind it again."""
    monkeypatch.setattr(checkpoint, "_QUICK_BYTES", -1)  # as for a file of some size
    changes = {"rl.eval_every": 2, "keep_best": 1, "export.step": wanted}

    def evaluate(params, *, name, step):
        return {"acc": step / 10}

    run_loop("damaged", changes=changes, evaluate=evaluate)
    steps = tmp_path / "damaged" / "checkpoints" / "rl"
    path = next((steps / "4" / "state" / "d").iterdir())
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    found = weights.find(make_run(LOOP | changes, "damaged"), ())
    assert (found.stages, found.step) == (("rl",), 2)
    script, params, metrics = run_loop("damaged", changes=changes, evaluate=evaluate)
    assert script.seen["rng"] == unbroken[0].seen["rng"][2:]
    jax.tree.map(np.testing.assert_array_equal, params, unbroken[1])
    assert [record["step"] for record in metrics if record["stage"] == "rl"] == [0, 1, 2, 3]
    assert sorted(left.name for left in steps.iterdir()) == ["2", "4", "4.damaged"]
    assert capfd.readouterr().err.count("checkpoint 4 is damaged: state/d/") == 1


def test_checkpoint_of_another_backbone_is_refused(run_loop, policy, monkeypatch):
    run_loop()
    other = policy.fingerprint() | {"hidden_size": 97}
    monkeypatch.setattr(type(policy), "fingerprint", lambda self: other)
    with pytest.raises(ValueError, match=r"of another model: hidden_size"):
        run_loop()


def test_the_report_shows_logged_steps_and_a_resumed_one_shows_each_once(run_loop, tmp_path):
    """Nothing was saved, and the last step not logged, when it died."""
    changes = {"checkpoint_every": STEPS}
    with pytest.raises(KeyboardInterrupt):
        run_loop(dies_at=3, changes=changes)
    before = data_of(tmp_path / "run")
    assert [*before["steps"]] == before["logged"] == [0]
    script, _, metrics = run_loop(changes=changes)
    data = data_of(tmp_path / "run")
    assert data["logged"] == [0, 2, 3] and len(data["steps"]) == 3
    assert data["stages"][0]["steps"] == [record["step"] for record in metrics]
    shown = [group["id"] for group in data["steps"][3]]
    assert len(shown) == 2 and set(shown) <= set(script.seen["examples"][-1])
    advantages = np.sort(credit_of((B, R, T)).advantage.ravel()).round(3)
    for group in data["steps"][3]:
        for response in group["responses"]:
            assert round(response["advantage"], 3) in advantages
        place = script.seen["examples"][-1].index(group["id"])
        assert [response["reason"].partition(".")[2] for response in group["responses"]] == [
            f"{place}.{row}" for row in range(R)
        ]


def test_tensorboard_and_trackers_get_the_groups_of_few_steps(run_loop, monkeypatch):
    shown = []
    monkeypatch.setattr(step_metrics, "_MOST_SHOWN", STEPS // 2)
    monkeypatch.setattr(MetricWriter, "show", lambda *given: shown.append(given[2]))
    run_loop()
    assert shown == [*range(0, STEPS, 2)]


def test_the_report_is_made_of_the_keys_of_its_section(make_run, monkeypatch):
    changes = {"groups_per_step": 3, "max_megabytes": 7.5, "image_side": 99}
    care = {"care.cue": " No.", "care.reflect_mode": "cue"}
    run = make_run({f"report.{key}": value for key, value in changes.items()} | care)
    seen = {}

    class Noted:
        def __init__(self, workdir, **settings):
            seen.update(settings, workdir=workdir)

    monkeypatch.setattr(step_metrics, "Report", Noted)
    step_metrics.open_report(run)
    wording = seen.pop("wording")
    assert seen == {
        "workdir": run.workdir,
        "groups_per_step": 3,
        "max_megabytes": 7.5,
        "image_side": 99,
        "rollouts_megabytes": run.config.report.rollouts_megabytes,
    }
    assert (wording.cue, wording.think_tag) == (" No.", "think")


@pytest.mark.parametrize("steps", [(1, 2), (2, STEPS - 1)])
def test_the_steps_asked_for_are_traced(run_loop, monkeypatch, steps):
    """From before the first to behind the last, which may be the run's."""
    calls = []
    updated = rl.train_batch

    def watched(*args):
        calls.append("update")
        return updated(*args)

    monkeypatch.setattr(rl, "train_batch", watched)
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: calls.append(path.name))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    run_loop(changes={"profile_steps": steps})
    first, last = steps
    traced = calls[calls.index("profile") + 1 : calls.index("stop")]
    assert calls.index("profile") == 2 * first  # two updates in a step
    assert traced == ["update"] * 2 * (last - first + 1)


@pytest.mark.parametrize("steps", [(1, 2), (0, 1)])
def test_a_run_resumed_behind_the_first_traced_step_traces_what_is_left(
    run_loop, monkeypatch, steps
):
    """It dies in step 3 and goes on from step 2, the last of those asked for or behind it."""
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    with pytest.raises(KeyboardInterrupt):
        run_loop(dies_at=3, changes={"profile_steps": steps})
    assert calls == ["start", "stop"]
    run_loop(changes={"profile_steps": steps})
    assert calls[2:] == (["start", "stop"] if steps[1] == 2 else [])


@pytest.mark.parametrize("objective", ["care", "grpo"])
def test_groups_without_an_update_are_counted_under_every_objective(run_loop, objective):
    *_, metrics = run_loop(changes={"rl.objective": objective})
    assert all(0 <= record["skip_rate"] <= 1 for record in metrics if record["stage"] == "rl")


def test_idle_devices_are_told_of_every_step(run_loop):
    *_, metrics = run_loop()
    assert all(record["device_idle"] <= 1 for record in metrics if record["stage"] == "rl")
