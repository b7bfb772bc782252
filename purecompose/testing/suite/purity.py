"""Laws of purity: the same result from the same input, the input left alone, nothing touched outside."""

import contextlib
import random as python_random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from purecompose import tree
from purecompose.contract import GlobalDrawError, InPlaceError
from purecompose.event import Event
from purecompose.random.modules import UnkeyedRandomError
from purecompose.state import State
from purecompose.testing.case import Case
from purecompose.testing.law import Broken, law, never_acts
from purecompose.testing.record import STEP_FIELDS, compare, copied, intercepted, run
from purecompose.testing.subject import Subject


__all__ = ["deterministic", "global_state_kept", "input_untouched"]


@law(
    "what a step or an algorithm is given is bit for bit as it was afterwards",
    "make new tensors and dictionaries: x.mul(2) for x.mul_(2), {**params, name: tensor} for params[name] = tensor",
    owns=(InPlaceError,),
    exempt=never_acts,
)
def input_untouched(subject: Subject, case: Case) -> bool:
    """Compares the state at each event, and the state and batch of each step, with copies taken before."""

    def around(event: Event, state: State, act: Callable[[State], State]) -> State:
        before = {field: copied(getattr(state, field)) for field in STEP_FIELDS}
        after = act(state)
        _check_same(before, state, event)
        return after

    step = case.step(intercepted(subject.algorithm, around))
    state, acted = step.init(case.state()), False
    for batch in case.batches():
        before, batch_before = copied(vars(state) | {"static": None}), copied(batch)
        following = run(step, state, [batch], subject.name)
        acted |= following.acted
        _check_same({field: value for field, value in before.items() if field in STEP_FIELDS}, state, None)
        difference = next(tree.differences(batch_before, batch), None)
        if difference is not None:
            raise Broken(difference, ("before the step", "after it"), where="batch")
        state = following.states[-1]
    return acted


def _check_same(before: dict[str, Any], state: State, event: Event | None) -> None:
    for field, value in before.items():
        difference = next(tree.differences(value, getattr(state, field)), None)
        if difference is not None:
            raise Broken(difference, ("before", "after"), event=event, where=field)


@law(
    "the same state and batch give the same result, bit for bit, whatever ran before",
    "draw from state.rng(name) or state.example_rng(name); remember in state.slots[name], not in a closure or a global",
    owns=(GlobalDrawError, UnkeyedRandomError),
    exempt=never_acts,
)
def deterministic(subject: Subject, case: Case) -> bool:
    """Takes the steps twice with one algorithm, other seeds in the global generators and other work in between."""

    def around(event: Event, state: State, act: Callable[[State], State]) -> State:
        once = act(state)
        compare(once, act(state), ("at first", "once more"), fields=STEP_FIELDS, event=event)
        return once

    step = case.step(intercepted(subject.algorithm, around))
    with _seeded(1):
        first = run(step, case.state(), case.batches(), subject.name)
    elsewhere = case.step(subject.algorithm)
    with _seeded(2):
        run(elsewhere, case.state(key=case.seed + 1), case.batches()[::-1])
    with _seeded(3):
        second = run(step, case.state(), case.batches(), subject.name)
    labels = ("in the first run", "in the second")
    for (event, ours), (_, theirs) in zip(first.applications, second.applications, strict=False):
        compare(ours, theirs, labels, fields=STEP_FIELDS, event=event)
    for ours, theirs in zip(first.states, second.states, strict=True):
        compare(ours, theirs, labels)
    return first.acted


@law(
    "generators, modes and defaults of torch, Python and NumPy stay as they were",
    "leave global settings to the program that trains; torch.manual_seed and random.seed are settings too",
    owns=(GlobalDrawError,),
    exempt=never_acts,
)
def global_state_kept(subject: Subject, case: Case) -> bool:
    """Looks at the settings of the process around each application, INIT included."""
    before_init = _settings()
    step = case.step(intercepted(subject.algorithm, _keeping_settings))
    state = step.init(case.state())
    _check_settings(before_init, Event.INIT)
    return run(step, state, case.batches(), subject.name).acted


def _keeping_settings(event: Event, state: State, act: Callable[[State], State]) -> State:
    before = _settings()
    after = act(state)
    _check_settings(before, event)
    return after


def _check_settings(before: dict[str, Any], event: Event) -> None:
    difference = next(tree.differences(before, _settings()), None)
    if difference is not None:
        raise Broken(difference, ("before", "after"), event=event, where="the process's ")


def _settings() -> dict[str, Any]:
    """What belongs to the process. Generators count by a hash of their state."""
    numpy = sys.modules.get("numpy")
    return {
        "torch generator": hash(torch.get_rng_state().numpy().tobytes()),
        "random generator": hash(python_random.getstate()),
        "NumPy generator": None if numpy is None else hash(str(numpy.random.get_state())),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Other seeds in the global generators, which are set back afterwards."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = python_random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        python_random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        try:
            yield
        finally:
            python_random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
