"""Shared parts of methods that mix pairs of examples: the draw of the partner's share, checks, the mixed batch."""

from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, losses, random
from purecompose.algorithms._parts.checks import check_can_write, check_reads_targets
from purecompose.core.state import State
from purecompose.losses.targets import Mixture
from purecompose.losses.terms import for_mixtures
from purecompose.random.distributions import beta_number


def draw_share(rng: random.Rng, alpha: float | Tensor, num: int | None) -> float | Tensor:
    """Return a draw from Beta(alpha, alpha), or 0 for an alpha of 0.

    Args:
        rng: The source of the draw, which is for the whole batch or, with `num`, for each example.
        alpha: The parameter, at least 0; the value of a (0-d) tensor is not checked.
        num: The number of examples with separate draws; `None` for one draw.

    Returns:
        The draw, 0-d or (num,), float32; a number where the host can read it at once, and 0.0 if alpha is the number 0.
    """
    if not isinstance(alpha, Tensor):
        if alpha == 0:
            return 0.0
        if num is None:
            return beta_number(rng, alpha, alpha)
    shape: tuple[int, ...] = () if num is None else (num,)
    share = random.beta(for_examples(rng, num), alpha, alpha, shape)
    # The draw is NaN for an alpha of 0, which a member of a population may have.
    return torch.where(alpha > 0, share, 0) if isinstance(alpha, Tensor) else share


def for_examples(rng: random.Rng, num: int | None) -> random.Rng:
    """Return the source of draws for each of `num` examples; with `None`, for the whole batch."""
    return rng if num is None else rng.per_example(torch.arange(num, device=rng.key.device))


def mixture_for(inputs: Tensor, targets: Tensor | Mixture, where: str) -> Mixture:
    """Return the targets of these inputs as a mixture."""
    mixture = Mixture.of(targets)
    num, num_targets = inputs.shape[0], mixture.weights[0].shape[0]
    if num_targets != num:
        raise ValueError(
            f"{where}: expected inputs and targets of the same length, one target per example in the first dim, got "
            f"inputs of {num} examples and targets of {num_targets}"
        )
    return mixture


def check_mixable(
    name: str, state: State, input_field: batches.Field | None, target_field: batches.Field | None, *, by_loss: bool
) -> None:
    """Raise at INIT if a state's examples cannot be mixed, with `by_loss` also the losses of their targets.

    Raises:
        TypeError: A field is read-only, or the loss does not read the targets, or has no losses per example.
        ValueError: The input is its own target, so that there are no two losses.
    """
    check_can_write(input_field, "input_field")
    check_can_write(target_field, "target_field")
    check_reads_targets(name, state.context.loss)
    losses.check_loss(for_mixtures(state.context.loss), per_example=by_loss)
    if target_field == input_field and by_loss:
        raise ValueError(
            f"{name}: interpolate_loss=True: expected a target besides the input, got the field {input_field!r} for "
            "both: the mixed input is its own target, so there are no two losses to mix; leave interpolate_loss out"
        )


def with_examples(
    state: State, input_field: batches.Field | None, target_field: batches.Field | None, examples: tuple[Tensor, Any]
) -> State:
    """Return the state with new inputs and targets in its batch."""
    batch = batches.put(state.batch, input_field, examples[0])
    # The input of an autoencoder is its target, too: the mixed input.
    return state.replace(batch=batch if target_field == input_field else batches.put(batch, target_field, examples[1]))
