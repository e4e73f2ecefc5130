"""Seconds of the kernels of a compiled GPU program, from the bytes and products in its text.

A kernel takes the longer of its products and of the bytes that it touches, each at a share of the
chip's peak. Of a buffer that it slices, gathers from or updates in place, it touches the slices. A
kernel that is shorter than a launch takes as long as a launch.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from care_jax.aot.collectives import called, computations, num_bytes
from care_jax.aot.cycles import PriceKernel

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.+?) ([\w-]+)\((.*?)\)")
_OPERAND = re.compile(r"%([\w.-]+)")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]+)\}")
_DIMENSIONS = re.compile(r"\[([\d,]*)\]")
# Instructions that launch no kernel of their own.
_FREE = re.compile(
    r"parameter|constant|tuple|get-tuple-element|bitcast|after-all|(?:partition|replica)-id|while|"
    r"call|conditional|[\w-]+-done"
)
_SLICES = "slice", "dynamic-slice", "gather"
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that is written


@dataclasses.dataclass(frozen=True)
class Peaks:
    """What kernels reach of a GPU."""

    flops: float  # per second, of products
    bandwidth: float  # bytes per second to and from HBM
    launch: float  # seconds between two launches


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    operation: str
    operands: list[str]
    line: str
    is_root: bool


def kernels_of(hlo: str, peaks: Peaks) -> PriceKernel:
    """Prices the instructions of a program compiled for GPUs: "compute", and "latency" above it."""
    lines_of, _ = computations(hlo)
    found = {
        name: {each.name: each for line in lines for each in _parse(line)}
        for name, lines in lines_of.items()
    }

    def price(computation: str, line: str) -> dict[str, float]:
        for each in _parse(line):
            if _FREE.fullmatch(each.operation):
                continue
            size = _touched(each, found[computation], found)
            busy = max(
                size / peaks.bandwidth, _flops(each, found[computation], found) / peaks.flops
            )
            return {"compute": busy, "latency": max(peaks.launch - busy, 0.0)}
        return {}

    return price


def _parse(line: str) -> Iterator[_Instruction]:
    if match := _INSTRUCTION.match(line):
        root, name, shape, operation, operands = match.groups()
        yield _Instruction(name, shape, operation, _OPERAND.findall(operands), line, bool(root))


_Instructions = Mapping[str, _Instruction]


def _flops(each: _Instruction, beside: _Instructions, found: Mapping[str, _Instructions]) -> float:
    """FLOPs of the products of an instruction, also of those inside a fusion."""
    if each.operation == "dot":
        left = beside[each.operands[0]].shape
        dims = _CONTRACTED.search(each.line)
        contracted = [int(n) for n in dims[1].split(",")] if dims else []
        sizes = _dimensions(left)
        return 2 * math.prod(_dimensions(each.shape)) * math.prod(sizes[n] for n in contracted)
    if each.operation != "fusion":
        return 0.0
    inner = [found[name] for name in called(each.line)]
    return sum(_flops(other, body, found) for body in inner for other in body.values())


def _dimensions(shape: str) -> list[int]:
    match = _DIMENSIONS.search(shape)
    return [int(n) for n in match[1].split(",") if n] if match else []


def _touched(
    each: _Instruction, beside: _Instructions, found: Mapping[str, _Instructions]
) -> float:
    """Bytes that an instruction reads and writes."""
    sizes = [num_bytes(beside[name].shape) for name in each.operands if name in beside]
    if each.operation != "fusion":
        return num_bytes(each.shape) + sum(sizes)
    (name,) = called(each.line)
    body = found[name]
    written = 0
    root = next(other for other in body.values() if other.is_root)
    outputs = root.operands if root.operation == "tuple" else [root.name]
    for output in map(body.get, (_origin(name, body) for name in outputs)):
        if output is not None:
            updated = _UPDATES.get(output.operation)
            shape = output.shape if updated is None else body[output.operands[updated]].shape
            written += num_bytes(shape)
    users: dict[str, list[tuple[_Instruction, int]]] = {}
    for other in body.values():
        if other.operation != "bitcast":
            for position, operand in enumerate(other.operands):
                users.setdefault(_origin(operand, body), []).append((other, position))
    parameters = sorted(
        (other for other in body.values() if other.operation == "parameter"),
        key=lambda other: int(other.line.split("parameter(")[1].split(")")[0]),
    )
    return written + sum(
        min(size, _read(users.get(parameter.name, []), size))
        for parameter, size in zip(parameters, sizes, strict=False)
    )


def _read(users: list[tuple[_Instruction, int]], size: int) -> int:
    """Bytes that a fusion reads of a parameter of this size."""
    total = 0
    for user, position in users:
        if position or user.operation not in (*_SLICES, *_UPDATES):
            return size
        if user.operation in _SLICES:
            total += num_bytes(user.shape)
    return total


def _origin(name: str, body: _Instructions) -> str:
    """The instruction that a bitcast, or a chain of them, renames."""
    while name in body and body[name].operation == "bitcast":
        name = body[name].operands[0]
    return name
