"""The loops of `peers.py`: one for each library, as its users write it, over batches that come in blocks.

    python benchmarks/_loops.py SIDE BACKEND

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
from typing import IO, Any

import torch
from _subjects import LR, MOMENTUM, Subject, by_hand, mlp, new_state
from torch import nn
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


def hand(subject: Subject, feed: Feed, backend: str | None) -> None:
    step = by_hand(subject, backend=backend)
    for _ in feed:
        feed.last = step()


def ours(subject: Subject, feed: Feed, make: Callable[[pc.Step], Callable[..., pc.State]]) -> None:
    composed = compose(loop_events)
    state, step = composed.init(new_state(subject)), make(composed)
    feed.read = lambda state: float(state.loss)
    for batch in feed:
        feed.last = state = step(state, batch)


def jax(subject: Subject, feed: Feed) -> None:
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    import optax  # pyright: ignore[reportMissingImports]

    linear = [layer for layer in subject.net if isinstance(layer, nn.Linear)]  # pyright: ignore
    params = [tuple(jnp.array(p.detach().numpy()) for p in (x.weight.T, x.bias)) for x in linear]
    optimizer = optax.sgd(LR, momentum=MOMENTUM)
    opt_state = optimizer.init(params)

    def loss_fn(params: Any, inputs: Any, targets: Any) -> Any:
        *hidden, (weight, bias) = params
        for fan, shift in hidden:
            inputs = jax.nn.relu(inputs @ fan + shift)
        return optax.softmax_cross_entropy_with_integer_labels(inputs @ weight + bias, targets).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, inputs: Any, targets: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, inputs, targets)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    feed.batch = tuple(jnp.array(tensor.numpy()) for tensor in feed.batch)
    for inputs, targets in feed:
        params, opt_state, feed.last = step(params, opt_state, inputs, targets)


def _sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)


def fabric(subject: Subject, feed: Feed) -> None:
    from lightning.fabric import Fabric  # pyright: ignore[reportMissingImports]

    lit = Fabric(accelerator="cpu", devices=1)
    net, optimizer = lit.setup(subject.net, _sgd(subject.net))
    for inputs, targets in feed:
        optimizer.zero_grad()
        feed.last = loss = F.cross_entropy(net(inputs), targets)
        lit.backward(loss)
        optimizer.step()


def trainer(subject: Subject, feed: Feed) -> None:
    import lightning  # pyright: ignore[reportMissingImports]

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = subject.net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            del batch_idx
            feed.last = loss = F.cross_entropy(self.net(batch[0]), batch[1])
            return loss

        def configure_optimizers(self) -> Any:
            return _sgd(self.net)

    # Lightning's own setting for measuring its overhead: no logger, no progress, no checks.
    lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, barebones=True).fit(Module(), feed)


def accelerate(subject: Subject, feed: Feed) -> None:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator = Accelerator(cpu=True)
    net, optimizer = accelerator.prepare(subject.net, _sgd(subject.net))
    for inputs, targets in feed:
        optimizer.zero_grad()
        feed.last = loss = F.cross_entropy(net(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()


def ignite(subject: Subject, feed: Feed) -> None:
    from ignite.engine import create_supervised_trainer  # pyright: ignore[reportMissingImports]

    def keep(inputs: Any, targets: Any, outputs: Any, loss: Any) -> Any:
        del inputs, targets, outputs
        feed.last = loss
        return loss

    engine = create_supervised_trainer(subject.net, _sgd(subject.net), F.cross_entropy, output_transform=keep)
    engine.run(feed, max_epochs=1, epoch_length=len(feed))


def loops(backend: str) -> dict[str, Callable[[Subject, Feed], None]]:
    """By the name of the side."""
    compiled = functools.partial(pc.compile, backend=backend)
    return {
        "by hand": functools.partial(hand, backend=None),
        "by hand + torch.compile": functools.partial(hand, backend=backend),
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
    side, backend = sys.argv[1:]
    # What libraries print goes to the error stream; the answers have the output for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    subject = mlp()
    subject.net.train()
    loops(backend)[side](subject, Feed((subject.inputs, subject.targets), sys.stdin, answers))


if __name__ == "__main__":
    main()
