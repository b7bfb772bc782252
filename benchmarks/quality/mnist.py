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
    "lr": 0.02,
    "betas": [0.9, 0.99],
    "weight_decay": 0.01,
    "batch_size": 64,
    "epochs": 0.7,
    "warmup": 0.1,
    "smoothing": 0.1,
    "compile": None,
}
RECIPE: Settings = {
    "lr": 0.05,
    "adamw": 0.02,
    "ns_steps": 3,
    "batch_size": 64,
    "epochs": 0.45,
    "warmup": 0.02,
    "last": 0.3,
    "ema": "20ba",
    "smoothing": 0.1,
    "scale": 1.0,
    "full_size": 0.4,
    "keep": 1.0,
    "compile": None,
}
NUM_EXAMPLES = 60_000
FRACTIONS = [*(i / 10 for i in range(1, 7)), *(i / 40 for i in range(28, 41))]
"""The shares of a run after which both sides evaluate."""


def baseline(seed: int, curve: Curve, s: Settings) -> int:
    """Train by a plain loop; with `compile` "network" or "step" under `torch.compile`."""
    data, net, num_batches = images(), network(seed), length(s)
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
    data, num_batches = images(), length(s)
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

    With `lr` 0 AdamW moves all parameters. With `scale` below 1 images are cropped, except in the share `full_size` of
    the run at its end; with `keep` below 1 this share of the examples is selected by loss.
    """
    curve = schedule.linear(alpha_f=s["last"], warmup=f"{s['warmup']}dur")
    methods = [alg.channels_last()]
    if s["scale"] < 1:
        full_size = s["full_size"]
        methods.append(alg.progressive_resizing("crop", s["scale"], full_size, 1 - full_size))
    if s["smoothing"]:
        methods.append(alg.label_smoothing(s["smoothing"]))
    if s["keep"] < 1:
        methods.append(alg.selective_backprop(0.1, 0.85, s["keep"], full_every=0))
    if s["ema"]:
        methods.append(alg.ema(s["ema"], start=0.4))
    if not s["lr"]:
        return Parts(methods, optim.adamw(s["adamw"] * curve, weight_decay=0.01))
    rest = optim.adamw(s["adamw"] * curve, weight_decay=0.0, betas=(0.9, 0.99))
    muon = optim.muon(s["lr"] * curve, weight_decay=0.0, ns_steps=s["ns_steps"], ns_precision="full", filters="only")
    return Parts(methods, optim.by_pattern({"*": muon}, rest))


@functools.cache
def images() -> pc.data.ImageData:
    return pc.data.load(data_file("mnist.npz"))


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


LARGE: Settings = {"batch_size": 128}
TUNING: dict[str, list[Settings]] = {
    "baseline": [
        {"lr": 0.01, "epochs": 1.0},
        {"lr": 0.01, "epochs": 0.8},
        {"lr": 0.005, "epochs": 1.0},
        {"lr": 0.02, "epochs": 1.0},
        {"lr": 0.02, "epochs": 0.8},
        {"lr": 0.03, "epochs": 0.8},
        {"lr": 0.03, "epochs": 0.9},
        {"lr": 0.02, **LARGE, "epochs": 1.0},
        {"lr": 0.02, **LARGE, "epochs": 1.25},
        {"lr": 0.03, **LARGE, "epochs": 1.0},
        {"optimizer": "sgd", "weight_decay": 0.0005, "lr": 0.6, **LARGE, "epochs": 1.0},
        {"lr": 0.03, "epochs": 0.7},
        {"warmup": 0.02},
        # Those above had betas of 0.9 and 0.999, and where they say nothing else 0.8 epochs.
        {"betas": [0.9, 0.99]},
        {"betas": [0.8, 0.98]},
        {"betas": [0.9, 0.99], "epochs": 0.7},
    ],
    # The first eleven were run with a warm-up of 0.1, with `last` 0, and without EMA, the defaults of their time.
    "recipe": [
        {"epochs": 0.6, "adamw": 0.01},
        {"epochs": 0.5, "adamw": 0.01},
        {"epochs": 0.4, "adamw": 0.01},
        {"epochs": 0.5, "lr": 0.1, "adamw": 0.01},
        {"epochs": 0.5, "adamw": 0.02},
        {"epochs": 0.5, "lr": 0.1, "adamw": 0.02},
        {"epochs": 0.45, "lr": 0.1, "adamw": 0.02},
        {"epochs": 0.45, "lr": 0.15, "adamw": 0.03},
        {"epochs": 0.6, **LARGE, "lr": 0.1, "adamw": 0.01},
        {"epochs": 0.7, **LARGE, "lr": 0.1, "adamw": 0.02},
        {"epochs": 0.6, "scale": 0.86, "adamw": 0.01},
        {"epochs": 0.5, "last": 0.0, "ema": None},
        {"epochs": 0.5},
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
    precisions=("bf16", "fp32"),
)


if __name__ == "__main__":
    run(TASK, __doc__)
