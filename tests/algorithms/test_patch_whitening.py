"""Patch whitening: white outputs, plain computations and runs from filters that were set before, and refusals."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import purecompose as pc
from purecompose import Algorithm, State, algorithms as alg, compose, loop_events, optim
from purecompose.algorithms import patch_whitening
from purecompose.functional import whitening_filters
from tests.helpers import assert_same, make_state


BATCHES = [
    (torch.randn(12, 3, 9, 9, generator=torch.Generator().manual_seed(seed)).cumsum(3), torch.arange(12) % 3)
    for seed in range(4)
]
IMAGES = BATCHES[0][0]


def net(conv: Any = None, *before: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    conv = conv or nn.Conv2d(3, 24, 2)
    layers = [nn.GELU(), nn.Conv2d(conv.out_channels, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(*before, conv, *layers)


def run(methods: list[Algorithm], state: State, num: int = 3, make: Any = lambda step: step, **options: Any) -> State:
    step = make(compose(loop_events, methods, **options))
    state = step.init(state)
    for batch in BATCHES[:num]:
        state = step(state, batch)
    return state


def plain_filters(images: Tensor, size: int, eps: float = 5e-4) -> Tensor:
    """Return the filters as they are computed where whitening is a part of the script, with any signs."""
    patches = images.unfold(2, size, 1).unfold(3, size, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3 * size**2).double()
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    scaled = (vectors / (values + eps).sqrt()).flip(1).T
    return scaled.view(-1, 3, size, size)


def moments(filters: Tensor, images: Tensor) -> Tensor:
    outputs = F.conv2d(images.double(), filters.double()).transpose(0, 1).flatten(1)
    return outputs @ outputs.T / outputs.shape[1]


# The filters


def test_outputs_over_the_first_batch_are_white_and_the_filters_those_of_a_plain_computation() -> None:
    weight = run([patch_whitening(eps=1e-7)], make_state(net()), 1).params["0.weight"]
    torch.testing.assert_close(moments(weight[:12], IMAGES), torch.eye(12, dtype=torch.float64), rtol=0, atol=1e-4)
    assert torch.equal(weight[12:], -weight[:12])
    weight = run([patch_whitening()], make_state(net()), 1).params["0.weight"].double()
    expected = plain_filters(IMAGES, 2)
    signs = (weight[:12] * expected).flatten(1).sum(1).sign().view(-1, 1, 1, 1)
    torch.testing.assert_close(weight[:12], signs * expected, rtol=1e-4, atol=1e-5)
    largest = weight[:12].flatten(1).gather(1, weight[:12].flatten(1).abs().argmax(1, keepdim=True))
    assert (largest > 0).all()


def test_components_whose_moments_are_small_compared_with_eps_stay_small() -> None:
    images = torch.cat([IMAGES[:, :2], IMAGES[:, :1]], 1)  # equal channels: four components do not vary
    filters = whitening_filters(images, (2, 2), eps=0.1)
    outputs = moments(filters, images).diag()
    assert (outputs[-4:] < 1e-9).all() and filters.abs().max() < 0.1**-0.5 + 1e-6
    torch.testing.assert_close(outputs, outputs.sort(descending=True).values, rtol=0, atol=1e-12)


def test_large_batches_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = whitening_filters(IMAGES, (3, 2))
    monkeypatch.setattr("purecompose.algorithms._initial_weights._MOST_NUMBERS", 5 * 18 * 81)
    torch.testing.assert_close(whitening_filters(IMAGES, (3, 2)), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("channels", "num"), [(7, 3), (40, 12)])
def test_channels_without_a_component_keep_their_drawn_weights(channels: int, num: int) -> None:
    state = make_state(net(nn.Conv2d(3, channels, 2)))
    end = run([patch_whitening()], state)
    weight, slot = end.params["0.weight"], end.slots["patch_whitening"]
    torch.testing.assert_close(weight[:num].double(), whitening_filters(IMAGES, (2, 2))[:num], rtol=1e-6, atol=1e-6)
    assert torch.equal(weight[2 * num :], state.params["0.weight"][2 * num :])
    patches = F.unfold(IMAGES.double(), 2).transpose(0, 1).flatten(1)
    values = torch.linalg.eigvalsh(patches @ patches.T / patches.shape[1]).flip(0)
    torch.testing.assert_close(slot.eigenvalues, values[:num].float())


@pytest.mark.parametrize("order", [1, -1])
def test_the_layer_is_whitened_for_what_it_is_given(order: int) -> None:
    """After layers that change the images, and methods that augment or mix them, wherever they are in the list."""
    seen: list[Tensor] = []
    look = Algorithm("look", pc.on(pc.Event.BATCH_START), lambda _, state: seen.append(state.inputs) or state)
    state = make_state(net(None, nn.AvgPool2d(2), nn.BatchNorm2d(3)))
    end = run([alg.mixup(1.0), alg.cutout(), patch_whitening("2"), look][::order], state, 1)
    assert not torch.equal(seen[0], IMAGES)
    given = F.batch_norm(F.avg_pool2d(seen[0], 2), None, None, training=True)
    torch.testing.assert_close(end.params["2.weight"][:12], whitening_filters(given, (2, 2)).float())
    mean = F.avg_pool2d(seen[0], 2).mean((0, 2, 3))
    torch.testing.assert_close(end.buffers["1.running_mean"], 0.1 * mean)  # the pass does not count


# In a run


def test_only_the_first_batch_counts_and_the_weight_is_frozen_without_memory() -> None:
    state = make_state(net())
    first, end = (run([patch_whitening()], state, num) for num in (1, 4))
    assert torch.equal(first.params["0.weight"], end.params["0.weight"])
    assert end.context.frozen == {"0.weight"} and "0.weight" not in end.opt_state["momentum"]
    assert not torch.equal(first.params["0.bias"], end.params["0.bias"])
    later = compose(loop_events, [patch_whitening()])(first.replace(params=state.params), BATCHES[1])
    assert torch.equal(later.params["0.weight"], state.params["0.weight"])


def whitened() -> nn.Sequential:
    """Return the network with filters that were set before its run."""
    made = net()
    filters = whitening_filters(IMAGES, (2, 2)).float()
    made[0].weight = nn.Parameter(torch.cat([filters, -filters]))
    return made


OPTIMIZERS = {"sgd": optim.sgd(0.1, momentum=0.9, weight_decay=0.1), "adamw": optim.adamw(0.01, betas=(0.0, 0.999))}
COMPANIONS = [alg.lookahead(0.5, every=1), alg.schedule_free(), alg.ema("2ba"), alg.swa(0.0, 1.0, "1ba")]


@pytest.mark.parametrize("frozen", [True, False, "2ba"])
@pytest.mark.parametrize("companion", COMPANIONS, ids=lambda method: method.name)
def test_a_run_is_that_of_a_network_with_these_filters(companion: Algorithm, frozen: Any) -> None:
    """Also for methods that copy the weights at INIT, before the filters are known."""
    optimizer = OPTIMIZERS["adamw" if companion.name == "schedule_free" else "sgd"]
    given = whitened()
    if frozen is True:
        given[0].weight.requires_grad_(False)
    end = run([companion, patch_whitening(frozen=frozen)], make_state(net(), optimizer=optimizer), 4)
    until = Algorithm(
        "until",
        pc.on(pc.Event.BATCH_START) & pc.before("2ba"),
        lambda _, state: state.replace(paused=["0.weight"]),
        host=True,
    )
    methods = [companion, until] if frozen == "2ba" else [companion]
    expected = run(methods, make_state(given, optimizer=optimizer), 4)
    for field in ("params", "opt_state"):
        assert_same(getattr(end, field), getattr(expected, field))
    assert_same(end.slots[companion.name], expected.slots[companion.name])


def test_momentum_of_zeros_is_not_taken_for_a_copy_of_weights_of_zeros() -> None:
    zero = net()
    nn.init.zeros_(zero.get_parameter("0.weight"))
    end = run([patch_whitening(frozen=False)], make_state(zero, optimizer=OPTIMIZERS["sgd"]), 1)
    expected = run([], make_state(whitened(), optimizer=OPTIMIZERS["sgd"]), 1)
    assert_same(end.opt_state, expected.opt_state)
    assert_same(end.params, expected.params)


def test_frozen_until_a_time() -> None:
    weights = [run([patch_whitening(frozen="2ba")], make_state(net()), num).params["0.weight"] for num in (1, 2, 3)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


@pytest.mark.parametrize("frozen", [True, False, "2ba"])
def test_microbatches_compilation_layouts_and_half_precision(frozen: Any) -> None:
    expected = run([patch_whitening(frozen=frozen)], make_state(net()))
    sliced = run([patch_whitening(frozen=frozen)], make_state(net()), microbatches=3)
    torch.testing.assert_close(sliced.params, expected.params, rtol=1e-4, atol=1e-5)
    compiled = run(
        [patch_whitening(frozen=frozen)], make_state(net()), make=lambda s: pc.compile(s, backend="eager", quiet=True)
    )
    torch.testing.assert_close(compiled.params, expected.params, rtol=1e-4, atol=1e-5)
    strided = run([alg.channels_last(), patch_whitening(frozen=frozen)], make_state(net()))
    assert strided.params["0.weight"].stride() == (12, 1, 6, 3)
    torch.testing.assert_close(strided.params, expected.params, rtol=1e-4, atol=1e-5)
    halved = run([patch_whitening(frozen=frozen)], make_state(net(), precision="bf16"))
    torch.testing.assert_close(halved.params, expected.params, rtol=0.1, atol=0.02)


def test_members_of_a_population_keep_their_own_further_channels() -> None:
    step = compose(loop_events, [patch_whitening()])
    nets = [net(nn.Conv2d(3, 30, 2)), net(nn.Conv2d(3, 30, 2))]
    nn.init.ones_(nets[1].get_parameter("0.weight"))
    states = [make_state(made) for made in nets]
    together = pc.population(step, 2)
    members = pc.unstack_states(together(together.init(pc.stack_states(states)), BATCHES[0]))
    for member, state in zip(members, states, strict=True):
        assert torch.equal(member.params["0.weight"], step(step.init(state), BATCHES[0]).params["0.weight"])


# Refusals


def tied() -> nn.Module:
    made = net(nn.Conv2d(3, 3, 1))
    made[1] = nn.Conv2d(3, 3, 1)
    made[1].weight = made[0].weight
    return made


def frozen_first() -> nn.Module:
    made = net()
    made[0].weight.requires_grad_(False)
    return made


@pytest.mark.parametrize(
    ("made", "layer", "words"),
    [
        (lambda: net(nn.Conv2d(3, 6, 2, groups=3)), None, "layer '0': expected a convolution without groups"),
        (lambda: net(nn.Conv2d(3, 6, 2, dilation=2)), None, "expected a convolution without dilation"),
        (lambda: net(nn.Conv2d(3, 1, 2)), None, "expected at least two output channels"),
        (lambda: net(parametrizations.weight_norm(nn.Conv2d(3, 6, 2))), None, "expected a plain nn.Conv2d"),
        (tied, None, "expected a weight that no other layer shares"),
        (frozen_first, None, "expected a weight that trains, or the layer named by layer="),
        (net, "1", r"layer='1': expected the name of an nn.Conv2d of the network: '0', '2'"),
    ],
)
def test_layers_that_cannot_be_whitened_are_refused(made: Any, layer: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compose(loop_events, [patch_whitening(layer)]).init(make_state(made()))


def test_a_frozen_layer_is_whitened_if_it_is_named() -> None:
    weight = run([patch_whitening("0")], make_state(frozen_first()), 1).params["0.weight"]
    assert torch.equal(weight, run([patch_whitening()], make_state(net()), 1).params["0.weight"])


class Idle(nn.Module):
    """A network with a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = nn.Conv2d(3, 4, 2), net()

    def forward(self, images: Tensor) -> Tensor:
        return self.used(images)


