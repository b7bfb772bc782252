"""Methods that drop at random: stochastic depth, branches of blocks, and gyro dropout, elements by a bank of masks."""

from dataclasses import replace
from typing import Annotated, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from purecompose import random, surgery
from purecompose._support.device import as_scalar
from purecompose.algorithms._parts import changed, warn_of_nothing
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.nn.keyed.draws import is_compared
from purecompose.nn.layers.stochastic_depth import DropPath, StochasticDepth, drop_paths, residuals
from purecompose.random.keys import as_rng
from purecompose.schedule import Scalar, Schedule, collect, linear
from purecompose.schedule.declared import Within, checked
from purecompose.time import Time, TimeLike, TimeUnit
from purecompose.time.event import Event, named_point
from purecompose.time.predicates import NEVER, on


Method = Literal["block", "sample"]
Distribution = Literal["uniform", "linear"]

_ADVICE = (
    "A block is recognized by its children: branch and shortcut (and relu), those of torchvision's BasicBlock or "
    "Bottleneck, or norm1, attention, norm2 and feed_forward (and dropout); or by a drop_path, as in timm"
)


@factory
def stochastic_depth(
    stochastic_method: Method = "block",
    drop_rate: Annotated[Scalar, Within(0, 1, hint="it is how often a branch is left out")] = 0.2,
    drop_distribution: Distribution = "linear",
    drop_warmup: Annotated[TimeLike | float, named_point] = 0.0,
    *,
    name: str = "stochastic_depth",
) -> Algorithm:
    """Skip branches of residual blocks at random.

    With a block act(F(x) + S(x)), its branch F and shortcut S, and the rate p at which the branch is skipped:

        "block", in training     act(b F(x) + S(x)), one b for the whole batch, 1 with probability 1 - p
                                 if b = 0 and S is the identity: x itself
        "sample", in training    act(b_n F(x)_n + S(x)_n), one b_n for each example
        in evaluation            act((1 - p) F(x) + S(x))

    A transformer block consists of two of these in a row, with separate draws and the block's p.

    Block i of L, in the order of definition, has the rate p (uniform) or p (i + 1) / L (linear). With `drop_warmup` w
    all rates are multiplied by min(t / w, 1).

    Blocks of `purecompose.nn.models` and of torchvision's residual networks are replaced, see
    `purecompose.nn.layers.residuals`, unless they directly have parameters, buffers or hooks, or a forward set on the
    instance. In blocks of timm and Hugging Face, a `drop_path` is replaced by `purecompose.nn.layers.DropPath`: there,
    a skipped branch still updates its buffers, and the activation is still applied after it. Frozen parts of the
    network are not changed.

    Events: INIT, and BATCH_START if rates vary. Reads the clock; replaces the model, and writes the rates, a buffer of
    each block.

    Args:
        stochastic_method: "block" for one draw for the whole batch and branch, "sample" for one for each example.
        drop_rate: The probability that a branch is skipped, in [0, 1]; for "linear", in the last block. With the number
            0 the algorithm never matches. An `hparam` or a schedule may be given.
        drop_distribution: "linear" for rates that rise with the depth, "uniform" for equal rates.
        drop_warmup: The time during which rates rise from 0: a share of the run, or a time such as "2ep".
        name: Name of the algorithm and of its metric.

    Raises:
        TypeError, ValueError: At INIT: the network already has blocks with the other `stochastic_method`.

    Warns:
        UserWarning: At INIT: the network has no supported residual block.

    Example:
        >>> stochastic_depth("sample", 0.1)
        stochastic_depth(stochastic_method='sample', drop_rate=0.1, drop_distribution='linear')
        >>> stochastic_depth(drop_rate=0.0).match
        never

    References:
        Gao Huang et al.: Deep Networks with Stochastic Depth. ECCV 2016. https://arxiv.org/abs/1603.09382
        Minjia Zhang, Yuxiong He: Accelerating Training of Transformer-Based Language Models with Progressive Layer
        Dropping. NeurIPS 2020. https://arxiv.org/abs/2010.13369
    """
    warmup = Time.of(drop_warmup, TimeUnit.DURATION)
    rate = drop_rate * linear(0.0, 1.0, warmup) if warmup else drop_rate
    when = on(Event.INIT) if isinstance(rate, int | float) else on(Event.INIT, Event.BATCH_START)

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            state = _with_blocks(state, name, stochastic_method)
            # A schedule has no value before the first batch.
            return state if collect(rate, Schedule) else _with_rates(state, state.scalar(rate), drop_distribution)
        value = state.scalar(rate)
        metrics = {**state.metrics, f"{name}/drop_rate": as_scalar(value, torch.float32, state.device)}
        return _with_rates(state, value, drop_distribution).replace(metrics=metrics)

    return Algorithm(
        name,
        NEVER if drop_rate == 0 else when,
        apply,
        traits=frozenset({Trait.REQUIRED_ON_LOAD, Trait.SETS_BUFFERS, Trait.SKIPS_FROZEN_PARTS}),
        # The rate includes the warm-up, because schedules are evaluated at their place in the config.
        config={"stochastic_method": stochastic_method, "drop_rate": rate, "drop_distribution": drop_distribution},
    )


