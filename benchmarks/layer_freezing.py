"""How much of a step's time does layer freezing save?

    python benchmarks/layer_freezing.py [--threads 1]

A ResNet-20 on a batch of 64 images of 32x32, of whose layers a quarter, half and three quarters are frozen, counted
from the input on. The step with frozen layers and the plain one take turns in blocks of one process, eager and
compiled, beside the loop by hand, whose frozen parameters have `requires_grad` off and no place in the optimizer.
Target: at most 0.75 of the plain step's time with half of the layers frozen. `--short` takes a ResNet-8.
"""

import argparse
import copy
from collections.abc import Callable

import torch
from _subjects import LR, MOMENTUM, Subject, going_on, new_state
from _timing import Row, arguments, median_us, paired, parse, ratio, save
from torch.nn import functional as F

import purecompose as pc
from purecompose import State, compose, loop_events
from purecompose.algorithms._layer_freezing import frozen_layers, layer_freezing, layers_of
from purecompose.nn import models


LENGTH = 100_000
"""Of the run, in batches: so long that depths do not move while they are measured."""

SHARES = (0.25, 0.5, 0.75)


def subject(name: str) -> Subject:
    """The network and its batch."""
    net = models.build(name, in_shape=(3, 32, 32), num_classes=10, seed=0)
    torch.manual_seed(0)
    return Subject(net, torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))


def at(share: float, subject: Subject) -> State:
    """The state at a point of the run."""
    state = new_state(subject)
    # A little later, so that rounding leaves no layer out.
    return state.replace(timestamp=state.timestamp.replace(batch=int(share * LENGTH) + 10))


def by_hand(share: float, subject: Subject) -> Callable[[], object]:
    """The loop by hand with the same layers frozen."""
    net = copy.deepcopy(subject.net).train()
    frozen = frozen_layers(net, share + 10 / LENGTH, freeze_start=0, num_stages=None) if share else ()
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=LR, momentum=MOMENTUM)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(subject.inputs), subject.targets).backward()
        optimizer.step()

    return step


def sides(share: float, subject: Subject, backend: str) -> dict[str, dict[str, Callable[[], object]]]:
    """The plain step and the one with frozen layers, in each mode."""
    steps = {"plain": compose(loop_events), "frozen": compose(loop_events, [layer_freezing(0, num_stages=None)])}
    compiled = {name: pc.compile(step, backend=backend, quiet=True) for name, step in steps.items()}
    start, batch = at(share, subject), (subject.inputs, subject.targets)
    return {
        "by hand": {"plain": by_hand(0, subject), "frozen": by_hand(share, subject)},
        "eager": {name: going_on(step, start, batch) for name, step in steps.items()},
        "compiled": {name: going_on(step, start, batch) for name, step in compiled.items()},
    }


def measured(share: float, subject: Subject, args: argparse.Namespace) -> Row:
    """One row: the steps with frozen layers against the plain ones."""
    layers = len(layers_of(subject.net))
    row: Row = {"share": share, "layers frozen": f"{int(share * (layers - 1))} of {layers}"}
    for mode, fns in sides(share, subject, args.backend).items():
        seconds = paired(fns, calls=args.calls, blocks=args.blocks)
        low, middle, high = ratio(seconds, "frozen", "plain")
        row[f"{mode} plain us"] = round(median_us(seconds["plain"]))
        row[f"{mode} ratio"] = round(middle, 3)
        row[f"{mode} quartiles"] = f"{low:.3f} {high:.3f}"
    return row


def main() -> None:
    parser = arguments(__doc__, blocks=20, calls=5)
    parser.add_argument("--threads", type=int, default=1, help="that torch computes with (default %(default)s)")
    args = parse(parser)
    torch.set_num_threads(args.threads)
    name, shares = ("resnet8", SHARES[1:2]) if args.short else ("resnet20", SHARES)
    save("layer_freezing", [measured(share, subject(name), args) for share in shares], args.out)


if __name__ == "__main__":
    main()
