"""How long does it take to train an ensemble of 8: one network after the other, or as a population?

    PURECOMPOSE_DATA=folder python benchmarks/quality/ensemble_time.py

The folder contains `mnist.npz`. The ensemble is that of `ensemble.py`, of several widths: perceptrons that differ in
their seeds, by a plain loop, and as one population, whose step is compiled, or only traced. Seconds are processor time
of one thread, compilation included.
"""

from collections.abc import Callable
from typing import Any

from _members import Columns, Member, Way, accuracy, by_loop, by_population, by_width, percent
from _search import Search, Side, run
from _task import Settings


SIZE = 8
TASK: Settings = {"width": 128, "depth": 2, "batch_size": 128, "epochs": 3, "rungs": [[1.0, SIZE]], "lr": 0.01}
POPULATION: Settings = {**TASK, "backend": "inductor"}
WIDTHS = (32, 256)


def by(train: Way) -> Callable[[int, Settings], dict[str, Any]]:
    """Return what trains an ensemble by a way to train."""

    def ensemble(seed: int, s: Settings) -> dict[str, Any]:
        found = train([Member(100 * seed + index, s["lr"]) for index in range(SIZE)], s)
        single = sum(accuracy(own, s) for own in found.outputs) / SIZE
        together = accuracy(found.outputs.softmax(-1).mean(0), s)
        return {"seconds": round(found.seconds, 2), "accuracy of a member": single, "accuracy": together}

    return ensemble


COLUMNS: Columns = {"accuracy of a member, %": percent("accuracy of a member"), "accuracy, %": percent("accuracy")}
SIDES = {
    "plain runs": Side(by(by_loop), {**TASK, "precision": "fp32", "compile": False}),
    "population, compiled": Side(by(by_population), POPULATION),
    "population, traced": Side(by(by_population), {**POPULATION, "backend": "eager"}),
}
SEARCH = Search(
    name="ensemble_time",
    sides=SIDES,
    rows=lambda found: by_width(found, SIDES, "seconds", COLUMNS),
    reported=("seconds", "accuracy"),
    short={"width": 8},
    cases=[({}, 3), *(({"width": width}, 1) for width in WIDTHS)],
    tuning={"plain runs": [{"lr": 0.005}, {"lr": 0.01}], "population, compiled": [{"lr": 0.005}, {"lr": 0.01}]},
)


if __name__ == "__main__":
    run(SEARCH, __doc__)
