"""A kernel is compared with XLA before it is used; run step by step here, on the rows of a run."""

import jax
import numpy as np
import pytest

from care_jax.decoding.schedule import Sizes
from care_jax.devices import sharding
from care_jax.run import attention_check
from care_jax.run.attention_check import (
    decoding_attention,
    training_attention,
    trial_images,
    trial_reach,
)
from models.attention import cached, packed
from models.attention.packed import AttentionImpl


@pytest.fixture
def run_on_a_tpu(make_run, monkeypatch):
    """A run whose device is taken for one that has a kernel."""
    impl = sharding.attention_impl

    def on_tpu(name, rules, mesh):
        plain = impl(name, rules, mesh)
        if name == "xla":
            return plain
        axes = plain.batch_axes, plain.head_axes
        return AttentionImpl("tpu", mesh, *axes, interpret=True, dense_tokens=0)

    monkeypatch.setattr(attention_check.sharding, "attention_impl", on_tpu)
    return make_run({"model.attention": "auto"})


def test_a_kernel_that_agrees_is_used_and_said_so(run_on_a_tpu, capsys):
    assert training_attention(run_on_a_tpu, 256, 64).name == "tpu"
    assert "tpu kernel differs from XLA by" in (line := capsys.readouterr().out)
    assert line.startswith("attention in training: ")
    assert line.endswith("so it is used\n") and line.count("\n") == 1


SIZES = Sizes(2, 2, 4, 40, 0, 1, 2)


def test_a_row_of_text_alone_is_compared_without_images(run_on_a_tpu, capsys):
    assert training_attention(run_on_a_tpu, 256, 0).name == "tpu"
    assert "by 0.0e+00 on rows of 0 patches, so it is used" in capsys.readouterr().out


def test_prefill_is_compared_at_the_largest_bucket(run_on_a_tpu, capsys):
    assert decoding_attention(run_on_a_tpu, SIZES).prefill.name == "tpu"
    tokens, patches = max(run_on_a_tpu.policy.prompts.buckets)
    line = capsys.readouterr().out
    assert line.startswith("attention in prefill: ")
    assert f"rows of {tokens} tokens" in line and f"rows of {patches} patches" in line


@pytest.mark.parametrize(("times", "used"), [((1.0, 2.0), "tpu"), ((2.0, 1.0), "xla")])
def test_the_kernel_of_decode_steps_is_used_where_it_is_faster(
    run_on_a_tpu, capsys, monkeypatch, times, used
):
    following = iter(times)
    monkeypatch.setattr(attention_check, "_milliseconds", lambda call: next(following))
    assert decoding_attention(run_on_a_tpu, SIZES).steps.name == used
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("attention in decode steps: the tpu kernel differs from XLA by ")
    assert line.endswith(f"so {'it' if used == 'tpu' else 'XLA'} is used")
    assert f"takes {times[0]:.2f} ms against {times[1]:.2f} ms" in line


def test_a_wrong_kernel_of_decode_steps_is_left_for_xla(run_on_a_tpu, monkeypatch):
    kernel = cached.attend_blocks
    monkeypatch.setattr(cached, "attend_blocks", lambda *a: kernel(*a).at[-1].multiply(0.5))
    following = iter((1.0, 2.0))
    monkeypatch.setattr(attention_check, "_milliseconds", lambda call: next(following))
    assert decoding_attention(run_on_a_tpu, SIZES).steps.name == "xla"


def test_what_is_timed_is_every_row_and_layer_of_a_decode_step(run_on_a_tpu, monkeypatch):
    """Of a layer alone, a GPU's host takes longer to start the call."""
    timed = []
    monkeypatch.setattr(attention_check, "_milliseconds", lambda call: timed.append(call) or 1.0)
    decoding_attention(run_on_a_tpu, SIZES)
    num_layers = run_on_a_tpu.policy.config.text.num_layers
    assert len(timed) == 2
    for call in timed:
        assert call.args == (num_layers,)
        assert call().shape[:2] == (SIZES.num_slots, SIZES.num_rows)
        assert f"length={num_layers}" in str(jax.make_jaxpr(call)())


