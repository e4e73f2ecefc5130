"""A page of rollouts: which prompts, in which order, and that what was written stays text."""

import json

import pytest
from sampled_group import CUE, HOSTILE, RIGHT, WORDING, make_sampled

from care_jax.report import gallery
from care_jax.report.rollout_log import RolloutLog


@pytest.fixture
def workdir(tmp_path):
    log = RolloutLog(tmp_path, max_megabytes=64, wording=WORDING)
    for step in range(3):
        log.add(step, make_sampled(name=f"q{step}"))
    log.add(3, make_sampled(name="q3", repair=None))
    return tmp_path


def page(workdir, *flags):
    out = workdir / "page.md"
    assert gallery.main([f"--workdir={workdir}", f"--out={out}", *flags]) == 0
    return out.read_text(encoding="utf-8")


def rows_of(text):
    """The cells of the responses, without the heads of the tables."""
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if row[1] != "role"]


def test_outcomes_take_turns_and_steps_can_be_named(workdir):
    heads = [line for line in page(workdir, "--groups=2").splitlines() if line.startswith("###")]
    assert [head.split(":")[0] for head in heads] == [
        "### Step 0, repaired",
        "### Step 3, contrasted",
    ]
    one = page(workdir, "--first_step=1", "--last_step=2", "--groups=9")
    assert [line[:10] for line in one.splitlines() if line.startswith("###")] == [
        "### Step 1",
        "### Step 2",
    ]


def test_responses_stand_by_role_with_the_cue_in_bold(workdir):
    text = page(workdir, "--groups=1")
    rows = rows_of(text)
    assert [row[1] for row in rows] == [
        *("anchor", "hard negative", "hard negative", "reflected", "unused")
    ]
    assert f"**{CUE.strip()}**" in rows[3][-1]
    assert not any("**" in row[-1] for row in rows if row[1] != "reflected")
    group = json.loads((workdir / "rollouts.jsonl").read_text().splitlines()[0])
    assert [float(row[4]) for row in rows] == pytest.approx(
        [response["advantage"] for response in group["responses"]], rel=1e-2
    )
    assert [float(row[3]) for row in rows] == pytest.approx(
        [response["raw"] for response in group["responses"]], rel=1e-2
    )
    assert [line for line in text.splitlines() if line.startswith("> - ")] == ["> - 1", "> - 2"]
    before, after = group["repair"]["before"], group["repair"]["after"]
    assert f"response {group['repair']['of']} changed {before} to {after}." in text
    group["repair"]["after"] = before
    (workdir / "rollouts.jsonl").write_text(json.dumps(group) + "\n")
    assert f"response {group['repair']['of']} left its answer {before}." in page(workdir)


FAILURE = "<think>So 3. Wait, that is wrong. So 4.</think><answer>4</answer>"
REPAIR = " So 5. Wait, that is wrong. So 2.</think><answer>2</answer>"
ENDING = r"So 5. Wait, that is wrong. So 2.&lt;/think&gt;&lt;answer&gt;2&lt;/answer&gt; |"


def reflected(workdir, *, given, is_old=False):
    """The text of the reflected response in place of FAILURE; an old log lacks `num_given`."""
    (workdir / "rollouts.jsonl").unlink()
    log = RolloutLog(workdir, max_megabytes=64, wording=WORDING)
    log.add(0, make_sampled((RIGHT, FAILURE, HOSTILE, RIGHT), given=given, repair=REPAIR))
    if is_old:
        group = json.loads(log.path.read_text())
        del group["repair"]["num_given"]
        log.path.write_text(json.dumps(group) + "\n")
    (text,) = (row[-1] for row in rows_of(page(workdir)) if row[1] == "reflected")
    return text


@pytest.mark.parametrize("is_old", [False, True])
def test_of_several_cues_the_forced_one_is_bold_if_its_place_is_logged(workdir, is_old):
    text = reflected(workdir, given=f"<think>So 3. Wait, that is wrong. So{CUE}", is_old=is_old)
    cue = CUE.strip() if is_old else f"**{CUE.strip()}**"
    assert text == f"&lt;think&gt;So 3. Wait, that is wrong. So {cue} {ENDING}"


def test_what_the_model_wrote_itself_is_no_forced_cue(workdir):
    """Under `care.reflect_credit = "prompt_only"` the context is not in the text."""
    assert reflected(workdir, given="") == ENDING


