"""How long until a small convolutional network reaches a target on CIFAR-10: a tuned plain loop, and a recipe?

    PURECOMPOSE_DATA=folder python benchmarks/quality/cifar10.py

The folder contains `cifar10.npz`, with the arrays `train_images`, `train_labels`, `test_images` and `test_labels`.
Neither side is compiled: a step of the baseline takes 1.25 times as long under `torch.compile` (one core of an AMD
EPYC), and to compile the recipe takes longer than an epoch, for each size of images.
"""

from _cifar import Setup
from _fit import Parts
from _task import Settings, Task, run

from purecompose import algorithms as alg, optim, schedule


BASELINE = {
    "lr": 0.8,
    "momentum": 0.9,
    "weight_decay": 1e-3,
    "peak": 0.2,
    "smoothing": 0.1,
    "batch_size": 256,
    "shift": 2,
    "epochs": 2.25,
    "compile": False,
}
RECIPE = {
    "muon_lr": 0.4,
    "muon_momentum": 0.6,
    "muon_decay": 0.1,
    "bias_lr": 10.0,
    "head_lr": 0.5,
    "warmup": 0.0,
    "smoothing": 0.1,
    "mode": "resize",
    "scale": 0.5,
    "delay": 0.3,
    "full": 0.2,
    "freeze_start": 0.4,
    "freeze_level": 0.0,
    "batch_size": 512,
    "microbatches": 2,
    "shift": 1,
    "epochs": 2.5,
    "compile": False,
}


def parts(settings: Settings) -> Parts:
    """Return the recipe: Muon for the filters of the stages, small images at first, smoothed labels."""
    s, curve = settings, schedule.linear(warmup=f"{settings['warmup']}dur")
    filters = optim.muon(s["muon_lr"] * curve, momentum=s["muon_momentum"], weight_decay=s["muon_decay"], filters=True)
    rest = optim.sgd(
        s["bias_lr"] * curve, momentum=0.85, nesterov=True, groups={"*head.weight": {"lr": s["head_lr"] * curve}}
    )
    small = {"initial_scale": s["scale"], "delay_fraction": s["delay"], "finetune_fraction": s["full"]}
    methods = [alg.channels_last(), alg.progressive_resizing(s["mode"], **small), alg.label_smoothing(s["smoothing"])]
    if s["freeze_level"]:
        methods.append(alg.layer_freezing(s["freeze_start"], s["freeze_level"], num_stages=None))
    return Parts(methods, optim.by_pattern({"*stages.*": filters}, rest))


TUNING = {
    "baseline": [
        {"lr": 0.4, "shift": 4},
        {"lr": 0.4, "shift": 4, "epochs": 10},
        {"lr": 1.0, "shift": 4},
        {"epochs": 4},
        {"shift": 4, "epochs": 4},
        {"epochs": 3.25},
        {},
        {"lr": 1.6},
        {"compile": True},
        # Those above were run with 3 epochs, the default of their time.
        {"epochs": 2.75},
        {"epochs": 2.5},
        {"epochs": 2.25},
        # With 2.25 epochs:
        {"shift": 1},
    ],
    "recipe": [
        {"muon_lr": 0.2, "bias_lr": 30.0, "scale": 0.75, "delay": 0.75, "full": 0.25},
        {"muon_lr": 0.1, "bias_lr": 30.0, "scale": 0.75, "delay": 0.75, "full": 0.25},
        {"muon_lr": 0.2, "bias_lr": 30.0},
        {"muon_lr": 0.2, "bias_lr": 15.0, "head_lr": 0.25, "batch_size": 256},
        {"muon_lr": 0.2, "bias_lr": 30.0, "epochs": 6},
        {"muon_lr": 0.2, "muon_decay": 0.5, "bias_lr": 30.0, "delay": 0.2, "full": 0.1},
        {},
        {"scale": 0.75, "delay": 0.85, "full": 0.15, "mode": "crop"},
        {"muon_momentum": 0.9},
        {"freeze_level": 0.5},
        {"freeze_start": 0.2, "freeze_level": 0.5},
        {"epochs": 3.5},
        {"scale": 1.0, "delay": 0.0, "full": 1.0},
        # Those above were run with 3 epochs, whole batches and a shift of 2, the defaults of their time.
        {"shift": 2, "epochs": 2.75},
        {"shift": 2, "epochs": 2.5},
        {"epochs": 2.5},
        {"epochs": 2.4},
        {"epochs": 2.25},
    ],
}
SETUP = Setup(widths=(32, 64, 128), baseline=BASELINE, recipe=RECIPE, parts=parts)
TASK = Task(
    name="cifar10",
    title="CIFAR-10",
    metric="accuracy",
    target=0.845,
    shown=(0.5, 0.95),
    sides=SETUP.sides,
    tuning=TUNING,
)


if __name__ == "__main__":
    run(TASK, __doc__)
