"""The scripts of deploy/ do what deploy/README.md says when hosts, connections and requests fail.

They run here with the commands of their clusters replaced by ones that write down how they were
called.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from care_jax.devices import distributed

pytestmark = pytest.mark.exhaustive

DEPLOY = pathlib.Path(__file__).resolve().parent.parent / "deploy"


@pytest.fixture
def cluster(tmp_path):
    """Runs a script with the given commands in place of a cluster's; returns what they did."""
    bin_folder, log = tmp_path / "bin", tmp_path / "log"
    bin_folder.mkdir()

    def run(script, *arguments, commands, **environment):
        log.write_text("")
        for name, body in commands.items():
            path = bin_folder / name
            path.write_text(f'#!/bin/bash\necho {name} "$@" >> {log}\n{body}\n')
            path.chmod(0o755)
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        done = subprocess.run(
            ["bash", DEPLOY / script, *arguments],
            env={"PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": str(home), "USER": "u"}
            | environment,
            cwd=home,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done, log.read_text().splitlines()

    return run


SLURM = {
    "scontrol": '[ "$1" = show ] && printf "node7\\nnode8\\n"; true',
    "srun": 'shift; SLURM_PROCID=1 "$@"',
    "python": 'env | grep ^JAX_ | sort >> "$HOME/env"; exit $STATUS',
    "squeue": "echo $STATE",
}


@pytest.mark.parametrize(
    ("status", "state", "is_requeued"),
    [("75", "RUNNING", True), ("75", "CANCELLED", False), ("1", "RUNNING", False)],
)
def test_a_slurm_job_is_queued_again_when_it_was_told_to_stop(cluster, status, state, is_requeued):
    given = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node[7-8]"}
    given |= {"SLURM_JOB_NUM_NODES": "2", "STATUS": status, "STATE": state}
    flags = ["--config=configs/tiny.py", "--config.stages=('rl', 'evaluate')"]
    done, called = cluster("slurm.sbatch", *flags, commands=SLURM, **given)
    assert done.returncode == int(status), done.stderr
    assert f"python -m care_jax.main {' '.join(flags)}" in called
    assert ("scontrol requeue 123456" in called) == is_requeued


@pytest.mark.parametrize(("num_failures", "is_requeued"), [(2, True), (9, False)])
def test_a_slurm_job_is_queued_again_although_the_controller_did_not_answer_at_first(
    cluster, num_failures, is_requeued
):
    squeue = f"""
echo >> "$HOME/asked"
[ "$(wc -l < "$HOME/asked")" -gt {num_failures} ] || exit 1
echo RUNNING"""
    given = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node[7-8]", "POLL": "0"}
    given |= {"SLURM_JOB_NUM_NODES": "2", "STATUS": "75"}
    done, called = cluster("slurm.sbatch", commands=SLURM | {"squeue": squeue}, **given)
    assert done.returncode == 75, done.stderr
    assert ("scontrol requeue 123456" in called) == is_requeued
    assert ("not queued again" in done.stderr) != is_requeued


def test_every_slurm_process_is_told_who_it_is_and_has_all_gpus(cluster, tmp_path):
    """JAX's own detection of Slurm would give it one GPU."""
    given = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node[7-8]"}
    given |= {"SLURM_JOB_NUM_NODES": "2", "STATUS": "0", "STATE": "RUNNING"}
    cluster("slurm.sbatch", commands=SLURM, **given)
    told = dict(line.split("=") for line in (tmp_path / "home" / "env").read_text().split())
    assert told == {
        "JAX_COORDINATOR_ADDRESS": "node7:23456",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
    }
    options = [line.split()[1] for line in (DEPLOY / "slurm.sbatch").read_text().splitlines()
               if line.startswith("#SBATCH")]  # fmt: skip
    assert {"--ntasks-per-node=1", "--signal=TERM@300", "--open-mode=append"} <= set(options)


def git(folder, *arguments):
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True)


