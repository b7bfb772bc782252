"""Per-example clipping against loops over single examples, and with draws, mixtures, slices and noise."""

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import Algorithm, Event, State, compose, loop_events, losses, on, optim, tree
from purecompose.algorithms._around_updates import sam
from purecompose.algorithms._batch_sizes import gradient_accumulation
from purecompose.algorithms._measurements import gradient_noise_scale
from purecompose.algorithms._optimizer_settings import gradient_clipping
from purecompose.algorithms._overflow import loss_scaling, skip_nonfinite
from purecompose.algorithms._per_example_clipping import clip_per_example, norms_per_example, per_example_clipping
from purecompose.algorithms._selective_backprop import selective_backprop
from purecompose.algorithms._targets import label_smoothing, mixup
from purecompose.testing.tasks import make_task
from tests.algorithms import method_helpers as helpers


NAME = "per_example_clipping"
MICROBATCHES = pytest.mark.parametrize("microbatches", [1, 3])


def wide(batch: Any) -> Any:
    return tree.map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch)


def mlp(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4)).double()


def ended(algorithms: Sequence[Algorithm], state: State, batch: Any, **cut: Any) -> State:
    """Return the state at the end of a step, which still has its gradients."""
    step = compose(loop_events, algorithms, **cut)
    return step.fold(step.init(state), batch)


def grads_of(state: State) -> dict[str, Tensor]:
    assert state.grads is not None
    return state.grads


def by_hand(net: nn.Module, losses_of: Sequence[Any], max_norm: float) -> tuple[dict[str, Tensor], list[float]]:
    """Return the mean of clipped gradients and their norms, with a backward pass for each example's loss."""
    params = {name: param for name, param in net.named_parameters() if param.requires_grad}
    total, norms = {name: torch.zeros_like(param) for name, param in params.items()}, []
    for loss_of in losses_of:
        grads = torch.autograd.grad(loss_of(net), list(params.values()), materialize_grads=True)  # pyright: ignore
        norms.append(math.sqrt(sum(grad.square().sum().item() for grad in grads)))
        for name, grad in zip(params, grads, strict=True):
            total[name] += grad * min(1.0, max_norm / norms[-1]) if norms[-1] else grad
    return {name: grad / len(losses_of) for name, grad in total.items()}, norms


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad.detach(), rtol=rtol, atol=1e-13, msg=name)


# The core


