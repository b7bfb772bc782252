"""Networks that differ in seed and learning rate: trained one after the other by a plain loop, or as one population.

Both sides train in rungs, pairs of a share of the run and a number of networks: up to this share only so many train,
those with the least loss on held-out images. One rung, (1.0, n), trains n networks to the end; (1/16, 16), (1/4, 4),
(1, 1) is successive halving that keeps a quarter.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch._dynamo  # here, because optimizers import it when they are created, which takes a second
from _search import Record, images, mean, ratio, seconds
from _task import Settings
from _timing import Row
from torch import Tensor, nn
from torch.nn import functional as F

import purecompose as pc
from purecompose import State, compose, hparam, loop_events, optim, schedule


WEIGHT_DECAY = 0.01


class Member(NamedTuple):
    """What a network differs in."""

    seed: int
    lr: float


class Trained(NamedTuple):
    """The result of a training."""

    members: list[Member]
    """The networks that were trained to the end, the best first."""
    losses: list[float]
    """Their losses on held-out images."""
    outputs: Tensor
    """Their outputs for the test images, (n, N, C)."""
    known: float
    """Seconds until it was decided which network trains to the end, or is the best."""
    seconds: float
    """Seconds in all, compilation included."""


Way = Callable[[Sequence[Member], Settings], Trained]
Columns = Mapping[str, Callable[[Sequence[Record]], str]]


def network(member: Member, s: Settings) -> nn.Module:
    data, _ = images(s.get("short", False))
    hidden = (s["width"],) * s["depth"]
    return pc.nn.models.build("mlp", in_shape=data.in_shape, num_classes=10, seed=member.seed, hidden=hidden)


def in_rungs(
    members: Sequence[Member],
    s: Settings,
    train: Callable[[list[int], int], list[float]],
    outputs: Callable[[list[int]], Tensor],
    start: float,
) -> Trained:
    """Train in rungs.

    Args:
        members: The networks.
        s: Settings with the rungs.
        train: Train these members up to a batch, and return their losses on held-out images.
        outputs: Return the outputs of these members for the test images.
        start: When the clock was started.
    """
    chosen, losses, known = list(range(len(members))), [], math.nan
    for share, num in s["rungs"]:
        chosen = chosen[:num]
        found = train(chosen, round(share * length(s)))
        known = seconds() - start if len(chosen) > 1 else known
        ranked = sorted(zip(chosen, found, strict=True), key=lambda one: math.inf if math.isnan(one[1]) else one[1])
        chosen, losses = [index for index, _ in ranked], [loss for _, loss in ranked]
    total = seconds() - start
    return Trained([members[index] for index in chosen], losses, outputs(chosen), known, total)


def by_loop(members: Sequence[Member], s: Settings) -> Trained:
    """Train one network after the other by a plain loop, with fused AdamW and a rate that falls linearly to 0."""
    data, parts = images(s.get("short", False))
    start = seconds()
    runs = [PlainRun(member, s) for member in members]

    @torch.no_grad()
    def train(chosen: list[int], until: int) -> list[float]:
        losses: list[float] = []
        for index in chosen:
            with torch.enable_grad():
                runs[index].train(until)
            losses.append(F.cross_entropy(runs[index].model(parts.test_inputs), parts.test_targets).item())
        return losses

    @torch.no_grad()
    def outputs(chosen: list[int]) -> Tensor:
        return torch.stack([runs[index].net(data.test_inputs) for index in chosen])

    return in_rungs(members, s, train, outputs, start)


class PlainRun:
    """A plain loop that can be interrupted."""

    def __init__(self, member: Member, s: Settings) -> None:
        self.net, self.lr, self.settings, self.batch = network(member, s), member.lr, s, 0
        self.model: Any = torch.compile(self.net) if s["compile"] else self.net
        options: Any = {"weight_decay": WEIGHT_DECAY, "fused": True}
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=member.lr, **options)
        self.batches = self._endless(torch.Generator().manual_seed(member.seed))

    def _endless(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        _, parts = images(self.settings.get("short", False))
        size = self.settings["batch_size"]
        while True:
            order = torch.randperm(len(parts.train_inputs), generator=generator)
            for chosen in order.split(size)[: len(order) // size]:
                yield parts.train_inputs[chosen], parts.train_targets[chosen]

    def train(self, until: int) -> None:
        num, is_bf16 = length(self.settings), self.settings["precision"] == "bf16"
        for batch in range(self.batch, until):
            inputs, targets = next(self.batches)
            self.optimizer.param_groups[0]["lr"] = self.lr * (1 - batch / num)
            self.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
                loss = F.cross_entropy(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()
        self.batch = until


def by_population(members: Sequence[Member], s: Settings) -> Trained:
    """Train all networks at once; after each rung a smaller population goes on, and a single network by itself."""
    data, parts = images(s.get("short", False))
    start = seconds()
    train_data = pc.data.arrays(parts.train_inputs, parts.train_targets, s["batch_size"], drop_last=True)
    optimizer = optim.adamw(hparam("lr", 1.0) * schedule.linear(alpha_f=0.0), weight_decay=WEIGHT_DECAY)
    loss, duration = pc.losses.cross_entropy, f"{length(s)}ba"
    states: list[State] = []
    for one in members:
        state = State.create(network(one, s), loss=loss, optimizer=optimizer, key=one.seed, duration=duration)
        states.append(state.replace(hparams={"lr": torch.tensor(one.lr)}))

    def train(chosen: list[int], until: int) -> list[float]:
        is_one, step, together = len(chosen) == 1, compose(loop_events), states[chosen[0]]
        if not is_one:
            step = pc.population(step, len(chosen))
            together = pc.stack_states([states[index] for index in chosen])
        run = pc.training(pc.compile(step, backend=s["backend"], quiet=True), together, train_data)
        together = next(state for state in run if state.timestamp.batch == until)
        for index, state in zip(chosen, [together] if is_one else pc.unstack_states(together), strict=True):
            states[index] = state
        held_out = pc.data.arrays(parts.test_inputs, parts.test_targets, 1000)
        found = pc.evaluate(together, held_out, ["loss"], step=step)["loss"]
        return [found] if is_one else found

    def outputs(chosen: list[int]) -> Tensor:
        return torch.stack([states[index].forward(data.test_inputs).detach() for index in chosen])

    return in_rungs(members, s, train, outputs, start)


def length(s: Settings) -> int:
    """Return the number of batches of a run."""
    if s.get("short"):
        return 16
    return round(s["epochs"] * (len(images(False)[1].train_inputs) // s["batch_size"]))


def accuracy(outputs: Tensor, s: Settings) -> float:
    """Return the accuracy of outputs for the test images, (N, C)."""
    targets = images(s.get("short", False))[0].test_targets
    return (outputs.argmax(-1) == targets).double().mean().item()


def by_width(found: Sequence[Record], sides: Iterable[str], time: str, columns: Columns) -> list[Row]:
    """Return a row for each width and side: times over those of the first side with the same seeds, and columns."""
    rows: list[Row] = []
    for width in sorted({one["settings"]["width"] for one in found}):
        base: dict[int, float] = {}
        for side in sides:
            runs = [one for one in found if (one["side"], one["settings"]["width"]) == (side, width)]
            if runs:
                times = {one["seed"]: one[time] for one in runs}
                base = base or times
                row: Row = {"width": width, "side": side, time: mean([*times.values()], 1)}
                row["of plain runs"] = ratio(times, base)
                rows.append(row | {name: of(runs) for name, of in columns.items()})
    return rows


def percent(name: str) -> Callable[[Sequence[Record]], str]:
    """Return the column of a share."""
    return lambda runs: mean([100 * one[name] for one in runs], 2)
