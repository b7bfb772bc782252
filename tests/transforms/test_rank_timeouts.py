"""A process that does not answer is named by the processes that wait for it."""

import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

import purecompose as pc
from purecompose import State, losses, optim
from purecompose.testing.process import in_process_group


pytestmark = pytest.mark.skipif(not dist.is_available() or os.name != "posix", reason="needs processes and signals")

PROGRAM = """
import datetime, os, signal, sys
import torch, torch.distributed as dist
import purecompose as pc
from purecompose import State, losses, optim

store, rank, is_compiled, how = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True", getattr(signal, sys.argv[4])
dist.init_process_group(
    "gloo", init_method=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=3)
)
torch.manual_seed(0)
state = State.create(torch.nn.Linear(3, 1), loss=losses.mse, optimizer=optim.sgd(0.1))
step = pc.data_parallel(pc.compose(pc.loop_events))
step = pc.compile(step, backend="eager", quiet=True) if is_compiled else step
for number in range(5):
    if rank == 1 and number == 3:
        os.kill(os.getpid(), how)
    state = step(state, (torch.ones(4, 3), torch.zeros(4, 1)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("is_compiled", "how"), [(False, "SIGKILL"), (False, "SIGSTOP"), (True, "SIGSTOP")])
def test_a_process_that_does_not_answer_is_named(is_compiled: bool, how: str, tmp_path: pathlib.Path) -> None:
    shared = ["-c", PROGRAM, f"file://{tmp_path}/store"]
    processes = [
        subprocess.Popen([sys.executable, *shared, str(rank), str(is_compiled), how], stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        _, said = processes[0].communicate(timeout=120)
    finally:
        processes[1].send_signal(signal.SIGKILL)
        processes[1].communicate()
    assert processes[0].returncode == 1
    assert "RankTimeoutError: data_parallel: in batch 3 rank 0 of 2 waited" in said
    assert "s for rank 1, which is stopped, hangs or has ended" in said


def _error(mesh: Any, sizes: tuple[tuple[int, ...], ...], is_compiled: bool) -> str:
    """Return the error of batches of other sizes than those of the other process."""
    torch.manual_seed(0)
    state = State.create(torch.nn.Linear(3, 1), loss=losses.mse, optimizer=optim.sgd(0.1))
    step = pc.data_parallel(pc.compose(pc.loop_events))
    step = pc.compile(step, backend="eager", quiet=True) if is_compiled else step
    *known, last = sizes[mesh.get_rank()]
    for size in known:
        state = step(state, (torch.ones(size, 3), torch.zeros(size, 1)))
    with pytest.raises(ValueError) as caught:
        step(state, (torch.ones(last, 3), torch.zeros(last, 1)))
    return str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "is_compiled"),
    [
        (((8,), (6,)), False),
        (((8, 8, 8), (8, 8, 6)), False),
        (((8, 6, 8, 8), (8, 6, 8, 6)), False),  # sizes that are known to both
        (((8, 6, 8, 8), (8, 6, 8, 6)), True),
        (((8, 6), (8, 7)), True),
    ],
)
def test_processes_with_batches_of_other_sizes_say_so_at_once(
    sizes: tuple[tuple[int, ...], ...], is_compiled: bool
) -> None:
    words = [f"rank {rank} has float32[{sizes[rank][-1]}, 3], float32[{sizes[rank][-1]}, 1] in" for rank in (0, 1)]
    for error in in_process_group(_error, 2, sizes, is_compiled):
        assert "data_parallel: the processes differ in their batch (rank" in error
        assert all(word in error for word in words)
