"""The RL loop around scripted programs: what each update is given, what is logged, what resumes.

The whole loop with real programs runs in tests/end_to_end_test.py.
"""

import json
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from care_jax import optimizer, roofline, sft, sharding, train
from care_jax.batch import Example, Scores
from care_jax.credit import Credit
from care_jax.prompt import prompt_sizes
from care_jax.report import page
from care_jax.rollout import Groups, Roster

STEPS, B, R, T = 4, 4, 3, 9


def groups_of(rollouts, seed=0):
    """Groups of B prompts; no two numbers in them are alike."""
    rng = np.random.default_rng(seed)
    shape = rollouts.tokens.shape
    acc = rng.permutation(np.arange(B * R) % 2).reshape(B, R).astype(np.float32)
    scores = Scores(
        acc=acc,
        fmt=np.ones((B, R), np.float32),
        reward=0.9 * acc + 0.1,
        is_think=rng.random(shape) < 0.5,
        is_answer=rng.random(shape) < 0.5,
        num_think=np.full((B, R), 2),
        num_answer=np.full((B, R), 1),
        has_answer=np.ones((B, R), bool),
    )
    return Groups(jax.tree.map(np.asarray, rollouts), scores, None, np.zeros(B, bool))


def credit_of(shape, seed=0):
    rng = np.random.default_rng(seed)
    return Credit(
        advantage=rng.normal(size=shape[:2]),
        token_advantage=rng.normal(size=shape),
        row_weight=rng.random(shape[:2]),
        prompt_weight=rng.random(shape[0]),
        is_trained=rng.random(shape) < 0.5,
    )


@pytest.fixture
def groups(responses):
    return groups_of(responses)


@pytest.fixture
def records(policy, questions):
    return [policy.prompts.tokenize(example) for example in questions((7, 0, 5, 2))]


@pytest.fixture
def whole_batch(records):
    """Makes the batch of one update over all B prompts, of one process."""

    def whole_batch(run, groups):
        run.config.rl.update(prompts_per_step=B, prompts_per_update=B)
        credited = credit_of(groups.rollouts.tokens.shape)
        roster = Roster(np.arange(B), prompt_sizes(records), ["made"] * B)
        num_tokens = num_tokens_of(groups.rollouts.is_valid)
        return train.train_batch(run, roster, records, groups, credited, num_tokens, 0)

    return whole_batch


def num_tokens_of(is_valid):
    """Of the longest row of each prompt."""
    return is_valid.sum(-1).max(1)


PARTS = {"rl.prompts_per_step": B, "rl.prompts_per_update": 2}


def test_update_gets_its_part_of_the_rows_in_the_smallest_bucket(make_run, groups, records):
    rollouts, scores = groups.rollouts, groups.scores
    is_valid = rollouts.is_valid.copy()
    is_valid[2:, :, 5:] = False
    is_valid[2, 1, :5] = True
    groups = Groups(rollouts.replace(is_valid=is_valid), scores, None, groups.has_reflection)
    credited = credit_of(is_valid.shape)
    run = make_run(PARTS | {"rl.response_buckets": (4, 5, 7, 9)})
    roster = Roster(np.arange(B), prompt_sizes(records), ["made"] * B)
    num_tokens = num_tokens_of(is_valid)
    batch = train.train_batch(run, roster, records, groups, credited, num_tokens, 1)
    expected = {
        "tokens": rollouts.tokens,
        "is_valid": is_valid,
        "token_advantage": credited.token_advantage,
        "old_logp": rollouts.logp,
        "ref_logp": np.zeros(is_valid.shape),
        "is_trained": credited.is_trained,
        "is_answer": scores.is_answer,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(batch, name), value[2:4, :, :5], err_msg=name)
    np.testing.assert_allclose(batch.row_weight, credited.row_weight[2:4])
    np.testing.assert_allclose(batch.prompt_weight, credited.prompt_weight[2:4])
    prompts = run.policy.prompts.batch(records[2:4])
    np.testing.assert_array_equal(batch.prompts.tokens, prompts.tokens)

    first = train.train_batch(run, roster, records, groups, credited, num_tokens, 0)
    assert first.tokens.shape[-1] == (9 if is_valid[:2, :, 7:].any() else 7)


