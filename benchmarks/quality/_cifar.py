"""CIFAR-10 for its tasks: the images, the network, the plain loop, and the composed step.

The network is `pc.nn.models.airbench` (Keller Jordan, 94 % on CIFAR-10 in 3.29 seconds on a single GPU, 2024,
https://arxiv.org/abs/2404.00498). Its initial weights are torch's; what that paper does beyond, whitening, identity
initialisation, alternating mirrors and averages over views of a test image, are methods of the recipe.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _curve import Curve
from _fit import Parts, fit, num_params
from _task import Settings, Side, data_file
from torch import Tensor, nn

import purecompose as pc


NUM_EXAMPLES = 50_000
FRACTIONS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 1.0)
"""The shares of a run at which both sides evaluate."""


# The first weights.


@torch.no_grad()
def start_by_hand(net: nn.Module, images: Tensor) -> None:
    """Whiten patches of the images in a frozen first convolution; let the others begin as the identity."""
    first, *others = (part for part in net.modules() if isinstance(part, nn.Conv2d))
    patches = images.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12).double()
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (vectors / (values + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
    first.weight.copy_(torch.cat([filters, -filters])).requires_grad_(False)
    for conv in others:
        nn.init.dirac_(conv.weight[: conv.in_channels])


# The data.


@functools.cache
def cifar(device: str, short: bool, split: int) -> pc.data.ImageData:
    """Return the images, or a part of them for a try.

    Args:
        device: Their device.
        short: Take 4096 only.
        split: 0 for the usual test images; from 1 to 5 a fifth of the training images takes their place.
    """
    data = pc.data.load(data_file("cifar10.npz"))
    names = ("train_inputs", "train_targets", "test_inputs", "test_targets")
    if split:
        test = range((split - 1) * 10_000, split * 10_000)
        for train_name, test_name in (names[::2], names[1::2]):
            train = getattr(data, train_name).clone()
            swapped, train[test] = train[test], getattr(data, test_name)
            data = data._replace(**{train_name: train, test_name: swapped})
    part = slice(4096 if short else None)
    return data._replace(**{name: getattr(data, name)[part].to(device) for name in names})


def augmented(images: Tensor, mirrored: Tensor, down: Tensor, right: Tensor, shift: int) -> Tensor:
    """Return images, some of them mirrored, shifted by `down - shift` and `right - shift` pixels.

    Args:
        images: Shape (N, 3, H, W).
        mirrored: Which images to mirror: bool, shape (N,).
        down, right: Integers in [0, 2 shift], shape (N,).
        shift: The largest shift. Pixels from outside are those of the image mirrored at its border.
    """
    images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    padded = F.pad(images, [shift] * 4, mode="reflect")
    windows = padded.unfold(2, images.shape[2], 1).unfold(3, images.shape[3], 1)
    return windows[torch.arange(len(images), device=images.device), :, down, right]


def plain_batches(data: pc.data.ImageData, batch_size: int, shift: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of shuffled, randomly mirrored and shifted images, epoch after epoch."""
    num, device = len(data.train_inputs), data.train_inputs.device
    while True:
        order = torch.randperm(num, device=device)
        for chosen in order.split(batch_size)[: num // batch_size]:
            down, right = torch.randint(2 * shift + 1, (2, batch_size), device=device)
            mirrored = torch.rand(batch_size, device=device) < 0.5
            images = augmented(data.train_inputs[chosen], mirrored, down, right, shift)
            yield images, data.train_targets[chosen]


# The two sides.


@dataclass(frozen=True)
class Setup:
    """What distinguishes the two tasks."""

    widths: tuple[int, int, int]
    baseline: Mapping[str, Any]
    """The baseline's settings."""
    recipe: Mapping[str, Any]
    """The recipe's settings."""
    parts: Callable[[Settings], Parts]
    """The recipe, from its settings."""
    whitened: Mapping[str, Any] | None = None
    """The settings of a loop that has whitening and identity initialisation by hand."""
    device: str = "cpu"

    @property
    def sides(self) -> dict[str, Side]:
        by_hand = functools.partial(baseline, self)
        return {
            "baseline": Side(by_hand, self.baseline),
            "recipe": Side(functools.partial(recipe, self), self.recipe),
            **({"whitened loop": Side(by_hand, self.whitened)} if self.whitened else {}),
        }

    def data(self, settings: Settings) -> pc.data.ImageData:
        return cifar(self.device, settings.get("short", False), settings.get("split", 0))

    def network(self, seed: int) -> nn.Module:
        return pc.nn.models.build("airbench", in_shape=(3, 32, 32), num_classes=10, seed=seed, widths=self.widths).to(
            self.device
        )


def baseline(setup: Setup, seed: int, curve: Curve, settings: Settings) -> int:
    """Train by a plain loop: SGD with Nesterov momentum, and rates that go up and down a triangle.

    With the setting "whitened" the network starts as those who know airbench would write it.
    """
    data, device = setup.data(settings), setup.device
    net = setup.network(seed).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if settings.get("whitened"):
        start_by_hand(net, data.train_inputs[:5000])
    num_batches = length(settings)
    filters = [param for param in net.parameters() if param.requires_grad and param.ndim > 1]
    biases = [param for param in net.parameters() if param.requires_grad and param.ndim == 1]
    groups = [{"params": filters, "weight_decay": settings["weight_decay"]}, {"params": biases}]
    optimizer = torch.optim.SGD(groups, settings["lr"], settings["momentum"], nesterov=True, fused=True)
    peak = settings["peak"]
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda batch: min((batch + 1) / num_batches / peak, (1 - batch / num_batches) / (1 - peak))
    )
    model = torch.compile(net) if settings["compile"] else net
    when = _evaluations(num_batches)
    curve.start()
    for batch, (images, targets) in enumerate(plain_batches(data, settings["batch_size"], settings["shift"]), 1):
        with torch.autocast(device, torch.bfloat16, enabled=settings["precision"] == "bf16"):
            outputs = model(images.contiguous(memory_format=torch.channels_last))
        loss = F.cross_entropy(outputs.float(), targets, label_smoothing=settings["smoothing"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
        curve.batch()
        if batch in when:
            with curve.evaluating():
                value = _accuracy(net, data, settings["precision"])
            curve.add(value)
        if batch == num_batches:
            return num_params(net)
    raise AssertionError("batches have no end")


@torch.no_grad()
def _accuracy(net: nn.Module, data: pc.data.ImageData, precision: str) -> float:
    net.eval()
    with torch.autocast(data.test_inputs.device.type, torch.bfloat16, enabled=precision == "bf16"):
        parts = [net(images).argmax(1) for images in data.test_inputs.split(1000)]
    net.train()
    return (torch.cat(parts) == data.test_targets).float().mean().item()


def recipe(setup: Setup, seed: int, curve: Curve, settings: Settings) -> int:
    """Train by `fit` with the recipe.

    Slices of a batch (`microbatches`) stay in the processor's cache; batch norms use the statistics of each slice.
    """
    data = setup.data(settings)
    num_batches = length(settings)
    return fit(
        setup.network(seed),
        setup.parts(settings),
        pc.data.arrays(data.train_inputs, data.train_targets, settings["batch_size"], drop_last=True),
        pc.data.arrays(data.test_inputs, data.test_targets, 1000),
        num_batches=num_batches,
        due=_evaluations(num_batches),
        metric="accuracy",
        seed=seed,
        curve=curve,
        settings=settings,
    )


def length(settings: Settings) -> int:
    """Return the number of batches of a run."""
    return 6 if settings.get("short") else round(settings["epochs"] * (NUM_EXAMPLES // settings["batch_size"]))


def _evaluations(num_batches: int) -> set[int]:
    return {round(fraction * num_batches) for fraction in FRACTIONS}
