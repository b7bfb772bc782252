"""Soft cap of logits: the formula on the last linear layer, the same in training, evaluation and exported modules."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import purecompose as pc
from purecompose import losses, optim
from purecompose.algorithms import logit_softcap
from purecompose.nn.layers import ClassesSecond
from purecompose.nn.models import gpt
from tests.algorithms.surgery_checks import applied, check_keeps_all, make_state, patched


def make_net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def make_batch() -> tuple[Tensor, Tensor]:
    return 5 * torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3


def by_hand(logits: Tensor, cap: float) -> Tensor:
    """Return the capped logits, by exponentials."""
    up, down = (logits / cap).exp(), (-logits / cap).exp()
    return cap * (up - down) / (up + down)


@pytest.mark.parametrize("cap", [0.5, 15.0])
def test_training_evaluation_and_exported_networks_have_capped_logits(cap: float) -> None:
    net, (inputs, labels) = make_net(), make_batch()
    step = pc.compose(pc.loop_events, [logit_softcap(cap)])
    state = step.init(make_state(net, optimizer=optim.sgd(0.1)))
    expected = by_hand(net(inputs), cap)
    assert float(state.forward(inputs).abs().max()) < cap
    for found in (
        state.forward(inputs),
        torch.as_tensor(pc.predict(state, [(inputs, labels)])[0]),
        pc.to_module(state)(inputs),
    ):
        torch.testing.assert_close(found, expected)
    loss = nn.functional.cross_entropy(expected, labels)
    grads = torch.autograd.grad(loss, list(net.parameters()))
    after = step(state, (inputs, labels))
    torch.testing.assert_close(after.loss, loss)
    for name, param, grad in zip(state.params, net.parameters(), grads, strict=True):
        torch.testing.assert_close(after.params[name], param - 0.1 * grad)
    module = pc.to_module(after)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(inputs), after.forward(inputs))


def test_a_parametrized_layer_is_capped_and_trains() -> None:
    net, (inputs, labels) = make_net(), make_batch()
    head: Any = list(net.modules())[-1]
    weight_norm(head)
    step = pc.compose(pc.loop_events, [logit_softcap(0.5)])
    state = step.init(make_state(net, optimizer=optim.sgd(0.1)))
    expected = by_hand(net(inputs), 0.5)
    torch.testing.assert_close(state.forward(inputs), expected)
    grads = torch.autograd.grad(nn.functional.cross_entropy(expected, labels), list(net.parameters()))
    after = step(state, (inputs, labels))
    for (name, param), grad in zip(net.named_parameters(), grads, strict=True):
        torch.testing.assert_close(after.params[name], param - 0.1 * grad)
    assert torch.equal(copy.deepcopy(pc.to_module(after))(inputs), after.forward(inputs))


def test_the_last_layer_is_changed_once_and_tied_weights_stay_tied() -> None:
    torch.manual_seed(0)
    net = ClassesSecond(gpt(7, 8, width=8, depth=1, num_heads=2))
    after, report = check_keeps_all(make_state(net), logit_softcap(0.01))
    assert report.replaced == ("net.head",) and after.params.keys() == make_state(net).params.keys()
    ids = torch.arange(6).view(1, 6)
    torch.testing.assert_close(after.forward(ids), by_hand(net(ids), 0.01))


def test_where_chooses_the_layer() -> None:
    net, (inputs, _) = make_net(), make_batch()
    after, report = applied(make_state(net), logit_softcap(0.5, where="0"))
    assert report.replaced == ("0",)
    torch.testing.assert_close(after.forward(inputs), net[2](torch.tanh(by_hand(net[0](inputs), 0.5))))


def test_a_frozen_head_is_not_replaced_by_the_layer_before_it() -> None:
    net, (inputs, _) = make_net(), make_batch()
    frozen = make_state(net).replace(frozen=["2.*"])
    with pytest.warns(UserWarning, match="logit_softcap changed nothing: .*name them by where="):
        assert applied(frozen, logit_softcap(0.5))[0].model == frozen.model
    after, report = applied(frozen, logit_softcap(0.5, where="2"))
    assert report.replaced == ("2",)
    torch.testing.assert_close(after.forward(inputs), by_hand(net(inputs), 0.5))


def test_an_infinite_cap_changes_nothing_and_networks_without_a_layer_are_warned_about() -> None:
    state = make_state(make_net())
    assert pc.compose(pc.loop_events, [logit_softcap(float("inf"))]).init(state).model == state.model
    with pytest.warns(UserWarning, match="logit_softcap changed nothing: it looked for Linear"):
        applied(make_state(nn.Conv2d(2, 2, 1)), logit_softcap())
    net = nn.Sequential(nn.Linear(4, 4), patched(nn.Linear(4, 3)))
    with pytest.warns(UserWarning, match="kept all 2: none"):
        applied(make_state(net), logit_softcap())


def test_a_model_that_computes_its_own_loss_caps_its_logits() -> None:
    class Own(nn.Module):
        """A model as those of transformers."""

        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def forward(self, inputs: Tensor, labels: Tensor) -> Any:
            logits = self.net(inputs)
            return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}

    net, (inputs, labels) = Own(), make_batch()
    state = pc.State.create(
        net, loss=losses.model_loss, optimizer=optim.sgd(0.0), input_field="*", target_field="labels", duration="1ba"
    )
    step = pc.compose(pc.loop_events, [logit_softcap(0.5)])
    after = step(step.init(state), {"inputs": inputs, "labels": labels})
    torch.testing.assert_close(after.loss, nn.functional.cross_entropy(by_hand(net.net(inputs), 0.5), labels))
