"""Realistic networks and losses, each in all modes: they agree with plain PyTorch, or are refused clearly."""

import pytest

from tests.foreign.foreign_cases import CASES
from tests.foreign.foreign_modes import MODES, outcome_of


QUICK = ("GPT2LMHeadModel", "BertForSequenceClassification")


RUNS = [(name, mode) for name, case in CASES.items() for mode in MODES if mode != "inductor" or case.inductor]


def is_quick(number: int, name: str, mode: str) -> bool:
    """Return whether a run is one of a sample of the sweep, or of the two networks that are quick in most modes."""
    return number % 7 == 0 or (name in QUICK and mode != "inductor")


@pytest.mark.parametrize(
    ("name", "mode"),
    [pytest.param(*run, marks=[] if is_quick(i, *run) else pytest.mark.slow) for i, run in enumerate(RUNS)],
)
def test_a_foreign_network_trains_as_in_torch_or_is_refused(name, mode):
    found = outcome_of(CASES[name], mode)
    assert found.kind == ("match" if CASES[name].refusal(mode) is None else "refused"), found.detail
