"""Surroundings that a run does not choose: disks, names of folders, streams, limits, other users.

An attempt runs `configs/tiny.py` from a shell that makes the surroundings. It ends well, or with
status 1 and one line; then the same command in ordinary surroundings resumes it.
"""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from perf.faults import runs
from perf.faults.runs import ROOT, Attempt

# Both training stages, and a checkpoint of 7 MB after every step.
_KEYS = runs.SHORT | {
    "stages": "('sft','rl')",
    "checkpoint_every": 1,
    "sft.num_steps": 2,
    "rl.num_steps": 2,
    "rl.eval_every": 0,
    "rl.warmup_steps": 0,
    "rl.prompts_per_step": 4,
    "rl.max_response_tokens": 24,
    "care.max_context": 12,
}
_STOPPED = _KEYS | {"rl.num_steps": 1}  # before its last step
_STEPS = [("sft", 0), ("sft", 1), ("rl", 0), ("rl", 1)]
_ODD = "ä ö%20#&'\"$(1);é:a " + 200 * "x"
_SECRET = "hf_ThisIsASecretOfTheEnvironment"
_SECRETS = ("HF_TOKEN", "JUDGE_API_KEY", "MLFLOW_TRACKING_PASSWORD", "WANDB_API_KEY")
# A shell of a user who owns nothing.
_AS_NOBODY = "setpriv --reuid 65534 --regid 65534 --clear-groups bash"
# `time.time` of Python a day ago.
_YESTERDAY = """
import time
now, now_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: now() - 86400, lambda: now_ns() - 86400 * 10**9
"""


class Ended(NamedTuple):
    """How a run ended."""

    status: int
    lines: list[str]  # of standard error, without the logs of libraries

    def refused(self, said: str) -> str:
        """What is wrong with a run that must end in one line, which has `said`; or ""."""
        if self.status == 1 and len(self.lines) == 1 and said in self.lines[0]:
            return ""
        return f"expected status 1 and a line with {said!r}, got {self}"