def test_the_core_is_the_formula():
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (5, 3, 2), "b": (5, 4), "c": (5,)}
    grads = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    rows = [torch.cat([grad[i].flatten() for grad in grads.values()]) for i in range(5)]
    norms = torch.stack([row.norm() for row in rows])
    bound = norms.median().item()
    torch.testing.assert_close(norms_per_example(grads), norms)
    expected = torch.stack([row * min(1.0, bound / row.norm().item()) for row in rows]).mean(0)
    found = clip_per_example(grads, bound)
    assert [grad.shape for grad in found.values()] == [(3, 2), (4,), ()]
    torch.testing.assert_close(torch.cat([grad.flatten() for grad in found.values()]), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_example_that_is_not_finite_is_not_clipped_away(bad):
    grads = {"a": torch.tensor([[1.0, 2.0], [bad, 0.0]]), "b": torch.tensor([1.0, 1.0])}
    assert clip_per_example(grads, 0.1)["a"][0].isnan()


def test_gradients_of_zero_are_kept_and_have_a_derivative():
    zeros = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    found = clip_per_example({"a": zeros}, 1.0)["a"]
    assert found.tolist() == [0, 0]
    (slope,) = torch.autograd.grad(found.sum(), zeros)
    torch.testing.assert_close(slope, torch.full((3, 2), 1 / 3, dtype=torch.float64))


def test_half_precision_is_measured_in_float32():
    large = torch.full((2, 100), 6e4, dtype=torch.float16)
    assert norms_per_example({"a": large}).tolist() == pytest.approx([6e5] * 2, rel=1e-3)
    assert clip_per_example({"a": large}, 1.0)["a"].dtype is torch.float16


# A step, against a loop over single examples


@MICROBATCHES
@pytest.mark.parametrize("kind", ["index", "soft"])
def test_a_step_is_the_loop_over_single_examples(kind, microbatches):
    net, (inputs, targets) = mlp(), wide(helpers.make_batch(kind))
    each = [lambda net, i=i: nn.functional.cross_entropy(net(inputs[i : i + 1]), targets[i : i + 1]) for i in range(10)]
    _, norms = by_hand(net, each, math.inf)
    bound = sum(sorted(norms)[4:6]) / 2
    expected, _ = by_hand(net, each, bound)
    state = ended([per_example_clipping(bound)], helpers.make_state(net), (inputs, targets), microbatches=microbatches)
    assert_close(grads_of(state), expected)
    assert state.metrics[f"{NAME}/clipped"].item() == 0.5
    assert state.metrics[f"{NAME}/norm"].item() == pytest.approx(sum(norms) / 10, rel=1e-10)


@pytest.mark.parametrize("chunk_size", [1, 3, 10, 64])
def test_chunks_make_no_difference(chunk_size):
    batch = wide(helpers.make_batch())
    whole = ended([per_example_clipping(0.5, 0.1)], helpers.make_state(mlp(0.5)), batch)
    parts = ended([per_example_clipping(0.5, 0.1, chunk_size=chunk_size)], helpers.make_state(mlp(0.5)), batch)
    assert_close(grads_of(parts), grads_of(whole))
    torch.testing.assert_close(parts.metrics, whole.metrics)


def example_noise() -> Algorithm:
    """Return an algorithm that adds noise to inputs, drawn for each example of a slice."""

    def apply(event: Event, state: State) -> State:
        del event
        draws = pc.random.normal(state.example_rng("noise"), tuple(state.inputs.shape), dtype=torch.float64)
        return state.replace(inputs=state.inputs + draws)

    return Algorithm("noise", on(Event.BEFORE_FORWARD), apply)


COMPANY = {
    "nobody": [],
    "mixup": [mixup(0.5)],
    "mixup of losses": [mixup(0.5, interpolate_loss=True, per_example=True)],
    "mixup and smoothing": [mixup(0.5), label_smoothing(0.2)],
    "noise on inputs": [example_noise()],
    "selective_backprop": [selective_backprop(0.0, 1.0, keep=0.6, full_every=0)],
    "loss_scaling": [loss_scaling(2.0**8)],
}


@MICROBATCHES
@pytest.mark.parametrize("company", COMPANY)
def test_without_clipped_examples_the_gradient_is_that_of_the_batch(company, microbatches):
    """With dropout, this shows that an example's draws, mixture and loss are the same as in the batch."""
    batch, state = wide(helpers.make_batch()), helpers.make_state(mlp(0.5))
    plain = ended(COMPANY[company], state, batch, microbatches=microbatches)
    clipped = ended([*COMPANY[company], per_example_clipping(1e6)], state, batch, microbatches=microbatches)
    assert_close(grads_of(clipped), grads_of(plain), rtol=1e-9)
    assert clipped.metrics[f"{NAME}/clipped"].item() == 0
    assert tree.equal(clipped.loss, plain.loss)


def test_a_mixture_is_an_example():
    """The reference loops over mixtures, as MixUp leaves them in the batch."""
    seen: list[Any] = []
    net, batch = mlp(), wide(helpers.make_batch())
    state = ended(
        [mixup(0.5), helpers.spy(seen, "batch_start"), per_example_clipping(0.3)], helpers.make_state(net), batch
    )
    inputs, mixture = seen[0]
    soft = mixture.soft(torch.zeros(10, 4, dtype=torch.float64))
    each = [lambda net, i=i: nn.functional.cross_entropy(net(inputs[i : i + 1]), soft[i : i + 1]) for i in range(10)]
    assert_close(grads_of(state), by_hand(net, each, 0.3)[0])


def test_examples_of_a_loss_per_token_count_the_same():
    """Each has the mean over its own tokens; one without any has a gradient of 0, as in torch's loss of a batch."""
    net = make_task("tokens", tied=True).make_net(0).double()
    ids = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(3))
    labels = ids.roll(-1, 1)
    labels[0, 1:], labels[1, 3:], labels[2] = -100, -100, -100

    def loss_of(i: int) -> Any:
        if i == 2:
            return lambda net: sum(0 * param.sum() for param in net.parameters())
        return lambda net: nn.functional.cross_entropy(net(ids[i : i + 1]), labels[i : i + 1])

    state = State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1))
    found = ended([per_example_clipping(0.4)], state, (ids, labels))
    expected, norms = by_hand(net, [loss_of(i) for i in range(4)], 0.4)
    assert max(norms) > 0.4
    assert_close(grads_of(found), expected)


