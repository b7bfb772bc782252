"""Helpers for the tests of methods on the model: invariants of every surgery, and steps before and after one."""

import copy
import pickle
import types
from collections.abc import Collection
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from purecompose import Algorithm, Event, State, compose, loop_events, losses, optim, surgery, to_module, tree


def make_state(net: nn.Module, *, key: int = 0, **options: Any) -> State:
    """Return a state, with SGD with momentum, of a network that returns class scores or images."""
    settings = {"loss": losses.cross_entropy, "optimizer": optim.sgd(0.1, momentum=0.9), "duration": "8ba", **options}
    return State.create(net, key=key, **settings)


def make_images(seed: int = 0, num: int = 6, channels: int = 2, size: int = 6) -> Tensor:
    """Return normally distributed float32 images (num, channels, size, size)."""
    return torch.randn(num, channels, size, size, generator=torch.Generator().manual_seed(seed))


def make_batch(seed: int = 0, num: int = 6, **shape: int) -> tuple[Tensor, Tensor]:
    """Return images and class indices of three classes."""
    return make_images(seed, num, **shape), torch.arange(num) % 3


def trained(state: State, num: int = 2, **shape: int) -> State:
    """Return the state after some plain steps."""
    step = compose(loop_events)
    state = step.init(state)
    for seed in range(num):
        state = step(state, make_batch(seed, **shape))
    return state


def applied(state: State, method: Algorithm) -> tuple[State, surgery.Report]:
    """Return the state after a method's INIT, and a report of what it has replaced, kept, dropped and made."""
    after: Any = method.apply(Event.INIT, state)
    old, new = {**state.params, **state.buffers}, {**after.params, **after.buffers}
    names = {id(tensor): name for name, tensor in old.items()}
    kept = {name: names[id(tensor)] for name, tensor in new.items() if id(tensor) in names}
    before, now = (one.context.replaced.get(method.name, ()) for one in (state, after))
    dropped = tuple(name for name in old if name not in kept.values())
    return after, surgery.Report(now[len(before) :], kept, dropped, tuple(name for name in new if name not in kept))


def operated(net: nn.Module, method: Algorithm, **options: Any) -> tuple[Any, surgery.Report]:
    """Return the new architecture and the report of the surgery."""
    state, report = applied(make_state(net, **options), method)
    return state.model.module, report


def hooked(module: nn.Module) -> nn.Module:
    """Return the module with a hook that doubles its output."""

    def double(module: nn.Module, inputs: Any, output: Any) -> Any:
        del module, inputs
        return 2 * output

    module.register_forward_hook(double)
    return module


def patched(module: nn.Module) -> nn.Module:
    """Return the module with a forward on the instance that doubles its output."""

    def doubled(self: Any, input: Tensor) -> Tensor:
        output: Any = type(self).forward(self, input)
        return 2 * output

    module.forward = types.MethodType(doubled, module)
    return module


def check_leaves(net: nn.Module, method: Algorithm, num: int) -> None:
    """Check that a surgery finds `num` modules, replaces none of them, and warns."""
    state, images = make_state(net), make_images()
    with pytest.warns(UserWarning, match=f"kept all {num}: none"):
        after, report = applied(state, method)
    assert after is state and not report.replaced
    assert torch.equal(to_module(after)(images), net(images))


def check_shows(layer: nn.Module, inner: nn.Module, name: str) -> None:
    """Check that a wrapping layer shows the inner layer's public attributes, also in copies and pickles."""
    for copied in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(cast(Any, copied).weight, cast(Any, inner).weight)
        assert getattr(copied, name) == getattr(inner, name)
        assert str(copied) == str(layer)
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            copied.nonsense  # noqa: B018
    assert layer.weight is inner.weight and layer.state_dict().keys() != inner.state_dict().keys()


def check_keeps_all(state: State, method: Algorithm, *, dropped: Collection[str] = ()) -> tuple[State, surgery.Report]:
    """Do one surgery and check its invariants: the old state is untouched, tensors and momentum are kept except for
    dropped ones, exactly the frozen parameters stay frozen, and a second surgery changes nothing.
    """
    before, text = state.copy(), str(state.model.module)
    after, report = applied(state, method)
    assert not tree.diff(before, state)
    assert str(state.model.module) == text
    assert report.replaced and sorted(report.dropped) == sorted(dropped)
    old, new = {**state.params, **state.buffers}, {**after.params, **after.buffers}
    assert set(report.kept.values()) == set(old) - set(dropped) and set(report.kept) | set(report.made) == set(new)
    for name, was in report.kept.items():
        assert new[name] is old[was]
        if was in state.params and was not in state.context.frozen:
            assert after.opt_state["momentum"][name] is state.opt_state["momentum"][was]
    assert after.context.frozen == {name for name, was in report.kept.items() if was in state.context.frozen}
    again, second = applied(after, method)  # warnings are errors, so it does not warn
    assert again is after and not second.replaced
    return after, report
