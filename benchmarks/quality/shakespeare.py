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
    "batch_size": 24,
    "steps": 640,
    "lr": 8e-3,
    "betas": [0.8, 0.98],
    "weight_decay": 0.1,
    "clip": 1.0,
    "warmup": 100,
    "last": 0.0,
    "shape": "linear",
    "decay": None,
    "compile": False,
}
PUBLISHED: Settings = {  # nanoGPT's for a CPU
    **BASELINE,
    "batch_size": 12,
    "steps": 2400,
    "lr": 1e-3,
    "betas": [0.9, 0.99],
    "last": 0.1,
    "shape": "cosine",
    "decay": 2000,
}
RECIPE: Settings = {
    "batch_size": 24,
    "steps": 270,
    "lr": 0.045,
    "momentum": 0.9,
    "ns_steps": 5,
    "adamw_lr": 0.03,
    "betas": [0.8, 0.98],
    "warmup": 0.02,
    "last": 0.3,
    "ema": "20ba",
    "ema_every": "1ba",
    "qk_norm": False,
    "value_embeddings": [0, 1, 2, 3],
    "zeros": False,
    "activation": None,
    "cap": None,
    "compile": False,
}
TUNING: Mapping[str, Sequence[Settings]] = {
    "published": [],
    "baseline": [
        *(
            {"batch_size": 12, "lr": 5e-3, "steps": 1200, **own}
            for own in (
                {"betas": [0.9, 0.99]},
                {"lr": 7e-3},
                {"lr": 3.5e-3},
                {"steps": 1000},
                {"batch_size": 16, "steps": 900, "lr": 6e-3},
                {"batch_size": 24, "steps": 620, "lr": 8e-3},
            )
        ),
        {"lr": 0.01, "steps": 600},
        {"steps": 560},
    ],
    "recipe": [
        *(
            {"lr": 0.03, "steps": 230, **own}
            for own in (
                {"momentum": 0.95},
                {"lr": 0.045},
                {"lr": 0.06},
                {"adamw_lr": 0.045},
                {"last": 0.15, "ema": "14ba"},
                {"betas": [0.8, 0.95]},
                {"ns_steps": 4},
                {"qk_norm": True, "steps": 210},
                {"value_embeddings": None},
                {"value_embeddings": [1, 3]},
                {"zeros": True},
                {"lr": 0.08},
                {"lr": 0.06, "betas": [0.8, 0.95]},
                {"lr": 0.06, "steps": 200},
            )
        )
    ],
}


def load(name: str) -> pc.data.TextData:
    """Return the text in windows."""
    return pc.data.load_text(data_file(name), LENGTH)


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
    steps, text = length(settings), load(settings.get("data", "tinyshakespeare.txt"))
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
                group["lr"] = settings["lr"] * multiplier(number, settings)
            with autocast:
                loss = loss_of(*next(batches))
            loss.backward()
            nn.utils.clip_grad_norm_(params, settings["clip"])
            optimizer.step()
            optimizer.zero_grad()
            curve.batch()
            if number + 1 in evaluated(steps):
                with curve.evaluating(), torch.no_grad(), autocast:
                    value = _loss(net, text)
                curve.add(value)
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


def multiplier(number: int, settings: Settings) -> float:
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
    methods = [alg.ema(settings["ema"], start=0.5, every=settings["ema_every"])] if settings["ema"] else []
    if settings["value_embeddings"]:
        methods.append(alg.value_embeddings(tuple(settings["value_embeddings"])))
    if settings["zeros"]:
        methods.append(alg.initialize("zeros", where=["*attention.out.*", "*feed_forward.down.*"]))
    if settings["qk_norm"]:
        methods.append(alg.qk_norm())
    if settings["activation"]:
        methods.append(alg.activation(settings["activation"]))
    if settings["cap"]:
        methods.append(alg.logit_softcap(settings["cap"]))
    return Parts(methods, optim.by_pattern({"*blocks.*": muon}, adamw))


def recipe(seed: int, curve: Curve, settings: Settings) -> int:
    """Train by the recipe."""
    return train(seed, curve, settings, recipe_parts(settings))


def train(seed: int, curve: Curve, settings: Settings, parts: Parts) -> int:
    """Train by `fit` with the parts of a recipe."""
    text, num_batches = load(settings.get("data", "tinyshakespeare.txt")), length(settings)
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
    sides={"published": Side(by_hand, PUBLISHED), "baseline": Side(by_hand, BASELINE), "recipe": Side(recipe, RECIPE)},
    tuning=TUNING,
    is_lower_better=True,
    precisions=("bf16",),
)

if __name__ == "__main__":
    run(TASK, __doc__)
