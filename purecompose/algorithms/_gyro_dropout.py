"""Gyro dropout: dropout that takes its masks from a bank, a few of them at a time."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from purecompose import random
from purecompose._support.device import as_scalar
from purecompose.algorithms._parts.gyro_masks import (
    check_bank,
    check_feature_dim,
    check_probability,
    chosen_masks,
    dropped,
    gyro_drop,
    gyro_dropout_mask,
    gyro_dropout_period,
)
from purecompose.algorithms._parts.surgery import warn_of_nothing
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


__all__ = [
    "GyroDropout",
    "GyroDropoutState",
    "gyro_drop",
    "gyro_dropout",
    "gyro_dropout_mask",
    "gyro_dropout_period",
]

_BUFFER = "gyro_dropout_place"


class _Place(NamedTuple):
    """What stands in the buffer, int64 (6,): where in the run, and in the batch, a forward pass is."""

    key: Tensor  # two words
    period: int | Tensor = 0
    first: int | Tensor = 0  # of a microbatch, the first row's number in the batch
    size: int | Tensor = 0  # of a microbatch, its number of rows; 0 where the batch is whole
    total: int | Tensor = 0  # the batch's number of rows; 0 where it is not known

    @classmethod
    def read(cls, buffer: Tensor) -> "_Place":
        return cls(buffer[:2], *buffer[2:].unbind())

    def written(self) -> Tensor:
        rest = [as_scalar(value, torch.int64, self.key.device) for value in self[1:]]
        return torch.cat([self.key, torch.stack(rest)])


class GyroDropout(nn.Module):
    """The layer that stands in for `nn.Dropout`: `(N, ...) -> (N, ...)`, the identity in evaluation.

    It draws from nothing but its buffer, which `gyro_dropout` keeps up to date; a module that is called twice in a
    forward pass gives both calls the same masks.

    Args:
        p: See `gyro_dropout`, as the others.
        draw: The salt of this layer's draws.
        place: The buffer, shared by all layers: int64 of shape (6,), the key's two words; the period; and of a
            microbatch the first row's number in the batch, the number of rows, 0 where the batch is whole, and that
            of the batch.
    """

    def __init__(
        self, p: float, sigma: int, tau: int, *, draw: int, place: Tensor, feature_dim: int | None = None
    ) -> None:
        super().__init__()
        self.p, self.sigma, self.tau, self.draw, self.feature_dim = p, sigma, tau, draw, feature_dim
        self.register_buffer(_BUFFER, place)

    def forward(self, input: Tensor) -> Tensor:
        """Drop elements in training."""
        if not self.training:
            return input
        place = _Place.read(self.get_buffer(_BUFFER))
        rng = random.Rng(place.key, draw=self.draw)
        groups = _groups(place, input.shape[0], self.tau)
        mask = chosen_masks(
            rng, tuple(input.shape), self.p, self.sigma, self.tau, place.period, groups, self.feature_dim
        )
        return dropped(input, mask.to(input.device), self.p)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"p={self.p}, sigma={self.sigma}, tau={self.tau}"


class GyroDropoutState(NamedTuple):
    """What `gyro_dropout` remembers."""

    period_length: Tensor
    """How many batches a choice stays, 0-d int64; made at INIT from the run's length, and constant."""


