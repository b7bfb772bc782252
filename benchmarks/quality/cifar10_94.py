"""How long until airbench's network reaches 94 % on CIFAR-10 on a GPU: a tuned plain loop, and a recipe?

    PURECOMPOSE_DATA=folder python benchmarks/quality/cifar10_94.py

The folder contains `cifar10.npz`, as for `cifar10.py`. Evaluation averages over an image and its mirror image.
Without a GPU, `--short` shows that it runs.
"""

import torch
from _cifar import Setup
from _task import Task, run
from cifar10 import recipe_parts


BASELINE = {
    "lr": 2.0,
    "momentum": 0.85,
    "weight_decay": 1e-3,
    "peak": 0.23,
    "smoothing": 0.2,
    "batch_size": 1000,
    "shift": 2,
    "epochs": 16,
    "compile": True,
}
RECIPE = {
    "muon_lr": 0.24,
    "muon_momentum": 0.6,
    "muon_decay": 0.1,
    "bias_lr": 40.0,
    "head_lr": 1.0,
    "warmup": 0.0,
    "smoothing": 0.2,
    "mode": "resize",
    "scale": 1.0,
    "delay": 0.0,
    "full": 1.0,
    "views": 2,
    "batch_size": 1000,
    "shift": 2,
    "epochs": 9,
    "compile": True,
}
SETUP = Setup(
    widths=(64, 256, 256),
    baseline=BASELINE,
    recipe=RECIPE,
    parts=recipe_parts,
    device="cuda" if torch.cuda.is_available() else "cpu",
)
TASK = Task(
    name="cifar10_94",
    title="CIFAR-10",
    metric="accuracy",
    target=0.94,
    shown=(0.5, 0.95),
    sides=SETUP.sides,
    tuning={
        "baseline": [{"lr": lr} for lr in (0.5, 1.0, 4.0, 8.0)] + [{"epochs": epochs} for epochs in (12, 14, 18)],
        "recipe": [{"muon_lr": lr} for lr in (0.06, 0.12, 0.48)] + [{"epochs": epochs} for epochs in (7, 8, 10, 12)],
    },
    precisions=("bf16",),
)


if __name__ == "__main__":
    run(TASK, __doc__)
