import pathlib
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from care_jax.devices import distributed, sharding

ROOT = pathlib.Path(__file__).resolve().parents[3]

# One of two processes of four devices each: rows go to the devices and come back.
PROCESS = """
import sys
import jax
import numpy as np
import psutil
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
from care_jax.devices import distributed, sharding

RULES = (("batch", ("data", "fsdp")),)
index = int(sys.argv[2])
distributed.start(sys.argv[1], 2, index)
assert jax.process_count() == 2 and len(jax.devices()) == 8
places = {each.laddr for each in psutil.Process().net_connections() if each.status == "LISTEN"}
port = int(sys.argv[1].rpartition(":")[2])
bound = [ip.removeprefix("::ffff:") for ip, each in places if each == port]
assert bound == ["127.0.0.1"] * (index == 0)

for shape in ((1, 8, 1), (2, 2, 2), (2, 1, 4), (1, 2, 2, 2)):
    mesh = sharding.make_mesh(*shape)
    distributed.check_mesh(mesh, RULES)
    place = sharding.batch_sharding(mesh, RULES)
    rows = sharding.local_rows(16, place)
    np.testing.assert_array_equal(rows, np.arange(8) + 8 * index)
    batch = {"x": np.arange(16 * 3).reshape(16, 3)[rows], "none": None}
    placed = sharding.put_batch(batch, place)
    assert placed["x"].shape == (16, 3) and int(placed["x"].sum()) == sum(range(16 * 3))
    np.testing.assert_array_equal(distributed.fetch(placed)["x"], batch["x"])
    assert distributed.fetch(placed)["none"] is None

# Rows of a process need not be neighbours: on TPU slices the order of devices follows the wires.
devices = np.array(jax.devices())[[0, 4, 5, 1, 6, 2, 3, 7]]
mesh = jax.sharding.Mesh(devices.reshape(1, 8, 1, 1), sharding.MESH_AXES)
place = sharding.batch_sharding(mesh, RULES)
rows = sharding.local_rows(16, place)
np.testing.assert_array_equal(np.flatnonzero(sharding.owners(16, place) == index), rows)
assert rows.tolist() == [[0, 1, 6, 7, 10, 11, 12, 13], [2, 3, 4, 5, 8, 9, 14, 15]][index]
placed = sharding.put_batch(rows * 10, place)
np.testing.assert_array_equal(distributed.fetch(placed), rows * 10)
whole = jax.jit(lambda x: x, out_shardings=sharding.replicated(mesh))(placed)
np.testing.assert_array_equal(np.asarray(whole), np.arange(16) * 10)

odd = np.arange(index, 6, 2)
whole = distributed.gather_rows({"x": odd[:, None] * 10, "is": odd > 2, "none": None}, odd)
np.testing.assert_array_equal(whole["x"][:, 0], np.arange(6) * 10)
np.testing.assert_array_equal(whole["is"], np.arange(6) > 2)
assert distributed.gather_json(["é" * 3 * index]) == [[""], ["ééé"]]

# Rows 1, 2 and 4 move, in many pieces; they are of objects too, and of other lengths.
distributed._PIECE_BYTES = 1 << 9
texts = np.array([np.arange(90 * row, dtype=np.float16) for row in range(6)], object)
held = {"x": odd[:, None] * 10.0, "text": texts[odd], "none": None}
wanted = [[0, 1], [2, 3, 4]][index]
found = distributed.exchange_rows(held, odd, 6, moved=[1, 2, 4], wanted=wanted)
for row in range(6):
    assert found["x"].tolist()[row] == [row * 10.0 * (row in wanted)]
    np.testing.assert_array_equal(found["text"][row], texts[row] if row in wanted else 0)
found = distributed.exchange_rows(held, odd, 6, moved=[], wanted=odd)
np.testing.assert_array_equal(found["x"][odd], held["x"])
assert not distributed.is_preempted()
try:
    distributed.check_mesh(sharding.make_mesh(1, 1, 4, 2), RULES)
except ValueError as error:
    distributed.exit_run(f"refused: {error}")
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_rows_of_two_processes_go_to_the_devices_and_come_together():
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(index)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    message = (
        "refused: mesh.tensor=4 x mesh.sequence=2 must divide the 4 devices of each of 2 "
        "processes, so that each row of a batch is in one process"
    )
    assert all(message in error for error in errors), "\n".join(errors)


def test_one_process_holds_every_row_and_gathers_nothing():
    mesh = sharding.make_mesh(2, 2, 2)
    rules = (("batch", ("data", "fsdp")),)
    distributed.check_mesh(mesh, rules)
    place = sharding.batch_sharding(mesh, rules)
    np.testing.assert_array_equal(sharding.local_rows(8, place), range(8))
    tree = {"x": np.arange(3)}
    assert distributed.gather_rows(tree, np.arange(3)) is tree
    assert distributed.exchange_rows(tree, np.arange(3), 3, moved=[], wanted=[1]) is tree
    assert distributed.gather_json(tree) == [tree]
    assert distributed.fetch(jax.device_put(tree))["x"].tolist() == [0, 1, 2]
    assert not distributed.is_preempted()


TERMINATED = """
import os, signal
from care_jax.devices import distributed
distributed.start()
assert distributed.is_alone() and not distributed.is_preempted()
os.kill(os.getpid(), signal.SIGTERM)
assert distributed.is_preempted()
"""


def test_a_process_alone_is_preempted_by_sigterm():
    subprocess.run([sys.executable, "-c", TERMINATED], cwd=ROOT, check=True, timeout=300)


@pytest.mark.parametrize(
    ("environment", "is_started"),
    [
        ({"SLURM_NTASKS": "1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False),
        ({"SLURM_NTASKS": "8"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "8", "SLURM_NTASKS": "1"}, True),
        ({"SLURM_NTASKS": "1", "JAX_LOCAL_DEVICE_IDS": "0,1"}, True),
        ({}, True),
    ],
)
def test_the_only_task_of_a_job_keeps_all_its_devices(monkeypatch, environment, is_started):
    """JAX would show it one GPU of `srun --gpus=8 --pty bash`."""
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "JAX_LOCAL_DEVICE_IDS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    started, watched = [], []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: started.append(1))
    monkeypatch.setattr(distributed.signal, "signal", lambda number, _: watched.append(number))
    distributed.start()
    assert (bool(started), bool(watched)) == (is_started, not is_started)


ADDRESS = "10.0.0.1:8476"
REFUSED = {  # arguments, environment, a part of the message
    "no port": (("here", 2, 1), {}, "coordinator address 'here' must be host:port, such as"),
    "a number too high": ((ADDRESS, 2, 2), {}, "process id 2 must be from 0 to 1 in a run of 2"),
    "a number below 0": ((ADDRESS, 2, -1), {}, "process id -1 must be from 0 to 1"),
    "environment": ((), {}, "process id 5 must be from 0 to 3"),
    "arguments before the environment": ((None, 2), {}, "process id 5 must be from 0 to 1"),
    "no number": (
        ((), {"JAX_NUM_PROCESSES": "four"}, "JAX_NUM_PROCESSES must be a whole number, got 'four'")
    ),
}


@pytest.mark.parametrize(("arguments", "environment", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_place_in_a_run_is_refused(monkeypatch, arguments, environment, message):
    four = {"JAX_COORDINATOR_ADDRESS": ADDRESS, "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "5"}
    for name, value in (four | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        distributed.start(*arguments)


@pytest.mark.parametrize(
    ("address", "bound"),
    [
        ("127.0.0.1:1234", "127.0.0.1:1234"),
        ("0.0.0.0:1234", "0.0.0.0:1234"),
        ("localhost:1234", "[::]:1234"),
        ("192.0.2.1:1234", "[::]:1234"),  # reserved for documentation, so of no host
        ("[2001:db8::1]:1234", "[::]:1234"),  # likewise
    ],
)
def test_a_coordinator_listens_at_its_own_ip_alone(address, bound):
    port = str(free_port())
    address, bound = (each.replace("1234", port) for each in (address, bound))
    assert distributed._bind_address(address) == bound


def test_where_a_coordinator_listens_can_be_set(monkeypatch):
    everywhere = f"0.0.0.0:{free_port()}"
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", everywhere)
    assert distributed._bind_address("127.0.0.1:1234") == everywhere


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_that_is_in_use_is_named(host):
    """JAX would end with a segmentation fault."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"{host}:{other.getsockname()[1]}"
        with pytest.raises(ValueError, match=r"^process 0 cannot listen at \S+, which is in use; "):
            distributed.start(address, 2, 0)


def test_a_coordinator_that_does_not_answer_is_named():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ValueError, match=f"process 0 does not answer at {address} after 0 s"):
        distributed.start(address, 2, 1, timeout=0)


def test_a_proxy_does_not_stand_between_the_processes(monkeypatch):
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    program = (
        "from care_jax.devices import distributed; distributed.start(); import jax;"
        "assert jax.process_count() == 1"
    )
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stderr) == (0, "")
