"""L-BFGS: torch's own, as a pure function that evaluates the loss several times in a step."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from purecompose._support.device import is_shard
from purecompose._support.internals import is_fake, is_transforming
from purecompose.combinations import unsupported
from purecompose.optim.base import Rate
from purecompose.optim.protocol import Value
from purecompose.schedule import Scalar, number
from purecompose.schedule.declared import Within, checked


_Tolerance = Annotated[float, Within(0)]


@checked
def lbfgs(
    lr: Rate = 1.0,
    *,
    max_iter: Annotated[int, Within(1)] = 20,
    max_eval: Annotated[int, Within(1)] | None = None,
    tolerance_grad: _Tolerance = 1e-7,
    tolerance_change: _Tolerance = 1e-9,
    history_size: Annotated[int, Within(1)] = 100,
    line_search_fn: Literal["strong_wolfe"] | None = None,
) -> LBFGS:
    """Return L-BFGS, equal to `torch.optim.LBFGS`, bit for bit.

    One step is up to `max_iter` iterations on one batch, usually the whole data set. Each evaluates the loss and its
    gradient again, by `state.gradient`. Buffers and metrics, and the reported loss, are those of the first evaluation.

    The step reads numbers to decide when to stop. So it is not compiled or mapped, and no gradient goes through it;
    methods that change gradients or wrap the optimizer are refused.

    Args:
        lr: The length of a step without a line search, in multiples of the direction; with one, its first trial.
        max_iter: The largest number of iterations in a step.
        max_eval: The number of evaluations of the loss after which a step ends, by default 1.25 `max_iter`.
        tolerance_grad: A step ends if no element of the gradient is larger.
        tolerance_change: A step ends if neither the loss nor an element of the parameters changes by more.
        history_size: The number of iterations that the approximate Hessian remembers, here from the start: the state
            has 2 `history_size` + 2 times as many numbers as the parameters.
        line_search_fn: "strong_wolfe" to search a length that satisfies the strong Wolfe conditions, `None` to take
            `lr`.

    Returns:
        A frozen, hashable optimizer. Its state is `{"direction": {name: tensor}, "last_grad": {name: tensor}}`, of the
        parameters' shapes, `"grad_changes"` and `"steps"`, `{name: tensor}` of shapes (history_size, *shape), `"ro"`,
        (history_size,), and `"numbers"`, float64 of shape (6,): iterations, evaluations and remembered iterations so
        far, the last length, the scale of the Hessian, and the last loss.

    Raises:
        TypeError, ValueError: A setting is of the wrong kind or out of range; in `init`, the parameters are not all of
            one real dtype.
        UnsupportedError: From `update`, if something else in the table of combinations is used with it.

    Example:
        >>> from purecompose import State, compose, loop_events, losses
        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> state = State.create(nn.Linear(1, 1), loss=losses.mse, optimizer=lbfgs(line_search_fn="strong_wolfe"))
        >>> compose(loop_events)(state, (x, 2 * x + 1)).params["weight"].allclose(torch.tensor(2.0))
        True

    References:
        Liu and Nocedal, On the limited memory BFGS method for large scale optimization, 1989.
    """
    return LBFGS(lr, max_iter, max_eval, tolerance_grad, tolerance_change, history_size, line_search_fn)


Gradient = Callable[[dict[str, Tensor]], tuple[dict[str, Tensor], Tensor]]
"""Function from all parameters to their gradients and the loss."""


@dataclasses.dataclass(frozen=True)
class LBFGS:
    """Optimizer returned by `lbfgs`; see there."""

    lr: Scalar
    max_iter: int
    max_eval: int | None
    tolerance_grad: float
    tolerance_change: float
    history_size: int
    line_search_fn: str | None
    evaluates: ClassVar[bool] = True

    def __repr__(self) -> str:
        defaults = inspect.signature(lbfgs).parameters
        named = self._settings.items()
        return f"lbfgs({', '.join(f'{name}={one!r}' for name, one in named if one != defaults[name].default)})"

    @property
    def _settings(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def init(self, params: Mapping[str, Tensor]) -> dict[str, Any]:
        dtypes = {param.dtype for param in params.values()}
        if len(dtypes) > 1 or any(map(Tensor.is_complex, params.values())):
            raise ValueError(f"lbfgs: expected parameters of one real dtype, got {', '.join(map(str, dtypes))}")

        def zeros(*rows: int) -> dict[str, Tensor]:
            return {name: param.new_zeros((*rows, *param.shape)) for name, param in params.items()}

        device = next((param.device for param in params.values() if not param.is_meta), torch.device("cpu"))
        return {
            "direction": zeros(),
            "last_grad": zeros(),
            "grad_changes": zeros(self.history_size),
            "steps": zeros(self.history_size),
            "ro": torch.zeros(self.history_size, dtype=next(iter(dtypes), torch.float32), device=device),
            "numbers": torch.zeros(6, dtype=torch.float64, device=device),
        }

    def update(
        self,
        grads: Mapping[str, Tensor],
        opt_state: Mapping[str, Any],
        params: Mapping[str, Tensor],
        value: Value = number,
        *,
        loss: Tensor | None = None,
        gradient: Gradient | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Move every parameter that has a gradient; see `Optimizer.update`."""
        self._check([*grads.values(), *params.values()])
        if loss is None or gradient is None:
            raise unsupported("lbfgs", "optimizers around it", repr(self))
        names, now = list(grads), dict(params)
        copies = [nn.Parameter(params[name].detach().clone()) for name in names]
        first: list[tuple[Mapping[str, Tensor], Tensor]] = [(grads, loss)]

        def closure() -> Tensor:
            if first:
                found, value = first.pop()
            else:
                now.update({name: copy.detach().clone() for name, copy in zip(names, copies, strict=True)})
                with torch.no_grad():
                    found, value = gradient(now)
            for name, copy in zip(names, copies, strict=True):
                copy.grad = found[name].detach().clone() if name in found else torch.zeros_like(copy)
            return value.detach()

        inner = torch.optim.LBFGS(copies, **{**self._settings, "lr": float(value(self.lr))})
        memory = inner.state[copies[0]]
        memory.update(_as_torch(opt_state, names))
        inner.step(closure)
        new_params = {**params, **{name: copy.detach() for name, copy in zip(names, copies, strict=True)}}
        return new_params, _as_tensors(memory, opt_state, names)

    def _check(self, tensors: list[Tensor]) -> None:
        is_traced = torch.compiler.is_compiling() or get_proxy_mode() is not None or any(map(is_fake, tensors))
        is_differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if is_traced:
            raise unsupported("lbfgs", "compile", repr(self))
        if is_transforming() or is_differentiated:
            raise unsupported("lbfgs", "a population, and gradients through steps", repr(self))
        if any(map(is_shard, tensors)):
            raise unsupported("lbfgs", "fully_sharded", repr(self))


