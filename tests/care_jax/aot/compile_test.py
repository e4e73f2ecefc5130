"""A run is compiled for chips that are not there, and what does not fit is said not to.

`make test` puts libtpu and the CUDA compiler beside the environment, not in it: jax would else ask
them for devices at every start.
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import types
from collections import Counter

import pytest
from absl.testing import flagsaver

from care_jax.aot import __main__ as aot
from care_jax.aot import compile
from care_jax.aot.collectives import Received
from care_jax.aot.compile import Fit, Program
from care_jax.aot.roofline import Work
from care_jax.aot.step_sizes import StepSizes
from care_jax.devices.flops import CHIPS, GIB, Chip

ROOT = pathlib.Path(__file__).resolve().parents[3]
LIBTPU = pathlib.Path(sys.prefix, "libtpu")
needs_libtpu = pytest.mark.skipif(not LIBTPU.is_dir(), reason=f"needs libtpu in {LIBTPU}")
CUDA = pathlib.Path(sys.prefix, "cuda")
needs_cuda = pytest.mark.skipif(not CUDA.is_dir(), reason=f"needs the CUDA compiler in {CUDA}")


WIDE = ["--config.model.backbone.text_config.intermediate_size=65536"]  # so that bytes show
ACROSS = "of it from other slices"
RL = ["--topology=v5e:2x2", "--config.stages=('rl',)"]


def environment(compiler):
    """Of a process that finds the compiler."""
    own = {"PYTHONPATH": f"{compiler}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    return os.environ | own | {"JAX_OPTIMIZATION_LEVEL": "O0"}


def compiled(*flags, compiler=LIBTPU, config="configs/tiny.py"):
    """Status, rows of the tables by program, and all of the output."""
    command = [sys.executable, "-m", "care_jax.aot", f"--config={config}", *flags]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(compiler))
    lines = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    rows, head = {}, ()
    for line in lines:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        head = cells if name == "program" else head
        if not name.startswith(("program", "-")):
            rows.setdefault(name, {}).update(zip(head, cells, strict=True))
    return result.returncode, rows, result.stdout + result.stderr


DAPO = {"rl.objective": "dapo"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"rl decode": 1000, "rl reflect": 2000, "evaluate": 1000}),
        (DAPO, {"rl decode": 2000, "evaluate": 1000}),
        (DAPO | {"dapo.max_tries": 1}, {"rl decode": 1000, "evaluate": 1000}),
    ],
    ids=["care", "dapo", "dapo_of_one_draw"],
)
def test_carried_slots_are_counted_where_they_are(make_run, monkeypatch, changes, expected):
    """One set while a step decodes and updates; two while it reflects or draws again."""
    kept, carried = {}, 0

    def decode_programs(run, programs, params, num_bytes, name, *_):
        kept[name] = num_bytes
        return [Program(name, Work())] * 2

    monkeypatch.setattr(compile, "_decode_programs", decode_programs)
    monkeypatch.setattr(compile, "_slots_between", lambda *_: carried)
    monkeypatch.setattr(compile, "_compile", lambda program, *_: (program, {}))
    run = make_run({"stages": ("rl",), "rl.eval_every": 5} | changes)
    step = StepSizes((), None, None, 0)

    def counted():
        compile._rollout_programs(run, CHIPS["v5e"], step, None)
        compile._evaluation_programs(run, step)
        return kept.copy()

    before, carried = counted(), 1000
    more = {name: num_bytes - before[name] for name, num_bytes in counted().items()}
    assert more == expected


@needs_libtpu
@pytest.mark.exhaustive
@pytest.mark.smoke
def test_a_small_run_compiles_for_a_v5e_and_fits():
    """A hundred times the batch, so that sizes show; half of each prompt's rows are reflected."""
    flags = ["--config.stages=('rl',)", "--config.care.beta=0.1", "--config.rl.decode_prompts=256"]
    flags += ["--config.rl.prompts_per_step=1024", "--config.rl.prompts_per_update=512"]
    flags += ["--config.data.buckets=((128, 64),)", "--config.rl.row_tokens=512"]
    flags += ["--mean_response=12", "--config.model.backbone.text_config.num_hidden_layers=1"]
    status, rows, output = compiled("--topology=v5e:2x2", *flags)
    assert status == 0, output
    names = ["reshard", "decode prefill", "decode", "reflect prefill", "reflect"]
    names += ["score", "update"]
    assert list(rows) == [f"rl {name}" for name in names]
    assert "v5e:2x2: 4 chips (fsdp 4), 15.75 GiB each" in output and "It fits" in output
    assert re.search(
        r"'rl' takes at least .* s \(worst case\), .* s at a mean of 12 tokens", output
    )
    # At worst a tree of 128 + 9 * 36 tokens to a row, of which 4 are a microbatch.
    worst, mean = re.findall(r"(\d+) microbatches in 2 updates, train_fill (0\.\d+)", output)
    assert int(worst[0]) == 1024 / 4 > 1.5 * int(mean[0]) and float(mean[1]) > 0.5
    # FSDP of 4: all weights but a chip's own are gathered for each microbatch, twice in an update.
    # The loop over one layer is unrolled, and libtpu 0.0.50 gathers two of its matrices once.
    score, update = rows["rl score"], rows["rl update"]
    assert 1.75 < float(update["all-gather"]) / float(score["all-gather"]) < 2.1
    assert float(update["reduce-scatter"]) > 0 and float(score["reduce-scatter"]) == 0
    assert float(update["worst step"]) > 1.5 * float(update["mean step"])
    # 64 prompts a chip: keys and values of one layer, 2 heads of 24, over 128 tokens and 4 of 36.
    cache = 64 * (128 + 4 * 36) * 2 * 2 * 24 * 4 / GIB
    decode = rows["rl decode"]
    assert float(decode["arguments"]) + float(decode["temporaries"]) > cache > 0.005
    assert float(rows["rl decode prefill"]["arguments"]) > cache  # the slots are there already


