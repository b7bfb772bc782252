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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from purecompose._support.checks import suggests_keywords
from purecompose.nn.layers._forms import recast


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


@suggests_keywords()
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


@suggests_keywords()
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


@suggests_keywords()
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


class _Factorized(nn.Module):
    """A layer and a second one without kernel or stride, whose product is the closest one to a given layer."""

    first: Any
    second: Any

    def __init__(self, layer: nn.Linear | nn.Conv2d, latent: int, where: str) -> None:
        super().__init__()
        weight = layer.weight.detach()
        full = min(weight.shape[0], weight[0].numel())
        if not 1 <= latent <= full:
            raise ValueError(f"{where}: expected an int in [1, {full}], got {latent!r} ({type(latent).__name__})")
        self.first, self.second = self._empty(layer, latent, weight.shape[0])
        first, second = split_weight(weight.flatten(1), latent)
        is_trained = layer.weight.requires_grad
        self.first.weight = nn.Parameter(first.view(latent, *weight.shape[1:]), is_trained)
        self.second.weight = nn.Parameter(second.view(*second.shape, *[1] * (weight.ndim - 2)), is_trained)
        self.second.bias = layer.bias

    @staticmethod
    def _empty(layer: Any, latent: int, out: int) -> tuple[Any, Any]:
        """Return two layers without bias on meta, so that no values are drawn; the weights are set afterwards."""
        raise NotImplementedError

    def _solution(self, input: Tensor, rank: int, n_iters: int) -> LowRankSolution:
        """Return smaller factors whose outputs on an input are closest, in the form of the layers' weights."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """The product of the factors, in the shape of the given layer's weight."""
        return (self.second.weight.flatten(1) @ self.first.weight.flatten(1)).view(-1, *self.first.weight.shape[1:])

    @property
    def bias(self) -> Tensor | None:
        """(out,), or `None`."""
        return self.second.bias

    def forward(self, input: Tensor) -> Tensor:
        """Map an input to the shape of the given layer's output."""
        return self.second(self.first(input))

    def with_rank(self, input: Tensor, rank: float, *, n_iters: int = 3) -> nn.Module:
        """Return a layer with a smaller k whose outputs on an input are closest to this layer's; this layer is not
        modified.

        Args:
            input: An input of the layer.
            rank: A number of at least 1, or below 1 a fraction of the input's width, for a convolution of the size of
                a patch.
            n_iters: As in `factorize_matrix`.

        Returns:
            A layer of this class; the layer itself if k does not change.

        Raises:
            ValueError: The rank is not above 0, or k is above the layer's.
        """
        width = self.first.weight.shape[0]
        # Written so that NaN and infinity are rejected before they are rounded.
        if not 0 < rank < width + 1:
            raise ValueError(
                f"{type(self).__name__}.with_rank: expected a rank above 0, at most the layer's {width}, got {rank!r}"
            )
        k = int(rank) if rank >= 1 else min(max(1, int(rank * self.first.weight[0].numel())), width)
        return self if k == width else self._with_weights(self._solution(input.detach(), k, n_iters))

    def _with_weights(self, solution: LowRankSolution) -> nn.Module:
        """Return the layer with other factors, or a plain layer if there is only one."""
        first, second = self._empty(self.first, solution.first.shape[0], self.second.weight.shape[0])
        is_trained, bias = self.first.weight.requires_grad, _like(self.bias, solution.bias)
        first.weight = nn.Parameter(solution.first.contiguous(), is_trained)
        if solution.second is None:
            first.bias = bias
            return first.train(self.training)
        second.weight = nn.Parameter(solution.second.contiguous(), is_trained)
        second.bias = bias
        new = recast(self, type(self))
        new.first, new.second = first, second
        return new.train(self.training)


