"""The names of the items of a list: `x = 1, 3` is `x = 1, x = 3`, and `y = 2, x = 1` is (1, 2)."""

from __future__ import annotations

import itertools

from care_jax.rewards.equivalence import assignments, formulas, joined, notation, quantities

_UNKNOWNS = set("xyztnmk")


def with_names(items: list[str]) -> list[str]:
    """`x = 1, 3` as `x = 1, x = 3`."""
    named, name = [], ""
    for item in items:
        own, _ = assignments.split(item)
        is_bare = name and not own and "=" not in item and not notation.has_relation(item)
        named.append(f"{name} = {item}" if is_bare else item)
        name = own or name
    return named


def is_value(item: str) -> bool:
    """Whether an item is a value: no inequality, word, option letter, Roman numeral or `(1)`."""
    if joined.is_statement(item):
        return False
    name, value = assignments.split(item)
    is_formula = formulas.is_mathematics(value, value) and (name or not value.isalpha())
    return bool(is_formula or quantities.read_number(value)) and not notation.has_relation(item)


def by_name(items: list[str]) -> list[str]:
    """Coordinates in the order of their names, such as x, y, z or a_1, a_2; others as given."""
    named = sorted((notation.key(assignments.split(item)[0]), item) for item in items)
    is_run = all(
        one and (one[:-1], ord(one[-1]) + 1) == (other[:-1], ord(other[-1]))
        for (one, _), (other, _) in itertools.pairwise(named)
    )
    return [item for _, item in named] if is_run else items


def values_of_one(*lists: list[str]) -> tuple[list[str], ...] | None:
    """The values of one variable, if `x = 1, x = 3` is compared with `x_1 = 1, x_2 = 3`.

    The indices of an unknown number its values in any order, and those of R_1 and R_2 do not.
    """
    pairs = [[assignments.split(item) for item in items] for items in lists]
    names = [{notation.key(name) for name, _ in each} for each in pairs]
    variables = {assignments.variable(name) for each in pairs for name, _ in each}
    if len(variables) != 1 or "" in variables:
        return None
    if names[0] == names[1] and not variables <= _UNKNOWNS:
        return None
    return tuple([value for _, value in each] for each in pairs)


def names_repeat(items: list[str]) -> bool:
    """Whether two items assign to one name, as the roots `x = 1, x = 2` do."""
    names = [notation.key(name) for name, _ in map(assignments.split, items) if name]
    return len(set(names)) < len(names)


def names_differ(items: list[str]) -> bool:
    """Whether all items are assignments to different variables; `x_1` and `x_2` are two of one."""
    names = (assignments.variable(assignments.split(item)[0]) for item in items)
    return len(set(itertools.takewhile(bool, names))) == len(items)
