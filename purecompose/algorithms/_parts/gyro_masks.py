"""The masks of gyro dropout: a bank of masks, and the choice of those that are used for a batch.

Mask j depends only on (key, j), and a choice on (key, period), so neither has to be stored.
"""

from dataclasses import replace

import torch
from torch import Tensor

from purecompose import random
from purecompose._support.checks import check_number, check_whole, shown
from purecompose.random.keys import as_rng


def gyro_dropout_period(total_batches: float, sigma: int = 256, tau: int = 16) -> int:
    """Return the number of batches for which a choice of masks is used.

    This is int(total / sigma) * tau; in runs of fewer than sigma batches int(total * tau / sigma), and at least 1.

    Args:
        total_batches: The run's length in batches, above 0.
        sigma: The number of masks in the bank.
        tau: The number of masks used at a time.

    Example:
        >>> gyro_dropout_period(196 * 100), gyro_dropout_period(100), gyro_dropout_period(10)
        (1216, 6, 1)
    """
    check_number(total_batches, "gyro_dropout_period: total_batches", 0, above=True)
    check_bank("gyro_dropout_period", sigma, tau)
    return max(1, int(total_batches / sigma) * tau or int(total_batches * tau / sigma))


def gyro_dropout_mask(
    key: Tensor | random.Rng,
    shape: tuple[int, ...],
    *,
    p: float = 0.5,
    sigma: int = 256,
    tau: int = 16,
    period: int | Tensor = 0,
    groups: Tensor | None = None,
    feature_dim: int | None = None,
) -> Tensor:
    """Return the masks of a batch's rows, in which True elements are kept.

    Args:
        key: The key of the layer; use different keys for different layers.
        shape: The shape (N, ...) of the layer's inputs.
        p: The probability of dropping an element, in [0, 1).
        sigma: The number of masks in the bank, at least 1.
        tau: The number of masks used at a time, in [1, sigma].
        period: The number of the choice, from 0: an int, or a 0-d int64 tensor.
        groups: (N,), int64, below tau: the index of each row's mask among the chosen ones, instead of tau groups of
            consecutive rows. Values are not checked.
        feature_dim: The only dimension, at least 1 or counted from the end, along which masks vary: with 1, whole
            channels of (N, C, H, W) are dropped, with -1 whole features of (N, length, features). By default each
            element is dropped independently, as in `nn.Dropout`.

    Returns:
        The masks, bool, of the given shape; with `feature_dim` (N, 1, ..., features, ..., 1), which broadcasts to it.

    Raises:
        TypeError, ValueError: No key, or a setting of the wrong type or out of range.

    Example:
        >>> from purecompose.random import key
        >>> mask = gyro_dropout_mask(key(0), (6, 100), tau=2)
        >>> bool((mask[:3] == mask[0]).all()), bool((mask[3:] == mask[3]).all()), bool((mask[0] == mask[3]).all())
        (True, True, False)
    """
    where = "gyro_dropout_mask"
    check_probability(f"{where}: p", p)
    check_bank(where, sigma, tau)
    check_feature_dim(where, feature_dim)
    rng = as_rng(key, where)
    if groups is None:
        groups = torch.arange(shape[0], device=rng.key.device) * tau // max(shape[0], 1)  # consecutive rows
    return chosen_masks(rng, shape, p, sigma, tau, period, groups, feature_dim)


