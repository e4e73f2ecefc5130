"""The kernel's table of mounts tells buckets from disks."""

import pathlib

import pytest

from care_jax.run.mounts import is_fuse

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
    ("path", "is_bucket"),
    [
        ("/mnt/my-bucket/runs/7b/checkpoints", True),
        ("/mnt/my-bucket", True),
        ("/mnt/my-bucket-2/runs", False),
        ("/runs/care", True),
        ("/runs/scratch/care", False),
        ("/mnt/two words/care", False),
        ("/home/care", False),  # the later mount is on top
        ("/sys/fs/fuse/connections/1", False),
    ],
)
def test_the_longest_mount_above_a_path_counts(table, path, is_bucket):
    assert is_fuse(pathlib.Path(path), table) is is_bucket


def test_without_a_table_nothing_is_a_bucket(tmp_path):
    assert not is_fuse(tmp_path, tmp_path / "absent")
