"""What wandb and MLflow are sent, by stand-ins that take the calls of the packages."""

import contextlib
import importlib.util
import json
import sys
import types

import pytest

from care_jax.devices import distributed
from care_jax.report.metrics import MetricWriter

SETTINGS = {
    "seed": 0,
    "stages": ["rl"],
    "model": {"path": "hub/Qwen2.5-VL-3B-Instruct", "lora_rank": 64, "backbone": {}},
    "rl": {"objective": "dr_grpo", "learning_rate": 1e-5},
    "dr_grpo": {"beta": 0.0},
    "care": {"K": 3},
    "data": {"buckets": [[48, 64]]},
}
MODEL = "Qwen2.5-VL-3B-Instruct, LoRA of rank 64"


def record(*names):
    return lambda *values: dict(zip(names, values, strict=True))


class Client:
    """An MLflow server in memory."""

    def __init__(self):
        self.runs, self.flushed = [], False

    def search_runs(self, experiments, filter_string):
        found = [run for run in self.runs if filter_string == f"tags.care_jax_run = '{run.number}'"]
        return [run for run in found if run.experiment in experiments]

    def create_run(self, experiment, run_name, tags):
        run = types.SimpleNamespace(
            info=types.SimpleNamespace(run_id=str(len(self.runs))),
            **{"experiment": experiment, "name": run_name, "tags": tags, "status": "RUNNING"},
            **{"number": tags["care_jax_run"], "params": {}, "metrics": []},
        )
        self.runs.append(run)
        return run

    def update_run(self, run_id, status):
        self.runs[int(run_id)].status = status

    def log_batch(self, run_id, metrics=(), params=(), synchronous=True):
        assert len(params) <= 100 and self.runs[int(run_id)].status == "RUNNING"
        assert synchronous != bool(metrics)  # a server that is slow does not stop the run
        self.runs[int(run_id)].metrics += [(m["key"], m["value"], m["step"]) for m in metrics]
        self.runs[int(run_id)].params |= {param["key"]: param["value"] for param in params}

    def set_terminated(self, run_id, status):
        assert self.flushed
        self.runs[int(run_id)].status = status


@pytest.fixture
def client(monkeypatch):
    client = Client()

    def flush():
        client.flushed = True

    stub = types.SimpleNamespace(
        MlflowClient=lambda: client,
        set_experiment=lambda name: types.SimpleNamespace(experiment_id=f"id of {name}"),
        flush_async_logging=flush,
        entities=types.SimpleNamespace(
            Param=record("key", "value"), Metric=record("key", "value", "time", "step")
        ),
    )
    monkeypatch.setitem(sys.modules, "mlflow", stub)
    return client


def test_mlflow_has_a_run_per_stage_which_a_resumed_stage_continues(tmp_path, client):
    workdir = tmp_path / "demo"
    workdir.mkdir()
    for start in (0, 1):
        with MetricWriter(workdir, SETTINGS, mlflow_experiment="vlm") as writer:
            writer.begin("rl", start)
            writer.write("rl", start, {"acc": 0.5, "pass@2": 1, "acc/made": 0})
            writer.write("rl_eval", start, {"acc": 1})
    rl, evaluated = client.runs
    assert (rl.experiment, rl.name, evaluated.name) == ("id of vlm", "demo/rl", "demo/rl_eval")
    assert rl.status == evaluated.status == "FINISHED"
    tags = {"stage": "rl", "objective": "DR GRPO", "model": MODEL, "care_jax_run": rl.number}
    assert rl.tags == tags
    assert rl.params["rl.learning_rate"] == "1e-05" and rl.params["rl.objective"] == "dr_grpo"
    assert rl.params["data.buckets"] == "[[48, 64]]"
    for step in (0, 1):  # names without the characters that MLflow refuses
        values = {name: value for name, value, at in rl.metrics if at == step}
        assert values == {"acc": 0.5, "pass_2": 1, "acc/made": 0}


def test_other_workdirs_have_other_runs(tmp_path, client):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with MetricWriter(tmp_path / name, SETTINGS, mlflow_experiment="vlm") as writer:
            writer.write("rl", 0, {"acc": 1})
    assert [run.name for run in client.runs] == ["a/rl", "b/rl"]


def test_another_run_at_the_same_path_continues_none(tmp_path, client):
    """In an emptied folder, or on another machine; a restart adds a line to starts.jsonl."""
    starts = tmp_path / "starts.jsonl"
    for lines in (["a"], ["a", "b"], ["c"], ["c", "d"]):
        starts.write_text("".join(f'{{"time": "{each}"}}\n' for each in lines))
        with MetricWriter(tmp_path, SETTINGS, mlflow_experiment="vlm") as writer:
            writer.write("rl", len(lines), {"acc": 1})
    assert [[step for *_, step in run.metrics] for run in client.runs] == [[1, 2], [1, 2]]


