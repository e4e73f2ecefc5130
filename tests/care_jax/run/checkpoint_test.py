import asyncio
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src.path import atomicity

from care_jax.devices import distributed, sharding
from care_jax.devices.sharding import abstract
from care_jax.learning.optimizer import make_optimizer
from care_jax.run import checkpoint, integrity, mounts
from care_jax.run.checkpoint import Checkpoints, InFlightSave
from care_jax.run.progress import saved_steps

ROOT = pathlib.Path(__file__).resolve().parents[3]
FINGERPRINT = {"family": "qwen2_5_vl", "text": {"hidden_size": 64, "mrope_section": (2, 3, 3)}}


def checkpoints(folder, keep=2, fingerprint=FINGERPRINT, **best):
    return Checkpoints(folder, keep=keep, fingerprint=fingerprint, **best)


def make_state(value=0.0, mesh=None):
    """Parameters and the state of an optimizer that trains half of them."""
    params = {"frozen": jnp.full((4,), value), "w": jnp.full((8, 4), value) + jnp.arange(4)}
    optimizer = make_optimizer(lambda step: 1e-3, weight_decay=0.0, max_grad_norm=1.0)
    state = {"params": params, "opt_state": optimizer.init({"w": params["w"]})}
    if mesh is None:
        return state
    own = {"frozen": NamedSharding(mesh, P()), "w": NamedSharding(mesh, P("fsdp", "tensor"))}
    return jax.device_put(state, sharding.shardings_like(state, own, mesh))


def save(folder, step):
    with checkpoints(folder) as saved:
        saved.save(step, make_state(step), {})


def restore(folder, step=None, **options):
    with checkpoints(folder, **options) as saved:
        return saved.restore(abstract(make_state()), step)


def restore_params(folder, step, **options):
    with checkpoints(folder, **options) as saved:
        return saved.restore_params(abstract(make_state())["params"], step)


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_everything_saved_comes_back(tmp_path):
    state = make_state(3.0)
    with checkpoints(tmp_path) as saved:
        assert saved.latest_step is None
        saved.save(7, state, {"stage": "rl", "tokens": 10**12})
        unfinished = InFlightSave({"tokens": np.arange(5)}, {"prompts": [[1, 2]]})
        saved.save(8, state, {}, in_flight=unfinished)
    with checkpoints(tmp_path) as saved:
        assert saved.latest_step == 8
        got, *rest = saved.restore(abstract(make_state()), 7)
        assert saved.restore(abstract(make_state())).in_flight == unfinished.description
        arrays = saved.restore_in_flight({"tokens": jax.ShapeDtypeStruct((5,), int)}, 8)
    assert_equal(got, state)
    assert rest == [7, {"stage": "rl", "tokens": 10**12}, None]
    np.testing.assert_array_equal(arrays["tokens"], np.arange(5))


def test_a_checkpoint_restores_onto_another_mesh(tmp_path):
    state = make_state(2.0, sharding.make_mesh(1, 8, 1))
    target = abstract(make_state(0.0, sharding.make_mesh(2, 2, 2)))
    with checkpoints(tmp_path) as saved:
        saved.save(1, state, {})
        got = saved.restore(target).state
    assert_equal(got, state)
    assert got["params"]["w"].sharding.spec == P("fsdp", "tensor")
    assert {each.data.shape for each in got["params"]["w"].addressable_shards} == {(4, 2)}


def test_latest_steps_are_kept_and_any_of_them_restores(tmp_path):
    with checkpoints(tmp_path, keep=2) as saved:
        for step in (1, 2, 3):
            saved.save(step, make_state(step), {})
        assert saved.restore(abstract(make_state())).step == 3
        assert saved.restore(abstract(make_state()), step=2).step == 2
        assert saved.steps == [2, 3]


# Accuracy of steps 1 to 6; step 4 is not evaluated.
ACCS = {1: 0.1, 2: 0.7, 3: 0.6, 5: 0.3, 6: 0.2}


def save_all(saved, steps):
    for step in steps:
        metrics = {"acc": ACCS[step], "fmt": 1 - ACCS[step]} if step in ACCS else None
        saved.save(step, make_state(step), {}, metrics)


