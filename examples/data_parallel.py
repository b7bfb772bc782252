"""Several processes, one run: each computes a part of every batch.

torchrun --nproc-per-node 2 examples/data_parallel.py      (or as many as there are GPUs)
python examples/data_parallel.py                           (starts two processes by itself)
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

import purecompose as pc
from purecompose import algorithms as alg, compose, loop_events


def train(num_epochs: int) -> pc.State:
    """One of the processes. All do the same; the step divides each batch among them."""
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if dist.get_backend() == "nccl" else "cpu"
    torch.manual_seed(0)  # the same weights in all
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    points = torch.rand(512, 2) * 2 - 1
    labels = (points.norm(dim=1) > 0.8).long()  # inside of a circle, or outside
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(points, labels), 64, shuffle=True)

    step = pc.data_parallel(compose(loop_events, [alg.mixup(0.1), alg.sam(0.05, every=5), alg.ema("20ba")]))
    state = pc.State.create(
        net, loss=pc.losses.cross_entropy, optimizer=pc.optim.adamw(0.01), key=0, duration=f"{num_epochs}ep"
    ).to(device)
    is_first = dist.get_rank() == 0  # all states are the same: one process reports
    state = pc.fit(step, state, batches, observers=[pc.observers.Progress()] if is_first else [])
    scores = pc.evaluate(state, batches, ["accuracy"], step=step)  # divided, as batches are
    if is_first:
        print(f"accuracy {scores['accuracy']:.3f}, computed by {dist.get_world_size()} processes")
    return state


def started_here(rank: int, size: int, store: str, num_epochs: int) -> None:
    """One of the processes that this program starts where torchrun has not."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    train(num_epochs)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="three epochs")
    num_epochs = 3 if parser.parse_args().short else 40
    if dist.is_torchelastic_launched():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        train(num_epochs)
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(started_here, (2, f"{folder}/store", num_epochs), nprocs=2)


if __name__ == "__main__":
    main()