def test_process_gives_an_update_its_own_rows_in_the_bucket_of_all(make_run, responses, policy):
    """It has the second of each two prompts; the long prompts and rows are the other process's."""
    own = np.array([1, 3])
    questions = [Example(f"q{i}", "made", (), "1?" + " 1" * i, "") for i in (15, 0, 15, 0)]
    records = [policy.prompts.tokenize(example) for example in questions]
    sizes = prompt_sizes(records)
    rollouts = jax.tree.map(lambda x: np.asarray(x)[own], responses)
    is_valid = rollouts.is_valid & (np.arange(T) < 4)
    rollouts = rollouts.replace(is_valid=is_valid)
    scores = jax.tree.map(lambda x: x[own], groups_of(responses).scores)
    groups = Groups(rollouts, scores, None, np.zeros(2, bool))
    run = make_run(PARTS | {"rl.response_buckets": (4, 9)})
    for index in range(2):
        batch = train.train_batch(
            run,
            Roster(own, sizes, ["made"] * B),
            [records[place] for place in own],
            groups,
            credit_of(is_valid.shape),
            np.array([9, 4, 9, 4]),
            index,
        )
        np.testing.assert_array_equal(batch.tokens, rollouts.tokens[index : index + 1])
        prompts = policy.prompts.batch(records[own[index] : own[index] + 1], sizes)
        assert prompts.tokens.shape[1] > policy.prompts.batch([records[1]]).tokens.shape[1]
        np.testing.assert_array_equal(batch.prompts.tokens, prompts.tokens)


@pytest.mark.parametrize(
    ("changes", "is_recomputed"),
    [
        ({}, False),
        ({"rl.old_logp": "trainer"}, True),
        ({"care.reflect_credit": "prompt_only"}, True),
        ({"care.reflect_credit": "prompt_only", "rl.objective": "grpo"}, False),
    ],
)
def test_log_probabilities_come_from_whom_they_should(
    make_run, groups, whole_batch, changes, is_recomputed
):
    """The scorer gives the name of its parameters, a number."""
    run = make_run({"rl.response_buckets": (9,), "rl.beta": 0.1, **changes})
    shape = groups.rollouts.tokens.shape
    batch = whole_batch(run, groups)
    programs = scripted_update(score=lambda params, batch: jnp.full(batch.tokens.shape, params))
    sampled = groups.rollouts.logp
    for scored in train.with_logprobs(run, programs, [batch] * 2, 5.0, 7.0):
        np.testing.assert_array_equal(scored.ref_logp, np.full(shape, 7.0))
        np.testing.assert_array_equal(
            scored.old_logp, np.full(shape, 5.0) if is_recomputed else sampled
        )
    without_kl = make_run({"rl.response_buckets": (9,), "rl.beta": 0.0, **changes}, "without_kl")
    (scored,) = train.with_logprobs(without_kl, programs, [batch], 5.0, None)
    np.testing.assert_array_equal(scored.ref_logp, np.zeros(shape))


def test_adapters_leave_their_reference_in_place(make_run, groups, whole_batch):
    run = make_run({"rl.response_buckets": (9,), "rl.beta": 0.1, "model.lora_rank": 2})
    params = {"text": {"kernel": 3.0, "lora_a": 1.0, "lora_b": 2.0, "lora_scale": 1.0}}
    assert train.copy_reference(run, params) is None
    batch = whole_batch(run, groups)
    seen = []
    programs = scripted_update(score=lambda params, batch: seen.append(params) or batch.ref_logp)
    train.with_logprobs(run, programs, [batch], params, None)
    assert seen == [{"text": {"kernel": 3.0}}]


CARE = dict(
    num_negatives=3,
    negative_scale=0.6,
    reflected_scale=0.7,
    delta=0.11,
    equalize=False,
    rescue=False,
    rescue_scale=0.8,
    robust=True,
    gamma_pos=0.02,
    weight_eps=2e-6,
)
RL = dict(
    beta=0.3,
    clip_low=0.1,
    clip_high=0.4,
    prompts_per_microbatch=2,
    num_rollouts=6,
    max_response_tokens=33,
    temperature=0.7,
    top_p=0.9,
    logprob_chunk=77,
)


