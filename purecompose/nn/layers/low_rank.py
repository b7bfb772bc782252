"""Matrices and convolutions as products of two thinner ones: the closest in their weights, or in their outputs on data.

Closest in the weights: the truncated singular value decomposition. Closest on data, with inputs X (n, in) and wanted
outputs Y (n, out):

    minimise  || Y - (X A B + b) ||      over A (in, k), B (k, out) and b (out,)

in turns: B is the least-squares solution of X A B = Y, and A = S B^+, where S is the least-squares solution of X S = Y.
Each turn is optimal given the other factor, so that the error never grows. If there is a bias, data are centred first,
which makes the bias optimal for each A B.

References:
    Xiangyu Zhang, Jianhua Zou, Kaiming He, Jian Sun: Accelerating Very Deep Convolutional Networks for Classification
    and Detection. TPAMI 2016. https://arxiv.org/abs/1505.06798
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


Pair = int | tuple[int, int]


class LowRankSolution(NamedTuple):
    """Two factors that replace a layer, or one."""

    first: Tensor
    """First factor, (in, k), or (k, in, h, w) for a convolution; without a second, k is the number of outputs."""
    second: Tensor | None
    """Second factor, (k, out), or (out, k, 1, 1); `None` if one factor takes no more multiplications than two."""
    bias: Tensor | None
    """Bias, (out,); `None` if there was none."""
    rank: int
    """k, or -1 if nothing was factorized: `first` is the only factor, or the given factors were kept."""
    nmse: float
    """Squared error divided by the outputs' squared deviation from their mean, or without bias from 0."""


def max_latent(module: nn.Linear | nn.Conv2d) -> int:
    """Return the greatest width between two factors with which they take fewer multiplications than the layer does.

    Example:
        >>> max_latent(nn.Linear(8, 8)), max_latent(nn.Conv2d(8, 8, 3))
        (3, 7)
    """
    out, fan_in = module.weight.shape[0], module.weight[0].numel()
    return math.ceil(fan_in * out / (fan_in + out) - 1)


def factorizing_could_speedup(module: nn.Linear | nn.Conv2d, latent: int) -> bool:
    """Return whether two factors with this width between them take fewer multiplications than the layer does.

    Args:
        module: The layer.
        latent: Width between the factors.

    Example:
        >>> factorizing_could_speedup(nn.Linear(8, 8), 3), factorizing_could_speedup(nn.Linear(8, 8), 4)
        (True, False)
    """
    return latent <= max_latent(module)


