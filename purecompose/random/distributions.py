"""Draws from further distributions: exponential, gamma and beta.

All are computed in float64 and rounded at the end. The rejection in the gamma draws is a discrete choice: in
float64, rounding differences between devices practically never change it. No gradient flows to the parameters of
gamma and beta.

References:
    George Marsaglia, Wai Wan Tsang: A Simple Method for Generating Gamma Variables. ACM TOMS 26(3), 2000.
"""

import math
import struct

import torch
from torch import Tensor

from purecompose._support.internals import is_readable
from purecompose._support.specs import check_number
from purecompose.random.draws import Shape, box_muller, check_float, element_bits, laid_as, open_unit
from purecompose.random.keys import Rng
from purecompose.random.philox import WORD


# Words of one gamma draw: 4 Philox blocks, each with one pair for the Box-Muller transform (two normals) and two
# uniforms. Of the eight uniforms, seven are tests of acceptance and one is the boost. All seven fail once in 10**9
# draws; such a draw returns the mode of the proposal.
_GAMMA_WORDS = 16
_ROUNDS = 7


def exponential(
    key: Tensor | Rng, shape: Shape, *, rate: float | Tensor = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draw exponential numbers: `-log(u) / rate`, at most 22.9 / rate (float64: 37.5 / rate).

    Args:
        key, shape: As for `bits`.
        rate: Events per unit; a number, or a tensor that broadcasts with `shape`: its values are not checked,
            and gradients flow to it.
        dtype: float16, bfloat16, float32 or float64.

    Raises:
        TypeError: As for `uniform`.
        ValueError: As for `bits`, or `rate` is a number that is not positive.

    Example:
        >>> from purecompose.random import key
        >>> exponential(key(0), 3, rate=2.0).shape
        torch.Size([3])
    """
    check_float(dtype, "exponential")
    if not isinstance(rate, Tensor):
        check_number(rate, "exponential: rate", 0, above=True)
    unit = laid_as(shape, open_unit(key, shape, dtype, "exponential", wide=torch.float64))
    return (-torch.log(unit) / rate).to(dtype)


def gamma(
    key: Tensor | Rng, concentration: float | Tensor, shape: Shape | None = None, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draw gamma numbers of scale 1, by Marsaglia and Tsang's method with a fixed number of rounds.

    For a concentration below 1, a draw for `concentration + 1` is multiplied by `u ** (1 / concentration)`, in
    logarithms. Results below the least normal number of `dtype` are returned as that number, never as 0.

    Args:
        key: A key or an `Rng`.
        concentration: The shape parameter, positive; a number or a tensor that broadcasts with `shape`, whose
            values are not checked.
        shape: As for `bits`; None for the shape of `concentration`.
        dtype: float16, bfloat16, float32 or float64.

    Raises:
        TypeError: As for `uniform`.
        ValueError: As for `bits`, or the concentration is a number that is not positive.

    Example:
        >>> from purecompose.random import key
        >>> gamma(key(0), 0.05, 3).shape
        torch.Size([3])
    """
    check_float(dtype, "gamma")
    alpha = _parameter(concentration, "gamma: concentration")
    own = alpha.shape if isinstance(alpha, Tensor) else ()
    bits = element_bits(key, own if shape is None else shape, _GAMMA_WORDS, "gamma")
    if _is_one_on_host(bits, alpha):
        log = torch.full((), _log_gamma_of_one(bits.tolist(), float(alpha)), dtype=torch.float64)
    else:
        log = _log_gamma(bits, _on(bits, alpha))
    # Clamped after rounding, because a positive float64 number may be 0 in a narrower dtype.
    return laid_as(shape, torch.exp(log).to(dtype).clamp(min=torch.finfo(dtype).smallest_normal))


def beta(
    key: Tensor | Rng,
    a: float | Tensor,
    b: float | Tensor,
    shape: Shape | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw beta numbers: `x / (x + y)` of two gamma draws.

    They are computed from logarithms, and never NaN, however small `a` and `b` are. 0 and 1 occur where the value
    rounds to them.

    Args:
        key: A key or an `Rng`.
        a: Weight of 1, positive; a number or a tensor that broadcasts with `shape`, whose values are not
            checked.
        b: Weight of 0, as `a`.
        shape: As for `bits`; None for the broadcast shape of `a` and `b`.
        dtype: float16, bfloat16, float32 or float64.

    Returns:
        A tensor of `dtype` and the given shape, in [0, 1].

    Raises:
        TypeError: As for `uniform`.
        ValueError: As for `bits`, or `a` or `b` is a number that is not positive.

    Example:
        >>> from purecompose.random import key
        >>> beta(key(0), 0.2, 0.2).shape
        torch.Size([])
    """
    check_float(dtype, "beta")
    first, second = _parameter(a, "beta: a"), _parameter(b, "beta: b")
    if shape is None:
        shape = torch.broadcast_shapes(*(alpha.shape for alpha in (first, second) if isinstance(alpha, Tensor)))
    draw = _beta(key, first, second, shape)
    return laid_as(shape, draw.to(dtype) if isinstance(draw, Tensor) else torch.full((), draw, dtype=dtype))


def beta_number(rng: Rng, a: float, b: float) -> float | Tensor:
    """Return `beta(rng, a, b)`: a number where the host can read it at once, otherwise 0-d float32."""
    draw = _beta(rng, a, b, ())
    return draw.to(torch.float32) if isinstance(draw, Tensor) else struct.unpack("f", struct.pack("f", draw))[0]


def _beta(key: Tensor | Rng, a: float | Tensor, b: float | Tensor, shape: Shape) -> float | Tensor:
    """Return float64 beta numbers of a shape; one of shape () as a number, where the host can read its bits."""
    bits = element_bits(key, shape, 2 * _GAMMA_WORDS, "beta")
    if _is_one_on_host(bits, a, b):
        words = bits.tolist()
        log_first = _log_gamma_of_one(words[:_GAMMA_WORDS], float(a))
        log_second = _log_gamma_of_one(words[_GAMMA_WORDS:], float(b))
        return _sigmoid(log_first - log_second)
    alphas = torch.stack(torch.broadcast_tensors(_on(bits, a), _on(bits, b)), dim=-1)
    log_first, log_second = _log_gamma(bits.unflatten(-1, (2, _GAMMA_WORDS)), alphas).unbind(-1)
    return torch.sigmoid(log_first - log_second)


def _log_gamma(bits: Tensor, alpha: Tensor) -> Tensor:
    """Return logarithms of gamma numbers, float64 (...), from bits (..., 16) and concentrations that broadcast."""
    units = (((bits.to(torch.int64) & WORD).to(torch.float64) + 0.5) * 2.0**-32).unflatten(-1, (4, 4))
    normals = torch.cat(box_muller(units[..., 0], units[..., 1]), dim=-1)
    log_uniforms = torch.log(torch.cat((units[..., 2], units[..., 3]), dim=-1))

    is_small = alpha < 1
    scale = torch.where(is_small, alpha + 1, alpha) - 1 / 3
    base = 1 + normals * torch.rsqrt(9 * scale).unsqueeze(-1)
    log_cubes = 3 * torch.log(base.clamp(min=1e-300))
    slack = 0.5 * normals**2 + scale.unsqueeze(-1) * (1 - base**3 + log_cubes) - log_uniforms
    is_accepted = ((base > 0) & (slack > 0))[..., :_ROUNDS]

    earliest = is_accepted.to(torch.uint8).argmax(-1, keepdim=True)
    chosen = torch.where(is_accepted.any(-1), log_cubes.gather(-1, earliest).squeeze(-1), 0.0)
    # The bound keeps the quotient finite for the smallest floats; the difference of two infinities would be NaN.
    boost = torch.where(is_small, log_uniforms[..., _ROUNDS] / alpha.clamp(min=1e-300), 0.0)
    return torch.log(scale) + chosen + boost


def _is_one_on_host(bits: Tensor, *alphas: float | Tensor) -> bool:
    """Return whether the bits are those of one draw, computed at once in Python: sixty operations cost 0.1 ms."""
    if bits.dim() > 1 or not is_readable(bits):
        return False
    for alpha in alphas:
        if isinstance(alpha, Tensor) and not is_readable(alpha):
            return False
        if not 0 <= float(alpha) < 1e300:  # Python's functions would raise errors
            return False
    return True


def _log_gamma_of_one(bits: list[int], alpha: float) -> float:
    """Return `_log_gamma` of one draw, from its bits on the host."""
    is_small = alpha < 1
    scale = (alpha + 1 if is_small else alpha) - 1 / 3
    chosen = 0.0
    for index in range(_ROUNDS):
        half, block = divmod(index, 4)
        radius, angle, *others = _units(bits[4 * block : 4 * block + 4])
        turn = 2.0 * math.pi * angle
        normal = math.sqrt(-2.0 * math.log(radius)) * (math.sin(turn) if half else math.cos(turn))
        base = 1 + normal / math.sqrt(9 * scale)
        if base > 0:
            log_cube = 3 * math.log(base)
            if 0.5 * normal**2 + scale * (1 - base**3 + log_cube) - math.log(others[half]) > 0:
                chosen = log_cube
                break
    boost = math.log(*_units(bits[-1:])) / max(alpha, 1e-300) if is_small else 0.0
    return math.log(scale) + chosen + boost


def _units(bits: list[int]) -> list[float]:
    return [((word & WORD) + 0.5) * 2.0**-32 for word in bits]


def _sigmoid(x: float) -> float:
    small = math.exp(-abs(x))
    return (1 if x >= 0 else small) / (1 + small)


def _parameter(value: float | Tensor, what: str) -> float | Tensor:
    """Return a parameter: a checked number, or a tensor of float64 without gradient."""
    if isinstance(value, Tensor):
        return value.detach().to(torch.float64)
    check_number(value, what, 0, above=True)
    return value


def _on(bits: Tensor, value: float | Tensor) -> Tensor:
    """Return a parameter as a tensor, a number on the device of the bits."""
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64, device=bits.device)
