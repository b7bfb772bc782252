"""Attention and batch norm in half precision under transforms: populations, and gradients through whole steps."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, compose, loop_events, losses, optim
from purecompose.nn import models


def make_encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (6, 16)), layer, nn.Flatten(), nn.Linear(96, 2))


def make_vit() -> nn.Module:
    vit = models.build("vit", in_shape=(6, 4, 4), num_classes=2, seed=0, width=8, depth=1, patch_size=2)
    return nn.Sequential(nn.Unflatten(1, (6, 4, 4)), vit)


def make_normed(norm: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.Conv2d(6, 4, 3), norm or nn.BatchNorm2d(4), nn.Tanh())
    return nn.Sequential(nn.Unflatten(1, (6, 4, 4)), convolution, nn.Flatten(), nn.Linear(16, 2))


class Called(nn.BatchNorm2d):
    """Batch or instance norm without `torch.nn.functional`."""

    def __init__(self, name: str) -> None:
        super().__init__(4)
        self.name = name

    def forward(self, input: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        if self.name == "batch_norm":
            return torch.batch_norm(input, self.weight, self.bias, *statistics, True, 0.1, 1e-5, False)
        return torch.instance_norm(
            input=input, weight=self.weight, bias=self.bias, running_mean=statistics[0], running_var=statistics[1],
            use_input_stats=True, momentum=0.1, eps=1e-5, cudnn_enabled=False,
        )  # fmt: skip


NETWORKS = {
    "nn.TransformerEncoderLayer": make_encoder,
    "vit": make_vit,
    "nn.BatchNorm2d": make_normed,
    "nn.InstanceNorm2d": lambda: make_normed(nn.InstanceNorm2d(4, affine=True)),
    "nn.InstanceNorm2d with statistics": lambda: make_normed(nn.InstanceNorm2d(4, track_running_stats=True)),
    "torch.batch_norm": lambda: make_normed(Called("batch_norm")),
    "torch.instance_norm": lambda: make_normed(Called("instance_norm")),
}
BATCH = torch.randn(4, 96, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0])


def make_state(make: Callable[[], nn.Module], precision: str, rate: float = 0.1) -> State:
    optimizer = optim.sgd(pc.hparam("lr", 0.1))
    state = State.create(make(), loss=losses.cross_entropy, optimizer=optimizer, duration="9ba", precision=precision)
    return state.replace(hparams={"lr": torch.tensor(rate)})


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_members_equal_their_single_runs(make: Callable[[], nn.Module], precision: str) -> None:
    step, alone = compose(loop_events), [make_state(make, precision, rate) for rate in (0.1, 0.3)]
    stacked = pc.population(step, 2)(pc.stack_states(alone), BATCH)
    for state, member in zip(alone, pc.unstack_states(stacked), strict=True):
        expected = step(state, BATCH)
        torch.testing.assert_close(member.params, expected.params, rtol=0.02, atol=2e-3)
        torch.testing.assert_close(member.buffers, expected.buffers, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)])
def test_members_with_statistics_in_half_precision_equal_their_single_runs(norm: nn.Module) -> None:
    step, alone = compose(loop_events), [make_state(lambda: make_normed(norm).bfloat16(), "bf16") for _ in range(2)]
    stacked = pc.population(step, 2)(pc.stack_states(alone), BATCH)
    for state, member in zip(alone, pc.unstack_states(stacked), strict=True):
        expected = step(state, BATCH)
        torch.testing.assert_close(member.params, expected.params, rtol=0.05, atol=0.01)
        torch.testing.assert_close(member.buffers, expected.buffers, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_members_are_evaluated_as_in_single_runs(make: Callable[[], nn.Module]) -> None:
    alone = [make_state(make, "bf16"), make_state(make, "bf16")]
    (together,) = pc.predict(pc.stack_states(alone), [BATCH], step=pc.population(compose(loop_events), 2))
    torch.testing.assert_close(together[1], alone[1].forward(BATCH[0]), rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_gradients_through_steps_are_those_of_full_precision(make: Callable[[], nn.Module], precision: str) -> None:
    step = compose(loop_events)

    def slope(precision: str) -> Tensor:
        start = make_state(make, precision)

        def loss_after(rate: Tensor) -> Tensor:
            state = start.replace(hparams={"lr": rate})
            for _ in range(2):
                state = step(state, BATCH)
            assert state.loss is not None
            return state.loss

        return torch.func.grad(loss_after)(torch.tensor(0.1))

    torch.testing.assert_close(slope(precision), slope("fp32"), rtol=0.2, atol=0.02)