class OwnLoss(nn.Module):
    """A model that computes its loss, one number for the batch, from labels among its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.inner(inputs), labels)}


@MICROBATCHES
def test_a_model_that_computes_its_loss_is_called_with_single_examples(microbatches):
    net, (inputs, labels) = OwnLoss(), wide(helpers.make_batch())
    state = State.create(net, loss=losses.model_loss, optimizer=optim.sgd(0.1))
    found = ended([per_example_clipping(0.3)], state, {"inputs": inputs, "labels": labels}, microbatches=microbatches)
    each = [lambda net, i=i: net(inputs[i : i + 1], labels[i : i + 1])["loss"] for i in range(10)]
    assert_close(grads_of(found), by_hand(net, each, 0.3)[0])


class Recurrent(nn.Module):
    """A recurrent layer or cell over two steps of three numbers, from zeros."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = kind(3, 5).double(), nn.Linear(5, 4).double()

    def forward(self, inputs: Tensor) -> Tensor:
        steps, state = inputs.unflatten(1, (2, 3)).transpose(0, 1), None
        if not isinstance(self.inner, nn.RNNCellBase):
            return self.head(self.inner(steps)[0][-1])
        for step in steps:
            state = self.inner(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM, nn.GRUCell, nn.RNNCell, nn.LSTMCell])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_recurrent_networks_start_from_zeros_for_each_example(kind):
    net, (inputs, targets) = Recurrent(kind), wide(helpers.make_batch())
    found = ended([per_example_clipping(0.3)], helpers.make_state(net), (inputs, targets))
    each = [lambda net, i=i: nn.functional.cross_entropy(net(inputs[i : i + 1]), targets[i : i + 1]) for i in range(10)]
    assert_close(grads_of(found), by_hand(net, each, 0.3)[0])


def test_members_shared_by_all_examples_are_not_cut():
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, inputs: Tensor, scale: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.cross_entropy(self.inner(inputs * scale), labels)}

    net, (inputs, labels) = Weighted(), wide(helpers.make_batch())
    scale = torch.linspace(0.5, 2, 6, dtype=torch.float64)[None]
    keys = ["inputs", "scale", "labels"]
    state = State.create(net, loss=losses.model_loss, optimizer=optim.sgd(0.1), input_field=keys)
    names = [f"example {i}" for i in range(10)]
    batch = {"scale": scale, "names": names, "inputs": inputs, "labels": labels}
    each = [lambda net, i=i: net(inputs[i : i + 1], scale, labels[i : i + 1])["loss"] for i in range(10)]
    found = ended([per_example_clipping(0.3)], state, batch)
    assert_close(grads_of(found), by_hand(net, each, 0.3)[0])


# Noise


def noise_of(settings: dict[str, Any], batch: Any, state: State | None = None, **cut: Any) -> dict[str, Tensor]:
    """Return the noise that was added to the gradients."""
    state = helpers.make_state(mlp()) if state is None else state
    noisy = grads_of(ended([per_example_clipping(0.5, **settings)], state, batch, **cut))
    clean = grads_of(ended([per_example_clipping(0.5)], state, batch, **cut))
    return {name: noisy[name] - clean[name] for name in clean}


def test_noise_has_its_deviation_and_is_normal():
    """It is sigma C / N: second and fourth moments of 40 000 elements agree within 4 standard errors."""
    net = nn.Sequential(nn.Linear(6, 2000), nn.ReLU(), nn.Linear(2000, 14), nn.Linear(14, 4)).double()
    found = noise_of({"noise_multiplier": 0.8}, wide(helpers.make_batch()), helpers.make_state(net))
    draws = torch.cat([noise.flatten() for noise in found.values()]) / (0.8 * 0.5 / 10)
    num = len(draws)
    assert num > 40_000
    assert abs(draws.mean().item()) < 4 / num**0.5
    assert abs(draws.square().mean().item() - 1) < 4 * (2 / num) ** 0.5
    assert abs(draws.pow(4).mean().item() - 3) < 4 * (96 / num) ** 0.5


def test_noise_is_drawn_once_in_each_step():
    batch, state = wide(helpers.make_batch()), helpers.make_state(mlp())
    once = noise_of({"noise_multiplier": 1.0}, batch, state)
    for cut in ({"microbatches": 2}, {"microbatches": 5}):
        assert_close(noise_of({"noise_multiplier": 1.0}, batch, state, **cut), once, rtol=1e-9)
    assert_close(noise_of({"noise_multiplier": 1.0, "chunk_size": 3}, batch, state), once, rtol=1e-9)
    other = noise_of({"noise_multiplier": 1.0}, batch, state.replace(timestamp=state.timestamp.advance()))
    named = noise_of({"noise_multiplier": 1.0, "name": "another"}, batch, state)
    for name, noise in once.items():
        assert not torch.isclose(noise, other[name]).any() and not torch.isclose(noise, named[name]).any()
    assert not torch.isclose(once["0.bias"], once["0.weight"].flatten()[:8]).any()


# Layers that mix examples


def normed(*norms: nn.Module) -> nn.Module:
    layers = [layer for norm in norms for layer in (nn.Conv2d(2, 2, 3, padding=1), norm)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(72, 4))


IMAGES = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 0])


