"""How soon is the schedule of a short run tuned: by hyper-gradients, or by random search?

    PURECOMPOSE_DATA=folder python benchmarks/quality/schedules.py

The folder contains `mnist.npz`. A perceptron trains for 100 batches of SGD. Tuned are the peak of its rate, the share
of the run for the warm-up, the share of the rate that is left at the end, and the momentum. All sides begin at the same
draw from the same ranges, and all trials of a seed have the same initial weights and batches. They minimize the loss on
5,000 held-out images; the loss on the test images, with the best settings so far, is what is compared. Random search is
a plain loop. A hyper-gradient counts as three trainings: one forward, and a backward pass of twice its cost. Seconds
are processor time of one thread.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo  # here, because optimizers import it when they are created, which takes a second
from _search import Record, Search, Side, images, mean, ratio, run, seconds
from _task import Settings
from _timing import Row
from torch import Tensor, nn
from torch.nn import functional as F

import purecompose as pc
from purecompose import State, compose, hparam, loop_events, optim


RANGES = {"peak": (0.003, 3.0), "warm-up": (0.01, 0.5), "last": (0.01, 1.0), "1 - momentum": (0.01, 1.0)}
"""Logarithms of settings are drawn uniformly, or moved."""
GRADIENT = 3
"""As how many trainings a hyper-gradient counts."""
TASK: Settings = {"width": 128, "batch_size": 128, "batches": 100, "trainings": 96}
UNIFORM = math.log(10)
"""The loss of a network that has learned nothing."""
TEST_SEEDS = 3
SHOWN = (12, 24, 48, 96)
"""The numbers of trainings after which the table has the losses."""
Batch = tuple[Tensor, Tensor]


def schedule_of(places: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return the rates of `num` batches, (num,), and the momentum, ().

    Args:
        places: Where in the ranges the settings are, 0 to 1, (4,).
    """
    low, high = torch.tensor([*RANGES.values()]).log().unbind(1)
    peak, warmup, last, rest = (low + places * (high - low)).exp()
    elapsed = (torch.arange(num) + 0.5) / num
    up = (elapsed / warmup).clamp(max=1.0)
    down = 1 - (1 - last) * ((elapsed - warmup) / (1 - warmup)).clamp(min=0.0)
    return peak * up * down, 1 - rest


def network(seed: int, s: Settings) -> nn.Module:
    in_shape = images(s.get("short", False))[0].in_shape
    return pc.nn.models.build("mlp", in_shape=in_shape, num_classes=10, seed=seed, hidden=(s["width"],))


def batches_of(seed: int, s: Settings) -> list[Batch]:
    """Return the batches of all trials with a seed."""
    _, parts = images(s.get("short", False))
    order = torch.randperm(len(parts.train_inputs), generator=torch.Generator().manual_seed(seed))
    chosen = order[: s["batches"] * s["batch_size"]].split(s["batch_size"])
    return [(parts.train_inputs[indices], parts.train_targets[indices]) for indices in chosen]


def held_out(s: Settings) -> Batch:
    """Return the images that a search sees."""
    _, parts = images(s.get("short", False))
    return parts.test_inputs, parts.test_targets


class Log:
    """The best settings so far, and the curve of their losses."""

    def __init__(self, s: Settings) -> None:
        self.points: list[list[float]] = []
        """For each trial, the trainings so far, the seconds, and the test loss of the best settings so far."""
        self.data, self.best, self.places = images(s.get("short", False))[0], math.inf, torch.zeros(len(RANGES))
        self.trainings, self.start = 0, seconds()

    def add(self, places: Tensor, loss: float, trainings: int, forward: Callable[[Tensor], Tensor]) -> None:
        """Note a trial; the clock stands still meanwhile."""
        now = seconds()
        self.trainings += trainings
        value = self.points[-1][2] if self.points else math.inf
        if loss < self.best:
            self.best, self.places = loss, places
            with torch.no_grad():
                value = F.cross_entropy(forward(self.data.test_inputs), self.data.test_targets).item()
        self.points.append([self.trainings, round(now - self.start, 3), value])
        self.start += seconds() - now

    def result(self, s: Settings) -> dict[str, Any]:
        """Return the curve, and the test loss of the best settings with other weights and batches."""
        tests = [trained_plainly(self.places, seed, s) for seed in range(2000, 2000 + TEST_SEEDS)]
        with torch.no_grad():
            losses = [F.cross_entropy(net(self.data.test_inputs), self.data.test_targets).item() for net in tests]
        return {"places": self.places.tolist(), "test loss": sum(losses) / len(losses), "points": self.points}


def drawn(seed: int, s: Settings) -> Tensor:
    """Return where the trials of random search are, (trainings, 4)."""
    return torch.rand(s["trainings"], len(RANGES), generator=torch.Generator().manual_seed(seed))


