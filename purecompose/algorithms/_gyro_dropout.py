"""Gyro dropout: dropout with masks from a fixed bank, of which a few are used at a time."""

from dataclasses import replace
from typing import Annotated, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from purecompose import random, surgery
from purecompose._support.device import as_scalar
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.nn.keyed.draws import is_compared
from purecompose.random.keys import as_rng
from purecompose.schedule.declared import Within, checked
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


_BUFFER = "gyro_dropout_place"


_P_HINT = "it is the probability of dropping; 1 would leave nothing"
Probability: TypeAlias = Annotated[float, Within(0, 1, below=True, hint=_P_HINT)]
Sigma: TypeAlias = Annotated[int, Within(1, hint="it is the number of masks in the bank")]
Tau: TypeAlias = Annotated[int, Within(1, hint="it is the number of masks that share a batch")]


@checked
def gyro_dropout_period(
    total_batches: Annotated[float, Within(0, above=True)], sigma: Sigma = 256, tau: Tau = 16
) -> int:
    """Return the number of batches for which a choice of masks is used.

    This is int(total / sigma) * tau; in runs of fewer than sigma batches int(total * tau / sigma), and at least 1.

    Args:
        total_batches: The run's length in batches, above 0.
        sigma, tau: See `gyro_dropout`.

    Example:
        >>> gyro_dropout_period(196 * 100), gyro_dropout_period(100), gyro_dropout_period(10)
        (1216, 6, 1)
    """
    _check_bank("gyro_dropout_period", sigma, tau)
    return max(1, int(total_batches / sigma) * tau or int(total_batches * tau / sigma))


@checked
def gyro_dropout_mask(
    key: Tensor | random.Rng,
    shape: tuple[int, ...],
    *,
    p: Probability = 0.5,
    sigma: Sigma = 256,
    tau: Tau = 16,
    period: int | Tensor = 0,
    groups: Tensor | None = None,
) -> Tensor:
    """Return the masks of a batch's rows, in which True elements are kept.

    Args:
        key: The key of the layer; use different keys for different layers.
        shape: The shape (N, ...) of the layer's inputs.
        p, sigma, tau: See `gyro_dropout`.
        period: The number of the choice, from 0: an int, or a 0-d int64 tensor.
        groups: (N,), int64, below tau: the index of each row's mask among the chosen ones, instead of tau groups of
            consecutive rows. Values are not checked.

    Returns:
        The masks, bool, of the given shape. In training a layer returns `inputs * mask / (1 - p)`.

    Raises:
        TypeError, ValueError: No key, or a setting of the wrong type or out of range.

    Example:
        >>> from purecompose.random import key
        >>> mask = gyro_dropout_mask(key(0), (6, 100), tau=2)
        >>> bool((mask[:3] == mask[0]).all()), bool((mask[3:] == mask[3]).all()), bool((mask[0] == mask[3]).all())
        (True, True, False)
    """
    where = "gyro_dropout_mask"
    _check_bank(where, sigma, tau)
    rng = as_rng(key, where)
    if groups is None:
        groups = torch.arange(shape[0], device=rng.key.device) * tau // max(shape[0], 1)  # consecutive rows
    root = rng.per_example(None)
    choosing = replace(root, key=random.fold_in(root.key, period)).named("choice")
    chosen = random.choice(choosing, sigma, tau)
    # The mask's number in the bank replaces the example's number, so that only the chosen masks are drawn.
    masks = random.bernoulli(root.named("bank").per_example(chosen), 1 - p, (tau, *shape[1:]))
    return masks.index_select(0, groups.to(masks.device))


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
        p, sigma, tau: See `gyro_dropout`.
        draw: The salt of this layer's draws.
        place: The buffer, shared by all layers, int64 of shape (6,), as described by `_Place`.
    """

    def __init__(self, p: float, sigma: int, tau: int, *, draw: int, place: Tensor) -> None:
        super().__init__()
        self.p, self.sigma, self.tau, self.draw = p, sigma, tau, draw
        self.register_buffer(_BUFFER, place)

    def forward(self, input: Tensor) -> Tensor:
        """Drop elements in training."""
        if not self.training or is_compared():  # a row's mask depends on its place in the batch
            return input
        place = _Place.read(self.get_buffer(_BUFFER))
        rng = random.Rng(place.key, draw=self.draw)
        groups = _groups(place, input.shape[0], self.tau)
        settings = {"p": self.p, "sigma": self.sigma, "tau": self.tau}
        mask = gyro_dropout_mask(rng, tuple(input.shape), **settings, period=place.period, groups=groups)
        return input * mask.to(input.device) / (1 - self.p)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"p={self.p}, sigma={self.sigma}, tau={self.tau}"


class GyroDropoutState(NamedTuple):
    """Slot of `gyro_dropout`."""

    period_length: Tensor
    """Number of batches for which a choice of masks is used, 0-d int64; set at INIT from the run's length; constant."""


