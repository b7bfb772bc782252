"""Layer freezing: which layers are frozen when, against manual loops, and with other methods."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import purecompose as pc
from purecompose import Algorithm, Event, State, compose, loop_events, losses, on, optim, tree
from purecompose.algorithms._layer_freezing import _share, frozen_layers, layer_freezing, layers_of
from purecompose.algorithms._measurements import gradient_norm
from purecompose.algorithms._overflow import loss_scaling
from purecompose.time import Timestamp
from tests.algorithms import method_helpers as helpers


BATCH = helpers.make_batch(num=12)
LAYERS = [("0.weight", "0.bias"), ("2.weight", "2.bias"), ("4.weight", "4.bias"), ("6.weight", "6.bias")]


def four_layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4)
    )


def make_state(net: nn.Module | None = None, duration: str = "20ba", **options) -> State:
    optimizer = optim.sgd(0.1, momentum=0.9, weight_decay=0.05)
    settings = {"loss": losses.cross_entropy, "optimizer": optimizer, "key": 3, **options}
    return State.create(net or four_layers(), duration=duration, **settings)


def run(algorithms: list[Algorithm], state: State, num: int = 20, make=lambda step: step, **options) -> list[State]:
    """Return the states after INIT and after each step."""
    step = make(compose(loop_events, algorithms, **options))
    states = [step.init(state)]
    for _ in range(num):
        states.append(step(states[-1], BATCH))
    return states


def constant_from(states: list[State]) -> dict[str, int]:
    """Return the number of steps after which each parameter changed for the last time."""
    last = dict.fromkeys(states[0].params, 0)
    for number, (old, new) in enumerate(zip(states, states[1:], strict=False), 1):
        last |= {name: number for name in last if not torch.equal(old.params[name], new.params[name])}
    return last


# Which layers, when


@pytest.mark.parametrize("num_stages", [8, None])
@pytest.mark.parametrize(("elapsed", "depth"), [(0, 0), (0.5, 0), (0.6, 0), (0.75, 1), (0.99, 2), (1, 3), (1.5, 3)])
def test_depths_of_four_layers(elapsed, depth, num_stages):
    names = frozen_layers(four_layers(), elapsed, num_stages=num_stages)
    assert names == tuple(name for layer in LAYERS[:depth] for name in layer)


@given(
    total=st.integers(1, 200),
    start=st.sampled_from(["0", "0.1", "0.5", "0.6", "0.7", "0.99"]),
    level=st.sampled_from(["0", "0.3", "0.7", "1"]),
    num_stages=st.none() | st.integers(2, 12),
    num=st.integers(1, 30),
)
def test_depths_are_those_of_exact_arithmetic_and_never_fall(total, start, level, num_stages, num):
    settings = {"freeze_start": float(start), "freeze_level": float(level), "num_stages": num_stages}
    net = nn.Sequential(*[nn.Linear(1, 1, bias=False, device="meta") for _ in range(num + 1)])
    a, depths = Fraction(start), []
    for number in range(total + 1):
        gone = max(Fraction(0), (Fraction(number, total) - a) / (1 - a))
        share = Fraction(level) * (gone if num_stages is None else Fraction(int(num_stages * gone), num_stages))
        assert _share(number / total, **settings) == pytest.approx(float(share), rel=1e-9, abs=1e-12)
        depths.append(len(frozen_layers(net, number / total, **settings)))
        assert depths[-1] == int(share * num)
    assert depths == sorted(depths) and depths[-1] == int(Fraction(level) * num)


class Parted(nn.Module):
    """A network with its own and its children's parameters, a shared child, a tie, and a child without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(3))
        self.embedding = nn.Embedding(5, 3)
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.statistics = nn.BatchNorm1d(3, affine=False)
        self.norm = nn.LayerNorm(3)
        self.shared_later = self.first
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        hidden = self.first(self.embedding(ids) + self.token)
        return self.head(self.norm(self.shared_later(self.again(hidden))))


def test_layers_are_in_the_order_of_definition_and_shared_ones_count_where_they_are_last():
    layers = layers_of(Parted())
    assert layers == (
        ("token",),  # of a module with children
        ("norm.weight", "norm.bias"),
        ("first.weight", "first.bias"),  # three times in the network
        ("embedding.weight", "head.bias"),  # tied
    )
    assert frozen_layers(Parted(), 1) == ("token", "norm.weight", "norm.bias", "first.weight", "first.bias")


