"""How long until a small convolutional network reaches a target on CIFAR-10: a tuned plain loop, and a recipe?

    PURECOMPOSE_DATA=folder python benchmarks/quality/cifar10.py

The folder contains `cifar10.npz`, with the arrays `train_images`, `train_labels`, `test_images` and `test_labels`.
Neither side is compiled: a step of the baseline takes 1.25 times as long under `torch.compile` (one core of an AMD
EPYC), and to compile the recipe takes longer than an epoch, for each size of images. The baseline is the loop that most
people write; "whitened loop" also has, by hand, airbench's first weights, which in the recipe come from two methods.
"""

from _cifar import Setup
from _fit import Parts
from _task import Settings, Task, run

from purecompose import algorithms as alg, optim, schedule


BASELINE = {
    "lr": 0.5,
    "momentum": 0.9,
    "weight_decay": 1e-3,
    "peak": 0.2,
    "smoothing": 0.1,
    "batch_size": 256,
    "shift": 2,
    "epochs": 4.0,
    "compile": False,
}
WHITENED = {**BASELINE, "whitened": True, "lr": 0.8, "epochs": 2.5}
RECIPE = {
    "muon_lr": 0.4,
    "muon_momentum": 0.7,
    "muon_decay": 0.1,
    "bias_lr": 20.0,
    "head_lr": 0.5,
    "warmup": 0.0,
    "smoothing": 0.1,
    "mode": "resize",
    "scale": 0.5,
    "delay": 0.3,
    "full": 0.2,
    "views": 2,
    "batch_size": 512,
    "microbatches": 2,
    "shift": 1,
    "epochs": 2.25,
    "compile": False,
}


def recipe_parts(settings: Settings) -> Parts:
    """Return the recipe: Muon for the filters, SGD for the rest, small images at first, and what airbench has."""
    s, curve = settings, schedule.linear(warmup=f"{settings['warmup']}dur")
    filters = optim.muon(
        s["muon_lr"] * curve, momentum=s["muon_momentum"], weight_decay=s["muon_decay"], filters="only"
    )
    biases, head = (optim.sgd(s[lr] * curve, momentum=0.85, nesterov=True) for lr in ("bias_lr", "head_lr"))
    small = {"initial_scale": s["scale"], "delay_fraction": s["delay"], "finetune_fraction": s["full"]}
    methods = [
        alg.patch_whitening(),
        alg.initialize("dirac"),
        alg.channels_last(),
        alg.alternating_flip(),
        alg.random_crop(s["shift"]),
        alg.progressive_resizing(s["mode"], **small),
        alg.label_smoothing(s["smoothing"]),
        alg.test_time_averaging(mirror=s["views"] > 1),
    ]
    return Parts(methods, optim.by_pattern({"*": filters, "*bias": biases}, head))


TUNING = {
    "baseline": [
        *({"lr": lr, "epochs": 4.25} for lr in (0.5, 0.7, 1.4)),
        {"lr": 0.3, "epochs": 3.75},
        {"epochs": 3.5},
        {"epochs": 3.75},
        {"peak": 0.3, "epochs": 3.75},
    ],
    "whitened loop": [{"lr": 0.5}, {"lr": 1.2}, {"epochs": 2.25}, {}],
    "recipe": [
        *(
            {"muon_momentum": 0.8, "bias_lr": 10.0, "epochs": 2.0, **own}
            for own in (
                {},
                {"muon_momentum": 0.6},
                {"muon_momentum": 0.9},
                {"muon_lr": 0.3},
                {"bias_lr": 20.0},
                {"epochs": 1.75},
                {"scale": 1.0, "delay": 0.0, "full": 1.0},
            )
        ),
        {"muon_momentum": 0.8},
        {},
    ],
}
SETUP = Setup(widths=(32, 64, 128), baseline=BASELINE, recipe=RECIPE, parts=recipe_parts, whitened=WHITENED)
TASK = Task(
    name="cifar10",
    title="CIFAR-10",
    metric="accuracy",
    target=0.845,
    shown=(0.5, 0.95),
    sides=SETUP.sides,
    tuning=TUNING,
    num_seeds=10,
    precisions=("bf16",),
)


if __name__ == "__main__":
    run(TASK, __doc__)
