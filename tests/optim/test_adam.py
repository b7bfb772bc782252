"""`adam` and `adamw` against torch.optim, and where sqrt has no finite derivative."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from purecompose import optim
from purecompose.schedule import hparam


OPTIONS = st.fixed_dictionaries(
    {
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.9), (0.5, 0.0), (0.95, 0.9999)]),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 1e-2, 0.5]),
        "amsgrad": st.booleans(),
    }
)
PAIRS = {"adam": (optim.adam, torch.optim.Adam), "adamw": (optim.adamw, torch.optim.AdamW)}


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(options=OPTIONS, double=st.booleans())
def test_equals_torch(assert_like_torch, pair: str, watched: bool, options: dict[str, Any], double: bool):
    ours, theirs = PAIRS[pair]
    dtype = torch.float64 if double else torch.float32
    with torch.set_grad_enabled(watched):
        assert_like_torch(ours(0.01, **options), theirs, {"lr": 0.01, **options}, dtype=dtype)


@pytest.mark.parametrize("pair", PAIRS)
def test_defaults_and_groups_equal_torch(assert_like_torch, pair: str):
    ours, theirs = PAIRS[pair]
    groups = {
        "body.bias": {"weight_decay": 0.0, "amsgrad": True},
        "head.weight": {"lr": 0.1, "betas": (0.8, 0.9)},
        "head.bias": {"eps": 0.1},
    }
    assert_like_torch(ours(groups=groups), theirs, {}, groups)


def test_hparams_equal_numbers(assert_like_torch):
    ours = optim.adamw(hparam("lr", 0.01), betas=(hparam("b1", 0.8), hparam("b2", 0.9)), weight_decay=hparam("wd", 0.1))
    assert_like_torch(ours, torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1})


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", [optim.adam, optim.adamw, optim.decoupled_adamw])
def test_the_kernel_reads_every_memory_layout(kind, decay: float, amsgrad: bool):
    def laid_out(seed: int, turn: int) -> dict[str, torch.Tensor]:
        """Return tensors of the same values in the layouts of another turn."""
        draw = torch.Generator().manual_seed(seed)
        image = torch.randn(2, 3, 4, 5, generator=draw, dtype=torch.float64)
        found = {
            "image": [image, image.to(memory_format=torch.channels_last), image.mT.contiguous().mT][turn],
            "gaps": torch.stack([image] * 2, -1)[..., 0] if turn else image,
            "expanded": torch.randn(1, 3, generator=draw, dtype=torch.float64).expand(2, 3),
            "number": torch.randn((), generator=draw, dtype=torch.float64),
        }
        return found if turn == 1 else {**found, "expanded": found["expanded"].contiguous()}

    optimizer = kind(0.1, weight_decay=decay, amsgrad=amsgrad)
    ends = []
    for is_plain in (True, False):  # the rule's own formula moves them when torch records gradients
        params = laid_out(0, 2)
        opt_state = optimizer.init(params)
        with torch.set_grad_enabled(not is_plain):
            for turn in (0, 1, 2):
                params, opt_state = optimizer.update(laid_out(turn + 1, turn), opt_state, params)
        ends.append((params, opt_state))
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_betas_as_tensors_equal_numbers(tensors, dtype):
    params, grads = tensors(0), tensors(1)
    moving = optim.adam(0.1, betas=(hparam("b1", 0.75), hparam("b2", 0.9375)))
    fixed = optim.adam(0.1, betas=(0.75, 0.9375))

    def as_tensor(scalar: Any) -> torch.Tensor:
        return torch.tensor(scalar.default, dtype=dtype)

    ours, theirs = (params, moving.init(params)), (params, fixed.init(params))
    for _ in range(3):
        ours = moving.update(grads, ours[1], ours[0], as_tensor)
        theirs = fixed.update(grads, theirs[1], theirs[0])
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_bias_correction_is_exact_in_float32():
    # The first update is lr * g / (|g| + eps) whatever the betas. As plain float32, 1 - 0.99999 would
    # be off by 0.1 %.
    param = {"w": torch.zeros(3)}
    optimizer = optim.adam(1.0, betas=(0.9, 0.99999), eps=0.0)
    new, _ = optimizer.update({"w": torch.tensor([1.0, -2.0, 1e-3])}, optimizer.init(param), param)
    torch.testing.assert_close(new["w"], torch.tensor([-1.0, 1.0, -1.0]), rtol=1e-6, atol=0)


def test_decoupled_decay_of_a_zero_gradient_is_the_closed_form(tensors):
    # With g = 0 Adam's own move is 0 / (0 + eps) = 0, so n steps leave p (1 - lr wd)^n.
    params = tensors()
    optimizer = optim.adamw(0.1, weight_decay=0.5)
    zeros = {name: torch.zeros_like(param) for name, param in params.items()}
    moved, opt_state = params, optimizer.init(params)
    for _ in range(5):
        moved, opt_state = optimizer.update(zeros, opt_state, moved)
    torch.testing.assert_close(moved, {name: param * 0.95**5 for name, param in params.items()})


def test_amsgrad_never_forgets_the_largest_square(tensors):
    params = tensors()
    optimizer = optim.adam(amsgrad=True, betas=(0.9, 0.5))
    opt_state = optimizer.init(params)
    for seed in range(1, 20):
        before = opt_state["max_exp_avg_sq"]
        params, opt_state = optimizer.update(tensors(seed), opt_state, params)
        for name, peak in opt_state["max_exp_avg_sq"].items():
            assert bool((peak >= before[name]).all())
            assert bool((peak >= opt_state["exp_avg_sq"][name]).all())


def test_hyper_gradient_is_right_where_a_gradient_is_always_zero():
    # Input 1 is always 0: its weight has gradient 0 and v = 0 in every step.
    inputs, optimizer = torch.tensor([1.0, 0.0], dtype=torch.float64), optim.adam(hparam("lr", 0.1))

    def final_loss(lr: torch.Tensor) -> torch.Tensor:
        params = {"w": torch.ones(2, dtype=torch.float64, requires_grad=True)}
        opt_state = optimizer.init(params)
        for _ in range(3):
            loss = (params["w"] @ inputs - 3.0) ** 2
            (grad,) = torch.autograd.grad(loss, params["w"], create_graph=True)
            params, opt_state = optimizer.update({"w": grad}, opt_state, params, lambda scalar: lr)
        return (params["w"] @ inputs - 3.0) ** 2

    lr = torch.tensor(0.1, dtype=torch.float64)
    (slope,) = torch.autograd.grad(final_loss(leaf := lr.clone().requires_grad_()), leaf)
    difference = (final_loss(lr + 1e-6) - final_loss(lr - 1e-6)).detach() / 2e-6
    torch.testing.assert_close(slope, difference, rtol=1e-6, atol=0)
