"""Bytes that one chip receives from others while a compiled program runs, from its HLO text.

With a result of s bytes in groups of g chips, a chip receives at least

    all-gather          s (g-1)/g       the shards of all other chips
    reduce-scatter      s (g-1)         its shard from every other chip (s is one shard)
    all-reduce          2 s (g-1)/g     a reduce-scatter, then an all-gather
    all-to-all          s (g-1)/g
    collective-permute  s

A collective in a loop counts once per iteration. For a loop of known length, the number of
iterations is in the compiler's annotation, or is the constant in its loop condition. For
loops of unknown length, over microbatches or decode steps, the caller passes the number.

On TPUs a reduce-scatter is a fusion of an all-reduce and slices, with both in its name.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Sequence

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_OPERATIONS = "|".join((*COLLECTIVES, "while", "fusion", "call", "conditional", "async"))
_INSTRUCTION = re.compile(rf"^\s+(?:ROOT )?%?[\w.-]+ = (.+?) ({_OPERATIONS})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_LOOP = re.compile(r"condition=%?([\w.-]+), body=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Received:
    """Bytes that one chip receives in a call of a program, by collective.

    Attributes:
        once: outside loops of unknown length.
        each_pass: in one iteration of these; one nested in another is assumed to run once in it.
    """

    once: Counter[str]
    each_pass: Counter[str]

    def by_collective(self, num_passes: int) -> dict[str, int]:
        """Bytes of each collective if the loops of unknown length run `num_passes` times."""
        return {kind: self.once[kind] + num_passes * self.each_pass[kind] for kind in COLLECTIVES}

    def total(self, num_passes: int) -> int:
        return sum(self.by_collective(num_passes).values())


def received(hlo: str) -> Received:
    """Bytes that one chip receives in a program, from `compiled.as_text()`.

    Raises:
        ValueError: the text has no entry computation, or groups that cannot be read.
    """
    computations, entry = _computations(hlo)
    if entry is None:
        raise ValueError("the compiled program's text has no ENTRY computation")
    num_chips = math.prod(map(int, re.findall(r"num_partitions=(\d+)", hlo)[:1])) or 1

    @functools.cache
    def of(name: str) -> Received:
        once, each_pass = Counter(), Counter()
        for line in computations.get(name, ()):
            found = _INSTRUCTION.match(line)
            if found is None:
                continue
            shape, operation, is_start = found.groups()
            if operation in COLLECTIVES:
                is_fused = operation == "all-reduce" and "all-reduce-scatter" in name
                kind, size = _bytes_received(line, shape, operation, bool(is_start), num_chips)
                # Only the slice is kept, so the all-gather half of the all-reduce never happens.
                once["reduce-scatter" if is_fused else kind] += size // 2 if is_fused else size
                continue
            inner = _called(line, operation)
            if operation == "while":
                condition, body = inner
                passes = of(condition), of(body)
                number = _num_passes(line, computations[condition])
                for part in passes:
                    if number is None:
                        each_pass.update(part.once + part.each_pass)
                    else:
                        once.update(_times(part.once, number))
                        each_pass.update(_times(part.each_pass, number))
            elif inner:
                parts = [of(other) for other in inner]
                part = max(parts, key=lambda x: x.total(1))  # a conditional takes one branch
                once.update(part.once)
                each_pass.update(part.each_pass)
        return Received(once, each_pass)

    return of(entry)


def _times(sizes: Counter[str], number: int) -> Counter[str]:
    return Counter({kind: number * size for kind, size in sizes.items()})


def _computations(hlo: str) -> tuple[dict[str, list[str]], str | None]:
    """The lines of every computation by its name, and the name of the entry computation."""
    computations: dict[str, list[str]] = {}
    entry, lines = None, []
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            lines = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.startswith("  "):
            lines.append(line)
    return computations, entry


def _called(line: str, operation: str) -> Sequence[str]:
    """Names of the computations that an instruction calls; (condition, body) of a loop."""
    if operation == "while":
        return _LOOP.findall(line)[0]
    if branches := _BRANCHES.search(line):
        return re.findall(r"[\w.-]+", branches[1])
    return _CALLED.findall(line)


def _num_passes(line: str, condition: Sequence[str]) -> int | None:
    """Iterations of a loop; None if known only at run time.

    Loops of known length count from 0 in steps of 1 up to a constant.
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


def _bytes_received(
    line: str, shape: str, operation: str, is_start: bool, num_chips: int
) -> tuple[str, int]:
    """(collective, bytes) of one instruction."""
    # The shape of a -start is (operands, results, ...); that of all-reduce-start is its result.
    if is_start and operation != "all-reduce":
        shape = _elements(shape)[1]
    size, group = _num_bytes(shape), _group_size(line, num_chips)
    factors = {
        "reduce-scatter": group - 1,
        "all-reduce": 2 * (group - 1) / group,
        "collective-permute": 1,
    }
    return operation, int(size * factors.get(operation, (group - 1) / group))


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


def _num_bytes(shape: str) -> int:
    """Bytes of an array shape, or of all arrays in a tuple shape."""
    total = 0
    for dtype, sizes in _ARRAY.findall(shape):
        bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or ["0"])[0])
        total += bits * math.prod(int(size) for size in sizes.split(",") if size) // 8
    return total


def _group_size(line: str, num_chips: int) -> int:
    """Number of chips in each group of a collective.

    Three notations: {{0,1},{2,3}}; [2,4]<=[8], groups x size; mesh['a'=2,'b'=4] {'b'}, the axes
    that span a group, or a part of an axis as 'b':(1)2.
    """
    if "source_target_pairs=" in line:
        return num_chips
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if listed := re.search(r"replica_groups=\{(?:\{([\d,]*)\}|\})", line):
        return len(listed[1].split(",")) if listed[1] else num_chips
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line):
        return int(iota[2])
    raise ValueError(f"the replica groups of a collective cannot be parsed: {line.strip()[:300]}")