def test_every_key_reaches_the_function_it_is_for(make_run, monkeypatch):
    """Each key has a value of its own; the functions note what they are called with."""
    changes = {f"care.{key}": value for key, value in CARE.items()}
    changes |= {f"rl.{key}": value for key, value in RL.items()}
    changes |= {"care.num_candidates": 5, "care.rule": "mixed", "care.advantage_eps": 3e-6}
    changes |= {"grpo.ddof": 1, "grpo.advantage_eps": 4e-6}
    changes |= {"model.remat": "layer"}
    run, grpo = make_run(changes), make_run(changes | {"rl.objective": "grpo"}, "grpo")
    seen = {}
    for module, name in (
        (train.sampler, "decode"),
        (train.credit, "select_subgroups"),
        (train.credit, "care_credit"),
        (train.credit, "care_raw_advantages"),
        (train.credit, "grpo_credit"),
        (train, "train_step"),
        (train, "score_responses"),
    ):

        def noted(*args, name=name, **kwargs):
            seen[name] = kwargs
            return jnp.zeros((2, R, T)), None

        monkeypatch.setattr(module, name, noted)

    rollout, update = train.compile_rollout(run), train.compile_update(run, None, None)
    two = jnp.zeros(2)
    decoding = {"max_tokens": 33, "temperature": 0.7, "top_p": 0.9, "dtype": jnp.float32}
    rng, places = jax.eval_shape(lambda: jax.random.key(0)), jnp.arange(2)
    jax.eval_shape(rollout.decode, 0, two, rng, places)
    assert seen["decode"] == decoding | {"num_rows": 6, "forced": None}
    jax.eval_shape(rollout.reflect, 0, two, rng, places, two)
    assert seen["decode"].pop("forced") is not None
    assert seen["decode"] == decoding | {"num_rows": 1}
    jax.eval_shape(rollout.select, 0, 0, rng, places)
    assert seen["select_subgroups"] == {"num_negatives": 3, "num_candidates": 5, "rule": "mixed"}
    jax.eval_shape(update.credit, 0, 0, 0, 0)
    assert seen["care_credit"] == CARE | {"eps": 3e-6}
    jax.eval_shape(update.raw_advantages, 0, 0, 0)
    assert seen["care_raw_advantages"] == {"delta": 0.11, "eps": 3e-6, "robust": True}
    jax.eval_shape(train.compile_update(grpo, None, None).credit, 0, 0)
    assert seen["grpo_credit"] == {"eps": 4e-6, "ddof": 1}
    attention = sharding.attention_kernel("xla", run.config.sharding_rules, run.mesh)
    scoring = {"dtype": jnp.float32, "chunk": 77, "remat": "layer", "attention": attention}
    clip = {"beta": 0.3, "clip_low": 0.1, "clip_high": 0.4, "microbatch_size": 2}
    jax.eval_shape(update.update, 0, 0)
    assert seen["train_step"] == scoring | clip | {"partition": run.partition}


def test_log_probabilities_come_back_in_the_order_of_the_prompts(
    make_run, groups, whole_batch, monkeypatch
):
    """Scored in parts of two prompts; the scorer gives the tokens themselves."""
    run = make_run({"rl.response_buckets": (T,), "rl.prompts_per_microbatch": 2})
    batch = whole_batch(run, groups)

    def score_responses(params, prompts, tokens, *args, **kwargs):
        return tokens.astype(jnp.float32), None

    monkeypatch.setattr(train, "score_responses", score_responses)
    logp = train.compile_update(run, None, None).score(0, batch)
    np.testing.assert_array_equal(logp, groups.rollouts.tokens)


@pytest.mark.parametrize(("stage", "module"), [("rl", train), ("sft", sft)])
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


def test_utilisation_is_the_share_of_all_devices_peak(make_run, groups, records, monkeypatch):
    run = make_run({})
    roster = Roster(np.arange(B), prompt_sizes(records), ["made"] * B)
    num_tokens = groups.rollouts.is_valid.sum(-1)
    worth = roofline.model_flops(run.policy.config, roster.sizes, num_tokens)
    kind = jax.devices()[0].device_kind
    monkeypatch.setitem(roofline.PEAK_FLOPS, kind, worth)
    metrics = train.utilisation(run, roster, groups.rollouts, 4.0)
    assert metrics == {"train_tflops_per_second": pytest.approx(worth / 4e12), "train_mfu": 0.25}


