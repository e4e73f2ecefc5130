"""What is compiled for is what a run has: shapes, types and layouts of batches."""

import dataclasses

import jax
import numpy as np
import pytest
from abstract import assert_same
from packed import packed_plan, train_batch

from care_jax.aot import shapes
from care_jax.batch import ImitationBatch
from care_jax.devices import sharding
from care_jax.devices.sharding import make_mesh
from care_jax.prompts.builder import prompt_sizes
from care_jax.rl.rollout_programs import num_context_tokens
from care_jax.rl.update_batch import as_reference
from care_jax.run.run import Run, abstract_params
from configs import tiny
from models.release.known import RELEASES

BUCKET = (96, 192)


@pytest.fixture
def run(policy, tmp_path):
    config = tiny.get_config()
    config.data.buckets = (BUCKET,)
    return Run(config, policy, make_mesh(1, 2, 2, devices=jax.devices()[:4]), tmp_path)


@pytest.mark.parametrize("policy", ["qwen2_5_vl", "qwen3_vl"], indirect=True)
def test_prompts_are_those_of_the_largest_bucket(run, examples):
    tokenized = [run.policy.prompts.tokenize(example) for example in examples]
    sizes = np.concatenate([prompt_sizes(tokenized), [BUCKET]])
    batch = run.policy.prompts.batch(tokenized, sizes)
    expected = sharding.put_batch(batch, run.decode_batch_sharding)
    assert batch.tokens.shape[1] == BUCKET[0] and batch.images.patches.shape[1] == BUCKET[1]
    jax.tree.map(assert_same, shapes.prompts(run, len(tokenized)), expected)


def test_prompts_of_text_alone_have_no_images(run, questions):
    run.config.data.buckets = ((48, 0),)
    run.config.sft.row_patches = 0
    tokenized = [run.policy.prompts.tokenize(example) for example in questions((3, 5))]
    batch = run.policy.prompts.batch(tokenized)
    expected = sharding.put_batch(batch, run.decode_batch_sharding)
    jax.tree.map(assert_same, shapes.prompts(run, 2), expected)
    assert expected.images is None and shapes.imitation_batch(run, 4).rows.images is None


@pytest.mark.parametrize("correction", ["none", "truncate"])
def test_batches_are_those_that_packing_makes(run, image_prompts, correction):
    """Of full rows, one on each device."""
    run.config.rl.correction = correction
    lengths = np.full((4, 2), 150)
    plan = packed_plan(image_prompts, lengths, row_tokens=512, row_patches=192, microbatch_size=4)
    shape = dict(row_tokens=plan.row_tokens, row_patches=plan.row_patches)
    run.config.rl.update(shape)
    run.config.sft.update(shape)
    fields = ("token_advantage", "old_logp", "ref_logp", "row_weight", "is_trained", "is_answer")
    fields += ("drawn_logp",) * (correction != "none")
    values = {name: np.zeros((4, 2, 150), np.float32) for name in fields}
    values |= {name: values[name].astype(bool) for name in ("is_trained", "is_answer")}
    tokens = np.zeros((4, 2, 150), np.int32)
    made = train_batch(run.policy, image_prompts, plan, tokens, values, np.ones(4))
    assert len(made.rows.tokens) == 4
    place = run.train_batch_sharding
    jax.tree.map(assert_same, shapes.train_batch(run, 4), sharding.put_batch(made, place))
    imitated = ImitationBatch(made.rows, made.old_logp)
    jax.tree.map(assert_same, shapes.imitation_batch(run, 4), sharding.put_batch(imitated, place))


@pytest.mark.parametrize(("offload", "is_kept"), [((), True), (("reference",), False)])
def test_the_reference_is_the_one_that_scores(run, params, offload, is_kept):
    run.config.model.update(compute_dtype="bfloat16", offload=offload)
    run.config.care.beta = 0.02
    layout = sharding.of(abstract_params(run))
    made = as_reference(run, jax.device_put(params, layout))
    jax.tree.map(assert_same, shapes.reference(run), made)
    assert shapes.reference_bytes(run) == is_kept * shapes.num_bytes(made)
    run.config.care.beta = 0.0
    run.__dict__.pop("objective")
    assert not shapes.reference_bytes(run)


def test_a_context_is_as_long_as_the_budget_and_the_cue(run, policy):
    run.config.care.update(max_context=11, cue="a cue of twenty-one b")
    num_cue = len(policy.tokenizer.encode("a cue of twenty-one b", add_special_tokens=False))
    assert num_context_tokens(run) == 11 + num_cue
    without = dataclasses.replace(run, policy=dataclasses.replace(policy, tokenizer=None))
    assert num_context_tokens(without) == 11 + 6
    run.config.care.reflect_mode = "resample"
    assert num_context_tokens(run) == 0


def test_bytes_are_those_of_one_device(run):
    cut = shapes.on_batch(run.decode_batch_sharding, 4, 3)("float32")
    on_host = jax.ShapeDtypeStruct(
        (8,), "float32", sharding=cut.sharding.with_memory_kind("pinned_host")
    )
    whole = jax.ShapeDtypeStruct((5,), "bfloat16", sharding=sharding.replicated(run.mesh))
    assert shapes.num_bytes({"cut": cut, "whole": whole, "host": on_host}) == 4 // 2 * 3 * 4 + 10


def test_a_release_is_known_by_its_hub_id_alone():
    config = tiny.get_config()
    config.model.backbone = {}
    config.model.path = "Qwen/Qwen3-VL-8B-Instruct"
    assert shapes.policy(config).config == RELEASES["Qwen/Qwen3-VL-8B-Instruct"]
    config.model.path = "Qwen/Qwen9-VL"
    with pytest.raises(ValueError, match=r"'Qwen/Qwen9-VL' must be a folder .* or one of Qwen/"):
        shapes.policy(config)
