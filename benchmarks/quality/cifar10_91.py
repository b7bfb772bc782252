"""How long until a wider convolutional network reaches 91 % on CIFAR-10: a tuned plain loop, and a recipe?

    PURECOMPOSE_DATA=folder python benchmarks/quality/cifar10_91.py

The data, the sides and the methods are those of `cifar10.py`; the network has 1.2 million parameters, and a run takes
minutes, to see whether the recipe's gain is one of very short runs only.
"""

import cifar10
from _cifar import Setup
from _task import Task, run


SETUP = Setup(
    widths=(64, 128, 256),
    baseline={**cifar10.BASELINE, "epochs": 14.0},
    recipe={**cifar10.RECIPE, "epochs": 8.0, "shift": 2},
    parts=cifar10.recipe_parts,
)
TASK = Task(
    name="cifar10_91",
    title="CIFAR-10, a wider network",
    metric="accuracy",
    target=0.91,
    shown=(0.5, 0.95),
    sides=SETUP.sides,
    tuning={"baseline": [{"epochs": 12.0}], "recipe": [{"epochs": 7.0}]},
    num_seeds=3,
    precisions=("bf16",),
)


if __name__ == "__main__":
    run(TASK, __doc__)
