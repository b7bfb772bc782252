"""Per-example clipping: bounds the influence of single examples on a step, and optionally hides it in noise."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from purecompose import batch as batches, random, tree
from purecompose._support.device import divided, place_of, whole
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.ranks import Ranks
from purecompose.core.state import State
from purecompose.schedule import Scalar
from purecompose.schedule.declared import Within, checked
from purecompose.surgery.weights import wide
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on
from purecompose.transforms.members import explained


Grads = Mapping[str, Tensor]
T = TypeVar("T")


@checked
def norms_per_example(grads: Grads) -> Tensor:
    """Return the Euclidean norm of each example's gradient.

    Args:
        grads: Floating gradients (N, ...), by name.

    Returns:
        (N,), the norms over all tensors together; float64 if any tensor is, else float32.

    Example:
        >>> norms_per_example({"w": torch.tensor([[3.0], [0.0]]), "b": torch.tensor([4.0, 1.0])})
        tensor([5., 1.])
    """
    norms = [torch.linalg.vector_norm(wide(grad).reshape(len(grad), -1), dim=1) for grad in grads.values()]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)


@checked
def clip_per_example(grads: Grads, max_norm: float | Tensor) -> dict[str, Tensor]:
    """Return the mean over examples of the gradients, after scaling gradients of norm above `max_norm` down to it.

    Args:
        grads: Floating gradients (N, ...), one row for each example, by name.
        max_norm: The bound, above 0; a number or a 0-d tensor.

    Returns:
        The means (...), by name, of the same dtypes.

    Example:
        >>> clip_per_example({"w": torch.tensor([[3.0], [0.0]]), "b": torch.tensor([4.0, 0.5])}, 1.0)
        {'w': tensor([0.3000]), 'b': tensor(0.6500)}
    """
    sums, norms = _clipped_sums(grads, max_norm)
    return {name: total / len(norms) for name, total in sums.items()}


@factory
def per_example_clipping(
    max_norm: Annotated[Scalar, Within(0, above=True, or_infinite=True, hint="infinity clips nothing")],
    noise_multiplier: Annotated[Scalar, Within(0, hint="0 adds no noise")] = 0.0,
    *,
    chunk_size: Annotated[int | None, Within(1, hint="it counts examples")] = None,
    name: str = "per_example_clipping",
) -> Algorithm:
    """Clip the gradient of each example, and add noise: the step of DP-SGD.

        g <- 1/N sum_i g_i min(1, C / |g_i|) + sigma C / N z,   z ~ N(0, I)

    with g_i the gradient of the loss of example i, |g_i| its Euclidean norm over all trainable parameters, N the number
    of examples in the batch, C the bound `max_norm` and sigma `noise_multiplier`. The privacy of a run (epsilon and
    delta) is not computed.

    The gradients are those of the step's loss with the algorithms that act before it, without frozen parameters, and
    with each example's draws in the batch. Several processes compute those of a part each. All examples have equal
    weight: in a loss per token, an example's loss is the mean over its tokens. If the model computes its own loss, it
    is called with a batch of one example.

    Events: AFTER_TRAIN_BATCH, after other methods that compute gradients again and before those that collect or clip
    gradients. Replaces the gradients without reading them; adds `metrics[f"{name}/clipped"]`, the share of examples
    that were scaled down, and `metrics[f"{name}/norm"]`, the mean of |g_i|. If the gradient of one example is not
    finite, neither is the batch's.

    Layers must treat each example separately: batch normalisation in training, and layers that update running
    statistics, are rejected. Your own layers that mix examples are not detected.

    A claim of privacy also requires an accountant; batches drawn as it assumes, each divided by the expected batch size
    (here, by the actual one); no publication of loss, metrics and batch statistics; and noise from an unpredictable
    generator, which Philox is not.

    Args:
        max_norm: C, above 0; with infinity the algorithm never matches. An hparam or a schedule may be given here and
            for the noise.
        noise_multiplier: Sigma, the standard deviation of the noise in the sum of the gradients, in units of
            `max_norm`.
        chunk_size: The number of examples whose gradients are in memory at a time; by default all of this process. With
            1 the gradients are computed without `vmap`, which is slow but works for any network.
        name: Name of the algorithm, of its draws and of its metrics.

    Raises:
        TypeError, ValueError: A setting of the wrong type or out of range, or noise without a bound. In the first
            step: layers that mix examples.

    Example:
        >>> per_example_clipping(1.0, 0.8)
        per_example_clipping(max_norm=1.0, noise_multiplier=0.8)
        >>> per_example_clipping(float("inf")).match
        never

    References:
        Martin Abadi et al.: Deep Learning with Differential Privacy. CCS 2016. https://arxiv.org/abs/1607.00133
    """
    is_neutral, has_noise = max_norm == math.inf, noise_multiplier != 0
    if is_neutral and has_noise:
        raise ValueError(
            "per_example_clipping: max_norm: expected a finite number, the unit of the noise "
            f"({noise_multiplier=!r}), got inf; give a bound"
        )

    def apply(event: Event, state: State) -> State:
        del event
        _check_layers(name, state.model.module)
        bound, num, share = state.scalar(max_norm), state.num_examples, own_examples(state)
        # Gathered once here, and not for each example.
        with_whole = state.replace(params={key: whole(param) for key, param in state.params.items()})
        sums, norms = _sums_over_examples(name, with_whole, share, bound, chunk_size)
        norms = norms.detach()
        own = {"grads": sums, "clipped": (norms > bound).to(norms.dtype).sum(), "norm": norms.sum()}
        means = tree.map(lambda total: total / num, sum_over_shares(state, share, own))
        grads, found = means["grads"], {f"{name}/{key}": means[key] for key in ("clipped", "norm")}
        if has_noise:
            deviation = state.scalar(noise_multiplier) * bound / num
            grads = {key: _noisy(grad, state.rng(f"{name}.{key}"), deviation) for key, grad in grads.items()}
        grads = {key: divided(grad, place_of(state.params[key])) for key, grad in grads.items()}
        return state.replace(grads={**(state.grads or {}), **grads}, metrics={**state.metrics, **found})

    return Algorithm(
        name,
        NEVER if is_neutral else on(Event.AFTER_TRAIN_BATCH),
        apply,
        traits=frozenset({Trait.RENEWS_GRADIENTS, Trait.CLIPS_EXAMPLES, Trait.REPLACES_GRADIENTS}),
    )


def _sums_over_examples(
    name: str, state: State, share: range, max_norm: float | Tensor, chunk_size: int | None
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the sum of the clipped gradients of these examples, and their norms before clipping, (N,)."""
    assert state.clock is not None
    # The values are cached on first access. Inside vmap, the cache would keep a tensor that is invalid afterwards.
    _ = state.clock.values
    # Fields of a compiled step's state are made when they are first read, which must not be within vmap either.
    tree.leaves(state)
    sums: dict[str, Tensor] = {}
    norms: list[Tensor] = []
    share = share or range(1)  # an empty share still needs gradients of the right shapes, which are not counted
    chunks = _one_by_one(state, share) if chunk_size == 1 else _mapped(name, state, share, chunk_size or len(share))
    for grads in chunks:
        new_sums, new_norms = _clipped_sums(grads, max_norm)
        sums = {key: sums[key] + new if key in sums else new for key, new in new_sums.items()}
        norms.append(new_norms)
    return sums, torch.cat(norms)


