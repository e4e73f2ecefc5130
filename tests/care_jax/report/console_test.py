"""Lines and progress bars of a run."""

from care_jax.report import console


def test_the_console_line_is_readable(capsys):
    line = console.format_line("rl", 7, 200, {"reward": 0.51318, "rows": 64}, 3.2149)
    assert line == "rl   7/200  reward 0.5132  rows 64  3.21 s"
    assert (
        console.format_line("sft", 0, 9, {}, 3.2149, left=3671.4) == "sft 0/9  3.21 s  1:01:11 left"
    )
    failing = console.format_line("rl", 7, 9, {"reward": 0.5, "not judged": 1 / 8}, 3.0)
    assert failing == "rl 7/9  reward 0.5  not judged 12.5%  3.00 s"
    console.print_line(line)
    assert capsys.readouterr().out == line + "\n"


def test_what_is_left_goes_by_the_last_ten_steps(monkeypatch):
    now = 0.0
    monkeypatch.setattr(console.time, "perf_counter", lambda: now)
    pace = console.Pace(100)
    now = 60.0
    assert pace.left(20) is None  # its compilation tells nothing
    for step in (22, 24):  # every other one is logged
        now += 4.0
        left = pace.left(step)
    assert left == 2.0 * (99 - 24)
    for step in range(25, 36):
        now += 10.0
        left = pace.left(step)
    assert left == 10.0 * (99 - 35)
    assert console.Pace(1).left(0) is None


def test_progress_passes_every_item_and_draws_no_bar_into_a_file(capsys):
    assert list(console.progress(iter("abc"), "rl", 2, 5)) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")


def test_a_bar_shows_the_part_of_the_step_that_is_worked_on(capsys, monkeypatch):
    monkeypatch.setattr(console, "_is_hidden", lambda: False)
    for _ in console.progress(range(2), "rl", 0, 2):
        console.show_part("decoded 3 of 8 prompts")
        for _ in console.progress(range(2), "evaluation", 0, 2):
            console.show_part("judging")
    console.show_part("of no bar")
    drawn = capsys.readouterr().err.split("\r")
    for bar, part in (("rl:", "decoded 3 of 8 prompts"), ("evaluation:", "judging")):
        found = [line for line in drawn if part in line]
        assert found and all(bar in line for line in found)
    assert not [line for line in drawn if "of no bar" in line]
