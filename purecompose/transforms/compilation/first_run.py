"""The first run of a schedule in a compiled step, which is checked on fake tensors."""

import contextlib
from collections.abc import Mapping, Sequence

import torch

from purecompose.core.compose import Step
from purecompose.core.members import SINGLE
from purecompose.core.operation import NO_PURPOSE, Carry, Lowered, in_order
from purecompose.core.state import State
from purecompose.nn.network import looking_for_draws
from purecompose.transforms.compilation.agreement import failing_together
from purecompose.transforms.compilation.capture import explained, fake_mode, state_of
from purecompose.transforms.members import member
from purecompose.transforms.signature import Signature


__all__ = ["watch"]


def watch(step: Step, start: State, signatures: Mapping[str, Signature], bits: int) -> None:
    """Run a step on fake tensors, which take no memory, and check it as the first run of a schedule.

    What is compared by values is compared in slices that run compiled, or here.

    Args:
        step: The composed step.
        start: The state at its start.
        signatures: Those of the state's fields.
        bits: The schedule.
    """
    ranks = step.ranks
    _fill_caches(start)
    with failing_together(ranks, start.device), explained(), fake_mode(), torch.no_grad():
        fields = {
            name: signature.build([spec.empty() for spec in signature.specs]) for name, signature in signatures.items()
        }
        step.run_checked(bits, state_of(start.static, None, fields))
    if ranks is not None:
        _check_values(step.lowered(bits), start)
    if step.members is not SINGLE:
        # All slices of a population are in one graph, so their losses are compared by a step of one member.
        with looking_for_draws(), torch.no_grad():
            of_one = step.replace(members=SINGLE).operation(bits)
            of_one(Carry(step.members.one(start)), NO_PURPOSE)


def _fill_caches(start: State) -> None:
    """Run forward once on real tensors, so that tensors it caches in a function or a global are not fake ones."""
    if start.model.skeleton(train=True).is_fixed:  # such a network has only torch's layers, which cache nothing
        return
    one = member(start, 0) if start.key.ndim > 1 else start
    with contextlib.suppress(Exception), torch.no_grad():  # errors are reported by the step itself
        one.run_model(one.inputs, train=True)


def _check_values(operations: Sequence[Lowered], start: State) -> None:
    """Run a step up to the operation that has a check, and check its input."""
    places = [place for place, lowered in enumerate(operations) if lowered.check is not None]
    if not places:
        return
    with looking_for_draws(), torch.no_grad():
        carry = in_order(lowered.run for lowered in operations[: places[0]])(Carry(start), NO_PURPOSE)
        check = operations[places[0]].check
        assert check is not None
        check(carry)
