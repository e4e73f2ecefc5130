"""Addresses of buckets are refused; mounts of buckets are told from disks by the kernel's table."""

import pathlib
import subprocess
import sys

import pytest

import care_jax
from care_jax.devices.mounts import as_folder, file_system_of, is_fuse
from care_jax.sweep import __main__ as sweep
from configs import tiny

ROOT = pathlib.Path(__file__).resolve().parents[3]
# As on a TPU VM with gcsfuse, and as the CSI driver of GKE mounts a bucket in a pod.
TABLE = """\
/dev/root / ext4 rw,relatime 0 0
proc /proc proc rw 0 0
my-bucket /mnt/my-bucket fuse.gcsfuse rw,nosuid,nodev,relatime,user_id=0,group_id=0 0 0
my-bucket /runs fuse rw,nosuid,nodev,relatime,user_id=0,group_id=0,allow_other 0 0
tmpfs /runs/scratch tmpfs rw 0 0
/dev/sdb /mnt/two\\040words xfs rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdc /home xfs rw 0 0
fusectl /sys/fs/fuse/connections fusectl rw 0 0
"""


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "mounts"
    path.write_text(TABLE)
    return path


@pytest.mark.parametrize(
    ("path", "kind", "is_bucket"),
    [
        ("/mnt/my-bucket/runs/7b/checkpoints", "fuse.gcsfuse", True),
        ("/mnt/my-bucket", "fuse.gcsfuse", True),
        ("/mnt/my-bucket-2/runs", "ext4", False),
        ("/runs/care", "fuse", True),
        ("/runs/scratch/care", "tmpfs", False),
        ("/mnt/two words/care", "xfs", False),
        ("/home/care", "xfs", False),  # the later mount is on top
        ("/sys/fs/fuse/connections/1", "fusectl", False),
    ],
)
def test_the_longest_mount_above_a_path_counts(table, path, kind, is_bucket):
    assert file_system_of(pathlib.Path(path), table) == kind
    assert is_fuse(pathlib.Path(path), table) is is_bucket


def test_without_a_table_nothing_is_a_bucket(tmp_path):
    assert not is_fuse(tmp_path, tmp_path / "absent")
    assert file_system_of(tmp_path) != ""  # of this machine


def test_a_folder_is_a_folder():
    for text in ("runs/tiny", "/mnt/b/gs", "./gs:/x", "a:b"):
        assert as_folder(text) == pathlib.Path(text)


GS = (
    "expected a folder as --workdir, got the address gs://my-bucket/runs/7b; mount the bucket on "
    "every host (gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0 "
    "--metadata-cache-negative-ttl-secs=0 my-bucket /mnt/my-bucket) and set "
    "--workdir=/mnt/my-bucket/runs/7b"
)


@pytest.mark.parametrize(
    "address", ["gs://my-bucket/runs/7b", pathlib.Path("gs://my-bucket/runs/7b")]
)
def test_an_address_is_refused_with_the_command_that_mounts_it(address):
    """Also what pathlib made of it, `gs:/my-bucket`."""
    with pytest.raises(ValueError) as refused:
        as_folder(address)
    assert str(refused.value) == GS
    with pytest.raises(ValueError) as refused:
        as_folder("s3://b")
    assert str(refused.value).endswith("mount the bucket on every host and set --workdir=/mnt/b")


def test_every_way_to_start_a_run_refuses_it_and_makes_no_folder(tmp_path, monkeypatch):
    command = [sys.executable, "-m", "care_jax.main", "--workdir=gs://my-bucket/runs/7b"]
    ran = subprocess.run(
        [*command, f"--config={ROOT / 'configs/tiny.py'}"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stderr) == (1, f"error: {GS}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="expected a folder as --workdir"):
        care_jax.train_on(tiny.get_config(), train=[], workdir="gs://my-bucket/runs/7b")
    experiment = f"--experiment={ROOT / 'experiments/rescue.py'}"
    with pytest.raises(ValueError, match="expected a folder as --workdir"):
        sweep.main([experiment, "--workdir=gs://my-bucket/runs/7b"])
    assert not [*tmp_path.iterdir()]
