"""The guard around an optimizer: all of an update or none of it."""

import pytest
import torch

from purecompose import optim, tree
from purecompose.optim.wrapping import Decaying, Guarded, all_finite, chosen


PARAMS = {"a": torch.linspace(-1, 1, 6).reshape(2, 3), "b": torch.ones(4, dtype=torch.float64), "c": torch.zeros(0)}
GRADS = {"a": torch.linspace(0, 1, 6).reshape(2, 3), "b": torch.full((4,), 1e300, dtype=torch.float64)}
OPTIMIZERS = [optim.sgd(0.1), optim.sgd(0.1, momentum=0.9, nesterov=True), optim.adamw(0.1)]


def with_bad(value: float, name: str = "a") -> dict[str, torch.Tensor]:
    bad = GRADS[name].clone()
    bad.view(-1)[-1] = value
    return {**GRADS, name: bad}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_finite_gradients_update_as_without_the_guard(optimizer):
    guarded, opt_state = Guarded(optimizer), optimizer.init(PARAMS)
    assert tree.equal(guarded.init(PARAMS), opt_state)
    assert tree.equal(guarded.update(GRADS, opt_state, PARAMS), optimizer.update(GRADS, opt_state, PARAMS))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["a", "b"])
def test_one_element_that_is_not_finite_stops_all(optimizer, value, name):
    _, opt_state = optimizer.update(GRADS, optimizer.init(PARAMS), PARAMS)
    params, after = Guarded(optimizer).update(with_bad(value, name), opt_state, PARAMS)
    assert tree.equal(params, PARAMS) and tree.equal(after, opt_state)


@pytest.mark.parametrize("around", [Guarded, lambda inner: Decaying(inner, ()), lambda inner: Guarded(Guarded(inner))])
def test_parameters_the_inner_optimizer_does_not_update_go_to_another(around):
    params, grads = {"a": PARAMS["a"], "b": torch.ones(4)}, {"a": GRADS["a"], "b": torch.ones(4)}
    guarded, plain = (
        optim.by_pattern({"*": own}, optim.adam(0.01)) for own in (around(optim.muon(0.02)), optim.muon(0.02))
    )
    assert tree.equal(guarded.init(params), plain.init(params))
    assert tree.equal(
        guarded.update(grads, plain.init(params), params), plain.update(grads, plain.init(params), params)
    )


def test_guards_are_equal_by_value():
    assert Guarded(optim.sgd(0.1)) == Guarded(optim.sgd(0.1)) != Guarded(optim.sgd(0.2))
    assert hash(Guarded(optim.sgd(0.1))) == hash(Guarded(optim.sgd(0.1)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
def test_all_finite_agrees_with_isfinite(dtype, bad):
    tensors = [torch.ones(3, dtype=dtype), torch.zeros(0, dtype=dtype), torch.full((2, 2), 6e4).to(dtype)]
    if bad is not None:
        tensors[2][1, 0] = bad
    with torch.no_grad():
        assert all_finite(tensors).item() is (bad is None)  # torch's kernel for lists
    assert all_finite(tensors).item() is (bad is None)


def test_nothing_is_finite_and_every_member_of_a_vmap_has_its_own_answer():
    assert all_finite([]).item() is True
    rows = torch.tensor([[1.0, 2.0], [torch.nan, 2.0], [1.0, torch.inf]])
    assert torch.func.vmap(lambda row: all_finite([row, row + 1]))(rows).tolist() == [True, False, False]


def test_chosen_takes_one_tree_as_a_whole():
    new = {"a": torch.tensor([1.0, torch.nan]), "b": (torch.tensor(3),)}
    old = {"a": torch.tensor([2.0, 4.0]), "b": (torch.tensor(5),)}
    assert tree.equal(chosen(torch.tensor(True), new, old), new)
    assert tree.equal(chosen(torch.tensor(False), new, old), old)