@pytest.mark.parametrize(
    ("keep", "best", "kept"),
    [
        (1, {}, [6]),
        (2, {"keep_best": 1}, [2, 5, 6]),
        (1, {"keep_best": 2}, [2, 3, 6]),
        (1, {"keep_best": 1, "best_metric": "fmt"}, [1, 6]),
    ],
)
def test_the_best_steps_are_kept_beside_the_latest(tmp_path, keep, best, kept):
    with checkpoints(tmp_path, keep, **best) as saved:
        save_all(saved, range(1, 7))
        assert saved.steps == kept
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == kept
    with checkpoints(tmp_path, keep, **best) as saved:
        assert saved.restore(abstract(make_state())).step == 6  # not the best
        assert saved.best_step == (6 if not best else kept[-2] if "best_metric" in best else 2)
        assert_equal(saved.restore(abstract(make_state()), 6).state, make_state(6))


def test_the_best_of_a_resumed_run_stays_until_it_is_beaten(tmp_path):
    with checkpoints(tmp_path, 1, keep_best=1) as saved:
        assert saved.best_step is None and saved.is_among_best({"acc": 0.0})
        save_all(saved, (1, 2, 3, 4))
        assert saved.steps == [2, 4]
    with checkpoints(tmp_path, 1, keep_best=1) as saved:
        assert saved.best_step == 2
        assert saved.is_among_best({"acc": 0.71})
        assert not saved.is_among_best({"acc": 0.7}) and not saved.is_among_best({"fmt": 1.0})
        saved.save(5, make_state(5), {}, {"acc": 0.8})
        saved.save(6, make_state(6), {}, {"acc": 0.8})  # of equals the last is the best
        assert saved.steps == [6] and saved.best_step == 6
    with checkpoints(tmp_path, 1) as saved:
        assert not saved.is_among_best({"acc": 1.0})  # none is kept


def test_the_best_are_sought_among_steps_of_one_evaluation(tmp_path, capsys):
    easy, hard = ({"top_p": 1.0, "benchmarks": [[name, "a"]]} for name in ("easy", "hard"))
    with checkpoints(tmp_path, 1, keep_best=1, evaluation=easy) as saved:
        save_all(saved, (2, 4))
    with checkpoints(tmp_path, 1, keep_best=1, evaluation=hard) as saved:
        assert saved.best_step == 2  # nothing else is evaluated yet
        assert saved.is_among_best({"acc": 0.3})
        save_all(saved, (5, 6))
        assert saved.steps == [5, 6] and saved.best_step == 5
        assert not saved.is_among_best({"acc": 0.3})
        saved.save(7, make_state(7), {})
        saved.add_metrics(7, {"acc": 0.4})
    line = f"checkpoints [2] in {tmp_path} were evaluated with another benchmarks than step 5; "
    assert capsys.readouterr().out.startswith(line)
    with checkpoints(tmp_path, 1, keep_best=1, evaluation={"top_p": 0.5}) as saved:
        assert saved.best_step == 7


def test_an_evaluation_of_an_earlier_version_compares_with_all(tmp_path):
    with checkpoints(tmp_path, keep_best=1) as saved:
        save_all(saved, (2,))
    (tmp_path / "2" / "metrics" / "metrics").write_text('{"acc": 0.7}')
    integrity.update_manifest(tmp_path / "2", "metrics/metrics")
    with checkpoints(tmp_path, keep_best=1, evaluation={"top_p": 0.5}) as saved:
        assert saved.best_step == 2
        assert saved.is_among_best({"acc": 0.8}) and not saved.is_among_best({"acc": 0.6})
        save_all(saved, (3,))
        assert saved.best_step == 2