def test_modules_without_trainable_parameters_are_not_layers():
    net = four_layers()
    net[2].requires_grad_(False)
    net[4].bias.requires_grad_(False)
    assert layers_of(net) == (LAYERS[0], ("4.weight",), LAYERS[3])
    assert layers_of(net, {"0.weight", "0.bias"}) == tuple(LAYERS[1:])


class Scaling(nn.Module):
    """A parametrization with its own parameters, one of which is parametrized in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = parametrizations.weight_norm(nn.Linear(5, 5, bias=False))

    def forward(self, weight):
        return self.factor(weight)


def test_a_parametrized_tensor_belongs_to_its_module():
    net = four_layers()
    plain = [set(layer) for layer in layers_of(net)]
    parametrizations.weight_norm(net[0])
    parametrize.register_parametrization(net[2], "weight", Scaling())
    parametrizations.spectral_norm(net[4], "bias", dim=0)
    parametrizations.weight_norm(net[6])
    layers = layers_of(net)
    assert [{name.split(".")[0] for name in layer} for layer in layers] == [{"0"}, {"2"}, {"4"}, {"6"}]
    assert [len(layer) for layer in layers] == [3, 4, 2, 3]
    for name in ("0", "2", "4", "6"):
        owned = [key for layer in layers for key in layer if key.startswith(f"{name}.")]
        assert owned == [key for key, _ in net[int(name)].named_parameters(name)]
    assert set(frozen_layers(net, 1)) == {name for layer in layers[:3] for name in layer}
    for number in (0, 2, 4, 6):
        parametrize.remove_parametrizations(net[number], "bias" if number == 4 else "weight")
    assert [set(layer) for layer in layers_of(net)] == plain


def test_a_parametrized_module_with_children_comes_before_them():
    attention = nn.MultiheadAttention(4, 2)
    parametrizations.weight_norm(attention, "in_proj_weight")
    own = ("in_proj_bias", *(f"parametrizations.in_proj_weight.original{i}" for i in range(2)))
    assert layers_of(attention) == (own, ("out_proj.weight", "out_proj.bias"))
    tied = nn.Sequential(attention, nn.Linear(4, 4, bias=False))
    tied[1].weight = nn.Parameter(torch.ones(4, 4))
    attention.get_submodule("parametrizations.in_proj_weight").register_parameter("original1", tied[1].weight)
    assert [set(layer) for layer in layers_of(tied)] == [
        {"0.in_proj_bias", "0.parametrizations.in_proj_weight.original0"},
        {"0.out_proj.weight", "0.out_proj.bias"},
        {"0.parametrizations.in_proj_weight.original1"},
    ]


# In a run


@pytest.mark.parametrize("microbatches", [1, 3])
def test_training_equals_a_manual_loop(microbatches):
    net = four_layers()
    *_, end = run([layer_freezing(0.25, num_stages=None)], make_state(net), microbatches=microbatches)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    for number in range(20):
        depth = int(max(Fraction(0), (Fraction(number, 20) - Fraction(1, 4)) / Fraction(3, 4)) * 3)
        for name, param in net.named_parameters():
            param.requires_grad_(all(name not in layer for layer in LAYERS[:depth]))
        sgd.zero_grad(set_to_none=True)
        F.cross_entropy(net(BATCH[0]), BATCH[1]).backward()
        sgd.step()
    for name, param in net.named_parameters():
        torch.testing.assert_close(end.params[name], param.detach(), rtol=1e-5, atol=1e-6)


def test_the_backward_pass_ends_at_the_last_frozen_layer():
    passed: list[int] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, number):
            ctx.number = number
            return x.clone()

        @staticmethod
        def backward(ctx, *grads):
            passed.append(ctx.number)
            return grads[0], None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)])

        def forward(self, x):
            for number, layer in enumerate(self.layers):
                x = Watched.apply(layer(x), number)
            return x

    by_step = []
    step, state = compose(loop_events, [layer_freezing(0, num_stages=4)]), make_state(Net(), "8ba")
    for _ in range(8):
        state = step(state, BATCH)
        by_step.append(sorted(passed))
        passed.clear()
    everything = [0, 1, 2, 3]
    # Depths 0, floor(3 / 4) = 0, floor(6 / 4) = 1 and floor(9 / 4) = 2, for two steps each.
    assert by_step == [everything] * 4 + [[1, 2, 3]] * 2 + [[2, 3]] * 2


def test_the_last_layer_never_freezes():
    states = run([layer_freezing(0, num_stages=None)], make_state(), 30)  # beyond the run's end
    found = constant_from(states)
    assert [found[name] for layer in LAYERS for name in layer] == [7, 7, 14, 14, 20, 20, 30, 30]
    (alone,) = run([layer_freezing(0, num_stages=None)], make_state(nn.Linear(6, 4), "4ba"), 4)[-1:]
    (plain,) = run([], make_state(nn.Linear(6, 4), "4ba"), 0)
    assert alone.metrics["layer_freezing/layers_frozen"] == 0 and not tree.equal(alone.params, plain.params)


def test_depth_and_share_are_reported():
    _, *states = run([layer_freezing(0.2, 0.8, num_stages=4, name="f")], make_state())
    shares = [0, 0.2, 0.4, 0.6]  # from 0.2, 0.4, 0.6 and 0.8 of the run on
    assert all("f/layers_frozen" not in state.metrics for state in states[:4])
    for state, share in zip(states[4:], [share for share in shares for _ in range(4)], strict=True):
        assert state.metrics["f/layers_frozen"] == int(share * 3)
        assert state.metrics["f/percentage_frozen"].item() == pytest.approx(share)


def test_parameters_frozen_by_the_user_stay_frozen_and_do_not_count():
    net = four_layers()
    net[0].requires_grad_(False)
    states = run([layer_freezing(0, num_stages=None)], make_state(net))
    found = constant_from(states)  # of two layers, floor(2 u)
    assert [{found[name] for name in layer} for layer in LAYERS] == [{0}, {10}, {20}, {20}]
    assert states[-1].context.frozen == set(LAYERS[0])


def test_statistics_of_frozen_layers_are_still_updated():
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    before, after = run([layer_freezing(0, num_stages=None)], make_state(net), 22)[-2:]
    assert after.metrics["layer_freezing/layers_frozen"] == 2
    assert all(torch.equal(before.params[name], after.params[name]) for name in ("1.weight", "1.bias"))
    assert after.buffers["1.num_batches_tracked"] == before.buffers["1.num_batches_tracked"] + 1
    assert not torch.equal(after.buffers["1.running_mean"], before.buffers["1.running_mean"])


def test_a_longer_run_thaws_layers_that_are_not_yet_due():
    states = run([layer_freezing(num_stages=None)], make_state())
    longer = states[-1].replace(timestamp=Timestamp(batch=20, run=make_state(duration="40ba").timestamp.run))
    assert set(constant_from(run([layer_freezing(num_stages=None)], longer, 1)).values()) == {1}


# In company


def second_gradient(seen: list[set[str]]) -> Algorithm:
    """Return an algorithm that steps by the gradient at a nearby point, as SAM does."""

    def apply(event, state):
        del event
        there = {**state.params, **{name: state.params[name] + 0.01 * grad for name, grad in state.grads.items()}}
        grads, _ = state.gradient(there)
        seen.append(set(grads))
        return state.replace(grads=grads)

    return Algorithm("second_gradient", on(Event.AFTER_TRAIN_BATCH), apply)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_other_methods_only_see_gradients_of_training_layers(microbatches):
    seen: list[set[str]] = []
    methods = [layer_freezing(0, num_stages=None), second_gradient(seen), gradient_norm(each=True)]
    states = run([*methods, loss_scaling(2.0**10)], make_state(), microbatches=microbatches)
    left = [{name for layer in LAYERS[depth:] for name in layer} for depth in (0, 1, 2)]
    assert seen == [left[0]] * 7 + [left[1]] * 7 + [left[2]] * 6
    for state, names in zip(states[1:], seen, strict=True):
        reported = {name.partition("/")[2] for name in state.metrics if name.startswith("gradient_norm/")}
        assert reported == names and state.metrics["loss_scaling/skipped"] == 0
    assert [constant_from(states)[layer[0]] for layer in LAYERS] == [7, 14, 20, 20]


# Refused settings


def test_a_player_with_all_layers_frozen_is_an_error():
    (scope,) = [node for node in loop_events if isinstance(node, pc.loop.Microbatches)]
    body = [pc.loop.Grad(*node.body, wrt="0.*") if isinstance(node, pc.loop.Grad) else node for node in scope.body]
    program = [pc.loop.Microbatches(*body) if node is scope else node for node in loop_events]
    step, state = compose(program, [layer_freezing(0, num_stages=None)]), make_state()
    for _ in range(7):
        state = step(state, BATCH)
    with pytest.raises(ValueError, match=r"wrt='0\.\*' matches no trainable parameter"):
        step(state, BATCH)