def _one_by_one(state: State, share: range) -> Iterator[dict[str, Tensor]]:
    """Yield the gradients of each example, (1, ...)."""
    start = 0 if state.first_example is None else state.first_example
    examples = state.context.layout.split(state.batch, state.num_examples)
    for index in share:
        yield {key: grad[None] for key, grad in gradient_of_part(state, examples[index], start + index).items()}


def _mapped(name: str, state: State, share: range, chunk_size: int) -> Iterator[dict[str, Tensor]]:
    """Yield the gradients of each chunk of examples, (chunk, ...)."""
    num, tensors = state.num_examples, batches.tensors(state.batch)
    is_row = state.context.layout.are_rows(state.batch)
    rows = [tensor for tensor, per_example in zip(tensors, is_row, strict=True) if per_example]
    indices = torch.arange(num, dtype=torch.int64, device=state.device)
    if state.first_example is not None:
        indices = indices + state.first_example

    def gradient(rows: list[Tensor], index: Tensor) -> dict[str, Tensor]:
        row, rest = iter(rows), iter(is_row)
        one = batches.map_tensors(lambda tensor: next(row)[None] if next(rest) else tensor, state.batch)
        return gradient_of_part(state, one, index)

    for start in share[::chunk_size]:
        chunk = slice(start, min(start + chunk_size, share.stop))
        with explained(name, "example", "set chunk_size=1, which takes examples one by one, without torch.vmap"):
            grads = torch.func.vmap(gradient)([row[chunk] for row in rows], indices[chunk])
        yield grads