def _with_blocks(state: State, name: str, stochastic_method: Method) -> State:
    """Return the state with its blocks replaced, which is done once; their rates are still to be written."""
    network = state.model.module
    done = {place: child for place, child in network.named_modules() if isinstance(child, (StochasticDepth, DropPath))}
    for place, child in done.items():
        if child.method != stochastic_method:
            raise ValueError(
                f"{name}: expected blocks with method {stochastic_method!r}, got {child.method!r} in "
                f"{place or 'the network'!r}, from an earlier stochastic depth; use the same method, or start from "
                "the original network"
            )
    if not any(residuals(child) or drop_paths(child) for child in network.modules()):
        if not done:
            warn_of_nothing(name, "residual blocks", network, _ADVICE)
        return state

    def block(module: nn.Module, site: surgery.Site) -> nn.Module | None:
        del site
        if residuals(module):
            return StochasticDepth(module, stochastic_method, 0.0)
        paths = {path: DropPath(stochastic_method, 0.0) for path in drop_paths(module)}
        return changed(module, None, **paths) if paths else None

    rules = {nn.Module: block, StochasticDepth: None, DropPath: None}
    return surgery.operate(state, rules, name=name, skips_frozen=True)[0]


def _with_rates(state: State, rate: float | Tensor, drop_distribution: Distribution) -> State:
    """Return the state with the rates of all blocks in their buffers."""
    # All drop paths of a block have the same rate.
    blocks = {
        f"{place}.drop_rate".lstrip("."): place if isinstance(child, StochasticDepth) else place.rpartition(".")[0]
        for place, child in state.model.module.named_modules()
        if isinstance(child, (StochasticDepth, DropPath))
    }
    places = list(dict.fromkeys(blocks.values()))
    new = {}
    for buffer, block in blocks.items():
        share = 1.0 if drop_distribution == "uniform" else (places.index(block) + 1) / len(places)
        new[buffer] = as_scalar(rate * share, state.buffers[buffer].dtype, state.device)
    return state.replace(buffers={**state.buffers, **new})


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
        groups: (N,), int64, below tau: the index of each row's mask among the chosen ones (not checked), instead of tau
            groups of consecutive rows.

    Returns:
        The masks, bool, of the given shape. In training a layer returns `inputs * mask / (1 - p)`.

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

    Its draws depend only on its buffer, which `gyro_dropout` updates.

    Args:
        p, sigma, tau: See `gyro_dropout`.
        place: The buffer, shared by all layers, int64 of shape (6,), as described by `_Place`.
    """

    def __init__(self, p: float, sigma: int, tau: int, *, draw: int, place: Tensor) -> None:
        super().__init__()
        self.p, self.sigma, self.tau, self.draw = p, sigma, tau, draw
        self.register_buffer(_BUFFER, place)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or is_compared():  # a row's mask depends on its place in the batch
            return input
        place = _Place.read(self.get_buffer(_BUFFER))
        rng = random.Rng(place.key, draw=self.draw)
        groups = _groups(place, input.shape[0], self.tau)
        settings = {"p": self.p, "sigma": self.sigma, "tau": self.tau}
        mask = gyro_dropout_mask(rng, tuple(input.shape), **settings, period=place.period, groups=groups)
        return input * mask.to(input.device) / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, sigma={self.sigma}, tau={self.tau}"


class GyroDropoutState(NamedTuple):
    """Slot of `gyro_dropout`."""

    period_length: Tensor
    """Number of batches for which a choice of masks is used, 0-d int64; set at INIT from the run's length; constant."""


@factory
def gyro_dropout(p: Probability = 0.5, sigma: Sigma = 256, tau: Tau = 16, *, name: str = "gyro_dropout") -> Algorithm:
    """Replace dropout by dropout with a bank of masks.

    For a period of several batches, tau of a bank of sigma masks, chosen without replacement, are used: the rows of
    each batch are split into tau groups of (nearly) equal size, one for each mask. In training a layer returns

        y = x mask / (1 - p),   each element of a mask is 1 with probability 1 - p

    and in evaluation y = x. In a run of T batches, other masks are chosen every int(T / sigma) * tau batches.

    No masks are stored: mask j of a layer is drawn from (the run's key, layer, j), and the choice from (key, layer,
    period).

    Events: INIT (replaces every nn.Dropout by a `GyroDropout`, and creates the slot with the length of a period),
    BATCH_START (writes the key and the period), BEFORE_FORWARD and AFTER_FORWARD (with microbatches: writes the range
    of rows and resets it). Reads the key, the clock and the batch's size; replaces the model and the buffer. Other
    dropout is not replaced, nor that in parts without trainable parameters.

    The length of a period does not change if the run is extended. The authors use (sigma, tau) = (256, 16) for small
    networks, (1024, 8) for ResNet-18 and BERT.

    Args:
        p: The probability of dropping an element, in [0, 1), in every layer. With 0 the algorithm never matches.
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
        run = state.timestamp.run
        if run.total_batches is None:
            raise ValueError(
                f"{name}: expected a run whose length in batches is known, since it decides how long masks are kept, "
                f"got duration={run.duration}, batches_per_epoch={run.batches_per_epoch}; give State.create a duration "
                "in batches ('500ba'), or one in epochs and batches_per_epoch=len(batches)"
            )
        length, place = gyro_dropout_period(run.total_batches, sigma, tau), torch.zeros(6, dtype=torch.int64)

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


def _check_bank(where: str, sigma: int, tau: int) -> None:
    if tau > sigma:
        raise ValueError(
            f"{where}: expected tau <= sigma, got tau={tau}, sigma={sigma}: a batch has no more masks than the bank"
        )
