"""Folders that users name: a home is found, an address of a bucket is told how to mount."""

import os
import pathlib
import subprocess
import sys

import pytest

import care_jax
from care_jax.config.command_line import folder_of
from configs import tiny
from experiments.sweep import __main__ as sweep

ROOT = pathlib.Path(__file__).resolve().parents[3]
TOLD = (
    "=gs://my-bucket/runs/7b; mount the bucket on every host (gcsfuse --implicit-dirs "
    "--metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 my-bucket /mnt/my-bucket) "
    "and write "
)


def test_a_folder_is_a_folder():
    for text in ("runs/tiny", "/mnt/b/gs", "./gs:/x", "a:b", "a/~/runs"):
        assert folder_of(text) == pathlib.Path(text)


def test_a_folder_may_be_one_of_the_home(monkeypatch):
    """bash leaves ~ alone behind `--workdir=`."""
    monkeypatch.setenv("HOME", "/home/us")
    assert folder_of("~/runs") == pathlib.Path("/home/us/runs")


def refusal(address, **options):
    with pytest.raises(ValueError) as refused:
        folder_of(address, **options)
    return str(refused.value)


@pytest.mark.parametrize(
    "address", ["gs://my-bucket/runs/7b", pathlib.Path("gs://my-bucket/runs/7b")]
)
def test_a_bucket_is_refused_with_the_command_that_mounts_it(address):
    """Also what pathlib made of the address, `gs:/my-bucket`."""
    told = f"expected a folder, got --out{TOLD}--out=/mnt/my-bucket/runs/7b"
    assert refusal(address, flag="--out") == told


@pytest.mark.parametrize("address", ["s3://b/runs", "gs://", "hdfs://h:1/x"])
def test_other_addresses_are_refused(address):
    assert refusal(address).startswith("expected a folder, got --workdir=")
    assert "gcsfuse" not in refusal("s3://b/runs")


def test_every_way_to_start_a_run_refuses_a_bucket_and_makes_no_folder(tmp_path, monkeypatch):
    command = [sys.executable, "-m", "care_jax.main", "--workdir=gs://my-bucket/runs/7b"]
    ran = subprocess.run(
        [*command, f"--config={ROOT / 'configs/tiny.py'}"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    told = f"error: expected a folder, got --workdir{TOLD}--workdir=/mnt/my-bucket/runs/7b\n"
    assert ran.returncode == 1 and ran.stderr == told
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="write workdir=/mnt/my-bucket/runs/7b"):
        care_jax.train_on(tiny.get_config(), train=[], workdir="gs://my-bucket/runs/7b")
    experiment = f"--experiment={ROOT / 'experiments/rescue.py'}"
    with pytest.raises(ValueError, match="write --workdir=/mnt/my-bucket/runs/7b"):
        sweep.main([experiment, "--workdir=gs://my-bucket/runs/7b"])
    assert not [*tmp_path.iterdir()]