@factory
def gyro_dropout(
    p: float = 0.5,
    sigma: int = 256,
    tau: int = 16,
    *,
    feature_dim: int | None = None,
    name: str = "gyro_dropout",
) -> Algorithm:
    """Replace dropout by dropout with a bank of masks.

    A bank of sigma masks stands for sigma subnetworks. For a stretch of batches tau of them, chosen without
    replacement, share the batch: its rows are cut into tau groups of (nearly) equal size, one for each mask. In
    training a layer gives

        y = x mask / (1 - p),   each element of a mask 1 with probability 1 - p

    and in evaluation y = x. After T/sigma tau batches of a run of T, rounded, others are chosen; so in the course of
    the run a mask is trained on for about as long as if it were chosen once.

    Nothing of this is stored. Mask j of a layer is drawn from (the run's key, layer, j), the choice from (key, layer,
    period), so a resumed run continues with the same subnetworks, and so do microbatches, ranks and members of a
    population. What a layer has to know, the key, the period and which rows of the batch it sees, stands in one buffer
    that all layers share.

    Events: INIT (replaces every nn.Dropout by a `GyroDropout`, and makes the slot: the period's length), BATCH_START
    (writes the key and the period), BEFORE_FORWARD and AFTER_FORWARD (in microbatches: which rows these are, and that
    they are over). Reads the key, the clock, the batch's size; replaces the model and the buffer. Calls of `F.dropout`,
    the dropout inside of attention, `nn.Dropout2d` and their like stay as they are.

    The run's length decides how long a choice stays; it is taken at INIT, and a run that is prolonged keeps it. The
    authors take (sigma, tau) = (256, 16) for small networks, (1024, 8) for ResNet-18 and BERT.

    Args:
        p: The probability of dropping, in [0, 1), of every layer: what the replaced layers had does not count. 0
            never matches, and leaves the network's dropout as it is.
        sigma: The number of masks in each layer's bank, 1 or more.
        tau: How many of them share a batch, in [1, sigma]; a batch with fewer rows takes as many.
        feature_dim: The only dimension along which masks vary; by default all but the first. See
            `gyro_dropout_mask`.
        name: Names its slot and its draws.

    Raises:
        TypeError, ValueError: A setting of the wrong kind or out of range. At INIT: a run whose length in batches
            is not known.

    Warns:
        UserWarning: At INIT: there is no `nn.Dropout` in the network.

    Example:
        >>> gyro_dropout(0.5, sigma=1024, tau=8)
        gyro_dropout(p=0.5, sigma=1024, tau=8)
        >>> gyro_dropout(0).match
        never

    References:
        Junyeol Lee, Hyeongju Kim, Hyungjun Oh, Jaemin Kim, Hongseok Jeung, Yung-Kyun Noh, Jiwon Seo: Gyro Dropout:
        Maximizing Ensemble Effect in Neural Network Training. MLSys 2022.
    """
    check_probability("gyro_dropout: p", p)
    check_bank("gyro_dropout", sigma, tau)
    check_feature_dim("gyro_dropout", feature_dim)

    def layer(path: str, place: Tensor) -> GyroDropout:
        return GyroDropout(p, sigma, tau, draw=random.salt(name, path), place=place, feature_dim=feature_dim)

    def init(state: State) -> State:
        length = _period_length(name, state, sigma, tau)
        found = [path for path, module in state.model.module.named_modules() if _is_replaced(module)]
        if found:
            place = torch.zeros(6, dtype=torch.int64, device="meta")
            state = state.replace(model=state.model.with_modules({path: layer(path, place) for path in found}))
        elif not any(isinstance(module, GyroDropout) for module in state.model.module.modules()):
            advice = (
                "Calls of F.dropout, the dropout inside attention and nn.Dropout1d to 3d are not replaced: let the "
                "network hold nn.Dropout modules, or leave the method out"
            )
            warn_of_nothing(name, "torch.nn.Dropout modules", state.model.module, advice)
            return state
        remembered = GyroDropoutState(torch.full((), length, dtype=torch.int64, device=state.device))
        period = torch.zeros((), dtype=torch.int64, device=state.device)
        return _placed(state, _Place(state.key, period)).replace(slots={**state.slots, name: remembered})

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            return init(state)
        places = _places(state)
        if not places:
            return state
        if event is Event.BATCH_START:
            assert state.clock is not None
            period = state.clock.batch // state.slots[name].period_length
            return _placed(state, _Place(state.key, period, total=state.num_examples))
        if state.first_example is None:
            return state
        first, size = (state.first_example, state.num_examples) if event is Event.BEFORE_FORWARD else (0, 0)
        return _placed(state, _Place.read(state.buffers[places[0]])._replace(first=first, size=size))

    events = on(Event.INIT, Event.BATCH_START, Event.BEFORE_FORWARD, Event.AFTER_FORWARD)
    config = {"p": p, "sigma": sigma, "tau": tau, "feature_dim": feature_dim}
    return Algorithm(
        name,
        NEVER if p == 0 else events,
        apply,
        traits=frozenset({Trait.REQUIRED_ON_LOAD, Trait.SETS_BUFFERS}),
        config={setting: value for setting, value in config.items() if value is not None},
    )


def _groups(place: _Place, num: int, tau: int) -> Tensor:
    """Return the group of each of a tensor's rows, of which every example may have several."""
    rows = torch.arange(num, device=place.key.device)
    first, size, known = (torch.as_tensor(number) for number in (place.first, place.size, place.total))
    total, is_slice = known.clamp(min=1), size > 0
    examples = first + rows * torch.where(is_slice, size, total) // max(num, 1)
    # A pass over other rows than the step's batch (another size, before the first step) groups what it is given.
    is_known = is_slice | ((known > 0) & (num % total == 0))
    return torch.where(is_known, examples * tau // total, rows * tau // max(num, 1)).clamp(max=tau - 1)


def _places(state: State) -> list[str]:
    return [name for name in state.model.buffer_names if name.rpartition(".")[2] == _BUFFER]


def _placed(state: State, place: _Place) -> State:
    return state.replace(buffers={**state.buffers, **dict.fromkeys(_places(state), place.written())})


def _is_replaced(module: nn.Module) -> bool:
    """Return whether it is a dropout layer; one of a user's with weights of its own does more than that."""
    has_tensors = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
    return isinstance(module, nn.Dropout) and not has_tensors


def _period_length(name: str, state: State, sigma: int, tau: int) -> int:
    run = state.timestamp.run
    if run.total_batches is None:
        raise ValueError(
            f"{name}: expected a run whose length in batches is known, which decides how long a choice of masks stays, "
            f"got duration={run.duration}, batches_per_epoch={run.batches_per_epoch}; give State.create a duration in "
            "batches ('500ba'), or one in epochs and batches_per_epoch=len(batches)"
        )
    return gyro_dropout_period(run.total_batches, sigma, tau)