def test_a_step_may_be_evaluated_after_it_was_saved(tmp_path):
    """As when a run is stopped inside the evaluation."""
    with checkpoints(tmp_path, 1, keep_best=1) as saved:
        saved.save(1, make_state(1), {}, {"acc": 0.2})
        saved.save(2, make_state(2), {})
        saved.add_metrics(2, {"acc": 0.9})
        assert saved.best_step == 2
        save_all(saved, (3, 4))
        assert saved.steps == [2, 4]
    with checkpoints(tmp_path, 1, keep_best=1) as saved:
        assert saved.best_step == 2
        save_all(saved, (5, 6))
        assert saved.steps == [2, 6]


def test_parameters_are_restored_without_the_rest(tmp_path):
    """A part of them is, too, onto another mesh."""
    with checkpoints(tmp_path) as saved:
        saved.save(1, make_state(5.0), {})
        target = abstract(make_state(0.0, sharding.make_mesh(2, 2, 2)))["params"]
        params = saved.restore_params(target, 1)
        part = saved.restore_params({"w": target["w"]}, 1)
    assert_equal(params, make_state(5.0)["params"])
    assert params["w"].sharding.spec == P("fsdp", "tensor")
    assert_equal(part, {"w": make_state(5.0)["params"]["w"]})


def test_restoring_at_once_waits_for_the_files(tmp_path, monkeypatch):
    original = atomicity.AtomicRenameTemporaryPath.finalize

    async def slow(self):
        await asyncio.sleep(0.3)
        await original(self)

    monkeypatch.setattr(atomicity.AtomicRenameTemporaryPath, "finalize", slow)
    with checkpoints(tmp_path) as saved:
        saved.save(1, make_state(4.0), {})
        assert_equal(saved.restore(abstract(make_state())).state, make_state(4.0))


def test_saving_leaves_the_sync_points_of_preemption_to_the_run(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "jax.experimental.multihost_utils.reached_preemption_sync_point", seen.append
    )
    save(tmp_path, 1)
    assert not seen


def test_saving_is_not_disturbed_by_donating_the_state_at_once(tmp_path):
    step_fn = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = {"w": jnp.zeros((512, 1024))}
    with checkpoints(tmp_path, keep=3) as saved:
        for step in (1, 2, 3):
            state = jax.tree.map(step_fn, state)
            saved.save(step, state, {})
            for _ in range(3):
                state = jax.tree.map(step_fn, state)
        target = abstract(state)
        got = [float(saved.restore(target, step=s).state["w"].max()) for s in (1, 2, 3)]
    assert got == [1.0, 5.0, 9.0]


