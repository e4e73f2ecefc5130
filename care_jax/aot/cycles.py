"""Estimated seconds of a compiled program, read from its text.

A TPU's compiler writes estimated cycles at every fusion and copy that it schedules; `gpu_kernels`
prices those of a GPU. Four kinds of instruction are priced by hand:

    gathers, scatters    of a TPU: bytes that they write, each read first
    Pallas kernels       by the caller, from the shapes of their results
    collectives          synchronous: received bytes over the links, and a latency;
                         asynchronous: what the compute between start and end does not cover
    prefetches           free; they run beside the fusions

A conditional counts its dearest branch, a loop of unknown length one iteration (`each_pass`).
Seconds are kept by part of the model and by kind, because a batch that is smaller than the compiled
one shrinks compute but not the gathered weights.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from care_jax.aot.collectives import called, chips_of, collective_of, computations, num_bytes, walk

Key = tuple[str, str]  # one of PARTS, one of KINDS
# (computation, line of an instruction) -> seconds by kind: of the chip's own kernels.
PriceKernel = Callable[[str, str], dict[str, float]]
KINDS = ("compute", "gathers", "kernels", "network", "latency")
PARTS = ("tower", "logits", "decoder")
# The function in whose call an instruction was traced; the decoder has the others.
PART_OF = {"encode_images": "tower", "token_logprobs": "logits", "policy_logits": "logits"}
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.+?) ([\w-]+)\(")
_BEGIN = re.compile(r"%?async-collective-start([\w.-]*) = |%?([\w.-]+) = .+? [\w-]+-start\(")
_END = re.compile(r"%?async-collective-done([\w.-]*) = | [\w-]+-done\(%?([\w.-]+)\)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_PALLAS = re.compile(r'"(?:tpu_custom_call|__gpu\$xla.gpu.triton)"')
_MOVES = re.compile(r"(?:gather|scatter)[\w.-]* = .* fusion\(")


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the compiler's text leaves to be priced."""

    link: float  # bytes per second that a chip receives in a collective
    latency: float  # seconds of a synchronous collective of no bytes
    clock: float = 0.0  # cycles per second of a TPU
    gather: float = 0.0  # bytes per second read and written by gathers and scatters of a TPU


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Estimated seconds of one call of a program."""

    once: dict[Key, float]  # outside loops of unknown length
    each_pass: dict[Key, float]  # per iteration of such a loop


def cycles_of(rates: Rates) -> PriceKernel:
    """Prices the instructions of a program compiled for TPUs by the compiler's cycles."""

    def price(_: str, line: str) -> dict[str, float]:
        if cycles := _CYCLES.search(line):
            return {"compute": int(cycles[1]) / rates.clock}
        if _MOVES.search(line) and (found := _NAME.match(line)):
            return {"gathers": 2 * num_bytes(found[2]) / rates.gather}
        return {}

    return price


def seconds(
    hlo: str, rates: Rates, pallas: Callable[[str, str], float], kernels: PriceKernel
) -> Seconds:
    """Estimated seconds of a program; `hlo` is its `compiled.as_text()`.

    `pallas` prices a Pallas kernel from its part and the shape of its results as text, `kernels`
    all others: `cycles_of` or `gpu_kernels.kernels_of`.

    Raises:
        ValueError: the text has no entry computation or no stack frames, or groups of a collective
            cannot be parsed.
    """
    lines_of, _ = computations(hlo)
    fused = {name for lines in lines_of.values() for line in lines for name in _fused(line)}
    parts, covers = _parts(hlo, lines_of), _covers(lines_of, kernels)
    num_chips = chips_of(hlo)

    def price(computation: str, line: str) -> dict[Key, float]:
        if (found := _NAME.match(line)) is None:
            return {}
        name, shape, operation = found.groups()
        part = parts[computation, name]
        if collective := collective_of(computation, line, num_chips):
            alone = collective[1] / rates.link
            cover = covers.get(computation, covers.get(name))
            if cover is not None:
                return {(part, "network"): max(alone - cover, 0)}
            return {(part, "network"): alone, (part, "latency"): rates.latency}
        if computation in fused:
            return {}
        if operation == "custom-call" and _PALLAS.search(line):
            return {(part, "kernels"): pallas(part, shape)}
        return {(part, kind): time for kind, time in kernels(computation, line).items()}

    return Seconds(*walk(hlo, price))


def _fused(line: str) -> list[str]:
    """The computations inside a fusion; their instructions have no cycles of their own."""
    return list(called(line)) if " fusion(" in line else []


def _covers(lines_of: dict[str, list[str]], kernels: PriceKernel) -> dict[str, float]:
    """Seconds of compute between start and end of each asynchronous collective.

    By the name of its instruction or, if the start is a fusion, of the computation inside.
    """
    covers: dict[str, float] = {}
    for computation, lines in lines_of.items():
        began: dict[str, tuple[list[str], float]] = {}
        passed = 0.0
        for line in lines:
            if begin := _BEGIN.search(line):
                names = _fused(line) or [begin[2]]
                began[begin[1] if begin[2] is None else begin[2]] = names, passed
            elif end := _END.search(line):
                names, start = began.pop(end[1] if end[2] is None else end[2], ([], 0.0))
                covers |= dict.fromkeys(names, passed - start)
            else:
                passed += kernels(computation, line).get("compute", 0.0)
    return covers


def _parts(hlo: str, lines_of: dict[str, list[str]]) -> dict[tuple[str, str], str]:
    """The part of each instruction, by computation and name.

    An instruction that the compiler added belongs to the part of the one before it.
    """
    part_of_frame, parts = _part_of_frame(hlo), {}
    for computation, lines in lines_of.items():
        part = PARTS[-1]
        for line in lines:
            if frame := _FRAME.search(line):
                part = part_of_frame.get(int(frame[1]), part)
            if found := _NAME.match(line):
                parts[computation, found[1]] = part
    return parts


def _part_of_frame(hlo: str) -> dict[int, str]:
    """The part of each stack frame of the text's tables: that of the innermost named function."""

    def table(title: str, row: str) -> dict[int, tuple[str, ...]]:
        lines = re.search(rf"^{title}\n((?:\d+ .*\n)+)", hlo, re.MULTILINE)
        found = re.findall(rf"^(\d+) {row}", lines[1] if lines else "", re.MULTILINE)
        return {int(number): tuple(values) for number, *values in found}

    functions = table("FunctionNames", '"(.*)"')
    locations = table("FileLocations", r"\{.*function_name_id=(\d+)")
    frames = table("StackFrames", r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
    if not frames:
        raise ValueError(
            "the compiled program's text has no StackFrames; set jax_include_full_tracebacks_in_"
            "locations to true, its default"
        )
    first = min(frames)
    offset = int(frames[first][1] or 0)  # of the root's parent: frame numbers may count from 1
    parts: dict[int, str] = {}
    for number, (location, parent) in sorted(frames.items()):
        function = functions[int(locations[int(location)][0])][0].split(".")[0]
        inherited = parts.get(int(parent or 0) - offset, PARTS[-1])
        parts[number] = PART_OF.get(function, inherited)
    return parts
