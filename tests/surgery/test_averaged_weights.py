"""Averages beside the live weights: reading them, exporting them, and computing their statistics."""

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import purecompose as pc
from purecompose import Algorithm, Event, State, algorithms as alg, compose, loop_events, on
from purecompose.algorithms._around_updates import schedule_free
from purecompose.algorithms._averages import ema, swa
from purecompose.surgery.weights import (
    Averages,
    averages_in,
    statistics_of,
    to_module,
    wide,
    with_batch,
    with_statistics,
    with_weights,
)
from tests.helpers import assert_close, assert_same, make_batches, make_cnn, make_mlp, make_state, run_steps


IMAGES = make_batches(6, shape=(2, 6, 6))


class Slot(NamedTuple):
    """A slot with averages and other fields."""

    other: Tensor
    averages: Averages


def doubled(name: str = "doubled", *, is_inside: bool = False) -> Algorithm:
    """Return an algorithm that keeps twice the weights as its averages."""

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            averages = Averages.empty(state)
        else:
            params = {key: 2 * wide(state.params[key]) for key in state.context.trainable}
            buffers = {key: 2 * wide(value) for key, value in state.buffers.items() if value.is_floating_point()}
            averages = Averages(params, buffers, torch.ones((), dtype=torch.int64))
        slot = Slot(torch.zeros(()), averages) if is_inside else averages
        return state.replace(slots={**state.slots, name: slot})

    return Algorithm(name, on(Event.INIT, Event.BATCH_END), apply)


def trained(*algorithms: Algorithm, net: nn.Module | None = None, batches=IMAGES, eval_mode=()) -> State:
    step = compose(loop_events, algorithms)
    optimizer = pc.optim.sgd(0.1)
    state = make_state(net or make_cnn(), batches_per_epoch=6, optimizer=optimizer, eval_mode=eval_mode)
    return run_steps(step, step.init(state), batches)


@pytest.mark.parametrize("is_inside", [False, True])
def test_averages_replace_live_weights_and_all_else_is_kept(is_inside):
    state = trained(doubled(is_inside=is_inside))
    before = state.copy()
    seen = with_weights(state, "doubled")
    assert_same(seen.params, {name: 2 * param for name, param in state.params.items()})
    assert_same(seen.buffers["1.running_var"], 2 * state.buffers["1.running_var"])
    assert seen.buffers["1.num_batches_tracked"] is state.buffers["1.num_batches_tracked"]
    assert_same((seen.opt_state, seen.slots, seen.key), (state.opt_state, state.slots, state.key))
    assert seen.timestamp == state.timestamp
    assert_same(state, before)


