"""The page as a person sees it, in headless Chromium where there is one (.ci/run installs it)."""

import json

import browser
import numpy as np
import pytest
from PIL import Image
from sampled_group import CUE, HOSTILE, REPAIR, RIGHT, WORDING, WRONG, make_sampled

from care_jax.commands.report import draw_page
from care_jax.report import terms
from care_jax.report.report import Report

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        not browser.executable(),
        reason=f"needs a browser, none of {', '.join(browser.NAMES)} is installed",
    ),
]
LATER = dict.fromkeys(
    ("loss", "grad_norm", "entropy", "response_tokens", "learning_rate", "device_idle"), 1.0
)
CONFIG = {
    "stages": ["rl"],
    "rl": {"objective": "care", "learning_rate": 0.5},
    "data": {"train": {"source": HOSTILE}},
    "versions": {"jax": "0.9", "numpy": "2.0"},
}
START = {
    "time": "2026-01-02T03:04:05+00:00",
    "command": f"care-jax train --workdir={HOSTILE}",
    "changed": {"rl.learning_rate": 0.5},
}
SETTINGS = {"groups_per_step": 1, "max_megabytes": 4, "image_side": 200, "rollouts_megabytes": 0}
LONG = "<think>" + "a very long rationale " * 200 + "</think><answer>5</answer>"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Steps 0, 2 and 4, a group each: repaired, rescued, and one with a long text."""
    workdir = tmp_path_factory.mktemp("run")
    (workdir / "config.json").write_text(json.dumps(CONFIG))
    (workdir / "starts.jsonl").write_text(json.dumps(START) + "\n")
    lines = [
        {"stage": "sft", "step": 0, "loss": 2.0},
        {"stage": "evaluate_sft", "step": 0, "acc": 0.5, "acc_low": 0.4, "acc_high": 0.6},
        *(
            {"stage": "rl", "step": step, "reward": step / 10, "acc": 0.5, HOSTILE: 1}
            | {"acc/made/a": 0.25, "acc/made/b": step / 4}
            | LATER
            for step in range(5)
        ),
    ]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = Report(workdir, **SETTINGS, wording=WORDING)
    noise = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    report.add(0, make_sampled(name=HOSTILE, images=(Image.fromarray(noise),)), is_logged=True)
    report.add(2, make_sampled(repair=None, is_rescue=True, name="q2"), is_logged=True)
    sampled = make_sampled(texts=(RIGHT, WRONG, LONG, RIGHT), repair=None, name="q4")
    sampled.reasons[:] = HOSTILE  # a rule's own words, but of a function of the user's who knows
    report.add(4, sampled, is_logged=True)
    return report.path


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser.Browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def opened(page, report):
    page.messages.clear()
    page.open(report)
    yield page
    assert not page.messages, page.messages


def text_of(page, selector):
    return page.run(f"[...document.querySelectorAll({selector!r})].map((x) => x.textContent)")


def place(page):
    return page.run("document.getElementById('group').dataset.key")


def test_hostile_text_is_shown_as_text_and_runs_nothing(opened):
    assert opened.run("document.title").endswith("run report")
    assert opened.run("document.scripts.length") == 2  # the data and our own
    assert opened.run("document.querySelectorAll('#group img').length") == 1
    assert text_of(opened, ".question") == [f"image 1How many? {HOSTILE}"]
    responses = text_of(opened, ".response .text")
    assert RIGHT in responses and WRONG in responses and HOSTILE in responses
    assert f"step 0 · made {HOSTILE} · repaired" in text_of(opened, ".prompt .muted")
    assert HOSTILE in text_of(opened, "figcaption h3")


def test_a_hostile_reason_is_shown_as_text(opened):
    choose(opened, "step", "4")
    assert text_of(opened, ".response .reason") == [HOSTILE] * 4
    assert opened.run("document.querySelectorAll('.response img, .response script').length") == 0


def test_a_script_that_got_in_would_not_run(opened, report, tmp_path):
    infected = tmp_path / "infected.html"
    infected.write_text(report.read_text() + "<script>document.title = 'taken'</script>")
    opened.open(infected)
    assert opened.run("document.title").endswith("run report")
    assert any("Content Security Policy" in message for message in opened.messages)
    opened.messages.clear()


def test_spans_roles_and_numbers_stand_at_each_response(opened):
    shown = opened.run(
        """[...document.querySelectorAll('.response')].map((x) => ({
          role: x.querySelector('.role').textContent,
          verdict: x.querySelector('.verdict').textContent,
          reason: x.querySelector('.verdict + .reason').textContent,
          numbers: [...x.querySelectorAll('dd')].map((y) => y.textContent),
          spans: [...x.querySelectorAll('.text span')].map((y) => [y.className, y.textContent]),
        }))"""
    )
    assert [each["role"] for each in shown] == [
        *("anchor", "hard negative", "hard negative", "reflected", "unused")
    ]
    assert shown[0]["spans"] == [
        ["think", "<think>two</think>"],
        ["answer", "<answer>2</answer>"],
    ]
    assert shown[1]["verdict"] == "✗ wrong"
    assert [each["reason"] for each in shown] == [
        *("same number", "another number", "no answer span", "same number", "same text")
    ]
    assert shown[1]["numbers"][:4] == ["0.1", "0.4", "−0.5", "−0.25"]
    assert [kind for kind, _ in shown[3]["spans"]] == ["context", "cue", "think", "answer"]
    assert "".join(text for _, text in shown[3]["spans"]).endswith(CUE + REPAIR)
    assert text_of(opened, ".change") == ["Repairs #2: 3 → 2"]
    colors = opened.run(
        """['think', 'answer', 'context', 'cue'].map((kind) =>
          getComputedStyle(document.querySelector('.text .' + kind)).backgroundColor)"""
    )
    assert len(set(colors)) == 4


def parts(page, text, *, given=0, **changes):
    """[kind, text] of the spans of a response that is a repair."""
    response = {"role": "reflected", "text": text, "answer": "2", "think_tokens": 3} | changes
    group = {"repair": {"num_given": given, "cue": CUE}, "think_tag": "think"}
    return page.run(f"segments({json.dumps(response)}, {json.dumps(group)})")


PIECES = (
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "é😀",
    "<!--",
    "</script>",
    "a",
    "\n",
    CUE,
)


def test_parts_rejoin_to_the_whole_text(opened):
    rng = np.random.default_rng(0)
    for _ in range(100):
        context, written = ("".join(rng.choice(PIECES, rng.integers(8))) for _ in range(2))
        known = {"answer": str(rng.choice(["", "2"])), "think_tokens": int(rng.integers(2))}
        found = parts(opened, context + written, given=len(context), **known)
        assert "".join(text for _, text in found) == context + written
        assert all(text for _, text in found)
        assert "".join(text for kind, text in found if kind in ("context", "cue")) == context


def test_spans_take_in_their_tags_and_nothing_else(opened):
    text = "a<think>b</think>c<answer>d</answer>"
    assert parts(opened, text) == [
        ["text", "a"],
        ["think", "<think>b</think>"],
        ["text", "c"],
        ["answer", "<answer>d</answer>"],
    ]
    assert parts(opened, text, answer="", think_tokens=0) == [["text", text]]


def test_a_context_that_is_not_in_the_row_leaves_the_rest_of_the_rationale(opened):
    """As under `care.reflect_credit = "prompt_only"`."""
    found = parts(opened, REPAIR)
    assert found == [["think", " so two</think>"], ["answer", "<answer>2</answer>"]]


def test_components_of_a_reward_function_stand_behind_the_reward(opened):
    """Names come from the function, so they are shown as text."""
    opened.run(f"groups[0].responses[0].components = {{acc: 0.75, {HOSTILE!r}: null}}; show(0)")
    names = opened.run(
        """[...document.querySelectorAll('.response')].map((x) =>
          [...x.querySelectorAll('dt')].map((y) => y.textContent))"""
    )
    assert names[0][:4] == ["reward", "acc", HOSTILE, "d"]
    assert names[1][:2] == ["reward", "d"]
    assert text_of(opened, ".response dd")[1] == "0.75"


def test_keys_go_from_group_to_group_and_show_help(opened):
    assert place(opened) == "0/0"
    opened.press("j")
    assert place(opened) == "2/0"
    opened.press("ArrowRight", "j")  # there is none behind the last
    assert place(opened) == "4/0"
    opened.press("k", "ArrowLeft", "k")
    assert place(opened) == "0/0"
    opened.press("J")
    assert place(opened) == "2/0"
    opened.press("?")
    assert opened.run("document.getElementById('help').open")
    opened.press("j")  # the help is in front
    assert place(opened) == "2/0"
    opened.press("Escape")
    assert not opened.run("document.getElementById('help').open")


def choose(page, name, value):
    page.run(
        f"""(() => {{
          const select = document.getElementById('filter-{name}');
          select.value = {value!r};
          select.dispatchEvent(new Event('change'));
        }})()"""
    )


@pytest.mark.parametrize(
    ("name", "value", "left"),
    [
        ("step", "4", ["4/0"]),
        ("role", "pseudo-anchor", ["2/0"]),
        ("role", "anchor", ["0/0", "4/0"]),
        ("outcome", "repaired", ["0/0"]),
        ("source", "made", ["0/0", "2/0", "4/0"]),
    ],
)
def test_filters_leave_the_groups_that_pass(opened, name, value, left):
    choose(opened, name, value)
    assert opened.run("state.shown.map((group) => group.key)") == left
    assert place(opened) == left[0]
    assert text_of(opened, "#place") == [f"1 of {len(left)}"]
    opened.press("x")
    assert len(opened.run("state.shown.map((group) => group.key)")) == 3


def test_filters_that_nothing_passes_say_so(opened):
    choose(opened, "role", "reflected")
    choose(opened, "outcome", "rescued")
    assert text_of(opened, "#group") == ["No group passes these filters."]
    opened.press("j", "k", "J")
    opened.press("x")
    assert place(opened) == "0/0"


def test_a_long_text_shows_its_beginning_until_asked(opened):
    choose(opened, "step", "4")
    height = "document.querySelectorAll('.text')[2].clientHeight"
    clipped = opened.run(height)
    assert text_of(opened, ".more") == ["whole text"]
    opened.press("e")
    assert opened.run(height) > 2 * clipped and text_of(opened, ".more") == []
    assert LONG in text_of(opened, ".text")


def test_hovering_a_curve_reads_out_every_chart_at_that_step(opened):
    opened.run("window.scrollTo(0, 0)")
    box = opened.run(
        """(() => {
          const box = document.querySelector('.stage svg').getBoundingClientRect();
          return [box.left + 46, box.right - 10, box.top + 60];
        })()"""
    )
    opened.point(box[0] + 0.26 * (box[1] - box[0]), box[2])
    assert text_of(opened, ".stage:first-child .readout") == ["step 1"]
    assert text_of(opened, ".stage:first-child .legend b")[:2] == ["0.1", "0.5"]
    opened.run(  # a chart that is drawn anew keeps its cursor
        """(async () => {
          document.querySelector('.stage').style.paddingRight = '1px';
          for (const _ of [1, 2]) await new Promise(requestAnimationFrame);
        })()"""
    )
    assert text_of(opened, ".stage:first-child .legend b")[:2] == ["0.1", "0.5"]
    opened.point(box[0] + 0.49 * (box[1] - box[0]), box[2], click=True)
    assert place(opened) == "2/0"
    opened.point(1, 1)
    assert text_of(opened, ".stage:first-child .legend b")[0] == "0.4"  # the last


def test_a_stage_shows_its_first_charts_and_the_others_when_asked(opened):
    shown = """[...document.querySelectorAll('.stage:first-child svg')]
      .filter((x) => x.checkVisibility() && !x.closest('.small'))
      .map((x) => x.viewBox.baseVal.width)"""
    titles = text_of(opened, ".stage:first-child .first h3")
    assert titles == [
        *("Reward", "Accuracy", "Entropy", "Response length", "Loss", "Gradient norm"),
    ]
    assert len(opened.run(shown)) == 6
    assert text_of(opened, ".stage:first-child .rest summary") == ["3 more charts"]
    opened.run("document.querySelector('.rest summary').click()")
    opened.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    widths = opened.run(shown)
    assert len(widths) == 9 and len(set(widths[6:])) == 1  # drawn again, now that there is room
    assert min(widths) > 160 and text_of(opened, ".stage:last-child .rest") == []


def test_an_evaluation_is_a_figure_with_its_interval(opened):
    assert text_of(opened, "#evaluations th") == ["Evaluation", "after sft", "acc"]
    assert text_of(opened, "#evaluations td") == ["0.5 (0.4 to 0.6)"]


def test_the_last_stage_and_the_evaluations_inside_it_are_open_on_top(opened, tmp_path):
    lines = [
        {"stage": "sft", "step": 0, "loss": 2.0},
        {"stage": "sft_eval", "step": 1, "acc": 0.25},
        {"stage": "rl_eval", "step": 0, "acc": 0.25},
        {"stage": "rl", "step": 0, "reward": 0.5},
        {"stage": "rl_eval", "step": 1, "acc": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = Report(tmp_path, **SETTINGS)
    report.write()
    opened.open(report.path)
    open_ones = ["Reinforcement learning", "Evaluation during reinforcement learning"]
    assert text_of(opened, ".stage[open] h2") == open_ones
    assert text_of(opened, ".stage h2")[2:] == ["Cold start", "Evaluation during the cold start"]
    assert text_of(opened, ".stage:nth-child(2) .legend b") == ["0.75"]


def test_an_evaluation_has_its_change_since_the_start(opened, tmp_path):
    lines = [
        {"stage": "rl_eval", "step": 0, "acc": 0.25, "acc/made": 1, "seconds": 3},
        {"stage": "rl", "step": 0, "acc": 0.5},
        {"stage": "rl_eval", "step": 1, "acc": 0.5, "acc/made": 1},
        {"stage": "evaluate_rl", "step": 0, "acc": 0.75, "acc/made": 0.5, "fmt": 1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = Report(tmp_path, **SETTINGS)
    report.write()
    opened.open(report.path)
    columns = ["Evaluation", "rl step 0", "after rl", "change"]
    assert text_of(opened, "#evaluations th") == [*columns, "acc", "fmt", "acc/", "made"]
    changes = text_of(opened, "#evaluations .delta")
    assert changes == ["+0.5", "", "−0.5"]


def test_the_only_evaluation_of_the_last_stage_is_compared_with_the_first(opened, tmp_path):
    lines = [
        {"stage": "evaluate_sft", "step": 0, "acc": 0.25},
        {"stage": "rl", "step": 99, "acc": 0.5},
        {"stage": "rl_eval", "step": 100, "acc": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = Report(tmp_path, **SETTINGS)
    report.write()
    opened.open(report.path)
    columns = ["Evaluation", "after sft", "rl step 100", "change"]
    assert text_of(opened, "#evaluations th") == [*columns, "acc"]
    assert text_of(opened, "#evaluations .delta") == ["+0.5"]


def test_what_the_run_is_stands_on_top(opened):
    facts = dict(zip(text_of(opened, ".facts th"), text_of(opened, ".facts td"), strict=True))
    assert facts["Objective"] == "CARE" and facts["Data"] == HOSTILE
    assert facts["Command"].strip() == START["command"]
    assert facts["Changed"].strip() == "rl.learning_rate = 0.5"
    assert facts["numpy"] == "2.0" and facts["rl.objective"] == '"care"'
    assert "began 2026-01-02" in facts["Duration"]
    assert opened.run("document.querySelector('#about').getBoundingClientRect().bottom < 450")
    assert text_of(opened, ".more-facts summary") == ["All settings (4)", "All versions (2)"]


def test_small_multiples_share_a_scale_and_leave_out_what_their_names_begin_with(opened):
    assert text_of(opened, ".split > h3") == ["Accuracy by source"]
    assert text_of(opened, ".small h3") == ["a", "b"]
    ticks = opened.run(
        """[...document.querySelectorAll('.small svg')].map((x) =>
          [...x.querySelectorAll('.tick')].map((y) => y.textContent))"""
    )
    assert ticks[0] == ticks[1] == ["0", "0.5", "1"]


def test_smoothing_draws_the_average_over_the_thin_line(opened):
    opened.run("find('smoothing').value = 0.5; setSmoothing()")
    average = "document.querySelector('.stage .average').textContent"
    shown, weights = [0.0, 0.1, 0.2, 0.3, 0.4], [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]
    expected = sum(w * x for w, x in zip(weights, shown, strict=True)) / sum(weights)
    assert opened.run(average) == f"avg {expected:.3g}"
    assert text_of(opened, ".stage:first-child .legend b")[0] == "0.4"  # as logged
    assert opened.run("document.querySelectorAll('.stage:first-child .first .raw').length") == 6
    opened.run("find('smoothing').value = 0; find('smoothing').dispatchEvent(new Event('input'))")
    assert opened.run(average) == "" and text_of(opened, "#smoothed") == ["off"]
    assert opened.run("document.querySelectorAll('.raw').length") == 0


def test_names_are_defined_under_the_pointer_and_the_focus(opened):
    tip = "[find('tip').hidden, find('tip').textContent]"
    assert opened.run(tip)[0]
    opened.run("document.querySelector('.stage .legend [data-tip]').focus()")
    is_hidden, text = opened.run(tip)
    assert not is_hidden and text == terms.define("reward")
    opened.press("Escape")
    assert opened.run(tip)[0]
    x, y = opened.run(
        """(() => {
          const name = document.querySelectorAll('.stage .legend [data-tip]')[1];
          const box = name.getBoundingClientRect();
          return [box.left + 3, box.top + 3];
        })()"""
    )
    opened.point(x, y)
    assert opened.run(tip) == [False, terms.define("acc")]
    opened.point(1, 1)
    assert opened.run(tip)[0]
    undefined = opened.run(
        """[...document.querySelectorAll('.legend li > span:not(.average), .numbers dt span')]
          .filter((x) => !x.dataset.tip || x.tabIndex !== 0).map((x) => x.textContent)"""
    )
    assert undefined == [HOSTILE]  # which no table knows


def search(page, text):
    page.run(f"find('search').value = {text!r}; find('search').dispatchEvent(new Event('input'))")
    return page.run("state.shown.map((group) => group.key)")


def test_search_finds_ids_questions_and_responses_and_marks_them(opened):
    assert search(opened, "Q2") == ["2/0"]
    assert search(opened, "A VERY LONG") == ["4/0"]
    marked = set(text_of(opened, ".text mark"))
    assert marked == {"a very long"} and text_of(opened, ".more") == []  # nothing is clipped
    assert search(opened, "how many?") == ["0/0", "2/0", "4/0"]
    assert text_of(opened, ".question mark") == ["How many?"]
    assert search(opened, HOSTILE) == ["0/0", "2/0", "4/0"]
    assert text_of(opened, ".question mark") == [HOSTILE]
    assert search(opened, "nowhere") == []
    assert text_of(opened, "#group") == ["No group passes these filters."]
    opened.press("x")
    assert len(opened.run("state.shown")) == 3 and text_of(opened, "mark") == []
    opened.press("/")
    opened.press("j")  # typed, no key of the page
    assert opened.run("document.activeElement.id") == "search" and place(opened) == "0/0"


def test_the_prompt_as_the_model_sees_it_is_folded_below_the_question(opened):
    (prompt,) = text_of(opened, ".rendered pre")
    assert prompt == opened.run("groups[0].rendered") and "<image>×6" in prompt
    assert not opened.run("document.querySelector('.rendered').open")
    assert text_of(opened, ".pictures figcaption") == ["image 120×90 → 48×32, 6 tokens"]
    changed = {"rendered": HOSTILE, "images": [{"given": [8, 4], "resized": [8, 4], "tokens": 1}]}
    opened.run(f"Object.assign(groups[0], {json.dumps(changed)}); show(0)")
    assert text_of(opened, ".rendered pre") == [HOSTILE]
    assert text_of(opened, ".pictures figcaption") == ["image 8×4, 1 token"]
    opened.run("delete groups[0].rendered; delete groups[0].images; show(0)")  # of an older log
    assert text_of(opened, ".rendered, .pictures figcaption") == []


@pytest.fixture
def compared(opened, report, tmp_path):
    """The run, and one of other settings without rollouts."""
    other = tmp_path / HOSTILE.replace("/", "")
    other.mkdir()
    rl = CONFIG["rl"] | {"learning_rate": 0.25}
    (other / "config.json").write_text(json.dumps(CONFIG | {"rl": rl}))
    lines = [{"stage": "rl", "step": step, "reward": 1, "acc": 0.75} for step in (1, 2)]
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = tmp_path / "page.html"
    draw_page([report.parent, other], path, max_megabytes=4)
    opened.open(path)
    return opened


def test_two_runs_share_charts_of_one_metric(compared):
    assert text_of(compared, ".first h3")[:2] == ["reward", "acc"]
    lines = "document.querySelector('.stage svg').querySelectorAll('.line:not(.raw)').length"
    assert compared.run(lines) == 2
    assert text_of(compared, ".stage figure:first-child .legend b")[:2] == ["0.4", "1"]
    compared.run("document.querySelectorAll('.runs button')[1].click()")
    assert compared.run(lines) == 1
    compared.run("document.querySelectorAll('.runs button')[1].click()")
    assert compared.run(lines) == 2


def test_the_settings_that_differ_are_listed(compared):
    assert text_of(compared, ".more-facts summary") == ["Settings that differ (1)"]
    assert text_of(compared, ".more-facts tbody tr > *") == ["rl.learning_rate", "0.5", "0.25"]


def test_groups_are_filtered_by_run(compared):
    assert place(compared) == "0/0/0"
    names = compared.run("[...find('filter-run').options].map((x) => x.value)")
    assert len(names) == 2  # all, and the run that has groups


def test_it_fits_a_phone(opened, report):
    for width in (360, 420, 900, 1600):
        opened.open(report, width=width, height=740)
        for number in range(3):
            too_wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert opened.run(too_wide) == 0, number
            opened.press("j")
        has_list = opened.run("document.getElementById('list').checkVisibility()")
        assert has_list == (width > 896)


BROKEN_LABELS = """[...document.querySelectorAll('th, h3, button, label, summary')]
  .filter((x) => x.checkVisibility())
  .flatMap((x) => [...x.querySelectorAll('*'), x]).flatMap((x) => [...x.childNodes])
  .filter((x) => x.nodeType === 3 && !/[\\s<-]/.test(x.data))
  .filter((x) => {
    const range = document.createRange();
    range.selectNode(x);
    return range.getClientRects().length > 1;
  })
  .map((x) => x.data)"""


@pytest.mark.parametrize("width", [360, 420])
def test_labels_do_not_wrap_within_a_word_on_a_phone(opened, tmp_path, width):
    accs = dict.fromkeys((f"acc/synthetic/{name}" for name in ("bar_difference", "count")), 0.5)
    values = {"acc": 0.5, "acc_low": 0.4, "acc_high": 0.6} | accs
    stages = ("evaluate_start", "rl", "evaluate_sft", "evaluate_rl")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
        lines = [json.dumps({"stage": stage, "step": 0} | values) for stage in stages]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    for folders in ([tmp_path / "a"], [tmp_path / "a", tmp_path / "b"]):
        path = tmp_path / "page.html"
        draw_page(folders, path, max_megabytes=4)
        opened.open(path, width=width)
        assert opened.run(BROKEN_LABELS) == []


CONTRAST = """(() => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = parts(color).map((x) => x / 255)
      .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    const color = getComputedStyle(node).backgroundColor;
    return parts(color)[3] === 0 && node.parentElement ? behind(node.parentElement) : color;
  };
  return [...document.querySelectorAll('body *')]
    .filter((node) => node.checkVisibility() && !(node instanceof SVGElement) && !node.disabled)
    .filter((node) => [...node.childNodes].some((x) => x.nodeType === 3 && x.data.trim()))
    .map((node) => {
      const [a, b] = [light(getComputedStyle(node).color), light(behind(node))];
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.className || node.tagName];
    })
    .sort((a, b) => a[0] - b[0])[0];
})()"""


@pytest.mark.parametrize("is_dark", [False, True])
def test_text_stands_out_by_day_and_night(opened, report, is_dark):
    opened.open(report, dark=is_dark)
    paper = opened.run("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(21, 23, 26)") == is_dark
    lowest, where = opened.run(CONTRAST)
    assert lowest >= 4.5, where  # WCAG AA


def test_groups_without_roles_show_what_there_is(page, tmp_path):
    """As under GRPO."""
    report = Report(tmp_path, **SETTINGS, wording=WORDING)
    report.add(0, make_sampled(repair=None, has_roles=False), is_logged=True)
    page.open(report.path)
    assert text_of(page, ".role") == [] and len(text_of(page, ".response")) == 4
    numbers = (
        "[...document.querySelector('.response').querySelectorAll('dt')].map((x) => x.innerText)"
    )
    assert page.run(numbers) == ["reward", "A", "tokens"]
    assert page.run("document.getElementById('filter-role')") is None
    assert text_of(page, "#sample") == [
        "Groups of 1 of the 1 logged steps, each outcome in turn and so not in proportion."
    ]


def test_a_thinned_report_says_so(page, tmp_path):
    report = Report(tmp_path, **(SETTINGS | {"max_megabytes": 0.1}), wording=WORDING)
    for step in range(9):
        report.add(
            step, make_sampled(texts=(RIGHT, WRONG, LONG * 3, RIGHT), repair=None), is_logged=True
        )
    page.open(report.path)
    (told,) = text_of(page, "#sample")
    assert "of the 9 logged steps" in told
    assert "Older steps are thinned to keep this file within 0.1 MB." in told
