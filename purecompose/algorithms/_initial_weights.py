"""Methods that set initial weights: by a rule for matching parameters, or by whitening the first batch."""

import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from purecompose import random, tree
from purecompose._support.device import laid_as, whole
from purecompose._support.messages import warn
from purecompose._support.specs import shown
from purecompose.algorithms._parts import Where, warn_of_nothing
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.nn import model as models
from purecompose.nn.layers.replacing import is_plain, is_tied
from purecompose.optim.base import match_or_raise, matched
from purecompose.schedule.declared import Within, checked
from purecompose.time import Time, TimeLike
from purecompose.time.event import Event, named_point
from purecompose.time.predicates import before, on


@factory
def initialize(
    how: Literal["dirac", "zeros", "orthogonal"], where: Where = None, *, name: str = "initialize"
) -> Algorithm:
    """Set initial weights by pattern, before the first step.

    * "dirac": convolutions begin as the identity: the filter of output channel i passes on input channel i, in each
      group. Further output channels keep their drawn filters. The middle of a kernel of even size k is at k // 2.
    * "zeros": all elements are 0.
    * "orthogonal": matrices with orthonormal rows, or columns if there are fewer; filters count as matrices with a row
      for each output channel.

    Frozen parameters are not changed. A tied parameter has its first name, and changes wherever it is used. Biases are
    changed only by "zeros".

    Events: INIT, after methods that change the model and before those that copy weights. Reads and replaces: the
    parameters.

    Args:
        how: The kind of weights.
        where: Pattern or patterns (`fnmatch`) of the names of parameters. By default, for "dirac", the weights of all
            convolutions but the network's first, in the order of definition.
        name: Name of the algorithm and of its draws; a second one in a step needs another name.

    Raises:
        TypeError, ValueError: A setting of the wrong type, or no `where` for "zeros" and "orthogonal". At INIT: a
            pattern matches no trainable parameter that can have such weights.

    Warns:
        UserWarning: At INIT: there is no convolution after the first; or the run is not at its beginning, so that the
            weights are kept.

    Example:
        >>> initialize("zeros", "*.out.*")
        initialize(how='zeros', where=('*.out.*',))

    References:
        Keller Jordan: 94% on CIFAR-10 in 3.29 Seconds on a Single GPU. 2024. https://arxiv.org/abs/2404.00498
        Hongyi Zhang et al.: Fixup Initialization: Residual Learning Without Normalization. ICLR 2019.
        https://arxiv.org/abs/1901.09321
        Andrew M. Saxe et al.: Exact Solutions to the Nonlinear Dynamics of Learning in Deep Linear Neural Networks.
        2013. https://arxiv.org/abs/1312.6120
    """
    patterns = None if where is None else tuple(where)
    if patterns is None and how != "dirac":
        raise ValueError(
            f"initialize: where=None: expected patterns of the parameters to set to {how}, such as '*.out.*'"
        )

    def apply(event: Event, state: State) -> State:
        del event
        groups = _groups(state.model.module)
        names = _chosen(state, how, groups, patterns, name)
        if not names:
            return state
        if state.timestamp.batch:
            when = f"initial ones are set at the beginning of a run, and this one is at {state.timestamp.batch}ba"
            warn(f"{name} leaves the weights as they are: {when}")
            return state

        def new(key: str) -> Tensor:
            old = whole(state.params[key])
            if how == "dirac":
                return _as_identity(old, groups[key])
            return torch.zeros_like(old) if how == "zeros" else _orthogonal(state.rng(f"{name}.{key}"), old)

        made = {key: laid_as(new(key), state.params[key]) for key in names}
        return state.replace(params={**state.params, **made})

    return Algorithm(
        name, on(Event.INIT), apply, traits=frozenset({Trait.SETS_WEIGHTS}), runs_after=(Trait.REQUIRED_ON_LOAD,)
    )


def _groups(root: nn.Module) -> dict[str | None, int]:
    """Return the numbers of groups of the convolutions by the names of their weights, in the order of definition; the
    name is `None` for parametrized weights.
    """
    names = {id(param): name for name, param in root.named_parameters()}
    convs = (module for module in root.modules() if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d))
    weights = ((conv._parameters.get("weight"), conv.groups) for conv in convs)
    return {names.get(id(weight)): groups for weight, groups in weights}