def gyro_drop(
    key: Tensor | random.Rng,
    inputs: Tensor,
    *,
    p: float = 0.5,
    sigma: int = 256,
    tau: int = 16,
    period: int | Tensor = 0,
    groups: Tensor | None = None,
    feature_dim: int | None = None,
) -> Tensor:
    """Apply a mask in training: inputs * mask / (1 - p).

    Args:
        key: As for `gyro_dropout_mask`.
        inputs: (N, ...), floating.
        p: The probability of dropping an element; with 0 the inputs are returned.
        sigma, tau, period, groups, feature_dim: As for `gyro_dropout_mask`.

    Returns:
        A tensor of the shape and dtype of `inputs`.

    Raises:
        TypeError: Inputs that are not a floating tensor, no key, or a setting of the wrong type.
        ValueError: Inputs without rows, or a setting out of range.

    Example:
        >>> from purecompose.random import key
        >>> gyro_drop(key(0), torch.ones(2, 4), tau=2).unique()
        tensor([0., 2.])
    """
    if not isinstance(inputs, Tensor) or not (inputs.is_floating_point() or inputs.is_complex()):
        raise TypeError(f"gyro_drop: inputs: expected a tensor (N, ...) of floats, got {shown(inputs)}")
    if not inputs.ndim:
        raise ValueError("gyro_drop: inputs: expected (N, ...), a row for each example, got a 0-d tensor")
    shape = tuple(inputs.shape)
    mask = gyro_dropout_mask(
        key, shape, p=p, sigma=sigma, tau=tau, period=period, groups=groups, feature_dim=feature_dim
    )
    return inputs if p == 0 else dropped(inputs, mask, p)


def chosen_masks(
    rng: random.Rng,
    shape: tuple[int, ...],
    p: float,
    sigma: int,
    tau: int,
    period: int | Tensor,
    groups: Tensor,
    feature_dim: int | None,
) -> Tensor:
    """Do what `gyro_dropout_mask` does, for checked settings and given groups."""
    root = rng.per_example(None)
    choosing = replace(root, key=random.fold_in(root.key, period)).named("choice")
    chosen = random.choice(choosing, sigma, tau)
    # The mask's number in the bank replaces the example's number, so that only the chosen masks are drawn.
    masks = random.bernoulli(root.named("bank").per_example(chosen), 1 - p, (tau, *_own_shape(shape, feature_dim)))
    return masks.index_select(0, groups.to(masks.device))


def _own_shape(shape: tuple[int, ...], feature_dim: int | None) -> tuple[int, ...]:
    """Return the shape of one mask, which broadcasts to the shape of one row."""
    if feature_dim is None:
        return shape[1:]
    dim = feature_dim if feature_dim >= 0 else len(shape) + feature_dim
    if not 1 <= dim < len(shape):
        raise ValueError(
            f"gyro_dropout: feature_dim={feature_dim}: expected one of the dims 1 to {len(shape) - 1} of inputs of "
            f"shape {shape}; leave it out to drop single elements"
        )
    return tuple(size if at == dim else 1 for at, size in enumerate(shape) if at)


def dropped(inputs: Tensor, mask: Tensor, p: float) -> Tensor:
    """Return inputs * mask / (1 - p)."""
    return inputs * mask / (1 - p)


def check_probability(role: str, p: float) -> None:
    """Raise a `TypeError` or `ValueError` unless it is a number in [0, 1)."""
    check_number(p, role, 0, 1, below=True, hint="it is the probability of dropping; 1 would leave nothing")


def check_bank(where: str, sigma: int, tau: int) -> None:
    """Raise a `TypeError` or `ValueError` unless 1 <= tau <= sigma."""
    check_whole(sigma, f"{where}: sigma", 1, hint="it is the number of masks in the bank")
    check_whole(tau, f"{where}: tau", 1, hint="it is the number of masks that share a batch")
    if tau > sigma:
        raise ValueError(
            f"{where}: expected tau <= sigma, got tau={tau}, sigma={sigma}: a batch cannot have more different masks "
            "than the bank; increase sigma"
        )


def check_feature_dim(where: str, feature_dim: int | None) -> None:
    """Raise a `TypeError` or `ValueError` unless it is `None` or a nonzero dimension."""
    if feature_dim is not None:
        check_whole(feature_dim, f"{where}: feature_dim", hint="it names a dimension of a layer's inputs")
        if feature_dim == 0:
            raise ValueError(f"{where}: feature_dim=0 is the batch: expected another dimension, such as 1 or -1")