def save_and_die(folder: str, moment: str, is_bucket: bool) -> None:
    """Runs in a process of its own: saves step 1, then is killed while saving step 2."""
    mounts.is_fuse = lambda folder: is_bucket
    kind = atomicity.CommitFileTemporaryPath if is_bucket else atomicity.AtomicRenameTemporaryPath
    with checkpoints(folder) as saved:
        saved.save(1, make_state(1.0), {})
        saved.wait()
        original = getattr(kind, moment)

        async def kill(self, *args, **kwargs):
            if moment == "create":  # the folder is there, no file is
                await original(self, *args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(kind, moment, kill)
        saved.save(2, make_state(2.0), {})


@pytest.mark.parametrize(
    ("moment", "is_bucket"),
    [
        pytest.param("create", False, marks=pytest.mark.exhaustive),
        pytest.param("create", True, marks=pytest.mark.exhaustive),
        ("finalize", False),
        pytest.param("finalize", True, marks=pytest.mark.exhaustive),
    ],
)
def test_a_kill_during_a_save_leaves_the_step_before(tmp_path, monkeypatch, moment, is_bucket):
    folder = tmp_path / "checkpoints" / "rl"
    arguments = f"{str(folder)!r}, {moment!r}, {is_bucket}"
    code = f"import checkpoint_test as t; t.save_and_die({arguments})"
    path = os.pathsep.join((str(ROOT), str(pathlib.Path(__file__).parent)))
    child = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    left_over = "2" if is_bucket else "2.*"
    assert [left.name for left in folder.glob(left_over)]
    assert saved_steps(tmp_path, "rl") == [1]
    monkeypatch.setattr(mounts, "is_fuse", lambda folder: is_bucket)
    with checkpoints(folder) as saved:
        assert saved.latest_step == 1
        got = saved.restore(abstract(make_state()))
        assert_equal(got.state, make_state(1.0))
        assert got.step == 1
        saved.save(3, make_state(3.0), {})
    assert sorted(left.name for left in folder.iterdir()) == ["1", "3"]


@pytest.mark.parametrize("is_bucket", [False, True])
def test_no_folder_is_renamed_on_a_mounted_bucket(tmp_path, monkeypatch, is_bucket):
    """gcsfuse refuses that for a bucket without hierarchical namespaces."""
    rename, renamed = os.rename, []

    def recorded(source, target, **options):
        renamed.extend([source] if os.path.isdir(source) else [])
        return rename(source, target, **options)

    monkeypatch.setattr(os, "rename", recorded)
    monkeypatch.setattr(mounts, "is_fuse", lambda folder: is_bucket)
    for step in (4, 6):
        with checkpoints(tmp_path, keep=1) as saved:
            saved.save(step, make_state(step), {}, {"acc": step / 10})
    assert bool(renamed) != is_bucket
    with checkpoints(tmp_path) as saved:
        assert saved.steps == [6] and saved.verify(6) and integrity.has_manifest(tmp_path / "6")
        assert_equal(saved.restore(abstract(make_state())).state, make_state(6))
        assert_equal(saved.restore_params(abstract(make_state()["params"]), 6)["w"].shape, (8, 4))


@pytest.mark.parametrize("was_bucket", [False, True])
def test_a_workdir_may_move_between_a_disk_and_a_mounted_bucket(tmp_path, monkeypatch, was_bucket):
    monkeypatch.setattr(mounts, "is_fuse", lambda folder: was_bucket)
    save(tmp_path, 4)
    monkeypatch.setattr(mounts, "is_fuse", lambda folder: not was_bucket)
    with checkpoints(tmp_path) as saved:
        assert_equal(saved.restore(abstract(make_state())).state, make_state(4))
        saved.save(6, make_state(6), {})
        assert saved.steps == [4, 6]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A folder with the whole checkpoints 4 and 6."""
    folder = tmp_path_factory.mktemp("two_steps")
    with checkpoints(folder) as saved:
        for step in (4, 6):
            saved.save(step, make_state(step), {}, {"acc": step / 10})
    return folder


@pytest.fixture
def folder(two_steps, tmp_path):
    """A copy of it."""
    return pathlib.Path(shutil.copytree(two_steps, tmp_path / "copy"))


def kinds_of_files():
    """What orbax writes, less two files that hold nothing of the state."""
    names = ["metrics/metrics", "metrics/commit_success.txt", "progress/metadata"]
    names += ["state/_METADATA", "state/_sharding", "state/array_metadatas/process_0"]
    names += ["state/manifest.ocdbt", "state/d/*", "state/ocdbt.process_0/manifest.ocdbt"]
    return [*names, "state/ocdbt.process_0/d/*", "sha256.json"]


@pytest.mark.parametrize(
    ("name", "is_small"),
    [(name, True) for name in kinds_of_files()]
    + [
        (name, False)
        for name in ("state/d/*", "state/_METADATA", "progress/metadata", "sha256.json")
    ],
)
def test_a_flipped_bit_in_any_kind_of_file_gives_the_step_before(
    folder, monkeypatch, capfd, name, is_small
):
    """Whether the file is hashed when the folder is opened, as small ones are, or at a restore."""
    if not is_small:
        monkeypatch.setattr(checkpoint, "_QUICK_BYTES", -1)
    path = sorted((folder / "6").glob(name))[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with checkpoints(folder) as saved:
        restored = saved.restore(abstract(make_state()))
        assert restored.step == saved.latest_step == 4
        assert_equal(restored.state, make_state(4))
        saved.save(6, make_state(6.5), {})
    line = capfd.readouterr().err
    assert line.startswith("checkpoint 6 is damaged: ") and line.count("\n") == 1
    assert path.name in line and "renamed to 6.damaged" in line
    assert sorted(left.name for left in folder.iterdir()) == ["4", "6", "6.damaged"]
    assert_equal(restore(folder).state, make_state(6.5))


def test_files_without_a_sum_hold_nothing_of_the_state(folder):
    files = {str(path.relative_to(folder / "6")) for path in (folder / "6").rglob("*")}
    listed = json.loads((folder / "6" / integrity.MANIFEST).read_text())["files"].keys()
    unlisted = {name for name in files - listed if (folder / "6" / name).is_file()}
    assert unlisted - {integrity.MANIFEST} == {"_CHECKPOINT_METADATA", "commit_success.txt"}
    for name in unlisted - {integrity.MANIFEST}:
        (folder / "6" / name).write_text("?")
    assert_equal(restore(folder).state, make_state(6))


def truncate(step_folder):
    path = step_folder / "state" / "_METADATA"
    path.write_bytes(path.read_bytes()[:-100])


def lose_a_file(step_folder):
    (step_folder / "progress" / "metadata").unlink()


@pytest.mark.parametrize(
    ("fault", "message"),
    [(truncate, "bytes instead of"), (lose_a_file, "cannot be read (No such")],
)
def test_a_truncated_or_incomplete_step_is_seen_before_its_files_are_read(
    folder, monkeypatch, capfd, fault, message
):
    monkeypatch.setattr(integrity, "sha256", None)
    monkeypatch.setattr(checkpoint, "_QUICK_BYTES", -1)
    fault(folder / "6")
    with checkpoints(folder) as saved:
        assert saved.steps == [4]
    assert message in capfd.readouterr().err


def zeroed(folder):
    """A folder whose step 4 has zeros for arrays."""
    path = next((folder / "4" / "state" / "d").iterdir())
    path.write_bytes(bytes(path.stat().st_size))
    return folder


def test_processes_that_list_different_steps_do_not_restore_them(folder, monkeypatch):
    """As on a mount whose listing is stale on one host, at the opening or after a rename."""
    theirs = [[4]]

    def gathered(value):
        return [value, theirs if isinstance(value, list) and value != [""] else value]

    monkeypatch.setattr(distributed, "gather_json", gathered)
    message = rf"same checkpoints in {folder} on all processes, got the steps \[4, 6\], \[4\] by"
    with pytest.raises(ValueError, match=message):
        checkpoints(folder)
    theirs = [[4, 6]]
    with checkpoints(folder) as saved:
        assert saved.restore(abstract(make_state())).step == 6
    monkeypatch.setattr(checkpoint, "_QUICK_BYTES", -1)
    with (
        checkpoints(zeroed(folder)) as saved,
        pytest.raises(ValueError, match=r"\[6\], \[4, 6\] by"),
    ):
        saved.restore(abstract(make_state()), 4)


OTHER = {"family": "qwen2_5_vl", "text": {"hidden_size": 128, "num_layers": 2}, "z": 0}
OF_OTHER = (
    "is of another model: hidden_size (checkpoint 64, config 128), mrope_section "
    "(checkpoint [2, 3, 3], config unset), num_layers (checkpoint unset, config 2) and 1 "
    "more; use the config it was saved with or another --workdir"
)
DAMAGED = "is damaged and was renamed to 4.damaged; choose one of the steps [6]"
REFUSED = {  # what is done in a folder with the steps 4 and 6, and a part of the message
    "no step": (lambda folder: restore(folder / "x"), "expected checkpoint of any step in"),
    "another step": (lambda folder: restore(folder, 5), "found steps [4, 6]; correct --workdir"),
    "not after the last": (lambda folder: save(folder, 6), "step 6 is not after step 6 in"),
    "another model": (lambda folder: restore(folder, fingerprint=OTHER), OF_OTHER),
    "its parameters": (lambda folder: restore_params(folder, 4, fingerprint=OTHER), OF_OTHER),
    "damaged": (lambda folder: restore(zeroed(folder), 4), DAMAGED),
    "damaged parameters": (lambda folder: restore_params(zeroed(folder), 4), DAMAGED),
}


@pytest.mark.parametrize(("act", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_restored_or_saved_is_refused(folder, monkeypatch, act, message):
    monkeypatch.setattr(checkpoint, "_QUICK_BYTES", -1)
    with pytest.raises(ValueError, match=re.escape(message)):
        act(folder)
    assert restore(folder).step == 6


def test_without_a_whole_step_the_run_stops_until_one_is_copied_back(folder, two_steps, capfd):
    message = rf"every checkpoint in {folder} is damaged \(4\.damaged, 6\.damaged\); restore one"
    for step in ("4", "6"):
        truncate(folder / step)
    for _ in range(2):  # the second start finds no step at all
        with pytest.raises(ValueError, match=message):
            checkpoints(folder)
    assert capfd.readouterr().err.count("is damaged") == 2
    shutil.copytree(two_steps / "4", folder / "4")
    assert restore(folder).step == 4


def test_metrics_added_later_have_a_sum_too(tmp_path):
    with checkpoints(tmp_path) as saved:
        saved.save(1, make_state(1), {})
        saved.add_metrics(1, {"acc": 0.5})
        assert saved.verify(1)
    path = tmp_path / "1" / "metrics" / "metrics"
    path.write_text(path.read_text().replace("0.5", "0.9"))
    with pytest.raises(ValueError, match=r"is damaged \(1\.damaged\)"):
        checkpoints(tmp_path)


def test_a_step_without_sums_is_restored_with_a_line(tmp_path, capfd):
    """As one that an earlier version saved."""
    save(tmp_path, 1)
    (tmp_path / "1" / integrity.MANIFEST).unlink()
    assert_equal(restore(tmp_path).state, make_state(1))
    line = f"checkpoint 1 in {tmp_path} has no sha256.json; restored without verification\n"
    assert capfd.readouterr().err == line


def shared_state(step: int) -> dict[str, jax.Array]:
    """Of one array, of which each of two processes has half."""
    place = NamedSharding(sharding.make_mesh(1, 2, 1), P("fsdp"))
    values = np.full((8, 4), step, np.float32)
    return {"w": jax.make_array_from_callback(values.shape, place, lambda part: values[part])}


def save_damage_and_restore(folder: str, port: str, index: str, is_bucket: str) -> None:
    """Runs in two processes of one run; the first one's files of step 2 are damaged."""
    distributed.start(f"127.0.0.1:{port}", 2, int(index))
    checkpoint._QUICK_BYTES = -1
    mounts.is_fuse = lambda folder: is_bucket == "True"
    with checkpoints(folder) as saved:
        for step in (1, 2):
            saved.save(step, shared_state(step), {})
        saved.wait()
        if index == "0":
            path = next(pathlib.Path(folder).glob("2/state/d/*"))
            path.write_bytes(bytes(len(path.read_bytes())))
        distributed.gather_json(0)  # a barrier: the file is damaged
        restored = saved.restore(abstract(shared_state(0)))
        assert saved.steps == [1]
    values = [shard.data.max() for shard in restored.state["w"].addressable_shards]
    print(f"restored {restored.step}: {values}", flush=True)


def save_and_fail(folder: str, port: str, index: str) -> None:
    """Runs in two processes of one run; the first one cannot write its part of step 1."""
    distributed.start(f"127.0.0.1:{port}", 2, int(index))

    def refused(*_, **__):
        raise OSError(28, "No space left on device")

    integrity.write_manifest = refused
    saved, ended = checkpoints(folder), pathlib.Path(folder, "ended")
    saved.save(1, shared_state(1), {})
    while not ended.exists():
        try:
            assert not saved.has_failed()
        except OSError as error:
            print(error, flush=True)
            ended.touch()
        time.sleep(0.1)
    os._exit(0)  # or it would wait for the save


def in_two_processes(function: str, *arguments: str) -> list[tuple[str, str]]:
    """The outputs and errors of a function here, called with (folder, port, index, ...)."""
    folder, *more = arguments
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join((str(ROOT), str(pathlib.Path(__file__).parent)))
    environment = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    code = f"import checkpoint_test as t, sys; t.{function}(*sys.argv[1:])"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, folder, str(port), str(index), *more],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    return [child.communicate(timeout=120) for child in children]


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_bucket", [False, True])
def test_all_processes_of_a_run_go_back_to_the_same_step(tmp_path, is_bucket):
    ends = in_two_processes("save_damage_and_restore", str(tmp_path), str(is_bucket))
    assert all(out.endswith("restored 1: [Array(1., dtype=float32)]\n") for out, _ in ends), ends
    lines = [error.count("checkpoint 2 is damaged: state/d/") for _, error in ends]
    assert lines == [1, 0]


