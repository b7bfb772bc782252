"""How long until a small convolutional network reaches a target on CIFAR-10: a tuned plain loop, and a recipe?

    PURECOMPOSE_DATA=folder python benchmarks/quality/cifar10.py

The folder contains `cifar10.npz`, with the arrays `train_images`, `train_labels`, `test_images` and `test_labels`.
"""

from _cifar import Parts, Setup
from _task import Settings, Task, run

from purecompose import algorithms as alg, optim, schedule


BASELINE = {
    "lr": 0.2,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "peak": 0.2,
    "smoothing": 0.1,
    "batch_size": 256,
    "shift": 4,
    "epochs": 6,
    "compile": True,
}
RECIPE = {
    "muon_lr": 0.2,
    "muon_momentum": 0.6,
    "muon_decay": 0.1,
    "bias_lr": 30.0,
    "head_lr": 0.5,
    "smoothing": 0.1,
    "scale": 0.75,
    "delay": 0.8,
    "full": 0.2,
    "freeze_start": 0.4,
    "freeze_level": 0.0,
    "mode": "resize",
    "warmup": 0.0,
    "batch_size": 512,
    "shift": 2,
    "epochs": 4,
    "compile": True,
}


def parts(settings: Settings) -> Parts:
    """Return the recipe: Muon for the filters of the stages, small images at first, smoothed labels."""
    s, curve = settings, schedule.linear(warmup=f"{settings['warmup']}dur")
    filters = optim.muon(s["muon_lr"] * curve, momentum=s["muon_momentum"], weight_decay=s["muon_decay"], filters=True)
    rest = optim.sgd(
        s["bias_lr"] * curve, momentum=0.85, nesterov=True, groups={"*head.weight": {"lr": s["head_lr"] * curve}}
    )
    small = {"initial_scale": s["scale"], "delay_fraction": s["delay"], "finetune_fraction": s["full"]}
    methods = [
        alg.channels_last(),
        alg.progressive_resizing(s["mode"], **small),
        alg.label_smoothing(s["smoothing"]),
        alg.layer_freezing(s["freeze_start"], s["freeze_level"], num_stages=None),
    ]
    return Parts(methods, optim.by_pattern({"*stages.*": filters}, rest), s["batch_size"], s["epochs"])


SETUP = Setup(widths=(32, 64, 128), baseline=BASELINE, recipe=RECIPE, parts=parts)
TASK = Task(
    name="cifar10",
    title="CIFAR-10",
    metric="accuracy",
    target=0.88,
    shown=(0.5, 0.95),
    sides=SETUP.sides,
    tuning={"baseline": [], "recipe": []},
    precisions=("bf16",),
)


if __name__ == "__main__":
    run(TASK, __doc__)
