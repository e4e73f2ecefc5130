"""Rows that teach the cue: what each is made of, and the folder that a cold start reads."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from rollout_script import CUE, LENGTHS, Script, said

from care_jax.commands import reopened, repairs
from care_jax.data.readers import shards
from care_jax.data.sources import open_source
from care_jax.run.run import verifier_of
from care_jax.run.versions import write_config
from configs import repair

ROOT = pathlib.Path(__file__).resolve().parents[3]
ACCS = ((1, 0, 0), (1, 1, 1), (0, 0, 0), (1, 1, 0), (0, 1, 0), (1, 0, 0))
MIXED = (0, 3, 4, 5)  # questions with both outcomes


@pytest.fixture
def tried(make_run, questions, policy):
    """Scripted groups of questions with both outcomes, and the run."""

    def tried(rationale="", failure=None, accs=ACCS, **changes):
        examples = [
            dataclasses.replace(example, rationale=rationale and f"{rationale} {example.answer}")
            for example in questions(LENGTHS)
        ]
        script = Script(policy, examples, accs, ())
        script.failure = failure or script.failure
        run = make_run({"care.cue": CUE} | changes)
        with verifier_of(run) as verifier:
            groups = reopened.sample_groups(
                run, script.programs(), None, jax.random.key(0), examples, len(examples), verifier
            )
        return run, groups

    return tried


def rows_of(run, groups, right_share=0.0):
    """The rows by the number of their question."""
    rows = list(repairs.repair_rows(run, groups, right_share=right_share, seed=0))
    return {int(row.answer): row for row in rows}


def test_the_failure_that_rl_would_repair_comes_before_the_anchors_rationale(tried):
    rows = rows_of(*tried())
    assert sorted(rows) == sorted(MIXED)
    for i, row in rows.items():
        last = 1 if i == 4 else 0  # place of the anchor
        assert row.context == f"<think>row 2 of {i}{CUE}"
        assert row.response == f" row {last} of {i}</think><answer>{i}</answer>"
        assert row.id == f"q{i}-repair"


def test_the_datas_own_rationale_is_taken_where_there_is_one(tried):
    rows = rows_of(*tried(rationale="I see"))
    for i, row in rows.items():
        assert row.response == f" I see {i}</think><answer>{i}</answer>"


def test_tags_in_the_datas_rationale_are_taken_off(tried):
    run, groups = tried(rationale="I see")
    groups.asked[:] = [
        dataclasses.replace(example, rationale=f"<think>{example.rationale}</think> Done.")
        for example in groups.asked
    ]
    for i, row in rows_of(run, groups).items():
        assert row.response == f" I see {i}</think><answer>{i}</answer>"


def test_an_answer_that_is_no_text_has_the_anchors_ending_and_another_beginning(tried):
    run, groups = tried(rationale="I see")
    third = [example.answer for example in groups.asked].index("3")
    groups.asked[:] = [dataclasses.replace(groups.asked[third], answer=[3])] * 4
    for name in ("anchor", "hard_negative"):
        getattr(groups.subgroup, name)[:] = getattr(groups.subgroup, name)[third]
    groups.texts[:], groups.accs[:] = groups.texts[third], groups.accs[third]
    for row in repairs.repair_rows(run, groups, right_share=1.0, seed=0):
        assert row.context == f"<think>row 1 of 3{CUE}"
        assert row.response == " row 0 of 3</think><answer>3</answer>"


def test_some_rows_begin_with_a_right_rationale_that_is_not_their_own(tried):
    """Without rationales in the data only question 3 has a second right response."""
    rows = rows_of(*tried(), right_share=1.0)
    firsts = {i: row.context.removesuffix(CUE) for i, row in rows.items()}
    assert firsts == {i: f"<think>row {1 if i == 3 else 2} of {i}" for i in MIXED}
    rows = rows_of(*tried(rationale="I see"), right_share=1.0)
    assert rows[4].context == f"<think>row 1 of 4{CUE}"
    assert rows[0].context == f"<think>row 0 of 0{CUE}"


def test_a_long_rationale_is_cut_as_in_rl(tried, policy):
    run, groups = tried(failure=lambda i, g: said(f"row {g} of {i}" * 3, 99))
    rows = rows_of(run, groups)
    run.config.care.max_context = 7
    for i, row in rows_of(run, groups).items():
        cut = row.context.removesuffix(CUE)
        assert rows[i].context.startswith(cut) and len(cut) < len(rows[i].context) - len(CUE)
        tokens = policy.tokenizer.encode(cut, add_special_tokens=False)
        assert len(tokens) <= 7


def test_texts_with_special_tokens_and_anchors_without_a_rationale_make_no_row(tried):
    failure = lambda i, g: said("<|image_pad|>" if i == 3 else "so", 99)  # noqa: E731
    assert sorted(rows_of(*tried(failure=failure))) == [0, 4, 5]
    run, groups = tried()
    third = [example.answer for example in groups.asked].index("3")
    groups.texts[third, groups.subgroup.anchor[third]] = "<answer>3</answer>"
    assert sorted(rows_of(run, groups)) == [0, 4, 5]


@pytest.mark.exhaustive
def test_the_folder_is_read_as_a_part_of_the_cold_start(opened, tmp_path, compile_once):
    compile_once(repairs, "compile_rollout", "compile_to_decode_layout")
    out = tmp_path / "new" / "repairs"
    manifest = repairs.write_repairs(opened, out, right_share=0.5)
    rows = open_source("arrayrecord", path=str(out))
    assert len(rows) == manifest["num_examples"] > 2
    for row in rows:
        assert row.context.startswith("<think>") and row.context.endswith(CUE)
        assert row.response == f" So {row.answer}.</think><answer>{row.answer}</answer>"
    assert manifest["config"]["checkpoint"] == "sft 7" and manifest["config"]["cue"] == CUE
    assert shards.read_manifest(out) == {"format": shards.FORMAT} | manifest
    assert not out.with_name("repairs.partial").exists()
    again = repairs.write_repairs(opened, tmp_path / "again", right_share=0.5)
    assert again["sources"]["repairs"]["shards"] == manifest["sources"]["repairs"]["shards"]
    # Random weights write no tags, so the anchors have no rationale either.
    without = [dataclasses.replace(example, rationale="") for example in opened.examples]
    with pytest.raises(ValueError, match=r"right rationales in <think>, got none in \d+ groups"):
        repairs.write_repairs(
            opened._replace(examples=without), tmp_path / "without", right_share=0.0
        )
    assert not list(tmp_path.glob("without*"))


@pytest.mark.parametrize(
    ("folder", "share", "message"),
    [
        ("", 0.5, "exists; remove it, or name another --out"),
        ("out", -0.1, r"--right_share must lie in \[0, 1\], got -0.1"),
        ("out", 1.1, r"--right_share must lie in \[0, 1\], got 1.1"),
        ("out", np.nan, r"--right_share must lie in \[0, 1\], got nan"),
    ],
)
def test_repairs_that_cannot_be_written_are_refused(opened, tmp_path, folder, share, message):
    with pytest.raises(ValueError, match=message):
        repairs.write_repairs(opened, tmp_path / folder, right_share=share)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # of `opened`


def test_a_cue_that_closes_the_rationale_is_refused(opened, tmp_path):
    run = reopened.by_accuracy(opened.run)
    run.config.care.cue = " Wait.</think>"
    with pytest.raises(ValueError, match=r"expected a cue inside the rationale, got ' Wait.</"):
        repairs.write_repairs(opened._replace(run=run), tmp_path / "out", right_share=0.5)


def test_right_answers_are_successes_whatever_rl_rewards(opened, tmp_path, monkeypatch):
    class Compiled(Exception):
        pass

    def compile_rollout(run, *_):
        raise Compiled(run.config.care.success)

    monkeypatch.setattr(repairs, "compile_rollout", compile_rollout)
    opened.run.config.care.success = "reward"
    with pytest.raises(Compiled, match="acc"):
        repairs.write_repairs(opened, tmp_path / "out", right_share=0.5)


def test_a_wrong_flag_is_one_line(tmp_path, monkeypatch, one_device, error_of):
    monkeypatch.chdir(ROOT)  # of the default configuration
    assert "--out is missing: Folder" in error_of(repairs)
    assert f"flag --out={tmp_path}: it exists; remove it" in error_of(repairs, f"--out={tmp_path}")
    new = f"--out={tmp_path}/new"
    assert "--right_share=1.5" in error_of(repairs, new, "--right_share=1.5")
    error = error_of(repairs, f"--workdir={tmp_path}/run", new, "--stage=sft")
    assert error.startswith(f"error: expected a checkpoint in {tmp_path}/run/checkpoints/sft")
    assert not (tmp_path / "new").exists()


def test_a_run_on_rows_from_python_is_not_reopened_without_them(tmp_path, monkeypatch, error_of):
    monkeypatch.chdir(ROOT)
    write_config(repair.get_config(), tmp_path, ("rl", "evaluate", "reward"))
    step = tmp_path / "checkpoints" / "rl" / "2"
    step.mkdir(parents=True)
    (step / "commit_success.txt").touch()
    error = error_of(repairs, f"--workdir={tmp_path}", f"--out={tmp_path}/new")
    assert "its own from Python in place of data.train and verifier.reward: call" in error
