"""A run is compiled for TPUs that are not there, and what does not fit is said not to.

`make test` puts libtpu beside the environment, not in it: jax would else ask it for TPUs at every
start.
"""

import os
import pathlib
import subprocess
import sys
import types

import pytest

from care_jax import aot
from care_jax.fit import Fit, Program, find_topology
from care_jax.roofline import GIB, Chip, Work

LIBTPU = pathlib.Path(sys.prefix, "libtpu")
needs_libtpu = pytest.mark.skipif(not LIBTPU.is_dir(), reason=f"needs libtpu in {LIBTPU}")


def compiled(*flags):
    """Status, rows of the table by program, and all of the output."""
    command = [sys.executable, "-m", "care_jax.aot", "--config=configs/tiny.py", *flags]
    environment = {
        "PYTHONPATH": str(LIBTPU),
        "JAX_PLATFORMS": "cpu",
        "JAX_OPTIMIZATION_LEVEL": "O0",
    }
    result = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[2:]}
    return result.returncode, rows, result.stdout + result.stderr


@needs_libtpu
def test_a_small_run_compiles_for_a_v5e_and_fits():
    """A hundred times the batch, so that sizes show; half of each prompt's rows are reflected."""
    flags = ["--config.stages=('rl',)", "--config.care.beta=0.1", "--config.rl.decode_prompts=512"]
    flags += ["--config.rl.prompts_per_step=1024", "--config.rl.prompts_per_update=512"]
    status, rows, output = compiled("--topology=v5e:2x2", *flags)
    assert status == 0, output
    names = ["reshard", "prefill", "decode", "reflect", "score", "update"]
    assert list(rows) == [f"rl {name}" for name in names]
    assert "v5e:2x2: 4 chips (fsdp 4), 15.75 GiB each" in output and "It fits" in output
    assert "A step of 'rl' takes at least" in output and "tokens/s" in rows["rl decode"]
    # 128 prompts a chip: keys and values of 2 layers and 2 heads of 24, over 48 tokens and 8 of 36.
    cache = 128 * (48 + 8 * 36) * 2 * 2 * 2 * 24 * 4 / GIB
    decode = rows["rl decode"]
    assert float(decode["arguments"]) + float(decode["temporaries"]) > cache > 0.03
    assert float(rows["rl prefill"]["beside"]) >= 0.01


@needs_libtpu
def test_what_cannot_fit_says_so():
    flags = ["--config.stages=('sft',)", "--config.sft.row_tokens=8192"]
    flags += ["--config.sft.batch_size=512", "--config.sft.microbatch_size=512"]
    status, rows, output = compiled("--topology=v5e:1x1", *flags)
    assert status == 1, output
    assert float(rows["sft step"]["headroom"]) < 0
    assert "It does not fit: 'sft step' needs" in output
    assert "refused by the compiler: sft step" in output


@needs_libtpu
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--topology=v5e:3x5x7"], "error: --topology 'v5e:3x5x7' cannot be compiled for: "),
        (["--topology=v5e:2x2", "--config.mesh.tensor=3"], "error: mesh.data=1 x mesh.fsdp=-1 x"),
        (["--topology=v5e:2x2", "--config.stages=('evaluate',)"], "error: stages ('evaluate',) "),
    ],
)
def test_a_mistake_is_one_line(flags, message):
    status, _, output = compiled(*flags)
    (line,) = [line for line in output.splitlines() if line.startswith("error")]
    assert status == 2 and line.startswith(message) and "Traceback" not in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--topology=v5e:2x2", "--config.rl.nothing=3"], "no such key: 'nothing'; configs/"),
        (["--topology=v5e:2x2", "--config=configs/tiny.py:gpt"], "flag --config=configs/tiny.py:g"),
        ([], "flag --topology=None: "),
    ],
)
def test_a_mistake_in_the_flags_is_one_line(flags, message):
    status, _, output = compiled(*flags)
    assert status == 2 and output.startswith(f"error: {message}") and output.count("\n") == 1


def test_a_topology_that_is_not_known_names_those_that_are():
    with pytest.raises(ValueError, match="one of v5e, v5p, v6e and its shape, such as v5e:4x4"):
        find_topology("h100:8")


def test_a_missing_compiler_says_what_to_install():
    with pytest.raises(ValueError, match=r"is not there; run: pip install 'care_jax\[tpu\]'"):
        find_topology("v5e:2x2")


def program(name, *sizes, seconds=1.0, **fields):
    arguments, outputs, temporaries, beside = (int(size * GIB) for size in sizes)
    work = Work(flops=20 * seconds, tokens=10)
    defaults = {"num_calls": 1, "seconds": 3.0}
    return Program(name, arguments, outputs, temporaries, beside, work, **defaults | fields)


def fit_of(*programs):
    sizes = {"data": 1, "fsdp": 2, "tensor": 1, "sequence": 1}
    mesh = types.SimpleNamespace(size=2, shape=sizes)
    chip = Chip(flops=10, hbm=10 * GIB, hbm_bandwidth=1, ici_bandwidth=1)
    return Fit("v5e:2x1", chip, mesh, programs, 64)


def test_the_fullest_program_decides_with_what_the_run_keeps_beside_it():
    small, large = program("sft step", 1, 2, 3, 0), program("rl update", 1, 1, 4, 3)
    assert fit_of(small, large).is_fitting and fit_of(small, large).fullest is large
    too_large = program("rl score", 1, 1, 4, 5)
    assert not fit_of(small, too_large, large).is_fitting
    assert not fit_of(program("sft step", 0, 0, 9, 0, is_refused=True)).is_fitting
    text = aot.report(fit_of(small, too_large))
    assert "It does not fit: 'rl score' needs 11.00 GiB of 10.00, 1.00 too many." in text
    assert "It fits, with 1.00 GiB to spare in 'rl update'." in aot.report(fit_of(small, large))


def test_a_step_takes_all_calls_of_its_programs():
    programs = program("rl decode", 0, 0, 0, 0, num_calls=4), program("rl update", 0, 0, 0, 0)
    result = fit_of(program("sft step", 0, 0, 0, 0, seconds=7.0), *programs)
    assert (result.step_seconds("sft"), result.step_seconds("rl")) == (7, 5)
    assert "A step of 'sft' takes at least 7.0 s." in aot.report(result)