class FactorizedLinear(_Factorized):
    """Layer from (..., in) to (..., k) to (..., out): the closest approximation of the given layer with rank k.

    `weight` and `bias` are available as in a linear layer; the weight is the factors' product, computed on access.

    Args:
        linear: The layer. Its bias is reused, its weight is read.
        latent_features: k, from 1 to the smaller side of the weight, at which the approximation is exact.

    Attributes:
        first: (in, k), without bias.
        second: (k, out), with the layer's bias.

    Raises:
        ValueError: k is out of range.

    Example:
        >>> linear = nn.Linear(64, 64)
        >>> sum(param.numel() for param in FactorizedLinear(linear, 8).parameters()), linear.weight.numel()
        (1088, 4096)
    """

    def __init__(self, linear: nn.Linear, latent_features: int) -> None:
        super().__init__(linear, latent_features, "FactorizedLinear: latent_features")
        self.in_features: int = linear.in_features
        self.out_features: int = linear.out_features

    @property
    def latent_features(self) -> int:
        """k."""
        return self.first.out_features

    @staticmethod
    def _empty(layer: Any, latent: int, out: int) -> tuple[Any, Any]:
        sizes = (layer.in_features, latent), (latent, out)
        first, second = (nn.Linear(*pair, bias=False, device="meta") for pair in sizes)
        return first, second

    def _solution(self, input: Tensor, rank: int, n_iters: int) -> LowRankSolution:
        with torch.no_grad():
            x = input.reshape(-1, self.in_features)
            weights = self.first.weight.T, self.second.weight.T
            return _transposed(factorize_matrix(x, self(x), *weights, self.second.bias, rank=rank, n_iters=n_iters))

    def with_solution(self, solution: LowRankSolution) -> nn.Module:
        """Return the layer with other factors, or a plain `nn.Linear` if there is only one."""
        return self._with_weights(_transposed(solution))


class FactorizedConv2d(_Factorized):
    """A convolution to k channels and a 1x1 convolution to the original channels: the closest one with rank k.

    It has the public attributes of the given convolution, including `weight`, the factors' product, which is computed
    on access, and `bias`.

    Args:
        conv: The convolution, with one group. Its bias is reused, its weight is read.
        latent_channels: k, from 1 to the smaller of the number of output channels and the size of a patch, at which
            the approximation is exact.

    Attributes:
        first: (in, k, h, w), without bias, with the given convolution's stride, padding and dilation.
        second: (k, out, 1, 1), with the given convolution's bias.

    Raises:
        NotImplementedError: The convolution has several groups.
        ValueError: k is out of range.

    Example:
        >>> conv = nn.Conv2d(8, 8, 3)
        >>> sum(param.numel() for param in FactorizedConv2d(conv, 2).parameters()), conv.weight.numel()
        (168, 576)
    """

    def __init__(self, conv: nn.Conv2d, latent_channels: int) -> None:
        if conv.groups != 1:
            raise NotImplementedError(f"FactorizedConv2d: expected a convolution with groups=1, got {conv.groups}")
        super().__init__(conv, latent_channels, "FactorizedConv2d: latent_channels")
        for name in ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"):
            setattr(self, name, getattr(conv, name))
        self.padding_mode = conv.padding_mode

    @property
    def latent_channels(self) -> int:
        """k."""
        return self.first.out_channels

    @staticmethod
    def _empty(layer: Any, latent: int, out: int) -> tuple[Any, Any]:
        names = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
        options = {name: getattr(layer, name) for name in names}
        first = nn.Conv2d(layer.in_channels, latent, **options, bias=False, device="meta")
        return first, nn.Conv2d(latent, out, 1, bias=False, device="meta")

    def _solution(self, input: Tensor, rank: int, n_iters: int) -> LowRankSolution:
        conv = self.first
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        images = input.unsqueeze(0) if input.ndim == 3 else input
        return factorize_conv2d(
            F.pad(images, conv._reversed_padding_repeated_twice, mode=mode),
            conv.weight,
            self.second.weight,
            rank=rank,
            second_bias=self.second.bias,
            n_iters=n_iters,
            stride=conv.stride,
            dilation=conv.dilation,
        )

    def with_solution(self, solution: LowRankSolution) -> nn.Module:
        """Return the layer with other factors, or a plain `nn.Conv2d` if there is only one."""
        return self._with_weights(solution)


def _transposed(solution: LowRankSolution) -> LowRankSolution:
    """Return the factors of a linear layer's weight from those of a matrix (in, out), or the other way round."""
    return solution._replace(first=solution.first.T, second=None if solution.second is None else solution.second.T)


def _like(old: Tensor | None, new: Tensor | None) -> nn.Parameter | None:
    """Return a parameter with the new value of a bias; a bias that did not exist before is trained."""
    return None if new is None else nn.Parameter(new.clone(), old is None or old.requires_grad)