FULL = (
    'OUT_OF_RANGE: Error writing "params.w/0.0" in OCDBT database at local file "/a/b": Failed '
    "to write 238983 bytes to file 28: No space left on device [os_error_code='28']"
)


def test_a_full_disk_is_named_with_the_folder_of_the_step(tmp_path, monkeypatch):
    saved = checkpoints(tmp_path)
    saved.save(3, make_state(), {})
    saved.wait()

    def refuse(*_):
        raise ValueError(FULL)

    monkeypatch.setattr(saved._manager, "wait_until_finished", refuse)
    with pytest.raises(OSError) as error:
        saved.wait()
    assert (error.value.errno, error.value.filename) == (28, str(tmp_path / "3"))


def failing(monkeypatch, *failures):
    """Makes some of the saves fail, by number."""
    write, numbers = integrity.write_manifest, itertools.count()

    def written(*args, **options):
        if next(numbers) in failures:
            raise OSError(28, "No space left on device")
        write(*args, **options)

    monkeypatch.setattr(integrity, "write_manifest", written)


def test_a_save_that_failed_is_made_up_for_by_a_later_step(tmp_path, monkeypatch, capfd):
    failing(monkeypatch, 1)
    with checkpoints(tmp_path) as saved:
        saved.save(1, make_state(1), {})
        saved.wait()
        assert not saved.has_failed()
        saved.save(2, make_state(2), {})
        while saved._manager.is_saving_in_progress():
            time.sleep(0.01)
        assert saved.has_failed() and saved.has_failed()
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("2")]
        saved.save(3, make_state(3), {})
        saved.wait()
        assert not saved.has_failed() and saved.steps == [1, 3]
    line = f"checkpoint 2 in {tmp_path} could not be saved ([Errno 28] No space left on device)"
    assert f"{line}; step 3 is saved instead\n" in capfd.readouterr().err
    assert restore(tmp_path).step == 3


