"""No-op model: a single parameter, whose path has a closed form."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import purecompose as pc
from purecompose import State, compose, loop_events
from purecompose.algorithms import loss_scaling, mixup, no_op_model
from purecompose.algorithms._replacements import NoOpLoss
from purecompose.cli import main
from purecompose.optim.wrapping import Guarded
from tests.helpers import assert_same


def make_state(net: nn.Module | None = None, lr: float = 0.01, **options: Any) -> State:
    options = {"loss": pc.losses.cross_entropy, "optimizer": pc.optim.sgd(lr), "duration": "90ba", **options}
    return State.create(net or nn.Linear(4, 3), **options)


def started(state: State, *others: Any) -> tuple[Any, State]:
    step = compose(loop_events, [no_op_model(), *others])
    return step, step.init(state)


targets = st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=6).map(torch.tensor)


def test_one_parameter_is_left_and_the_old_state_is_unchanged():
    before = make_state(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), optimizer=pc.optim.sgd(0.1, momentum=0.9))
    copied = before.copy()
    _, after = started(before)
    assert_same(before, copied)
    assert {name: param.numel() for name, param in after.params.items()} == {"weight": 1}
    assert after.params["weight"].item() == 1.5 and after.context.trainable == ("weight",) and not after.buffers
    assert set(after.opt_state["momentum"]) == {"weight"}


@given(targets)
def test_outputs_are_targets_times_the_weight_and_inputs_are_ignored(y):
    step, state = started(make_state())
    ends = [step.fold(state, (x, y)) for x in (torch.zeros(len(y), 4), torch.full((len(y), 4), torch.nan))]
    for end in ends:
        torch.testing.assert_close(end.outputs, 1.5 * y)
    assert torch.equal(ends[0].loss, ends[1].loss)
    torch.testing.assert_close(state.forward(y), y)


@settings(max_examples=20)
@given(targets, st.floats(0.001, 0.05))
def test_the_gradient_and_the_path_are_those_of_the_closed_form(y, lr):
    step, state = started(make_state(lr=lr))
    square = y.double().square().mean().item()
    gradient = step.fold(state, (y, y)).grads["weight"]
    assert gradient.item() == pytest.approx(square, rel=1e-6, abs=1e-12)
    for number in range(1, 4):
        state = step(state, (y, y))
        # w - 1 shrinks by 1 - 2 lr mean(y^2) in each step.
        expected = 1 + 0.5 * (1 - 2 * lr * square) ** number
        assert state.params["weight"].item() == pytest.approx(expected, rel=1e-6)


@given(st.lists(st.sampled_from([-100, 0, 1, 2, 5]), min_size=1, max_size=8))
def test_ignored_positions_do_not_count(values):
    y, loss = torch.tensor(values), NoOpLoss(-100)
    counted = [value for value in values if value != -100]
    expected = sum(0.25 * value**2 for value in counted) / max(1, len(counted))
    assert loss(1.5 * y, y).item() == pytest.approx(expected, rel=1e-6)
    assert loss(1.5 * y, y, reduction="sum").item() == pytest.approx(loss(1.5 * y, y, reduction="none").sum().item())
    assert loss.counted(y, y).sum() == len(counted)


def test_evaluation_is_of_targets_against_targets():
    _, state = started(make_state())
    batches = [(torch.randn(3, 4), torch.tensor([0, 1, 2])), (torch.randn(2, 4), torch.tensor([2, 2]))]
    assert pc.evaluate(state, batches, metrics={"loss": pc.metrics.mean_loss(NoOpLoss())})["loss"] == 0


@given(st.lists(st.sampled_from([-100, 0, 1, 2, 11]), min_size=1, max_size=8))
def test_metrics_of_classes_have_scores_of_classes(values: list[int]):
    _, state = started(make_state())
    y = torch.tensor([*values, 1])
    metrics = {"accuracy": pc.metrics.accuracy, "five": pc.metrics.top_k(5), "perplexity": pc.metrics.perplexity()}
    found = pc.evaluate(state, [(torch.zeros(len(y), 4), y)], metrics={**metrics, "loss": state.context.loss})
    assert found["accuracy"] == found["five"] == 1 and found["loss"] == 0 and found["perplexity"] > 1
    mapped = pc.population(compose(loop_events, [no_op_model()]), 2)
    both = pc.stack_states([state, state])
    assert pc.evaluate(both, [(torch.zeros(len(y), 4), y)], metrics=metrics, step=mapped)["accuracy"] == [1, 1]


@pytest.mark.parametrize("loss", [pc.losses.mse, pc.losses.binary_cross_entropy])
def test_other_losses_have_unchanged_targets(loss: Any):
    _, state = started(make_state(loss=loss))
    assert torch.equal(state.forward(torch.tensor([0, 1, 2])), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("options", [[], ["--seeds", "2"]], ids=["one", "two"])
def test_a_run_of_the_command_line_evaluates_it(options: list[str], tmp_path: Any, monkeypatch: Any, capsys: Any):
    monkeypatch.chdir(tmp_path)
    main(["train", "--model", "mlp", "--algorithms", "no_op_model", "--duration", "3ba", "--quiet", *options])
    assert "100.00%" in capsys.readouterr().out


class Own(nn.Module):
    """A model that computes its own loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        raise AssertionError(f"called with {x}, {labels}")


