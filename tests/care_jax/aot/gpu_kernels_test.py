"""Kernels of made-up programs in the notation of the GPU compiler, against sums done by hand."""

import pytest

from care_jax.aot.collectives import computations
from care_jax.aot.cycles import Rates, seconds
from care_jax.aot.gpu_kernels import Peaks, kernels_of

PEAKS = Peaks(flops=1000.0, bandwidth=10.0, launch=2.0)
TEXT = """HloModule jit_f, num_partitions=2

FunctionNames
1 "main"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%nested (a: bf16[4,8], b: bf16[8,6]) -> f32[4,6] {
  %a = bf16[4,8]{1,0} parameter(0)
  %b = bf16[8,6]{1,0} parameter(1)
  ROOT %dot = f32[4,6]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%product (x: bf16[4,8], y: bf16[8,6]) -> f32[4,6] {
  %x = bf16[4,8]{1,0} parameter(0)
  %y = bf16[8,6]{1,0} parameter(1)
  ROOT %n = f32[4,6]{1,0} fusion(%x, %y), kind=kCustom, calls=%nested
}

%sliced (p: f32[100], i: s32[]) -> f32[5] {
  %p = f32[100]{0} parameter(0)
  %i = s32[] parameter(1)
  %r = f32[10,10]{1,0} bitcast(%p)
  ROOT %s = f32[1,5]{1,0} dynamic-slice(%r, %i, %i), dynamic_slice_sizes={1,5}
}

%updated (p: f32[100], u: f32[5], i: s32[]) -> f32[100] {
  %u = f32[5]{0} parameter(1)
  %p = f32[100]{0} parameter(0)
  %i = s32[] parameter(2)
  %w = f32[100]{0} dynamic-update-slice(%p, %u, %i)
  ROOT %t = (f32[100]{0}) tuple(%w)
}

%whole (p: f32[100], i: s32[]) -> f32[100] {
  %p = f32[100]{0} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[5]{0} dynamic-slice(%p, %i), dynamic_slice_sizes={5}
  ROOT %a = f32[100]{0} add(%p, %s)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %x = bf16[4,8]{1,0} parameter(0)
  %y = bf16[8,6]{1,0} parameter(1)
  %big = f32[100]{0} parameter(2)
  %u = f32[5]{0} parameter(3)
  %i = s32[] parameter(4)
  LINE
}
"""
# A kernel's bytes, at 10 bytes per second.
CASES = {
    "%f = f32[4,6]{1,0} fusion(%x, %y), kind=kCustom, calls=%product": 64 + 96 + 96,
    "%f = f32[1,5]{1,0} fusion(%big, %i), kind=kLoop, calls=%sliced": 20 + 20 + 4,
    "%f = (f32[100]{0}) fusion(%big, %u, %i), kind=kLoop, calls=%updated": 20 + 20 + 4,
    "%f = f32[100]{0} fusion(%big, %i), kind=kLoop, calls=%whole": 400 + 400 + 4,
    "%f = f32[100]{0} copy(%big)": 800,
}


@pytest.mark.parametrize(("line", "size"), CASES.items())
def test_a_kernel_takes_the_bytes_that_it_touches(line, size):
    price = kernels_of(TEXT.replace("LINE", line), PEAKS)("main", "  " + line)
    assert price == {"compute": pytest.approx(size / 10), "latency": 0}


def test_a_kernel_takes_at_least_a_launch_and_what_is_no_kernel_nothing():
    price = kernels_of(TEXT, PEAKS)
    short = price("main", "  %f = s32[] copy(%i)")
    assert short == {"compute": 0.8, "latency": pytest.approx(2 - 0.8)}
    assert price("main", "  %f = f32[100]{0} bitcast(%big)") == {}
    assert price("main", "  %f = f32[100]{0} all-gather-done(%big)") == {}


def test_products_count_inside_nested_fusions():
    slow = Peaks(flops=1.0, bandwidth=1e9, launch=0.0)
    line = "  " + next(iter(CASES))
    assert kernels_of(TEXT.replace("  LINE", line), slow)("main", line)["compute"] == 2 * 4 * 6 * 8


def test_kernels_cover_an_asynchronous_collective():
    """100 bytes take 5 s, of which copies of 8 s or of 0.8 s are in between."""
    lines = """%g = (f32[25]{0}, f32[50]{0}) all-gather-start(%u), replica_groups=[1,2]<=[2]
  %f = {copy}
  %d = f32[50]{0} all-gather-done(%g)
  %k = f32[100]{0} custom-call(%big), custom_call_target="__gpu$xla.gpu.triton" """
    rates = Rates(link=20.0, latency=1.0)
    for copy, exposed in (("f32[100]{0} copy(%big)", 0.0), ("s32[] copy(%i)", 5 - 0.8)):
        text = TEXT.replace("LINE", lines.replace("{copy}", copy))
        assert "main" in computations(text)[0]
        found = seconds(text, rates, lambda part, shape: 7.0, kernels_of(text, PEAKS)).once
        assert found["decoder", "network"] == pytest.approx(exposed)
        assert found["decoder", "kernels"] == 7.0
