"""How long until a small convolutional network reaches 99.0 % on MNIST: a tuned loop in plain PyTorch, and a recipe?

    PURECOMPOSE_DATA=folder python benchmarks/quality/mnist.py

The folder contains `mnist.npz`. A run takes some ten seconds, about as long as compiling a step, so neither side
compiles by default; `--set '{"compile": "step"}'` does.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo  # here, because optimizers import it when they are created, which takes a second
from _curve import Curve
from _fit import Parts, fit, num_params
from _task import Settings, Side, Task, data_file, run
from torch import Tensor, nn
from torch.nn import functional as F

import purecompose as pc
from purecompose import algorithms as alg, optim, schedule
from purecompose.nn import models


BASELINE: Settings = {
    "optimizer": "adamw",
    "lr": 0.04,
    "betas": [0.8, 0.98],
    "weight_decay": 0.01,
    "batch_size": 128,
    "epochs": 0.75,
    "warmup": 0.1,
    "smoothing": 0.1,
    "compile": None,
}
RECIPE: Settings = {
    "lr": 0.2,
    "momentum": 0.8,
    "adamw": 0.04,
    "ns_steps": 3,
    "batch_size": 128,
    "epochs": 0.45,
    "warmup": 0.02,
    "last": 0.3,
    "ema": "10ba",
    "ema_every": "1ba",
    "smoothing": 0.2,
    "whitening": 5e-3,
    "dirac": True,
    "pool_first": True,
    "compile": None,
}
NUM_EXAMPLES = 60_000
FRACTIONS = [*(i / 10 for i in range(1, 7)), *(i / 40 for i in range(28, 41))]
"""The shares of a run after which both sides evaluate."""


def baseline(seed: int, curve: Curve, s: Settings) -> int:
    """Train by a plain loop; with `compile` "network" or "step" under `torch.compile`."""
    data, net, num_batches = images(s.get("data", "mnist.npz")), network(seed), length(s)
    torch.manual_seed(seed)
    curve.start()
    net = net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer = plain_optimizer(net, s)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda batch: multiplier(batch / num_batches, s["warmup"]))
    model: Any = torch.compile(net) if s["compile"] == "network" else net

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=s["precision"] == "bf16"):
            loss = F.cross_entropy(model(inputs), targets, label_smoothing=s["smoothing"])
        loss.backward()
        optimizer.step()

    take: Any = torch.compile(step) if s["compile"] == "step" else step
    evaluated = evaluations(num_batches)
    for batch, (inputs, targets) in zip(range(1, num_batches + 1), batches(data, s["batch_size"]), strict=False):
        take(inputs, targets)
        rates.step()
        curve.batch()
        if batch in evaluated:
            with curve.evaluating():
                value = accuracy(net, data, s["precision"])
            curve.add(value)
    return num_params(net)


def recipe(seed: int, curve: Curve, s: Settings) -> int:
    """Train by a composed step; with `compile` by a compiled one."""
    return train(seed, curve, s, recipe_parts(s))


def train(seed: int, curve: Curve, s: Settings, parts: Parts) -> int:
    """Train by `fit` with the parts of a recipe."""
    data, num_batches = images(s.get("data", "mnist.npz")), length(s)
    return fit(
        network(seed),
        parts,
        pc.data.arrays(data.train_inputs, data.train_targets, s["batch_size"], drop_last=True),
        pc.data.arrays(data.test_inputs, data.test_targets, 1000),
        num_batches=num_batches,
        due=evaluations(num_batches),
        metric="accuracy",
        seed=seed,
        curve=curve,
        settings=s,
    )


def recipe_parts(s: Settings) -> Parts:
    """Return the recipe: Muon for the filters, AdamW for the rest, a rate that falls linearly, smooth labels, EMA.

    The first convolution whitens patches with `whitening`, the others begin as the identity with `dirac`, and with
    `pool_first` norms and activations come after the poolings. With `lr` 0 AdamW moves all parameters.
    """
    curve = schedule.linear(alpha_f=s["last"], warmup=f"{s['warmup']}dur")
    methods = [alg.channels_last()]
    if s["pool_first"]:
        methods.append(alg.pool_first())
    if s["whitening"]:
        methods.append(alg.patch_whitening(eps=s["whitening"]))
    if s["dirac"]:
        methods.append(alg.initialize("dirac"))
    if s["smoothing"]:
        methods.append(alg.label_smoothing(s["smoothing"]))
    if s["ema"]:
        methods.append(alg.ema(s["ema"], start=0.4, every=s["ema_every"]))
    if not s["lr"]:
        return Parts(methods, optim.adamw(s["adamw"] * curve, weight_decay=0.01))
    rest = optim.adamw(s["adamw"] * curve, weight_decay=0.0, betas=(0.9, 0.99))
    muon = optim.muon(
        s["lr"] * curve,
        momentum=s["momentum"],
        weight_decay=0.0,
        ns_steps=s["ns_steps"],
        ns_precision="full",
        filters="only",
    )
    return Parts(methods, optim.by_pattern({"*": muon}, rest))


@functools.cache
def images(name: str) -> pc.data.ImageData:
    return pc.data.load(data_file(name))


def network(seed: int) -> nn.Module:
    return models.build("cnn", in_shape=(1, 28, 28), num_classes=10, seed=seed, width=16)


def length(s: Settings) -> int:
    """Return the number of batches of a run."""
    return 8 if s.get("short") else round(s["epochs"] * (NUM_EXAMPLES // s["batch_size"]))


def evaluations(num_batches: int) -> set[int]:
    return {round(fraction * num_batches) for fraction in FRACTIONS}


def plain_optimizer(net: nn.Module, s: Settings) -> torch.optim.Optimizer:
    lr = torch.tensor(s["lr"]) if s["compile"] == "step" else s["lr"]  # a number would compile again when it changes
    options = {"lr": lr, "weight_decay": s["weight_decay"], "fused": True}
    if s["optimizer"] == "sgd":
        return torch.optim.SGD(net.parameters(), momentum=0.9, nesterov=True, **options)
    return torch.optim.AdamW(net.parameters(), betas=tuple(s["betas"]), **options)


def multiplier(elapsed: float, warmup: float) -> float:
    """Return the multiplier of the learning rate: linear up during the warm-up, then linear down to 0."""
    return elapsed / warmup if elapsed < warmup else (1 - elapsed) / (1 - warmup)


def batches(data: pc.data.ImageData, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of shuffled examples, epoch after epoch, without those that do not fill a batch."""
    while True:
        order = torch.randperm(len(data.train_inputs))
        for chosen in order.split(batch_size)[: len(order) // batch_size]:
            yield data.train_inputs[chosen], data.train_targets[chosen]


@torch.no_grad()
def accuracy(net: nn.Module, data: pc.data.ImageData, precision: str) -> float:
    net.eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        predicted = torch.cat([net(inputs).argmax(1) for inputs in data.test_inputs.split(1000)])
    net.train()
    return (predicted == data.test_targets).float().mean().item()


PLAIN_64: Settings = {"batch_size": 64, "lr": 0.02, "betas": [0.9, 0.99], "epochs": 0.7}
RECIPE_64: Settings = {"batch_size": 64, "ema": "20ba", "momentum": 0.95, "lr": 0.1, "adamw": 0.03}
SGD: Settings = {"optimizer": "sgd", "weight_decay": 0.0005, "betas": [0.9, 0.99]}
TUNING: dict[str, list[Settings]] = {
    "baseline": [
        *({**PLAIN_64, "lr": lr, "epochs": 0.8} for lr in (0.01, 0.02, 0.03)),
        {**PLAIN_64, "lr": 0.03},
        PLAIN_64,
        {**PLAIN_64, "warmup": 0.02},
        {**PLAIN_64, "betas": [0.9, 0.999], "epochs": 0.8},
        {**PLAIN_64, "betas": [0.8, 0.98]},
        {**PLAIN_64, "smoothing": 0.2},
        {**PLAIN_64, "epochs": 0.6},
        {"lr": 0.02, "betas": [0.9, 0.99], "epochs": 1.0},
        {"lr": 0.03, "betas": [0.9, 0.99], "epochs": 0.8},
        {"betas": [0.9, 0.99], "epochs": 0.8},
        {"lr": 0.03, "epochs": 0.8},
        {**SGD, "lr": 0.6, "epochs": 0.8},
        {**SGD, "lr": 0.3, "batch_size": 64, "epochs": 0.7},
        {"lr": 0.03, "epochs": 0.7},
        {"epochs": 0.7},
        {"lr": 0.03, "betas": [0.7, 0.95], "epochs": 0.7},
        {"lr": 0.05, "epochs": 0.7},
    ],
    "recipe": [
        {**RECIPE_64, "lr": 0.05},
        {**RECIPE_64, "lr": 0.15},
        {**RECIPE_64, "adamw": 0.02},
        {**RECIPE_64, "smoothing": 0.1},
        {**RECIPE_64, "last": 0.1},
        {**RECIPE_64, "last": 0.5},
        {**RECIPE_64, "whitening": 5e-2},
        {**RECIPE_64, "whitening": None},
        {**RECIPE_64, "dirac": False},
        {**RECIPE_64, "pool_first": False},
        RECIPE_64,
        {"momentum": 0.9},
        {"lr": 0.3},
        {},
    ],
}

TASK = Task(
    name="mnist",
    title="MNIST, a convolutional network of 61 thousand parameters",
    metric="accuracy",
    target=0.99,
    shown=(0.95, 1.0),
    sides={"baseline": Side(baseline, BASELINE), "recipe": Side(recipe, RECIPE)},
    tuning=TUNING,
    num_seeds=10,
    num_tuning_seeds=3,
    precisions=("bf16",),
)


if __name__ == "__main__":
    run(TASK, __doc__)