def _chosen(
    state: State, how: str, groups: dict[str | None, int], patterns: tuple[str, ...] | None, name: str
) -> tuple[str, ...]:
    fits = {"dirac": groups.__contains__, "orthogonal": lambda key: state.params[key].ndim > 1}.get(how, bool)
    names = tuple(key for key in state.context.trainable if fits(key))
    if patterns is None:
        found = tuple(key for key in names if key != next(iter(groups), None))
        if not found:
            warn_of_nothing(name, "convolutions after the first that train", state.model.module, "Leave it out")
        return found
    kinds = {"dirac": "trainable weight of a convolution", "orthogonal": "trainable parameter with two dimensions"}
    for pattern in patterns:
        match_or_raise(pattern, names, f"{name}: where: {pattern!r}", kinds.get(how, "trainable parameter"))
    chosen = matched(patterns, names)
    return tuple(key for key in names if key in chosen)


def _as_identity(weight: Tensor, groups: int) -> Tensor:
    """Return filters that pass on input channel i as output channel i of each group; further ones are kept."""
    identity = nn.init.dirac_(torch.empty_like(weight), groups)
    is_set = identity.flatten(1).any(1).view(-1, *[1] * (weight.ndim - 1))
    return torch.where(is_set, identity, weight)


def _orthogonal(rng: random.Rng, like: Tensor) -> Tensor:
    """Return a tensor of this shape with orthonormal rows or columns, uniformly distributed, in float64."""
    rows, columns = like.shape[0], math.prod(like.shape[1:])
    drawn = random.normal(rng, (max(rows, columns), min(rows, columns))).double()
    q, r = torch.linalg.qr(drawn)
    q = q * r.diagonal().sign()
    return (q.T if rows < columns else q).reshape(like.shape)


Eps: TypeAlias = Annotated[float, Within(0, above=True, hint="it bounds the filters of components without variance")]


def _checked_frozen(frozen: Any, where: str) -> bool | Time:
    """Require True, False, or the time until which the filters are frozen."""
    return frozen if isinstance(frozen, bool) else named_point(frozen, where)


def _checked_layer(layer: Any, where: str) -> str | None:
    if layer is not None and not isinstance(layer, str):
        raise TypeError(f"{where}: expected the name of a layer, got {shown(layer)}")
    return layer


@checked
def whitening_filters(inputs: Tensor, kernel_size: tuple[int, int], *, eps: Eps = 5e-4) -> Tensor:
    """Return filters whose outputs over the patches of images are uncorrelated and have second moments of 1.

        M = mean of p p^T over all patches p = V diag(l) V^T,   filters = (V / sqrt(l + eps))^T

    Args:
        inputs: Images, (N, C, H, W).
        kernel_size: The height and width of the patches; all are taken, one pixel apart.
        eps: Bounds the filters of components that hardly vary.

    Returns:
        The filters, float64 of shape (C h w, C, h, w), those of the largest eigenvalues first. The largest entry of
        each is positive.

    Raises:
        ValueError: The inputs are not images, not finite, or smaller than a patch; or there are none.

    Example:
        >>> from purecompose.random import key, normal
        >>> images = normal(key(0), (8, 3, 16, 16)).cumsum(-1)
        >>> outputs = F.conv2d(images.double(), whitening_filters(images, (2, 2), eps=1e-9)).transpose(0, 1).flatten(1)
        >>> torch.allclose(outputs @ outputs.T / outputs.shape[1], torch.eye(12, dtype=torch.float64), atol=1e-5)
        True
    """
    return _filters(*_components(inputs, kernel_size), eps).view(-1, inputs.shape[1], *kernel_size)


class PatchWhitening(NamedTuple):
    """Slot of `patch_whitening`."""

    eigenvalues: Tensor
    """Second moments of the components that have filters, the largest first, float32; 0 before the first batch."""