def test_averages_without_updates_are_the_live_weights():
    state = compose(loop_events, [doubled()]).init(make_state(make_cnn()))
    assert averages_in(state, "doubled").num.item() == 0
    assert_same(with_weights(state, "doubled"), state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_averages_are_as_wide_as_float32_and_seen_in_the_weights_dtype(dtype):
    state = trained(doubled(), net=make_mlp(dtype=dtype), batches=make_batches(2, dtype=dtype))
    kept = torch.float64 if dtype is torch.float64 else torch.float32
    assert {param.dtype for param in averages_in(state, "doubled").params.values()} == {kept}
    assert {param.dtype for param in with_weights(state, "doubled").params.values()} == {dtype}


class Remembering(nn.Module):
    """A network with buffers that its forward pass writes, and of which only the running statistics have a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            spectral_norm(nn.Linear(4, 16)), nn.BatchNorm1d(16), nn.ReLU(), spectral_norm(nn.Linear(16, 3))
        )
        self.register_buffer("queue", torch.eye(4))
        self.register_buffer("at", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            at = (self.at + 1) % 4
            self.queue = torch.where(torch.arange(4)[:, None] == at, nn.functional.normalize(inputs[:1]), self.queue)
            self.at = at
        return self.net(inputs)


@pytest.mark.parametrize("method", [ema("2ba"), swa("1ba", "6ba", "1ba"), schedule_free()], ids=lambda one: one.name)
def test_only_running_statistics_are_averaged(method):
    batches = make_batches(6)
    state = trained(method, net=Remembering(), batches=batches)
    seen = with_weights(state, method.name).buffers
    live = {name for name, buffer in seen.items() if buffer is state.buffers[name]}
    assert seen.keys() - live == {"net.1.running_mean", "net.1.running_var"}


def test_the_average_of_spectral_norms_is_that_of_torch():
    """torch's average of parameters, with the live buffers."""
    torch.manual_seed(0)
    net = nn.Sequential(spectral_norm(nn.Linear(4, 32)), nn.ReLU(), spectral_norm(nn.Linear(32, 3))).double()
    batches = make_batches(40, dtype=torch.float64)
    found = with_weights(trained(ema(smoothing=0.9), net=net, batches=batches), "ema")

    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
        averaged.update_parameters(net)
    averaged.eval()
    inputs = torch.cat([inputs for inputs, _ in batches])
    torch.testing.assert_close(found.forward(inputs), averaged(inputs), rtol=1e-10, atol=1e-12)


def test_empty_averages_leave_out_frozen_parameters_and_counters():
    net = make_cnn()
    net[0].weight.requires_grad_(False)
    empty = Averages.empty(make_state(net))
    assert "0.weight" not in empty.params and "3.weight" in empty.params
    assert empty.buffers.keys() == {f"{layer}.running_{what}" for layer in (1, 4) for what in ("mean", "var")}


def test_each_member_of_a_population_has_its_own_averages():
    """One member has averages and the other one has none yet."""
    late = trained(ema("2ba"))
    start = make_state(make_cnn(), batches_per_epoch=6, optimizer=pc.optim.sgd(0.1))
    early = compose(loop_events, [ema("2ba")]).init(start).replace(timestamp=late.timestamp)
    stacked = pc.stack_states([late, early])
    seen = with_weights(stacked, "ema").params
    for name, both in seen.items():
        assert torch.equal(both[0], late.slots["ema"].params[name])
        assert torch.equal(both[1], early.params[name])


def test_a_module_has_either_weights():
    state = trained(doubled())
    live, averaged = to_module(state), to_module(state, weights="doubled")
    assert_same(dict(averaged.named_parameters()), {name: 2 * param for name, param in live.named_parameters()})
    assert averaged.training
    with torch.no_grad():
        averaged.get_parameter("0.weight").zero_()  # a copy
    assert averages_in(state, "doubled").params["0.weight"].any()


def test_names_without_averages_are_errors():
    with pytest.raises(ValueError, match="weights='swa': expected the name of an algorithm.*; there are doubled, two"):
        with_weights(trained(doubled(), doubled("two")), "swa")
    with pytest.raises(ValueError, match="no algorithm of this state keeps any"):
        to_module(make_state(), weights="ema")
    stacked = pc.stack_states([trained(doubled())] * 2)
    with pytest.raises(ValueError, match="expected a single state"):
        to_module(stacked, weights="doubled")
    with pytest.raises(ValueError, match="with_statistics.*expected a single state"):
        with_statistics(stacked, IMAGES, weights="doubled")


# Statistics


@pytest.mark.parametrize(
    "method", [ema("2ba"), swa(0, 1.0, "1ba"), schedule_free(), doubled(), doubled(is_inside=True)]
)
def test_statistics_are_those_that_torch_finds_for_the_averaged_network(method):
    state = trained(method)
    net = to_module(state, weights=method.name)
    torch.optim.swa_utils.update_bn(IMAGES, net)
    before = state.copy()
    found = with_statistics(state, iter(IMAGES), weights=method.name)
    expected = {name: value for name, value in net.named_buffers() if value.is_floating_point()}
    assert_close(averages_in(found, method.name).buffers, expected)
    assert_same(averages_in(found, method.name).params, averages_in(state, method.name).params)
    assert_same((found.params, found.buffers, found.opt_state), (state.params, state.buffers, state.opt_state))
    assert_same(state, before)
    step = compose(loop_events, [method])
    step(found, IMAGES[0])  # and training continues
    if method.name != "doubled":
        with torch.no_grad():
            expected_outputs = [net.eval()(inputs) for inputs, _ in IMAGES]
        for ours, theirs in zip(pc.predict(found, IMAGES, step=step), expected_outputs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_statistics_are_those_of_evaluation_without_dropout_or_draws():
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3))
    batches = make_batches(4)
    state = trained(ema("2ba"), net=net, batches=batches)
    found = averages_in(with_statistics(state, batches, weights="ema"), "ema").buffers
    with torch.no_grad():
        hidden = [to_module(state, weights="ema").get_submodule("0")(inputs) for inputs, _ in batches]
    means = torch.stack([values.mean(0) for values in hidden]).mean(0)
    variances = torch.stack([values.var(0) for values in hidden]).mean(0)
    assert_close(found, {"2.running_mean": means, "2.running_var": variances})


