"""What does deciding which algorithms act cost a step, with ten algorithms?

    python benchmarks/matching.py

Times `Matcher.schedule` and the plan's look-up over consecutive batches, beside asking all ten predicates again.
"""

import statistics
import time

import torch
from _timing import save

from purecompose import (
    Algorithm,
    Event,
    State,
    after,
    between,
    compose,
    epoch_ends,
    every,
    loop_events,
    losses,
    on,
    optim,
)


def ten() -> list[Algorithm]:
    def same(event: Event, state: State) -> State:
        del event
        return state

    matches = {
        "mixup": on(Event.AFTER_DATALOADER),
        "selective_backprop": on(Event.AFTER_DATALOADER) & between(0.5, 0.9) & ~every(2),
        "label_smoothing": on(Event.BEFORE_LOSS, Event.AFTER_LOSS),
        "cutout": on(Event.AFTER_DATALOADER) & between("1ep", "8ep"),
        "sam": on(Event.AFTER_TRAIN_BATCH) & every(5),
        "clipping": on(Event.AFTER_TRAIN_BATCH),
        "ema": on(Event.BATCH_END) & after(0.1),
        "swa": on(Event.BATCH_END) & between(0.7, 0.97) & epoch_ends(),
        "freezing": on(Event.AFTER_TRAIN_BATCH) & after(0.5),
        "noise": on(Event.BEFORE_FORWARD) & ~after("500ba"),
    }
    return [Algorithm(name, match, same) for name, match in matches.items()]


def main() -> None:
    step = compose(loop_events, ten())
    state = State.create(
        torch.nn.Linear(4, 2),
        loss=losses.cross_entropy,
        optimizer=optim.sgd(0.1),
        duration="10ep",
        batches_per_epoch=200,
    )
    batch = (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64))
    times = [state.timestamp]
    for _ in range(1999):
        times.append(times[-1].advance(3, 0))
    pairs = list(zip(times, [*times[1:], times[-1].advance(3, 0)], strict=True))
    runs: dict[str, list[float]] = {"staged": [], "asked again": []}
    for _ in range(15):
        start = time.perf_counter()
        for now, later in pairs:
            bits = step.matcher.schedule(state, batch, now, later)
            step.operation(bits)
        runs["staged"].append((time.perf_counter() - start) / len(pairs) * 1e6)
        views = [state.replace(timestamp=now) for now, _ in pairs[:200]]
        start = time.perf_counter()
        for view in views:
            for event in step.events:
                for algorithm in step.algorithms:
                    algorithm.match(event, view)
        runs["asked again"].append((time.perf_counter() - start) / len(views) * 1e6)
    save(
        "matching",
        [
            {"way": way, "us a step, median": round(statistics.median(v), 2), "min": round(min(v), 2)}
            for way, v in runs.items()
        ],
    )


if __name__ == "__main__":
    main()
