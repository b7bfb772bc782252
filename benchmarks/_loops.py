"""The loops of `peers.py`: one for each library, as its users write it, over batches that come in blocks.

    python benchmarks/_loops.py SIDE NETWORK BACKEND [--mix]

A process of its own for each, which `peers.py` starts and talks to: a line with a number of steps asks for a block,
a line of JSON with seconds a step and the last loss answers.
"""

import functools
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import torch
from _subjects import LR, MOMENTUM, Subject, by_hand, gpt, methods, mixed, mlp, new_state, resnet8, vit
from torch import Tensor, nn
from torch.nn import functional as F

import purecompose as pc
from purecompose import compose, loop_events


class Feed:
    """An endless data loader: lets the loop continue for a block at a time, and times the block.

    Attributes:
        last: What the loop leaves behind after a step: its loss, or what `read` finds the loss in.
        read: Gives the loss as a number, which waits for work that is still under way.
    """

    def __init__(self, batch: Any, asks: IO[str], answers: IO[str]) -> None:
        self.batch, self.asks, self.answers = batch, asks, answers
        self.last: Any = None
        self.read: Callable[[Any], float] = float

    def __len__(self) -> int:
        return 10**9  # loaders of unknown length are read one batch ahead, by Lightning at least

    def __iter__(self) -> Iterator[Any]:
        while calls := int(self.asks.readline() or 0):
            start = time.perf_counter()
            for _ in range(calls):
                yield self.batch
            loss = self.read(self.last)
            seconds = (time.perf_counter() - start) / calls
            print(json.dumps({"seconds": seconds, "loss": loss}), file=self.answers, flush=True)


NETWORKS: dict[str, Callable[[], Subject]] = {"MLP": mlp, "ResNet-8": resnet8, "GPT": gpt, "ViT": vit}


class Task(NamedTuple):
    """What a loop trains."""

    network: str
    subject: Subject
    mix: bool
    """True to mix inputs and targets, and to smooth the targets."""

    def prepared(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The batch as the loss by hand takes it."""
        return mixed(inputs, targets, self.subject.num_classes) if self.mix else (inputs, targets)


def hand(task: Task, feed: Feed, backend: str | None, *, network_only: bool = False) -> None:
    subject = task.subject
    if network_only:
        subject.net.compile(backend=backend)
        optimizer = _sgd(subject.net)
        for inputs, targets in feed:
            feed.last = _step(task, subject.net, optimizer, inputs, targets, lambda loss: loss.backward())
        return
    step = by_hand(subject, mix=task.mix, backend=backend)
    for _ in feed:
        feed.last = step()


def ours(task: Task, feed: Feed, make: Callable[[pc.Step], Callable[..., pc.State]]) -> None:
    are_tokens = not task.subject.inputs.is_floating_point()
    composed = compose(loop_events, methods(are_tokens=are_tokens) if task.mix else [])
    state, step = composed.init(new_state(task.subject)), make(composed)
    feed.read = lambda state: float(state.loss)
    for batch in feed:
        feed.last = state = step(state, batch)


def jax(task: Task, feed: Feed) -> None:
    import _jax_steps  # imported only where JAX is installed

    step, state, feed.batch = _jax_steps.start(task.network, task.subject, task.mix, LR, MOMENTUM)
    for batch in feed:
        state, feed.last = step(state, batch)


def _sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)


def _step(
    task: Task, net: Any, optimizer: Any, inputs: Tensor, targets: Tensor, backward: Callable[[Tensor], object]
) -> Tensor:
    """One step as in each library's introduction; they differ in who wraps the network and calls `backward`."""
    inputs, targets = task.prepared(inputs, targets)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(inputs), targets)
    backward(loss)
    optimizer.step()
    return loss


def fabric(task: Task, feed: Feed) -> None:
    from lightning.fabric import Fabric  # pyright: ignore[reportMissingImports]

    lit = Fabric(accelerator="cpu", devices=1)
    net, optimizer = lit.setup(task.subject.net, _sgd(task.subject.net))
    for inputs, targets in feed:
        feed.last = _step(task, net, optimizer, inputs, targets, lit.backward)


def trainer(task: Task, feed: Feed) -> None:
    import lightning  # pyright: ignore[reportMissingImports]

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.subject.net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            del batch_idx
            inputs, targets = task.prepared(*batch)
            feed.last = loss = F.cross_entropy(self.net(inputs), targets)
            return loss

        def configure_optimizers(self) -> Any:
            return _sgd(self.net)

    # Lightning's own setting for measuring its overhead: no logger, no progress, no checks.
    lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, barebones=True).fit(Module(), feed)


def accelerate(task: Task, feed: Feed) -> None:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator = Accelerator(cpu=True)
    net, optimizer = accelerator.prepare(task.subject.net, _sgd(task.subject.net))
    for inputs, targets in feed:
        feed.last = _step(task, net, optimizer, inputs, targets, accelerator.backward)


def ignite(task: Task, feed: Feed) -> None:
    from ignite.engine import create_supervised_trainer  # pyright: ignore[reportMissingImports]

    def keep(inputs: Any, targets: Any, outputs: Any, loss: Any) -> Any:
        del inputs, targets, outputs
        feed.last = loss
        return loss

    def prepare(batch: Any, **device: Any) -> tuple[Tensor, Tensor]:
        del device
        return task.prepared(*batch)

    net = task.subject.net
    engine = create_supervised_trainer(net, _sgd(net), F.cross_entropy, prepare_batch=prepare, output_transform=keep)
    engine.run(feed, max_epochs=1, epoch_length=len(feed))


def loops(backend: str) -> dict[str, Callable[[Task, Feed], None]]:
    """By the name of the side."""
    compiled = functools.partial(pc.compile, backend=backend)
    return {
        "by hand": functools.partial(hand, backend=None),
        "by hand + torch.compile": functools.partial(hand, backend=backend),
        "by hand, network compiled": functools.partial(hand, backend=backend, network_only=True),
        "ours eager": functools.partial(ours, make=lambda step: step),
        "ours compiled": functools.partial(ours, make=functools.partial(compiled, donate=False)),
        "ours donated": functools.partial(ours, make=compiled),
        "JAX jit, donated": jax,
        "Lightning Fabric": fabric,
        "Lightning Trainer": trainer,
        "Accelerate": accelerate,
        "ignite": ignite,
    }


def main() -> None:
    side, network, backend, *flags = sys.argv[1:]
    # What libraries print goes to the error stream; the answers have the output for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    task = Task(network, NETWORKS[network](), "--mix" in flags)
    task.subject.net.train()
    loops(backend)[side](task, Feed((task.subject.inputs, task.subject.targets), sys.stdin, answers))


if __name__ == "__main__":
    main()
