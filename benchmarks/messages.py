"""What do processes that share a batch send, when in a step, and how much memory does the step need?

    python benchmarks/messages.py [--sizes 1 2 4]

An MLP of eight layers of 2048 x 2048 (P is 134 MB; AdamW), and the same with `per_example_clipping` or microbatches, on
1, 2 and 4 processes of one thread, which talk by gloo. "sent P" are the bytes that a process hands to reductions in a
step, in units of P; "messages" is their number; "after" are those that begin after the last matrix product of the step,
and "after P" their bytes. "above P" is the peak of the resident set during three steps above that between steps, in
which the state, and nothing else of the step's, is in memory. No times: the processes share the machine's cores.
"""

import argparse
import ctypes
import gc
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from _timing import Row, arguments, parse, save
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import purecompose as pc
from purecompose import State, algorithms as alg, compose, loop_events, losses, optim


SIDES = ("eager", "eager, donated", "compiled")
METHODS = {
    "none": list,
    "per_example_clipping": lambda: [alg.per_example_clipping(1.0, chunk_size=1)],
    "4 microbatches": list,
}


class Watched(TorchDispatchMode):
    """Records the operations that send and those that multiply matrices, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []
        """The bytes of each reduction; 0 for a product."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "_c10d_functional" in name and "reduce" in name:
            self.found.append(sum(tensor.nbytes for tensor in pytree.tree_leaves(args[0])))
        elif name.startswith(("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "mkldnn")):
            self.found.append(0)
        return func(*args, **kwargs or {})


def measure(args: argparse.Namespace, rank: int, size: int) -> Row:
    """The measurements of one process."""
    width, depth = (16, 2) if args.short else (2048, 8)
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])
    unit = sum(param.nbytes for param in net.parameters())
    batch = torch.randn(8, width), torch.randn(8, width)
    step = compose(loop_events, METHODS[args.methods](), microbatches=4 if args.methods == "4 microbatches" else 1)
    if size > 1:
        step = pc.data_parallel(step)
    if args.side != "eager":
        step = pc.compile(step, backend=args.backend if args.side == "compiled" else "eager", quiet=True)
    state = step.init(State.create(net, loss=losses.mse, optimizer=optim.adamw(1e-3), duration="99ba"))
    del net
    for _ in range(3):  # from the second step on, the state is in the step's own buffers
        state = step(state, batch)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    start = _memory("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    for _ in range(3):
        state = step(state, batch)
    peak = _memory("VmHWM")
    with Watched() as watched:
        step(state, batch)
    *_, last = (place for place, sent in enumerate(watched.found) if not sent)
    sent, after = [one for one in watched.found if one], watched.found[last + 1 :]
    return {
        "sent P": round(sum(sent) / unit, 4),
        "messages": len(sent),
        "after": len(after),
        "after P": round(sum(after) / unit, 3),
        "above P": round((peak - start) / unit, 2),
    }


def _memory(field: str) -> int:
    """Bytes of the resident set: now (VmRSS), or at most since the last reset (VmHWM)."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def in_children(methods: str, side: str, size: int) -> Row:
    """The same of as many fresh processes: the largest of each number."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": str(2**16),  # so that freed tensors leave the resident set
        }
        command = [sys.executable, __file__, *sys.argv[1:], "--methods", methods, "--side", side, "--store"]
        children = [
            subprocess.Popen(
                [*command, f"{folder}/store", "--rank", str(rank), "--sizes", str(size)],
                env=environment,
                stdout=subprocess.PIPE,
            )
            for rank in range(size)
        ]
        found = [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]
    return {name: max(row[name] for row in found) for name in found[0]}


def main() -> None:
    parser = arguments(__doc__, blocks=1, calls=1)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes")
    parser.add_argument("--methods", choices=METHODS, help="only these methods")
    parser.add_argument("--side", choices=SIDES, help="only this side")
    parser.add_argument("--store", help="be one process, which prints a line of JSON")
    parser.add_argument("--rank", type=int, default=0)
    args = parse(parser)
    if sys.platform != "linux":
        raise SystemExit("the memory of a process is read from /proc, which only Linux has")
    if args.store:
        torch.set_num_threads(1)
        (size,) = args.sizes
        dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=size)
        print(json.dumps(measure(args, args.rank, size)))
        dist.destroy_process_group()
        return
    rows: list[Row] = []
    for methods in [args.methods] if args.methods else METHODS:
        for side in [args.side] if args.side else SIDES:
            for size in args.sizes:
                rows.append({"methods": methods, "side": side, "processes": size, **in_children(methods, side, size)})
                print(json.dumps(rows[-1]), flush=True)
    save("messages", rows, args.out)


if __name__ == "__main__":
    main()
