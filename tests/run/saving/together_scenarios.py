"""Checkpoints that several processes write; as a program, this module is one of the processes.

python -m tests.run.saving.together_scenarios STORE RANK SIZE FOLDER
"""

import datetime
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import purecompose as pc
from purecompose import State, Step, algorithms as alg, compose, loop_events, optim
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


def run(mesh: Any, folder: Path, duration: str, **settings: Any) -> State:
    """Return the state of a run with checkpoints, which continues from the newest."""
    step, state = step_and_state()
    return pc.fit(
        pc.fully_sharded(step, mesh),
        pc.shard(state, mesh),
        make_batches(3, 6, shape=(2, 6, 6)),
        duration=duration,
        checkpoints=pc.Checkpoints(folder, every="1ba", **settings),
        resume="auto",
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


def main(store: str, rank: int, size: int, folder: str) -> None:
    """Run all scenarios as one of the processes, and save the results."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    mesh, other = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2))
    found = {
        "loaded": saved_and_loaded(mesh, other, Path(folder)),
        "resumed": resumed(mesh, Path(folder)),
        "refused": refused(mesh, Path(folder)),
        "described": described(Path(folder)),
        "whole": told(pc.whole(trained(mesh))),
    }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
