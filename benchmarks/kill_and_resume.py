"""Does a run that was killed at any point, and continues from its checkpoints, end with the same bits?

    python benchmarks/kill_and_resume.py [--kills 200] [--seed 0]

Every kill takes a case: one of the shipped algorithms (each in turn), with an optimizer, a schedule, a kind of data
and a way to run the step drawn by chance. A child process trains and is sent SIGKILL at a random batch, or a random
time after it, so that some die while they write. What it left behind is looked through; another child continues from
there, and sometimes is killed as well. The last one's state is compared, bit by bit, with that of a run that was not
killed.

Children are forked from a process in which nothing has run, which takes milliseconds where starting one takes seconds.
"""

import hashlib
import itertools
import multiprocessing
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from _timing import Row, arguments, parse, save
from torch.utils.data import DataLoader, Dataset

from purecompose import (
    Checkpoints,
    State,
    batch as batches,
    compile,
    compose,
    data,
    fit,
    loop_events,
    optim,
    schedule,
    tree,
)
from purecompose.errors import CheckpointError, CheckpointWarning
from purecompose.run.saving import folder
from purecompose.run.saving.files import check_files
from purecompose.saving import newest
from purecompose.testing.case import Subject
from purecompose.testing.tasks import TASKS, Task


sys.path.append(str(pathlib.Path(__file__).parents[1]))  # for the table of methods

from tests.shipped import SHIPPED  # noqa: E402


NUM_EXAMPLES, BATCH_SIZE, EPOCHS = 40, 8, 3
NUM_BATCHES = EPOCHS * NUM_EXAMPLES // BATCH_SIZE
FORK = multiprocessing.get_context("fork")