_NUMBERS = ("n_iter", "func_evals", "num_old", "t", "H_diag", "prev_loss")


def _as_torch(opt_state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the memory of `torch.optim.LBFGS` for these parameters; empty before the first step."""
    iterations, evaluations, num_old, length, scale, loss = opt_state["numbers"].tolist()
    if not iterations:
        return {}

    def flat(slot: str, *row: int) -> Tensor:
        return torch.cat([opt_state[slot][name][row].reshape(-1) for name in names])

    rows = range(int(num_old))
    return {
        "n_iter": int(iterations),
        "func_evals": int(evaluations),
        "d": flat("direction"),
        "prev_flat_grad": flat("last_grad"),
        "old_dirs": [flat("grad_changes", i) for i in rows],
        "old_stps": [flat("steps", i) for i in rows],
        "ro": [opt_state["ro"][i].clone() for i in rows],
        "t": length,
        "H_diag": scale,
        "prev_loss": loss,
    }


def _as_tensors(memory: Mapping[str, Any], opt_state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the state with the memory of `torch.optim.LBFGS` for these parameters."""
    if not memory.get("n_iter"):  # the first gradient was small enough
        return dict(opt_state)
    num_old = len(memory["old_dirs"])
    sizes = [opt_state["direction"][name].numel() for name in names]

    def split(slot: str, rows: list[Tensor]) -> dict[str, Tensor]:
        parts, old = zip(*(row.split(sizes) for row in rows), strict=True), opt_state[slot]
        return {**old, **{name: torch.stack(part).view_as(old[name]) for name, part in zip(names, parts, strict=True)}}

    blank = [torch.zeros_like(memory["d"])] * (len(opt_state["ro"]) - num_old)
    ro = opt_state["ro"].new_zeros(len(opt_state["ro"]))
    if num_old:
        ro[:num_old] = torch.stack(memory["ro"])
    numbers = [float(num_old if name == "num_old" else memory[name]) for name in _NUMBERS]
    return {
        "direction": split("direction", [memory["d"]]),
        "last_grad": split("last_grad", [memory["prev_flat_grad"]]),
        "grad_changes": split("grad_changes", [*memory["old_dirs"], *blank]),
        "steps": split("steps", [*memory["old_stps"], *blank]),
        "ro": ro,
        "numbers": torch.tensor(numbers, dtype=torch.float64, device=opt_state["numbers"].device),
    }
