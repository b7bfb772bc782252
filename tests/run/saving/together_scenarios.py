"""Checkpoints that several processes write."""

import errno
import functools
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import purecompose as pc
from purecompose import Event, State, Step, algorithms as alg, compose, loop_events, optim
from purecompose.run.saving import checkpoint as resuming, folder as disk, keeping
from tests.helpers import make_batch, make_batches, make_cnn, make_state
from tests.transforms.parallel_scenarios import told


def step_and_state(key: int = 0) -> tuple[Step, State]:
    """Return a step and an initialised state; its first filters have their channels last."""
    net = make_cnn(key).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    step = compose(loop_events, [alg.ema("1ba")])
    return step, step.init(make_state(net, optimizer=optim.adamw(0.01), duration="9ba", batches_per_epoch=3))


def trained(mesh: Any) -> State:
    """Return a divided state after a step."""
    step, state = step_and_state()
    return pc.fully_sharded(step, mesh)(pc.shard(state, mesh), make_batch(shape=(2, 6, 6)))


def saved_and_loaded(mesh: Any, other: Any, folder: Path) -> dict[str, list[str]]:
    """Return the differences between a saved state and the same loaded in several ways."""
    state, (_, template) = trained(mesh), step_and_state(key=1)
    pc.save(state, folder / "one")
    pc.save(trained(other), folder / "other")
    pc.save(trained(other), folder / "other")  # replaces it
    whole = pc.whole(state)
    if dist.get_rank() == 0:
        pc.save(whole, folder / "whole")
    dist.barrier()
    return {
        "as it was": pc.tree.diff(pc.load(folder / "one", pc.shard(template, mesh)), state),
        "on another mesh": pc.tree.diff(pc.whole(pc.load(folder / "one", pc.shard(template, other))), whole),
        "in one process": pc.tree.diff(pc.load(folder / "one", template), whole),
        "from another mesh": pc.tree.diff(pc.load(folder / "other", template), pc.whole(trained(other))),
        "from one process": pc.tree.diff(pc.load(folder / "whole", pc.shard(template, mesh)), state),
    }


def run(mesh: Any, folder: Path, duration: str, observers: Any = (), of_fit: Any = None, **settings: Any) -> State:
    """Return the state of a run with checkpoints, which continues from the newest; `of_fit` are settings of `fit`."""
    step, state = step_and_state()
    return pc.fit(
        pc.fully_sharded(step, mesh),
        pc.shard(state, mesh),
        make_batches(3, 6, shape=(2, 6, 6)),
        duration=duration,
        observers=observers,
        checkpoints=pc.Checkpoints(folder, every="1ba", **settings),
        resume="auto",
        **(of_fit or {}),
    )


def resumed(mesh: Any, folder: Path) -> dict[str, Any]:
    """Return what differs between a whole run and one that is cut, and the names of the checkpoints that are kept."""
    whole = run(mesh, folder / "uncut", "6ba", background=False)
    run(mesh, folder / "cut", "4ba", keep=2)
    dist.barrier()
    (newest,) = sorted((folder / "cut").glob("*4"))
    if dist.get_rank() == 0:
        files = sorted(newest.glob("*.safetensors"))
        files[-1].write_bytes(files[-1].read_bytes()[:-1] + b"x")  # only the last process notices
    dist.barrier()
    with warnings.catch_warnings(record=True) as told_of:
        warnings.simplefilter("always")
        cut = run(mesh, folder / "cut", "6ba", keep=2)
    dist.barrier()
    return {
        "difference": pc.tree.diff(cut, whole),
        "kept": sorted(path.name for path in (folder / "cut").iterdir()),
        "warnings": [str(one.message) for one in told_of],
    }