def _clipped_sums(grads: Grads, max_norm: float | Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the sums of clipped gradients by name, and the norms before clipping."""
    norms = norms_per_example(grads)
    # Both branches are finite, so that the derivative exists at a gradient of 0. NaN compares as not long, and stays.
    is_long = norms > max_norm
    share = torch.where(is_long, max_norm / torch.where(is_long, norms, 1.0), 1.0)
    return {name: torch.tensordot(share.to(grad.dtype), grad, dims=1) for name, grad in grads.items()}, norms


def gradient_of_part(state: State, part: Any, first_example: int | Tensor) -> dict[str, Tensor]:
    """Return `state.gradient(state.params)` for some of the batch's examples, with the same draws as in the batch.

    Parameters that have a gradient for the batch but not for these examples get zeros. The loss is that of the step,
    including algorithms that act before it. If several processes share the batch, each computes its own part.
    `part` has consecutive examples, from the index `first_example` on, an int or a 0-d int64 tensor.
    """
    # `regrad` is a tree node whose only child is the state from which the gradient is computed again.
    again = tree.map(
        lambda start: start.replace(batch=part, first_example=first_example),
        state.regrad,
        is_leaf=lambda node: isinstance(node, State),
    )
    grads, _ = state.replace(regrad=again).gradient(state.params, "none")
    missing = [name for name in state.grads or () if name not in grads]
    return {**grads, **{name: torch.zeros_like(state.params[name]) for name in missing}}


def own_examples(state: State) -> range:
    """Return the positions in the batch of this process's examples: all of them, unless several processes share it.

    The range may be empty.
    """
    ranks = _ranks(state)
    if ranks is None:
        return range(state.num_examples)
    share = ranks.share(state.batch, state.context.layout)
    return range(share.first_example, share.first_example + share.num_examples)


def sum_over_shares(state: State, share: range, own: T) -> T:
    """Return the sums over processes of a value, the same on all processes; with one process, the value itself."""
    ranks = _ranks(state)
    if ranks is None:
        return own
    leaves, spec = tree.flatten(own)
    return tree.unflatten(spec, ranks.reduced(leaves if share else [torch.zeros_like(leaf) for leaf in leaves], "sum"))


def _ranks(state: State) -> Ranks | None:
    return None if state.regrad is None else state.regrad.ranks


def _noisy(grad: Tensor, rng: random.Rng, deviation: float | Tensor) -> Tensor:
    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return grad + (random.normal(rng, grad, dtype=dtype) * deviation).to(grad)


def _check_layers(name: str, network: nn.Module) -> None:
    """Reject layers in which examples do not have separate gradients."""
    found: dict[str, Any] = {key: type(module).__name__ for key, module in network.named_modules() if _mixes(module)}
    if found:
        shown = [f"{key or 'the network'} ({kind})" for key, kind in found.items()]
        named = f"{', '.join(shown[:5])}{', ...' if len(shown) > 5 else ''}"
        raise ValueError(
            f"{name}: expected a network that treats each example separately, got layers that use statistics of the "
            f"whole batch: {named}. Replace them by nn.GroupNorm or nn.LayerNorm (surgery.operate replaces them all)"
        )


def _mixes(module: nn.Module) -> bool:
    """Return whether a layer normalises by statistics of the batch, or writes them into buffers."""
    if isinstance(module, _BatchNorm):
        return module.training or module.running_mean is None
    return isinstance(module, _InstanceNorm) and module.training and module.running_mean is not None