def scripted_update(**programs):
    """UpdatePrograms of which a test gives some; the others must not be called."""
    names = ("to_decode_layout", "credit", "raw_advantages", "score", "update")
    return train.UpdatePrograms(**{name: programs.get(name) for name in names})


class Script:
    """Stands in for rollout and programs: an update adds 1 to parameters that start at 0 and 10."""

    def __init__(self, responses, dies_at=None):
        self.responses, self.dies_at = responses, dies_at
        self.seen = defaultdict(list)

    def roll_out(self, run, programs, params, rng, roster, examples, records, verifier):
        step = len(self.seen["rng"])
        if step == self.dies_at:
            raise KeyboardInterrupt
        self.seen["rng"].append(jax.random.key_data(rng).tolist())
        self.seen["decoded_with"].append(float(params["text"]["w"]))
        self.seen["examples"].append([example.id for example in examples])
        self.seen["prompts"].append([record.tokens.tolist() for record in records])
        assert roster.own.tolist() == list(range(B)) and roster.sources == ["made"] * B
        np.testing.assert_array_equal(roster.sizes, prompt_sizes(records))
        verifier.verify(["<answer>1</answer>"] * 3, ["1"] * 3)
        groups = groups_of(self.responses, step)
        is_forced = groups.rollouts.is_valid & (np.arange(R) == 1)[:, None] & (np.arange(T) < 2)
        return Groups(
            groups.rollouts.replace(is_forced=is_forced), groups.scores, None, groups.has_reflection
        )

    def score(self, params, batch):
        self.seen["reference"].append(float(params["text"]["w"]))
        return jnp.full(batch.tokens.shape, params["text"]["w"])

    def update(self, state, batch):
        for prompt, mask, tokens in zip(
            *map(np.asarray, (batch.prompts.tokens, batch.prompts.is_valid, batch.tokens)),
            strict=True,
        ):
            self.seen["updated"].append((prompt[mask].tolist(), tokens.tolist()))
        metrics = {"loss": state.params["text"]["w"]}
        params = jax.tree.map(lambda x: x + 1, state.params)
        return state.replace(params=params, step=state.step + 1), metrics

    def programs(self):
        return scripted_update(
            to_decode_layout=lambda params: params,
            credit=lambda rollouts, scores: credit_of(rollouts.tokens.shape),
            score=self.score,
            update=self.update,
        )


LOOP = {
    "seed": 3,
    "checkpoint_every": 2,
    "rl.objective": "grpo",
    "rl.num_steps": STEPS,
    "rl.num_rollouts": R,
    "rl.prompts_per_step": B,
    "rl.prompts_per_update": 2,
    "rl.response_buckets": (T,),
    "rl.beta": 0.1,
    "rl.warmup_steps": 5,
    "rl.learning_rate": 0.5,
    "log_every": 2,
    "report.groups_per_step": 2,
}


@pytest.fixture
def run_loop(make_run, questions, responses, monkeypatch, tmp_path):
    """Runs the loop of STEPS steps, two updates in each, or until a script dies."""

    def run_loop(folder="run", dies_at=None):
        script = Script(responses, dies_at)
        run = make_run(LOOP, folder)
        monkeypatch.setattr(train, "roll_out", script.roll_out)
        monkeypatch.setattr(train, "compile_rollout", lambda run: None)
        monkeypatch.setattr(train, "compile_update", lambda *_: script.programs())
        params = {"vision": {"w": jnp.zeros(2)}, "text": {"w": jnp.float32(10)}}
        params = train.train(run, params, questions(range(10)))
        return script, params, metrics_of(run)

    run_loop.workdir = lambda folder: tmp_path / folder
    return run_loop


def report_of(run_loop, folder="run"):
    return page.read((run_loop.workdir(folder) / "report.html").read_text())


def metrics_of(run):
    return [json.loads(line) for line in run.metrics.path.read_text().splitlines()]


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


def test_updates_take_all_prompts_of_their_step_in_order(unbroken, responses):
    seen = unbroken[0].seen
    prompts = [prompt for prompts in seen["prompts"] for prompt in prompts]
    tokens = np.asarray(responses.tokens).tolist() * STEPS
    assert seen["updated"] == list(zip(prompts, tokens, strict=True))


