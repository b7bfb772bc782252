"""How long until a GPT-2 of 124 million parameters reaches a loss of 3.28 on FineWeb on a GPU: by AdamW, by a recipe?

    PURECOMPOSE_DATA=folder python benchmarks/quality/fineweb.py --seeds 1

The task is that of modded-nanogpt's speed runs (https://github.com/KellerJordan/modded-nanogpt), whose script
`cached_fineweb10B.py` downloads the files `fineweb_train_*.bin` and `fineweb_val_*.bin` to the folder. Each has a
header of 1,024 bytes and GPT-2's tokens as 16-bit numbers. Batches have 512 windows of 1,024 tokens; the loss is that
of the first 10,485,760 tokens of the validation file. The loop's settings are those of the first runs there. This
script was never run to its end: without a GPU, `--short` trains a small network for some batches, to show that it
works.
"""

from collections.abc import Iterator
from typing import Any

import torch
from _curve import Curve
from _fit import fit, num_params
from _task import Settings, Side, Task, data_file, run
from shakespeare import multiplier, recipe_parts
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

import purecompose as pc
from purecompose.nn import layers, models


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADER = 512
"""Length of a file's header, in 16-bit numbers."""
VOCABULARY = 50_304
"""GPT-2's 50,257 tokens, and unused ones up to a multiple of 128."""
NUM_TEST = 10_240
"""Windows for validation."""
BASELINE: Settings = {
    "batch_size": 512,
    "microbatches": 8,
    "steps": 9_536,
    "lr": 1.8e-3,
    "betas": [0.9, 0.95],
    "weight_decay": 0.1,
    "clip": 1.0,
    "warmup": 256,
    "last": 0.0,
    "shape": "linear",
    "decay": None,
    "compile": True,
}
RECIPE: Settings = {
    "batch_size": 512,
    "microbatches": 8,
    "steps": 4_500,
    "lr": 0.02,
    "momentum": 0.95,
    "ns_steps": 5,
    "adamw_lr": 2e-3,
    "betas": [0.9, 0.95],
    "warmup": 0.02,
    "last": 0.0,
    "ema": None,
    "qk_norm": True,
    "value_embeddings": [0, 1, -2, -1],
    "zeros": True,
    "activation": "squared_relu",
    "cap": 15.0,
    "compile": True,
}


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of the tokens of some files that do not overlap; the targets of a window are its next tokens.

    Args:
        pattern: The files' names, with "*".
        length: Tokens of a window.
    """

    def __init__(self, pattern: str, length: int) -> None:
        folder = data_file(pattern).parent
        if not (paths := sorted(folder.glob(pattern))):
            raise SystemExit(f"{folder} has no {pattern}")
        sizes = [path.stat().st_size // 2 for path in paths]
        numbers = [
            torch.from_file(str(path), size=size, dtype=torch.uint16) for path, size in zip(paths, sizes, strict=True)
        ]
        self._files = [(file[HEADER:], (len(file) - HEADER - 1) // length) for file in numbers]
        self._length = length

    def __len__(self) -> int:
        return sum(num for _, num in self._files)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        for tokens, num in self._files:
            if number < num:
                found = tokens[number * self._length : (number + 1) * self._length + 1].to(torch.int64)
                return found[:-1], found[1:]
            number -= num
        raise IndexError("there are not so many windows")


def windows(settings: Settings) -> tuple[Windows, Subset[tuple[Tensor, Tensor]]]:
    """Return the windows for training and for validation."""
    length = 64 if settings.get("short") else 1024
    test = Windows("fineweb_val_*.bin", length)
    num = min(len(test), 32 if settings.get("short") else NUM_TEST)
    return Windows("fineweb_train_*.bin", length), Subset(test, range(num))


def new_net(seed: int, settings: Settings) -> nn.Module:
    """Return a GPT-2, or a small network for a try, with the initial weights of a seed."""
    sizes = {"width": 768, "depth": 12, "num_heads": 12}
    length = 1024
    if settings.get("short"):
        sizes, length = {"width": 32, "depth": 4, "num_heads": 2}, 64
    gpt = models.build("gpt", in_shape=(length,), num_classes=VOCABULARY, seed=seed, **sizes)
    return layers.ClassesSecond(gpt).to(DEVICE)


def length(settings: Settings) -> int:
    """Return the number of batches of a run."""
    return 3 if settings.get("short") else settings["steps"]


def batch_size(settings: Settings) -> int:
    return 16 if settings.get("short") else settings["batch_size"]


def evaluated(steps: int) -> set[int]:
    """Return the numbers of the batches after which a run of so many is evaluated."""
    return {round(i / 40 * steps) for i in range(20, 41)}


def by_hand(seed: int, curve: Curve, settings: Settings) -> int:
    """Train by AdamW."""
    steps, net = length(settings), new_net(seed, settings)
    train, test = windows(settings)
    params = list(net.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": settings["weight_decay"]},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=tuple(settings["betas"]), fused=True)
    autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=settings["precision"] == "bf16")
    loss_of: Any = _mean_loss if settings.get("short") else torch.compile(_mean_loss)
    torch.manual_seed(seed)
    batches = _batches(train, batch_size(settings))
    curve.start()
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = settings["lr"] * multiplier(number, settings)
        inputs, targets = next(batches)
        for part in zip(*(tensor.chunk(settings["microbatches"]) for tensor in (inputs, targets)), strict=True):
            with autocast:
                loss = loss_of(net, *part) / settings["microbatches"]
            loss.backward()
        nn.utils.clip_grad_norm_(params, settings["clip"])
        optimizer.step()
        optimizer.zero_grad()
        curve.batch()
        if number + 1 in evaluated(steps):
            with curve.evaluating(), torch.no_grad(), autocast:
                parts = [loss_of(net, *_moved(part)).item() for part in DataLoader(test, 32)]
            curve.add(sum(parts) / len(parts))
    return num_params(net)


def _mean_loss(net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(net(inputs), targets)


def _batches(train: Windows, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches on the device without end, each epoch in another order."""
    while True:
        yield from map(_moved, DataLoader(train, size, shuffle=True, drop_last=True, pin_memory=DEVICE == "cuda"))


def _moved(part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    inputs, targets = (tensor.to(DEVICE, non_blocking=True) for tensor in part)
    return inputs, targets


def recipe(seed: int, curve: Curve, settings: Settings) -> int:
    """Train by the recipe for text, with the methods of the speed runs."""
    train, test = windows(settings)
    settings = {**settings, "compile": not settings.get("short")}
    return fit(
        new_net(seed, settings),
        recipe_parts(settings),
        pc.data.loader(train, batch_size(settings), shuffle=True, drop_last=True),
        pc.data.loader(test, 32),
        num_batches=length(settings),
        due=evaluated(length(settings)),
        metric="loss",
        seed=seed,
        curve=curve,
        settings=settings,
    )


TASK = Task(
    name="fineweb",
    title="FineWeb, a GPT-2 of 124 million parameters",
    metric="validation loss",
    target=3.28,
    shown=(3.0, 5.0),
    sides={"baseline": Side(by_hand, BASELINE), "recipe": Side(recipe, RECIPE)},
    tuning={
        "baseline": [{"lr": lr} for lr in (9e-4, 1.2e-3, 3e-3)] + [{"steps": steps} for steps in (7_000, 12_000)],
        "recipe": [{"lr": lr} for lr in (0.01, 0.04)] + [{"steps": steps} for steps in (3_500, 4_000, 5_500)],
    },
    is_lower_better=True,
    precisions=("bf16",),
)


if __name__ == "__main__":
    run(TASK, __doc__)
