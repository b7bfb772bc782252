"""Feed-forward blocks with gates or other activations: formulas in double precision, and kept and new weights."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

import purecompose as pc
from purecompose import losses, optim
from purecompose.algorithms import activation, gated_linear_units
from purecompose.algorithms._linear_layers import ACTIVATIONS
from purecompose.nn.layers import FeedForward, GatedLinearUnit, SelfAttention, SquaredReLU
from purecompose.nn.models import gpt
from tests.algorithms.surgery_checks import applied, hooked, patched


BY_HAND: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "identity": lambda x: x,
    "relu": lambda x: x * (x > 0),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "silu": lambda x: x / (1 + (-x).exp()),
    "squared_relu": lambda x: x * x * (x > 0),
    "tanh": lambda x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()),
}


class Block(nn.Module):
    """LayerNorm of the sum of a feed-forward block and its input, as in BERT."""

    def __init__(self, act: Callable[[Tensor], Tensor] | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = SelfAttention(4, 2)
        self.feed_forward, self.norm = FeedForward(4, 6, act, dropout), nn.LayerNorm(4)

    def forward(self, input: Tensor) -> Tensor:
        return self.norm(self.feed_forward(input) + input)


def make_state(net: nn.Module | None = None, *, seed: int = 0, **options: Any) -> pc.State:
    torch.manual_seed(seed)
    options = {"optimizer": optim.sgd(0.1, momentum=0.9), "key": 3, "duration": "8ba", **options}
    return pc.State.create(Block() if net is None else net, loss=losses.mse, **options)


def gated(state: pc.State, *args: Any, **options: Any) -> pc.State:
    return applied(state, gated_linear_units(*args, **options))[0]


def make_inputs(seed: int, *lead: int) -> Tensor:
    return torch.randn(*lead, 4, generator=torch.Generator().manual_seed(seed))


def by_hand(state: pc.State, input: Tensor, act: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the product and the block's output in float64, computed only from matrices and means."""
    p = {name.removeprefix("feed_forward."): value.detach().double() for name, value in state.params.items()}
    x = input.double()
    none = torch.zeros(6, dtype=torch.float64)
    gate = x @ p["up.gate.weight"].T + p.get("up.gate.bias", none)
    product = act(gate) * (x @ p["up.linear.weight"].T + p.get("up.linear.bias", none))
    total = product @ p["down.weight"].T + p["down.bias"] + x
    centred = total - total.mean(-1, keepdim=True)
    return product, centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(ACTIVATIONS)), st.booleans(), st.booleans(), st.integers(0, 99))
