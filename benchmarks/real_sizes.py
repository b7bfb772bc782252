"""What does a step of a network of a real size cost: time, memory, and the first step from a cold start?

    python benchmarks/real_sizes.py [--network GPT] [--calls 7] [--threads 2]

GPT of 124 million parameters (AdamW, 2 x 128 tokens), ResNet-50 (SGD with momentum, 8 x 3 x 224 x 224) and BERT-base as
transformers builds it from its configuration (AdamW, 4 x 64 tokens; left out where transformers is not installed).
Weights are drawn, not loaded. Each side has a process of its own, with an empty cache of compiled code.

Memory is the resident set above what the process had before the network was made, in units of P, the bytes of the
parameters; the network is deleted once the state is made. "first" is the first step, compiling included, and
"peak P" is that of the steps after it, of which the time is the median. "ours eager, donated" is
`compile(step, backend="eager")`: the traced graph, operation by operation, written into the memory of its state.
"""

import argparse
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _timing import Row, arguments, parse, save
from torch import Tensor, nn
from torch.nn import functional as F

import purecompose as pc
from purecompose import State, compose, loop_events, losses, optim
from purecompose.nn import models


class Task(NamedTuple):
    """A network with a batch, and how it is trained."""

    net: nn.Module
    batch: Any
    loss: Callable[..., Tensor]
    optimizer: Any
    """The optimizer of ours."""
    make_torch: Callable[..., torch.optim.Optimizer]
    """Function from parameters to the same optimizer of torch."""


def next_token_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """The cross entropy of logits (N, L, classes) and tokens (N, L)."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
    return losses.view_as(targets) if reduction == "none" else losses


def make_gpt(is_small: bool) -> Task:
    vocabulary, width, depth, length = (64, 16, 1, 8) if is_small else (50257, 768, 12, 128)
    net = models.gpt(vocabulary, 8 * length, width=width, depth=depth, num_heads=width // 8 if is_small else 12)
    tokens = torch.randint(vocabulary, (2, length + 1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Task(net, batch, next_token_loss, optim.adamw(1e-4), _adamw)


def make_resnet50(is_small: bool) -> Task:
    num_images, size, width = (2, 32, 4) if is_small else (8, 224, 64)
    net = models.resnet50(3, 1000, width=width)
    batch = torch.randn(num_images, 3, size, size), torch.randint(1000, (num_images,))
    return Task(net, batch, losses.cross_entropy, optim.sgd(1e-3, momentum=0.9), _sgd)


def make_bert(is_small: bool) -> Task:
    import transformers  # pyright: ignore[reportMissingImports]

    sizes: dict[str, Any] = dict(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=64
    )
    config = transformers.BertConfig(**(sizes if is_small else {}))
    tokens = torch.randint(config.vocab_size, (2, 4, 8 if is_small else 64))
    batch = {"input_ids": tokens[0], "labels": tokens[1]}
    return Task(transformers.BertForMaskedLM(config), batch, losses.model_loss, optim.adamw(1e-4), _adamw)


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


TASKS: dict[str, Callable[[bool], Task]] = {"GPT": make_gpt, "ResNet-50": make_resnet50, "BERT": make_bert}
SIDES = ("by hand", "by hand + torch.compile", "ours eager", "ours eager, donated", "ours compiled")


def by_hand(task: Task, *, backend: str | None = None) -> Callable[[], object]:
    """The loop by hand; with a backend under `torch.compile`."""
    net = task.net.train()
    optimizer = task.make_torch(net.parameters())

    def step() -> None:
        optimizer.zero_grad()
        if isinstance(task.batch, dict):
            loss = net(**task.batch).loss
        else:
            loss = task.loss(net(task.batch[0]), task.batch[1])
        loss.backward()
        optimizer.step()

    return torch.compile(step, backend=backend) if backend else step


def ours(task: Task, make: Callable[[pc.Step], pc.Step]) -> Callable[[], object]:
    """Step after step of ours, composed or compiled; it holds the last state, and not the network."""
    step, batch = make(compose(loop_events)), task.batch
    state = step.init(
        State.create(task.net, loss=task.loss, optimizer=task.optimizer, duration="1000ba", batches_per_epoch=1000)
    )

    def run() -> None:
        nonlocal state
        state = step(state, batch)

    return run


def made(side: str, task: Task, backend: str) -> Callable[[], object]:
    """The function that takes a step of a side."""
    if side == "by hand":
        return by_hand(task)
    if side == "by hand + torch.compile":
        return by_hand(task, backend=backend)
    makes: dict[str, Callable[[pc.Step], pc.Step]] = {
        "ours eager": lambda step: step,
        "ours eager, donated": lambda step: pc.compile(step, backend="eager"),
        "ours compiled": lambda step: pc.compile(step, backend=backend),
    }
    return ours(task, makes[side])


def measure(args: argparse.Namespace) -> Row:
    """The measurements of one side in this process."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    F.linear(torch.ones(64, 64), torch.ones(64, 64, requires_grad=True)).sum().backward()  # loads torch's libraries
    start = _memory("VmRSS")
    try:
        task = TASKS[args.network](args.short)
    except ImportError as error:
        return {"left out": str(error)}
    unit = sum(param.nbytes for param in task.net.parameters())
    step = made(args.side, task, args.backend)
    del task
    seconds, peaks = [], []
    for _ in range(1 + args.calls):
        gc.collect()
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
        peaks.append(_memory("VmHWM") - start)
    return {
        "P MB": round(unit / 1e6),
        "ms a step": round(statistics.median(seconds[1:]) * 1e3, 1),
        "peak P": round(max(peaks[1:]) / unit, 2),
        "peak MB": round(max(peaks[1:]) / 1e6),
        "first s": round(seconds[0], 1),
        "first peak P": round(peaks[0] / unit, 2),
    }


def _memory(field: str) -> int:
    """Bytes of the resident set: now (VmRSS), or at most since the last reset (VmHWM)."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def in_child(network: str, side: str) -> Row:
    """The same in a fresh process with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, *sys.argv[1:], "--network", network, "--side", side]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        found = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        return json.loads(found.stdout.splitlines()[-1])


def main() -> None:
    parser = arguments(__doc__, blocks=1, calls=7)
    parser.add_argument("--network", default="", help="only networks whose name begins so")
    parser.add_argument("--threads", type=int, default=2, help="threads of each side (default %(default)s)")
    parser.add_argument("--side", choices=SIDES, help="only this side, in this process: a line of JSON")
    args = parse(parser)
    if sys.platform != "linux":
        raise SystemExit("the memory of a process is read from /proc, which only Linux has")
    if args.side:
        print(json.dumps(measure(args)))
        return
    rows: list[Row] = []
    for network in TASKS:
        if not network.startswith(args.network):
            continue
        for side in SIDES:
            row = in_child(network, side)
            if "left out" in row:
                print(f"{network} is left out: {row['left out']}")
                break
            rows.append({"network": network, "threads": args.threads, "side": side, **row})
    save("real_sizes", rows, args.out)


if __name__ == "__main__":
    main()
