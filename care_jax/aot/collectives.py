"""Bytes that one chip receives in the collectives of a compiled program, from its HLO text.

With a result of s bytes in groups of g chips, a chip receives at least

    all-gather          s (g-1)/g       the shards of all other chips
    reduce-scatter      s (g-1)         its shard from every other chip (s is one shard)
    all-reduce          2 s (g-1)/g     a reduce-scatter, then an all-gather
    all-to-all          s (g-1)/g
    collective-permute  s

A collective in a loop counts once per iteration. The length of a loop is the compiler's annotation
or the constant in its condition. For loops of unknown length, over microbatches or decode steps,
the caller passes it.

On TPUs a reduce-scatter is a fusion of an all-reduce and slices, with both in its name. An
asynchronous collective is repeated in several fusions: its start, the matmuls that cover it, which
may be in an inner loop, and its end. Only the start counts.

TPU slices and GPU nodes are connected by a slower network. If a group of g chips spans k of them,
the share (k-1)/(g-1) of these bytes crosses it, because the chips of a slice together receive the
data of the other slices once. A TPU program covers one slice; collectives between slices are a
`send` to the host, which carries them out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

Prices = dict[Any, float]  # by kind, such as that of a collective
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_BETWEEN = "between slices"
_OPERATIONS = "|".join((*COLLECTIVES, "send", "while", "fusion", "call", "conditional", "async"))
_INSTRUCTION = re.compile(rf"^\s+(?:ROOT )?%?[\w.-]+ = (.+?) ({_OPERATIONS})(-start)?\(")
# A fusion that repeats an asynchronous collective of a TPU: its end, or a matmul that covers it.
_REPEATED = re.compile(r"%?async-collective-done[\w.-]* = | calls=%?async_collective_fusion")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_LOOP = re.compile(r"condition=%?([\w.-]+), body=%?([\w.-]+)")
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Received:
    """Bytes that one chip receives in a call of a program, by collective."""

    once: Counter[str]  # outside loops of unknown length
    each_pass: Counter[str]  # per iteration of such a loop; nested ones are assumed to run once

    def by_collective(self, num_passes: int) -> dict[str, int]:
        """Bytes of each collective; loops of unknown length run `num_passes` times."""
        return {kind: self.once[kind] + num_passes * self.each_pass[kind] for kind in COLLECTIVES}

    def between_slices(self, num_passes: int) -> int:
        """Bytes from other TPU slices or GPU nodes, likewise."""
        return self.once[_BETWEEN] + num_passes * self.each_pass[_BETWEEN]

    def total(self, num_passes: int) -> int:
        """Bytes in this number of passes, of all collectives."""
        return sum(self.by_collective(num_passes).values())


def received(hlo: str, num_slices: int = 1, chips_per_slice: int = 1) -> Received:
    """Bytes that one chip receives in a program; `hlo` is its `compiled.as_text()`.

    A slice is a TPU slice or GPU node; its chips have consecutive numbers.

    Raises:
        ValueError: the text has no entry computation, or groups that cannot be parsed.
    """
    num_chips = chips_of(hlo)

    def price(computation: str, line: str) -> Prices:
        if found := collective_of(computation, line, num_chips):
            kind, size, groups = found
            share = _share_between(groups, chips_per_slice) if num_slices > 1 else 0
            return {kind: size, _BETWEEN: int(size * share)}
        if (found := _INSTRUCTION.match(line)) and found[2] == "send":
            return {_BETWEEN: _bytes_to_slices(line, found[1], num_slices)}
        return {}

    sums = walk(hlo, price)
    return Received(*(Counter({kind: int(n) for kind, n in each.items()}) for each in sums))


def walk(hlo: str, price: Callable[[str, str], Prices]) -> tuple[Prices, Prices]:
    """Sums of the prices of all instructions of a program: once, and per pass.

    As in `Received`, those per pass are of an iteration of the loops of unknown length. `price`
    takes the name of a computation and the line of one of its instructions, without what that
    calls; its prices have one unit, because a conditional counts its dearest branch.

    Raises:
        ValueError: the text has no entry computation.
    """
    lines_of, entry = computations(hlo)
    if entry is None:
        raise ValueError("the compiled program's text has no ENTRY computation")

    @functools.cache
    def of(name: str) -> tuple[Prices, Prices]:
        once, each_pass = {}, {}
        for line in lines_of.get(name, ()):
            add(once, price(name, line))
            found = _INSTRUCTION.match(line)
            if found is None or _REPEATED.search(line):
                continue
            if found[2] == "while":
                condition, body = _LOOP.findall(line)[0]
                number = _num_passes(line, lines_of[condition])
                for part in (of(condition), of(body)):
                    # Nested loops of unknown length are assumed to run once.
                    add(each_pass if number is None else once, part[0], number or 1)
                    add(each_pass, part[1], number or 1)
            elif inner := called(line):
                parts = [of(other) for other in inner]
                # A conditional takes one branch.
                part = max(parts, key=lambda both: sum(both[0].values()) + sum(both[1].values()))
                add(once, part[0])
                add(each_pass, part[1])
        return once, each_pass

    return of(entry)


def add(total: Prices, prices: Mapping[Any, float], times: float = 1) -> None:
    """Adds `times` the prices to those in `total`."""
    for kind, price in prices.items():
        total[kind] = total.get(kind, 0) + times * price


def chips_of(hlo: str) -> int:
    """Number of chips that a program runs on."""
    return math.prod(map(int, re.findall(r"num_partitions=(\d+)", hlo)[:1])) or 1


def collective_of(
    computation: str, line: str, num_chips: int
) -> tuple[str, int, Int[np.ndarray, "n g"]] | None:
    """Kind, received bytes and groups of a collective; None for any other instruction."""
    found = _INSTRUCTION.match(line)
    if found is None or found[2] not in COLLECTIVES:
        return None
    shape, operation, is_start = found.groups()
    groups = _groups(line, num_chips)
    size = _bytes_received(shape, operation, bool(is_start), groups.shape[1])
    if operation == "all-reduce" and "all-reduce-scatter" in computation:
        # The chip keeps one slice, so there is no all-gather half of the all-reduce.
        return "reduce-scatter", size // 2, groups
    return operation, size, groups


def computations(hlo: str) -> tuple[dict[str, list[str]], str | None]:
    """The lines of each computation by name, and the name of the entry computation."""
    lines_of: dict[str, list[str]] = {}
    entry, lines = None, []
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            lines = lines_of.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.startswith("  "):
            lines.append(line)
    return lines_of, entry


def called(line: str) -> Sequence[str]:
    """Names of the computations that an instruction calls."""
    branches = _BRANCHES.search(line)
    return re.findall(r"[\w.-]+", branches[1]) if branches else _CALLED.findall(line)


def _num_passes(line: str, condition: Sequence[str]) -> int | None:
    """Iterations of a loop; None if known only at run time.

    Loops of known length count from 0 to a constant in steps of 1.
    """
    if known := _TRIPS.search(line):
        return int(known[1])
    root = next(line for line in condition if line.lstrip().startswith("ROOT"))
    operands = re.search(r" (?:compare|fusion)\(([^)]*)\)", root)
    if operands is None or ("compare(" in root and "direction=LT" not in root):
        return None
    names = re.findall(r"%?([\w.-]+)(?:,|$)", operands[1])
    constants = (
        re.match(r"^\s+%?([\w.-]+) = [su]\d+\[\]\S* constant\((\d+)\)", line) for line in condition
    )
    values = [int(found[2]) for found in constants if found and found[1] in names]
    return values[0] if len(values) == 1 else None


def _bytes_received(shape: str, operation: str, is_start: bool, group: int) -> int:
    """Bytes that a chip receives in one instruction over groups of `group` chips."""
    # The shape of a -start is (operands, results, ...). Up to JAX 0.10, that of all-reduce-start is
    # its result or a flat tuple of them; later its operands are a tuple, even a single one.
    if is_start and (operation != "all-reduce" or shape.startswith("((")):
        shape = _elements(shape)[1]
    factors = {"reduce-scatter": group - 1, "all-reduce": 2 * (group - 1) / group}
    factors["collective-permute"] = 1
    return int(num_bytes(shape) * factors.get(operation, (group - 1) / group))


def _share_between(groups: Int[np.ndarray, "n g"], chips_per_slice: int) -> float:
    """Share of a collective's bytes that comes from other slices, maximum over the groups."""
    num_spanned = max(len(set(group)) for group in (groups // chips_per_slice).tolist())
    return (num_spanned - 1) / max(groups.shape[1] - 1, 1)


def _bytes_to_slices(line: str, shape: str, num_slices: int) -> int:
    """Bytes that a chip receives in a collective between slices; 0 for any other `send`."""
    if (transfer := _TRANSFER.search(line)) is None:
        return 0
    share = (num_slices - 1) / num_slices
    factors = {"ALL_REDUCE": 2 * share, "ALL_GATHER": num_slices - 1}
    factors |= {"REDUCE_SCATTER": share, "ALL_TO_ALL": share}
    return int(num_bytes(_elements(shape)[0]) * factors.get(transfer[1], 1))


def _elements(shape: str) -> list[str]:
    """The elements of a tuple shape; an element may itself be a tuple."""
    parts, depth = [""], 0
    for letter in shape[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def num_bytes(shape: str) -> int:
    """Bytes of an array shape, or of all arrays in a tuple shape."""
    total = 0
    for dtype, sizes in _ARRAY.findall(shape):
        bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or ["0"])[0])
        total += bits * math.prod(int(size) for size in sizes.split(",") if size) // 8
    return total


def _groups(line: str, num_chips: int) -> Int[np.ndarray, "n g"]:
    """The chips of each group of a collective; a permutation's (source, target) pairs.

    Three notations: {{0,1},{2,3}}; [2,4]<=[8], groups x size, of all chips in order or transposed;
    mesh['a'=2,'b'=4] {'b'}, the axes that span a group, or a part of an axis as 'b':(1)2.
    """
    if pairs := re.search(r"source_target_pairs=\{([\d,{}]*)\}", line):
        return np.array(re.findall(r"(\d+),(\d+)", pairs[1]) or [(0, 0)], int)
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        spanned = {
            name: (int(before or 1), int(part or sizes[name]))
            for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", mesh[3])
        }
        shape, last = [], []
        for name, size in sizes.items():
            before, part = spanned.get(name, (size, 1))
            last.append(len(shape) + 1)
            shape += [before, part, size // before // part]
        order = [axis for axis in range(len(shape)) if axis not in last] + last
        ids = _iota(mesh[2], math.prod(sizes.values())).reshape(shape).transpose(order)
        return ids.reshape(-1, math.prod(part for _, part in spanned.values()))
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]*\})?\}", line):
        groups = [group.split(",") for group in re.findall(r"\{([\d,]+)\}", listed[1] or "")]
        return np.array(groups, int) if groups else np.arange(num_chips)[None]
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\S*)", line):
        count, size = int(iota[1]), int(iota[2])
        return _iota(iota[3], count * size).reshape(count, size)
    raise ValueError(f"the replica groups of a collective cannot be parsed: {line.strip()[:300]}")


def _iota(text: str, num_chips: int) -> Int[np.ndarray, " n"]:
    """Chips in the order of "[2,8]T(1,0)": an iota of that shape, transposed."""
    found = re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if found is None:
        return np.arange(num_chips)
    ids = np.arange(num_chips).reshape([int(size) for size in found[1].split(",")])
    order = found[2].split(",") if found[2] else range(ids.ndim)
    return ids.transpose([int(axis) for axis in order]).ravel()
