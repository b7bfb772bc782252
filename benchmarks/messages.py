"""What do processes that share a batch send, when in a step, and how much memory does the step need?

    python benchmarks/messages.py [--sizes 1 2 4]

An MLP of eight layers of 2048 x 2048 (P is 134 MB; AdamW), and the same with `per_example_clipping` or microbatches, on
1, 2 and 4 processes of one thread, which talk by gloo: by `data_parallel`, and by `fully_sharded`, which gathers for
each step or layer by layer.

"sent" are the bytes that a process sends in a step if messages travel around a ring, in units of those for the sum of
all gradients; "messages" is their number; "after" are those that begin after the last matrix product of the step, and
"after P" the bytes given to them, in units of P. "rest P" are the bytes of the state in a process, "above P" the peak
of the resident set during three steps above that between steps, in which the state, and nothing else of the step's, is
in memory. No times: the processes share the machine's cores.
"""

import argparse
import ctypes
import gc
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _timing import Row, arguments, parse, save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import purecompose as pc
from purecompose import State, algorithms as alg, compose, loop_events, losses, optim


SIDES = ("eager", "eager, donated", "compiled")
MODES = ("data_parallel", "sharded by step", "sharded by layer")
METHODS = {
    "none": list,
    "per_example_clipping": lambda: [alg.per_example_clipping(1.0, chunk_size=1)],
    "4 microbatches": list,
}


class Message(NamedTuple):
    """A message in a step."""

    given: int
    """Bytes of the tensor that is sent."""
    ring: float
    """Bytes that a process sends, if the message travels around a ring."""


class Watched(TorchDispatchMode):
    """Records the messages and the matrix products, in order."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.found: list[Message | None] = []
        """The messages; `None` for a product."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **kwargs or {}), str(func)
        if "_c10d_functional" in name and "wait" not in name:
            given, got = (sum(tensor.nbytes for tensor in pytree.tree_leaves(one)) for one in (args[0], result))
            turns = 2 if "all_reduce" in name else 1
            self.found.append(Message(given, turns * max(given, got) * (self.size - 1) / self.size))
        elif name.startswith(("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "mkldnn")):
            self.found.append(None)
        return result


def measure(args: argparse.Namespace, size: int) -> Row:
    """The measurements of one process."""
    width, depth = (16, 2) if args.short else (2048, 8)
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])
    unit = sum(param.nbytes for param in net.parameters())
    batch = torch.randn(8, width), torch.randn(8, width)
    step = compose(loop_events, METHODS[args.methods](), microbatches=4 if args.methods == "4 microbatches" else 1)
    given = step.init(State.create(net, loss=losses.mse, optimizer=optim.adamw(1e-3), duration="99ba"))
    del net
    if args.mode != "data_parallel":
        mesh = init_device_mesh("cpu", (size,))
        step, given = pc.fully_sharded(step, mesh, args.mode.split()[-1]), pc.shard(given, mesh)
    elif size > 1:
        step = pc.data_parallel(step)
    if args.side != "eager":
        step = pc.compile(step, backend=args.backend if args.side == "compiled" else "eager", quiet=True)
    state = step(given, batch)
    del given
    for _ in range(2):  # from the second step on, the state is in the step's own buffers
        state = step(state, batch)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    start = _memory("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    for _ in range(3):
        state = step(state, batch)
    peak = _memory("VmHWM")
    with Watched(size) as watched:
        end = step(state, batch)
    *_, last = (place for place, message in enumerate(watched.found) if message is None)
    sent, after = ([one for one in found if one is not None] for found in (watched.found, watched.found[last + 1 :]))
    own = sum(getattr(leaf, "_local_tensor", leaf).nbytes for leaf in pc.tree.leaves((end.params, end.opt_state)))
    return {
        "sent": round(sum(one.ring for one in sent) / (2 * unit * (size - 1) / size), 4) if size > 1 else 0.0,
        "messages": len(sent),
        "after": len(after),
        "after P": round(sum(one.given for one in after) / unit, 3),
        "rest P": round(own / unit, 3),
        "above P": round((peak - start) / unit, 2),
    }


def _memory(field: str) -> int:
    """Bytes of the resident set: now (VmRSS), or at most since the last reset (VmHWM)."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def in_children(methods: str, mode: str, side: str, size: int) -> Row:
    """The same of as many fresh processes: the largest of each number."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": str(2**16),  # so that freed tensors leave the resident set
        }
        command = [sys.executable, __file__, *sys.argv[1:], "--methods", methods, "--mode", mode]
        command += ["--side", side, "--store"]
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
    parser.add_argument("--mode", choices=MODES, help="only this way to divide the work")
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
        print(json.dumps(measure(args, size)))
        dist.destroy_process_group()
        return
    rows: list[Row] = []
    choices: list[tuple[str | None, Iterable[str]]] = [(args.methods, METHODS), (args.mode, MODES), (args.side, SIDES)]
    kinds = itertools.product(*([one] if one else every for one, every in choices))
    for (methods, mode, side), size in itertools.product(kinds, list[int](args.sizes)):
        if mode != "data_parallel" and (size == 1 or methods == "per_example_clipping"):
            continue
        found = in_children(methods, mode, side, size)
        rows.append({"methods": methods, "mode": mode, "side": side, "processes": size, **found})
        print(json.dumps(rows[-1]), flush=True)
    save("messages", rows, args.out)


if __name__ == "__main__":
    main()