def test_metrics_are_means_over_updates_and_count_what_was_sampled(unbroken, responses):
    _, _, metrics = unbroken
    assert [record["step"] for record in metrics] == list(range(STEPS))
    assert [record["loss"] for record in metrics] == [10.5, 12.5, 14.5, 16.5]
    num_sampled = int(responses.is_valid[:, [0, 2]].sum() + responses.is_valid[:, 1, 2:].sum())
    assert [record["decoded_tokens"] for record in metrics] == [
        num_sampled * (step + 1) for step in range(STEPS)
    ]
    assert [record["verifier/fast_calls"] for record in metrics] == [3] * STEPS
    schedule = optimizer.make_schedule(
        learning_rate=0.5, warmup_steps=5, num_steps=2 * STEPS, schedule="cosine"
    )
    for record in metrics:  # the peak of a CPU is not known
        assert (
            record["train_tflops_per_second"] * record["train_seconds"] > 0
            and "train_mfu" not in record
        )
    rates = [record["learning_rate"] for record in metrics]
    np.testing.assert_allclose(rates, [schedule(2 * step) for step in range(STEPS)], rtol=1e-6)


def test_resumed_loop_does_what_the_unbroken_one_did(run_loop, unbroken):
    """Killed in its last step; the checkpoint before it is two steps old."""
    with pytest.raises(KeyboardInterrupt):
        run_loop("broken", dies_at=3)
    resumed, params, metrics = run_loop("broken")
    whole, expected_params, expected = unbroken
    for name in ("rng", "examples", "prompts", "decoded_with"):
        assert resumed.seen[name] == whole.seen[name][2:], name
    assert resumed.seen["updated"] == whole.seen["updated"][2 * B :]
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)
    kept = ("step", "loss", "decoded_tokens", "learning_rate")
    for got, want in zip(metrics, expected, strict=True):
        assert {name: got[name] for name in kept} == {name: want[name] for name in kept}


def test_checkpoint_of_another_backbone_is_refused(run_loop, policy, monkeypatch):
    run_loop()
    other = policy.fingerprint() | {"text.hidden_size": 97}
    monkeypatch.setattr(type(policy), "fingerprint", lambda self: other)
    with pytest.raises(ValueError, match=r"of another model: .*text\.hidden_size"):
        run_loop()


def test_the_report_shows_logged_steps_and_a_resumed_one_shows_each_once(run_loop):
    with pytest.raises(KeyboardInterrupt):
        run_loop(dies_at=3)
    before = report_of(run_loop)
    assert [entry["step"] for entry in before["steps"]] == before["logged"] == [0, 2]
    script, _, metrics = run_loop()
    data = report_of(run_loop)
    assert data["logged"] == [0, 2, 3] and len(data["steps"]) == 3
    assert data["stages"][0]["steps"] == [record["step"] for record in metrics]
    shown = [group["id"] for group in data["steps"][-1]["groups"]]
    assert len(shown) == 2 and set(shown) <= set(script.seen["examples"][-1])
    advantages = np.sort(credit_of((B, R, T)).advantage.ravel()).round(3)
    for group in data["steps"][-1]["groups"]:
        for response in group["responses"]:
            assert round(response["advantage"], 3) in advantages


def test_the_report_is_made_of_the_keys_of_its_section(make_run, monkeypatch):
    changes = {"groups_per_step": 3, "max_megabytes": 7.5, "image_side": 99}
    care = {"care.cue": " No.", "care.reflect_mode": "cue"}
    run = make_run({f"report.{key}": value for key, value in changes.items()} | care)
    seen = {}

    class Noted:
        def __init__(self, workdir, **settings):
            seen.update(settings, workdir=workdir)

        def begin(self, start):
            seen["start"] = start

    monkeypatch.setattr(train, "Report", Noted)
    train.open_report(run, 5)
    wording = seen.pop("wording")
    assert seen == {
        "workdir": run.workdir,
        "start": 5,
        "groups_per_step": 3,
        "max_megabytes": 7.5,
        "max_side": 99,
    }
    assert (wording.cue, wording.think_tag) == (" No.", "think")