def test_batch_normalisation_is_refused_by_name():
    net = normed(nn.BatchNorm2d(2), nn.GroupNorm(1, 2), nn.BatchNorm2d(2, track_running_stats=False).eval())
    message = r"per_example_clipping: .* 1 \(BatchNorm2d\), 5 \(BatchNorm2d\)\. Replace them by nn\.GroupNorm"
    with pytest.raises(ValueError, match=message) as caught:
        helpers.one_step(per_example_clipping(1.0), helpers.make_state(net), IMAGES)
    assert any("in per_example_clipping at Event.AFTER_TRAIN_BATCH" in note for note in caught.value.__notes__)


def test_statistics_of_instances_are_refused_where_they_are_kept():
    net = normed(nn.InstanceNorm2d(2), nn.InstanceNorm2d(2, track_running_stats=True))
    with pytest.raises(ValueError, match=r"statistics of the whole batch: 3 \(InstanceNorm2d\)\. "):
        helpers.one_step(per_example_clipping(1.0), helpers.make_state(net), IMAGES)


def test_layers_that_treat_examples_separately_are_accepted():
    net = normed(nn.GroupNorm(1, 2), nn.InstanceNorm2d(2), nn.BatchNorm2d(2).eval()).double()
    inputs, targets = wide(IMAGES)
    each = [lambda net, i=i: nn.functional.cross_entropy(net(inputs[i : i + 1]), targets[i : i + 1]) for i in range(5)]
    found = ended([per_example_clipping(0.3)], helpers.make_state(net, eval_mode=["5"]), (inputs, targets))
    assert_close(grads_of(found), by_hand(net, each, 0.3)[0])


@pytest.mark.parametrize("write", [lambda own, x: own.add_(x.mean(0)), lambda own, x: own[:1].copy_(x.mean()[None])])
def test_buffers_written_in_place_are_an_error_with_place_and_remedy(write):
    class Running(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

        def forward(self, inputs: Tensor) -> Tensor:
            write(self.mean, inputs)
            return self.inner(inputs)

    batch = wide(helpers.make_batch())
    with pytest.raises(
        RuntimeError, match=r"clipping: .* a tensor that all examples share, is written .* in the layer .*chunk_size=1"
    ):
        ended([per_example_clipping(1.0)], helpers.make_state(Running()), batch)
    assert ended([per_example_clipping(1.0, chunk_size=1)], helpers.make_state(Running()), batch).grads is not None


def test_networks_that_vmap_refuses_get_an_error_with_a_remedy():
    class Peeking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(inputs if inputs.sum().item() > 0 else -inputs)

    net, (inputs, targets) = Peeking(), wide(helpers.make_batch())
    with pytest.raises(RuntimeError) as caught:
        helpers.one_step(per_example_clipping(1.0), helpers.make_state(net), (inputs, targets))
    assert re.search(
        r"a number or the memory of a tensor is read .* at .*layer Peeking.*set chunk_size=1, which takes examples",
        str(caught.value),
    )
    each = [lambda net, i=i: nn.functional.cross_entropy(net(inputs[i : i + 1]), targets[i : i + 1]) for i in range(10)]
    found = ended([per_example_clipping(0.3, chunk_size=1)], helpers.make_state(net), (inputs, targets))
    assert_close(grads_of(found), by_hand(net, each, 0.3)[0])


# Order and settings


@pytest.mark.parametrize("is_reversed", [True, False])
def test_it_comes_after_new_gradients_and_before_other_clipping(is_reversed):
    listed = [sam(0.1), per_example_clipping(0.3), gradient_clipping("norm", 0.1)]
    step = compose(loop_events, listed[::-1] if is_reversed else listed)
    state = step.init(helpers.make_state(mlp()))
    assert step.plan(state).order(Event.AFTER_TRAIN_BATCH) == ("sam", NAME, "gradient_clipping")
    alone = ended([per_example_clipping(0.3)], helpers.make_state(mlp()), wide(helpers.make_batch()))
    without = step.replace(algorithms=[sam(0.1), per_example_clipping(0.3)])
    with pytest.warns(UserWarning, match="what sam did to them is lost"):
        end = without.fold(state, wide(helpers.make_batch()))
    assert_close(grads_of(end), grads_of(alone))
    others = [*listed, gradient_accumulation(2), skip_nonfinite(), gradient_noise_scale()]
    step = step.replace(algorithms=others[::-1] if is_reversed else others)
    order = step.plan(step.init(helpers.make_state(mlp()))).order(Event.AFTER_TRAIN_BATCH)
    expected = ("gradient_noise_scale", "sam", NAME, "skip_nonfinite", "gradient_accumulation", "gradient_clipping")
    assert order == expected
