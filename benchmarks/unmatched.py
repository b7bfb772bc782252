"""What do five algorithms that do not match now cost an eager step, against none?

    python benchmarks/unmatched.py [--blocks 100]

Every one of the five is a shipped algorithm kept to a phase of the run that is not now: some are settled for long,
some are asked again in every step. Both sides start from one state. "none again" is a second step without any, in
its own right: how far its ratio is from 1 is what the measurement cannot tell.
"""

import dataclasses

import torch
from _subjects import mlp, new_state, ours
from _timing import Row, against, arguments, median_us, paired, parse, save

from purecompose import Algorithm, Event, Step, after, algorithms as alg, between, compose, every, loop_events, on
from purecompose.time.predicates import Predicate


def only(algorithm: Algorithm, phase: Predicate) -> Algorithm:
    """The algorithm kept to a phase; INIT stays, so that it has its slot."""
    return dataclasses.replace(algorithm, match=algorithm.predicate & (on(Event.INIT) | phase))


def five() -> list[Algorithm]:
    """Shipped algorithms, none of which acts at the start of the run."""
    return [
        only(alg.mixup(0.2, name="late_mixup"), after(0.9)),
        only(alg.mixup(0.2, name="rare_mixup"), every("0.5dur")),
        only(alg.label_smoothing(0.1), between("500ep", 0.9) & ~every(2)),
        only(alg.selective_backprop(0.0, 1.0, full_every=0), every(10**6)),
        only(alg.selective_backprop(0.5, 0.9, name="late_backprop"), after(0.5)),
    ]


def check_unmatched(step: Step) -> None:
    """All five must sleep: one that acts would be measured with its arithmetic."""
    subject = mlp()
    state = step.init(new_state(subject))
    bits = step.prepare(state, (subject.inputs, subject.targets)).bits
    if bits or step.matcher.always:
        raise SystemExit(f"some of the five match now:\n{step.plan(state)}")


def main() -> None:
    args = parse(arguments(__doc__, blocks=100))
    torch.set_num_threads(1)
    subject = mlp()
    sleeping = compose(loop_events, five())
    check_unmatched(sleeping)
    steps = {"none": compose(loop_events), "five": sleeping, "none again": compose(loop_events)}
    fns = {name: ours(step, subject) for name, step in steps.items()}
    seconds = paired(fns, calls=args.calls, blocks=args.blocks)
    rows: list[Row] = [
        {"algorithms": name, "us a step": round(median_us(seconds[name]), 1), **against(seconds, name, "none")}
        for name in fns
    ]
    save("unmatched", rows, args.out)


if __name__ == "__main__":
    main()