# A slice that is ACTIVE once it was asked for, or first in the states of the file `coming`; after
# each run it is in the next state of the file `next`. ERROR is an answer that fails.
# `ssh` is repeated as gcloud repeats it. In the files `refuses` and `breaks` is which connections
# fail, and which break while a run is live or shortly before it ends.
GCLOUD = r"""
cd "$HOME"
pop() { head -n 1 "$1" && sed -i 1d "$1"; }
remote() { (cd host && HOME=$HOME/host sshd "$command"); }
case "$*" in
  *" list "*)
    [ ! -s coming ] || pop coming > state
    case "$(cat state)" in
      ERROR) echo "ERROR: credentials have expired" >&2; exit 1 ;;
      NONE) ;;
      *) printf "care2\tACTIVE\ncare\t%s\n" "$(cat state)" ;;
    esac
    sed -i s/SUSPENDING/SUSPENDED/ state ;;
  *" delete "*) echo NONE > state ;;
  *" create "*) echo ACTIVE > state ;;
  *" ssh "*)
    for word in "$@"; do case "$word" in --command=*) command=${word#--command=} ;; esac; done
    for attempt in {1..10}; do
      how=$(pop breaks)
      if [ "$how" = refused ]; then status=255; continue; fi
      if [ "$how" ]; then
        echo > host/live
        remote > /dev/null 2>&1 &
        until [ -s host/ran ]; do sleep 0.05; done
        [ "$how" != ended ] || { rm host/live; wait; }
        if [ "$how" = interrupted ]; then exit 130; fi
        continue
      fi
      remote | while read -r line; do
        echo "$line"
        case "$line" in *"waiting until it ends") rm host/live ;; esac
      done
      status=${PIPESTATUS[0]}
      [ "$status" = 255 ] || break
    done
    pop next > state
    exit $status ;;
esac"""
# A command that a signal ends has no status for ssh.
SSHD = f"""
{shlex.quote(sys.executable)} -c 'import subprocess, sys
status = subprocess.call(["bash", "-c", sys.argv[1]])
sys.exit(status if status >= 0 else 255)' "$1" """
LEFT_BEHIND = "sleep 5 > /dev/null 2>&1 &\n"
HOST = {
    "gcloud": GCLOUD,
    "sshd": SSHD,
    "mountpoint": "exit 1",
    "sudo": "",
    "gcsfuse": LEFT_BEHIND,
    "uv": """
if [ "$1" = venv ]; then
  mkdir -p .venv/bin
  cp "$HOME/python" .venv/bin/python
  chmod +x .venv/bin/python
fi""",
}


# A run: it ends once the file `live` is gone, with the next status, or by a signal if that is < 0.
PYTHON = f"""#!/bin/bash
{LEFT_BEHIND}
echo host-python "$@" >> "$HOME/ran"
for _ in {{1..200}}; do [ -f "$HOME/live" ] || break; sleep 0.05; done
status=$(head -n 1 "$HOME/status")
sed -i 1d "$HOME/status"
[ "$status" -ge 0 ] || kill "$status" $$
exit "$status"
"""


def make_host(folder, *runs, breaks=(), coming=()):
    """The home of a host: with which status each run ends, and in which state the slice is then."""
    folder.mkdir(parents=True)
    (folder / "status").write_text("".join(f"{status}\n" for status, _ in runs))
    (folder / "python").write_text(PYTHON)
    (folder / "ran").write_text("")
    for name, lines in {
        "next": [state for _, state in runs],
        "breaks": breaks,
        "coming": coming,
    }.items():
        (folder.parent / name).write_text("".join(f"{line}\n" for line in lines))
    (folder.parent / "state").write_text("NONE\n")
    return folder


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--initial-branch=main")
    (folder / "version").write_text("1")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "1")
    return folder


def start(cluster, repository, commands=HOST, script="queued-resource.sh", **environment):
    given = {"PROJECT": "p", "ZONE": "z", "TYPE": "v5litepod-16", "BUCKET": "b"}
    given |= {"REPOSITORY": str(repository), "POLL": "0", "SETTLE": "0"}
    return cluster(script, "care", commands=commands, **given | environment)


@pytest.mark.parametrize("given", ["--spot", "", "--reserved"])
def test_a_slice_is_a_spot_slice_unless_another_is_asked_for(cluster, tmp_path, repository, given):
    make_host(tmp_path / "home" / "host", (0, "ACTIVE"))
    spot = {} if given == "--spot" else {"SPOT": given}
    done, called = start(cluster, repository, **spot)
    assert done.returncode == 0, done.stderr
    (created,) = (line for line in called if " create " in line)
    assert created.partition("--runtime-version=v2-alpha-tpuv5-lite")[2].strip() == given


