"""The subsets that an ablation trains, and the pairs that it compares."""

import pytest

from purecompose.analysis.subsets import comparisons, name_of, subsets_of


NAMES = ["a", "b", "c", "d", "e"]


def test_leaving_one_out_compares_all_with_all_but_one() -> None:
    subsets = subsets_of(NAMES)
    assert [name_of(one, NAMES) for one in subsets] == ["all", *(f"all but {name}" for name in NAMES), "none"]
    for one in comparisons(NAMES, subsets, "leave_one_out"):
        assert one.pairs == ((frozenset(NAMES), frozenset(NAMES) - {one.method}),)


def test_all_subsets_give_each_method_as_many_pairs() -> None:
    subsets = subsets_of(NAMES, "all")
    assert len(subsets) == len(set(subsets)) == 32
    assert {len(one.pairs) for one in comparisons(NAMES, subsets, "all")} == {16}


@pytest.mark.parametrize("budget", [7, 12, 20, 31])
def test_a_budget_keeps_the_first_subsets_and_a_pair_for_each_method(budget: int) -> None:
    subsets = subsets_of(NAMES, "all", budget)
    assert len(subsets) == len(set(subsets)) == budget
    assert subsets[:7] == subsets_of(NAMES)
    for one in comparisons(NAMES, subsets, "all"):
        assert one.pairs and all(with_it - without == {one.method} for with_it, without in one.pairs)


def test_a_single_method_has_two_subsets() -> None:
    assert [name_of(one, ["a"]) for one in subsets_of(["a"])] == ["all", "none"]


def test_a_budget_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match=r"budget: expected an int >= 7, got 6 \(int\)"):
        subsets_of(NAMES, budget=6)
    with pytest.raises(ValueError, match="design='some'"):
        subsets_of(NAMES, "some")