@factory
def gyro_dropout(p: Probability = 0.5, sigma: Sigma = 256, tau: Tau = 16, *, name: str = "gyro_dropout") -> Algorithm:
    """Replace dropout by dropout with a bank of masks.

    A bank of sigma masks corresponds to sigma subnetworks. For a period of several batches, tau of the masks, chosen
    without replacement, are used: the rows of each batch are split into tau groups of (nearly) equal size, one for each
    mask. In training a layer returns

        y = x mask / (1 - p),   each element of a mask is 1 with probability 1 - p

    and in evaluation y = x. In a run of T batches, other masks are chosen every int(T / sigma) * tau batches, so that
    over the run each mask is trained for about as long as if it were chosen once.

    No masks are stored: mask j of a layer is drawn from (the run's key, layer, j), and the choice from (key, layer,
    period). The inputs of these draws are kept in one buffer that all layers share.

    Events: INIT (replaces every nn.Dropout by a `GyroDropout`, and creates the slot with the length of a period),
    BATCH_START (writes the key and the period), BEFORE_FORWARD and AFTER_FORWARD (with microbatches: writes the range
    of rows and resets it). Reads the key, the clock and the batch's size; replaces the model and the buffer. Other
    dropout is not replaced, nor that in parts without trainable parameters.

    The length of a period does not change if the run is extended. The authors use (sigma, tau) = (256, 16) for small
    networks, (1024, 8) for ResNet-18 and BERT.

    Args:
        p: The probability of dropping an element, in [0, 1), for every layer; the probabilities of the replaced layers
            are ignored. With 0 the algorithm never matches and the network keeps its dropout.
        sigma: The number of masks in each layer's bank, at least 1.
        tau: The number of masks used for a batch, in [1, sigma]; a batch with fewer rows uses one mask per row.
        name: Name of the algorithm, of its slot and of its draws.

    Raises:
        TypeError, ValueError: At INIT: a run whose length in batches is not known.

    Warns:
        UserWarning: At INIT: there is no `nn.Dropout` in the network.

    Example:
        >>> gyro_dropout(0.5, sigma=1024, tau=8)
        gyro_dropout(p=0.5, sigma=1024, tau=8)
        >>> gyro_dropout(0).match
        never

    References:
        Junyeol Lee et al.: Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training. MLSys 2022.
    """
    _check_bank("gyro_dropout", sigma, tau)

    def init(state: State) -> State:
        length, place = _period_length(name, state, sigma, tau), torch.zeros(6, dtype=torch.int64)

        def layer(dropout: nn.Module, site: surgery.Site) -> nn.Module | None:
            if [*dropout.parameters(), *dropout.buffers()]:  # a user's subclass, which does more than plain dropout
                return None
            draw = random.salt(name, site.name)
            return GyroDropout(p, sigma, tau, draw=draw, place=place)

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
    return Algorithm(
        name,
        NEVER if p == 0 else events,
        apply,
        traits=frozenset({Trait.REQUIRED_ON_LOAD, Trait.SETS_BUFFERS, Trait.SKIPS_FROZEN_PARTS}),
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
            f"duration={run.duration}, batches_per_epoch={run.batches_per_epoch}; give State.create a duration in "
            "batches ('500ba'), or one in epochs and batches_per_epoch=len(batches)"
        )
    return gyro_dropout_period(run.total_batches, sigma, tau)


def _check_bank(where: str, sigma: int, tau: int) -> None:
    if tau > sigma:
        raise ValueError(
            f"{where}: expected tau <= sigma, got tau={tau}, sigma={sigma}: a batch cannot have more different masks "
            "than the bank; increase sigma"
        )