def test_a_run_gets_the_keys_in_the_bucket(cluster, tmp_path, repository):
    """Which stand in no command line."""
    bucket, script = tmp_path / "bucket", tmp_path / "script.sh"
    bucket.mkdir()
    (bucket / "keys.env").write_text("JUDGE_API_KEY=k3y\n")
    text = (DEPLOY / "queued-resource.sh").read_text()
    script.write_text(text.replace("/runs/keys.env", str(bucket / "keys.env")))
    host = make_host(tmp_path / "home" / "host", (0, "ACTIVE"))
    (host / "python").write_text(
        PYTHON.replace("status=", "echo $JUDGE_API_KEY > ~/told\nstatus=", 1)
    )
    done, called = start(cluster, repository, script=script)
    assert done.returncode == 0, done.stderr
    assert (host / "told").read_text() == "k3y\n"
    assert not any("k3y" in line for line in called)


def num_runs(host):
    return len((host / "ran").read_text().splitlines())


def test_hosts_of_a_queued_resource_mount_the_bucket_and_update_their_clone(
    cluster, tmp_path, repository
):
    host = make_host(tmp_path / "home" / "host", (0, "ACTIVE"), (0, "ACTIVE"))
    given = {"PROJECT": "p", "ZONE": "z", "TYPE": "v5litepod-16", "BUCKET": "my bucket"}
    given |= {"REPOSITORY": str(repository), "POLL": "0"}
    for version in ("1", "2"):
        (repository / "version").write_text(version)
        git(repository, "commit", "-a", "--allow-empty", "-m", version)
        flags = ["--config=configs/tiny.py", "--config.stages=('rl', 'evaluate')"]
        done, called = cluster("queued-resource.sh", "care", *flags, commands=HOST, **given)
        assert done.returncode == 0, done.stderr
        assert (host / "care_jax" / "version").read_text() == version
    expected = f"host-python -m care_jax.main --workdir=/runs/care {' '.join(flags)}"
    assert (host / "ran").read_text().splitlines() == [expected] * 2
    assert any(line.startswith("gcsfuse --implicit-dirs --meta") for line in called)
    assert any(line.endswith("my bucket /runs") for line in called)
    assert any(line.startswith("uv venv") and "--python 3.12" in line for line in called)
    assert any(line.endswith(".[tpu,data,wandb]") for line in called)


@pytest.mark.parametrize(
    ("runs", "num_slices"),
    [
        ([(1, "ACTIVE")], 1),
        ([(75, "ACTIVE"), (0, "ACTIVE")], 1),
        ([(75, "SUSPENDING"), (255, "FAILED"), (0, "ACTIVE")], 3),
    ],
)
def test_a_run_that_was_told_to_stop_goes_on_on_this_slice_or_another(
    cluster, tmp_path, repository, runs, num_slices
):
    host = make_host(tmp_path / "home" / "host", *runs)
    done, called = start(cluster, repository)
    assert done.returncode == runs[-1][0], done.stderr
    assert num_runs(host) == len(runs)
    assert sum(" create " in line for line in called) == num_slices
    assert sum(" delete " in line for line in called) == num_slices - 1
    assert "a run goes on here" not in done.stdout  # for what it leaves behind holds no lock
    assert "queued-resources delete care --zone=z --force" in done.stderr


@pytest.mark.parametrize("moment", ["live", "ended"])
@pytest.mark.parametrize("status", [0, 1, 75])
def test_a_broken_connection_starts_no_second_process(
    cluster, tmp_path, repository, status, moment
):
    """gcloud repeats the command, which returns how the run ended."""
    runs = [(status, "ACTIVE")] + [(0, "ACTIVE")] * (status == 75)
    host = make_host(tmp_path / "home" / "host", *runs, breaks=[moment])
    done, called = start(cluster, repository)
    assert done.returncode == runs[-1][0], done.stderr
    assert num_runs(host) == len(runs)
    assert sum(line.startswith("uv venv") for line in called) == len(runs)
    assert ("a run goes on here" in done.stdout) == (moment == "live")
    assert any(line.endswith(" -- -o ServerAliveInterval=60") for line in called)


