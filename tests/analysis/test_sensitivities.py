"""The gradient through a window of a run is the difference quotient, in both modes."""

import pathlib
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import State, algorithms as alg, hparam, optim
from purecompose.analysis import RecordedRun, Sensitivity, Window, sensitivity, window_of
from tests.analysis.problems import evaluator, make_step, new_state, train_data


def window(methods: Any = None, num: int = 6) -> Window:
    optimizer = optim.sgd(hparam("lr", 0.1), momentum=hparam("momentum", 0.9))
    methods = [alg.mixup(0.3), alg.label_smoothing(hparam("smoothing", 0.1))] if methods is None else methods
    step = make_step(methods)
    return Window(step, step.init(new_state(0, optimizer=optimizer)), list(train_data())[:num])


def by_name(found: Sensitivity) -> dict[str, float | None]:
    return {one.name: one.gradient for one in found.derivatives}


def test_both_modes_agree_with_differences() -> None:
    reverse, forward = (sensitivity(window(), of=evaluator(), mode=mode) for mode in ("reverse", "forward"))
    assert [one.name for one in reverse.derivatives] == ["lr", "momentum", "smoothing"]
    for one, other in zip(reverse.derivatives, forward.derivatives, strict=True):
        assert one.agrees and other.agrees and one.difference == other.difference
        assert one.gradient == pytest.approx(other.gradient, rel=1e-9)
        assert one.by_batch is not None and sum(one.by_batch) == pytest.approx(one.gradient)
        assert other.by_batch is None


def test_the_derivative_of_a_single_step_is_that_of_its_rate() -> None:
    """The last step's: the objective's gradient times the last move, as in theta <- theta - lr v."""
    given = window([], num=3)
    (rate,) = sensitivity(given, of=evaluator(), to=["lr"]).derivatives
    step, state, batches = given
    for batch in batches[:2]:
        state = step(state, batch)
    end = step(state, batches[2])
    moves = {name: (end.params[name] - state.params[name]) / 0.1 for name in end.params}
    params = {name: param.clone().requires_grad_() for name, param in end.params.items()}
    inputs, targets = next(iter(evaluator().data))
    loss = torch.nn.functional.cross_entropy(end.replace(params=params).forward(inputs), targets)
    grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    expected = sum((grads[name] * moves[name]).sum().item() for name in grads)
    assert rate.by_batch is not None and rate.by_batch[-1] == pytest.approx(expected, rel=1e-3)


def test_a_scalar_that_only_draws_depend_on_has_a_difference_and_no_gradient() -> None:
    given = window([alg.mixup(hparam("mixup.alpha", 0.4))])
    for mode in ("reverse", "forward"):
        found = sensitivity(given, of=evaluator(), to=["mixup.alpha"], mode=mode)
        (derivative,) = found.derivatives
        assert not derivative.gradient and derivative.difference and not derivative.agrees
        assert "no gradient flows to it" in " ".join(str(found).split())  # a narrow terminal breaks lines


def test_an_objective_of_your_own_and_a_scalar_without_effect() -> None:
    step, state, batches = window([], num=2)
    state = state.replace(hparams={**state.hparams, "unused": torch.tensor(1.0)})

    def norm(state: State) -> torch.Tensor:
        return sum(((param**2).sum() for param in state.params.values()), torch.zeros(()))

    found = sensitivity(Window(step, state, batches), of=norm, to=["unused", "lr"])
    assert by_name(found)["unused"] is None and found.derivatives[0].agrees
    assert "no effect" in str(found) and found.derivatives[1].agrees


def test_a_window_of_a_recorded_run_has_its_states_and_batches(tmp_path: pathlib.Path) -> None:
    step, start, _ = window()
    data = train_data()
    states = list(pc.training(step, start, data, checkpoints=pc.Checkpoints(tmp_path / "run", "1ep", keep=3)))
    given = window_of(RecordedRun(tmp_path / "run", step, start, data), 7, "11ba")
    assert given.state.timestamp.batch == 7 and len(given.batches) == 4
    state = given.state
    for batch in given.batches:
        state = step(state, batch)
    for name, param in states[10].params.items():
        assert torch.equal(param, state.params[name])
    assert all(one.agrees for one in sensitivity(given, of=evaluator()).derivatives)
    with pytest.raises(ValueError, match="there is no batch between them"):
        window_of(RecordedRun(tmp_path / "run", step, start, data), 8, 8)