def trained_plainly(places: Tensor, seed: int, s: Settings, batches: Sequence[Batch] | None = None) -> nn.Module:
    """Return the network that a plain loop has trained."""
    net, batches = network(seed, s), batches or batches_of(seed, s)
    rates, momentum = schedule_of(places, len(batches))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum.item(), fused=True)
    for rate, (inputs, targets) in zip(rates.tolist(), batches, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    return net


def random_search(seed: int, s: Settings) -> dict[str, Any]:
    """Search by a plain loop, one trial after the other."""
    batches, (inputs, targets), log = batches_of(seed, s), held_out(s), Log(s)
    for places in drawn(seed, s):
        net = trained_plainly(places, seed, s, batches)
        with torch.no_grad():
            loss = F.cross_entropy(net(inputs), targets).item()
        log.add(places, loss, 1, net)
    return log.result(s)


def new_state(seed: int, s: Settings) -> State:
    """Return the state from which all trials of a seed start."""
    optimizer = optim.sgd(hparam("lr", 0.1), momentum=hparam("momentum", 0.9))
    loss, duration = pc.losses.cross_entropy, f"{s['batches']}ba"
    return State.create(network(seed, s), loss=loss, optimizer=optimizer, key=seed, duration=duration)


def trained(step: Any, state: State, places: Tensor, batches: Sequence[Batch]) -> State:
    """Return the state after all batches, as a function of where the settings are."""
    rates, momentum = schedule_of(places, len(batches))
    for rate, batch in zip(rates, batches, strict=True):
        state = step(state.replace(hparams={"lr": rate, "momentum": momentum}), batch)
    return state


def hypergradient_search(seed: int, s: Settings) -> dict[str, Any]:
    """Search by Adam along the gradients of the loss through all steps, from the first draw that learns something."""
    batches, (inputs, targets), log = batches_of(seed, s), held_out(s), Log(s)
    step, start, draws = compose(loop_events), new_state(seed, s), iter(drawn(seed, s))
    free, optimizer = None, None
    while log.trainings + GRADIENT <= s["trainings"]:
        if free is None or optimizer is None:
            free = next(draws).logit().requires_grad_()
            optimizer = torch.optim.Adam([free], lr=s["lr"], betas=(s["beta"], 0.9))
        places = free.sigmoid()
        state = trained(step, start, places, batches)
        loss = F.cross_entropy(state.forward(inputs), targets)
        (free.grad,) = torch.autograd.grad(loss, [free])
        log.add(places.detach(), loss.item(), GRADIENT, state.forward)
        if loss < UNIFORM and free.grad.isfinite().all():
            optimizer.step()
        else:
            free = None
    return log.result(s)


def rows_of(found: Sequence[Record]) -> list[Row]:
    """Return a row for each side; a side's time is that until the loss with which random search ends."""
    plain = {one["seed"]: one["points"] for one in found if one["side"] == "random search"}
    rows: list[Row] = []
    for side in SIDES:
        runs = {one["seed"]: one["points"] for one in found if one["side"] == side and one["seed"] in plain}
        if not runs:
            continue
        row: Row = {"side": side}
        for num in SHOWN:
            row[f"after {num}"] = mean([at(points, num) for points in runs.values()], 4)
        row["test loss"] = mean([one["test loss"] for one in found if one["side"] == side], 4)
        row["seconds"] = mean([points[-1][1] for points in runs.values()], 1)
        for unit, name in enumerate(("trainings", "seconds")):
            own, base = ({seed: reached(of[seed], plain[seed][-1][2], unit) for seed in runs} for of in (runs, plain))
            row[f"{name} to its loss, of random search"] = ratio(own, base)
        rows.append(row)
    return rows


def at(points: Sequence[Sequence[float]], trainings: int) -> float:
    """Return the test loss after a number of trainings, or after the first trial if that takes more."""
    return next((value for num, _, value in reversed(points) if num <= trainings), points[0][2])


def reached(points: Sequence[Sequence[float]], loss: float, unit: int) -> float:
    """Return the trainings or the seconds (unit 0 or 1) until a loss; infinite if it is not reached."""
    return next((point[unit] for point in points if point[2] <= loss), math.inf)


GRADIENTS: Settings = {**TASK, "lr": 0.3, "beta": 0.5}
SIDES = {"random search": Side(random_search, TASK), "hyper-gradients": Side(hypergradient_search, GRADIENTS)}
SEARCH = Search(
    name="schedules",
    sides=SIDES,
    rows=rows_of,
    reported=("test loss",),
    short={"width": 8, "batch_size": 16, "batches": 6, "trainings": 16},
    tuning={"hyper-gradients": [{"lr": lr, "beta": beta} for lr in (0.1, 0.3, 0.6) for beta in (0.5, 0.9)]},
)


if __name__ == "__main__":
    run(SEARCH, __doc__)
