"""What does a compiled step of 200 parameter tensors cost beside its graph's own arithmetic?

    python benchmarks/many_leaves.py [--blocks 60]

200 small tensors under Adam are 600 leaves. What is added to the arithmetic is looking at the state and the batch, the
schedule, the key, handing arguments over and making the new state; the target is 100 us. It is measured in two ways.
"difference": the whole step less its compiled graphs, called with arguments that lie ready, block by block.
"hollow": the step itself, with graphs that return at once what they returned before; without donation this leaves out
that old tensors are given back, as the results stay the same.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _subjects import going_on
from _timing import Row, arguments, median_us, paired, parse, quartiles, save
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, Step, compose, loop_events, losses, optim


class Sum(nn.Module):
    """Logits `inputs + sum of all tensors`: as little arithmetic as so many parameters allow."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.terms = nn.ParameterList([nn.Parameter(0.01 * torch.randn(8)) for _ in range(num)])

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.stack(list(self.terms)).sum(0)


def new_state(num: int) -> State:
    """The state of `num` parameter tensors under Adam."""
    return State.create(
        Sum(num), loss=losses.cross_entropy, optimizer=optim.adam(1e-3), duration="100000ba", batches_per_epoch=100
    )


class Call(NamedTuple):
    """A call of a compiled graph."""

    link: Any
    call: Callable[[list[Tensor]], Any]
    given: list[Tensor]
    results: Any


def calls_in(compiled: Any, state: State, batch: Any) -> list[Call]:
    """The calls of compiled graphs in a step from this state."""
    state = compiled.init(state)
    for _ in range(3):  # the first steps of a run may take other graphs than those that follow
        state = compiled(state, batch)
    parts = [part for known in compiled._graphs._compiled_parts.values() for part in known]
    calls: list[Call] = []

    def noting(part: Any, call: Callable[[list[Tensor]], Any]) -> Callable[[list[Tensor]], Any]:
        def note(given: list[Tensor]) -> Any:
            kept = [*given]  # a compiled graph may empty its list
            calls.append(Call(part, call, kept, call(given)))
            return calls[-1].results

        return note

    originals = [part.call for part in parts]
    for part, call in zip(parts, originals, strict=True):
        part.call = noting(part, call)
    state.lease.buffers.bound.clear()  # where the calls lie ready with their arguments
    compiled(state, batch)
    for part, call in zip(parts, originals, strict=True):
        part.call = call
    if not calls:
        raise SystemExit("the step called none of its compiled graphs: how they are found has changed")
    return calls


def sides(step: Step, num: int, batch: Any, args: argparse.Namespace, *, donate: bool) -> dict[str, Callable]:
    """The whole step; its graphs alone; the step with its graphs hollowed out."""
    whole, noted, hollow = (pc.compile(step, donate=donate, backend=args.backend) for _ in range(3))
    calls = calls_in(noted, new_state(num), batch)

    def graphs() -> None:
        for call in calls:
            call.call([*call.given])

    for call in calls_in(hollow, new_state(num), batch):
        call.link.call = lambda given, results=call.results: results
    return {
        "whole": going_on(whole, new_state(num), batch),
        "graphs": graphs,
        "hollow": going_on(hollow, new_state(num), batch),
    }


def main() -> None:
    parser = arguments(__doc__, blocks=60)
    parser.add_argument("--tensors", type=int, default=200, help="parameter tensors (default %(default)s)")
    args = parse(parser)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    num = 20 if args.short else args.tensors
    batch = (torch.randn(64, 8), torch.randint(8, (64,)))
    rows: list[Row] = []
    for donate in (False, True):
        fns = sides(compose(loop_events), num, batch, args, donate=donate)
        seconds = paired(fns, calls=args.calls, blocks=args.blocks)
        added = [whole - alone for whole, alone in zip(seconds["whole"], seconds["graphs"], strict=True)]
        low, middle, high = quartiles(added)
        rows.append(
            {
                "tensors": num,
                "donated": donate,
                "whole us": round(median_us(seconds["whole"]), 1),
                "graphs alone us": round(median_us(seconds["graphs"]), 1),
                "difference us": round(1e6 * middle, 1),
                "quartiles": f"{1e6 * low:.1f} {1e6 * high:.1f}",
                "hollow us": round(median_us(seconds["hollow"]), 1),
                "hollow quartiles": " ".join(f"{1e6 * second:.1f}" for second in quartiles(seconds["hollow"])[::2]),
            }
        )
    save("many_leaves", rows, args.out)


if __name__ == "__main__":
    main()