class Shell:
    """Runs in a folder; compiled programs are kept for all attempts."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.workdir = folder, folder / "run"
        self._cache = folder.parent / "cache"
        self._cache.mkdir(exist_ok=True)

    def run(
        self,
        template: str = 'bash "$RUN"',
        keys: Mapping[str, Any] = _KEYS,
        **variables: str | None,
    ) -> Ended:
        """Runs a shell command in which "$RUN" starts the run; variables of None are unset."""
        command = [sys.executable, "-m", "care_jax.main", f"--workdir={self.workdir}"]
        command += ["--config=configs/tiny.py", *(f"--config.{k}={v}" for k, v in keys.items())]
        script = self.folder / "run.sh"
        script.write_text(f"exec {shlex.join(command)}\n", encoding="utf-8")
        environment = os.environ | {
            "RUN": str(script),
            "WORKDIR": str(self.workdir),
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self._cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        }
        environment |= {name: value for name, value in variables.items() if value is not None}
        for name in variables.keys() - {name for name in variables if variables[name] is not None}:
            environment.pop(name, None)
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", template],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=1800,
        )
        lines = done.stderr.decode(errors="replace").splitlines()
        # Lines of logs begin with their level and the date.
        logged = {f"{level}{month}" for level in "IWE" for month in "01"}
        return Ended(done.returncode, [line for line in lines if line[:2] not in logged])

    def ends_well(self, *arguments: Any, **variables: Any) -> str:
        """What is wrong with a run, arguments as of `run`, that must log every step once; or ""."""
        ended = self.run(*arguments, **variables)
        if ended.status:
            return f"ended with {ended.status}: {' | '.join(ended.lines[-3:])}"
        found = [(line["stage"], line["step"]) for line in runs.metrics(self.workdir)]
        return "" if found == _STEPS else f"metrics.jsonl has the steps {found}"


def _inside(setup: str, run: str = 'bash "$RUN"') -> str:
    """A command after a setup with mounts of its own, which leave no trace."""
    return f"unshare --map-root-user --mount bash -c {shlex.quote(f'{setup} && {run}')}"


def _small_disk(folder: pathlib.Path) -> str:
    """A disk of 16 MB has room for the first checkpoints; its files are copied to a larger one."""
    shell, large = Shell(folder), folder / "large"
    shell.workdir.mkdir()
    disk, there = shlex.quote(str(shell.workdir)), shlex.quote(str(large))
    run = f'bash "$RUN"; status=$?; cp -r {disk} {there}; exit $status'
    ended = shell.run(_inside(f"mount -t tmpfs -o size=16m care {disk}", run))
    shell.workdir = large
    if not [*large.glob("checkpoints/*/[0-9]")]:
        return "no checkpoint was left"
    return ended.refused("No space left on device: ") or shell.ends_well()


def _read_only(folder: pathlib.Path) -> str:
    shell = Shell(folder)
    shell.run(keys=_STOPPED)
    setup = 'mount --bind "$WORKDIR" "$WORKDIR" && mount -o remount,bind,ro "$WORKDIR"'
    return shell.run(_inside(setup)).refused("Read-only file system: ") or shell.ends_well()


def _moved(folder: pathlib.Path) -> str:
    """A workdir with an odd name is moved between stop and resume."""
    shell = Shell(folder)
    shell.workdir = folder / _ODD / "run"
    if (ended := shell.run(keys=_STOPPED)).status:
        return f"ended with {ended}"
    moved = folder / "elsewhere"
    shutil.move(shell.workdir, moved)
    shell.workdir = moved
    return shell.ends_well()


def _wildcard(folder: pathlib.Path) -> str:
    shell = Shell(folder)
    shell.workdir = folder / "lr[1e-5]"
    return shell.run().refused("expected a --workdir without *, ?, [")


def _set_back(folder: pathlib.Path) -> str:
    """The clock is set back by a day between stop and resume."""
    shell, custom = Shell(folder), folder / "custom"
    custom.mkdir()
    (custom / "sitecustomize.py").write_text(_YESTERDAY)
    if (ended := shell.run(keys=_STOPPED)).status:
        return f"ended with {ended}"
    return shell.ends_well(PYTHONPATH=f"{custom}{os.pathsep}{ROOT}")


def _streams(redirected: str) -> Attempt:
    def run(folder: pathlib.Path) -> str:
        return Shell(folder).ends_well(f'bash "$RUN" {redirected}')

    return Attempt("the run outlives whoever reads its output", redirected, run)


def _locale(folder: pathlib.Path) -> str:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    return Shell(folder).ends_well(**ascii_only)


def _homeless(folder: pathlib.Path) -> str:
    home = {"HOME": "/proc/none", "XDG_CACHE_HOME": None, "JAX_COMPILATION_CACHE_DIR": None}
    return Shell(folder).ends_well(**home)


def _other_user(folder: pathlib.Path) -> str:
    """Another user finds a workdir that was written with umask 077, and may read nothing."""
    shell = Shell(folder)
    for path in (folder.parent.parent, folder.parent, folder):
        path.chmod(0o755)
    shell.run('umask 077; bash "$RUN"', _STOPPED)
    if public := [path for path in shell.workdir.rglob("*") if path.stat().st_mode & 0o077]:
        return f"{public[0]} can be read by others"
    return shell.run(f'{_AS_NOBODY} "$RUN"').refused("Permission denied: ") or shell.ends_well()


def _secrets(folder: pathlib.Path) -> str:
    """Keys of the environment are in no file and in no line, also of a run that fails."""
    shell, secrets = Shell(folder), dict.fromkeys(_SECRETS, _SECRET)
    problem = shell.ends_well('bash "$RUN" >"$WORKDIR.log" 2>&1', **secrets)
    failed = shell.run(keys=_KEYS | {"rl.num_rollouts": 3, "rl.num_steps": 3}, **secrets)
    found = [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and _SECRET.encode() in path.read_bytes()
    ]
    if failed.status != 1 or _SECRET in "".join(failed.lines):
        return f"expected status 1 and no secret, got {failed}"
    return problem or (f"secrets are in {', '.join(found)}" if found else "")


def _limited(limit: str, said: str = "") -> Attempt:
    """With a limit of the shell the run ends well, or in a line with `said` and then resumes."""

    def run(folder: pathlib.Path) -> str:
        shell, template = Shell(folder), f'ulimit {limit}; bash "$RUN"'
        if not said:
            return shell.ends_well(template)
        return shell.run(template).refused(said) or shell.ends_well()

    promise = "is told in one line, and resumed without it" if said else "the run ends well"
    return Attempt(f"a limit {promise}", f"ulimit {limit}", run)


def _full_shm(folder: pathlib.Path) -> str:
    shell = Shell(folder)
    setup = "mount -t tmpfs -o size=4k care /dev/shm && head -c 4096 /dev/zero >/dev/shm/full"
    return shell.run(_inside(setup)).refused("No space left on device: /dev/shm") or (
        shell.ends_well()
    )


_RESUMED = "one line and status 1; then resumed from the last checkpoint"
_WITH_MOUNTS = (
    Attempt(_RESUMED, "a disk of 16 MB", _small_disk),
    Attempt(_RESUMED, "a read-only workdir, after a first checkpoint", _read_only),
    Attempt(_RESUMED, "a full /dev/shm", _full_shm),
)
_AS_ROOT = (Attempt(_RESUMED, "umask 077, then another user", _other_user),)
_ALWAYS = (
    Attempt("ends well", "a workdir with spaces, é, %, quotes and 200 x; moved, resumed", _moved),
    Attempt("one line and status 1", "a workdir named lr[1e-5]", _wildcard),
    Attempt("ends well", "the clock set back by a day before the resume", _set_back),
    _streams("| head -n 1"),
    _streams("2>&1 | head -n 1"),
    _streams("<&- >&- 2>&-"),
    Attempt("ends well", "LC_ALL=C, Python's UTF-8 mode off", _locale),
    Attempt("ends well", "no home that can be written", _homeless),
    Attempt("no file and no line has a secret", ", ".join(_SECRETS) + " set", _secrets),
    _limited("-n 64"),
    _limited("-v 2000000", "expected 2 GiB of address space beside the libraries"),
    _limited("-f 2000", "File too large"),
)


def _possible() -> tuple[Attempt, ...]:
    """The attempts that this user may make; says which are left out."""
    can_mount = not subprocess.run(
        ["unshare", "--map-root-user", "--mount", "true"], capture_output=True
    ).returncode
    # A Python in root's home is none for others.
    command = [*_AS_NOBODY.split(), "-c", f"{shlex.quote(sys.executable)} -c ''"]
    is_root = os.geteuid() == 0 and not subprocess.run(command, capture_output=True).returncode
    attempts = _ALWAYS
    for each, is_possible, why in (
        (_WITH_MOUNTS, can_mount, "user namespaces are off"),
        (_AS_ROOT, is_root, "another user needs root, and must be able to run this Python"),
    ):
        if is_possible:
            attempts += each
        else:
            names = "; ".join(attempt.how for attempt in each)
            print(f"left out, as {why}: {names}", file=sys.stderr)
    return attempts


ATTEMPTS = _possible()