def test_the_same_command_after_ctrl_c_waits_for_the_run_that_goes_on(
    cluster, tmp_path, repository
):
    runs = [(0, "ACTIVE"), (0, "ACTIVE")]
    host = make_host(tmp_path / "home" / "host", *runs, breaks=["interrupted"])
    done, _ = start(cluster, repository)
    assert (done.returncode, num_runs(host)) == (130, 1)
    done, called = start(cluster, repository)
    assert done.returncode == 0, done.stderr
    assert "a run goes on here" in done.stdout and num_runs(host) == 2
    assert sum(" ssh " in line for line in called) == 2  # so that all hosts start together
    assert not any(" create " in line for line in called)


def test_ctrl_c_says_how_to_delete_the_slice(cluster, tmp_path, repository):
    make_host(tmp_path / "home" / "host")
    interrupted = 'case "$*" in *" ssh "*) kill -INT $PPID; sleep 1; exit 255 ;; esac'
    commands = HOST | {"gcloud": f"{interrupted}\n{GCLOUD}"}
    done, _ = start(cluster, repository, commands)
    assert done.returncode == 130
    assert "queued-resources delete care --zone=z --force" in done.stderr


@pytest.mark.parametrize(("status", "expected"), [(-9, 137), (-6, 134)])
def test_a_run_that_a_signal_ended_is_not_taken_for_a_broken_connection(
    cluster, tmp_path, repository, status, expected
):
    host = make_host(tmp_path / "home" / "host", (status, "ACTIVE"))
    done, _ = start(cluster, repository)
    assert (done.returncode, num_runs(host)) == (expected, 1)


def test_the_shell_of_a_host_outlives_the_run(cluster, tmp_path, repository):
    """A signal to all processes of the host must not give up the lock before the run has saved."""
    host = make_host(tmp_path / "home" / "host", (75, "ACTIVE"), (0, "ACTIVE"))
    signals = "for each in HUP INT TERM; do kill -$each $PPID; done; sleep 0.2\nstatus="
    (host / "python").write_text(PYTHON.replace("status=", signals, 1))
    done, _ = start(cluster, repository)
    assert (done.returncode, num_runs(host)) == (0, 2), done.stderr


@pytest.mark.parametrize(
    ("num_refused", "status", "num_calls"), [(9, 0, 1), (25, 0, 3), (1000, 255, 10)]
)
def test_a_host_that_cannot_be_reached_is_connected_to_again(
    cluster, tmp_path, repository, num_refused, status, num_calls
):
    """gcloud tries 10 times, and the script calls it up to 10 times."""
    runs = [(0, "ACTIVE")] * 10
    host = make_host(tmp_path / "home" / "host", *runs, breaks=["refused"] * num_refused)
    done, called = start(cluster, repository)
    assert done.returncode == status, done.stderr
    assert num_runs(host) == (status == 0)
    assert sum(" ssh " in line for line in called) == num_calls


def test_the_command_that_stops_a_run_finds_it_and_not_the_shells_around_it():
    pattern = re.search("pkill --full '(.+)'", (DEPLOY / "README.md").read_text())[1]
    script = (DEPLOY / "queued-resource.sh").read_text()
    run = re.search(r"exec (\S*python .*)", script)[1]
    assert re.search(pattern, run)
    assert not re.search(pattern, f"bash -c export START=1; {script}")
    assert not re.search(pattern, f"bash -c pkill --full '{pattern}'")


def test_every_state_of_a_request_is_printed_once(cluster, tmp_path, repository):
    """And one answer that fails does not end the wait."""
    states = ["NONE", "ACCEPTED", "ACCEPTED", "ERROR", "PROVISIONING", "PROVISIONING", "ACTIVE"]
    host = make_host(tmp_path / "home" / "host", (0, "ACTIVE"), coming=states)
    done, _ = start(cluster, repository)
    assert done.returncode == 0 and num_runs(host) == 1
    printed = [line.split(" care: ")[1] for line in done.stderr.splitlines() if " care: " in line]
    assert printed == ["not requested", "ACCEPTED", "PROVISIONING", "ACTIVE"]
    assert done.stderr.count("credentials have expired") == 1


