"""Gyro dropout: dropout with masks from a fixed bank, of which a few are used at a time."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from purecompose import random, surgery
from purecompose._support.device import as_scalar
from purecompose.algorithms._parts.gyro_masks import (
    check_bank,
    check_feature_dim,
    check_probability,
    chosen_masks,
    dropped,
    gyro_dropout_period,
)
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.nn.keyed.scope import is_compared
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


_BUFFER = "gyro_dropout_place"


class _Place(NamedTuple):
    """Content of the buffer, int64 (6,): the position of a forward pass in the run and in the batch."""

    key: Tensor  # two words
    period: int | Tensor = 0
    first: int | Tensor = 0  # index in the batch of the microbatch's first row
    size: int | Tensor = 0  # number of rows of the microbatch; 0 if the batch is not split
    total: int | Tensor = 0  # number of rows of the batch; 0 if unknown

    @classmethod
    def read(cls, buffer: Tensor) -> "_Place":
        return cls(buffer[:2], *buffer[2:].unbind())

    def written(self) -> Tensor:
        rest = [as_scalar(value, torch.int64, self.key.device) for value in self[1:]]
        return torch.cat([self.key, torch.stack(rest)])


class GyroDropout(nn.Module):
    """Layer that replaces `nn.Dropout`: `(N, ...) -> (N, ...)`, the identity in evaluation.

    Its draws depend only on its buffer, which `gyro_dropout` updates; a module that is called twice in a forward pass
    uses the same masks in both calls.

    Args:
        p, sigma, tau, feature_dim: See `gyro_dropout`.
        draw: The salt of this layer's draws.
        place: The buffer, shared by all layers, int64 of shape (6,): the key's two words; the period; the index in the
            batch of the microbatch's first row; the microbatch's number of rows, 0 if the batch is not split; and the
            batch's number of rows.
    """

    def __init__(
        self, p: float, sigma: int, tau: int, *, draw: int, place: Tensor, feature_dim: int | None = None
    ) -> None:
        super().__init__()
        self.p, self.sigma, self.tau, self.draw, self.feature_dim = p, sigma, tau, draw, feature_dim
        self.register_buffer(_BUFFER, place)

    def forward(self, input: Tensor) -> Tensor:
        """Drop elements in training."""
        if not self.training or is_compared():  # a row's mask depends on its place in the batch
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
    """Slot of `gyro_dropout`."""

    period_length: Tensor
    """Number of batches for which a choice of masks is used, 0-d int64; set at INIT from the run's length; constant."""


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

    A bank of sigma masks corresponds to sigma subnetworks. For a period of several batches, tau of the masks, chosen
    without replacement, are used: the rows of each batch are split into tau groups of (nearly) equal size, one for each
    mask. In training a layer returns

        y = x mask / (1 - p),   each element of a mask is 1 with probability 1 - p

    and in evaluation y = x. In a run of T batches, other masks are chosen every int(T / sigma) * tau batches, so that
    over the run each mask is trained for about as long as if it were chosen once.

    No masks are stored. Mask j of a layer is drawn from (the run's key, layer, j), and the choice from (key, layer,
    period), so a resumed run continues with the same subnetworks, and so do microbatches, ranks and members of a
    population. The inputs of these draws (the key, the period and the rows of the batch) are kept in one buffer that
    all layers share.

    Events: INIT (replaces every nn.Dropout by a `GyroDropout`, and creates the slot with the length of a period),
    BATCH_START (writes the key and the period), BEFORE_FORWARD and AFTER_FORWARD (with microbatches: writes the range
    of rows and resets it). Reads the key, the clock and the batch's size; replaces the model and the buffer. Calls of
    `F.dropout`, the dropout inside attention, `nn.Dropout2d` and similar layers are not replaced, and neither are those
    in parts of the network without trainable parameters.

    The length of a period is computed at INIT from the run's length, and does not change if the run is extended. The
    authors use (sigma, tau) = (256, 16) for small networks, (1024, 8) for ResNet-18 and BERT.

    Args:
        p: The probability of dropping an element, in [0, 1), for every layer; the probabilities of the replaced layers
            are ignored. With 0 the algorithm never matches and the network keeps its dropout.
        sigma: The number of masks in each layer's bank, at least 1.
        tau: The number of masks used for a batch, in [1, sigma]; a batch with fewer rows uses one mask per row.
        feature_dim: The only dimension along which masks vary; by default all but the first. See
            `gyro_dropout_mask`.
        name: Name of the algorithm, of its slot and of its draws.

    Raises:
        TypeError, ValueError: A setting of the wrong type or out of range. At INIT: a run whose length in batches
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

    def init(state: State) -> State:
        length, place = _period_length(name, state, sigma, tau), torch.zeros(6, dtype=torch.int64)

        def layer(dropout: nn.Module, site: surgery.Site) -> nn.Module | None:
            if [*dropout.parameters(), *dropout.buffers()]:  # a user's subclass, which does more than plain dropout
                return None
            draw = random.salt(name, site.name)
            return GyroDropout(p, sigma, tau, draw=draw, place=place, feature_dim=feature_dim)

        state, _ = surgery.operate(state, {nn.Dropout: layer, GyroDropout: None}, name=name, skips_frozen=True)
        if not _places(state):
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
        traits=frozenset({Trait.REQUIRED_ON_LOAD, Trait.SETS_BUFFERS, Trait.SKIPS_FROZEN_PARTS}),
        config={setting: value for setting, value in config.items() if value is not None},
    )


def _groups(place: _Place, num: int, tau: int) -> Tensor:
    """Return the group of each row of a tensor, which may have several rows for each example."""
    rows = torch.arange(num, device=place.key.device)
    first, size, known = (torch.as_tensor(number) for number in (place.first, place.size, place.total))
    total, is_slice = known.clamp(min=1), size > 0
    examples = first + rows * torch.where(is_slice, size, total) // max(num, 1)
    # A forward pass on other rows than the step's batch (another size, or before the first step) groups these rows.
    is_known = is_slice | ((known > 0) & (num % total == 0))
    return torch.where(is_known, examples * tau // total, rows * tau // max(num, 1)).clamp(max=tau - 1)


def _places(state: State) -> list[str]:
    return [name for name in state.model.buffer_names if name.rpartition(".")[2] == _BUFFER]


def _placed(state: State, place: _Place) -> State:
    return state.replace(buffers={**state.buffers, **dict.fromkeys(_places(state), place.written())})


def _period_length(name: str, state: State, sigma: int, tau: int) -> int:
    run = state.timestamp.run
    if run.total_batches is None:
        raise ValueError(
            f"{name}: expected a run whose length in batches is known, since it decides how long masks are kept, got "
            f" duration={run.duration}, batches_per_epoch={run.batches_per_epoch}; give State.create a duration in "
            "batches ('500ba'), or one in epochs and batches_per_epoch=len(batches)"
        )
    return gyro_dropout_period(run.total_batches, sigma, tau)