ENDS = {
    FloatingPointError: ("FAILED", 1),
    distributed.Preempted: ("KILLED", 1),
    KeyboardInterrupt: ("KILLED", 1),
    None: ("FINISHED", 0),
}


def test_a_run_that_an_exception_ends_is_not_shown_as_finished(tmp_path, client, monkeypatch):
    codes = []

    def init(**_):
        return types.SimpleNamespace(
            log=lambda *_, **__: None, finish=lambda exit_code: codes.append(exit_code)
        )

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    names, found = {"wandb_project": "p", "mlflow_experiment": "vlm"}, []
    for error in ENDS:  # restarts of one run
        with (
            contextlib.suppress(KeyboardInterrupt, Exception),
            MetricWriter(tmp_path, SETTINGS, **names) as writer,
        ):
            writer.write("rl", 0, {"acc": 1})
            if error:
                raise error
        found.append((client.runs[0].status, codes[-1]))
    assert found == [*ENDS.values()] and len(client.runs) == 1


def test_many_settings_are_sent_in_several_requests(tmp_path, client):
    many = {str(i): i for i in range(250)}
    with MetricWriter(tmp_path, SETTINGS | {"many": many}, mlflow_experiment="vlm") as writer:
        writer.begin("rl")
    assert {f"many.{i}": str(i) for i in range(250)}.items() <= client.runs[0].params.items()


def test_mlflow_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    expected = r"metrics.mlflow_experiment needs mlflow, .* 'care_jax\[mlflow\]'"
    with pytest.raises(ValueError, match=expected):
        MetricWriter(tmp_path, mlflow_experiment="vlm")


def test_wandb_runs_are_named_tagged_and_have_the_settings(tmp_path, monkeypatch):
    started = []

    def init(**settings):
        started.append(settings)
        return types.SimpleNamespace(log=lambda *_, **__: None, finish=lambda exit_code: None)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    workdir = tmp_path / "demo"
    workdir.mkdir()
    with MetricWriter(workdir, SETTINGS, wandb_project="vlm") as writer:
        writer.write("rl", 0, {"acc": 1})
    (run,) = started
    assert (run["project"], run["group"], run["name"]) == ("vlm", "demo", "demo/rl")
    assert run["tags"] == ["rl", "DR GRPO", MODEL] and run["job_type"] == "rl"
    assert run["config"] == SETTINGS and run["allow_val_change"]


def test_the_other_processes_send_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with MetricWriter(tmp_path, SETTINGS, mlflow_experiment="vlm", wandb_project="vlm") as writer:
        writer.write("rl", 0, {"acc": 1})
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not importlib.util.find_spec("mlflow"), reason="needs mlflow, which is an extra"
)
def test_the_real_mlflow_takes_these_calls(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    for start in (0, 1):
        with MetricWriter(tmp_path, SETTINGS, mlflow_experiment="vlm") as writer:
            writer.begin("rl", start)
            writer.write("rl", start, {"acc": 0.5, "pass@2": 1})
    client = mlflow.MlflowClient()
    experiment = mlflow.get_experiment_by_name("vlm")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["care.K"] == "3"
    assert [m.step for m in client.get_metric_history(run.info.run_id, "acc")] == [0, 1]


def test_tensorboard_has_the_hyperparameters_of_a_stage_in_its_own_run(tmp_path):
    from tensorboardX.proto import event_pb2, plugin_hparams_pb2

    with MetricWriter(tmp_path, SETTINGS) as writer:
        writer.write("rl", 0, {"acc": 1})
    (folder,) = (tmp_path / "tensorboard").iterdir()
    (path,) = folder.iterdir()  # and no run beside it
    data, found, texts = path.read_bytes(), {}, []
    while data:
        size = int.from_bytes(data[:8], "little")
        for value in event_pb2.Event.FromString(data[12 : 12 + size]).summary.value:
            if value.metadata.plugin_data.plugin_name == "hparams":
                content = value.metadata.plugin_data.content
                start = plugin_hparams_pb2.HParamsPluginData.FromString(content).session_start_info
                found |= start.hparams
            texts += [value.tensor.string_val[0].decode()] if value.tensor.string_val else []
        data = data[16 + size :]
    assert found["rl.learning_rate"].number_value == 1e-5
    assert found["rl.objective"].string_value == "dr_grpo"
    assert found["dr_grpo.beta"].number_value == 0 and found["model.lora_rank"].number_value == 64
    assert not {"care.K", "data.buckets"} & found.keys()  # the stage does not depend on them
    (text,) = texts
    assert json.loads(text) == SETTINGS
