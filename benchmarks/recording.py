"""How much does it cost to record a run so that it can be replayed?

    python benchmarks/recording.py [--blocks 7]

A run without checkpoints is compared with the same run with `Checkpoints(keep="log")`, which writes one in each epoch
of 500 batches and computes the identity of data and code. The runs alternate. There are two networks: a CNN on images,
and an MLP, whose steps are very short. The number of checkpoints that a run of 100,000 batches keeps at any time is
counted, not timed. CPU time includes that of the thread that writes.
"""

import tempfile
import time
from types import SimpleNamespace
from typing import Any

import torch
from _timing import Row, arguments, in_turn, parse, quartiles, ratio, save as save_rows

from purecompose import Checkpoints, State, compose, data, fit, loop_events, losses, optim
from purecompose.nn import models
from purecompose.run.saving.selection import surplus


EPOCH = 500
"""Batches of an epoch."""
CASES: dict[str, dict[str, Any]] = {
    "cnn": {"in_shape": (1, 28, 28), "batch_size": 64, "batches": 1000},
    "mlp": {"in_shape": (1, 8, 8), "batch_size": 64, "batches": 5000},
}


def made(name: str, in_shape: tuple[int, ...], batch_size: int, batches: int) -> tuple[State, Any]:
    """Return the initial state of a run and its data."""
    generator = torch.Generator().manual_seed(0)
    num = min(batches, EPOCH) * batch_size
    inputs = torch.randn(num, *in_shape, generator=generator)
    targets = torch.randint(10, (num,), generator=generator)
    net = models.build(name, in_shape=in_shape, num_classes=10, seed=0)
    state = State.create(net, loss=losses.cross_entropy, optimizer=optim.adam(1e-3), duration=f"{batches}ba")
    return state, data.arrays(inputs, targets, batch_size)


def most_of(batches: int, every: int) -> int:
    """Return the largest number of checkpoints that a run has at any time."""
    settings, found, most = Checkpoints("unused", keep="log"), [], 0
    for batch in range(0, batches + 1, every):
        found = [SimpleNamespace(index=SimpleNamespace(batch=batch, metrics={})), *found]
        gone = {id(one) for one in surplus(found, settings)}  # pyright: ignore[reportArgumentType]
        found = [one for one in found if id(one) not in gone]
        most = max(most, len(found))
    return most


def main() -> None:
    args = parse(arguments(__doc__, blocks=7))
    torch.set_num_threads(1)
    step = compose(loop_events)
    rows: list[Row] = []
    for name, case in CASES.items():
        length = 20 if args.short else case["batches"]
        state, batches = made(name, case["in_shape"], case["batch_size"], length)
        cpu: dict[str, list[float]] = {"plain": [], "recorded": []}

        def seconds(
            side: str, state: State = state, batches: Any = batches, length: int = length, cpu: Any = cpu
        ) -> float:
            with tempfile.TemporaryDirectory() as folder:
                kept = None if side == "plain" else Checkpoints(folder, keep="log")
                start, used = time.perf_counter(), time.process_time()
                fit(step, state, batches, checkpoints=kept)
                cpu[side].append(time.process_time() - used)
                return time.perf_counter() - start

        for side in cpu:
            seconds(side)
            cpu[side].clear()
        times = in_turn(["plain", "recorded"], seconds, args.blocks)
        low, middle, high = ratio(times, "recorded", "plain")
        middle_of_cpu = ratio(cpu, "recorded", "plain")[1]
        rows.append(
            {
                "network": name,
                "batches": length,
                "ms per batch": round(quartiles(times["plain"])[1] / length * 1e3, 3),
                "recorded / plain": round(middle, 4),
                "quartiles": f"{low:.4f} {high:.4f}",
                "of CPU time": round(middle_of_cpu, 4),
                "checkpoints of 100,000 batches": max(most_of(100_000, every) for every in (100, 1000)),
            }
        )
    save_rows("recording", rows, args.out)


if __name__ == "__main__":
    main()
