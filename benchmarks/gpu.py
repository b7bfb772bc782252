"""What does a step cost on a GPU beside the loop by hand, in eager mode, compiled, and as a CUDA graph?

    python benchmarks/gpu.py [--blocks 20] [--calls 20] [--only resnet18] [--tests]

A ResNet-18 at CIFAR-10's shapes (bf16 autocast, channels-last), a small GPT (bf16 autocast), and an MLP so small that
launching its kernels is most of the work (float32). The sides take turns in blocks, each timed by CUDA's events; peak
memory is that of the side's own steps, above what lies there before. TensorFloat-32 is off on all sides.

Without a GPU the same runs in small form on the CPU, with --short uncompiled in a minute, to show that it works; its
figures say nothing about a GPU.
"""

import copy
import gc
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from _timing import Row, against, arguments, in_turn, parse, save
from torch import Tensor, nn
from torch.nn import functional as F

import purecompose as pc
from purecompose import State, compose, loop_events, losses, optim
from purecompose.nn import layers, models


HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")

Side = Callable[[], object]


class Task(NamedTuple):
    """A network on the device with a batch, and how it is computed."""

    net: nn.Module
    inputs: Tensor
    targets: Tensor
    precision: str


def make_resnet18(small: bool) -> Task:
    size, width, batch = (8, 8, 4) if small else (32, 64, 512)
    net = models.resnet18(3, 10, width=width, small_images=True).to(DEVICE)
    net = net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    images = torch.randn(batch, 3, size, size, device=DEVICE).contiguous(memory_format=torch.channels_last)
    return Task(net, images, torch.randint(10, (batch,), device=DEVICE), "bf16")


def make_gpt(small: bool) -> Task:
    vocabulary, length, width, heads, depth, batch = (64, 8, 16, 2, 1, 2) if small else (8192, 512, 512, 8, 8, 32)
    net = models.gpt(vocabulary, length, width=width, num_heads=heads, depth=depth, is_tied=False)
    net = layers.ClassesSecond(net).to(DEVICE)
    ids = torch.randint(vocabulary, (batch, length + 1), device=DEVICE)
    return Task(net, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), "bf16")


def make_mlp(small: bool) -> Task:
    del small
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)).to(DEVICE)
    return Task(net, torch.randn(64, 64, device=DEVICE), torch.randint(10, (64,), device=DEVICE), "fp32")


TASKS: dict[str, Callable[[bool], Task]] = {"resnet18": make_resnet18, "gpt": make_gpt, "mlp": make_mlp}


def by_hand(task: Task, **compiled: Any) -> Side:
    """The loop by hand; with options of `torch.compile`, its forward and loss, and its update, are compiled."""
    net = copy.deepcopy(task.net).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        with _autocast(task.precision):
            outputs = net(inputs)
        return F.cross_entropy(outputs.float(), targets)

    run: Any = torch.compile(forward, **compiled) if compiled else forward
    update: Any = torch.compile(optimizer.step, **compiled) if compiled else optimizer.step

    def step() -> Tensor:
        if compiled.get("mode") == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        loss = run(task.inputs, task.targets)
        loss.backward()
        update()
        return loss

    return step


def ours(task: Task, **compiled: Any) -> Side:
    """A step of ours; with options of `compile`, compiled."""
    step: Any = compose(loop_events)
    state = State.create(
        task.net,
        loss=losses.cross_entropy,
        optimizer=optim.sgd(0.01, momentum=0.9),
        precision=task.precision,
        duration="1000000ba",
        batches_per_epoch=1000,
    )
    state, batch = step.init(state), (task.inputs, task.targets)
    run = pc.compile(step, **compiled) if compiled else step

    def once() -> None:
        nonlocal state
        state = run(state, batch)

    return once