def test_the_block_is_the_formula(act: str, gate_bias: bool, linear_bias: bool, seed: int) -> None:
    state, input = gated(make_state(seed=seed), act, gate_bias, linear_bias), make_inputs(seed, 2, 3)
    _, expected = by_hand(state, input, BY_HAND[act])
    module = pc.to_module(state).double()
    assert expected.numel() == 24
    torch.testing.assert_close(module(input.double()), expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(state.forward(input).double(), expected, rtol=1e-4, atol=1e-5)


def test_only_the_first_layer_is_new() -> None:
    step, batch = pc.compose(pc.loop_events), (make_inputs(0, 2, 3), make_inputs(1, 2, 3))
    before = step(step.init(make_state()), batch)
    copied = before.copy()
    after, report = applied(before, gated_linear_units())
    assert report.replaced == ("feed_forward",)
    assert set(report.dropped) == {"feed_forward.up.weight", "feed_forward.up.bias"}
    assert set(report.made) == {"feed_forward.up.gate.weight", "feed_forward.up.linear.weight"}
    assert after.opt_state["momentum"].keys() == after.params.keys()
    for name in after.params.keys() & before.params.keys():
        assert after.params[name] is before.params[name]
        assert after.opt_state["momentum"][name] is before.opt_state["momentum"][name]
    assert not pc.tree.diff(before, copied)
    assert after.params["feed_forward.up.gate.weight"].shape == (6, 4)
    assert step(after, batch).timestamp.batch == 2
    attention = [module for module in after.model.module.modules() if type(module) is SelfAttention]
    assert len(attention) == 1


def test_new_weights_are_drawn_with_the_runs_key() -> None:
    first, again, other = (gated(make_state(key=key)) for key in (3, 3, 4))
    gate = "feed_forward.up.gate.weight"
    assert torch.equal(first.params[gate], again.params[gate]) and first.model == again.model
    assert not torch.equal(first.params[gate], other.params[gate])
    assert not torch.equal(first.params[gate], first.params["feed_forward.up.linear.weight"])
    assert bool((first.params[gate].abs() <= 4**-0.5).all())  # as initialised by torch's linear layer


def test_blocks_keep_their_own_activations_and_a_given_one_is_copied() -> None:
    net = nn.Sequential(Block(nn.ReLU()), Block(nn.PReLU()))
    own, given = gated(make_state(net)), nn.PReLU()
    acts = [type(module.act) for module in own.model.module.modules() if isinstance(module, GatedLinearUnit)]
    assert acts == [nn.ReLU, nn.PReLU] and "1.feed_forward.up.act.weight" in own.params
    copies = gated(make_state(net), given)
    assert {"0.feed_forward.up.act.weight", "1.feed_forward.up.act.weight"} <= copies.params.keys()
    given.weight.data.fill_(7.0)
    assert copies.params["0.feed_forward.up.act.weight"].item() == 0.25


def test_functions_are_activations() -> None:
    state, input = gated(make_state(), torch.relu), make_inputs(0, 5)
    _, expected = by_hand(state, input, BY_HAND["relu"])
    torch.testing.assert_close(state.forward(input).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("act", [torch.tanh, nn.Tanh()])
def test_a_blocks_own_function_is_applied_once(act: Any) -> None:
    state, input = gated(make_state(Block(act))), make_inputs(0, 5)
    _, expected = by_hand(state, input, BY_HAND["tanh"])
    torch.testing.assert_close(state.forward(input).double(), expected, rtol=1e-4, atol=1e-5)


def test_dropout_stays_on_the_product() -> None:
    state, input = gated(make_state(Block(dropout=0.5))), make_inputs(0, 64)
    module = pc.to_module(state)
    feed_forward = module.get_submodule("feed_forward")
    seen = []
    feed_forward.get_submodule("down").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    module.train()(input)
    module.eval()(input)
    product, _ = by_hand(state, input, BY_HAND["gelu"])
    dropped = seen[0] == 0
    assert 0.3 < dropped.float().mean() < 0.7
    torch.testing.assert_close(seen[0].double(), torch.where(dropped, 0.0, 2 * product), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(seen[1].double(), product, rtol=1e-4, atol=1e-6)
    copy.deepcopy(module)(input)


class Reads(FeedForward):
    """A subclass whose own forward reads attributes that a gated unit does not have."""

    def forward(self, input: Tensor) -> Tensor:
        return self.down(torch.relu(nn.functional.linear(input, self.up.weight)))


class Double(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def tied_elsewhere(block: Any) -> nn.Module:
    """Return the block with the weight of its first layer tied to another layer in it."""
    block.act = nn.Sequential(nn.GELU(), nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False))
    block.act[2].weight = block.up.weight
    return block


def with_first(change: Callable[[nn.Module], Any]) -> FeedForward:
    block = FeedForward(4, 6)
    change(block.up)
    return block


LEFT: dict[str, Callable[[], nn.Module]] = {
    "own forward": lambda: Reads(4, 6),
    "forward on the instance": lambda: patched(FeedForward(4, 6)),
    "hook of the first layer": lambda: with_first(hooked),
    "forward on the first layer": lambda: with_first(patched),
    "parametrized": lambda: with_first(lambda up: parametrize.register_parametrization(up, "weight", Double())),
    "tied": lambda: tied_elsewhere(FeedForward(4, 6)),
}


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
def test_blocks_that_do_more_than_their_class_are_kept(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    net, input = nn.Sequential(make(), FeedForward(4, 6)), make_inputs(0, 5)
    before = make_state(net)
    after, report = applied(before, gated_linear_units())
    assert report.replaced == ("1",)
    module: Any = pc.to_module(after)
    assert torch.equal(module[0](input), net[0](input)) and after.forward(input).shape == (5, 4)
    with pytest.warns(UserWarning, match="kept all 1: none"):
        gated(make_state(make()))


def test_hooks_of_a_block_stay_with_it() -> None:
    state, input = gated(make_state(hooked(FeedForward(4, 6)))), make_inputs(0, 5)
    module: Any = pc.to_module(state)
    assert isinstance(module.up, GatedLinearUnit)
    torch.testing.assert_close(module(input), 2 * module.down(module.up(input)))


@pytest.mark.parametrize("biases", [False, True])
def test_blocks_with_one_first_layer_have_one_gate_and_their_own_activations(biases: bool) -> None:
    net: Any = nn.Sequential(FeedForward(4, 6, nn.ReLU()), FeedForward(4, 6, nn.Tanh()), FeedForward(4, 6)).double()
    net[1].up = net[0].up
    after, report = applied(make_state(net), gated_linear_units(None, biases, biases))
    assert report.replaced == ("0", "1", "2")
    module: Any = pc.to_module(after)
    units = [block.up for block in module]
    assert units[0].gate is units[1].gate and units[0].linear is units[1].linear and units[2].gate is not units[0].gate
    assert [type(unit.act) for unit in units] == [nn.ReLU, nn.Tanh, nn.GELU]
    assert not any(name.startswith("1.up") for name in after.params)
    assert {param.dtype for param in after.params.values()} == {torch.float64}
    # The same rules for another network share nothing with the first one.
    other = gated(make_state(net, key=4))
    assert not torch.equal(other.params["0.up.gate.weight"], after.params["0.up.gate.weight"])
    input = make_inputs(0, 5).double()
    step = pc.compose(pc.loop_events)
    trained = step(step.init(after), (input, torch.zeros(5, 4, dtype=torch.float64)))
    assert trained.params.keys() == after.params.keys()


@pytest.mark.parametrize("is_trained", [False, True])
def test_units_train_where_the_first_layer_did(is_trained: bool) -> None:
    net = nn.Sequential(FeedForward(4, 6), FeedForward(4, 6))
    net[0].up.requires_grad_(is_trained)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    after = gated(make_state(net), None, True, True)
    frozen = {f"0.up.{layer}.{name}" for layer in ("gate", "linear") for name in ("weight", "bias")}
    assert after.context.frozen == (set() if is_trained else frozen)


def test_a_gpt_has_one_matrix_more_in_each_block() -> None:
    net = gpt(7, 8, width=8, depth=2, num_heads=2)
    state = pc.State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1), duration="1ba")
    after = gated(state)
    hidden = state.params["blocks.0.feed_forward.up.bias"].numel()
    before, now = (sum(param.numel() for param in one.params.values()) for one in (state, after))
    assert now - before == 2 * (hidden * 8 - hidden)  # biases are removed
    assert after.forward(torch.zeros(2, 8, dtype=torch.int64)).shape == (2, 8, 7)


def test_a_network_without_blocks_is_warned_about() -> None:
    with pytest.warns(
        UserWarning, match="looked for FeedForward or BertIntermediate or RobertaIntermediate or GPT2MLP"
    ):
        gated(make_state(nn.Linear(2, 2)))


def test_a_block_without_an_activation_is_refused() -> None:
    net = FeedForward(4, 6)
    del net._modules["act"]
    net.act = None  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="expected an activation, got None"):
        gated(make_state(net))


def test_a_module_as_activation_is_a_setting() -> None:
    own = pc.algorithms.gated_linear_units(nn.SiLU())
    assert isinstance(own.config["act_fn"], nn.SiLU) and own != pc.algorithms.gated_linear_units()


# Other activations


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_a_new_activation_is_the_formula(act: str) -> None:
    block, input = FeedForward(4, 6, nn.Softplus()), make_inputs(0, 5)
    module: Any = pc.to_module(applied(make_state(block), activation(act))[0]).double()
    weights: Any = copy.deepcopy(block).double()
    expected = weights.down(BY_HAND[act](weights.up(input.double())))
    torch.testing.assert_close(module(input.double()), expected, rtol=1e-6, atol=1e-8)


def test_only_the_activation_is_new() -> None:
    state = make_state(gpt(7, 8, width=8, depth=2, num_heads=2))
    after, report = applied(state, activation())
    assert report.replaced == ("blocks.0.feed_forward", "blocks.1.feed_forward")
    assert all(after.params[name] is state.params[name] for name in {*after.params, *state.params})
    again, _ = applied(after, activation())
    assert again.model == after.model and not pc.tree.diff(again.params, after.params)
    _, report = applied(make_state(FeedForward(4, 6, nn.PReLU())), activation())
    assert report.dropped == ("act.weight",) and not report.made


@pytest.mark.parametrize("is_first", [True, False])
def test_the_activation_of_a_gate_is_replaced(is_first: bool) -> None:
    state, input = make_state(), make_inputs(0, 5)
    for method in [activation(), gated_linear_units()][:: 1 if is_first else -1]:
        state = applied(state, method)[0]
    _, expected = by_hand(state, input, BY_HAND["squared_relu"])
    torch.testing.assert_close(state.forward(input).double(), expected, rtol=1e-4, atol=1e-5)


def test_blocks_with_their_own_forward_keep_their_activation_and_hooks_stay() -> None:
    net = nn.Sequential(Reads(4, 6), patched(FeedForward(4, 6)), hooked(FeedForward(4, 6)))
    after, report = applied(make_state(net), activation())
    assert report.replaced == ("2",)
    module, input = pc.to_module(after), make_inputs(0, 5)
    block: Any = module.get_submodule("2")
    assert isinstance(block.act, SquaredReLU)
    torch.testing.assert_close(block(input), 2 * block.down(torch.relu(block.up(input)) ** 2))


def test_no_blocks_are_warned_about_and_unknown_names_are_refused() -> None:
    with pytest.warns(UserWarning, match="activation changed nothing: it looked for FeedForward or GatedLinearUnit"):
        applied(make_state(nn.Linear(2, 2)), activation())
    with pytest.raises(
        ValueError, match="activation: act_fn: expected one of 'gelu', .*'squared_relu', .* got 'swish'"
    ):
        activation("swish")
    wrong: Any = nn.ReLU()
    with pytest.raises(TypeError, match="activation: act_fn: expected a str, one of 'gelu', .* got ReLU"):
        activation(wrong)
