"""The manifests have fields that exist, and keep what a run needs to survive a lost host.

JobSet is checked against the models that `kubeflow-trainer-api` ships, the Jobs and Pods within it
and the volumes of xpk against the schemas of `kubernetes-validate`, Kueue and SkyPilot against
`deploy_schemas`. The scripts run here with the commands of their clusters replaced.
"""

import copy
import fnmatch
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import jsonschema
import kubernetes_validate
import pytest
import yaml
from deploy_schemas import KUEUE, SKYPILOT
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

from care_jax.benchmarks import judge
from care_jax.config import command_line
from care_jax.devices import distributed
from configs import common

pytestmark = pytest.mark.exhaustive

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
JOB_SETS = sorted(path.name for path in DEPLOY.glob("jobset-*.yaml"))
KUBERNETES = "1.34"
MISSPELLED = "maxRestart"


def documents(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def job_set_of(name):
    (job_set,) = documents(name)
    return job_set


def jobs_of(job_set):
    return [each["template"]["spec"] for each in job_set["spec"]["replicatedJobs"]]


def pod_of(job_set):
    (job,) = jobs_of(job_set)
    return job["template"]["spec"]


def test_there_is_one_for_each_kind_of_node():
    assert JOB_SETS == ["jobset-gpu.yaml", "jobset-tpu-multislice.yaml", "jobset-tpu-slice.yaml"]


# Schemas.


def check_kubernetes(document):
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def check_job_set(job_set):
    for job in jobs_of(job_set):
        check_kubernetes({"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, "spec": job})
    outer = copy.deepcopy(job_set)
    for replicated in outer["spec"]["replicatedJobs"]:
        assert replicated.pop("template").keys() == {"spec"}
        replicated["template"] = {}
    known = JobsetV1alpha2JobSet.from_dict(outer).to_dict()  # drops what it does not know
    assert known == outer


def check_kueue(document):
    jsonschema.validate(document, KUEUE[document["kind"]])


def check_sky(task):
    jsonschema.validate(task, SKYPILOT)


CHECKED = {
    **dict.fromkeys(JOB_SETS, check_job_set),
    "kueue.yaml": check_kueue,
    "skypilot.yaml": check_sky,
    "xpk-storage.yaml": check_kubernetes,
}


def mappings_in(value, path=()):
    """The path of every mapping with fields of the API, not of the user's choice."""
    free = {"nodeSelector", "annotations", "labels", "nodeLabels", "volumeAttributes", "limits"}
    free |= {"requests", "capacity", "envs", "secrets", "file_mounts", "namespaceSelector"}
    if isinstance(value, dict):
        if not path or path[-1] not in free:
            yield path
        for key, each in value.items():
            yield from mappings_in(each, (*path, key))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from mappings_in(each, (*path, index))


@pytest.mark.parametrize("name", CHECKED)
def test_every_field_exists(name):
    """And a misspelled one would be seen, wherever it stands."""
    assert {path.name for path in DEPLOY.glob("*.yaml")} == CHECKED.keys()
    for document in documents(name):
        CHECKED[name](document)
        for path in mappings_in(document):
            broken = copy.deepcopy(document)
            place = broken
            for key in path:
                place = place[key]
            if path == ("metadata",) and name in JOB_SETS:
                continue  # ObjectMeta, which the API server completes
            place[MISSPELLED] = 3
            with pytest.raises((AssertionError, ValueError, jsonschema.ValidationError)):
                CHECKED[name](broken)


# What survives a lost host.


@pytest.mark.parametrize("name", JOB_SETS)
def test_a_lost_host_restarts_the_whole_job_which_had_time_to_save(name):
    job_set = job_set_of(name)
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job_set["spec"]["failurePolicy"]["maxRestarts"] > 0
    for job in jobs_of(job_set):
        assert job["completionMode"] == "Indexed"
        assert job["backoffLimit"] == 0 and job["completions"] == job["parallelism"]
        pod = job["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] >= 120 and pod["restartPolicy"] == "Never"
        mounted = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == mounted


@pytest.mark.parametrize("name", JOB_SETS)
def test_a_preemption_does_not_use_up_the_restarts(name):
    """A Job that fails by its podFailurePolicy has the reason that the first rule waits for."""
    job_set = job_set_of(name)
    assert job_set["spec"]["failurePolicy"]["rules"] == [
        {
            "name": "preempted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
    ]
    for job in jobs_of(job_set):
        stopped, taken = job["podFailurePolicy"]["rules"]
        (container,) = job["template"]["spec"]["containers"]
        assert stopped == {
            "action": "FailJob",
            "onExitCodes": {
                "containerName": container["name"],
                "operator": "In",
                "values": [distributed._EXIT_PREEMPTED],
            },
        }
        assert taken == {
            "action": "FailJob",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        }


@pytest.mark.parametrize("name", JOB_SETS)
def test_the_bucket_is_mounted_for_several_hosts(name):
    pod = pod_of(job_set_of(name))
    (bucket,) = (volume["csi"] for volume in pod["volumes"] if "csi" in volume)
    attributes = bucket["volumeAttributes"]
    assert attributes["bucketName"] == "BUCKET"
    assert attributes["mountOptions"].split(",") == [
        "implicit-dirs",
        "metadata-cache:ttl-secs:0",
        "metadata-cache:negative-ttl-secs:0",
    ]
    # Without it a pod on the host's network has the rights of the node.
    assert (attributes.get("hostNetworkPodKSA") == "true") == pod.get("hostNetwork", False)


def test_all_mounts_of_a_bucket_have_the_same_options():
    for option in ("metadata-cache-ttl-secs=0", "metadata-cache-negative-ttl-secs=0"):
        assert f"--{option}" in command_line._GCSFUSE
        assert option in (DEPLOY / "queued-resource.sh").read_text()
    volume, claim = documents("xpk-storage.yaml")
    assert "metadata-cache:ttl-secs:0" in volume["spec"]["mountOptions"]
    assert "metadata-cache:negative-ttl-secs:0" in volume["spec"]["mountOptions"]
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]


@pytest.mark.parametrize("name", JOB_SETS)
def test_downloads_are_kept_on_the_volume_and_tokens_in_secrets(name):
    pod = pod_of(job_set_of(name))
    env = {each["name"]: each for each in pod["containers"][0]["env"]}
    assert env["HF_HOME"]["value"].startswith("/runs/")
    for variable in ("HF_TOKEN", "WANDB_API_KEY", judge._KEY):
        assert env[variable]["valueFrom"]["secretKeyRef"]["optional"] is True


@pytest.mark.parametrize("name", JOB_SETS)
def test_a_pod_has_no_rights_on_its_node(name):
    """But its network, where a TPU's hosts talk to each other; docs/security.md says so."""
    pod = pod_of(job_set_of(name))
    assert pod.get("hostNetwork", False) == ("tpu" in name)
    assert not pod.keys() & {"hostPID", "hostIPC", "securityContext"}
    assert all({"csi", "emptyDir"} & volume.keys() for volume in pod["volumes"])  # no hostPath
    (container,) = pod["containers"]
    assert not any("hostPort" in port for port in container["ports"])
    rights = container["securityContext"]
    assert rights["allowPrivilegeEscalation"] is False and not rights.get("privileged")
    assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "add" not in rights.get("capabilities", {})
    # libtpu may need to lock memory.
    assert "tpu" in name or rights["capabilities"]["drop"] == ["ALL"]


def test_no_file_has_a_secret():
    for path in DEPLOY.iterdir():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = re.search(r"(?i)\b\w*(token|key|password|secret)\b[\"']?\s*[:=]\s*(\S+)", line)
            if found and not found[2].startswith(('""', "/usr/share/keyrings", "hf_...", "...")):
                assert found[2] in ("key,", "token,"), f"{path.name}:{number} has {found[0]}"


# The command of a run.


def check_command(words):
    """Of `python -m care_jax.main`: the configuration exists, and so do the keys."""
    flags = dict(word.removeprefix("--").split("=", 1) for word in words)
    assert (ROOT / flags.pop("config")).is_file()
    assert flags.pop("workdir").startswith("/runs/")
    config = common.get_config()
    config.update_from_flattened_dict(
        {key.removeprefix("config."): type_of(config, key)(value) for key, value in flags.items()}
    )


def type_of(config, key):
    for part in key.removeprefix("config.").split("."):
        config = config[part]
    return type(config)


@pytest.mark.parametrize("name", JOB_SETS)
def test_the_command_is_python_itself_and_its_keys_exist(name):
    shell, option, line = pod_of(job_set_of(name))["containers"][0]["command"]
    assert (shell, option) == ("bash", "-c")
    words = line.split()
    assert words[:4] == ["exec", "python", "-m", "care_jax.main"]
    check_command(words[4:])


def test_processes_of_gpu_nodes_are_told_who_they_are():
    job_set = job_set_of("jobset-gpu.yaml")
    (replicated,) = job_set["spec"]["replicatedJobs"]
    (job,) = jobs_of(job_set)
    container = job["template"]["spec"]["containers"][0]
    env = {variable["name"]: variable for variable in container["env"]}
    assert env["JAX_NUM_PROCESSES"]["value"] == str(job["completions"])
    name = job_set["metadata"]["name"]
    host, port = env["JAX_COORDINATOR_ADDRESS"]["value"].split(":")
    assert host == f"{name}-{replicated['name']}-0-0.{name}"
    assert int(port) in [each["containerPort"] for each in container["ports"]]
    assert "job-completion-index" in env["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]


def test_slices_are_the_data_axis():
    job_set = job_set_of("jobset-tpu-multislice.yaml")
    (replicated,) = job_set["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 2
    assert "--config.mesh.data=2" in pod_of(job_set)["containers"][0]["command"][2]


def test_job_sets_wait_in_the_queue_there_is():
    found = {document["kind"]: document for document in documents("kueue.yaml")}
    assert found["LocalQueue"]["spec"]["clusterQueue"] == found["ClusterQueue"]["metadata"]["name"]
    for name in JOB_SETS:
        queue = job_set_of(name)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
        assert queue == found["LocalQueue"]["metadata"]["name"]


def test_a_sky_job_goes_on_after_a_preemption():
    (task,) = documents("skypilot.yaml")
    recovery = task["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [distributed._EXIT_PREEMPTED]
    assert task["num_nodes"] == 1  # its mount caches metadata
    words = shlex.split(task["run"].replace("\\\n", " "))
    assert words[:4] == ["exec", ".venv/bin/python", "-m", "care_jax.main"]
    check_command(words[4:])


# The image.


def test_the_image_holds_the_program_and_nothing_of_this_machine():
    def patterns_of(name):
        lines = (ROOT / name).read_text().splitlines()
        return [line for line in lines if line and not line.startswith("#")]

    patterns = patterns_of(".dockerignore")
    is_left_out = lambda name: any(fnmatch.fnmatch(name, each) for each in patterns)  # noqa: E731
    inside = {name for name in (*os.listdir(ROOT), ".venv-python3.13") if not is_left_out(name)}
    assert {"care_jax", "models", "configs", "experiments", "deploy", "docs", "setup.py"} <= inside
    assert {"pyproject.toml", "constraints.txt", "README.md"} <= inside
    assert not {".git", ".venv", ".venv-python3.13", "runs", "tests"} & inside
    for pattern in patterns_of(".gitignore"):  # nothing that git leaves out
        assert pattern.strip("/") in {each.removeprefix("**/") for each in patterns}


def test_the_image_has_the_libraries_of_the_extras_it_names():
    words = (DEPLOY / "Dockerfile").read_text().split()
    at = words.index("requirements.py")
    assert words[at + 1 : at + 4] == ['"${EXTRA}"', "data", "wandb"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in ("tpu", "cuda"):
        command = [sys.executable, DEPLOY / "requirements.py", extra, "data", "wandb"]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        optional = project["optional-dependencies"]
        expected = [*project["dependencies"], *optional[extra], *optional["data"]]
        assert printed.stdout.splitlines() == [*expected, *optional["wandb"]]
    command = [sys.executable, DEPLOY / "requirements.py", "gpu"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 1 and "has no extra 'gpu', only ['cuda'" in refused.stderr


# The scripts, with commands that write down how they were called.


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


# A slice that is ACTIVE once it was asked for; after each run it is in the next state of a file.
GCLOUD = """
cd "$HOME"
case "$*" in
  *" describe "*)
    cat state
    sed -i s/SUSPENDING/SUSPENDED/ state ;;
  *" delete "*) rm state ;;
  *" create "*) echo ACTIVE > state ;;
  *" ssh "*)
    for word in "$@"; do case "$word" in --command=*) command=${word#--command=} ;; esac; done
    (cd host && HOME=$HOME/host bash -c "$command")
    status=$?
    head -n 1 next > state
    sed -i 1d next
    exit $status ;;
esac"""
HOST = {
    "gcloud": GCLOUD,
    "mountpoint": "exit 1",
    "sudo": "",
    "gcsfuse": "",
    "uv": """
if [ "$1" = venv ]; then
  mkdir -p .venv/bin
  cp "$HOME/python" .venv/bin/python
  chmod +x .venv/bin/python
fi""",
}


PYTHON = """#!/bin/bash
echo host-python "$@" >> "$HOME/ran"
status=$(head -n 1 "$HOME/status")
sed -i 1d "$HOME/status"
exit "$status"
"""


def make_host(folder, *runs):
    """The home of a host: with which status each run ends, and in which state the slice is then."""
    folder.mkdir(parents=True)
    (folder / "status").write_text("".join(f"{status}\n" for status, _ in runs))
    (folder.parent / "next").write_text("".join(f"{state}\n" for _, state in runs))
    (folder / "python").write_text(PYTHON)
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
    given = {"PROJECT": "p", "ZONE": "z", "TYPE": "v5litepod-16", "BUCKET": "b"}
    given |= {"REPOSITORY": str(repository), "POLL": "0", "SETTLE": "0"}
    done, called = cluster("queued-resource.sh", "care", commands=HOST, **given)
    assert done.returncode == runs[-1][0], done.stderr
    assert len((host / "ran").read_text().splitlines()) == len(runs)
    assert sum(" create " in line for line in called) == num_slices
    assert sum(" delete " in line for line in called) == num_slices - 1


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


@pytest.mark.parametrize("name", ["queued-resource.sh", "slurm.sbatch", "xpk.sh"])
def test_the_scripts_are_clean(name):
    path = os.pathsep.join((str(pathlib.Path(sys.executable).parent), os.environ["PATH"]))
    program = shutil.which("shellcheck", path=path)
    checked = subprocess.run([str(program), DEPLOY / name], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
