"""Draws: pure functions from a key and a shape to random numbers, each from one stream.

Element e of a draw depends only on (key, name, example, e): not on the number of elements (a longer draw starts with
the shorter one), and not on the number of examples. In a draw per example, of shape (n, *rest), e counts within `rest`.
Integers, `uniform` on [0, 1) and `bernoulli` have equal bits on every device and with every torch, in eager, compiled
and under vmap; draws that compute logarithms and cosines agree up to the last few bits. `bits` and `uniform` of a key
equal those of torch's own Philox kernels, and `normal` up to rounding.

Every draw takes a key (int64 of shape (2,)) or an `Rng` as its first argument, and creates its result on the key's
device. Two draws from one key read the same words: split the key, or name the draws.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from purecompose._support.device import constants, divided, place_of
from purecompose._support.specs import shown
from purecompose.random.keys import Rng, as_rng, key as key
from purecompose.random.philox import PRECISION, WORD, numbers


Shape = int | Sequence[int] | Tensor

_INTS = (int, torch.SymInt)


def bits(key: Tensor | Rng, shape: Shape) -> Tensor:
    """Draw random words: int64 of the given shape, uniform on [0, 2**32).

    Args:
        key: A key or an `Rng`.
        shape: Sizes of the result; for an `Rng` of n examples, (n, ...). Or a tensor with them, such as a gradient:
            if it is divided among processes, so is the draw.

    Raises:
        TypeError: `key` is not a key, or `shape` is not a shape, or a tensor of integers.
        ValueError: A size is negative, or the first is not the number of examples.

    Example:
        >>> bits(key(0), 2).tolist()
        [1713891541, 3781805453]
    """
    return laid_as(shape, drawn(key, shape, torch.uint32, "bits"))


def uniform(
    key: Tensor | Rng, shape: Shape, *, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draw uniform numbers in [low, high): 53 random bits for float64, 24 for float32, 11 for float16, 8 for bfloat16.

    Args:
        key, shape: As for `bits`.
        low: Least value, a host number; it is rounded to `dtype`.
        high: Upper bound, never returned, a host number.
        dtype: float16, bfloat16, float32 or float64.

    Raises:
        TypeError: As for `bits`, or `dtype` is not one of the four.
        ValueError: As for `bits`, or `dtype` has no number in [low, high), or cannot represent the bounds.

    Example:
        >>> uniform(key(0), 2)
        tensor([0.1559, 0.4132])
    """
    check_float(dtype, "uniform")
    is_unit = low == 0.0 and high == 1.0
    if not is_unit:
        _check_bounds(low, high, dtype)
    unit = drawn(key, shape, dtype, "uniform")
    if is_unit:
        return laid_as(shape, unit)
    # Clamped, because rounding may reach `high`, which must not be returned.
    wide = unit if PRECISION[dtype] >= 24 else unit.to(torch.float32)
    return laid_as(shape, (low + (high - low) * wide).to(dtype).clamp(max=_greatest_below(high, dtype)))