@needs_cuda
@pytest.mark.exhaustive
@pytest.mark.smoke
def test_a_small_run_compiles_for_gpus_and_says_what_their_compiler_leaves_out():
    flags = ["--config.stages=('sft',)", "--config.sft.microbatch_size=4", "--topology=h100:2x2"]
    status, rows, output = compiled(*flags, *WIDE, compiler=CUDA)
    assert status == 0, output
    assert "h100:2x2: 4 chips (data 2 x fsdp 2), 71.19 GiB each" in output and "It fits" in output
    assert float(rows["sft step"]["all-gather"]) > float(rows["sft step"][ACROSS]) > 0
    assert "The GPU compiler refuses no program for its size and does not count cuDNN" in output


@needs_cuda
@pytest.mark.exhaustive
def test_lora_and_its_evaluation_compile_for_one_gpu():
    flags = ["--topology=rtx4090:1", "--config.stages=('rl', 'evaluate')"]
    flags += ["--config.model.lora_rank=4", "--config.evaluate.batch_size=1024"]
    status, rows, output = compiled(*flags, compiler=CUDA)
    assert status == 0, output
    assert "rtx4090:1: 1 chips (one), 21.17 GiB each" in output and "It fits" in output
    # The slots of 1024 questions: keys and values of 2 heads of 24, over 48 + 36 tokens.
    cache_of_layer = 1024 * (48 + 36) * 2 * 2 * 24 * 4 / GIB
    assert float(rows["evaluate"]["arguments"]) > cache_of_layer > 0.03
    assert float(rows["evaluate"]["total"]) > 2 * float(rows["rl decode"]["total"])
    assert "GB received" not in output  # from other chips


@needs_cuda
@pytest.mark.exhaustive
def test_experts_compile_for_one_gpu():
    flags = ["--topology=h100:1", "--config.stages=('sft',)"]
    status, rows, output = compiled(*flags, compiler=CUDA, config="configs/tiny.py:qwen3_vl_moe")
    assert status == 0 and "It fits" in output and "sft step" in rows, output


@needs_libtpu
@pytest.mark.exhaustive
def test_gradients_alone_go_from_slice_to_slice():
    """The batch is split over the slices, and each has all of the parameters."""
    flags = ["--config.stages=('sft',)", "--config.sft.microbatch_size=8", "--topology=v5e:2x2"]
    status, rows, output = compiled(*flags, *WIDE, "--slices=2")
    assert status == 0, output
    assert "2 slices of v5e:2x2: 8 chips (data 2 x fsdp 4), 15.75 GiB each" in output
    # A chip has a quarter of the parameters and of two moments, in float32. Of its quarter of the
    # gradients it receives half, and half of their sum, in each of 8 microbatches.
    quarter = float(rows["sft step"]["arguments"]) * GIB / 3 / 1e9
    assert float(rows["sft step"][ACROSS]) == pytest.approx(8 * quarter, rel=0.2)


@needs_libtpu
@pytest.mark.exhaustive
def test_what_cannot_fit_says_so():
    flags = ["--config.stages=('sft',)", "--config.sft.row_tokens=8192"]
    flags += ["--config.sft.batch_size=512", "--config.sft.microbatch_size=512"]
    status, rows, output = compiled("--topology=v5e:1x1", *flags)
    assert status == 1, output
    assert float(rows["sft step"]["headroom"]) < 0
    assert "It does not fit: 'sft step' needs" in output
    assert "refused by the compiler: sft step" in output


