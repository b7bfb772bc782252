"""Runs of twelve forms that are recorded and replayed."""

import hashlib
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import purecompose as pc
from examples import gan
from purecompose import State, Step, algorithms as alg, compose, loop_events, optim
from purecompose.analysis import RecordedRun, replay
from tests.helpers import make_batch, make_mlp, make_state


class Form(NamedTuple):
    """What is trained."""

    step: Step
    state: State
    data: Any


DURATION = "4ep"
EPOCH = 16
LAST = 4 * EPOCH
"""Number of batches of a run."""


def _points(algorithms: Iterable[Any] = (), **options: Any) -> Form:
    inputs, targets = make_batch(1, size=8 * EPOCH)
    net = make_mlp(dropout=0.3)
    state = make_state(net, duration=DURATION, optimizer=optim.adam(_rate()))
    return Form(compose(loop_events, list(algorithms), **options), state, pc.data.arrays(inputs, targets, 8))


def _rate() -> Any:
    """Return a learning rate that depends on the time."""
    return 0.01 * pc.schedule.cosine()


def _images(algorithms: Iterable[Any]) -> Form:
    inputs, targets = make_batch(1, size=4 * EPOCH, shape=(1, 8, 8))
    net = pc.nn.models.build("resnet8", in_shape=(1, 8, 8), num_classes=3, seed=0, width=4)
    state = make_state(net, duration=DURATION, key=3)
    return Form(compose(loop_events, list(algorithms)), state, pc.data.arrays(inputs, targets, 4))


def _players() -> Form:
    torch.manual_seed(0)
    optimizer = optim.adam(1e-3, betas=(0.5, 0.9), groups={"D.*": {"lr": 2e-3}})
    state = State.create(gan.Players(), loss=pc.losses.mse, optimizer=optimizer, duration=DURATION)
    return Form(compose(gan.gan_events), state, pc.data.arrays(gan.ring(pc.random.key(1), 8 * EPOCH), batch_size=8))


def token_loss(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross entropy of logits (N, length, C)."""
    return pc.losses.cross_entropy(outputs.transpose(1, 2), targets, reduction)


def _text() -> Form:
    tokens = torch.randint(11, (4 * EPOCH, 9), generator=torch.Generator().manual_seed(0))
    net = pc.nn.models.build("gpt", in_shape=(8,), num_classes=11, seed=0, width=16, depth=2, num_heads=2, dropout=0.1)
    state = make_state(net, duration=DURATION, optimizer=optim.adamw(1e-3), loss=token_loss)
    data = pc.data.arrays(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 4)
    return Form(compose(loop_events, [alg.gradient_clipping("norm", 1.0)]), state, data)


def _members() -> Form:
    step, state, data = _points([alg.mixup(0.2)])
    states = [step.init(state.replace(key=pc.random.key(seed))) for seed in range(3)]
    return Form(pc.population(step, 3), pc.stack_states(states), data)


FORMS: dict[str, Callable[[], Form]] = {
    "sam": lambda: _points([alg.sam(0.05)]),
    "ema": lambda: _points([alg.ema("5ba")]),
    "selective backprop": lambda: _points([alg.selective_backprop(start=0.2, end=0.9, keep=0.5)]),
    "layer freezing": lambda: _points([alg.layer_freezing()]),
    "progressive resizing": lambda: _images([alg.progressive_resizing()]),
    "gradient accumulation": lambda: _points([alg.gradient_accumulation(4)]),
    "microbatches": lambda: _points([alg.mixup(0.2)], microbatches=3),
    "stochastic depth": lambda: _images([alg.stochastic_depth("sample", 0.3)]),
    "gan": _players,
    "gpt": _text,
    "population": _members,
}


def recorded(form: Form, folder: Path) -> tuple[RecordedRun, dict[int, State]]:
    """Return a recorded run, and the states between its batches as they were then."""
    checkpoints = pc.Checkpoints(folder, keep="log", every="3ba", background=False)
    states = {0: form.step.init(form.state)}
    for state in pc.training(form.step, form.state, form.data, checkpoints=checkpoints):
        states.setdefault(state.timestamp.batch, state)  # the last one is after FIT_END
    return RecordedRun(folder, *form), states


def differences(run: RecordedRun, states: dict[int, State], number: int, seed: int = 0) -> list[str]:
    """Return the differences of replayed states from those of the run, at random batches."""
    found = []
    for batch in random.Random(seed).sample(range(1, LAST + 1), number):
        state = replay(run, batch).state
        assert state.timestamp.batch == states[batch].timestamp.batch == batch
        found += [f"batch {batch}: {line}" for line in pc.tree.diff(state, states[batch])]
    return found


def digests(folder: Path) -> dict[str, str]:
    """Return the content of all files in a folder as checksums."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def differences_of_processes(mesh: Any, folder: Path, number: int) -> list[str]:
    """Return the differences of states replayed in one of several processes that have shared each batch."""
    del mesh
    step, state, data = _points([alg.ema("5ba"), alg.mixup(0.2)])
    run, states = recorded(Form(pc.data_parallel(step), state, data), folder / "run")
    dist.barrier()  # the first process writes the checkpoints
    return differences(run, states, number)
