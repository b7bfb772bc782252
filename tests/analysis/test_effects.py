"""The compared subsets, and intervals that hold together, in few seeds too."""

import math

import pytest
import torch

from purecompose.analysis.effects import Interval, name_of, seeds_needed, simultaneous_intervals, subsets_of


def simulated(num_ablations: int, num_seeds: int, *, skewed: bool) -> torch.Tensor:
    """Differences (ablations, 6, seeds) with means 0, whose rows are correlated, as they share the cell of all."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        normal = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return normal.exp() - math.exp(0.5) if skewed else normal

    return noise(num_ablations, 1, num_seeds) - noise(num_ablations, 6, num_seeds)


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("num_seeds", [5, 8, 20])
def test_intervals_of_simulated_ablations_hold_together(num_seeds: int, skewed: bool) -> None:
    """In 200 ablations of six nulls, a null's interval covers 0 in at least 95 %, and nearly all six do at once."""
    found = [simultaneous_intervals(one) for one in simulated(200, num_seeds, skewed=skewed)]
    covers = torch.tensor([[one.low <= 0 <= one.high for one in intervals] for intervals in found])
    assert covers.float().mean(0).min() >= 0.95
    assert covers.all(1).float().mean() >= 0.9


def test_intervals_are_narrower_than_those_of_a_bonferroni_correction() -> None:
    stats = pytest.importorskip("scipy.stats")
    differences = simulated(100, 8, skewed=False)
    widths = [one.high - one.low for rows in differences for one in simultaneous_intervals(rows)]
    errors = differences.std(2) / math.sqrt(8)
    bonferroni = 2 * stats.t.ppf(1 - 0.05 / 12, 7) * errors.flatten()
    assert torch.tensor(widths, dtype=torch.float64).mean() < bonferroni.mean()


def test_a_row_without_differences_has_no_width_and_does_not_widen_others() -> None:
    rows = simulated(1, 8, skewed=False)[0, :2]
    alone = simultaneous_intervals(rows)
    with_null = simultaneous_intervals(torch.cat([rows, torch.zeros(1, 8, dtype=torch.float64)]))
    assert with_null[2] == Interval(0.0, 0.0, 0.0, 0.0)
    assert with_null[:2] == alone


def test_one_seed_that_differs_leaves_the_intervals_finite() -> None:
    """As with an accuracy, which is the same for most seeds."""
    tied = [0.0] * 7 + [0.001]
    for interval in simultaneous_intervals([tied, [0.1, 0.2, 0.15, 0.1, 0.12, 0.17, 0.16, 0.11]]):
        assert math.isfinite(interval.low)


def test_too_few_seeds_have_no_interval() -> None:
    for row in ([0.1], [0.1, 0.2], [0.1, 0.2, 0.15, 0.3]):
        (interval,) = simultaneous_intervals([row])
        assert interval.low == -math.inf and not interval.is_decided
        assert seeds_needed(interval, len(row), 1) == 5


@pytest.mark.parametrize("wrong", [[0.1, 0.2], [[math.nan, 0.1]], [[]]])
def test_what_is_no_matrix_of_finite_numbers_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="expected finite differences of shape"):
        simultaneous_intervals(wrong)  # pyright: ignore[reportArgumentType]


def test_the_number_of_seeds_that_is_needed_decides_four_times_of_five() -> None:
    """A difference of half a standard deviation, told from 0 in the number of seeds that a look at few reports."""
    needed = seeds_needed(Interval(0.5, -0.5, 1.5, 1.0), 8, 6)
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn(100, 6, needed, generator=generator, dtype=torch.float64)
    draws[:, 0] += 0.5
    decided = [simultaneous_intervals(rows)[0].low > 0 for rows in draws]
    assert 0.68 < sum(decided) / len(decided) < 0.92


def test_equal_differences_of_few_seeds_decide_nothing() -> None:
    (interval,) = simultaneous_intervals([[0.01, 0.01]])
    assert interval.low == -math.inf and not interval.is_decided


NAMES = ["a", "b", "c", "d", "e"]


def test_leaving_one_out() -> None:
    subsets = subsets_of(NAMES)
    assert [name_of(one, NAMES) for one in subsets] == ["all", *(f"all but {name}" for name in NAMES), "none"]
    assert [name_of(one, ["a"]) for one in subsets_of(["a"])] == ["all", "none"]
