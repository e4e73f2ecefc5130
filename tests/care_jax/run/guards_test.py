"""A broken state is not saved: what counts as broken, and which checkpoint the error names."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import LOOP, Script

from care_jax.devices import distributed, sharding
from care_jax.devices.sharding import make_mesh
from care_jax.run import guards, weights
from care_jax.run.guards import Measured
from care_jax.run.run import abstract_params, make_adamw, start_state
from care_jax.run.workdir import open_checkpoints

FACTORS = dict(log_vocabulary=math.log(600), max_norm_factor=10.0, max_loss_factor=2.0)


@pytest.mark.parametrize(
    ("now", "last", "told"),
    [
        (Measured(99.0, 12.7), Measured(10.0, 1.0), ""),
        (Measured(100.1, 1.0), Measured(10.0, 1.0), "norm of its parameters is 100.1, was 10 in"),
        (Measured(math.inf, 1.0), Measured(10.0, 1.0), "norm of its parameters is inf"),
        (Measured(10.0, 12.9), Measured(10.0, 1.0), "12.9 nats per token, was 1 .* 2 times 6.397"),
        (Measured(10.0, math.nan), Measured(10.0, None), "loss on the last batch is nan nats"),
        # A start that is worse than a uniform guess is compared with itself.
        (Measured(10.0, 29.0), Measured(10.0, 15.0), ""),
        (Measured(10.0, 31.0), Measured(10.0, 15.0), "31 nats per token, was 15 .* 2 times 15"),
        (Measured(1.0, None), Measured(0.0, None), ""),
    ],
)
def test_divergence_is_a_multiple_of_the_last_state_and_of_a_uniform_guess(now, last, told):
    found = guards.divergence(now, last, **FACTORS)
    assert re.search(told, found) if told else found == ""


@pytest.mark.parametrize(
    ("dtype", "offload"),
    [
        pytest.param("float32", (), marks=pytest.mark.exhaustive),
        ("bfloat16", ("optimizer",)),
    ],
)
def test_the_sums_are_those_of_every_tensor_on_any_mesh(make_run, params, dtype, offload):
    """Also of moments that lie in host memory, and of tensors that are sharded."""
    run = make_run({"model.param_dtype": dtype, "model.offload": offload})
    run = dataclasses.replace(run, mesh=make_mesh(1, 4, 2))
    adamw = make_adamw(run, "rl")
    where = abstract_params(run)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    state = start_state(run, jax.device_put(params, sharding.of(where)), adamw, "rl")
    table = state.params["text"]["embed"]["table"]
    broken = table.at[1, :3].set(jnp.nan).at[2, 0].set(-jnp.inf)
    state.params["text"]["embed"]["table"] = jax.device_put(broken, table.sharding)
    trees = {"params": state.params, "optimizer": state.opt_state}
    sums = guards.compile_tensor_sums(run)(trees)
    assert sums.sharding.is_fully_replicated
    found = guards._named(sums, trees)
    bad = {name: count for name, (count, _) in found.items() if count}
    assert bad == {"params.text.embed.table": 4}
    name = "params.vision.merger.norm.scale"
    assert name in found
    norm = np.asarray(params["vision"]["merger"]["norm"]["scale"], np.float64)
    assert found[name][1] == pytest.approx((norm**2).sum(), rel=1e-2)
    is_moment = [name for name in found if name.startswith("optimizer.")]
    assert len(is_moment) == 2 * len(jax.tree.leaves(params))


class Breaks(Script):
    """The parameters become NaN, or large, in update `at`; losses and gradients stay finite."""

    value = jnp.nan
    at = 5  # the second of step 2

    def update(self, state, batch):
        after, metrics, logp = super().update(state, batch)
        if len(self.seen["updated"]) == self.at + 1:
            after.params["text"]["w"] = jnp.full_like(after.params["text"]["w"], self.value)
        return after, metrics | {"loss": jnp.float32(1)}, logp


def breaks(**fields):
    return type("Breaks", (Breaks,), fields)


def saved_in(tmp_path):
    return sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints" / "rl").iterdir())


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (breaks(), r"NaN or infinity in params\.text\.w \(1 values\)"),
        (breaks(value=500.0), r"the norm of its parameters is 502\.1, was 15\.1 in the last"),
        (breaks(value=3.0, loss=99.0), "its loss on the last batch is 99 nats per token"),
    ],
)
def test_a_broken_state_is_not_saved_and_the_last_good_one_is_named(
    run_loop, tmp_path, script, told
):
    """Of four steps, the third breaks the state; without an evaluation the fourth would save it."""
    script.at = 5 if script.loss == 1 else 0
    with pytest.raises(FloatingPointError) as error:
        run_loop(make_script=script, changes={"checkpoint_every": 2})
    saved, step = ([], 2) if script.at == 0 else ([2], 4)
    message = str(error.value)
    assert message.startswith(f"the state after {step} steps of rl is broken and was not saved: ")
    assert re.search(told, message) and "\n" not in message
    assert saved_in(tmp_path) == saved
    if saved:
        assert f"the last good checkpoint is {tmp_path / 'run/checkpoints/rl/2'}; run " in message
    else:
        assert "no checkpoint of rl was saved before; lower rl.learning_rate" in message


def test_a_broken_state_is_not_evaluated(run_loop):
    seen = []

    def evaluate(params, *, name, step):
        seen.append(step)
        return {"acc": 0.5}

    with pytest.raises(FloatingPointError, match="after 3 steps of rl is broken"):
        run_loop(make_script=Breaks, changes={"rl.eval_every": 1}, evaluate=evaluate)
    assert seen == [0, 1, 2]


def test_a_run_told_to_end_does_not_save_a_broken_state(run_loop, tmp_path):
    class Stopped(Breaks):
        def roll_out(self, *args):
            if len(self.seen["rng"]) == 3:
                raise distributed.Preempted
            return super().roll_out(*args)

    with pytest.raises(FloatingPointError, match="after 3 steps of rl is broken and was not saved"):
        run_loop(make_script=Stopped)
    assert saved_in(tmp_path) == [2]


def test_a_resumed_run_compares_with_what_was_saved(run_loop, make_run):
    """The loss of the last save is in its metadata, and the norm is that of its parameters."""
    with pytest.raises(KeyboardInterrupt):
        run_loop(dies_at=3, make_script=breaks(loss=12.0, at=99))
    with open_checkpoints(make_run(LOOP), "rl") as saved:
        metadata = saved._progress(2)["metadata"]
    assert metadata["state_check"]["loss"] == 12.0
    norm = math.sqrt(2 * 4**2 + 14**2)
    assert metadata["state_check"]["norm"] == pytest.approx(norm)
    with pytest.raises(FloatingPointError, match=r"25 nats per token, was 12 .* 2 times 12 "):
        run_loop(make_script=breaks(loss=25.0, at=99))


def test_a_saved_state_that_is_broken_is_not_gone_on_from(run_loop, tmp_path, monkeypatch):
    """As an earlier version saved it; the step before is named."""
    with monkeypatch.context() as patch:
        patch.setattr(guards, "not_finite", lambda found: "")
        patch.setattr(guards, "divergence", lambda *_, **__: "")
        run_loop(make_script=Breaks)
    assert saved_in(tmp_path) == [2, 4]
    with pytest.raises(FloatingPointError) as error:
        run_loop()
    folder = tmp_path / "run" / "checkpoints" / "rl"
    assert str(error.value) == (
        "rl starts from a broken state: NaN or infinity in params.text.w (1 values); remove "
        f"{folder / '4'}, then run the same command to resume from checkpoint 2"
    )


def test_weights_of_a_file_must_be_numbers(make_run, params):
    run = make_run({})
    params = jax.device_put(params, sharding.replicated(run.mesh))
    guards.check_weights(run, params, "model.path x", "change it")
    broken = jax.tree.map(lambda x: x, params)
    broken["text"]["norm"] = {"scale": jnp.full_like(params["text"]["norm"]["scale"], jnp.nan)}
    with pytest.raises(
        ValueError, match=r"x must have finite .* in text\.norm\.scale \(96 values\); change it"
    ):
        guards.check_weights(run, broken, "model.path x", "change it")


def test_a_broken_checkpoint_is_neither_exported_nor_evaluated(make_run, params):
    """As an earlier version saved it."""
    run = make_run({})
    where = sharding.of(abstract_params(run))
    broken = jax.tree.map(lambda x: x * jnp.nan, params)
    state = start_state(run, jax.device_put(broken, where), make_adamw(run, "sft"), "sft")
    with open_checkpoints(run, "sft") as saved:
        saved.save(1, state, {})
    with pytest.raises(ValueError, match=r"^checkpoint 1 of sft must .*; set export\.step to ano"):
        weights.load(run, weights.find(run, ()))
