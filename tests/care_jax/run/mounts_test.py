"""Addresses of buckets become folders of mounts, which the kernel's table tells from disks."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

import care_jax
from care_jax.run import mounts
from care_jax.run.mounts import as_folder, file_system_of, is_fuse
from configs import tiny
from experiments.sweep import __main__ as sweep

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


# Notes its arguments, enters the mount into the table, as the kernel would, and goes on.
GCSFUSE = """#!/bin/sh
sleep 20 &
echo "$@" >> "$HOME/called"
while [ $# -gt 2 ]; do shift; done
echo "$1 $2 fuse.gcsfuse rw 0 0" >> "$HOME/mounts"
"""
MOUNT = "--implicit-dirs --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 my-bucket"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with a `gcsfuse` on the path, and without a cache elsewhere."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "gcsfuse"
    program.write_text(GCSFUSE)
    program.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "mounts").write_text(TABLE)
    return tmp_path


@pytest.mark.parametrize("address", ["gs://my-bucket/a/b/", pathlib.Path("gs://my-bucket/a/b")])
def test_a_bucket_is_mounted_once_and_its_folder_taken(home, capfd, address):
    """Also of what pathlib made of the address, `gs:/my-bucket`."""
    began = time.monotonic()
    point = home / ".cache" / "care_jax" / "buckets" / "my-bucket"
    for _ in range(2):
        assert as_folder(address, home / "mounts") == point / "a" / "b"
    assert (home / "called").read_text() == f"{MOUNT} {point}\n"
    assert is_fuse(point / "a", home / "mounts")
    assert time.monotonic() - began < 10
    assert capfd.readouterr().err == f"gs://my-bucket is mounted at {point}\n"


def test_a_folder_may_be_one_of_the_home(home):
    """bash leaves ~ alone behind `--workdir=`."""
    assert as_folder("~/runs", home / "mounts") == home / "runs"
    assert as_folder("a/~/runs", home / "mounts") == pathlib.Path("a/~/runs")


def refusal(address, table, **options):
    with pytest.raises(ValueError) as refused:
        as_folder(address, table, **options)
    return str(refused.value)


def test_the_flag_that_named_it_is_told(home):
    told = refusal("s3://my-bucket/a", home / "mounts", flag="--out")
    assert "as --out, got s3://my-bucket/a; mount" in told and "set --out to a folder" in told


def test_without_gcsfuse_the_line_says_how_to_mount_it_or_where_it_is(home, tmp_path):
    (home / "bin" / "gcsfuse").unlink()
    point = home / ".cache" / "care_jax" / "buckets" / "my-bucket"
    head = (
        f"--workdir=gs://my-bucket/a cannot be mounted at {point}: gcsfuse is not installed; mount"
    )
    assert refusal("gs://my-bucket/a", tmp_path / "none") == (
        f"{head} the bucket on every host (gcsfuse {MOUNT} /mnt/my-bucket) and set "
        "--workdir=/mnt/my-bucket/a"
    )
    # As in a pod of GKE, where the driver has mounted it.
    assert refusal("gs://my-bucket/a", home / "mounts") == (
        f"{head} the bucket on every host and set --workdir=/runs/a"
    )


def test_what_gcsfuse_says_last_is_told(home, tmp_path):
    (home / "bin" / "gcsfuse").write_text("#!/bin/sh\necho one >&2; echo no access >&2; exit 1\n")
    assert "status 1, no access; mount the bucket" in refusal("gs://my-bucket/a", tmp_path / "none")


def test_a_mount_whose_gcsfuse_has_died_is_told(home):
    as_folder("gs://my-bucket/a", home / "mounts")
    point = home / ".cache" / "care_jax" / "buckets" / "my-bucket"
    point.rmdir()  # a dead mount cannot be looked at either
    assert refusal("gs://my-bucket/a", home / "mounts") == (
        "the gcsfuse of gs://my-bucket has died (No such file or directory); remove its mount, "
        f"fusermount -u {point}, and start again"
    )


def test_gcsfuse_that_hangs_is_not_waited_for(home, tmp_path, monkeypatch):
    (home / "bin" / "gcsfuse").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(mounts, "_TIMEOUT", 0.2)
    assert "gcsfuse takes longer than 0.2 seconds; mount the" in refusal(
        "gs://b1/a", tmp_path / "none"
    )


@pytest.mark.parametrize("address", ["s3://b/runs", "gs://", "gs://UPPER/x", "hdfs://h:1/x"])
def test_other_addresses_are_refused(home, address):
    assert refusal(address, home / "mounts").startswith(
        "expected a folder or gs://bucket/folder as --workdir, got"
    )
    assert not (home / "called").exists()


def test_every_way_to_start_a_run_refuses_what_cannot_be_mounted_and_makes_no_folder(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    here = tmp_path / "here"
    here.mkdir()
    command = [sys.executable, "-m", "care_jax.main", "--workdir=gs://no-bucket/runs/7b"]
    ran = subprocess.run(
        [*command, f"--config={ROOT / 'configs/tiny.py'}"],
        cwd=here,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("error: --workdir=gs://no-bucket/runs/7b cannot be mounted")
    monkeypatch.chdir(here)
    with pytest.raises(ValueError, match="cannot be mounted at"):
        care_jax.train_on(tiny.get_config(), train=[], workdir="gs://no-bucket/runs/7b")
    experiment = f"--experiment={ROOT / 'experiments/rescue.py'}"
    with pytest.raises(ValueError, match="cannot be mounted at"):
        sweep.main([experiment, "--workdir=gs://no-bucket/runs/7b"])
    assert not [*here.iterdir()]
