"""Multi-process runs: start, rows of each process, gathering across processes, preemption, exit.

Every process runs the same program on the rows of each batch that are on its devices. Process 0
writes metrics, samples and exports; all processes write checkpoints. Values that all must agree
on (bucket sizes, metrics) are gathered from small host arrays; prompts and responses that another
process trains on are gathered in pieces (`exchange_rows`). In a run of one process there is no
communication.

Letters: N rows of the global batch, n rows of one process.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import json
import math
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Set
from typing import Any, NoReturn

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int, Shaped

from care_jax.devices import rows_as_bytes, sharding

# Of all processes in one step of `exchange_rows`, up to rounding: bounds the memory of hosts and
# devices.
_PIECE_BYTES = 1 << 26
_EXIT_PREEMPTED = 75  # EX_TEMPFAIL: unfinished, restart it

# Number of the next `is_preempted` call; every process makes the same calls.
_sync_points = itertools.count(1)
_terminated: list[int] = []  # the SIGTERMs that a process alone has received


class Preempted(Exception):
    """The run was preempted and has saved what it needs to resume; says where it stopped."""


def start(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: int = 300,
) -> None:
    """Initialises `jax.distributed` before any device is used, and looks out for SIGTERM.

    JAX detects TPU pods (also on GKE), Slurm and Open MPI. Elsewhere, pass the three arguments or
    set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment; without
    them the run has one process, which needs no coordinator. Under Slurm and Open MPI, JAX gives
    each of several processes one GPU; a process alone has them all.

    Args:
        coordinator_address: host:port at which process 0 listens.
        num_processes, process_id: number of processes; index of this one.
        timeout: seconds to wait for the other processes.

    Raises:
        ValueError: the arguments are incomplete or wrong, or process 0 cannot be reached.
    """
    address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    count = _from_environment(num_processes, "JAX_NUM_PROCESSES")
    index = _from_environment(process_id, "JAX_PROCESS_ID")
    if address is not None and count is not None and index is not None:
        return _join(address, count, index, timeout)
    if (address, count, index) == (None, None, None) and _is_only_task():
        return _watch_sigterm()
    try:
        with warnings.catch_warnings():  # about false detections, such as a single pod
            warnings.simplefilter("ignore")
            jax.distributed.initialize(address, count, index, initialization_timeout=timeout)
    except ValueError as error:  # JAX detected no cluster to complete them from
        if (address, count, index) != (None, None, None):
            raise ValueError(
                "expected --coordinator_address, --num_processes and --process_id together (or "
                f"JAX_... in the environment), got {address}, {count} and {index}; set all or none"
            ) from error
        _watch_sigterm()


def check_mesh(mesh: Mesh, rules: sharding.Rules) -> None:
    """Rejects a mesh on which one row of a batch would span several processes."""
    rows_sharding = sharding.batch_sharding(mesh, rules)
    num_shards = sharding.num_shards(rows_sharding)
    num_processes = len({device.process_index for device in mesh.devices.flat})
    if len(sharding.local_rows(num_shards, rows_sharding)) * num_processes != num_shards:
        axes = (
            axis
            for axis in mesh.axis_names
            if axis not in sharding.axis_names(rows_sharding.spec[0])
        )
        inner = " x ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in axes)
        raise ValueError(
            f"{inner} must divide the {mesh.size // num_processes} devices of each of "
            f"{num_processes} processes, so that each row of a batch is in one process; change mesh"
        )


def fetch(tree: Any) -> Any:
    """This process's rows, as numpy, of arrays sharded as by `sharding.put_batch`."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    for array in jax.tree.leaves(tree):
        array.copy_to_host_async()

    def rows(array):
        # Replicas over "tensor" and "sequence" hold the same rows, so one is read.
        shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
        return np.concatenate([np.asarray(shards[first]) for first in sorted(shards)])

    return jax.tree.map(rows, tree)


def gather_rows(tree: Any, rows: Int[np.ndarray, " n"]) -> Any:
    """All-gathers rows into the order of the global batch: numpy arrays [N, ...].

    Args:
        tree: numpy arrays [n, ...] with dtypes of at most 32 bits.
        rows: their indices in the global batch; over all processes these are 0 to N - 1.
    """
    if jax.process_count() == 1:
        return tree
    rows, tree = multihost_utils.process_allgather((np.asarray(rows, np.int32), tree))
    order = np.argsort(rows.ravel())
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[order], tree)