def normal(
    key: Tensor | Rng,
    shape: Shape,
    *,
    mean: float | Tensor = 0.0,
    std: float | Tensor = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw normal numbers by the Box-Muller transform.

    They are within 6.8 standard deviations of the mean, in float64 within 8.7.

    Args:
        key, shape: As for `bits`.
        mean: A number or a tensor that broadcasts with the result; gradients flow to it.
        std: As `mean`; not negative.
        dtype: float16, bfloat16, float32 or float64; the first two are computed in float32.

    Raises:
        TypeError: As for `bits`, or `dtype` is not one of the four.
        ValueError: As for `bits`, or `std` is a negative number.

    Example:
        >>> normal(key(0), (2, 3)).shape
        torch.Size([2, 3])
    """
    check_float(dtype, "normal")
    if not isinstance(std, Tensor) and not std >= 0:
        raise ValueError(f"normal: expected std >= 0, got {std}")
    rng = as_rng(key, "normal")
    sizes = _sizes(rng, shape, "normal")
    lead = () if rng.examples is None else sizes[: rng.examples.dim() - 1]
    count = math.prod(sizes[len(lead) :])
    pairs = (*lead, (count + 1) // 2)
    radius, angle = open_unit(rng, (*pairs, 2), dtype, "normal", wide=torch.float32).unbind(-1)
    standard = torch.stack(box_muller(radius, angle), dim=-1).flatten(-2)
    standard = laid_as(shape, standard.narrow(-1, 0, count).reshape(sizes))
    if isinstance(std, Tensor) or std != 1.0:
        standard = standard * std
    if isinstance(mean, Tensor) or mean != 0.0:
        standard = standard + mean
    return standard.to(dtype)


def bernoulli(key: Tensor | Rng, p: float | Tensor, shape: Shape | None = None) -> Tensor:
    """Draw bools, True with probability `p`, in steps of 2**-32; 0 means never and 1 always.

    Args:
        key: A key or an `Rng`.
        p: A probability, or a tensor of them that broadcasts with `shape`. A tensor's values are not checked.
        shape: As for `bits`; None for the shape of `p`.

    Returns:
        bool of the given shape.

    Raises:
        TypeError: As for `bits`, or `p` is a shape.
        ValueError: As for `bits`, or `p` is a number outside [0, 1].

    Example:
        >>> bernoulli(key(0), 0.5, 4).tolist()
        [False, True, True, True]
    """
    if isinstance(p, Tensor):
        # A power of two scales without rounding, and integers compare equally on every device.
        threshold = (p.to(torch.promote_types(p.dtype, torch.float32)) * 2.0**32).to(torch.int64) - 2**31
        bits = drawn(key, p.shape if shape is None else shape, torch.int32, "bernoulli")
        return laid_as(shape, bits).to(torch.int64) < threshold
    if isinstance(p, (tuple, list, torch.Size)):
        raise TypeError(f"bernoulli: expected bernoulli(key, p, shape), with a probability p, got p={p}")
    if not 0 <= p <= 1:
        raise ValueError(f"bernoulli: expected a probability in [0, 1], got p={p} ({type(p).__name__})")
    bits = laid_as(shape, drawn(key, () if shape is None else shape, torch.int32, "bernoulli"))
    threshold = int(p * 2**32) - 2**31
    # The threshold of p=1 exceeds int32.
    return bits < threshold if threshold < 2**31 else torch.ones_like(bits, dtype=torch.bool)


def randint(key: Tensor | Rng, shape: Shape, low: int | Tensor, high: int | Tensor) -> Tensor:
    """Draw integers in [low, high), the high 64 bits of the product of 64 random bits and the range.

    The probabilities of any two values differ by at most 2**-64.

    Args:
        key, shape: As for `bits`.
        low: Least value; an int, or an int64 tensor that broadcasts with `shape`. A tensor's values are not
            checked.
        high: Upper bound, never returned; as `low`.

    Returns:
        int64 of the given shape.

    Raises:
        TypeError: As for `bits`.
        ValueError: As for `bits`, or low >= high, or high - low >= 2**63.

    Example:
        >>> randint(key(0), 4, 0, 10).tolist()
        [3, 7, 9, 6]
    """
    span = high - low
    if not isinstance(span, Tensor) and not 0 < span < 2**63:
        raise ValueError(f"randint: expected low < high, less than 2**63 apart, got low={low}, high={high}")
    word = laid_as(shape, drawn(key, shape, torch.int64, "randint"))
    return low + _multiply_high(word & WORD, word >> 32 & WORD, span)


def drawn(key: Tensor | Rng, shape: Shape, dtype: torch.dtype, what: str) -> Tensor:
    """Return the first numbers of a draw's stream; `what` names the draw in errors, and for dtypes see `numbers`."""
    rng = as_rng(key, what)
    return numbers_of(rng, _sizes(rng, shape, what), dtype)


def numbers_of(rng: Rng, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the numbers of a checked draw. All draws go through this function, which `testing` listens to."""
    return numbers(rng.streams(), sizes, dtype)


def element_bits(key: Tensor | Rng, shape: Shape, num: int, what: str) -> Tensor:
    """Return `num` int32 of random bits for each element of a draw, (*shape, num); the rest as for `drawn`."""
    rng = as_rng(key, what)
    return numbers_of(rng, (*_sizes(rng, shape, what), num), torch.int32)


def open_unit(key: Tensor | Rng, shape: Shape, dtype: torch.dtype, what: str, *, wide: torch.dtype) -> Tensor:
    """Return uniform numbers on (0, 1]: float64 from 53 bits for float64; from 32, in `wide`, for narrower dtypes."""
    if dtype == torch.float64:
        upper = (drawn(key, shape, torch.int64, what) >> 11) & (2**53 - 1)
        return (upper.to(torch.float64) + 0.5) * 2.0**-53
    return (drawn(key, shape, torch.uint32, what).to(wide) + 0.5) * 2.0**-32


def box_muller(radius: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Return two independent standard normals from two uniforms; `radius` in (0, 1] avoids the logarithm of 0."""
    length = torch.sqrt(-2.0 * torch.log(radius))
    turn = 2.0 * math.pi * angle
    return length * torch.cos(turn), length * torch.sin(turn)


def check_float(dtype: torch.dtype, what: str) -> None:
    """Raise TypeError unless `dtype` is a float that draws are defined for; `what` names the draw."""
    if dtype not in PRECISION:
        names = ", ".join(str(known) for known in PRECISION)
        raise TypeError(f"{what}: expected a dtype of {names}, got {dtype}")


def _sizes(rng: Rng, shape: Shape, what: str) -> tuple[int, ...]:
    """Return the sizes of a draw, checked."""
    if isinstance(shape, _INTS):
        sizes = (shape,)
    elif isinstance(shape, Tensor) and shape.is_floating_point():  # one of integers may be meant as the sizes
        sizes = tuple(shape.shape)
    elif isinstance(shape, Sequence) and not isinstance(shape, str):
        sizes = tuple(shape)
    else:
        raise TypeError(
            f"{what}: expected a shape, an int, a sequence of ints or a floating tensor, got {shown(shape)}"
        )
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, _INTS):
            raise TypeError(f"{what}: expected a shape of ints, got {shown(size)} in {shape}")
        if size < 0:
            raise ValueError(f"{what}: expected sizes >= 0, got shape {sizes}")
    examples = rng.examples
    if examples is not None and examples.dim() > 1 and sizes[:1] != examples.shape[:1]:
        raise ValueError(
            f"{what}: expected shape[0] to be the number of examples, {examples.shape[0]}, got shape {sizes}; "
            "draw (n, ...), or use rng.per_example(None) for a draw for the whole batch"
        )
    return sizes


def laid_as(shape: Shape | None, draw: Tensor) -> Tensor:
    """Return a draw divided among processes as the tensor is that gave its shape."""
    return divided(draw, place_of(shape)) if isinstance(shape, Tensor) else draw


def _check_bounds(low: float, high: float, dtype: torch.dtype) -> None:
    greatest = torch.finfo(dtype).max
    if not low < high or max(-low, high, high - low) > greatest:
        raise ValueError(f"uniform: expected low < high within the range of {dtype}, got low={low}, high={high}")
    if _greatest_below(high, dtype) < low:
        raise ValueError(f"uniform: no {dtype} number lies in [{low}, {high}); take wider bounds or a wider dtype")


def _greatest_below(bound: float, dtype: torch.dtype) -> float:
    """Return the greatest number of `dtype` below `bound`, computed on the host from the spacing of floats there."""
    info = torch.finfo(dtype)
    mantissa, exponent = math.frexp(bound)
    if mantissa == 0.5:  # below a power of two the floats are twice as dense
        exponent -= 1
    least = info.smallest_normal * info.eps
    spacing = least if bound == 0 else max(math.ldexp(1.0, exponent - PRECISION[dtype]), least)
    return (math.ceil(bound / spacing) - 1) * spacing


def _multiply_high(lower: Tensor, upper: Tensor, span: int | Tensor) -> Tensor:
    """Return the high 64 bits of the 128-bit product of the words (upper, lower) with `span`, unsigned."""
    if isinstance(span, int) and span <= 2**31:  # no sum reaches 2**63: four operations instead of fourteen
        return (upper * span + (lower * span >> 32)) >> 32
    span_low, span_high = span & WORD, span >> 32
    cross = upper * span_low + (lower * span_low >> 32 & WORD)
    carry = lower * span_high + (cross & WORD)
    return upper * span_high + (cross >> 32 & WORD) + (carry >> 32 & WORD)


def permutation(key: Tensor | Rng, n: int | Tensor) -> Tensor:
    """Return a random order, by a stable sort of 64-bit keys: the same bits on every device.

    Args:
        key: A key or an `Rng`; the examples of one of several are ignored.
        n: Number of positions to order, or a tensor whose rows (dimension 0) are put in a random order.

    Returns:
        int64 of shape (n,), a permutation of 0 to n - 1; or the tensor's rows in such an order.

    Raises:
        TypeError: `key` is not a key, or `n` is not an int or a tensor.
        ValueError: `n` is negative, or a tensor without dimensions.

    Example:
        >>> from purecompose.random import key
        >>> sorted(permutation(key(0), 5).tolist())
        [0, 1, 2, 3, 4]
    """
    if isinstance(n, Tensor):
        if n.dim() == 0:
            raise ValueError("permutation: expected a tensor with rows, got one without dimensions; pass int(n)")
        return n.index_select(0, permutation(key, n.shape[0]).to(n.device))
    _check_size(n, "permutation: n")
    rng = _for_all(as_rng(key, "permutation"))
    return torch.sort(drawn(rng, n, torch.int64, "permutation"), stable=True).indices


def choice(key: Tensor | Rng, n: int, k: int, p: Tensor | Sequence[float] | None = None) -> Tensor:
    """Choose `k` of `n` positions without replacement, in the order of drawing.

    The distribution is that of drawing one by one with renormalised weights. A position of weight 0 comes last.

    Args:
        key: A key or an `Rng`; the examples of one of several are ignored.
        n: Number of positions.
        k: Number of positions to choose.
        p: Weights of the positions, of length n, not negative, with any sum; None for equal weights. A tensor's values
            are not checked. With weights the draw may in rare cases differ between devices.

    Returns:
        int64 of shape (k,), positions in [0, n).

    Raises:
        TypeError: `key` is not a key, or `n` or `k` is not an int.
        ValueError: `n` or `k` is negative, there are too few positions, or the weights do not fit.

    Example:
        >>> from purecompose.random import key
        >>> sorted(choice(key(0), 5, 3, p=[0.0, 1.0, 0.0, 1.0, 1.0]).tolist())
        [1, 3, 4]
    """
    _check_size(n, "choice: n")
    _check_size(k, "choice: k")
    if k > n:
        raise ValueError(f"choice: cannot choose k={k} of n={n} positions; choose fewer, or draw by randint")
    rng = _for_all(as_rng(key, "choice"))
    if p is None:
        return permutation(rng, n)[:k]
    weights = _weights(p, n, k, rng.key.device)
    units = open_unit(rng, n, torch.float64, "choice", wide=torch.float64)
    return torch.sort(-torch.log(units) / weights, stable=True).indices[:k]


def _for_all(rng: Rng) -> Rng:
    """Return the `Rng` of a draw for all examples, if it is of several."""
    return rng.per_example(None) if rng.examples is not None and rng.examples.ndim > 1 else rng


def _weights(p: Tensor | Sequence[float], n: int, k: int, device: torch.device) -> Tensor:
    if not isinstance(p, Tensor):
        values = [float(weight) for weight in p]
        if not all(0 <= weight < math.inf for weight in values):
            raise ValueError(f"choice: expected finite weights >= 0, got p={p}")
        positive = sum(weight > 0 for weight in values)
        if len(values) == n and positive < k:
            raise ValueError(f"choice: cannot choose k={k}, only {positive} of the weights are above 0")
        weights = constants(values, torch.float64, device)
    else:
        weights = p.detach().to(device=device, dtype=torch.float64)
    if weights.shape != (n,):
        raise ValueError(f"choice: expected {n} weights, one for each position, got p of shape {tuple(weights.shape)}")
    return weights


def _check_size(size: int, what: str) -> None:
    if isinstance(size, bool) or not isinstance(size, int | torch.SymInt):
        raise TypeError(f"{what}: expected an int, got {shown(size)}")
    if size < 0:
        raise ValueError(f"{what}: expected a number >= 0, got {size}")