def test_a_layer_that_is_not_called_and_images_that_are_too_small() -> None:
    with pytest.raises(ValueError, match="does not call the layer 'unused'; name another one by layer="):
        run([patch_whitening()], make_state(Idle()), 1)
    with pytest.raises(ValueError, match=r"expected images \(N, C, H, W\) of at least \(10, 2\), got"):
        whitening_filters(IMAGES, (10, 2))
    with pytest.raises(ValueError, match="patch_whitening: eps: expected a finite number > 0"):
        patch_whitening(eps=0)
    with pytest.raises(TypeError, match="frozen"):
        patch_whitening(frozen=None)  # pyright: ignore[reportArgumentType]


def test_warnings() -> None:
    state = make_state(nn.Sequential(nn.Flatten(), nn.Linear(243, 3)))
    with pytest.warns(UserWarning, match="patch_whitening has no effect: it looked for nn.Conv2d and found none"):
        run([patch_whitening()], state, 1)
    begun = run([], make_state(net()), 2)
    with pytest.warns(UserWarning, match="leaves the weight of '0' as it is and freezes it: .* this one is at 2ba"):
        end = run([patch_whitening()], begun, 2)
    assert torch.equal(end.params["0.weight"], begun.params["0.weight"])


@pytest.mark.parametrize("images", [torch.full((4, 3, 9, 9), math.nan), torch.zeros(0, 3, 9, 9)])
def test_images_without_moments_are_refused(images: Tensor) -> None:
    with pytest.raises(ValueError, match="whitening: expected images of finite numbers, at least one"):
        whitening_filters(images, (2, 2))