def split_weight(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return two factors whose product is the closest to a matrix among all of a given rank, by its singular values.

    Args:
        weight: (out, in), floating.
        rank: k, from 1 to min(out, in).

    Returns:
        (k, in) and (out, k), contiguous, each scaled by the square roots of the singular values. If a singular value is
        almost zero, the first factor has a row of the usual norm and only the second is small: if both were zero, they
        would have no gradient and would never train.

    Example:
        >>> first, second = split_weight(torch.eye(3), 3)
        >>> torch.allclose(second @ first, torch.eye(3))
        True
    """
    left, values, right = torch.linalg.svd(_exact(weight), full_matrices=False)
    values = values[:rank]
    scales = _scales(values)
    first, second = scales.unsqueeze(1) * right[:rank], left[:, :rank] * (values / scales)
    return first.to(weight).contiguous(), second.to(weight).contiguous()


def factorize_matrix(
    inputs: Tensor,
    outputs: Tensor,
    first: Tensor,
    second: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    rank: float = 0.25,
    n_iters: int = 3,
) -> LowRankSolution:
    """Return the product of a given rank that is closest to some outputs on some inputs, starting from the given
    factors.

    Args:
        inputs: X, (n, in), floating.
        outputs: Y, (n, out), including the bias.
        first: The matrix, (in, out), or the first factor of a product, (in, j).
        second: The second factor, (j, out).
        bias: (out,); its values do not matter. If it is given, a bias is fitted, else there is none.
        rank: k, a number of at least 1, or below 1 a fraction of the input's width, at most j.
        n_iters: Number of turns for each factor. 0 keeps the singular value decomposition of the given product, and
            only fits the bias.

    Returns:
        The factors and the bias, in the dtype and on the device of `first`. If k is at least the width of inputs or
        outputs, there is one factor, the least-squares solution; if k is at least j, the given factors are returned.
        Computed in float64.

    Raises:
        RuntimeError: Inputs, outputs or a factor are not matrices, or their shapes do not match.
        ValueError: The rank is not above 0, or the number of turns is negative.

    Example:
        >>> inputs, weight = torch.eye(4), torch.diag(torch.tensor([3.0, 2.0, 0.0, 0.0]))
        >>> solution = factorize_matrix(inputs, inputs @ weight, weight, rank=2)
        >>> solution.first.shape, solution.rank, solution.nmse < 1e-9
        (torch.Size([4, 2]), 2, True)
    """
    _check_matrices(inputs=inputs, outputs=outputs, first=first, second=second)
    if n_iters < 0:
        raise ValueError(f"factorize_matrix: n_iters: expected an int >= 0, got {n_iters!r}")
    x, y, a = _exact(inputs), _exact(outputs), _exact(first)
    b = None if second is None else _exact(second)
    width = first.shape[1] if second is not None else min(first.shape)
    k = _rank(rank, first.shape[0], width)
    has_bias = bias is not None
    if k >= x.shape[1] or k >= y.shape[1]:
        return _solved(_least_squares(*_centred(x, y, has_bias)), None, -1, x, y, has_bias, first)
    if b is not None and k >= width:
        given = None if bias is None else _exact(bias)
        return LowRankSolution(first, second, bias, -1, _nmse(x, y, a @ b, given))
    # A matrix (in, out) here is the transpose of a layer's weight, and so are its factors.
    found = split_weight((a if b is None else a @ b).T, k)
    a, b = found[0].T, found[1].T
    x_c, y_c = _centred(x, y, has_bias)
    best = _least_squares(x_c, y_c)
    for _ in range(n_iters):
        b = _least_squares(x_c @ a, y_c)
        a = _least_squares(b.T, best.T).T
    found = split_weight((a @ b).T, k)  # the same product, in factors that can be trained
    a, b = found[0].T, found[1].T
    return _solved(a, b, k, x, y, has_bias, first)


def factorize_conv2d(
    inputs: Tensor,
    first: Tensor,
    second: Tensor | None = None,
    *,
    rank: float = 0.25,
    first_bias: Tensor | None = None,
    second_bias: Tensor | None = None,
    n_iters: int = 3,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> LowRankSolution:
    """Return the product of a given rank that is closest to a convolution on the patches of some inputs.

    Args:
        inputs: (N, C, H, W), floating.
        first: The weight, (out, C, h, w), or the first weight of a product, (j, C, h, w).
        second: The second weight of a product, (out, j, 1, 1).
        rank: As in `factorize_matrix`; below 1 a fraction of C h w.
        first_bias: (out,), or (j,) for a product.
        second_bias: (out,), only for a product.
        n_iters: As in `factorize_matrix`.
        stride, padding, dilation: Settings of the (first) convolution, with zeros around the inputs.
        groups: Has to be 1.

    Returns:
        Factors (k, C, h, w) and (out, k, 1, 1), and one bias after both, if there was any.

    Raises:
        NotImplementedError: The convolution has several groups.
        RuntimeError: There is a second bias without a second factor, or shapes do not match.
        ValueError: As for `factorize_matrix`.
    """
    if groups != 1:
        raise NotImplementedError(f"factorize_conv2d: expected groups=1, got {groups}; factorize each group")
    if second is None and second_bias is not None:
        raise RuntimeError("factorize_conv2d: got second_bias without second; give both, or first_bias only")
    kernel = (first.shape[2], first.shape[3])
    patches = F.unfold(_exact(inputs), kernel, dilation=dilation, padding=padding, stride=stride)
    x = patches.transpose(1, 2).flatten(0, 1)
    a = _exact(first).flatten(1).T
    b = None if second is None else _exact(second).flatten(1).T
    bias = None if first_bias is None else _exact(first_bias)
    if b is not None:
        bias = None if bias is None else bias @ b
        if second_bias is not None:
            bias = _exact(second_bias) if bias is None else bias + _exact(second_bias)
    y = x @ a if b is None else x @ a @ b
    y = y if bias is None else y + bias
    found = factorize_matrix(x, y, a, b, bias, rank=rank, n_iters=n_iters)
    return LowRankSolution(
        found.first.T.reshape(-1, *first.shape[1:]).to(first),
        None if found.second is None else found.second.T[:, :, None, None].to(first),
        None if found.bias is None else found.bias.to(first),
        found.rank,
        found.nmse,
    )


def _exact(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()


def _scales(values: Tensor) -> Tensor:
    """Return the norms of the first factor's rows, from singular values in descending order."""
    is_there = values > 1e-6 * values[0]
    # For a matrix of zeros, the scale is that of a new layer's initial weights.
    usual = values[is_there].sqrt().mean() if is_there.any() else values.new_tensor(3**-0.5)
    return torch.where(is_there, values.sqrt(), usual)


def _rank(rank: float, in_width: int, width: int) -> int:
    if not 0 < rank < math.inf:
        raise ValueError(f"factorize_matrix: rank: expected a number > 0, got {rank!r} ({type(rank).__name__})")
    return max(1, int(rank)) if rank >= 1 else min(max(1, int(rank * in_width)), width)


def _centred(x: Tensor, y: Tensor, has_bias: bool) -> tuple[Tensor, Tensor]:
    return (x - x.mean(0), y - y.mean(0)) if has_bias else (x, y)


def _least_squares(x: Tensor, y: Tensor) -> Tensor:
    """Return the least-squares solution of smallest norm; x may be singular, since patches overlap and units die."""
    if x.device.type == "cpu":
        return torch.linalg.lstsq(x, y, driver="gelsd").solution
    return torch.linalg.pinv(x) @ y


def _solved(
    a: Tensor, b: Tensor | None, rank: int, x: Tensor, y: Tensor, has_bias: bool, like: Tensor
) -> LowRankSolution:
    product = a if b is None else a @ b
    bias = (y - x @ product).mean(0) if has_bias else None
    nmse = _nmse(x, y, product, bias)
    return LowRankSolution(
        a.to(like), None if b is None else b.to(like), None if bias is None else bias.to(like), rank, nmse
    )


def _nmse(x: Tensor, y: Tensor, product: Tensor, bias: Tensor | None) -> float:
    left = y - x @ product - (0 if bias is None else bias)
    total = (y if bias is None else y - y.mean(0)).square().sum().item()
    # If the outputs do not vary, the total is 0, and the error is not divided.
    return left.square().sum().item() / (total or 1.0)


def _check_matrices(**tensors: Tensor | None) -> None:
    found = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in found.items():
        if tensor.ndim != 2:
            raise RuntimeError(f"factorize_matrix: {name}: expected a matrix, got shape {tuple(tensor.shape)}")
    x, y, first = (found[name] for name in ("inputs", "outputs", "first"))
    second = found.get("second")
    last = first if second is None else second
    fits = x.shape[0] == y.shape[0] and x.shape[1] == first.shape[0] and last.shape[1] == y.shape[1]
    if not fits or (second is not None and first.shape[1] != second.shape[0]):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in found.items())
        raise RuntimeError(
            f"factorize_matrix: expected inputs (n, in), outputs (n, out) and first (in, out), or first (in, j) and "
            f"second (j, out), got {shapes}"
        )