def is_alone() -> bool:
    """Whether there is one process; unlike `jax.process_count`, initialises no devices for it."""
    return not jax.distributed.is_initialized() or jax.process_count() == 1


def gather_json(value: Any) -> list[Any]:
    """All-gathers values of JSON types and any length, in process order."""
    if is_alone():
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(text.size))
    # Padded to powers of two, so that few programs are compiled.
    padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
    padded[: text.size] = text
    texts = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(texts, sizes, strict=True)]


def exchange_rows(
    tree: Any,
    rows: Int[np.ndarray, " n"],
    num_rows: int,
    *,
    moved: Iterable[int],
    wanted: Iterable[int],
) -> Any:
    """The rows of the global batch that this process wants, from whichever process has them.

    Args:
        tree: numpy arrays [n, ...], also of what `rows_as_bytes` sends, with equal shapes on all
            processes except for n.
        rows: their indices in the global batch.
        num_rows: N, of the global batch.
        moved: indices of all rows that a process wants and does not have, the same on all.
        wanted: indices of the rows that this process wants.

    Returns:
        arrays [N, ...] with the wanted rows; the others are 0. With one process, `tree`.
    """
    if jax.process_count() == 1:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    index_of = dict(zip(rows.tolist(), range(len(rows)), strict=True))
    sent = {
        row: rows_as_bytes.to_bytes([leaf[index_of[row]] for leaf in leaves])
        for row in moved
        if row in index_of
    }
    received = _exchange(sent, {*wanted} - index_of.keys())
    whole = [np.zeros((num_rows, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
    for row in wanted:
        if row in index_of:
            values = [leaf[index_of[row]] for leaf in leaves]
        else:
            values = rows_as_bytes.from_bytes(received.pop(row))
        for array, value in zip(whole, values, strict=True):
            array[row] = value
    return jax.tree.unflatten(structure, whole)


def _exchange(sent: Mapping[int, bytes], wanted: Set[int]) -> dict[int, bytearray]:
    """All-gathers byte strings piece by piece; returns those wanted, each sent by one process."""
    streams = gather_json([(row, len(text)) for row, text in sent.items()])
    largest = max(sum(size for _, size in stream) for stream in streams)
    # Each device gets a power of two of bytes, so that few programs are compiled.
    of_device = min(largest, _PIECE_BYTES // jax.process_count()) / jax.local_device_count()
    num_bytes = (1 << (math.ceil(of_device) - 1).bit_length()) * jax.local_device_count()
    stream, received = memoryview(b"".join(sent.values())), {}
    for start in range(0, largest, num_bytes):
        piece = np.zeros(num_bytes, np.uint8)
        own = np.frombuffer(stream[start : start + num_bytes], np.uint8)
        piece[: len(own)] = own
        pieces = _all_gather(piece)
        for sizes, gathered in zip(streams, pieces, strict=True):
            stop = 0
            for row, size in sizes:
                begin, stop = stop, stop + size
                part = slice(max(begin, start) - start, max(min(stop - start, num_bytes), 0))
                if row in wanted and part.start < part.stop:
                    received.setdefault(row, bytearray()).extend(gathered[part].tobytes())
    return received


def _all_gather(piece: Shaped[np.ndarray, " n"]) -> Shaped[np.ndarray, "processes n"]:
    """The pieces of all processes; each device of a process receives its part of every piece.

    n is a multiple of the number of devices of a process.
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.reshape(devices, (jax.process_count(), -1)), ("process", "device"))
    sent = jax.make_array_from_process_local_data(
        NamedSharding(mesh, PartitionSpec("process", "device")), piece[None]
    )
    received = jax.device_put(sent, NamedSharding(mesh, PartitionSpec(None, "device")))
    shards = sorted(received.addressable_shards, key=lambda shard: shard.index[1].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards], axis=1)


def is_preempted() -> bool:
    """Whether a process got SIGTERM and this call is the sync point at which all must stop.

    Every process calls it at the same points of the program. The notice reaches the others within
    a second or two; all stop at the first call after it has reached every process.
    """
    if not jax.distributed.is_initialized():
        return bool(_terminated)
    return multihost_utils.reached_preemption_sync_point(next(_sync_points))


def exit_run(message: str, *, is_preempted: bool = False) -> NoReturn:
    """Exits from an unfinished run, with a line on stderr; status 75 if it is to be restarted.

    A process that fails alone exits without waiting for the others, which end when its heartbeats
    are missing.
    """
    print(message, file=sys.stderr, flush=True)
    if is_preempted:
        sys.exit(_EXIT_PREEMPTED)
    if not is_alone():
        sys.stdout.flush()
        os._exit(1)
    sys.exit(1)


def _is_only_task() -> bool:
    """Whether JAX would detect one process and show it one GPU, as under `srun --pty bash`."""
    names = "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"  # in JAX's order
    counts = [os.environ[name] for name in names if name in os.environ]
    return counts[:1] == ["1"] and not os.environ.get("JAX_LOCAL_DEVICE_IDS")


def _watch_sigterm() -> None:
    signal.signal(signal.SIGTERM, lambda number, _: _terminated.append(number))


def _from_environment(value: int | None, name: str) -> int | None:
    text = os.environ.get(name, "")
    if value is not None or not text:
        return value
    if not text.isdecimal():
        raise ValueError(f"{name} must be a whole number, got {text!r}; correct or unset it")
    return int(text)


def _join(address: str, num_processes: int, process_id: int, timeout: int) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        example = "10.0.0.2:8476"
        raise ValueError(f"coordinator address {address!r} must be host:port, such as {example}")
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"process id {process_id} must be from 0 to {num_processes - 1} in a run of "
            f"{num_processes} processes; number them from 0"
        )
    bound = None
    if process_id:  # JAX would abort if it cannot connect
        _wait_for(host, int(port), timeout)
    else:
        bound = _bind_address(address)
    options = {"initialization_timeout": timeout, "coordinator_bind_address": bound}
    _initialize(address, num_processes, process_id, **options)


def _bind_address(address: str) -> str:
    """Where process 0 listens: at the address alone if it is an IP of this host.

    Otherwise at all addresses, as is JAX's default: names are resolved differently on other hosts,
    and an IP may be translated on its way. JAX_COORDINATOR_BIND_ADDRESS takes precedence.

    Raises:
        ValueError: the port is in use; JAX would crash.
    """
    host, _, port = address.rpartition(":")
    places = [f"[::]:{port}"]
    with contextlib.suppress(ValueError):  # of a name
        ipaddress.ip_address(host.strip("[]"))
        places.insert(0, address)
    if given := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        places = [given]
    for place in places:
        host, _, port = place.rpartition(":")
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does
                probe.bind((host.strip("[]"), int(port)))
                return place
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ValueError(
                    f"process 0 cannot listen at {place}, which is in use; end the run that uses "
                    "it, or give all processes another port in --coordinator_address"
                ) from error
    return places[-1]


def _initialize(address: str, num_processes: int, process_id: int, **options: Any) -> None:
    """Connects to the coordinator, bypassing `http_proxy`, which gRPC would use."""
    name = "no_grpc_proxy"  # gRPC prefers it to `no_proxy` if both are set
    known = os.environ.get(name) or os.environ.get("no_proxy")
    os.environ[name] = ",".join(filter(None, (known, address.rpartition(":")[0])))
    jax.config.update("jax_check_proxy_envs", False)  # its warning no longer applies
    options["cluster_detection_method"] = "deactivate"
    jax.distributed.initialize(address, num_processes, process_id, **options)


def _wait_for(host: str, port: int, timeout: float) -> None:
    """Returns once something listens at host:port."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            with contextlib.closing(socket.create_connection((host.strip("[]"), port), timeout=5)):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"process 0 does not answer at {host}:{port} after {timeout:.0f} s ({error}); "
                    "check --coordinator_address and that process 0 runs"
                ) from error
            logging.log_every_n_seconds(logging.WARNING, "waiting for %s:%d", 30, host, port)
            time.sleep(0.2)