MISTAKES = (
    (["--topology=v5e:3x5x7"], "--topology 'v5e:3x5x7' cannot be compiled for: "),
    (["--topology=v5e:2x2", "--config.mesh.tensor=3"], "mesh.data=1 x mesh.fsdp=-1 x"),
    (
        [
            *("--topology=v5e:2x2", "--slices=2", "--config.mesh.data=1"),
            *("--config.mesh.fsdp=1", "--config.mesh.tensor=8"),
        ],
        "mesh.data=1 must be a multiple of 2 slices, between which the network is slow;",
    ),
    (
        ["--topology=v5e:2x2", "--config.stages=('export',)"],
        'stages must contain "sft", "rl" or "evaluate", got',
    ),
    ([*RL, "--mean_response=-1"], "--mean_response must be positive, in tokens, got -1"),
    ([*RL, "--mean_response=9"], "data.buckets ((48, 64),) hold none "),
    ([*RL, "--estimate", "--price=2"], "--price is of the least time; leave out "),
)
# All of them in one process, which may load libtpu: this one must not.
LEAVE = """
import contextlib, io, json, sys
from absl.testing import flagsaver
from care_jax.aot import __main__ as aot
for given in json.loads(sys.argv.pop()):
    sys.argv[1:] = ["--config=configs/tiny.py", *given]
    error, status = io.StringIO(), None
    with flagsaver.flagsaver(), contextlib.redirect_stderr(error):
        try:
            aot.run_main()
        except SystemExit as ended:
            status = ended.code
    print(json.dumps([status, error.getvalue()]))
"""


@needs_libtpu
def test_a_mistake_is_one_line():
    command = [sys.executable, "-c", LEAVE, json.dumps([flags for flags, _ in MISTAKES])]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(LIBTPU))
    ended = list(map(json.loads, result.stdout.splitlines()))
    assert len(ended) == len(MISTAKES), result.stderr
    for (_, message), (status, error) in zip(MISTAKES, ended, strict=True):
        (line,) = [line for line in error.splitlines() if line.startswith("error")]
        assert status == 2 and line.startswith(f"error: {message}") and "Traceback" not in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--topology=v5e:2x2", "--config.rl.nothing=3"], "no such key: --config.rl.nothing"),
        (["--topology=v5e:2x2", "--config=configs/tiny.py:gpt"], "configs/tiny.py:19: configs/ti"),
        ([], "--topology is missing: Chips"),
    ],
)
def test_a_mistake_in_the_flags_is_one_line(flags, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)  # of the configuration
    monkeypatch.setattr(sys, "argv", ["aot", "--config=configs/tiny.py", *flags])
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:  # forgets the flags
        aot.run_main()
    output = capsys.readouterr().err
    assert ended.value.code == 2
    assert output.startswith(f"error: {message}") and output.count("\n") == 1


def program(name, *sizes, seconds=1.0, **fields):
    names = "arguments", "outputs", "temporaries", "beside"
    held = {key: int(size * GIB) for key, size in zip(names, sizes, strict=True)}
    return Program(name, Work(flops=20 * seconds, tokens=10), **held, **fields)


def fit_of(*programs, **fields):
    sizes = {"data": 1, "fsdp": 2, "tensor": 1, "sequence": 1}
    mesh = types.SimpleNamespace(size=2, shape=sizes)
    chip = Chip(flops=10, hbm=10 * GIB, hbm_bandwidth=1, ici_bandwidth=1, dcn_bandwidth=1)
    return Fit("v5e:2x1", chip, mesh, programs, 64, **fields)


def test_the_fullest_program_decides_with_what_the_run_keeps_beside_it():
    small, large = program("sft step", 1, 2, 3, 0), program("rl update", 1, 1, 4, 3)
    assert fit_of(small, large).is_fitting and fit_of(small, large).fullest is large
    too_large = program("rl score", 1, 1, 4, 5)
    assert not fit_of(small, too_large, large).is_fitting
    assert not fit_of(program("sft step", 0, 0, 9, 0, is_refused=True)).is_fitting
    text = aot.report(fit_of(small, too_large))
    assert "It does not fit: 'rl score' needs 11.00 GiB of 10.00, 1.00 too many." in text
    assert "It fits, with 1.00 GiB to spare in 'rl update'." in aot.report(fit_of(small, large))


STEP = types.SimpleNamespace(
    num_microbatches=6,
    updates=(0, 0),
    train_fill=0.75,
    decoding=types.SimpleNamespace(num_steps=1330),
    least_decode_steps=579.6,
)


def test_a_step_takes_all_calls_of_its_programs():
    programs = program("rl decode", 0, 0, 0, 0, num_calls=4), program("rl update", 0, 0, 0, 0)
    result = fit_of(program("sft step", 0, 0, 0, 0, seconds=7.0), *programs)
    assert (result.step_seconds("sft"), result.step_seconds("rl")) == (7, 5)
    assert "A step of 'sft' takes at least 7.0 s." in aot.report(result)


