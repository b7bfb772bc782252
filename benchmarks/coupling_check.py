"""What does the check that a batch may be cut cost in a run of 100 steps?

    python benchmarks/coupling_check.py [--blocks 5]

It runs in the first step and in batches 2, 4, 8, ..., 64, on a few examples. Its time is measured within the run, in
percent of the rest of it; the target is 3. The first step, which is checked for other things and compiles, is left out.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _timing import Row, arguments, parse, quartiles, save
from torch import nn

import purecompose as pc
from purecompose import State, Step, compose, loop, loop_events, losses, optim


STEPS = 100


def mlp() -> nn.Module:
    widths = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(nn.Flatten(), *widths)


def cnn() -> nn.Module:
    blocks = [
        module
        for i, o in ((1, 16), (16, 32), (32, 32))
        for module in (nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32 * 9, 10))


def own(state: State) -> State:
    """A stage that calls the network itself, as those of several players do."""
    outputs, state = state.call(state.batch[0])
    return state.replace(loss=F.cross_entropy(outputs, state.batch[1]))


CASES: dict[str, tuple[Callable[[], nn.Module], Any, bool]] = {
    "MLP 784-512-512-10": (mlp, loop_events, False),
    "CNN of 28x28": (cnn, loop_events, False),
    "CNN of 28x28, compiled": (cnn, loop_events, True),
    "MLP, own stage": (mlp, (loop.Microbatches(loop.Grad(own)), loop.update, loop.advance), False),
    "CNN, own stage": (cnn, (loop.Microbatches(loop.Grad(own)), loop.update, loop.advance), False),
}


def percent(net: nn.Module, program: Any, num_steps: int, backend: str | None) -> float:
    """The time of the check in percent of the rest of a run, without the first step."""
    state = State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.01, momentum=0.9), key=0)
    step: Step = compose(program, microbatches=4)
    step = step if backend is None else pc.compile(step, backend=backend, quiet=True)
    batch = torch.randn(128, 1, 28, 28), torch.randint(10, (128,))
    spent, check = [0.0], Step.check_separable

    @functools.wraps(check)
    def timed(self: Step, prepared: Any) -> None:
        start = time.perf_counter()
        check(self, prepared)
        spent[0] += time.perf_counter() - start

    state = step(state, batch)
    Step.check_separable = timed
    try:
        start = time.perf_counter()
        for _ in range(num_steps - 1):
            state = step(state, batch)
        whole = time.perf_counter() - start
    finally:
        Step.check_separable = check
    return 100 * spent[0] / (whole - spent[0])


def main() -> None:
    args = parse(arguments(__doc__, blocks=5))
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name, (make, program, is_compiled) in CASES.items():
        backend = args.backend if is_compiled else None
        found = [percent(make(), program, 4 if args.short else STEPS, backend) for _ in range(args.blocks)]
        low, middle, high = quartiles(found)
        rows.append({"case": name, "percent": round(middle, 2), "quartiles": f"{low:.2f} {high:.2f}"})
    save("coupling_check", rows, args.out)


if __name__ == "__main__":
    main()
