"""Cases: behaviour of forward methods, and structures of networks."""

# For a type checker, attributes of modules are Tensor | Module.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIncompatibleMethodOverride=false

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.foreign.foreign_case import FUNCTION, READS, SHAPES, WRITES, Case, mapped, tokens, vectors


def built(forward: Callable[..., Any], **parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    """Return a factory of networks with this forward and these members: modules, parameters, buffers, or others."""

    class Net(nn.Module):
        """A network of the sweep."""

        def __init__(self) -> None:
            super().__init__()
            for name, make in parts.items():
                value = make()
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    self.register_buffer(name, value)
                else:
                    setattr(self, name, value)

    Net.forward = forward
    return Net


def linear(width: int = 8, inputs: int = 6, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(inputs, width, **options)


def param(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(0.3 * torch.randn(shape))


def zeros(*shape: int, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
    return lambda: torch.zeros(shape, dtype=dtype)


BODY = {"enter": linear(), "leave": linear(3, 8)}


def body(middle: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A forward method between two layers."""
    return lambda self, x: self.leave(middle(self, torch.tanh(self.enter(x))))


# Behaviour of forward


def averages(self: Any, x: Tensor) -> Tensor:
    if self.training:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
    return x - self.mean


def points(self: Any, x: Tensor) -> Tensor:
    place = int(self.pointer)
    with torch.no_grad():
        self.queue[place : place + len(x)] = x.detach()
        self.pointer[0] = (place + len(x)) % 16
    return x + self.queue.mean(0)


def branches_by_value(self: Any, x: Tensor) -> Tensor:
    return self.first(x) if x.mean() > 0 else self.second(x)


def reads_number(self: Any, x: Tensor) -> Tensor:
    return x / x.abs().max().item()


def through_numpy(self: Any, x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.detach().numpy().mean(0))


def draws(self: Any, x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn_like(x) if self.training else x


def penalised(self: Any, x: Tensor) -> Tensor:
    """Return the gradient of an inner scalar in the inputs, as in energy-based networks."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.requires_grad_()
        energy = self.inner(x).square().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
    return slope


def jacobian(self: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.jacrev(lambda row: self.inner(row).tanh().sum()))(x)


def routes_sparsely(self: Any, x: Tensor) -> Tensor:
    """A mixture of experts: each computes the rows assigned to it."""
    best = self.router(x).softmax(1)
    found = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        rows = (best.argmax(1) == number).nonzero().squeeze(1)
        if len(rows):
            found = found.index_add(0, rows, best[rows, number, None] * expert(x[rows]))
    return found


def recomputes(self: Any, x: Tensor) -> Tensor:
    return checkpoint(self.inner, x, use_reentrant=False)


def recomputes_reentrantly(self: Any, x: Tensor) -> Tensor:
    return checkpoint(self.inner, x, use_reentrant=True)


def functional_inside(self: Any, x: Tensor) -> Tensor:
    scaled = {name: 1.1 * p for name, p in self.inner.named_parameters()}
    return torch.func.functional_call(self.inner, scaled, (x,))


def quantizes(self: Any, x: Tensor) -> Tensor:
    """A codebook that follows by moving averages."""
    codes = torch.cdist(x, self.codebook).argmin(1)
    if self.training:
        with torch.no_grad():
            hot = F.one_hot(codes, 4).to(x)
            means = (hot.T @ x) / hot.sum(0).clamp(min=1).unsqueeze(1)
            self.codebook.lerp_(torch.where(hot.sum(0).unsqueeze(1) > 0, means, self.codebook), 0.1)
    return x + (self.codebook[codes] - x).detach()


def follows_by_data(self: Any, x: Tensor) -> Tensor:
    """The momentum update of contrastive learning, as it is commonly written."""
    for mine, theirs in zip(self.inner.parameters(), self.slow.parameters(), strict=True):
        theirs.data = theirs.data * 0.9 + mine.data * 0.1
    return self.inner(x) - self.slow(x).detach()


def clamps(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.scale.clamp_(0.1, 2.0)
    return x * self.scale


def writes_into_input(self: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = 0
    x.mul_(2)
    return x


def writes_into_batch(self: Any, x: Tensor) -> Tensor:
    x.sub_(x.mean())
    return self.leave(torch.tanh(self.enter(x)))


def changes_dropout(self: Any, x: Tensor) -> Tensor:
    self.drop.p *= 0.8
    return self.drop(x)


def casts_itself(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        found = self.inner(x.float())
    return found.to(x)


class Doubled(torch.autograd.Function):
    """Twice the input, in the older form, with its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


@dataclasses.dataclass
class Output:
    """A dataclass returned by a network."""

    logits: Tensor
    hidden: Tensor | None = None


def of_logits(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits if hasattr(outputs, "logits") else outputs["logits"], targets)


def two_inputs(x: Tensor, y: Tensor) -> tuple[list[Tensor], Tensor]:
    return [x, x.flip(1)], y


def as_dict(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"x": x, "label": y}


# Structures of networks


def doubles_inputs(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (2 * args[0],)


def halves_outputs(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    return output / 2


def doubles_gradients(module: nn.Module, given: Any, taken: Any) -> Any:
    return tuple(grad if grad is None else 2 * grad for grad in given)


def with_hooks() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    net[0].register_forward_pre_hook(doubles_inputs)
    net[1].register_forward_hook(halves_outputs)
    return net


def with_backward_hook() -> nn.Module:
    net = with_hooks()
    net[2].register_full_backward_hook(doubles_gradients)
    return net


def partly_frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    net[0].requires_grad_(False)
    return net


def old_weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))


class LowRank(nn.Module):
    """A parametrization: the weight and a product of two thin matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(8, 2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def low_rank() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    parametrize.register_parametrization(net[0], "weight", LowRank())
    net[0].parametrizations.weight.original.requires_grad_(False)
    return net


def inner() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU())


def experts() -> nn.Module:
    return nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


def turned(self: Any, x: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.view(-1, 4, 2).contiguous()) * self.turn).flatten(1)


SQUARE = linear(8, 8)

CASES = [
    Case("moving average, rebound", built(body(averages), **BODY, mean=zeros(8)), vectors(),
         sliced="it averages slices"),
    Case("queue with a pointer", built(body(points), **BODY, queue=zeros(16, 8), pointer=zeros(1, dtype=torch.int64)),
         vectors(), sliced="it enqueues slices", refused=READS),
    Case("branch by value", built(body(branches_by_value), **BODY, first=SQUARE, second=SQUARE), vectors(), adam=True,
         sliced="it chooses for a slice", refused=READS),
    Case("number of a tensor", built(body(reads_number), **BODY), vectors(), sliced="the maximum of a slice",
         refused=READS),
    Case("through NumPy", built(body(through_numpy), **BODY), vectors(), sliced="the mean of a slice",
         refused={"compiled": "a step cannot be compiled in the stage forward.*numpy", "population": "memory of"}),
    Case("noise", built(body(draws), **BODY), vectors(), draws=True),
    Case("gradient in forward", built(body(penalised), **BODY, inner=SQUARE), vectors()),
    Case("jacobian in forward", built(body(jacobian), **BODY, inner=SQUARE), vectors()),
    Case("mixture of experts, sparse", built(body(routes_sparsely), **BODY, router=linear(4, 8), experts=experts),
         vectors(), adam=True, refused=SHAPES),
    Case("checkpointing", built(body(recomputes), **BODY, inner=inner), vectors(),
         refused={"population": "Leave checkpointing out"}),
    Case("reentrant checkpointing", built(body(recomputes_reentrantly), **BODY, inner=inner), vectors(),
         refused={**dict.fromkeys(("eager", "microbatches", "compiled", "ranks"), "set use_reentrant=False"),
                  **FUNCTION}),
    Case("functional_call inside", built(body(functional_inside), **BODY, inner=SQUARE), vectors()),
    Case("low-rank parametrization", low_rank, vectors()),
    Case("codebook", built(body(quantizes), **BODY, codebook=lambda: torch.randn(4, 8)), vectors(),
         sliced="its means are those of slices", refused={"population": READS["population"]}),
    Case("teacher by .data", built(body(follows_by_data), **BODY, inner=SQUARE,
         slow=lambda: nn.Linear(8, 8).requires_grad_(False)), vectors(),
         refused=WRITES + "|`.data` of a tensor is assigned"),
    Case("clamped parameter", built(body(clamps), **BODY, scale=param(8)), vectors(), refused=WRITES),
    Case("writes into a copy", built(body(writes_into_input), **BODY), vectors()),
    Case("writes into the batch", built(writes_into_batch, **BODY), vectors(),
         refused=r"wrote in place into state\.batch|the batch, .* is written into in place"),
    Case("changed dropout", built(body(changes_dropout), **BODY, drop=lambda: nn.Dropout(0.5)), vectors(), draws=True),
    Case("autocast inside", built(body(casts_itself), **BODY, inner=lambda: nn.Linear(8, 8).float()), vectors(),
         rtol=2e-2),
    Case("older autograd function", built(body(lambda self, x: Doubled.apply(x)), **BODY), vectors(),
         refused=FUNCTION),
    Case("complex parameter", built(body(turned), **BODY, turn=lambda: nn.Parameter(
         torch.view_as_complex(torch.randn(4, 2)))), vectors()),
    Case("dataclass out", built(lambda self, x: Output(self.leave(torch.tanh(self.enter(x)))), **BODY), vectors(),
         of_logits),
    Case("two inputs", built(lambda self, x, y: self.leave(torch.tanh(self.enter(x) * self.enter(y))), **BODY),
         mapped(vectors(), two_inputs)),
    Case("keyword inputs", built(lambda self, x, scale=1.0: self.leave(scale * torch.tanh(self.enter(x))), **BODY),
         mapped(vectors(), as_dict), lambda o, t: F.cross_entropy(o, t["label"]), lambda net, batch: net(batch["x"]),
         {"input_field": "x", "target_field": "*"}),
    Case("batch as the argument", built(lambda self, batch: self.leave(torch.tanh(self.enter(batch["x"]))), **BODY),
         mapped(vectors(), as_dict), lambda o, t: F.cross_entropy(o, t["label"]), lambda net, batch: net(batch),
         {"input_field": (lambda batch: [batch], lambda batch, value: value[0]), "target_field": "*"}),
    Case("backward hook of a module", with_backward_hook, vectors(), refused=FUNCTION),
    Case("partly frozen", partly_frozen, vectors(), sliced="batch normalization sees slices"),
    Case("weight norm by hooks", old_weight_norm, vectors(), refused="use torch.nn.utils.parametrizations"),
    Case("bag of tokens in float32", lambda: nn.Sequential(nn.EmbeddingBag(7, 4), nn.Linear(4, 3)), tokens(),
         is_float=True),
]  # fmt: skip
