"""Helpers for the tests of runs: a small task that is trained in milliseconds, and made-up records."""

import math
from pathlib import Path
from typing import Any

import torch

from purecompose import Evaluator, State, compose, fit, loop_events, losses, metrics, optim
from purecompose.algorithms import label_smoothing
from purecompose.records import RunFolder, RunRecords, Start
from purecompose.run.fit import training


STEP = compose(loop_events, [label_smoothing(0.1)])


def make_state(duration: str = "3ep") -> State:
    net = torch.nn.Linear(4, 3)
    with torch.no_grad():
        net.weight.copy_(torch.arange(12.0).reshape(3, 4) / 10)
        net.bias.zero_()
    return State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.5), duration=duration)


def make_batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)]


EVALUATOR = Evaluator(make_batches(1), {"accuracy": metrics.accuracy})


def train(run: RunFolder, duration: str = "3ep", until: int | None = None) -> State:
    """Train in a folder; `until` ends the run after that many batches without notice, as a kill does."""
    start = state = make_state(duration)
    run.begin(STEP, start)
    for state in training(
        STEP,
        start,
        make_batches(),
        evaluate=EVALUATOR,
        observers=run.observer,
        checkpoints=run.checkpoints(background=False),
        resume=run.resume,
    ):
        if until is not None and state.timestamp.batch >= until:
            break
    return state


def uninterrupted() -> State:
    return fit(STEP, make_state(), make_batches())


def made_up(name: str = "made-up", count: int = 40, members: int = 0, **changes: Any) -> RunRecords:
    """Return a run of 10 batches per epoch with evaluations; `batch_7={...}` changes the record of a batch."""
    records = []
    for batch in range(1, count + 1):
        time = {"batch": batch, "epoch": batch // 10, "time/sample": 8 * batch}
        loss = 2 * math.exp(-batch / count)
        numbers: dict[str, Any] = {
            "loss": loss,
            "lr": 0.1,
            "speed/batches": 50.0,
            "time/seconds": batch / 50,
            "memory/peak": 1e6,
        }
        if members:
            numbers["loss"] = [loss + i for i in range(members)]
        records.append({**time, **numbers, **changes.pop(f"batch_{batch}", {})})
        if batch % 10 == 0:
            accuracy = batch / count
            records.append(
                {**time, "eval/accuracy": [accuracy * (i + 1) / members for i in range(members)] or accuracy}
            )
    return RunRecords(name, Path(name), records=records, **changes)


def at(batch: int, **changes: Any) -> Start:
    return Start(batch, "2026-05-01T10:00:00+00:00", **changes)
