"""The manifests have fields that exist, and keep what a run needs to survive a lost host.

JobSet is checked against the models that `kubeflow-trainer-api` ships, the Jobs and Pods within it
and the volumes of xpk against the schemas of `kubernetes-validate`, Kueue and SkyPilot against
`deploy_schemas`.
"""

import copy
import fnmatch
import os
import pathlib
import re
import shlex
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
