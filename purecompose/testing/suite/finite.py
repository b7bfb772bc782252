"""The law about NaN and infinity, which other laws cannot judge."""

import torch

from purecompose import tree
from purecompose.core.state import State
from purecompose.testing.case import Case
from purecompose.testing.law import Broken, define_law, never_acts
from purecompose.testing.record import run
from purecompose.testing.subject import Subject


_FIELDS = ("loss", "params", "buffers", "opt_state")


@define_law(
    "where the plain step stays finite, so does the step with the algorithm",
    "look for 0 / 0, the root or logarithm of what may become negative, such as 1 - elapsed after the run's end, and "
    "means over nothing; where a value may be missing choose with torch.where, on both sides finite",
    exempt=never_acts,
)
def stays_finite(subject: Subject, case: Case) -> bool:
    """Check loss, params, buffers and opt_state after each step; for the other laws NaN equals NaN."""
    plain = run(case.step(), case.state(), case.batches())
    ours = run(case.step(subject.algorithm), case.state(), case.batches(), subject.name)
    for without, with_it in zip(plain.states[1:], ours.states[1:], strict=True):
        if _first_not_finite(without) is not None:
            break
        path = _first_not_finite(with_it)
        if path is not None:
            raise Broken("NaN or infinite, and finite without the algorithm", where=path)
    return ours.acted


def _first_not_finite(state: State) -> str | None:
    """Return the key path of the first tensor with a NaN or an infinity."""
    for field in _FIELDS:
        for path, leaf in tree.leaves_with_paths(getattr(state, field)).items():
            if isinstance(leaf, torch.Tensor) and not leaf.isfinite().all():
                return f"{field}{path}"
    return None
