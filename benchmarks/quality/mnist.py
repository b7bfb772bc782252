"""How long until a small convolutional network reaches 99.0 % on MNIST: a tuned loop in plain PyTorch, and a recipe?

    PURECOMPOSE_DATA=folder python benchmarks/quality/mnist.py

The folder contains `mnist.npz`.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from _curve import Curve, Observer
from _task import Settings, Task, data_file, run
from torch import Tensor, nn
from torch.nn import functional as F

import purecompose as pc
from purecompose import Algorithm, State, algorithms as alg, compose, loop_events, optim, schedule
from purecompose.nn import models


BASELINE = {
    "optimizer": "adamw",
    "lr": 0.01,
    "weight_decay": 0.01,
    "batch_size": 128,
    "epochs": 1.5,
    "warmup": 0.1,
    "precision": "fp32",
    "compile": None,
    "short": False,
}
RECIPE = {
    "lr": 0.05,
    "adamw": 0.01,
    "batch_size": 128,
    "epochs": 1.0,
    "warmup": 0.1,
    "scale": 0.5,
    "delay": 0.7,
    "finetune": 0.3,
    "increment": 4,
    "smoothing": 0.0,
    "momentum": 0.95,
    "precision": "fp32",
    "compile": False,
    "short": False,
}
FRACTIONS = [i / 10 for i in range(1, 7)] + [i / 40 for i in range(28, 41)]
"""The shares of a run at which both sides evaluate."""


@functools.cache
def images() -> pc.data.ImageData:
    return pc.data.load(data_file("mnist.npz"))


def network(seed: int) -> nn.Module:
    return models.build("cnn", in_shape=(1, 28, 28), num_classes=10, seed=seed, width=16)


def evaluations(num_batches: int) -> set[int]:
    return {round(fraction * num_batches) for fraction in FRACTIONS}


def length(settings: Settings, num_examples: int) -> int:
    """Return the number of batches of a run."""
    return 8 if settings["short"] else round(settings["epochs"] * (num_examples // settings["batch_size"]))


def baseline(seed: int, curve: Curve, settings: Settings) -> int:
    """Train by a plain loop: the network or the step under `torch.compile`, or neither."""
    settings = {**BASELINE, **settings}
    data, net = images(), network(seed)
    num_batches = length(settings, len(data.train_inputs))
    torch.manual_seed(seed)
    curve.start()
    net = net.to(memory_format=torch.channels_last)
    optimizer = plain_optimizer(net, settings)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda batch: rate(batch / num_batches, settings))
    model = torch.compile(net) if settings["compile"] == "network" else net

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=settings["precision"] == "bf16"):
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()

    if settings["compile"] == "step":
        step = torch.compile(step)
    when = evaluations(num_batches)
    for batch, (inputs, targets) in zip(range(1, num_batches + 1), batches(data, settings["batch_size"]), strict=False):
        step(inputs, targets)
        rates.step()
        curve.batch()
        if batch in when:
            with curve.evaluating():
                value = accuracy(net, data, settings["precision"])
            curve.add(value)
    return sum(param.numel() for param in net.parameters())


def plain_optimizer(net: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    lr = torch.tensor(settings["lr"]) if settings["compile"] == "step" else settings["lr"]
    decay = {"weight_decay": settings["weight_decay"]}
    if settings["optimizer"] == "sgd":
        return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, nesterov=True, fused=True, **decay)
    return torch.optim.AdamW(net.parameters(), lr=lr, fused=True, **decay)


def rate(elapsed: float, settings: Settings) -> float:
    """Return the multiplier of the learning rate: linear up during the warm-up, then linear down to 0."""
    warmup = settings["warmup"]
    if elapsed < warmup:
        return elapsed / warmup
    gone = (elapsed - warmup) / (1 - warmup)
    return (1 + math.cos(math.pi * gone)) / 2 if settings.get("cosine") else 1 - gone


def batches(data: pc.data.ImageData, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of shuffled examples, epoch after epoch."""
    while True:
        order = torch.randperm(len(data.train_inputs))
        for chosen in order.split(batch_size)[: len(order) // batch_size]:
            yield data.train_inputs[chosen], data.train_targets[chosen]


@torch.no_grad()
def accuracy(net: nn.Module, data: pc.data.ImageData, precision: str) -> float:
    net.eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        parts = [net(inputs).argmax(1) for inputs in data.test_inputs.split(1000)]
    net.train()
    return (torch.cat(parts) == data.test_targets).float().mean().item()


class Recipe(NamedTuple):
    """What is composed."""

    methods: list[Algorithm]
    optimizer: Any
    batch_size: int
    epochs: float


def recipe_parts(settings: Settings) -> Recipe:
    """Return the parts of the recipe."""
    s = settings
    curve = schedule.linear(alpha_f=s.get("final", 0.0), warmup=f"{s['warmup']}dur")
    if s.get("piecewise"):
        at, low = s["piecewise"]
        curve = schedule.linear(1.0, low, f"{at}dur", warmup=f"{s['warmup']}dur")
        curve = schedule.sequence([curve, low * schedule.linear()], [f"{at}dur"])
    methods = [alg.channels_last()]
    if s["scale"] < 1:
        methods.append(
            alg.progressive_resizing(
                initial_scale=s["scale"],
                delay_fraction=s["delay"],
                finetune_fraction=s["finetune"],
                size_increment=s["increment"],
                interpolation=s.get("interpolation", "bilinear"),
            )
        )
    if s["smoothing"]:
        methods.append(alg.label_smoothing(s["smoothing"]))
    if s.get("backprop"):
        methods.append(alg.selective_backprop(**s["backprop"]))
    if s.get("ema"):
        methods.append(alg.ema(**s["ema"]))
    if s.get("freezing"):
        methods.append(alg.layer_freezing(**s["freezing"]))
    if s.get("lookahead"):
        methods.append(alg.lookahead(**s["lookahead"]))
    if s.get("batch_warmup"):
        methods.append(alg.batch_size_warmup(**s["batch_warmup"]))
    if s.get("optimizer") == "adamw":
        optimizer = optim.adamw(s["lr"] * curve, weight_decay=s.get("weight_decay", 0.01))
    elif s.get("optimizer") == "sgd":
        optimizer = optim.sgd(
            s["lr"] * curve, momentum=s["momentum"], nesterov=True, weight_decay=s.get("weight_decay", 0.0)
        )
    else:
        filters = optim.muon(
            s["lr"] * curve,
            momentum=s["momentum"],
            weight_decay=s.get("weight_decay", 0.0),
            ns_steps=s.get("ns_steps", 5),
            filters=True,
        )
        rest = optim.adamw(s["adamw"] * curve, weight_decay=0.0, betas=tuple(s.get("betas", (0.9, 0.99))))
        optimizer = optim.by_pattern(dict.fromkeys(s.get("filters", ("0.*", "4.*", "8.*", "11.*")), filters), rest)
    return Recipe(methods, optimizer, s["batch_size"], s["epochs"])


def recipe(seed: int, curve: Curve, settings: Settings) -> int:
    """Train by a composed step."""
    settings = {**RECIPE, **settings}
    data, net = images(), network(seed)
    num_batches = length(settings, len(data.train_inputs))
    curve.start()
    parts = recipe_parts(settings)
    train = pc.data.arrays(data.train_inputs, data.train_targets, parts.batch_size, drop_last=True)
    test = pc.data.arrays(data.test_inputs, data.test_targets, 1000)
    step = compose(loop_events, parts.methods)
    if settings["compile"]:
        step = pc.compile(step, tiered=settings["compile"] == "tiered", quiet=True)
    state = State.create(
        net,
        loss=pc.losses.cross_entropy,
        optimizer=parts.optimizer,
        key=seed,
        duration=f"{num_batches}ba",
        precision=settings["precision"],
    )
    when = evaluations(num_batches)
    evaluator = pc.Evaluator(test, {"accuracy": pc.metrics.accuracy}, every=lambda now: now.batch in when)
    pc.fit(step, state, train, evaluate=evaluator, observers=Observer(curve, "eval/accuracy"))
    return sum(param.numel() for param in net.parameters())


TASK = Task(
    name="mnist",
    metric="accuracy",
    target=0.99,
    sides={"baseline": baseline, "recipe": recipe},
    tuning={"baseline": [], "recipe": []},
    num_seeds=10,
)


if __name__ == "__main__":
    run(TASK, __doc__)
