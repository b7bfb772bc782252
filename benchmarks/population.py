"""What does a step of one member cost in a population, beside the loop people write by hand over one network?

    python benchmarks/population.py [--members 64] [--threads 1] [--chunk-size 8]

64 MLPs with a batch of 64, SGD with momentum; the members differ in seed and learning rate. The sides take turns: the
loop by hand over one member; the population in eager mode, compiled, and compiled in chunks that fit into the
processor's cache; and, as a lower bound, only the eight matrix products of each member, by `torch.bmm`. Times are for
one member's step, with one thread the processor's; "batches" says whether all members train on one batch, or each on
its own. Compile time is not part of it.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from _subjects import MOMENTUM, Subject, by_hand, mlp
from _timing import Row, against, arguments, median_us, paired, parse, save

import purecompose as pc
from purecompose import State, compose, loop_events, losses, optim


def members(subject: Subject, num: int) -> State:
    """Stacked states of other seeds and rates."""
    states = [
        State.create(
            subject.net,
            loss=losses.cross_entropy,
            optimizer=optim.sgd(pc.hparam("lr", 0.01), momentum=MOMENTUM),
            key=seed,
            duration="100000ba",
            batches_per_epoch=100,
        )
        for seed in range(num)
    ]
    stacked = pc.stack_states(states)
    return stacked.replace(hparams={"lr": torch.linspace(0.001, 0.02, num)})


def side(step: Any, states: State, batch: Any) -> Callable[[], None]:
    """A population's step."""
    current = step.init(states)

    def run() -> None:
        nonlocal current
        current = step(current, batch)

    return run


def sides(subject: Subject, num: int, batches: str, chunk_size: int, backend: str) -> dict[str, Callable[[], None]]:
    """All ways to train the members."""
    batch = (subject.inputs, subject.targets)
    if batches == "each":
        batch = tuple(torch.stack([tensor] * num) for tensor in batch)
    whole, chunks = (pc.population(compose(loop_events), num, size, batches) for size in (None, chunk_size))
    steps: dict[str, Any] = {
        "population, eager": whole,
        "population, compiled": pc.compile(whole, backend=backend),
        f"population, compiled, chunks of {chunk_size}": pc.compile(chunks, backend=backend),
    }
    return {name: side(step, members(subject, num), batch) for name, step in steps.items()}


def products(num: int) -> Callable[[], None]:
    """The products of all members by `torch.bmm`, with factors transposed as in a step, into memory that is there."""
    x, h, grad, last = (torch.randn(num, 64, width) for width in (64, 128, 128, 10))
    first, second, third = (torch.randn(num, rows, columns) for rows, columns in ((128, 64), (128, 128), (10, 128)))
    pairs = [
        (x, first.mT), (h, second.mT), (h, third.mT),  # forward
        (last.mT, h), (last, third),  # backward, layer by layer
        (grad.mT, h), (grad, second),
        (grad.mT, x),
    ]  # fmt: skip
    results = [left @ right for left, right in pairs]

    def run() -> None:
        for (left, right), result in zip(pairs, results, strict=True):
            torch.bmm(left, right, out=result)

    return run


def main() -> None:
    parser = arguments(__doc__, blocks=20, calls=5)
    parser.add_argument("--members", type=int, default=64, help="how many (default %(default)s)")
    parser.add_argument("--chunk-size", type=int, default=8, help="members in a chunk (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    args = parse(parser)
    torch.set_num_threads(args.threads)
    subject, num = mlp(), args.members
    hand = by_hand(subject)

    def loop() -> None:
        for _ in range(num):
            hand()

    clock = time.process_time if args.threads == 1 else time.perf_counter
    rows: list[Row] = []
    for batches in ("shared", "each"):
        fns = {"by hand": loop, **sides(subject, num, batches, args.chunk_size, args.backend)}
        fns["products only"] = products(num)
        seconds = paired(fns, calls=args.calls, blocks=args.blocks, clock=clock)
        for name in fns:
            rows.append(
                {
                    "batches": batches,
                    "side": name,
                    "members": num,
                    "us a member-step": round(median_us(seconds[name]) / num, 1),
                    **against(seconds, name, "by hand"),
                }
            )
    save("population", rows, args.out)


if __name__ == "__main__":
    main()
