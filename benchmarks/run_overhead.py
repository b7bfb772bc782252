"""What do evaluation, checkpoints and records cost a run, beyond their own arithmetic and writing?

    python benchmarks/run_overhead.py [--data FOLDER] [--blocks 7]

An epoch of the small CNN on MNIST (or random images of its form, where no folder is given): by `fit` by itself, with
both an evaluation and a checkpoint, and with a run's folder, whose records have a line for each batch, too. The work of
the two is timed apart, in the same blocks: one evaluation, one `save` that waits for the disk. What is left over is
what this library adds.
"""

import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable

import torch
from _timing import Row, arguments, in_turn, parse, quartiles, save as save_rows

from purecompose import (
    Checkpoints,
    Evaluator,
    State,
    compose,
    data,
    evaluate,
    fit,
    loop_events,
    losses,
    metrics,
    optim,
    save,
)
from purecompose.data import ImageData
from purecompose.nn import models
from purecompose.records import RunFolder


BATCH_SIZE = 128


def images(folder: pathlib.Path | None, num: int) -> ImageData:
    """MNIST, or random images of its form."""
    if folder is not None:
        return data.load(folder)
    generator = torch.Generator().manual_seed(0)

    def made(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(count, 1, 28, 28, generator=generator)
        return inputs, torch.randint(10, (count,), generator=generator)

    return ImageData(*made(num), *made(num // 6), 10)


def main() -> None:
    parser = arguments(__doc__, blocks=7)
    parser.add_argument("--data", type=pathlib.Path, help="a folder of MNIST's files (random images)")
    parser.add_argument("--examples", type=int, default=60_000, help="of random images (default %(default)s)")
    args = parse(parser)
    torch.set_num_threads(2)
    found = images(args.data, args.examples)
    train = data.arrays(found.train_inputs, found.train_targets, BATCH_SIZE, drop_last=True)
    test = data.arrays(found.test_inputs, found.test_targets, 1000, shuffle=False)
    step = compose(loop_events)
    net = models.build("cnn", in_shape=found.in_shape, num_classes=10, seed=0)
    start = State.create(net, loss=losses.cross_entropy, optimizer=optim.adam(4e-3), duration="1ep")
    wanted = {"accuracy": metrics.accuracy, "loss": losses.cross_entropy}
    end = fit(step, start, train)

    def timed(act: Callable[[], object]) -> float:
        began = time.perf_counter()
        act()
        return time.perf_counter() - began

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)

        def kept() -> None:
            where = Checkpoints(folder / "kept", every="1ep")
            fit(step, start, train, evaluate=Evaluator(test, wanted), checkpoints=where)
            shutil.rmtree(folder / "kept")

        def recorded() -> None:
            run = RunFolder(folder / "run", {})
            run.begin(step, start)
            options = {"evaluate": Evaluator(test, wanted), "checkpoints": run.checkpoints(every="1ep")}
            fit(step, start, train, observers=run.observer, **options)
            shutil.rmtree(folder / "run")

        sides: dict[str, Callable[[], object]] = {
            "fit alone": lambda: fit(step, start, train),
            "with both": kept,
            "with a run's folder": recorded,
            "an evaluation": lambda: evaluate(end, test, wanted),
            "a checkpoint": lambda: save(end, folder / "one", step=step),
        }
        seconds = in_turn(list(sides), lambda side: timed(sides[side]), args.blocks)
    plain = seconds["fit alone"]
    rows: list[Row] = []
    for name, values in seconds.items():
        middle = quartiles(values)[1]
        rows.append({"what": name, "s": round(middle, 3), "of fit alone": round(middle / quartiles(plain)[1], 4)})
    apart = [sum(pair) for pair in zip(seconds["an evaluation"], seconds["a checkpoint"], strict=True)]
    for name in ("with both", "with a run's folder"):
        extra = [(all_ - own - work) / own for all_, own, work in zip(seconds[name], plain, apart, strict=True)]
        low, middle, high = quartiles(extra)
        left = f"{middle:.4f} ({low:.4f} to {high:.4f})"
        rows.append({"what": f"left over {name}", "s": "", "of fit alone": left})
    save_rows("run_overhead", rows, args.out)


if __name__ == "__main__":
    main()
