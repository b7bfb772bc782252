"""Random generators and iterators that user code keeps are refused when a state, step or evaluation is made."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import Algorithm, Event, State, compose, loop_events, losses, on, optim
from tests.helpers import make_batch, make_mlp, make_state


MAKE = {
    "numpy": lambda: np.random.default_rng(0),
    "numpy's old one": lambda: np.random.RandomState(0),
    "python": lambda: random.Random(0),
    "torch": lambda: torch.Generator().manual_seed(0),
    "list": lambda: iter([1.0, 2.0]),
    "cycle": lambda: itertools.cycle([1.0, 2.0]),
    "generator": lambda: (number for number in [1.0]),
}
GLOBAL = np.random.default_rng(0)
kinds = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())


class Keeping(nn.Module):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.net, self.kept = make_mlp(), kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class KeepingLoss:
    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def __call__(self, outputs: Any, targets: Any, reduction: str = "mean") -> Any:
        return losses.cross_entropy(outputs, targets, reduction)


@kinds
def test_generators_of_a_module_are_refused(make):
    name = type(make()).__name__
    with pytest.raises(ValueError, match=rf"^the module 'kept' \(Keeping\) keeps its attribute kept, a {name}"):
        make_state(nn.ModuleDict({"kept": Keeping(make())}))
    with pytest.raises(ValueError, match=r"^the network \(Keeping\) keeps its attribute kept\['rng'\], a"):
        make_state(Keeping({"rng": make()}))


@kinds
def test_generators_of_a_loss_are_refused(make):
    kept = make()

    def closure(outputs: Any, targets: Any, kept: Any = kept) -> Any:
        return losses.cross_entropy(outputs, targets) + kept

    with pytest.raises(ValueError, match="^the loss .* keeps its attribute kept, a"):
        make_state(loss=KeepingLoss(make()))
    with pytest.raises(ValueError, match="^the loss .* keeps the default of kept, a"):
        make_state(loss=closure)
    with pytest.raises(ValueError, match="^the loss .* keeps the global GLOBAL, a"):
        make_state(loss=lambda outputs, targets: losses.cross_entropy(outputs, targets) + GLOBAL.random())


@kinds
def test_generators_of_methods_stages_and_metrics_are_refused(make):
    kept = make()
    method = Algorithm("own", on(Event.BATCH_START), lambda event, state: state.replace(metrics={"kept": kept}))
    with pytest.raises(ValueError, match="^own keeps kept, a"):
        compose(loop_events, [method])
    with pytest.raises(ValueError, match="^the stage <lambda> keeps kept, a"):
        compose([lambda state: state.replace(metrics={"kept": kept}), *loop_events])

    def own(outputs: Any, targets: Any) -> Any:
        return losses.cross_entropy(outputs, targets) + kept

    for metric in (own, pc.metrics.mean_loss(own), losses.over_batch(own)):
        with pytest.raises(ValueError, match="^the metric 'own' keeps .*kept, a"):
            pc.evaluate(make_state(), [make_batch()], {"own": metric})


def test_a_bound_method_of_a_generator_is_refused():
    draw = np.random.default_rng(0).normal
    with pytest.raises(ValueError, match="keeps draw, a Generator"):
        make_state(loss=lambda outputs, targets: losses.cross_entropy(outputs, targets) + draw())


def test_an_optimizer_with_a_generator_is_refused():
    class Noisy:
        def __init__(self) -> None:
            self.rng = random.Random(0)

        def init(self, params: Any) -> Any:
            return {}

        def update(self, grads: Any, opt_state: Any, params: Any, value: Any) -> Any:
            return {name: param - self.rng.random() * grads[name] for name, param in params.items()}, opt_state

    with pytest.raises(ValueError, match="keeps its attribute rng, a Random"):
        State.create(make_mlp(), loss=losses.cross_entropy, optimizer=Noisy())


def test_code_that_only_reads_files_and_lists_is_accepted(tmp_path):
    with open(tmp_path / "log", "w") as log:

        def write(event: Event, state: State) -> State:
            print(event, file=log)
            return state

        make_state(Keeping({"sizes": [1, 2], "range": range(3), "numbers": np.ones(2)}))
        compose(loop_events, [Algorithm("writes", on(Event.BATCH_END), write)])
    State.create(make_mlp(), loss=losses.cross_entropy, optimizer=optim.adam(0.1))
