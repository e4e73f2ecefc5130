"""Seconds of made-up programs in the notation of the TPU compiler, against sums done by hand."""

import pytest

from care_jax.aot.cycles import PART_OF, Rates, cycles_of, seconds
from care_jax.learning import logprobs
from models import backbone

RATES = Rates(clock=1000.0, link=100.0, latency=0.5, gather=10.0)
GROUPS = "replica_groups=[1,2]<=[2]"
TABLES = """
FunctionNames
1 "main"
2 "encode_images.<locals>.step"
3 "policy_logits"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1 end_line=1 column=1 end_column=1}
2 {file_name_id=1 function_name_id=2 line=2 end_line=2 column=1 end_column=1}
3 {file_name_id=1 function_name_id=3 line=3 end_line=3 column=1 end_column=1}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=1 parent_frame_id=3}
4 {file_location_id=3 parent_frame_id=2}

"""


def program(entry, others=""):
    head = "HloModule jit_f, is_scheduled=true, num_partitions=2\n"
    return f"{head}{TABLES}{others}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{entry}\n}}\n"


def line(name, operation, cycles=None, frame=None, shape="f32[8]{0}", more=""):
    text = f"  %{name} = {shape} {operation}{more}"
    text += f', metadata={{op_name="f" stack_frame_id={frame}}}' if frame else ""
    return text + (f', backend_config={{"estimated_cycles":"{cycles}"}}' if cycles else "")


def priced(text, kernel=lambda part, shape: 0.0):
    found = seconds(text, RATES, kernel, cycles_of(RATES))
    return {k: v for k, v in found.once.items() if v}, {k: v for k, v in found.each_pass.items()}


def test_cycles_belong_to_the_function_that_was_traced():
    """Frame 3 is called by the tower. A copy of the compiler's own goes with what is before it."""
    lines = [
        line("a", "fusion(%p), kind=kLoop", 1000, frame=1),
        line("b", "fusion(%a), kind=kLoop", 2000, frame=3),
        line("c", "copy(%b)", 3000),
        line("d", "fusion(%c), kind=kLoop", 4000, frame=4),
    ]
    once, each_pass = priced(program("\n".join(lines)))
    assert each_pass == {} and once == {
        ("decoder", "compute"): 1.0,
        ("tower", "compute"): 5.0,
        ("logits", "compute"): 4.0,
    }


def test_a_loop_multiplies_and_one_of_unknown_length_is_a_pass():
    others = "%body (x: f32[8]) -> f32[8] {\n" + line("a", "copy(%x)", 500, frame=1) + "\n}\n"
    others += "%while_condition (x: f32[8]) -> pred[] {\n"
    others += "  ROOT %c = pred[] compare(%x, %n), direction=LT\n}\n"
    loop = "while(%p), condition=%while_condition, body=%body"
    known = ', backend_config={"known_trip_count":{"n":"6"}}'
    once, each_pass = priced(program(line("w", loop, more=known), others))
    assert once == {("decoder", "compute"): 3.0} and each_pass == {}
    once, each_pass = priced(program(line("w", loop), others))
    assert once == {} and each_pass == {("decoder", "compute"): 0.5}


def test_a_conditional_counts_its_dearest_branch():
    branch = "%{} (x: f32[8]) -> f32[8] {{\n{}\n}}\n"
    others = branch.format("near", line("a", "copy(%x)", 100, frame=1))
    others += branch.format("far", line("b", "copy(%x)", 900, frame=2))
    entry = line("c", "conditional(%i, %p, %p), branch_computations={%near, %far}")
    assert priced(program(entry, others))[0] == {("tower", "compute"): 0.9}


def test_a_synchronous_collective_is_exposed():
    """64 floats gathered by two chips: 128 bytes from the other one."""
    entry = line("g", f"all-gather(%p), {GROUPS}, dimensions={{0}}", frame=4, shape="f32[64]{0}")
    assert priced(program(entry))[0] == {
        ("logits", "network"): pytest.approx(1.28),
        ("logits", "latency"): 0.5,
    }


@pytest.mark.parametrize(("cycles", "exposed"), [(1000, 0.28), (1300, 0.0)])
def test_an_asynchronous_collective_is_exposed_where_no_compute_covers_it(cycles, exposed):
    gather = f"all-gather(%x), {GROUPS}, dimensions={{0}}"
    head = "%{} (x: f32[32]) -> f32[64] {{\n"
    inside = line("g", gather, frame=1, shape="f32[64]{0}")
    others = head.format("fused_start") + inside + "\n}\n"
    others += head.format("async_collective_fusion.1") + inside + "\n}\n"
    entry = [
        line("async-collective-start.1", "fusion(%p), kind=kCustom, calls=%fused_start"),
        line("m", "fusion(%p), calls=%async_collective_fusion.1", cycles, frame=1),
        line("async-collective-done.1", "fusion(%m), kind=kCustom, calls=%fused_done"),
        line("after", "copy(%p)", 5000, frame=1),
    ]
    once, _ = priced(program("\n".join(entry), others))
    assert once.pop(("decoder", "compute")) == pytest.approx(cycles / 1000 + 5)
    assert once.get(("decoder", "network"), 0.0) == pytest.approx(exposed)
    pair = [
        line("s", f"all-gather-start(%p), {GROUPS}", frame=1, shape="(f32[32]{0}, f32[64]{0})"),
        line("m", "fusion(%p), kind=kLoop", cycles, frame=1),
        line("e", "all-gather-done(%s)", frame=1, shape="f32[64]{0}"),
    ]
    once, _ = priced(program("\n".join(pair)))
    assert once.get(("decoder", "network"), 0.0) == pytest.approx(exposed)


def test_what_has_no_cycles_is_priced_by_hand():
    others = "%fused (x: f32[8]) -> f32[8] {\n" + line("inner", "copy(%x)", 700) + "\n}\n"
    kernel = 'custom-call(%p), custom_call_target="tpu_custom_call"'
    lines = [
        line("gather_fusion.2", "fusion(%p), kind=kCustom, calls=%fused", frame=2),
        line("k", kernel, frame=2, shape="bf16[4,8]{1,0}"),
        line("copy-start.1", "copy-start(%p)", frame=2),
    ]
    shapes = []
    once, _ = priced(program("\n".join(lines), others), lambda *of: shapes.append(of) or 2.5)
    assert once == {("tower", "gathers"): pytest.approx(6.4), ("tower", "kernels"): 2.5}
    assert shapes == [("tower", "bf16[4,8]{1,0}")]


def test_the_functions_that_tell_parts_apart_exist():
    assert all(hasattr(backbone, name) or hasattr(logprobs, name) for name in PART_OF)


def test_a_text_without_frames_is_refused():
    text = program(line("a", "copy(%p)", 1, frame=1)).replace("StackFrames", "Other")
    with pytest.raises(ValueError, match="no StackFrames"):
        priced(text)
