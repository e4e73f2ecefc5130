"""The manifests are valid YAML and keep what a run needs to survive a lost host."""

import pathlib
import subprocess

import pytest
import yaml

from configs import common

DEPLOY = pathlib.Path(__file__).resolve().parent.parent / "deploy"
JOB_SETS = sorted(path.name for path in DEPLOY.glob("jobset-*.yaml"))


def documents(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def test_there_is_one_for_each_kind_of_node():
    assert JOB_SETS == ["jobset-gpu.yaml", "jobset-tpu-multislice.yaml", "jobset-tpu-slice.yaml"]


@pytest.mark.parametrize("name", JOB_SETS)
def test_a_lost_host_restarts_the_whole_job_which_had_time_to_save(name):
    (job_set,) = documents(name)
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job_set["spec"]["failurePolicy"]["maxRestarts"] > 0
    for replicated in job_set["spec"]["replicatedJobs"]:
        job = replicated["template"]["spec"]
        assert job["completionMode"] == "Indexed"
        assert job["backoffLimit"] == 0 and job["completions"] == job["parallelism"]
        pod = job["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] >= 120 and pod["restartPolicy"] == "Never"
        mounts = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == mounts


@pytest.mark.parametrize("name", JOB_SETS)
def test_the_command_is_python_itself_and_its_keys_exist(name):
    (job_set,) = documents(name)
    pod = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    shell, option, line = pod["containers"][0]["command"]
    assert (shell, option) == ("bash", "-c")
    words = line.split()
    assert words[:4] == ["exec", "python", "-m", "care_jax.main"]
    flags = dict(word.removeprefix("--").split("=", 1) for word in words[4:])
    assert (DEPLOY.parent / flags.pop("config")).is_file()
    assert flags.pop("workdir").startswith("/runs/")
    config = common.get_config()
    config.update_from_flattened_dict(
        {key.removeprefix("config."): type_of(config, key)(value) for key, value in flags.items()}
    )


def type_of(config, key):
    for part in key.removeprefix("config.").split("."):
        config = config[part]
    return type(config)


def test_processes_of_gpu_nodes_are_told_who_they_are():
    (job_set,) = documents("jobset-gpu.yaml")
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    env = {variable["name"]: variable for variable in container["env"]}
    assert env["JAX_NUM_PROCESSES"]["value"] == str(job["completions"])
    name = job_set["metadata"]["name"]
    host, port = env["JAX_COORDINATOR_ADDRESS"]["value"].split(":")
    assert host == f"{name}-{replicated['name']}-0-0.{name}"
    assert int(port) in [each["containerPort"] for each in container["ports"]]
    assert "job-completion-index" in env["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]


def test_slices_are_the_data_axis():
    (job_set,) = documents("jobset-tpu-multislice.yaml")
    (replicated,) = job_set["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert replicated["replicas"] == 2
    assert "--config.mesh.data=2" in pod["containers"][0]["command"][2]


def test_job_sets_wait_in_the_queue_there_is():
    kinds = {document["kind"]: document for document in documents("kueue.yaml")}
    assert kinds["LocalQueue"]["spec"]["clusterQueue"] == kinds["ClusterQueue"]["metadata"]["name"]
    for name in JOB_SETS:
        (job_set,) = documents(name)
        queue = job_set["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
        assert queue == kinds["LocalQueue"]["metadata"]["name"]


def test_the_script_is_a_script():
    subprocess.run(["bash", "-n", DEPLOY / "queued-resource.sh"], check=True)