@pytest.mark.parametrize("labels", ["labels", None])
def test_a_models_own_loss_has_the_target_that_it_names_or_the_batchs_labels(labels: str | None):
    step, state = started(make_state(Own(), loss=pc.losses.ModelLoss(labels=labels)))
    folded = step.fold(state, {"x": torch.zeros(3, 4), "labels": torch.tensor([2, 4, -100])})
    assert folded.loss.item() == pytest.approx((1 + 4) / 2)


def test_without_labels_a_models_own_loss_has_the_states_target():
    step, state = started(make_state(Own(), loss=pc.losses.model_loss, target_field="y"))
    folded = step.fold(state, {"x": torch.zeros(2, 4), "y": torch.tensor([2, 4])})
    assert folded.loss.item() == pytest.approx((1 + 4) / 2)


def test_groups_are_removed_from_an_optimizer_inside_another():
    inner = pc.optim.adamw(0.01, groups={"*bias": {"weight_decay": 0.0}})
    step, state = started(make_state(optimizer=Guarded(inner)))
    assert isinstance(state.context.optimizer, Guarded)
    assert step(state, (torch.zeros(2, 4), torch.tensor([1, 2]))).params["weight"].item() < 1.5


def test_a_second_time_keeps_the_number():
    step, state = started(make_state())
    state = step(state, (torch.zeros(2, 4), torch.tensor([1, 2])))
    again = compose(loop_events, [no_op_model(name="again")]).init(state)
    assert again.params["weight"] is state.params["weight"]


def test_dictionaries_dtypes_groups_and_networks_without_weights():
    optimizer = pc.optim.adamw(0.01, groups={"*bias": {"weight_decay": 0.0}})
    state = make_state(optimizer=optimizer, input_field="x", target_field="y")
    step, state = started(state)
    assert step(state, {"x": torch.zeros(2, 4), "y": torch.tensor([1, 2])}).timestamp.batch == 1
    assert started(make_state(nn.Linear(4, 3).double()))[1].params["weight"].dtype is torch.float64
    assert list(started(make_state(nn.Flatten()))[1].params) == ["weight"]


def test_it_comes_first_so_that_other_methods_see_the_parameter():
    scaling = loss_scaling()
    step = compose(loop_events, [scaling, no_op_model()])
    assert [a.name for a in step.order(step.algorithms, pc.Event.INIT)] == ["no_op_model", "loss_scaling"]
    state = step.init(make_state())
    assert step(state, (torch.zeros(2, 4), torch.tensor([1, 2]))).params["weight"].item() < 1.5


def test_mixed_targets_are_refused_with_an_explanation():
    step, state = started(make_state(), mixup(0.2, input_field=0))
    with pytest.raises(TypeError, match="no_op_model: expected a tensor as target, got Mixture"):
        step(state, (torch.zeros(2, 4), torch.tensor([1, 2])))
