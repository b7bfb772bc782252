"""0-d parameters and empty ones: if a setting is also a 0-d tensor, torch would promote their dtype."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, algorithms as alg, compose, loop_events, losses, optim
from purecompose.optim.wrapping import Decaying, DecayRule
from purecompose.schedule import Scalar, cosine, hparam, resolve


# A number that is exact in all dtypes; with the schedule it is a product.
RATE = 2.0**-5
RATES: dict[str, Scalar] = {"number": RATE, "schedule": 2 * RATE * cosine(), "hparam": hparam("lr", RATE)}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}

OPTIMIZERS: dict[str, Callable[[Scalar], Any]] = {
    "sgd": lambda lr: optim.sgd(lr, weight_decay=0.5),
    "nesterov": lambda lr: optim.sgd(lr, momentum=0.5, nesterov=True),
    "dampening": lambda lr: optim.sgd(lr, momentum=0.5, dampening=0.25),
    "adam": lambda lr: optim.adam(lr, eps=1e-3, weight_decay=0.5, amsgrad=True),
    "adafactor": lambda lr: optim.adafactor(lr, weight_decay=0.5),
    "centered": lambda lr: optim.rmsprop(lr, eps=0.5, momentum=0.5, centered=True),
    "adagrad": lambda lr: optim.adagrad(lr, eps=0.5, lr_decay=0.5),
    "sparse_adam": lambda lr: optim.sparse_adam(lr, eps=1e-3),
    "adamax": lambda lr: optim.from_torch(torch.optim.Adamax, lr=lr),
    "lion": lambda lr: optim.lion(lr, weight_decay=0.5),
    "decoupled_sgdw": lambda lr: optim.decoupled_sgdw(lr, momentum=0.5, weight_decay=2.0**-6),
    "decoupled_adamw": lambda lr: optim.decoupled_adamw(lr, eps=1e-3, weight_decay=2.0**-6),
    "decaying": lambda lr: Decaying(optim.sgd(lr), (DecayRule("mine", lr),)),
    "all hparams": lambda lr: optim.adamw(
        lr, betas=(hparam("a", 0.5), hparam("b", 0.75)), eps=1e-3, weight_decay=hparam("decay", 0.5)
    ),
    "momentum's hparam": lambda lr: optim.sgd(lr, momentum=hparam("m", 0.5), dampening=hparam("d", 0.25)),
}


def reader(dtype: torch.dtype = torch.float32, **given: Tensor) -> Callable[[Scalar], float | Tensor]:
    """Return a reader of settings as in a step: schedules in float64, hparams in this dtype."""
    defaults = {"lr": RATE, "a": 0.5, "b": 0.75, "decay": 0.5, "m": 0.5, "d": 0.25}
    hparams = {**{name: torch.tensor(default, dtype=dtype) for name, default in defaults.items()}, **given}
    half = torch.tensor(0.5, dtype=torch.float64)
    return lambda scalar: resolve(scalar, hparams=hparams, scheduled=lambda schedule: half)


def drawn(seed: int, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale, matrix = torch.randn((), generator=generator), torch.randn(2, 3, generator=generator)
    return {"scale": scale.to(dtype).reshape(shape), "matrix": matrix.to(dtype)}


def run(optimizer: Any, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> tuple[dict[str, Tensor], Any]:
    params = drawn(0, dtype, shape)
    opt_state = optimizer.init(params)
    value = reader(torch.float64 if dtype is torch.float64 else torch.float32)
    for seed in range(1, 6):
        params, opt_state = optimizer.update(drawn(seed, dtype, shape), opt_state, params, value)
    return params, opt_state


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dtypes_are_kept_and_numbers_are_those_of_one_dimension(
    name: str, rate: str, dtype: torch.dtype, watched: bool
) -> None:
    optimizer = OPTIMIZERS[name](RATES[rate])
    with torch.set_grad_enabled(watched):
        params, opt_state = run(optimizer, dtype)
        shaped, _ = run(optimizer, dtype, (1,))
    start = optimizer.init(drawn(0, dtype))
    assert [leaf.dtype for leaf in pc.tree.leaves(opt_state)] == [leaf.dtype for leaf in pc.tree.leaves(start)]
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(params, {**shaped, "scale": shaped["scale"][0]}, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shapes", [((0,), (4, 0)), ((0, 4), (0, 0))])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "muon"])
def test_parameters_without_elements_change_nothing_for_others(name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    optimizer = (
        OPTIMIZERS[name](RATE) if name in OPTIMIZERS else optim.by_pattern({"m*": optim.muon(RATE)}, optim.sgd(RATE))
    )
    own = drawn(0, torch.float32)
    empty = {f"m{index}": torch.zeros(shape) for index, shape in enumerate(shapes) if name != "muon" or len(shape) == 2}

    def moved(params: dict[str, Tensor]) -> dict[str, Tensor]:
        grads = {**drawn(1, torch.float32), **empty}
        given = {name: grads[name] for name in params}
        return optimizer.update(given, optimizer.init(params), params, reader())[0]

    after = moved({**own, **empty})
    assert all(torch.equal(after[name], value) for name, value in moved(own).items())
    assert all(after[name].shape == value.shape for name, value in empty.items())


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamax"])  # from_torch passes no gradients
def test_gradients_flow_to_the_rate(name: str) -> None:
    optimizer = OPTIMIZERS[name](hparam("lr", RATE))

    def moved(lr: Tensor) -> Tensor:
        params = drawn(0, torch.float32)
        return optimizer.update(drawn(1, torch.float32), optimizer.init(params), params, reader(lr=lr))[0]["scale"]

    slope = torch.func.grad(moved)(torch.tensor(RATE, dtype=torch.float64))
    assert slope.dtype is torch.float64 and slope.isfinite() and slope != 0


# In a step


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * self.linear(inputs)


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator).to(dtype), torch.randint(3, (8,), generator=generator)


def state_of(optimizer: Any, dtype: torch.dtype) -> State:
    return State.create(Scaled().to(dtype), loss=losses.cross_entropy, optimizer=optimizer, duration="10ba")


STEPS = {
    "adamw": (optim.adamw(0.1 * cosine()), []),
    "adafactor": (optim.adafactor(hparam("lr", 0.01) * cosine()), []),
    "decay": (optim.sgd(0.1), [alg.decoupled_weight_decay(hparam("decay", 0.01))]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_keeps_dtypes(name: str, dtype: torch.dtype) -> None:
    optimizer, methods = STEPS[name]
    step = compose(loop_events, methods)
    compiled = pc.compile(step, backend="eager")
    eager = traced = start = step.init(state_of(optimizer, dtype))
    for _ in range(3):
        eager, traced = step(eager, batch(dtype)), compiled(traced, batch(dtype))
    assert eager.params["scale"].dtype is dtype and not torch.equal(eager.params["scale"], start.params["scale"])
    torch.testing.assert_close(traced.params, eager.params)