@pytest.mark.parametrize("asks", [True, False])
def test_two_failures_in_a_row_end_the_run(tmp_path, monkeypatch, asks):
    failing(monkeypatch, 0, 1)
    saved = checkpoints(tmp_path)
    saved.save(1, make_state(1), {})
    saved.save(2, make_state(2), {})
    with pytest.raises(OSError, match="No space left"):
        for _ in range(600 if asks else 0):
            saved.has_failed()
            time.sleep(0.01)
        saved.save(3, make_state(3), {})


def test_closing_hides_no_earlier_error(tmp_path, monkeypatch):
    with pytest.raises(FloatingPointError, match="the first"), checkpoints(tmp_path) as saved:
        monkeypatch.setattr(saved, "wait", lambda: [][0])
        raise FloatingPointError("the first")
    with pytest.raises(IndexError), checkpoints(tmp_path) as saved:
        monkeypatch.setattr(saved, "wait", lambda: [][0])


def test_steps_that_were_swapped_are_not_restored(folder, capfd):
    for old, new in (("4", "x"), ("6", "4"), ("x", "6")):
        (folder / old).rename(folder / new)
    with pytest.raises(ValueError, match=r"is damaged \(4\.damaged, 6\.damaged\)"):
        checkpoints(folder)
    assert "checkpoint 4 is damaged: its files are those of checkpoint 6" in capfd.readouterr().err


@pytest.mark.exhaustive
def test_one_of_several_processes_that_cannot_save_knows_at_once(tmp_path):
    """Though the save goes on: the others wait for it to commit the step, for 20 minutes."""
    ends = in_two_processes("save_and_fail", str(tmp_path))
    assert ["No space left on device" in out for out, _ in ends] == [True, False], ends
