"""Realistic networks and losses, each in all modes: they agree with plain PyTorch, or are refused clearly.

`python -m tests.foreign.sweep` runs the same and prints a table.
"""

import pytest

from tests.foreign.foreign_cases import CASES
from tests.foreign.foreign_modes import MODES, outcome_of


RUNS = [(name, mode) for name, case in CASES.items() for mode in MODES if mode != "inductor" or case.inductor]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), RUNS, ids=[f"{name}-{mode}" for name, mode in RUNS])
def test_a_foreign_network_trains_as_in_torch_or_is_refused(name, mode):
    found = outcome_of(CASES[name], mode)
    assert found.kind == ("match" if CASES[name].refusal(mode) is None else "refused"), found.detail


def test_the_sweep_is_wide():
    assert len(CASES) >= 150
