"""Folders that users name: a home is found, a bucket is refused with the command to mount it."""

import pathlib
import re
import types

import pytest

import care_jax
from care_jax import main
from care_jax.config.command_line import folder_of
from configs import tiny
from experiments.sweep import __main__ as sweep

ROOT = pathlib.Path(__file__).resolve().parents[3]
MOUNT = (
    "--out=gs://my-bucket/runs/7b; mount the bucket on every host (gcsfuse --implicit-dirs "
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


def test_without_a_home_a_folder_must_be_written_out(monkeypatch):
    def has_none(_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "expanduser", has_none)
    with pytest.raises(ValueError, match=r"^expected a folder, got --out=~/runs, and this user ha"):
        folder_of("~/runs", flag="--out")


REFUSED = {
    "a bucket": ("gs://my-bucket/runs/7b", f"{MOUNT}--out=/mnt/my-bucket/runs/7b"),
    # pathlib makes `gs:/my-bucket` of the address.
    "its path": (pathlib.Path("gs://my-bucket/runs/7b"), f"{MOUNT}--out=/mnt/my-bucket/runs/7b"),
    "no bucket": ("gs://", "--out=gs:///; mount the bucket on every host (gcsfuse "),
    "another service": (
        "s3://b/runs",
        "--out=s3://b/runs; mount the bucket on every host and write ",
    ),
}


@pytest.mark.parametrize(("address", "message"), REFUSED.values(), ids=REFUSED)
def test_an_address_is_refused_with_the_command_that_mounts_it(address, message):
    with pytest.raises(ValueError, match=f"^expected a folder, got {re.escape(message)}"):
        folder_of(address, flag="--out")


def test_every_way_to_start_a_run_refuses_a_bucket_and_makes_no_folder(tmp_path, monkeypatch):
    workdir = "gs://my-bucket/runs/7b"
    monkeypatch.chdir(tmp_path)
    given = types.SimpleNamespace(workdir=workdir, config=tiny.get_config())
    monkeypatch.setattr(main.flags, "FLAGS", given)
    with pytest.raises(ValueError, match="write --workdir=/mnt/my-bucket/runs/7b"):
        main.main([])
    with pytest.raises(ValueError, match="write workdir=/mnt/my-bucket/runs/7b"):
        care_jax.train_on(tiny.get_config(), train=[], workdir=workdir)
    experiment = f"--experiment={ROOT / 'experiments/rescue.py'}"
    with pytest.raises(ValueError, match="write --workdir=/mnt/my-bucket/runs/7b"):
        sweep.main([experiment, f"--workdir={workdir}"])
    assert not [*tmp_path.iterdir()]