def test_layers_in_evaluation_mode_keep_their_statistics():
    state = trained(ema("2ba"), eval_mode=["1"])
    found = averages_in(with_statistics(state, IMAGES, weights="ema"), "ema").buffers
    kept = averages_in(state, "ema").buffers
    assert torch.equal(found["1.running_var"], kept["1.running_var"])
    assert not torch.equal(found["4.running_var"], kept["4.running_var"])


def test_ghost_batch_normalisation_has_statistics_of_whole_batches():
    state = trained(alg.ghost_batchnorm(4), ema("2ba"))
    found = averages_in(with_statistics(state, IMAGES, weights="ema"), "ema").buffers
    with torch.no_grad():
        hidden = [to_module(state, weights="ema").get_submodule("0")(inputs) for inputs, _ in IMAGES]
    means = torch.stack([values.mean((0, 2, 3)) for values in hidden]).mean(0)
    (name,) = [name for name in found if name.startswith("1.") and name.endswith("running_mean")]
    torch.testing.assert_close(found[name], means, rtol=1e-5, atol=1e-6)


def test_tied_layers_and_half_precision_are_measured_in_float32():
    norm = nn.BatchNorm1d(4)
    net = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 3))
    assert statistics_of(pc.State.create(net, loss=pc.losses.mse, optimizer=pc.optim.sgd(0.1)).model).names == {
        "1.running_mean",
        "1.running_var",
    }
    step = compose(loop_events, [ema("2ba")])
    state = step.init(make_state(make_cnn(), precision="bf16"))
    state = run_steps(step, state, IMAGES)
    found = averages_in(with_statistics(state, IMAGES, weights="ema"), "ema").buffers
    net = to_module(state, weights="ema")
    torch.optim.swa_utils.update_bn(IMAGES, net)
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert_close(found, {n: v for n, v in net.named_buffers() if v.is_floating_point()}, rtol=5e-2, atol=5e-2)


def test_a_layer_called_twice_has_the_mean_over_its_calls():
    norm = nn.BatchNorm2d(2, momentum=None)
    net = nn.Sequential(norm, nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), norm, nn.Flatten(), nn.Linear(72, 3))
    state = trained(ema("2ba"), net=net)
    found = averages_in(with_statistics(state, IMAGES, weights="ema"), "ema").buffers
    net = to_module(state, weights="ema")
    torch.optim.swa_utils.update_bn(IMAGES, net)
    assert_close(found, {name: value for name, value in net.named_buffers() if value.is_floating_point()})


@pytest.mark.parametrize("num", [0, torch.tensor(0)])
@pytest.mark.parametrize("kept", [torch.nan, torch.inf, 3.0])
def test_means_over_no_batch_do_not_affect_the_next(num, kept):
    found = with_batch({"a": torch.full((2,), kept)}, {"a": torch.tensor([1.0, 2.0])}, num)
    assert found["a"].tolist() == [1.0, 2.0]


def test_a_shuffling_loader_draws_by_the_runs_key_not_the_global_generator():
    inputs, targets = (torch.cat(parts) for parts in zip(*IMAGES, strict=True))
    data = DataLoader(TensorDataset(inputs, targets), batch_size=5, shuffle=True, drop_last=True)
    state = trained(ema("2ba"))
    torch.manual_seed(0)
    before = torch.get_rng_state(), random.getstate()
    first = with_statistics(state, data, weights="ema")
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    torch.manual_seed(1)
    assert_same(first, with_statistics(state, data, weights="ema"))
    other = averages_in(with_statistics(state.replace(key=pc.random.key(7)), data, weights="ema"), "ema").buffers
    assert not torch.equal(averages_in(first, "ema").buffers["1.running_mean"], other["1.running_mean"])


def test_a_network_without_batchnorm_is_returned_unchanged():
    state = trained(ema("2ba"), net=make_mlp(), batches=make_batches(2))
    assert with_statistics(state, [], weights="ema") is state


def test_statistics_that_cannot_be_measured_are_an_error():
    begun = compose(loop_events, [ema()]).init(make_state(make_cnn()))
    with pytest.raises(ValueError, match="with_statistics: ema has not averaged any weights yet"):
        with_statistics(begun, IMAGES, weights="ema")
    with pytest.raises(ValueError, match="with_statistics: the data has no batch"):
        with_statistics(trained(ema()), [], weights="ema")
    with pytest.raises(ValueError, match="weights='swa': expected the name"):
        with_statistics(trained(ema()), IMAGES, weights="swa")
    with pytest.raises(ValueError, match="ema keeps no averages of 1.running_mean, 1.running_var"):
        with_statistics(trained(ema(buffers=["4.*"])), IMAGES, weights="ema")
