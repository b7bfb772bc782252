"""How long does surgery on a network of the size of a ResNet-50 take, and how much memory beyond its new tensors?

    python benchmarks/surgery.py [--blocks 5]

BlurPool, squeeze-and-excitation and channels last at INIT, on 25.6 million parameters with SGD's momentum: all of them,
and each alone. Targets: under 2 s, and no more memory than the new tensors take. "new" is what the tensors of the new
state take that are not the old one's, "allocated" the sum of all allocations on the way, freed ones as well, "peak" the
most that was alive at once.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from _timing import Row, arguments, parse, quartiles, save

from purecompose import Algorithm, State, algorithms as alg, compose, loop_events, losses, optim, tree
from purecompose.nn import models


METHODS: dict[str, Callable[[], Algorithm]] = {
    "blurpool": alg.blurpool,
    "squeeze_excite": alg.squeeze_excite,
    "channels_last": alg.channels_last,
}


def new_state(width: int) -> State:
    """A network with its momentum; that of the paper at width 64."""
    net = models.build("resnet50", in_shape=(3, 224, 224), num_classes=1000, seed=0, width=width)
    optimizer = optim.sgd(0.1, momentum=0.9)
    return State.create(net, loss=losses.cross_entropy, optimizer=optimizer, duration="90ep", batches_per_epoch=10)


def measured(names: list[str], state: State, blocks: int) -> Row:
    """Time and memory of the methods' INIT."""
    step = compose(loop_events, [METHODS[name]() for name in names])
    low, middle, high = quartiles([seconds_of(lambda: step.init(state)) for _ in range(blocks)])
    after = step.init(state)
    new, (allocated, peak) = new_bytes(state, after), allocations(lambda: step.init(state))
    return {
        "methods": " + ".join(names),
        "parameters": sum(param.numel() for param in after.params.values()),
        "seconds": round(middle, 3),
        "quartiles": f"{low:.3f}-{high:.3f}",
        "new_mb": round(new / 1e6, 2),
        "allocated_mb": round(allocated / 1e6, 2),
        "peak_mb": round(peak / 1e6, 2),
        "allocated_of_new": round(allocated / max(new, 1), 3),
    }


def seconds_of(run: Callable[[], object]) -> float:
    """How long it takes."""
    before = time.perf_counter()
    run()
    return time.perf_counter() - before


def new_bytes(before: State, after: State) -> int:
    """What the tensors take that are not on the old state's memory."""
    old = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(before) if isinstance(leaf, torch.Tensor)}
    new = {
        leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes()
        for leaf in tree.leaves(after)
        if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in old
    }
    return sum(new.values())


def allocations(run: Callable[[], object]) -> tuple[int, int]:
    """The bytes that torch allocates on the CPU while something runs: all of them, and the most alive at once."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profiler:
        kept = run()
    events = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    made: list[Any] = [event for event in events if event.name() == "[memory]"]
    memory = sorted((event.start_ns(), event.nbytes()) for event in made)
    del kept
    total = peak = alive = 0
    for _, size in memory:
        alive += size
        total, peak = total + max(size, 0), max(peak, alive)
    return total, peak


def main() -> None:
    """Measures, prints, writes the JSON."""
    options = parse(arguments(__doc__, blocks=5))
    state = new_state(8 if options.short else 64)
    rows = [measured(list(METHODS), state, options.blocks)]
    if not options.short:
        rows += [measured([name], state, options.blocks) for name in METHODS]
    save("surgery", rows, options.out)


if __name__ == "__main__":
    main()