def test_equal_neighbours_share_a_row_and_no_others(workdir):
    group = json.loads((workdir / "rollouts.jsonl").read_text().splitlines()[0])
    one = group["responses"][1]
    changes = [{}, {"role": "unused"}, {"text": "No."}, {"advantage": 0.5}, {"verdict": "?"}, {}]
    group["responses"] = [one | change | {"number": 9 - i} for i, change in enumerate(changes)]
    group["responses"].append(group["responses"][-1] | {"number": 3})
    (workdir / "rollouts.jsonl").write_text(json.dumps(group) + "\n")
    assert [row[0] for row in rows_of(page(workdir))] == [
        *("| 9", "| 8", "| 7", "| 6", "| 5", "| 4, 3")
    ]


def test_numbers_are_those_of_the_log(workdir):
    """√1.5 = 1.2247 is logged as 1.225, which rounded again to three digits would be 1.23."""
    group = json.loads((workdir / "rollouts.jsonl").read_text().splitlines()[0])
    group["responses"][0] |= {"distance": None, "raw": 1.225, "advantage": -0.0705}
    (workdir / "rollouts.jsonl").write_text(json.dumps(group) + "\n")
    assert rows_of(page(workdir))[0][2:5] == ["", "1.225", "-0.0705"]


def test_what_a_model_wrote_has_no_meaning_on_the_page(workdir):
    text = page(workdir, "--groups=1")
    assert "<" not in text and "&lt;img src=x" in text
    group = json.loads((workdir / "rollouts.jsonl").read_text().splitlines()[0])
    group["responses"][0]["text"] = "a | b\n# c `d` [e](f) ![g] & <h> \\*i*" + CUE
    (workdir / "rollouts.jsonl").write_text(json.dumps(group) + "\n")
    assert rows_of(page(workdir))[0][-1] == (
        r"a \| b \# c \`d\` \[e\]\(f\) \!\[g\] &amp; &lt;h&gt; \\\*i\* Wait, that is wrong. |"
    )


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("1. Find x", r"1\. Find x"),
        ("12) Find x", r"12\) Find x"),
        ("- a - b", r"\- a - b"),
        ("+ a", r"\+ a"),
        ("= a", r"\= a"),
        ("---", r"\---"),
        ("7.", r"7\."),
        ("1.5. Then 2.", "1.5. Then 2."),
        ("https://a.b/c and ftp://d", "https:&#8203;//a.b/c and ftp:&#8203;//d"),
        ("www.a.b, i@a.b", "www&#8203;.a.b, i@&#8203;a.b"),
        ("@user, #12", r"@&#8203;user, \#&#8203;12"),
    ],
)
def test_no_text_is_a_list_a_link_or_a_mention(workdir, written, shown):
    group = json.loads((workdir / "rollouts.jsonl").read_text().splitlines()[0])
    group |= {"question": written, "choices": [written]}
    group["responses"][0]["text"] = written
    (workdir / "rollouts.jsonl").write_text(json.dumps(group) + "\n")
    text = page(workdir)
    assert f"> {shown}\n> - {shown}\n" in text
    assert rows_of(text)[0][-1] == f"{shown} |"


def test_a_folder_that_is_missing_is_created_and_one_that_cannot_be_is_an_error(workdir, capsys):
    out = workdir / "new" / "folder" / "page.md"
    assert gallery.main([f"--workdir={workdir}", f"--out={out}"]) == 0
    assert out.read_text().startswith("### Step 0")
    capsys.readouterr()
    for path in (out.parent, out / "page.md"):
        assert gallery.main([f"--workdir={workdir}", f"--out={path}"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and line.endswith("; name another --workdir or --out")
        assert str(out.parent) in line


def test_the_older_file_comes_first(workdir):
    (workdir / "rollouts.jsonl").rename(workdir / "rollouts.1.jsonl")
    RolloutLog(workdir, max_megabytes=64, wording=WORDING).add(9, make_sampled())
    heads = [line[:10] for line in page(workdir).splitlines() if line.startswith("###")]
    assert heads[0] == "### Step 0" and "### Step 9" in heads


def test_half_a_line_is_left_out_and_an_empty_choice_is_an_error(workdir, capsys):
    with (workdir / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 4, "outc')
    assert page(workdir).count("###") == 4
    assert gallery.main([f"--workdir={workdir}", "--first_step=9"]) == 1
    assert "report.rollouts_megabytes" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gallery.main([f"--workdir={workdir}", "--groups=0"])
