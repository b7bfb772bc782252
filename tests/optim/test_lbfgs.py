"""L-BFGS against torch.optim.LBFGS, across checkpoints, and beside what it refuses."""

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import purecompose as pc
from purecompose import State, algorithms as alg, compose, loop_events, optim, schedule


class Valley(nn.Module):
    """Rosenbrock's function of two parameters, for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = nn.Parameter(torch.tensor(-1.2)), nn.Parameter(torch.tensor(1.0))

    def forward(self, scale: Tensor) -> Tensor:
        return scale * ((1 - self.x) ** 2 + 100 * (self.y - self.x**2) ** 2)


class Problem:
    """A network, a loss and one batch, in double precision."""

    def __init__(self, net: nn.Module, loss: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> None:
        self.net, self.loss, self.batch = net.double(), loss, batch


def problems() -> dict[str, Problem]:
    torch.manual_seed(0)
    x = torch.randn(40, 5, dtype=torch.float64)
    y = x @ torch.randn(5, 1, dtype=torch.float64)
    labels = (y[:, 0] > 0).long()
    mlp = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    valley = torch.ones(4, dtype=torch.float64)
    return {
        "least squares": Problem(nn.Linear(5, 1), pc.losses.mse, (x, y + 0.1)),
        "logistic regression": Problem(nn.Linear(5, 2), F.cross_entropy, (x, labels)),
        "perceptron": Problem(mlp, F.cross_entropy, (x, labels)),
        "Rosenbrock": Problem(Valley(), F.l1_loss, (valley, 0 * valley)),
    }


def start(problem: Problem, optimizer: Any) -> State:
    return State.create(problem.net, loss=problem.loss, optimizer=optimizer, duration="20ba")


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.1, "max_iter": 6, "history_size": 4},
        {"line_search_fn": "strong_wolfe", "max_iter": 5, "history_size": 3},
        {"line_search_fn": "strong_wolfe", "max_eval": 3, "tolerance_grad": 1e-3},
    ],
    ids=["fixed length", "line search", "few evaluations"],
)
@pytest.mark.parametrize("name", problems())
def test_equals_torch(name: str, options: dict[str, Any]) -> None:
    problem = problems()[name]
    net, step = copy.deepcopy(problem.net), compose(loop_events)
    state, reference = start(problem, optim.lbfgs(**options)), torch.optim.LBFGS(net.parameters(), **options)
    inputs, targets = problem.batch

    def closure() -> Tensor:
        reference.zero_grad()
        loss = problem.loss(net(inputs), targets)
        loss.backward()
        return loss

    first = closure().item()
    for _ in range(8):
        loss: Any = reference.step(closure)
        state = step(state, problem.batch)
        assert state.loss is not None and state.loss.item() == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)
        for key, param in net.named_parameters():
            torch.testing.assert_close(state.params[key], param.detach(), rtol=1e-9, atol=1e-9)
    assert closure().item() < 0.9 * first


def test_a_resumed_run_has_the_same_bits(tmp_path: pathlib.Path) -> None:
    problem, step = problems()["perceptron"], compose(loop_events, microbatches=2)
    optimizer = optim.lbfgs(0.5 * schedule.linear(), max_iter=3, history_size=4)
    state = start(problem, optimizer)
    assert state.opt_state["steps"]["0.weight"].shape == (4, 8, 5)
    for _ in range(3):
        state = step(state, problem.batch)
    pc.save(state, tmp_path / "half")
    other = pc.load(tmp_path / "half", start(problem, optimizer))
    for _ in range(3):
        state, other = step(state, problem.batch), step(other, problem.batch)
    assert pc.tree.equal(state, other)
    assert state.opt_state["numbers"][0] > 6


def test_each_evaluation_has_the_same_draws() -> None:
    problem = problems()["perceptron"]
    problem.net = nn.Sequential(nn.Dropout(0.5), problem.net)
    state = start(problem, optim.lbfgs(max_iter=4, line_search_fn="strong_wolfe"))
    step = compose(loop_events)
    after = step(state, problem.batch)
    dropped = [step(state.replace(params=params), problem.batch).loss for params in (state.params, after.params)]
    assert dropped[1] < dropped[0]  # type: ignore[operator]  # of one mask, so that the search has lowered the loss


@pytest.mark.parametrize(
    "method",
    [alg.gradient_clipping("norm", 1e-3), alg.gradient_clipping("norm", 1e6), alg.sam(0.5)],
    ids=["clips at once", "clips larger ones", "sam"],
)
def test_methods_that_change_gradients_are_refused(method: pc.Algorithm) -> None:
    problem = problems()["logistic regression"]
    step = compose(loop_events, [method])
    with pytest.raises(
        pc.errors.UnsupportedError, match=rf"{method.name} at .* lbfgs with methods that change gradients"
    ):
        step(step.init(start(problem, optim.lbfgs())), problem.batch)


def test_bad_settings_and_parameters_are_refused() -> None:
    assert repr(optim.lbfgs(0.5, history_size=3)) == "lbfgs(lr=0.5, history_size=3)"
    with pytest.raises(ValueError, match="line_search_fn"):
        optim.lbfgs(line_search_fn="armijo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="history_size"):
        optim.lbfgs(history_size=0)
    with pytest.raises(ValueError, match="one real dtype"):
        optim.lbfgs().init({"a": torch.ones(1), "b": torch.ones(1, dtype=torch.float64)})
