"""What the tests of methods on the model share: what every surgery keeps, and steps around one."""

from typing import Any

import torch
from torch import Tensor, nn

from purecompose import State, compose, loop_events, losses, optim, surgery, tree


def make_state(net: nn.Module, *, key: int = 0, **options: Any) -> State:
    """Of a network that gives class scores or images, by SGD with momentum."""
    settings = {"loss": losses.cross_entropy, "optimizer": optim.sgd(0.1, momentum=0.9), "duration": "8ba", **options}
    return State.create(net, key=key, **settings)


def make_images(seed: int = 0, num: int = 6, channels: int = 2, size: int = 6) -> Tensor:
    """Normal float32 images (num, channels, size, size)."""
    return torch.randn(num, channels, size, size, generator=torch.Generator().manual_seed(seed))


def make_batch(seed: int = 0, num: int = 6, **shape: int) -> tuple[Tensor, Tensor]:
    """Images and class indices of three classes."""
    return make_images(seed, num, **shape), torch.arange(num) % 3


def trained(state: State, num: int = 2, **shape: int) -> State:
    """The state after some plain steps."""
    step = compose(loop_events)
    state = step.init(state)
    for seed in range(num):
        state = step(state, make_batch(seed, **shape))
    return state


def operated(net: nn.Module, rules: surgery.Rules) -> tuple[Any, surgery.Report]:
    """The architecture, and what was done."""
    state, report = surgery.operate(make_state(net), rules, name="method")
    return state.model.module, report


def check_keeps_all(state: State, rules: surgery.Rules) -> tuple[State, surgery.Report]:
    """One surgery, of which is asserted what all promise: nothing old is touched, tensors and momentum are kept, a
    second surgery changes nothing, and the next step runs."""
    before, text = state.copy(), str(state.model.module)
    after, report = surgery.operate(state, rules, name="method")
    assert not tree.diff(before, state)
    assert str(state.model.module) == text
    assert report.replaced and report.dropped == ()
    old, new = {**state.params, **state.buffers}, {**after.params, **after.buffers}
    assert set(report.kept.values()) == set(old) and set(report.kept) | set(report.made) == set(new)
    for name, was in report.kept.items():
        assert new[name] is old[was]
        if was in state.params:
            assert after.opt_state["momentum"][name] is state.opt_state["momentum"][was]
            assert name not in after.context.frozen or was in state.context.frozen
    again, second = surgery.operate(after, rules, name="method")  # warnings are errors: it says nothing
    assert again is after and not second.replaced
    return after, report
