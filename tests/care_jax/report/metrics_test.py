import itertools
import json
import math
import pathlib
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from sampled_group import WORDING, make_sampled
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2

from care_jax.report import accuracy, metrics
from care_jax.report.accuracy import pass_rates
from care_jax.report.console import print_line
from care_jax.report.groups import describe
from care_jax.report.metrics import MetricWriter
from care_jax.report.pictures import data_uri


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def events(folder):
    """(step, tag, value) of every scalar in a TensorBoard folder, oldest file first."""
    found, purged = [], []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            purged += [event.step] if event.HasField("session_log") else []
    return found, purged


def test_a_metric_is_written_under_one_name_to_both_places(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write("rl", 0, {"acc": jnp.float32(0.5), "num_anchors": 3, "kl": np.float64(0.25)})
        writer.write("rl", 1, {"acc": 0.75})
    assert lines(tmp_path) == [
        {"stage": "rl", "step": 0, "acc": 0.5, "num_anchors": 3, "kl": 0.25},
        {"stage": "rl", "step": 1, "acc": 0.75},
    ]
    written, _ = events(tmp_path / "tensorboard" / "rl")
    assert set(written) == {
        (0, "acc", 0.5), (0, "num_anchors", 3.0), (0, "kl", 0.25), (1, "acc", 0.75)
    }  # fmt: skip


def test_a_line_is_written_and_closed_at_once(tmp_path):
    """A mounted bucket has it only then, and a killed run keeps it."""
    with MetricWriter(tmp_path) as writer:
        writer.write("rl", 0, {"acc": 0.5})
        assert len(lines(tmp_path)) == 1
        opened = {path.resolve() for path in pathlib.Path("/proc/self/fd").iterdir()}
        assert tmp_path / "metrics.jsonl" not in opened


def test_counts_by_reason_stand_in_every_line_of_their_stage_as_they_are(tmp_path):
    with MetricWriter(tmp_path) as writer:
        counts = writer.left_out("rl")
        writer.write("rl", 0, {"acc": 1})
        counts.update({"no answer": 2, "image missing": 1})
        writer.write("rl", 1, {"acc": 1})
        counts["no answer"] += 1
        writer.write("sft", 0, {"loss": 1})
        writer.write("rl", 2, {"acc": 1})
    expected = [{}, {"image_missing": 1, "no_answer": 2}, {}, {"image_missing": 1, "no_answer": 3}]
    for line, counted in zip(lines(tmp_path), expected, strict=True):
        found = {name: value for name, value in line.items() if name.startswith("left_out")}
        assert found == {f"left_out/{name}": count for name, count in counted.items()}


class Wandb:
    """The few calls of it that are made."""

    def __init__(self):
        self.started, self.logged, self.finished = [], [], []

    class Table:
        def __init__(self, columns):
            self.columns, self.rows = columns, []

        def add_data(self, *row):
            assert len(row) == len(self.columns)
            self.rows.append(row)

    def Image(self, image):
        return "image", image

    def init(self, **settings):
        self.started.append(settings)
        stub, stage = self, settings["name"].rpartition("/")[2]

        class Online:
            def log(self, values, step):
                stub.logged.append((stage, step, values))

            def finish(self, exit_code):
                stub.finished.append(stage)

        return Online()


def test_wandb_gets_the_same_names_and_a_resumed_stage_its_own_run(tmp_path, monkeypatch):
    stub = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    for start in (0, 1):
        with MetricWriter(tmp_path, wandb_project="project") as writer:
            writer.begin("rl", start)
            writer.write("rl", start, {"acc": jnp.float32(0.5), "acc/made": 1})
            writer.write("evaluate_rl", 0, {"acc": 1})
    assert stub.logged[0] == ("rl", 0, {"acc": 0.5, "acc/made": 1})
    assert stub.logged[1] == ("evaluate_rl", 0, {"acc": 1})
    first, evaluated, again = stub.started[:3]
    assert first == again and first["id"] != evaluated["id"]
    assert (first["project"], first["group"], first["resume"]) == (
        *("project", tmp_path.name, "allow"),
    )
    assert stub.finished == ["rl", "evaluate_rl"] * 2


def test_a_tracker_that_fails_after_an_evaluation_is_left_out(tmp_path, monkeypatch, capsys):
    """A run that begins with an evaluation has its first line when all is answered."""

    class Failing(Wandb):
        def init(self, **settings):
            raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "wandb", Failing())
    with MetricWriter(tmp_path, wandb_project="project") as writer:
        writer.write("evaluate_start", 0, {"acc": 1})
        assert "Wandb failed (no route)" in capsys.readouterr().out
    assert len(writer.path.read_text().splitlines()) == 1
    writer = MetricWriter(tmp_path, wandb_project="project")
    with writer, pytest.raises(ConnectionError):
        writer.begin("rl")


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(
    tmp_path, monkeypatch, capsys, failing
):
    """But where a stage's begin is the first, in the run's first seconds."""

    class Failing(Wandb):
        def init(self, **settings):
            if failing == "init" and self.started:
                raise ConnectionError("no\nroute")
            online = super().init(**settings)

            def fail(*_, **__):
                raise ConnectionError("no\nroute")

            if failing != "init":
                monkeypatch.setattr(type(online), failing, fail)
            return online

    stub = Failing()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    with MetricWriter(tmp_path, wandb_project="project") as writer:
        for step in range(2):
            writer.write("sft", step, {"acc": 1})
        writer.write("rl", 0, {"acc": 1})
    said = f"Wandb failed (no route); the run goes on without it, and {writer.path} has the metrics"
    assert capsys.readouterr().out.count(said) == 1
    assert len(writer.path.read_text().splitlines()) == 3
    assert len(stub.logged) == {"init": 2, "log": 0, "finish": 3}[failing]