OPTIMIZERS: Mapping[str, Callable[[Any], Any]] = {
    "sgd": lambda lr: optim.sgd(lr),
    "momentum": lambda lr: optim.sgd(lr, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda lr: optim.sgd(lr, momentum=0.9, nesterov=True),
    "adam": lambda lr: optim.adam(lr),
    "adamw": lambda lr: optim.adamw(lr, amsgrad=True),
    "decoupled_sgdw": lambda lr: optim.decoupled_sgdw(lr, momentum=0.9, weight_decay=1e-3),
    "rmsprop": lambda lr: optim.rmsprop(lr, momentum=0.5, centered=True),
    "lion": lambda lr: optim.lion(lr),
    "adafactor": lambda lr: optim.adafactor(lr),
    "muon": lambda lr: optim.by_pattern({"*": optim.muon(lr)}, optim.adamw(lr)),
    "from_torch": lambda lr: optim.from_torch(torch.optim.NAdam, lr=lr),
}
SCHEDULES: Mapping[str, Any] = {
    "constant": schedule.hparam("lr", 0.05),
    "cosine": 0.05 * schedule.cosine(warmup="2ba"),
    "linear": 0.05 * schedule.linear(),
}
DATA = ("arrays", "DataLoader", "workers", "list")
MODES = ("eager", "eager", "compiled", "2 microbatches")
EVERY = ("1ba", "2ba", "1ep")


class Case(NamedTuple):
    """What is trained, all of it by name, so that every process makes it again."""

    algorithm: str
    task: str
    optimizer: str
    schedule: str
    data: str
    mode: str

    def train(self, where: pathlib.Path | None, every: str, observer: Callable[..., None]) -> State:
        """The state at the end of the run, which continues from what lies in a folder."""
        task = TASKS[self.task]
        optimizer = OPTIMIZERS[self.optimizer](SCHEDULES[self.schedule])
        state = task.make_state(3, optimizer=optimizer, duration=f"{EPOCHS}ep")
        algorithm = Subject.of(self.algorithm).algorithm
        step = compose(loop_events, [algorithm], microbatches=2 if self.mode == "2 microbatches" else 1)
        run = compile(step, backend="eager", quiet=True) if self.mode == "compiled" else step
        kept = None if where is None else Checkpoints(where, every=every)
        resume = None if where is None else "auto"
        return fit(run, state, _data(self.data, task), observers=observer, checkpoints=kept, resume=resume)


class Samples(Dataset):
    """The examples of a batch of any form."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def __getitem__(self, index: int) -> Any:
        return batches.map_tensors(lambda tensor: tensor[index], self.batch)


def noisy(sample: Any, rng: Any) -> Any:
    """A random transform, by the sample's own key."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        noise = 0.1 * torch.randn(tensor.shape, generator=rng)
        return tensor + noise.to(tensor.dtype) if tensor.is_floating_point() else tensor

    return batches.map_tensors(changed, sample)


def _data(kind: str, task: Task) -> Any:
    batch = task.make_batch(1, NUM_EXAMPLES)
    if kind == "arrays":
        inputs, targets = batch
        return data.arrays(inputs, targets, BATCH_SIZE)
    if kind == "DataLoader":
        return DataLoader(Samples(batch), BATCH_SIZE, shuffle=True)
    if kind == "workers":
        return data.loader(Samples(batch), BATCH_SIZE, workers=2, transform=noisy)
    return batches.split(batch, NUM_EXAMPLES // BATCH_SIZE)


def digest(state: State) -> str:
    """A number of all bits of a state, its time included."""
    sha = hashlib.sha256(repr(state.timestamp).encode())
    for path, leaf in tree.leaves_with_paths(state).items():
        sha.update(f"{path} {leaf.dtype} {tuple(leaf.shape)}".encode())
        sha.update(leaf.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _child(case: Case, where: pathlib.Path | None, every: str, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # workers complain when they lose their parent

    def tell(event: Any, state: State) -> None:
        if str(event.value) == "batch_end":
            pipe.send(state.timestamp.batch)

    try:
        pipe.send(digest(case.train(where, every, tell)))
    except BaseException as error:
        pipe.send(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        raise


def run(case: Case, where: pathlib.Path | None, every: str, kill: tuple[int, float] | None = None) -> str | None:
    """Trains in a child: gives the digest of the end; `None` where it was killed so many seconds after a batch."""
    ours, theirs = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_child, args=(case, where, every, theirs))
    child.start()
    theirs.close()
    try:
        while True:
            reported = ours.recv()
            if isinstance(reported, Exception):
                raise reported
            if isinstance(reported, str):
                return reported
            if kill is not None and reported >= kill[0]:
                time.sleep(kill[1])
                assert child.pid is not None
                os.kill(child.pid, signal.SIGKILL)
                return None
    finally:
        child.join()
        ours.close()


def broken(where: pathlib.Path) -> list[str]:
    """The checkpoints in a folder that are not whole."""
    found = []
    for path in sorted(where.iterdir()) if where.exists() else ():
        if not path.name.startswith("."):
            try:
                check_files(path, folder.read_index(path))
            except CheckpointError as error:
                found.append(str(error))
    return found


def cases(draw: random.Random, names: Iterable[str]) -> Iterable[Case]:
    """Every example of these shipped algorithms in turn, with the rest drawn."""
    rows = [(SHIPPED[name], text) for name in names for text in SHIPPED[name].examples]
    for row, text in itertools.cycle(rows):
        task, optimizer = draw.choice(row.tasks), draw.choice(list(OPTIMIZERS))
        # What the classes of torch compute cannot be compiled.
        modes = [mode for mode in MODES if (mode, optimizer) != ("compiled", "from_torch")]
        yield Case(
            text,
            task,
            optimizer,
            draw.choice(list(SCHEDULES)),
            draw.choice([kind for kind in DATA if kind != "arrays" or _is_pair(TASKS[task])]),
            draw.choice(modes),
        )


def _is_pair(task: Task) -> bool:
    return isinstance(task.make_batch(1, 2), tuple)


def one_kill(case: Case, draw: random.Random, whole: str) -> dict[str, int]:
    """Kills a run once or twice, lets it continue, and counts what is wrong."""
    every = draw.choice(EVERY)
    counts = {"kills": 0, "differences": 0, "half-written": 0, "lost": 0}
    with tempfile.TemporaryDirectory() as name:
        where, at, before = pathlib.Path(name) / "run", 0, None
        for _ in range(draw.choice([1, 1, 2])):
            at = draw.randint(at + 1, NUM_BATCHES - 1)
            if run(case, where, every, (at, draw.choice([0.0, draw.random() * 0.02]))) is not None:
                break  # a short run may end first
            counts["kills"] += 1
            counts["half-written"] += len(broken(where))
            before = newest(where)
            if at == NUM_BATCHES - 1:
                break
        end = run(case, where, every)
        counts["half-written"] += len(broken(where))
        after = newest(where)
        counts["lost"] += after is None or (before is not None and before.name > after.name)
        counts["differences"] += end != whole
    return counts


def main() -> None:
    parser = arguments(__doc__, blocks=1)
    parser.add_argument("--kills", type=int, default=200, help="how many (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the cases (default %(default)s)")
    parser.add_argument("--algorithm", action="append", choices=list(SHIPPED), help="only this; repeatable")
    args = parse(parser)
    warnings.simplefilter("ignore", CheckpointWarning)
    draw, whole = random.Random(args.seed), {}
    totals: dict[str, dict[str, int]] = {}
    stream, left = iter(cases(draw, args.algorithm or SHIPPED)), args.kills if not args.short else 3
    while left > 0:
        case = next(stream)
        if case not in whole:
            whole[case] = run(case, None, "1ep")
        counts = one_kill(case, draw, whole[case] or "")
        left -= counts["kills"]
        row = totals.setdefault(case.algorithm, {"runs": 0, **dict.fromkeys(counts, 0)})
        row["runs"] += 1
        for name, count in counts.items():
            row[name] += count
        if counts["differences"] or counts["half-written"] or counts["lost"]:
            print(f"wrong: {case} {counts}", flush=True)
    rows: list[Row] = [{"algorithm": name, **row} for name, row in totals.items()]
    rows.append(
        {"algorithm": "all", **{name: sum(r[name] for r in totals.values()) for name in next(iter(totals.values()))}}
    )
    save("kill_and_resume", rows, args.out)


if __name__ == "__main__":
    main()