@pytest.mark.parametrize(
    "states",
    [["NONE", "ACCEPTED", "NONE"], ["PROVISIONING", "DELETING", "NONE"], ["ACTIVE"]],
)
def test_a_slice_that_somebody_deleted_is_not_asked_for_again(
    cluster, tmp_path, repository, states
):
    """While the script waits for it, or under the run."""
    make_host(tmp_path / "home" / "host", (255, "NONE"), coming=states)
    done, called = start(cluster, repository)
    assert done.returncode == (255 if states == ["ACTIVE"] else 1)
    assert "care was deleted" in done.stderr and "is kept and billed" not in done.stderr
    assert sum(" create " in line for line in called) == (states[0] == "NONE")


def test_a_slice_that_is_being_deleted_is_waited_for_and_asked_for_again(
    cluster, tmp_path, repository
):
    states = ["DELETING", "DELETING", "NONE"]
    host = make_host(tmp_path / "home" / "host", (0, "ACTIVE"), coming=states)
    done, called = start(cluster, repository)
    assert done.returncode == 0 and num_runs(host) == 1
    assert sum(" create " in line for line in called) == 1


@pytest.mark.parametrize("states", [["ERROR"], ["NONE", "ACCEPTED", "ERROR"]])
def test_a_state_that_cannot_be_read_ends_the_script(cluster, tmp_path, repository, states):
    make_host(tmp_path / "home" / "host", coming=states)
    done, called = start(cluster, repository)
    assert done.returncode == 1
    assert done.stderr.count("credentials have expired") == 10
    assert "could not be read 10 times in a row" in done.stderr
    assert "queued-resources delete care --zone=z --force" in done.stderr
    assert sum(" create " in line for line in called) == len(states) // 2


def test_an_xpk_workload_mounts_the_bucket_and_restarts_after_a_preemption(cluster):
    xpk = {"xpk": 'case "$*" in *list*) [ -f "$HOME/attached" ] && echo care-runs ;; esac; true'}
    given = {"PROJECT": "p", "ZONE": "z", "CLUSTER": "c", "IMAGE": "i", "TYPE": "v5litepod-16"}
    flags = ["--config=configs/tiny.py", "--config.stages=('rl',)"]
    done, called = cluster("xpk.sh", "care", *flags, commands=xpk, **given)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1:3] for line in called] == [
        ["storage", "list"],
        ["storage", "attach"],
        ["workload", "create"],
    ]
    assert f"--manifest={DEPLOY}/xpk-storage.yaml" in called[1]
    workload = called[2]
    assert f"--restart-on-exit-codes={distributed._EXIT_PREEMPTED}" in workload
    assert "--storage=care-runs" in workload and "--tpu-type=v5litepod-16" in workload
    command = workload.partition("--command=")[2]
    assert shlex.split(command) == [
        *["exec", "python", "-m", "care_jax.main", "--workdir=/runs/care"],
        *flags,
    ]


@pytest.mark.parametrize("status", [0, 1])
def test_a_bucket_is_attached_to_an_xpk_cluster_once(cluster, status):
    """Whatever xpk prints behind its name; and if it cannot list them, nothing is started."""
    xpk = f'case "$*" in *list*) echo care-runs; seq 100000 || exit 2; exit {status} ;; esac'
    given = {"PROJECT": "p", "ZONE": "z", "CLUSTER": "c", "IMAGE": "i", "TYPE": "v5litepod-16"}
    done, called = cluster("xpk.sh", "care", commands={"xpk": xpk}, **given)
    assert done.returncode == status, done.stderr
    commands = [line.split()[1:3] for line in called]
    assert commands == [["storage", "list"], ["workload", "create"]][: 2 - status]


@pytest.mark.parametrize("name", ["queued-resource.sh", "slurm.sbatch", "xpk.sh"])
def test_the_scripts_are_clean(name):
    path = os.pathsep.join((str(pathlib.Path(sys.executable).parent), os.environ["PATH"]))
    program = shutil.which("shellcheck", path=path)
    checked = subprocess.run([str(program), DEPLOY / name], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