@factory
def patch_whitening(
    layer: Annotated[str | None, _checked_layer] = None,
    *,
    eps: Eps = 5e-4,
    frozen: Annotated[bool | TimeLike | float, _checked_frozen] = True,
    name: str = "patch_whitening",
) -> Algorithm:
    """Whiten the patches of images by the first convolution.

        M = mean of p p^T over the patches p of the first batch = V diag(l) V^T
        filters = (V / sqrt(l + eps))^T and their negatives

    The patches are all those of the kernel's size, one pixel apart, in what the layer is given in a pass of the first
    batch through the network in training mode. With d numbers in a patch and C output channels, the k = min(d, C // 2)
    components of the largest eigenvalues have filters: channel i has that of the i-th component, and channel k + i its
    negative. All other channels keep their drawn weights. The bias is not changed, and trains.

    If the weight is not frozen, the filters also replace copies of the drawn weight that optimizers and other methods
    keep since INIT.

    Events: INIT, to freeze the weight; AFTER_DATALOADER of the run's first batch, after methods that augment or mix
    examples; with a time, BATCH_START until then, to set `paused`. Reads the batch's inputs, and replaces the weight.
    Before the first batch the layer has its drawn weights. A resumed run does not whiten again.

    This is a host algorithm: a compiled step has one variant more, for the first batch. The moments, in float64, are
    those of the whole batch.

    Args:
        layer: The qualified name of an `nn.Conv2d`; by default the first one in the order of definition.
        eps: Bounds the filters of components that hardly vary, above 0.
        frozen: Whether the weight stays as it is; or the time until which it does, a share of the run or a time such as
            "3ep".
        name: Name of the algorithm, of its slot and of the draws of its pass.

    Raises:
        TypeError, ValueError: A setting of the wrong type or out of range. At INIT: the layer does not support it, or
            (without `layer`) is frozen. In the first step: the network does not call the layer, or not with images.

    Warns:
        UserWarning: At INIT: the network has no `nn.Conv2d`; or the run is not at its beginning, so that the weight is
            only frozen.

    Example:
        >>> patch_whitening(frozen="3ep")
        patch_whitening(eps=0.0005, frozen='3ep')

    References:
        Keller Jordan: 94% on CIFAR-10 in 3.29 Seconds on a Single GPU. 2024. https://arxiv.org/abs/2404.00498
        David Page: How to Train Your ResNet 8: Bag of Tricks. 2019. https://myrtle.ai/learn/how-to-train-your-resnet-8-bag-of-tricks/
    """

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            return _begun(state, name, layer, is_frozen=frozen is True)
        if name not in state.slots:  # INIT has warned
            return state
        found = _found(state.model, layer)
        if event is Event.BATCH_START:
            return state.replace(paused=state.context.paused | {found.weight})
        with torch.no_grad():
            return _whitened(state, name, found, eps)

    match = on(Event.INIT) | on(Event.AFTER_DATALOADER) & before("1ba")
    return Algorithm(
        name,
        match if isinstance(frozen, bool) else match | on(Event.BATCH_START) & before(frozen),
        apply,
        traits=frozenset({Trait.SETS_WEIGHTS}),
        runs_after=(Trait.REQUIRED_ON_LOAD, Trait.AUGMENTS_EXAMPLES, Trait.MIXES_EXAMPLES),
        host=True,
    )


class _Found(NamedTuple):
    """A convolution in a network, and its name and that of its weight."""

    layer: str
    conv: nn.Conv2d
    weight: str


@functools.lru_cache(maxsize=8)
def _found(model: models.Model, layer: str | None) -> _Found:
    """Return the convolution of this name, or the first one."""
    root = model.module
    convs = {name: module for name, module in root.named_modules() if isinstance(module, nn.Conv2d)}
    layer = next(iter(convs)) if layer is None else layer
    conv = convs[layer]
    weights = {id(param): name for name, param in root.named_parameters()}
    return _Found(layer, conv, weights.get(id(conv._parameters.get("weight")), ""))


