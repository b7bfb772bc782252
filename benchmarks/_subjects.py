"""What is measured: the networks, and the sides that train them with the same arithmetic.

Each side is a function without arguments that takes one step. The sides by hand are written as people write
them; with methods they mix and smooth by torch's global generator.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import purecompose as pc
from purecompose import Algorithm, State, Step, algorithms as alg, compose, loop_events, losses, optim
from purecompose.nn import layers, models


LR, MOMENTUM = 0.01, 0.9

METHODS = "mixup + label smoothing"


class Subject(NamedTuple):
    """A network with a batch for it."""

    net: nn.Module
    inputs: Tensor
    targets: Tensor
    num_classes: int = 10


def mlp(dropout: float = 0.0) -> Subject:
    """An MLP 64-128-128-10, with dropout behind its hidden layers where that is not 0, and a batch of 64."""
    torch.manual_seed(0)
    drop = [nn.Dropout(dropout)] if dropout else []
    modules = [nn.Linear(64, 128), nn.ReLU(), *drop, nn.Linear(128, 128), nn.ReLU(), *drop, nn.Linear(128, 10)]
    net = nn.Sequential(*modules)
    return Subject(net, torch.randn(64, 64), torch.randint(10, (64,)))


def resnet8() -> Subject:
    """A ResNet-8 and a batch of 64 images of 32x32."""
    return _images(models.build("resnet8", in_shape=(3, 32, 32), num_classes=10, seed=0), 32)


def cnn() -> Subject:
    """Four convolutions with BatchNorm and a batch of 64 images of 16x16."""
    return _images(models.build("cnn", in_shape=(3, 16, 16), num_classes=10, seed=0, width=8), 16)


def resnet20() -> Subject:
    """A ResNet-20 and a batch of 64 images of 16x16."""
    return _images(models.build("resnet20", in_shape=(3, 16, 16), num_classes=10, seed=0), 16)


def gpt(depth: int = 2, batch_size: int = 16) -> Subject:
    """A GPT of width 128 and a batch of sequences of 64 tokens."""
    net = models.build("gpt", in_shape=(64,), num_classes=64, seed=0, depth=depth)
    torch.manual_seed(0)
    tokens = torch.randint(64, (batch_size, 65))
    return Subject(layers.ClassesSecond(net), tokens[:, :-1], tokens[:, 1:], 64)


def vit() -> Subject:
    """A vision transformer of two blocks, of width 64, with 64 patches, and a batch of 64 images of 32x32."""
    net = models.build("vit", in_shape=(3, 32, 32), num_classes=10, seed=0, depth=2, pool="mean")
    return _images(net, 32)


def _images(net: nn.Module, size: int) -> Subject:
    torch.manual_seed(0)
    return Subject(net, torch.randn(64, 3, size, size), torch.randint(10, (64,)))


NETWORKS: dict[str, Callable[[], Subject]] = {"MLP 64-128-128-10": mlp, "ResNet-8, 32x32": resnet8}


def methods(*, are_tokens: bool = False) -> list[Algorithm]:
    """MixUp and label smoothing; for tokens, which cannot be mixed, label smoothing."""
    return [*([] if are_tokens else [alg.mixup(alpha=0.2)]), alg.label_smoothing(0.1)]


def mixed(inputs: Tensor, targets: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """The same by hand: inputs mixed, targets mixed and smoothed, with draws from torch's global generator."""
    dense = F.one_hot(targets, num_classes).float()
    if inputs.is_floating_point():
        share = torch.distributions.Beta(0.2, 0.2).sample()
        share = torch.minimum(share, 1 - share)
        order = torch.rand(len(inputs)).argsort()
        inputs = (1 - share) * inputs + share * inputs[order]
        dense = (1 - share) * dense + share * dense[order]
    return inputs, (dense * 0.9 + 0.1 / num_classes).movedim(-1, 1)


def new_state(subject: Subject, **options: Any) -> State:
    """The state at the start of a long run: SGD with momentum."""
    return State.create(
        subject.net,
        loss=losses.cross_entropy,
        optimizer=optim.sgd(LR, momentum=MOMENTUM),
        duration="100000ba",
        batches_per_epoch=100,
        **options,
    )


def by_hand(
    subject: Subject, *, mix: bool = False, backend: str | None = None, precision: str = "fp32"
) -> Callable[[], Tensor]:
    """The loop by hand: `zero_grad`, forward, loss, backward, `step`; with a backend under `torch.compile`.

    With precision "bf16", forward and loss are under autocast.
    """
    net = copy.deepcopy(subject.net).train()  # this side only changes its network in place
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        if mix:
            inputs, targets = mixed(inputs, targets, subject.num_classes)
        optimizer.zero_grad()
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(net(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    run = torch.compile(step, backend=backend) if backend else step
    return lambda: run(subject.inputs, subject.targets)


def ours(step: Step, subject: Subject, call: Callable[..., State] | None = None, **options: Any) -> Callable[[], None]:
    """A step of ours, composed or compiled, from the start of a run on."""
    return going_on(step, new_state(subject, **options), (subject.inputs, subject.targets), call)


def going_on(step: Step, state: State, batch: Any, call: Callable[..., Any] | None = None) -> Callable[[], None]:
    """Step after step from this state on, always with the same batch; by `call`, where it is not the step itself."""
    state, take = step.init(state), call or step

    def run() -> None:
        nonlocal state
        state = take(state, batch)

    return run


def sides(subject: Subject, *, mix: bool, backend: str) -> dict[str, Callable[[], object]]:
    """All ways to take the same step."""
    step = compose(loop_events, methods() if mix else [])
    return {
        "by hand": by_hand(subject, mix=mix),
        "by hand + torch.compile": by_hand(subject, mix=mix, backend=backend),
        "ours eager": ours(step, subject),
        "ours compiled": ours(pc.compile(step, donate=False, backend=backend), subject),
        "ours donated": ours(pc.compile(step, backend=backend), subject),
        "ours in torch.compile": ours(step, subject, torch.compile(step, backend=backend)),
    }
