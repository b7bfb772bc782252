"""A small set of parameters, random gradients, and torch.optim run on both."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor


SHAPES = {"body.weight": (3, 4), "body.bias": (3,), "head.weight": (2, 3), "head.bias": (2,)}


def draw(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


@pytest.fixture
def tensors() -> Callable[..., dict[str, Tensor]]:
    """Return a function `tensors(seed, dtype)` of random tensors under the parameters' names."""
    return lambda seed=0, dtype=torch.float64: draw(seed, dtype)


@pytest.fixture
def assert_like_torch() -> Callable[..., None]:
    """Run an optimizer beside torch's for 50 steps and compare the parameters after each.

    In every seventh step the head has no gradient, as in torch where `grad is None`: a frozen part must
    neither move nor count the step. `only` is a pattern of the names that take part.
    """

    def run(
        ours: Any,
        theirs: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        dtype: torch.dtype = torch.float64,
        only: str = "*",
        tolerance: float | None = None,
    ) -> None:
        if tolerance is None:
            tolerance = 1e-12 if dtype is torch.float64 else 1e-6

        def draw_some(seed: int) -> dict[str, Tensor]:
            return {name: tensor for name, tensor in draw(seed, dtype).items() if fnmatchcase(name, only)}

        params = draw_some(0)
        opt_state = ours.init(params)
        twins = {name: torch.nn.Parameter(param.clone()) for name, param in params.items()}
        reference = theirs(
            [{"params": [twin], **(groups or {}).get(name, {})} for name, twin in twins.items()], **options
        )
        for step in range(50):
            grads = draw_some(step + 1)
            if step % 7 == 0:
                grads = {name: grad for name, grad in grads.items() if not name.startswith("head")}
            params, opt_state = ours.update(grads, opt_state, params)
            for name, twin in twins.items():
                twin.grad = grads.get(name)
            reference.step()
            for name, twin in twins.items():
                torch.testing.assert_close(
                    params[name].detach(), twin.detach(), rtol=tolerance, atol=tolerance, msg=f"{step=} {name=}"
                )

    return run