def test_a_measured_time_is_that_of_a_call():
    assert attention_check._milliseconds(lambda: np.ones(3)) > 0


def test_kernels_that_do_not_compile_are_left_for_xla(run_on_a_tpu, capsys, monkeypatch):
    forward = packed._forward

    def refuse(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: no such device\nand a trace")

    def refuse_packed(q, k, v, mask):
        return (refuse if mask.impl.name == "tpu" else forward)(q, k, v, mask)

    monkeypatch.setattr(packed, "_forward", refuse_packed)
    monkeypatch.setattr(cached, "attend_blocks", refuse)
    assert training_attention(run_on_a_tpu, 256, 64).name == "xla"
    decoding = decoding_attention(run_on_a_tpu, SIZES)
    assert decoding.prefill.name == decoding.steps.name == "xla"
    assert capsys.readouterr().out.splitlines() == [
        f"attention in {use}: the tpu kernel does not compile here (INTERNAL: no such device), so "
        "XLA is used"
        for use in ("training", "prefill", "decode steps")
    ]


def test_a_kernel_that_another_process_cannot_compile_is_left_for_xla(
    run_on_a_tpu, capsys, monkeypatch
):
    monkeypatch.setattr(
        attention_check.distributed, "gather_json", lambda reason: [reason, "INTERNAL: no"]
    )
    assert training_attention(run_on_a_tpu, 256, 64).name == "xla"
    assert "does not compile here (INTERNAL: no), so XLA" in capsys.readouterr().out


@pytest.mark.parametrize("wrong_on", ["text", "images"])
def test_a_kernel_that_errs_on_one_kind_of_row_is_left_for_xla(
    run_on_a_tpu, capsys, monkeypatch, wrong_on
):
    forward = packed._forward

    def wrong(q, k, v, mask):
        out, lse = forward(q, k, v, mask)
        is_wrong = mask.impl.name == "tpu" and (q.shape[-2] == 1) == (wrong_on == "images")
        return (out.at[:, -1].multiply(0.5), lse) if is_wrong else (out, lse)

    monkeypatch.setattr("models.attention.packed._forward", wrong)
    assert training_attention(run_on_a_tpu, 256, 64).name == "xla"
    assert capsys.readouterr().out.endswith("so XLA is used\n")


@pytest.mark.parametrize("name", ["auto", "xla"])
def test_without_a_kernel_nothing_is_compared(make_run, capsys, name):
    run = make_run({"model.attention": name})
    assert training_attention(run, 256, 64).name == "xla"
    decoding = decoding_attention(run, SIZES)
    assert decoding.prefill.name == decoding.steps.name == "xla"
    assert not capsys.readouterr().out


def test_the_trial_row_has_trees_of_unequal_branches_and_padding():
    reach = trial_reach(512)
    token = np.arange(512)
    assert (reach >= token).all() and (reach < 512).all()
    ends = np.unique(reach[reach > token])
    assert len(ends) > 6 and reach[-1] == 511 and (reach == token).sum() > len(ends)


def test_replicated_arrays_are_whole_on_every_device():
    mesh = sharding.make_mesh(2, 2, 2)
    whole = sharding.replicate(np.arange(6).reshape(2, 3), mesh)
    assert (
        whole.sharding.is_fully_replicated and len(whole.addressable_shards) == jax.device_count()
    )
    np.testing.assert_array_equal(whole, np.arange(6).reshape(2, 3))


def test_the_trial_images_are_unequal_and_padded():
    first, last = trial_images(256)
    token = np.arange(256)
    assert (first <= token).all() and (token <= last).all()
    sizes = np.unique(last - first + 1)
    assert len(sizes) == 5 and sizes[0] == 1 and first[-1] == last[-1] == 255
