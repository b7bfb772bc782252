"""How long until a small GPT predicts Shakespeare, by characters, with a loss of 1.88: by AdamW, and by a recipe?

    PURECOMPOSE_DATA=folder python benchmarks/quality/shakespeare.py

The folder contains `tinyshakespeare.txt`. The network, the data and the target are those that nanoGPT publishes for a
CPU: 4 layers of width 128 with 4 heads, windows of 64 characters, the last tenth of the text for validation, a loss of
1.88 nats for each character. Each evaluation reads all windows of the validation part that do not overlap, 111,488
characters. The side "published" has nanoGPT's settings; if it ends above the target, it continues at its last rate.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from _curve import Curve
from _fit import Parts, fit, num_params
from _task import Settings, Side, Task, data_file, run
from torch import Tensor, nn

import purecompose as pc
from purecompose import algorithms as alg, optim, schedule
from purecompose.nn import layers, models


LENGTH = 64
EVALUATION_BATCH = 134
"""A divisor of the number of validation windows."""
FRACTIONS = [i / 10 for i in range(1, 8)] + [i / 40 for i in range(29, 41)]
"""The shares of a run at which all sides evaluate."""

BASELINE: Settings = {  # the fastest for it
    "batch_size": 12,
    "steps": 1120,
    "lr": 5e-3,
    "betas": [0.8, 0.98],
    "weight_decay": 0.1,
    "clip": 1.0,
    "warmup": 100,
    "last": 0.0,
    "shape": "linear",
    "decay": None,
    "compile": True,
}
PUBLISHED: Settings = {  # nanoGPT's for a CPU
    **BASELINE,
    "steps": 2400,
    "lr": 1e-3,
    "betas": [0.9, 0.99],
    "last": 0.1,
    "shape": "cosine",
    "decay": 2000,
}
RECIPE: Settings = {
    "batch_size": 24,
    "steps": 280,
    "lr": 0.03,
    "momentum": 0.9,
    "ns_steps": 5,
    "adamw_lr": 0.03,
    "betas": [0.8, 0.98],
    "warmup": 0.02,
    "last": 0.3,
    "ema": "20ba",
    "compile": True,
}
TUNING: Mapping[str, Sequence[Settings]] = {
    "published": [],
    "baseline, eager": [
        {"betas": [0.9, 0.99], "steps": 1200},
        {"steps": 1200},
        {"lr": 7e-3, "steps": 1100},
        {"steps": 1100},
        {"steps": 1000},
        {"batch_size": 24, "steps": 620},
        {"batch_size": 24, "steps": 620, "lr": 0.008},
        {"batch_size": 32, "steps": 500, "lr": 0.008},
    ],
    "recipe, eager": [
        {"batch_size": 16, "steps": 360},
        {"batch_size": 20, "steps": 300, "ema": "14ba"},
        {},
        {"steps": 250},
        {"steps": 270},
        {"steps": 270, "ema": "12ba", "betas": [0.8, 0.95]},
        {"steps": 270, "ema": "12ba", "lr": 0.045},
        {"batch_size": 32, "steps": 220},
        {"batch_size": 48, "steps": 170},
        # Those below were run with batches of 12, the default of their time.
        {"steps": 460, "betas": [0.9, 0.99], "last": 0.0, "ema": None},
        {"steps": 460, "last": 0.0, "ema": None},
        {"steps": 460, "last": 0.0, "ema": None, "momentum": 0.85},
        {"steps": 460, "last": 0.1, "ema": "8ba"},
        {"steps": 460},
        {"steps": 420},
        {"steps": 420, "lr": 0.045},
    ],
    # The compiled runs had betas of 0.9 and 0.99, the recipe batches of 12, `last` 0 and no EMA, the defaults of their
    # time.
    "baseline": [
        {"lr": 5e-3, "steps": 1150},
        {"lr": 7e-3, "steps": 1150, "warmup": 200},
        {"lr": 3.5e-3, "steps": 1150},
        {"lr": 1e-2, "steps": 1150, "warmup": 300},
        {"lr": 5e-3, "steps": 1000},
        {"lr": 6e-3, "steps": 860, "batch_size": 16},
        {"lr": 5e-3, "betas": [0.9, 0.95]},
    ],
    "recipe": [
        {"lr": 0.04, "steps": 450},
        {"lr": 0.03, "steps": 450},
        {"lr": 0.055, "steps": 450},
        {"lr": 0.035, "steps": 440},
        {"lr": 0.025, "steps": 480},
        {"lr": 0.03, "steps": 480},
        {"lr": 0.03, "steps": 480, "adamw_lr": 0.02},
    ],
}


def load() -> pc.data.TextData:
    """Return the text in windows."""
    return pc.data.load_text(data_file("tinyshakespeare.txt"), LENGTH)


def new_net(seed: int, num_characters: int) -> nn.Module:
    """Return the network with the initial weights of a seed."""
    gpt = models.build(
        "gpt", in_shape=(LENGTH,), num_classes=num_characters, seed=seed, width=128, depth=4, num_heads=4
    )
    return layers.ClassesSecond(gpt)


def length(settings: Settings) -> int:
    """Return the number of batches of a run."""
    return 4 if settings.get("short") else settings["steps"]


def evaluated(steps: int) -> set[int]:
    """Return the numbers of the batches after which a run of so many is evaluated."""
    return {round(fraction * steps) for fraction in FRACTIONS}


# --- the loop in plain PyTorch -------------------------------------------------------------------------------------


def by_hand(seed: int, curve: Curve, settings: Settings) -> int:
    """Train by AdamW."""
    steps, text = length(settings), load()
    net = new_net(seed, text.num_classes)
    params = list(net.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in params if p.ndim > 1], "weight_decay": settings["weight_decay"]},
         {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0}],
        betas=tuple(settings["betas"]), fused=True,
    )  # fmt: skip
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=settings["precision"] == "bf16")
    batches = _batches(text, settings["batch_size"], seed)

    def mean_loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(net(inputs), targets)

    loss_of = torch.compile(mean_loss) if settings["compile"] else mean_loss
    curve.start()
    with attention_in_float32():
        for number in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = settings["lr"] * _multiplier(number, settings)
            with autocast:
                loss = loss_of(*next(batches))
            loss.backward()
            nn.utils.clip_grad_norm_(params, settings["clip"])
            optimizer.step()
            optimizer.zero_grad()
            curve.batch()
            if number + 1 in evaluated(steps):
                with curve.evaluating(), torch.no_grad(), autocast:
                    curve.add(_loss(net, text))
    return num_params(net)


def attention_in_float32() -> AbstractContextManager[Any]:
    """Return a context in which autocast leaves attention in float32.

    torch's kernel for the CPU is so slow in bfloat16 that a step would take 47 ms instead of 27.
    """
    attention = F.scaled_dot_product_attention

    def wide(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return attention(query.float(), key.float(), value.float(), **options).to(query.dtype)

    return mock.patch.object(F, "scaled_dot_product_attention", wide)


def _batches(text: pc.data.TextData, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of training windows without end, each epoch in another order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(text.train_inputs), generator=generator)
        for chosen in order[: len(order) // batch_size * batch_size].split(batch_size):
            yield text.train_inputs[chosen], text.train_targets[chosen]


def _multiplier(number: int, settings: Settings) -> float:
    """Return the learning rate of a batch, as a share of the greatest one."""
    warmup, end, last = settings["warmup"], settings["decay"] or settings["steps"], settings["last"]
    if number < warmup:
        return (number + 1) / (warmup + 1)
    gone = min(1.0, (number - warmup) / (end - warmup))
    return last + (1 - last) * (1 - gone if settings["shape"] == "linear" else 0.5 * (1 + math.cos(math.pi * gone)))


def _loss(net: nn.Module, text: pc.data.TextData) -> float:
    """Return the mean loss over the validation windows."""
    parts = zip(text.test_inputs.split(EVALUATION_BATCH), text.test_targets.split(EVALUATION_BATCH), strict=True)
    total = sum(F.cross_entropy(net(inputs).float(), targets, reduction="sum").item() for inputs, targets in parts)
    return total / text.test_targets.numel()


# --- the recipe ----------------------------------------------------------------------------------------------------


def recipe_parts(settings: Settings) -> Parts:
    """Return the recipe: Muon for the matrices of the blocks, AdamW for the rest, averages of the weights."""
    curve = schedule.linear(warmup=f"{settings['warmup']}dur", alpha_f=settings["last"])
    muon = optim.muon(
        settings["lr"] * curve, momentum=settings["momentum"], weight_decay=0.0, ns_steps=settings["ns_steps"]
    )
    adamw = optim.adamw(settings["adamw_lr"] * curve, betas=tuple(settings["betas"]), weight_decay=0.0)
    methods = [alg.ema(settings["ema"], start=0.5)] if settings["ema"] else []
    return Parts(methods, optim.by_pattern({"*blocks.*": muon}, adamw))


def recipe(seed: int, curve: Curve, settings: Settings) -> int:
    """Train by the recipe."""
    return train(seed, curve, settings, recipe_parts(settings))


def train(seed: int, curve: Curve, settings: Settings, parts: Parts) -> int:
    """Train by `fit` with the parts of a recipe."""
    text, num_batches = load(), length(settings)
    return fit(
        new_net(seed, text.num_classes),
        parts,
        pc.data.arrays(text.train_inputs, text.train_targets, settings["batch_size"], drop_last=True),
        pc.data.arrays(text.test_inputs, text.test_targets, EVALUATION_BATCH),
        num_batches=num_batches,
        due=evaluated(num_batches),
        metric="loss",
        seed=seed,
        curve=curve,
        settings=settings,
    )


TASK = Task(
    name="shakespeare",
    title="tiny Shakespeare, a GPT of 0.8 million parameters",
    metric="validation loss",
    target=1.88,
    shown=(1.8, 3.0),
    sides={
        "published": Side(by_hand, PUBLISHED),
        "baseline": Side(by_hand, BASELINE),
        "recipe": Side(recipe, RECIPE),
        "baseline, eager": Side(by_hand, {**BASELINE, "compile": False}),
        "recipe, eager": Side(recipe, {**RECIPE, "compile": False}),
    },
    tuning=TUNING,
    is_lower_better=True,
)

if __name__ == "__main__":
    run(TASK, __doc__)
