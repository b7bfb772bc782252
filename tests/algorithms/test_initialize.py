"""Initial weights by pattern: what layers compute with them, draws, order among methods, and refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import purecompose as pc
from purecompose import Algorithm, State, algorithms as alg, compose, loop_events, optim
from purecompose.algorithms import initialize
from tests.helpers import assert_same, make_batches, make_cnn, make_state, run_steps


def begun(net: nn.Module, *methods: Algorithm, **options: Any) -> State:
    return compose(loop_events, methods).init(make_state(net, **options))


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 2), nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.GELU(), nn.Conv1d(4, 4, 3), nn.Linear(4, 4)
    )


def drawn(size: tuple[int, ...]) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1))


# What layers compute


def test_convolutions_after_the_first_begin_as_the_identity() -> None:
    start = make_state(convolutional())
    state = compose(loop_events, [initialize("dirac")]).init(start)
    changed = {name for name in start.params if not torch.equal(start.params[name], state.params[name])}
    assert changed == {"1.weight", "3.weight"}
    conv, images = pc.to_module(state).get_submodule("1"), drawn((2, 8, 5, 5))
    assert torch.equal(conv(images)[:, :8], images)
    assert torch.equal(state.params["1.weight"][8:], start.params["1.weight"][8:])


def test_the_first_convolution_counts_also_if_its_weight_is_parametrized() -> None:
    for at, changed in ((0, {"1.weight", "2.weight"}), (1, {"2.weight"})):
        net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))
        weight_norm(net[at])
        start = make_state(net)
        end = compose(loop_events, [initialize("dirac")]).init(start).params
        assert {name for name, param in start.params.items() if not torch.equal(param, end[name])} == changed


@pytest.mark.parametrize(
    ("conv", "size"),
    [
        (nn.Conv2d(6, 6, 3, padding=1, groups=3, bias=False), (2, 6, 5, 5)),
        (nn.Conv2d(4, 4, 5, padding=2, groups=4, bias=False), (2, 4, 7, 7)),
        (nn.Conv2d(6, 4, 1, bias=False), (2, 6, 5, 5)),
        (nn.Conv1d(3, 3, 3, padding=1, bias=False), (2, 3, 9)),
        (nn.Conv3d(2, 2, 3, padding=1, bias=False), (1, 2, 4, 4, 4)),
        (nn.Conv2d(3, 3, 2, padding=1, bias=False), (2, 3, 5, 5)),
    ],
    ids=str,
)
def test_identities_of_all_kinds(conv: nn.Module, size: tuple[int, ...]) -> None:
    state = begun(nn.Sequential(conv), initialize("dirac", "0.*"))
    images, outputs = drawn(size), pc.to_module(state)(drawn(size))
    within = tuple(slice(side) for side in size[2:])  # a kernel of even size has one more output
    assert torch.equal(outputs[:, :, *within], images[:, : outputs.shape[1]])


def test_further_filters_of_each_group_keep_their_drawn_weights() -> None:
    net = nn.Sequential(nn.Conv2d(4, 6, 1, groups=2))
    before = make_state(net).params["0.weight"].flatten(1)
    after = begun(net, initialize("dirac", "*")).params["0.weight"].flatten(1)
    one = torch.eye(2)
    assert torch.equal(after, torch.cat([one, before[2:3], one, before[5:6]]))


def test_zeros_and_their_patterns() -> None:
    state = begun(convolutional(), initialize("zeros", ["0.bias", "4.*"]))
    assert {name for name, param in state.params.items() if not param.any()} == {"0.bias", "4.weight", "4.bias"}
    assert initialize("zeros", "4.*").config == {"how": "zeros", "where": ("4.*",)}


def test_orthogonal_weights_are_drawn_with_the_key() -> None:
    method = initialize("orthogonal", "*.weight")
    one, same, other = (begun(convolutional(), method, key=key).params for key in (0, 0, 1))
    for name in ("0.weight", "1.weight", "3.weight", "4.weight"):
        matrix = one[name].flatten(1)
        gram = matrix @ matrix.T if len(matrix) <= matrix.shape[1] else matrix.T @ matrix
        torch.testing.assert_close(gram, torch.eye(len(gram)), rtol=0, atol=1e-6)
        assert torch.equal(one[name], same[name]) and not torch.equal(one[name], other[name])
    assert not torch.equal(one["3.weight"].flatten(1)[:, :4], one["4.weight"])


def test_signs_of_orthogonal_matrices_are_even() -> None:
    """Without a sign for each column, the decomposition would favour some matrices."""
    keys = pc.random.split(pc.random.key(0), 200)
    net = nn.Sequential(nn.Linear(2, 2))
    firsts = [begun(net, initialize("orthogonal", "0.weight"), key=key).params["0.weight"][0, 0] for key in keys]
    assert abs(torch.stack(firsts).sign().mean()) < 0.25  # 3.5 standard deviations


# Parameters and methods around it


def test_frozen_parameters_are_kept_and_tied_ones_change_wherever_they_are_used() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    net[1].requires_grad_(False)
    state = begun(net, initialize("zeros", "*"))
    assert torch.equal(state.params["1.weight"], net[1].get_parameter("weight"))
    assert not pc.to_module(state).get_parameter("2.weight").any()
    with pytest.raises(ValueError, match=r"where: '1\.\*' matches no trainable parameter; the names are 0.weight, 0.b"):
        begun(net, initialize("zeros", "1.*"))


@pytest.mark.parametrize(
    "companion", [alg.lookahead(0.5, every=1), alg.schedule_free(), alg.ema("2ba"), alg.swa(0.0, 1.0, "1ba")]
)
@pytest.mark.parametrize("is_first", [True, False])
def test_copies_of_weights_are_those_of_the_new_ones(companion: Algorithm, is_first: bool) -> None:
    """A run equals that of a network that was created with these weights."""
    given = make_cnn()
    nn.init.dirac_(given.get_parameter("3.weight").data)
    methods = [companion, initialize("dirac")] if is_first else [initialize("dirac"), companion]
    batches, optimizer = make_batches(3, shape=(2, 6, 6)), optim.adamw(0.01, betas=(0.0, 0.999))
    ends = []
    for net, listed in ((make_cnn(), methods), (given, [companion])):
        step = compose(loop_events, listed)
        ends.append(run_steps(step, step.init(make_state(net, optimizer=optimizer)), batches))
    for field in ("params", "opt_state", "slots"):
        assert_same(getattr(ends[0], field), getattr(ends[1], field))


def test_names_are_those_after_surgery_and_layouts_are_kept() -> None:
    state = begun(make_cnn(), initialize("dirac", "3.conv.weight"), alg.blurpool(min_channels=1), alg.channels_last())
    weight = state.params["3.conv.weight"]
    assert weight.stride() == (36, 1, 12, 4) and torch.equal(weight[:, :, 1, 1], torch.eye(4))


def test_members_of_a_population_have_their_own_draws() -> None:
    together = pc.population(compose(loop_events, [initialize("orthogonal", "0.weight")]), 2)
    states = [make_state(key=key) for key in (0, 1)]
    first, second = pc.unstack_states(together.init(pc.stack_states(states)))
    assert not torch.equal(first.params["0.weight"], second.params["0.weight"])


# Refusals


@pytest.mark.parametrize("how", ["zeros", "orthogonal"])
def test_only_the_identity_has_a_default(how: Any) -> None:
    with pytest.raises(ValueError, match=f"where=None: expected patterns of the parameters to set to {how}"):
        initialize(how)


def test_patterns_that_match_nothing_of_the_kind() -> None:
    for how, where, words in (
        (
            "dirac",
            "4.weight",
            "'4.weight' matches no trainable weight of a convolution; .* 0.weight, 1.weight, 3.weigh",
        ),
        ("orthogonal", "*.bias", r"'\*.bias' matches no trainable parameter with two dimensions"),
        ("zeros", "head.*", r"'head.\*' matches no trainable parameter;"),
    ):
        with pytest.raises(ValueError, match=f"^initialize: where: {words}"):
            begun(convolutional(), initialize(how, where))  # pyright: ignore[reportArgumentType]


def test_warnings() -> None:
    with pytest.warns(UserWarning, match="initialize has no effect: it looked for convolutions after the first"):
        begun(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()), initialize("dirac"))
    state = run_steps(compose(loop_events), make_state(), make_batches(2))
    with pytest.warns(UserWarning, match="initialize leaves the weights as they are: .* this one is at 2ba"):
        after = compose(loop_events, [initialize("zeros", "*")]).init(state)
    assert_same(after.params, state.params)