def wobble(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a metric of the state that goes up and down."""
    return torch.sin(300 * outputs.sum(1))


def best(mesh: Any, folder: Path) -> dict[str, Any]:
    """Return the best states of a whole run and of one that is cut, and the checkpoints that they keep."""
    found: dict[str, Any] = {}
    evaluator = pc.Evaluator(make_batches(2, 6, shape=(2, 6, 6)), {"wobble": wobble}, every="1ba")
    settings: dict[str, Any] = {"keep": 1, "best": "eval/wobble", "keep_best": 2, "mode": "max"}
    for name, durations in (("best", ["9ba"]), ("best and cut", ["5ba", "9ba"])):
        of_fit = {"evaluate": evaluator, "result": "best"}
        ends = [run(mesh, folder / name, one, of_fit=of_fit, background=False, **settings) for one in durations]
        dist.barrier()
        ranked = [(path.name, value) for path, value in pc.saving.ranked(folder / name)]
        found[name] = told(pc.whole(ends[-1])), str(ends[-1].timestamp), ranked
    return found


def refused(mesh: Any, folder: Path) -> str:
    try:
        step, state = step_and_state()
        state = pc.shard(state, mesh)
        saved = pc.Checkpoints(folder / "timed", every="5s")
        pc.fit(pc.fully_sharded(step, mesh), state, make_batches(shape=(2, 6, 6)), checkpoints=saved)
    except ValueError as error:
        return str(error)
    return ""


def described(folder: Path) -> None:
    """Save the state of a step of several processes, each of which has all of it."""
    step, state = step_and_state()
    step = pc.data_parallel(step)
    state = step(state, make_batch(shape=(2, 6, 6)))
    if dist.get_rank() == 0:
        pc.save(state, folder / "described", step=step)


def failing(real: Callable[..., Any], rank: int, error: Exception, times: float, words: str = "") -> Callable[..., Any]:
    """Return a function that fails in one process some times, if its first argument contains these words."""
    failed: list[Any] = []

    def instead(first: Any, *others: Any, **settings: Any) -> Any:
        if dist.get_rank() == rank and words in str(first) and len(failed) < times:
            failed.append(first)
            raise error
        return real(first, *others, **settings)

    return instead


def outcome(act: Callable[[], Any]) -> str:
    """Return the error that a function raises, or what it warns of."""
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as told_of:
        warnings.simplefilter("always")
        try:
            act()
            found = "; ".join(str(one.message) for one in told_of)
        except (Exception, SystemExit) as error:
            found = f"{type(error).__name__}: {error}"
    assert time.monotonic() - began < 20.0, "a process has waited for another one"
    return found


def failed_alone(mesh: Any, folder: Path) -> dict[str, Any]:
    """Return what each process reports if only one of them fails, and what it leaves in the folder."""
    last, full = dist.get_world_size() - 1, OSError(errno.ENOSPC, "No space left on device")
    odd = TypeError("an odd value")
    writing = {
        "full for a while": failing(disk.write_tensors, last, full, 1, "ba00000003"),
        "failing": failing(disk.write_tensors, last, OSError("broken"), 9, "ba00000003"),
        "first failing": failing(disk.write_tensors, 0, OSError("broken"), 9, "ba00000002"),
    }
    found: dict[str, Any] = {}
    for name, instead in writing.items():
        with patch.object(disk, "write_tensors", instead):
            found[name] = outcome(functools.partial(run, mesh, folder / name, "3ba"))
    taking = failing(keeping.snapshot, last, odd, 1)
    with patch.object(keeping, "snapshot", taking):
        found["odd"] = outcome(lambda: run(mesh, folder / "odd", "3ba"))
    with patch.object(disk, "write_tensors", failing(disk.write_tensors, last, OSError("broken"), 9)):
        found["saving"] = outcome(lambda: pc.save(trained(mesh), folder / "saved"))
    with patch.object(disk, "all_in", failing(disk.all_in, 0, OSError("unreadable"), 1)):
        found["looking"] = outcome(lambda: run(mesh, folder / "odd", "3ba"))
    with patch.object(resuming, "restored", failing(resuming.restored, last, OSError("unreadable"), 1)):
        found["reading"] = outcome(lambda: run(mesh, folder / "odd", "3ba"))
    dist.barrier()
    kept = {name: sorted(path.name for path in (folder / name).iterdir()) for name in (*writing, "odd")}
    return {"said": found, "kept": kept, "saved": (folder / "saved").exists()}


def ended(mesh: Any, folder: Path) -> dict[str, Any]:
    """Return how runs end of which one process receives a signal when no batch follows."""
    found = {}
    for event in (Event.BATCH_END, Event.FIT_END):

        def signalled(now: Event, state: State, event: Event = event) -> None:
            if now is event and state.timestamp.batch == 3 and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)

        found[event.name] = outcome(functools.partial(run, mesh, folder / event.name, "3ba", signalled))
    return found


def cut_off(mesh: Any, folder: Path) -> dict[str, Any]:
    """Return what runs say that end just after a checkpoint is due, and what they leave in the folder."""

    def leave(name: str) -> None:
        step, state = step_and_state()
        states: Any = pc.training(
            pc.fully_sharded(step, mesh),
            pc.shard(state, mesh),
            make_batches(3, 6, shape=(2, 6, 6)),
            duration="6ba",
            checkpoints=pc.Checkpoints(folder / name, every="2ba"),
        )
        next(state for state in states if state.timestamp.batch == 2)
        states.close()

    def raising(event: Event, state: State) -> None:
        if event is Event.BATCH_END and state.timestamp.batch == 2:
            raise ValueError("an observer fails")

    found = {
        "left": outcome(lambda: leave("left")),
        "raising": outcome(lambda: run(mesh, folder / "raising", "6ba", [raising])),
    }
    instead = failing(disk.write_tensors, dist.get_world_size() - 1, OSError("broken"), 9)
    with patch.object(disk, "write_tensors", instead), patch.object(disk, "_AFTER_END", 0.5):
        found["broken"] = outcome(lambda: leave("broken"))
    dist.barrier()
    return {name: (said, sorted(path.name for path in (folder / name).iterdir())) for name, said in found.items()}


def copied(mesh: Any, folder: Path) -> set[str]:
    """Return the names of the tensors that this process copies for the checkpoints of a run."""
    names, real = set[str](), resuming._fetched

    def fetched(tensors: Any) -> Any:
        names.update(tensors)
        return real(tensors)

    with patch.object(resuming, "_fetched", fetched):
        run(mesh, folder / "copied", "2ba")
    return names


def results(mesh: Any, folder: Path) -> dict[str, Any]:
    """Return the results of all scenarios in one of several processes."""
    other = init_device_mesh("cpu", (2, mesh.size() // 2))
    return {
        "loaded": saved_and_loaded(mesh, other, folder),
        "resumed": resumed(mesh, folder),
        "best": best(mesh, folder),
        "refused": refused(mesh, folder),
        "described": described(folder),
        "failed": failed_alone(mesh, folder),
        "ended": ended(mesh, folder),
        "cut off": cut_off(mesh, folder),
        "copied": copied(other, folder),
        "whole": told(pc.whole(trained(mesh))),
    }
