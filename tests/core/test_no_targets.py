"""Batches of one tensor, and losses that read no target: every form of an autoencoder trains alike."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, algorithms as alg, compose, data, loop_events, optim
from purecompose.testing.process import played
from purecompose.transforms.population import stack_states, unstack_states
from tests.helpers import make_batch


INPUTS = make_batch(size=20, dtype=torch.float64)[0]


class Autoencoder(nn.Module):
    """A network that reconstructs its input; it returns the reconstruction, both, or the loss itself."""

    def __init__(self, returns: str = "reconstruction") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4)).double()
        self.returns = returns

    def forward(self, inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        found = self.layers(inputs)
        if self.returns == "loss":
            return F.mse_loss(found, inputs)
        return (found, inputs) if self.returns == "both" else found


def of_both(outputs: tuple[Tensor, Tensor], targets: None) -> Tensor:
    assert targets is None
    return F.mse_loss(*outputs)


def of_network(outputs: Tensor, targets: None) -> Tensor:
    assert targets is None
    return outputs


FORMS = {
    "pairs": ("reconstruction", F.mse_loss, 1),
    "its own target": ("reconstruction", F.mse_loss, 0),
    "no target": ("both", of_both, None),
    "a loss in the network": ("loss", of_network, None),
}


def start(form: str) -> State:
    returns, loss, target_field = FORMS[form]
    options = {"optimizer": optim.sgd(0.1), "duration": "2ep", "target_field": target_field}
    return State.create(Autoencoder(returns), loss=loss, **options)


def batches_of(form: str, size: int = 8) -> data.Arrays:
    """Return the batches, the last of which is smaller."""
    return data.arrays(INPUTS, INPUTS if form == "pairs" else None, size)


STEPS = {
    "plain": lambda: compose(loop_events),
    "sliced": lambda: compose(loop_events, microbatches=3),
    "compiled": lambda: pc.compile(compose(loop_events), backend="eager", quiet=True),
    "with methods": lambda: compose(loop_events, [alg.sam(0.1), alg.gradient_accumulation(2), alg.ema("3ba")]),
}


@pytest.mark.parametrize("kind", STEPS)
def test_every_form_trains_and_evaluates_alike(kind):
    ends = {form: pc.fit(STEPS[kind](), start(form), batches_of(form)) for form in FORMS}
    expected = ends.pop("pairs")
    loss = pc.evaluate(expected, batches_of("pairs"))
    for form, end in ends.items():
        torch.testing.assert_close((end.params, end.loss), (expected.params, expected.loss))
        assert pc.evaluate(end, batches_of(form)) == pytest.approx(loss), form


@pytest.mark.parametrize("form", FORMS)
def test_members_and_ranks_see_the_same_batches(form):
    step, batch = compose(loop_events), next(iter(batches_of(form)))
    expected = step(start(form), batch)
    pair = pc.population(step, 2)(stack_states([start(form), start(form)]), batch)
    ranks = played(step, 2)(lambda one: one(start(form), batch))
    for end in (*unstack_states(pair), *ranks):
        torch.testing.assert_close(end.params, expected.params)


def test_a_missing_target_is_an_error_that_names_the_choice():
    state = State.create(Autoencoder("both"), loss=of_both, optimizer=optim.sgd(0.1))
    with pytest.raises(KeyError, match="target_field=None is for a loss that reads no target"):
        compose(loop_events)(state, INPUTS)
    for method in (alg.mixup(), alg.cutmix(), alg.label_smoothing()):
        with pytest.raises(
            TypeError, match=f"^{method.name}: expected a batch with targets, .* target_field=.* or leave"
        ):
            compose(loop_events, [method]).init(start("no target"))
    with pytest.raises(TypeError, match=r"targets cannot be replaced .*\(inputs, inputs\) with target_field=1"):
        start("no target").replace(targets=INPUTS)