def test_a_tracker_that_cannot_begin_stops_the_run(tmp_path, monkeypatch):
    stub = Wandb()
    monkeypatch.setattr(stub, "init", lambda **_: (_ for _ in ()).throw(ValueError("no api key")))
    monkeypatch.setitem(sys.modules, "wandb", stub)
    with pytest.raises(ValueError, match="no api key"):
        MetricWriter(tmp_path, wandb_project="project").begin("rl")


def test_prompts_and_responses_are_a_table_on_wandb_and_text_and_images_on_tensorboard(
    tmp_path, monkeypatch
):
    stub = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    texts = ("<think>two\n```</think>", "", "x", "y")
    components = [{"acc": 1.0, "brief": 0.25}, {}, {}, {}]
    group = describe(3, make_sampled(texts, repair=None, components=components), 0, WORDING)
    group["pictures"] = [data_uri(Image.new("RGB", (8, 6), "red"), max_side=8), ""]
    with MetricWriter(tmp_path, wandb_project="project") as writer:
        writer.write("rl", 3, {"acc": 1})
        writer.show("rl", 3, [group, group | {"id": "q2", "pictures": [""]}])
        writer.show("rl", 3, [])
    (stage, step, values) = stub.logged[-1]
    table = values["rollouts"]
    assert (stage, step, len(stub.logged)) == ("rl", 3, 2)
    assert table.columns == [
        *("name", "image", "question", "gold", "role", "acc", "reward", "advantage"),
        *("tokens", "reason", "components", "text"),
    ]
    assert [row[0] for row in table.rows] == ["made q0"] * 4 + ["made q2"] * 4
    (_, (kind, image), question, gold, *row) = table.rows[0]
    assert (kind, image.size, question, gold) == ("image", (8, 6), group["question"], "2")
    assert row == ["anchor", 1.0, 0.9, 0.75, 23, "same number", "acc 1.0, brief 0.25", texts[0]]
    assert table.rows[4][1] is None
    (path,) = (tmp_path / "tensorboard" / "rl").glob("events*")
    data = path.read_bytes()
    assert b"**made q0** <image>How many?" in data and b"role anchor \xc2\xb7 acc 1.0" in data
    assert b"    <think>two\n    ```</think>" in data  # a block that no text can end
    assert data.count(b"\x89PNG") == 1


