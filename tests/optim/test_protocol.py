"""User-defined optimizers: supported forms, and errors for those that break the protocol."""

import dataclasses
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import compose, loop_events, optim, schedule
from purecompose.errors import ContractError
from purecompose.schedule import hparam, number
from tests.helpers import assert_close, make_batch, make_batches, make_state, run_steps


@dataclasses.dataclass(frozen=True)
class Descent:
    """Plain gradient descent."""

    lr: schedule.Scalar = 0.1

    def init(self, params: Any) -> Any:
        return {}

    def update(self, grads: Any, opt_state: Any, params: Any, value: Any = number) -> Any:
        moved = {name: params[name] - value(self.lr) * grad for name, grad in grads.items()}
        return {**params, **moved}, opt_state


class Plain:
    """The same in a class that is not a dataclass."""

    def __init__(self, lr: Any = 0.1) -> None:
        self.lr = lr

    init, update = Descent.init, Descent.update


@dataclasses.dataclass(frozen=True)
class Around:
    """An optimizer that contains another one."""

    inner: Any

    def init(self, params: Any) -> Any:
        return self.inner.init(params)

    def update(self, grads: Any, opt_state: Any, params: Any, value: Any = number) -> Any:
        return self.inner.update(grads, opt_state, params, value)


@dataclasses.dataclass
class Thawed:
    """Not frozen, so it has no hash."""

    lr: float = 0.1
    init, update = Descent.init, Descent.update


SCALARS = [0.1, 0.1 * schedule.cosine(), hparam("lr", 0.1), hparam("lr", 0.1) * schedule.linear()]


@pytest.mark.parametrize("lr", SCALARS, ids=str)
@pytest.mark.parametrize("make", [Descent, lambda lr: Around(Descent(lr))], ids=["alone", "inside"])
def test_a_frozen_dataclass_trains_as_the_librarys_own(make, lr):
    own, known = (make_state(optimizer=one, batches_per_epoch=4) for one in (make(lr), optim.sgd(lr)))
    step = compose(loop_events)
    assert_close(run_steps(step, own, make_batches(3)).params, run_steps(step, known, make_batches(3)).params)


def test_a_plain_class_works_if_its_settings_are_numbers():
    step, batch = compose(loop_events), make_batch()
    end = step(make_state(optimizer=Plain()), batch)
    assert_close(end.params, step(make_state(optimizer=optim.sgd(0.1)), batch).params)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (Descent, r"optimizer: expected a pure optimizer with init and update, .* got .*Descent"),
        (torch.optim.NAdam([torch.zeros(1)]), r"from_torch.* got NAdam \( Parameter Group 0"),
        (Thawed(), r"Thawed\(lr=0.1\): expected a hashable one, .*frozen dataclass"),
        (
            type("Counting", (Plain,), {"init": lambda self, params: {"n": 0}, "__repr__": lambda _: "counting"})(),
            r"counting.init gave opt_state\['n'\] = 0 \(int\): expected a pytree of tensors; write torch.zeros",
        ),
    ],
)
def test_faults_detectable_without_a_step_are_reported_at_creation(optimizer, said):
    with pytest.raises(TypeError, match=said):
        make_state(optimizer=optimizer)


def test_a_class_in_place_of_an_optimizer_always_has_the_same_error():
    with pytest.raises(TypeError, match=r"by_pattern: rest: expected a pure optimizer .* got .*Descent"):
        optim.by_pattern({}, Descent)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Faulty:
    """An optimizer with a momentum that returns `fn` of the arguments."""

    fn: Any

    def __repr__(self) -> str:
        return "faulty"

    def init(self, params: Any) -> Any:
        return {"momentum": {name: torch.zeros_like(param) for name, param in params.items()}}

    def update(self, grads: Any, opt_state: Any, params: Any, value: Any = number) -> Any:
        return self.fn(grads, opt_state, params)


def in_place(grads: Any, opt_state: Any, params: Any) -> Any:
    for name, grad in grads.items():
        params[name].sub_(0.1 * grad)
    return params, opt_state


def into_the_dictionary(grads: Any, opt_state: Any, params: Any) -> Any:
    for name, grad in grads.items():
        params[name] = params[name] - grad
    return params, opt_state


def double(params: Any) -> Any:
    return {name: param.double() for name, param in params.items()}


FAULTS = [
    (lambda g, o, p: dict(p), r"returned a dict of '0.weight', .*: expected the pair \(params, opt_state\)"),
    (lambda g, o, p: None, r"returned None .*: expected the pair \(params, opt_state\)"),
    (lambda g, o, p: (p, o, 0), r"returned 3 things: expected the pair"),
    (
        lambda g, o, p: ({"0.weight": p["0.weight"]}, o),
        r"returned params\['0.bias'\] = absent where it was float32\[8\]",
    ),
    (lambda g, o, p: ({**p, "more": p["0.bias"]}, o), r"returned params\['more'\] = float32\[8\] where it was absent"),
    (lambda g, o, p: (double(p), o), r"returned params\['0.weight'\] = float64\[8, 4\] where it was float32\[8, 4\]"),
    (lambda g, o, p: (dict(reversed(p.items())), o), r"returned params in another order: params\['3.bias'\], "),
    (lambda g, o, p: (p, {}), r"returned opt_state\['momentum'\]\['0.weight'\] = absent"),
    (lambda g, o, p: (p, {**o, "n": 1}), r"returned opt_state\['n'\] = 1 where it was absent"),
    (in_place, r"wrote in place into state.params\['0.weight'\].* return new tensors"),
    (into_the_dictionary, "replaced an entry of a dictionary"),
]


@pytest.mark.parametrize(("fn", "said"), FAULTS)
def test_a_faulty_update_is_an_error_in_the_first_step(fn, said):
    step, state = compose(loop_events), make_state(optimizer=Faulty(fn))
    for _ in range(2):
        with pytest.raises(ContractError, match=f"the update of the optimizer faulty {said}"):
            step(state, make_batch())
        state = make_state(optimizer=Faulty(fn))


@pytest.mark.parametrize(("fn", "said"), FAULTS[:3])
def test_a_faulty_update_of_a_population_is_an_error_too(fn, said):
    states = pc.stack_states([make_state(optimizer=Faulty(fn), key=seed) for seed in range(2)])
    with pytest.raises(ContractError, match=f"the update of the optimizer faulty {said}"):
        pc.population(compose(loop_events), 2)(states, make_batch())


def test_errors_of_an_update_name_the_optimizer():
    def fail(grads: Any, opt_state: Any, params: Any) -> Any:
        raise KeyError("weight")

    with pytest.raises(KeyError) as caught:
        compose(loop_events)(make_state(optimizer=Faulty(fail)), make_batch())
    assert "in the update of the optimizer faulty" in caught.value.__notes__