def test_the_step_of_a_mean_is_told_beside_the_worst():
    """Two waves of 3 and 4 s where the longest takes 10."""
    waves = Work(flops=60), Work(flops=80)
    decode = program("rl decode", 0, 0, 0, 0, seconds=10.0, num_calls=2, expected=waves)
    result = fit_of(decode, expected=STEP, mean_response=600.0)
    assert (result.step_seconds("rl"), result.step_seconds("rl", is_expected=True)) == (20, 7)
    text = aot.report(result)
    assert "A step of 'rl' takes at least 20.0 s (worst case), 7.0 s at a mean of 600 tok" in text
    line = "The mean step of 'rl': 6 microbatches in 2 updates, train_fill 0.750, "
    assert f"{line}1330 decode steps, 580 if no row were idle." in text
    assert "rl.carry_over" not in text
    result = dataclasses.replace(result, carried=3 * GIB)
    assert "rl.carry_over keeps up to 3.00 GiB per chip of slots on it" in aot.report(result)
    result = dataclasses.replace(result, is_offloaded=True)
    assert "of slots in host memory between steps." in aot.report(result)


def test_bytes_between_chips_are_told_by_program_and_collective():
    """2 GB once and 1 GB in each of 3 microbatches, twice a step; 5 GB are expected."""
    received = Received(Counter({"all-gather": 2 * 10**9}), Counter({"all-reduce": 10**9}))
    update = program("rl update", 0, 0, 0, 0, num_calls=2, received=received)
    work = Work(ici_bytes=5e9, num_passes=3)
    update = dataclasses.replace(update, work=work, expected=(Work(ici_bytes=5e9),))
    lines = aot.report(fit_of(update, expected=STEP, mean_response=600.0)).splitlines()
    row = [line for line in lines if line.startswith("| rl update")][-1]
    cells = ["2.00", "0.00", "3.00", "0.00", "0.00", "5.00", "2", "10.0", "5.0"]
    assert [cell.strip() for cell in row.strip("| ").split("|")] == ["rl update", *cells]
    assert "GB received" not in aot.report(fit_of(program("rl update", 0, 0, 0, 0)))


def test_what_comes_from_other_slices_is_a_column_where_there_are_any():
    received = Received(Counter({"all-reduce": 10**9}), Counter())
    work = Work(ici_bytes=1e9, dcn_bytes=2.5e8, num_passes=3)
    update = program("rl update", 0, 0, 0, 0, num_calls=2, received=received)
    update = dataclasses.replace(update, work=work)
    lines = aot.report(fit_of(update, num_slices=4)).splitlines()
    assert lines[0].startswith("4 slices of v5e:2x1: 2 chips (fsdp 2)")
    row = [line for line in lines if line.startswith("| rl update")][-1]
    assert row.rstrip("| ").endswith("0.50")
    assert "slices" not in aot.report(fit_of(update)).partition("received")[2]
    assert work.seconds(Chip(1, 1, 1, 4e9, 5e8), 1) == 0.5  # the slower network decides


def test_all_steps_have_a_price():
    """200 steps of 36 s at worst and 18 s at the mean, on 2 chips."""
    decode = program("rl decode", 0, 0, 0, 0, seconds=36.0, expected=(Work(flops=360),))
    assert aot.price_line(fit_of(decode), 200, None) == (
        "200 steps of 'rl' take at least 2.0 h, 4 chip hours, at worst."
    )
    result = fit_of(decode, expected=STEP, mean_response=600.0)
    assert aot.price_line(result, 200, 1.5) == (
        "200 steps of 'rl' take at least 1.0 h, 2 chip hours, at that mean: "
        "3 at 1.5 for a chip hour."
    )


RESHARD = """
import pathlib
from care_jax.aot import compile, shapes, step_sizes
from care_jax.aot.topology import find_topology
from care_jax.devices.sharding import make_mesh
from care_jax.run.run import open_run
from configs import qwen25vl_7b
chips, config = find_topology("v5e:8x8"), qwen25vl_7b.get_config()
mesh = make_mesh(**config.mesh, devices=chips.devices, slices=chips.slices)
run = open_run(config, pathlib.Path(), mesh=mesh, policy=shapes.policy(config))
compile._decode_programs = lambda *_: [compile.Program("decode", compile.Work())]
program, *_ = compile._rollout_programs(run, chips.chip, step_sizes.largest_step(run), None)[0]
print(program.total / chips.chip.hbm)
"""


@needs_libtpu
@pytest.mark.exhaustive
def test_the_7b_is_resharded_in_the_memory_of_a_v5e():
    """With another order of the mesh axes of "embed", XLA gathers four times as much."""
    command = [sys.executable, "-c", RESHARD]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(LIBTPU))
    assert result.returncode == 0, result.stderr
    assert 0.3 < float(result.stdout.splitlines()[-1]) < 0.5
