"""How long does it take to find the learning rate of a small network: by runs, by a population, each halved or not?

    PURECOMPOSE_DATA=folder python benchmarks/quality/rates.py

The folder contains `mnist.npz`. 16 rates from 0.0001 to 0.1 are tried on perceptrons of several widths: by a plain loop
for one rate after the other, and by one population, whose step is compiled, or only traced. "halved" is successive
halving: after 1/16 and after 1/4 of the run the best quarter goes on. Chosen is the rate of the least loss on 5,000
held-out images. Seconds are processor time of one thread, with compilation and with the evaluations that choose.
"""

from collections.abc import Callable
from typing import Any

from _members import Columns, Member, Way, accuracy, by_loop, by_population, by_width, percent
from _search import Search, Side, mean, run
from _task import Settings


NUM_RATES = 16
FULL = [[1.0, NUM_RATES]]
HALVED = [[1 / 16, NUM_RATES], [1 / 4, NUM_RATES // 4], [1.0, 1]]
HALVED_BY_TWO = [[1 / 2**i, 2**i] for i in (4, 3, 2, 1, 0)]
TASK: Settings = {"width": 64, "depth": 2, "batch_size": 64, "epochs": 3, "rungs": FULL}
LOOP: Settings = {**TASK, "precision": "fp32", "compile": False}
POPULATION: Settings = {**TASK, "backend": "inductor"}
TRACED: Settings = {**POPULATION, "backend": "eager"}
"""Runs the traced graph without compiling it, which is sooner where a run is short."""
WIDTHS = (16, 256)
"""Further widths, to see up to which one a population pays."""


def rates_of(seed: int) -> list[Member]:
    return [Member(seed, 10 ** (-4 + 3 * index / (NUM_RATES - 1))) for index in range(NUM_RATES)]


def by(train: Way) -> Callable[[int, Settings], dict[str, Any]]:
    """Return the search by a way to train."""

    def search(seed: int, s: Settings) -> dict[str, Any]:
        found = train(rates_of(seed), s)
        return {
            "rate": found.members[0].lr,
            "seconds to the rate": round(found.known, 2),
            "seconds": round(found.seconds, 2),
            "held-out loss": found.losses[0],
            "accuracy": accuracy(found.outputs[0], s),
        }

    return search


COLUMNS: Columns = {
    "rates found": lambda runs: ", ".join(f"{rate:.2g}" for rate in sorted({one["rate"] for one in runs})),
    "seconds to its network": lambda runs: mean([one["seconds"] for one in runs], 1),
    "accuracy, %": percent("accuracy"),
}
SIDES = {
    "plain runs": Side(by(by_loop), LOOP),
    "plain runs, halved": Side(by(by_loop), {**LOOP, "rungs": HALVED}),
    "population, compiled": Side(by(by_population), POPULATION),
    "population, traced": Side(by(by_population), TRACED),
    "population, traced, halved": Side(by(by_population), {**TRACED, "rungs": HALVED}),
}
SEARCH = Search(
    name="rates",
    sides=SIDES,
    rows=lambda found: by_width(found, SIDES, "seconds to the rate", COLUMNS),
    reported=("seconds to the rate", "accuracy"),
    short={"width": 8},
    cases=[({}, 3), *(({"width": width}, 1) for width in WIDTHS)],
    tuning={
        "plain runs": [{"precision": "bf16"}, {"compile": True}, {}],
        "plain runs, halved": [{"rungs": HALVED_BY_TWO}, {}],
        "population, traced, halved": [{"rungs": HALVED_BY_TWO}, {"backend": "inductor"}, {}],
    },
)


if __name__ == "__main__":
    run(SEARCH, __doc__)
