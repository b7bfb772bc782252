"""What does a step cost that looks up some rows of a large embedding, beside torch's own sparse gradients?

    python benchmarks/sparse_updates.py [--rows 200000] [--blocks 20]

A table of 200,000 x 32, of which each batch of 256 bags of 20 indices looks up about 5,000 rows, and a linear layer.
The loop by hand has `nn.Embedding(sparse=True)` and the optimizers of torch for sparse gradients; ours is a compiled
step, which writes the looked-up rows into the state's memory. Each step takes another of 16 batches. All sides of an
optimizer take turns in blocks of 50 steps; ratios are medians over blocks.
"""

import time
import warnings
from collections.abc import Callable

import torch
from _timing import Row, against, arguments, median_us, paired, parse, save
from torch import nn
from torch.nn import functional as F

import purecompose as pc


WIDTH, BAGS, LENGTH, CLASSES, BATCHES = 32, 256, 20, 10, 16


class Bags(nn.Module):
    """The mean of some rows of a table, and a linear layer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(indices).mean(1))


def torchs(name: str, net: Bags) -> list[torch.optim.Optimizer]:
    if name == "sgd":
        return [torch.optim.SGD(net.parameters(), 0.1)]
    if name == "adagrad":
        return [torch.optim.Adagrad(net.parameters(), 0.1)]
    return [torch.optim.SparseAdam([net.embed.weight], 1e-3), torch.optim.Adam(net.head.parameters(), 1e-3)]


OURS = {
    "sgd": pc.optim.sgd(0.1),
    "adagrad": pc.optim.adagrad(0.1),
    "sparse_adam": pc.optim.by_pattern({"embed.weight": pc.optim.sparse_adam(1e-3)}, pc.optim.adam(1e-3)),
}


def by_hand(name: str, rows: int, data: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], object]:
    net, turn = Bags(rows), iter(range(10**9))
    optimizers = torchs(name, net)

    def step() -> None:
        indices, labels = data[next(turn) % BATCHES]
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(net(indices), labels).backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def ours(name: str, rows: int, data: list[tuple[torch.Tensor, torch.Tensor]], backend: str) -> Callable[[], object]:
    step, turn = pc.compile(pc.compose(pc.loop_events), backend=backend), iter(range(10**9))
    state = pc.State.create(Bags(rows), loss=pc.losses.cross_entropy, optimizer=OURS[name], duration="1000000ba")
    held = [step.init(state)]

    def one() -> None:
        held.append(step(held.pop(), data[next(turn) % BATCHES]))

    return one


def main() -> None:
    parser = arguments(__doc__, blocks=20)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the table (default %(default)s)")
    args = parse(parser)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    data = [(torch.randint(args.rows, (BAGS, LENGTH)), torch.randint(CLASSES, (BAGS,))) for _ in range(BATCHES)]
    rows: list[Row] = []
    for name in OURS:
        fns = {"by hand": by_hand(name, args.rows, data), "ours": ours(name, args.rows, data, args.backend)}
        # The time of this process only: all sides compute on one thread.
        seconds = paired(fns, calls=args.calls, blocks=args.blocks, clock=time.process_time)
        for side in fns:
            row: Row = {"optimizer": name, "side": side, "us a step": round(median_us(seconds[side]))}
            rows.append(row | against(seconds, side, "by hand"))
    save("sparse_updates", rows, args.out)


if __name__ == "__main__":
    main()
