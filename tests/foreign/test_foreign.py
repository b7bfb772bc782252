"""Realistic networks and losses, each in all modes: they agree with plain PyTorch, or are refused clearly."""

import pytest

from tests.foreign.foreign_cases import CASES
from tests.foreign.foreign_modes import MODES, outcome_of


QUICK = ("GPT2LMHeadModel", "BertForSequenceClassification")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[] if name in QUICK and mode != "inductor" else pytest.mark.slow)
        for name, case in CASES.items()
        for mode in MODES
        if mode != "inductor" or case.inductor
    ],
)
def test_a_foreign_network_trains_as_in_torch_or_is_refused(name, mode):
    found = outcome_of(CASES[name], mode)
    assert found.kind == ("match" if CASES[name].refusal(mode) is None else "refused"), found.detail
    assert len(CASES) >= 130