def sides(task: Task, backend: str) -> dict[str, Side]:
    """All ways to take the step, by what they are called in the table."""
    found: dict[str, Side] = {
        "by hand": by_hand(task),
        "by hand + torch.compile": by_hand(task, backend=backend),
        "ours eager": ours(task),
    }
    if hasattr(pc, "compile"):
        found["ours compiled"] = ours(task, donate=True, backend=backend)
    if HAS_GPU:
        found["by hand + CUDA graphs"] = by_hand(task, mode="reduce-overhead")
        if hasattr(pc, "compile"):
            found["ours + CUDA graphs"] = ours(task, donate=True, mode="reduce-overhead")
    return found


def measure(name: str, args: Any) -> list[Row]:
    """A row for each side of one task; a side that fails has its error in place of numbers."""
    torch.manual_seed(0)
    # The small form shows that every side runs; compiling for a CPU would take minutes.
    backend = "eager" if args.short and not HAS_GPU else args.backend
    fns, errors, peaks = sides(TASKS[name](not HAS_GPU or args.short), backend), {}, {}
    for side, fn in fns.items():
        try:
            peaks[side] = _warm(fn, args.calls)
        except Exception as error:  # one side's trouble is not a reason to lose the others
            errors[side] = f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else repr(error)
    running = [side for side in fns if side not in errors]
    seconds = in_turn(running, lambda side: _block(fns[side], args.calls), args.blocks)
    rows = []
    for side in fns:
        row: Row = {"task": name, "side": side, "backend": backend}
        if side in seconds:
            row |= {"us": round(statistics.median(seconds[side]) * 1e6, 1), **peaks[side]}
            row |= {} if "by hand" in errors else against(seconds, side, "by hand")
            row |= {"error": ""}
        rows.append(row if side in seconds else row | {"error": errors[side]})
    return rows


def _warm(fn: Side, calls: int) -> Row:
    """Compiles and warms a side; its first call's seconds, and its peak memory in MiB above what was there."""
    gc.collect()
    start = time.perf_counter()
    fn()
    _wait()
    first = time.perf_counter() - start
    for _ in range(max(3, calls // 2)):  # CUDA graphs are recorded in the second and third call
        fn()
    if not HAS_GPU:
        return {"first s": round(first, 1), "peak MiB": None}
    _wait()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    _wait()
    # With CUDA graphs a step's memory is held between steps, and in the pool that all of them share.
    return {"first s": round(first, 1), "peak MiB": round((torch.cuda.max_memory_allocated() - held) / 2**20, 1)}


def _block(fn: Side, calls: int) -> float:
    """Seconds a step in one block; on a GPU from event to event, the waiting for launches included."""
    if not HAS_GPU:
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        return (time.perf_counter() - start) / calls
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    _wait()
    begin.record()
    for _ in range(calls):
        fn()
    end.record()
    _wait()
    return begin.elapsed_time(end) / 1e3 / calls


def _wait() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def _autocast(precision: str) -> AbstractContextManager[Any]:
    return torch.autocast(DEVICE.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def main() -> None:
    parser = arguments(__doc__, blocks=20, calls=20)
    parser.add_argument("--only", choices=list(TASKS), action="append", help="only this task; may be repeated")
    parser.add_argument("--tests", action="store_true", help="first run the tests that need a GPU")
    args = parse(parser)
    if args.tests:
        tests = pathlib.Path(__file__).parents[1] / "tests"
        files = [str(tests / name) for name in ("test_cuda.py", "test_device.py", "data/test_prefetch.py")]
        subprocess.run([sys.executable, "-m", "pytest", *files], check=True, cwd=tests.parent)
    if args.short:
        torch.set_num_threads(1)
    # torch leaves this on for convolutions; the loops by hand are to compute what ours computes.
    torch.backends.cudnn.allow_tf32 = False
    rows = [row for name in args.only or TASKS for row in measure(name, args)]
    head = list(max(rows, key=len))
    save("gpu" if HAS_GPU else "gpu_cpu_form", [{key: row.get(key, "") for key in head} for row in rows], args.out)


if __name__ == "__main__":
    main()
