"""Comparison of gradients with finite differences."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from purecompose import random, tree
from purecompose.testing.law import Broken


Point = dict[str, dict[str, Tensor]]
"""Leaves by field and name: {"hparams": ..., "params": ...}."""

# The quotient's error is about EPS**2 times a third derivative, plus 1e-16 / EPS from rounding.
_EPS, _RELATIVE, _ABSOLUTE = 1e-5, 1e-5, 1e-8
# Not powers of two, with which the error of rounding to float32 may be proportional at each.
_SIZES = (_EPS, 0.59 * _EPS, 0.37 * _EPS, 0.23 * _EPS)


def check_derivative(
    loss: Callable[[Point], Tensor],
    point: Point,
    grads: Point,
    *,
    seed: int,
    what: str,
    by: str,
    value: Tensor | None = None,
) -> bool:
    """Compare a gradient with finite differences along a random direction.

    Args:
        loss: The function, which returns a 0-d float64 tensor.
        point: The point.
        grads: The gradient at the point.
        seed: Seed of the direction.
        what: Description of the derivative.
        by: Description of how the gradient was computed.
        value: The function's value at the point, if it is known.

    Returns:
        True if the gradient is correct, False if finite differences cannot decide it.
    """
    direction = _direction(point, seed)
    found = _slopes(loss, point, grads, direction)
    if _is_close(*found):
        return True
    value, gap = loss(point) if value is None else value, abs(found[0] - found[1])
    if not value.isfinite() or not _is_smooth(
        lambda size: loss(_moved(point, direction, size)).detach().item(), value.detach().item(), gap
    ):
        return False
    halves = [_slopes(loss, point, grads, half)[1] for half in _halves(direction)]
    if abs(sum(halves) - found[1]) > 0.1 * gap:  # no derivative exists, since the slopes along directions do not add up
        return False
    for part in _parts(direction):
        by_leaf = _slopes(loss, point, grads, part)
        if not _is_close(*by_leaf):
            path, found = as_path(next(iter(tree.leaves_with_paths(part)))), by_leaf
            break
    else:
        path = "params"  # no single leaf is wrong, only the sum of small errors
    raise Broken(tree.Difference(path, what, *found), (by, "by finite differences"))


def _direction(point: Point, seed: int) -> Point:
    """Return a direction of 1 along each hparam, with a random direction of norm 1 in the params."""
    # Keyed draws, since this may be called within a step, where generators raise.
    rng = random.Rng(random.key(seed))
    drawn = {
        name: random.normal(rng.named(name), tuple(param.shape), dtype=torch.float64).to(param)
        for name, param in point["params"].items()
    }
    norm = tree.global_norm(drawn)
    along = {name: torch.ones_like(value) for name, value in point.get("hparams", {}).items()}
    return {"hparams": along, "params": {name: value / norm for name, value in drawn.items()}}


def _slopes(loss: Callable[[Point], Tensor], point: Point, grads: Point, direction: Point) -> tuple[float, float]:
    """Return the derivative along a direction, by the gradient and by the central difference."""
    by_grad = sum(
        (grads[field][name] * value).sum().detach().item()
        for field in direction
        for name, value in direction[field].items()
    )
    ahead, behind = (loss(_moved(point, direction, size)).detach().item() for size in (_EPS, -_EPS))
    return by_grad, (ahead - behind) / (2 * _EPS)


def _is_close(first: float, second: float) -> bool:
    return abs(first - second) <= _RELATIVE * max(abs(first), abs(second)) + _ABSOLUTE


def _is_smooth(loss_at: Callable[[float], float], value: float, gap: float) -> bool:
    """Return whether difference quotients are accurate enough to attribute a gap to the gradient.

    With a jump or kink near the point, a large third derivative, or rounding to float32 inside the function, the
    quotient changes with the step size. At a kink in the point itself, the one-sided quotients differ by an amount that
    does not shrink with the step size, as it would for a smooth function.
    """
    quotients, jumps = [], []
    for size in _SIZES:
        ahead, behind = loss_at(size), loss_at(-size)
        quotients.append((ahead - behind) / (2 * size))
        jumps.append(abs(ahead - 2 * value + behind) / size)
    if any(not abs(quotient - quotients[0]) <= 0.1 * gap for quotient in quotients):
        return False
    return not (jumps[0] > 0.1 * gap and jumps[1] > 0.8 * jumps[0])


def _halves(direction: Point) -> tuple[Point, Point]:
    """Return the direction in two parts, of every other element each."""

    def half(value: Tensor, start: int) -> Tensor:
        taken = torch.arange(value.numel(), device=value.device).reshape(value.shape) % 2 == start
        return torch.where(taken, value, 0)

    even, odd = (
        {field: {name: half(v, start) for name, v in leaves.items()} for field, leaves in direction.items()}
        for start in (0, 1)
    )
    return even, odd


def _moved(point: Point, direction: Point, size: float) -> Point:
    return {
        field: {
            name: value + size * direction[field][name] if name in direction[field] else value
            for name, value in point[field].items()
        }
        for field in point
    }


def _parts(direction: Point) -> Iterator[Point]:
    """Yield the direction restricted to one leaf at a time."""
    for field, leaves in direction.items():
        for name, value in leaves.items():
            yield {field: {name: value}, **{other: {} for other in direction if other != field}}


def as_path(path: str) -> str:
    """Return a key path in the form of state fields, `params['0.weight']` for `['params']['0.weight']`."""
    field, rest = path[2:].split("']", 1)
    return field + rest