def _begun(state: State, name: str, layer: str | None, *, is_frozen: bool) -> State:
    """Return the state with the slot, and with the weight frozen; check the layer."""
    if name in state.slots:  # INIT runs again
        return state
    convs = [name for name, module in state.model.module.named_modules() if isinstance(module, nn.Conv2d)]
    if layer is None and not convs:
        warn_of_nothing(name, "nn.Conv2d", state.model.module, "Leave it out")
        return state
    if layer is not None and layer not in convs:
        known = ", ".join(map(repr, convs)) or "none"
        raise ValueError(f"{name}: layer={layer!r}: expected the name of an nn.Conv2d of the network: {known}")
    found = _found(state.model, layer)
    conv, frozen = found.conv, state.context.frozen
    wrong = {
        "a plain nn.Conv2d, without hooks or parametrized tensors": not is_plain(conv, nn.Conv2d),
        "a convolution without groups": conv.groups > 1,
        "a convolution without dilation": tuple(conv.dilation) != (1, 1),
        "at least two output channels": conv.out_channels < 2,
        "a weight that no other layer shares": bool(found.weight) and is_tied(conv, state.model.module),
        "a weight that trains, or the layer named by layer=": layer is None and found.weight in frozen,
    }
    for expected, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(f"{name}: layer {found.layer!r}: expected {expected}, got {conv}")
    if state.timestamp.batch:
        when = f"filters are set in the first batch of a run, and this one is at {state.timestamp.batch}ba"
        warn(f"{name} leaves the weight of {found.layer!r} as it is{' and freezes it' * is_frozen}: {when}")
    num = min(conv.in_channels * conv.kernel_size[0] * conv.kernel_size[1], conv.out_channels // 2)
    slot = PatchWhitening(torch.zeros(num, device=state.device))
    state = state.replace(slots={**state.slots, name: slot})
    return state.replace(frozen=frozen | {found.weight}) if is_frozen else state


def _whitened(state: State, name: str, found: _Found, eps: float) -> State:
    """Return the state with the filters that whiten what the layer is given."""
    seen = _given_to(state, found.layer, name)
    num, kernel_size = len(state.slots[name].eigenvalues), (found.conv.kernel_size[0], found.conv.kernel_size[1])
    values, vectors = _components(seen, kernel_size)
    values, vectors = values[:num].to(state.device), vectors[:, :num].to(state.device)
    old = whole(state.params[found.weight])
    filters = _filters(values, vectors, eps).view(num, *old.shape[1:]).to(old.dtype)
    new = torch.cat([filters, -filters, old[2 * num :]])

    def is_held(node: Any) -> bool:
        held = node.get(found.weight) if isinstance(node, Mapping) else None
        return isinstance(held, Tensor) and held.shape == old.shape

    def followed(node: Any) -> Any:
        if not is_held(node):
            return node
        held = whole(node[found.weight])
        is_copy = (held == old.to(held.dtype)).all() & (old != 0).any()  # zeros may be any memory, such as momentum
        return {**node, found.weight: laid_as(torch.where(is_copy, new.to(held.dtype), held), node[found.weight])}

    trains = found.weight not in state.context.frozen
    memory = state.slots, state.opt_state
    slots, opt_state = tree.map(followed, memory, is_leaf=is_held) if trains else memory
    slots = {**slots, name: PatchWhitening(values.float())}
    params = {**state.params, found.weight: laid_as(new, state.params[found.weight])}
    return state.replace(params=params, slots=slots, opt_state=opt_state)


def _components(inputs: Tensor, kernel_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues (d,) and eigenvectors (d, d), in columns, of the patches' second moments, in float64."""
    if inputs.ndim != 4 or any(side < size for side, size in zip(inputs.shape[2:], kernel_size, strict=False)):
        raise ValueError(f"whitening: expected images (N, C, H, W) of at least {kernel_size}, got {shown(inputs)}")
    length = inputs.shape[1] * kernel_size[0] * kernel_size[1]
    # In parts of a bounded size, since patches take d times the memory of the images.
    num = max(1, _MOST_NUMBERS // (length * inputs.shape[2] * inputs.shape[3]))
    moments, count = inputs.new_zeros((length, length), dtype=torch.float64), 0
    for part in inputs.split(num):
        patches = F.unfold(part.double(), kernel_size).transpose(0, 1).flatten(1)
        moments, count = moments + patches @ patches.T, count + patches.shape[1]
    moments = moments / max(1, count)
    if not count or not moments.isfinite().all():
        raise ValueError(f"whitening: expected images of finite numbers, at least one, got {shown(inputs)}")
    values, vectors = torch.linalg.eigh(moments)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    # The sign of an eigenvector is arbitrary, and differs between machines.
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return values, vectors * largest.sign()


_MOST_NUMBERS = 2**23


def _filters(values: Tensor, vectors: Tensor, eps: float) -> Tensor:
    return (vectors / (values + eps).sqrt()).T


class _Watch:
    """Hooks that keep what a layer is given in its first call; only one pass may run at a time."""

    def __init__(self) -> None:
        self.seen: Tensor | None = None

    def begin(self, root: nn.Module, args: tuple[Any, ...]) -> None:
        del root, args
        self.seen = None

    def keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        del module
        self.seen = (*args, *kwargs.values())[0] if self.seen is None else self.seen


@functools.lru_cache(maxsize=8)
def _watching(model: models.Model, layer: str) -> tuple[models.Model, _Watch]:
    """Return the architecture with hooks on a layer."""
    root, watch = model.skeleton(train=True).blank_copy(), _Watch()
    root.register_forward_pre_hook(watch.begin)
    root.get_submodule(layer).register_forward_pre_hook(watch.keep, with_kwargs=True)
    return models.of_skeleton(root), watch


def _given_to(state: State, layer: str, name: str) -> Tensor:
    """Return the layer's input in a pass of the batch through the network in training mode."""
    model, watch = _watching(state.model, layer)
    state.replace(model=model).run_model(state.inputs, train=True, rng_name=name)
    seen, watch.seen = watch.seen, None
    if seen is None:
        raise ValueError(f"{name}: the network does not call the layer {layer!r}; name another one by layer=")
    return seen.detach()