def begin_twice(writer):
    writer.begin("rl")
    writer.begin("rl")


def write(**values):
    return lambda writer: writer.write("rl", 12, values)


REFUSED = {
    "begun twice": (begin_twice, "stage rl has begun already; call begin once"),
    "step": (write(step=1), "no metric may be named 'step'; rename it"),
    "nan": (write(acc=0.5, loss=jnp.float32(math.nan)), "^rl step 12: .* got loss=nan; lower the"),
    "inf": (write(loss=-math.inf), "rl step 12: expected finite metrics, got loss=-inf;"),
    "nothing": (lambda _: accuracy.wilson_interval(0, 0), "at least one example, got 0 of 0"),
    "wandb": (
        lambda writer: MetricWriter(writer.path.parent, wandb_project="x"),
        "needs wandb, .*; pip install",
    ),
}


@pytest.mark.parametrize(("act", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch, act, message):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    with (
        pytest.raises((ValueError, FloatingPointError), match=message),
        MetricWriter(tmp_path) as writer,
    ):
        act(writer)


def test_a_resumed_stage_has_every_step_once(tmp_path):
    with MetricWriter(tmp_path) as writer:
        for stage, num_steps in (("sft", 3), ("rl", 5)):
            for step in range(num_steps):
                writer.write(stage, step, {"loss": step})
    with MetricWriter(tmp_path) as writer:
        writer.begin("rl", 2)
        writer.write("rl", 2, {"loss": 20})
        writer.write("rl", 3, {"loss": 30})
    got = [(each["stage"], each["step"], each["loss"]) for each in lines(tmp_path)]
    assert got[:3] == [("sft", 0, 0), ("sft", 1, 1), ("sft", 2, 2)]
    assert got[3:] == [("rl", 0, 0), ("rl", 1, 1), ("rl", 2, 20), ("rl", 3, 30)]
    assert 2 in events(tmp_path / "tensorboard" / "rl")[1]  # TensorBoard hides steps from 2 on
    assert not (tmp_path / "metrics.jsonl.partial").exists()


def test_a_stage_that_was_not_begun_begins_at_its_first_step(tmp_path):
    for value in (1, 2):
        with MetricWriter(tmp_path) as writer:
            writer.write("evaluate", 4, {"acc": value})
    assert [each["acc"] for each in lines(tmp_path)] == [2]


def test_a_line_cut_by_a_kill_is_dropped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"stage": "rl", "step": 0}\n{"stage": "rl", "st')
    with MetricWriter(tmp_path) as writer:
        writer.write("rl", 1, {})
    assert [each["step"] for each in lines(tmp_path)] == [0, 1]


def test_only_the_first_process_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    with MetricWriter(tmp_path / "run") as writer:
        writer.begin("rl", 0)
        writer.write("rl", 0, {"acc": 1})
    print_line("a line")
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_the_host_is_watched(tmp_path):
    before = metrics.host_usage()
    assert before["host/memory_gib"] > 0.05 and before["host/threads"] >= 1
    with (tmp_path / "a").open("w"), (tmp_path / "b").open("w"):
        assert metrics.host_usage()["host/open_files"] == before["host/open_files"] + 2


def test_peak_memory_is_left_out_where_the_backend_does_not_count_it(monkeypatch):
    class Device:
        def memory_stats(self):
            return self.stats

    monkeypatch.setattr("jax.local_devices", lambda: [Device()])
    Device.stats = {"peak_bytes_in_use": 3 * 2**29}
    assert metrics.device_memory() == {"device_memory_gib": 1.5}
    Device.stats = None
    assert metrics.device_memory() == {}


@pytest.mark.parametrize(
    ("num_correct", "num_examples", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_wilson_interval_equals_published_values(num_correct, num_examples, low, high):
    """Newcombe (1998), table I."""
    got = accuracy.wilson_interval(num_correct, num_examples)
    np.testing.assert_allclose(got, (low, high), atol=1e-4)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    """Against all subsets, for every number of right ones among five samples."""
    for c in range(6):
        samples = [i < c for i in range(5)]
        for k in (1, 2, 4):
            subsets = [any(chosen) for chosen in itertools.combinations(samples, k)]
            assert pass_rates([c], 5)[f"pass@{k}"] == pytest.approx(np.mean(subsets))
    assert pass_rates([0, 5], 5).keys() == {"pass@1", "pass@2", "pass@4"}
    assert pass_rates([0, 8], 8) == {f"pass@{k}": 0.5 for k in (1, 2, 4, 8)}
    assert pass_rates([1, 1], 1) == {}


def test_a_line_that_is_written_is_known_to_a_resumed_run(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write("rl_eval", 4, {"acc": 0.5})
        assert writer.line("rl_eval", 4)
        assert not writer.line("rl_eval", 0) and not writer.line("rl", 4)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"stage": "rl_eval", "step": 8, "acc"')
    assert not MetricWriter(tmp_path).line("rl_eval", 8)


def test_closing_hides_no_earlier_error(tmp_path, monkeypatch):
    def refuse(writer, error):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MetricWriter, "close", refuse)
    with pytest.raises(FloatingPointError, match="the first"), MetricWriter(tmp_path):
        raise FloatingPointError("the first")
    with pytest.raises(OSError), MetricWriter(tmp_path):
        pass


def test_a_damaged_line_is_named_and_left_out(tmp_path, capsys):
    """In the middle of the file: the others stay, and the run goes on."""
    with MetricWriter(tmp_path) as writer:
        for step in range(4):
            writer.write("rl", step, {"acc": 0.5})
    path = tmp_path / "metrics.jsonl"
    damaged = path.read_bytes().splitlines(keepends=True)
    damaged[1] = b'{"stage": "rl", "st\xff\x00\n'
    damaged[2] = b'{"stage": "rl", "step": "2"}\n'
    path.write_bytes(b"".join(damaged) + b'{"stage": "rl"')
    capsys.readouterr()
    with MetricWriter(tmp_path) as writer:
        assert writer.line("rl", 0) and not writer.line("rl", 1)
        writer.begin("rl", 4)
        writer.write("rl", 4, {"acc": 0.5})
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(" is damaged")[0] for line in told] == [f"{path}:2", f"{path}:3"]
    assert [line["step"] for line in lines(tmp_path)] == [0, 3, 4]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == b"".join(damaged[1:3])


def test_a_board_that_cannot_be_written_stops_the_run_with_its_folder(tmp_path, monkeypatch):
    """The board's thread lives on: were it to end, its full queue would stop the run for ever."""

    def refuse(*_):
        raise OSError(28, "No space left on device")

    writer = MetricWriter(tmp_path)
    writer.begin("rl")
    monkeypatch.setattr(EventsWriter, "_write_serialized_event", refuse)
    found = []

    def write():
        try:
            for step in range(1000):
                writer.write("rl", step, {f"metric {i}": 1.0 for i in range(30)})
                time.sleep(0.01)
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(20)
    assert [(error.errno, error.filename) for error in found] == [
        (28, str(tmp_path / "tensorboard" / "rl"))
    ]
    with pytest.raises(OSError, match="No space left"):
        writer.close()


def test_shared_memory_that_is_full_is_named(tmp_path, monkeypatch):
    """TensorBoard's queue has a lock there, and the error of the system names no file."""

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", refuse)
    with MetricWriter(tmp_path) as writer, pytest.raises(OSError, match="/dev/shm"):
        writer.begin("rl")
