"""The subsets of methods that an ablation trains, and the pairs of them that it compares."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from purecompose import random
from purecompose._support.checks import check_whole


_DESIGNS = ("leave_one_out", "all")


class Pairs(NamedTuple):
    """The pairs of subsets that differ in one method only, as (with it, without it)."""

    method: str
    pairs: tuple[tuple[frozenset[str], frozenset[str]], ...]


def subsets_of(
    methods: Sequence[str], design: str = "leave_one_out", budget: int | None = None
) -> list[frozenset[str]]:
    """Return the subsets to train, the most informative first.

    Args:
        methods: The names of all methods.
        design: "leave_one_out" for all methods, all but one, and none; "all" for all subsets.
        budget: The largest number of subsets. Of "all", those of "leave_one_out" come first, then single methods, then
            others in a fixed random order, each with the subsets that differ from it in one method.

    Raises:
        ValueError: The design is unknown, or the budget does not suffice for "leave_one_out".

    Example:
        >>> [sorted(subset) for subset in subsets_of(["a", "b"])]
        [['a', 'b'], ['b'], ['a'], []]
    """
    if design not in _DESIGNS:
        raise ValueError(f"ablate: design={design!r}: expected one of {', '.join(map(repr, _DESIGNS))}")
    whole = frozenset(methods)
    without = [whole - {name} for name in methods]
    fewest = list(dict.fromkeys([whole, *without, frozenset[str]()]))
    if budget is not None:
        check_whole(budget, "ablate: budget", len(fewest), hint="all methods, all but each one, and none")
    if design == "leave_one_out":
        return fewest
    singles = [frozenset([name]) for name in methods]
    chosen = list(dict.fromkeys([*fewest, *singles]))
    most = 2 ** len(methods) if budget is None else min(budget, 2 ** len(methods))
    if most == 2 ** len(methods):
        sizes = range(len(methods), -1, -1)
        return list(
            dict.fromkeys([*chosen, *(frozenset(c) for n in sizes for c in itertools.combinations(methods, n))])
        )
    return _extended(chosen, methods, most)


def _extended(chosen: list[frozenset[str]], methods: Sequence[str], most: int) -> list[frozenset[str]]:
    """Return the subsets with others, drawn in a fixed order, until there are `most`."""
    found = dict.fromkeys(chosen[:most])
    for draw in itertools.count():
        if len(found) >= most:
            return list(found)
        bits = random.bernoulli(random.fold_in(random.key(0), draw), 0.5, (len(methods),)).tolist()
        drawn = frozenset(name for name, bit in zip(methods, bits, strict=True) if bit)
        for subset in (drawn, *(drawn ^ {name} for name in methods)):
            if len(found) < most:
                found.setdefault(subset)
    raise AssertionError("unreachable")


def comparisons(methods: Sequence[str], subsets: Sequence[frozenset[str]], design: str) -> list[Pairs]:
    """Return a comparison for each method.

    With "leave_one_out" it is all methods against all but this one; with "all", each pair of subsets that differ in
    this method only, whose differences are averaged.
    """
    known, whole = set(subsets), frozenset(methods)
    found = []
    for name in methods:
        pairs = [(subset, subset - {name}) for subset in subsets if name in subset and subset - {name} in known]
        found.append(Pairs(name, tuple(pairs) if design == "all" else ((whole, whole - {name}),)))
    return found


def name_of(subset: frozenset[str], methods: Sequence[str]) -> str:
    """Return a short name of a subset.

    Example:
        >>> [name_of(frozenset(names), ["a", "b", "c", "d"]) for names in ("abcd", "abd", "ab", "")]
        ['all', 'all but c', 'a + b', 'none']
    """
    if not subset:
        return "none"
    missing = [name for name in methods if name not in subset]
    if not missing:
        return "all"
    if len(missing) == 1 and len(methods) > 2:
        return f"all but {missing[0]}"
    return " + ".join(name for name in methods if name in subset)
