"""`adafactor` against torch.optim.Adafactor, for tensors of every number of dimensions."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from purecompose import optim
from purecompose.schedule import hparam


OPTIONS = st.fixed_dictionaries(
    {
        "beta2_decay": st.sampled_from([-0.8, -0.5, 0.0]),
        "eps": st.sampled_from([(None, 1e-3), (1e-3, 0.1), (1e-30, 0.0)]),
        "d": st.sampled_from([1.0, 2.0]),
        "weight_decay": st.sampled_from([0.0, 0.5]),
    }
)


@pytest.mark.parametrize("watched", [False, True])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)
@given(options=OPTIONS, lr=st.sampled_from([1e-2, 0.3]))
def test_equals_torch(assert_like_torch, watched: bool, options: dict[str, Any], lr: float):
    with torch.set_grad_enabled(watched):
        assert_like_torch(optim.adafactor(lr, **options), torch.optim.Adafactor, {"lr": lr, **options})
        options = {**options, "eps": (1e-7, 1e-3)}  # 1e-30 squared is 0 in float32, on both sides
        theirs = {"lr": lr, **options}
        assert_like_torch(optim.adafactor(lr, **options), torch.optim.Adafactor, theirs, dtype=torch.float32)


def test_defaults_and_groups_equal_torch(assert_like_torch):
    groups = {
        "body.weight": {"d": 2.0, "weight_decay": 0.1},
        "body.bias": {"lr": 0.5},
        "head.weight": {"beta2_decay": -0.5},
        "head.bias": {"eps": (1e-2, 1e-2)},
    }
    assert_like_torch(optim.adafactor(groups=groups), torch.optim.Adafactor, {}, groups)


def test_hparams_equal_numbers(assert_like_torch):
    # Above 1 / sqrt(t) from the second update on, so that both branches of the minimum are used.
    ours = optim.adafactor(hparam("lr", 0.4), weight_decay=hparam("wd", 0.1))
    assert_like_torch(ours, torch.optim.Adafactor, {"lr": 0.4, "weight_decay": 0.1})


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (1, 4), (2, 3, 4), (4, 3, 2, 1)])
def test_any_number_of_dimensions_equals_torch(shape: tuple[int, ...], watched: bool):
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(11)]
    optimizer, params = optim.adafactor(), {"p": draws[0]}
    opt_state, twin = optimizer.init(params), torch.nn.Parameter(draws[0].clone())
    reference = torch.optim.Adafactor([twin])
    for draw in draws[1:]:
        with torch.set_grad_enabled(watched):
            params, opt_state = optimizer.update({"p": draw}, opt_state, params)
        twin.grad = draw
        reference.step()
        torch.testing.assert_close(params["p"], twin.detach(), rtol=1e-12, atol=1e-12)
    theirs = {slot: kept for slot, kept in reference.state[twin].items() if kept is not None}
    assert {slot: kept["p"].shape for slot, kept in opt_state.items()} == {slot: t.shape for slot, t in theirs.items()}


def test_the_state_of_a_matrix_has_its_rows_and_columns(tensors):
    opt_state = optim.adafactor().init(tensors())
    shapes = {slot: {name: tuple(t.shape) for name, t in leaves.items()} for slot, leaves in opt_state.items()}
    assert shapes == {
        "step": {"body.weight": (), "body.bias": (), "head.weight": (), "head.bias": ()},
        "row_var": {"body.weight": (3, 1), "head.weight": (2, 1)},
        "col_var": {"body.weight": (1, 4), "head.weight": (1, 3)},
        "variance": {"body.bias": (3,), "head.bias": (2,)},
    }


def test_an_update_is_proportional_to_the_parameter():
    optimizer, grads = optim.adafactor(1e-2), {"w": torch.tensor([3.0, -4.0])}
    moves = []
    for size in (1.0, 10.0, 0.0):
        params = {"w": torch.full((2,), size)}
        moves.append(optimizer.update(grads, optimizer.init(params), params)[0]["w"] - params["w"])
    torch.testing.assert_close(moves[1], 10 * moves[0])
    torch.testing.assert_close(moves[2], 1e-3 * moves[0])  # eps[1] is the smallest scale of a parameter


@pytest.mark.parametrize("shape", [(3,), (3, 2)])
def test_gradients_are_finite_where_parameters_and_gradients_are_zero(shape: tuple[int, ...]):
    optimizer = optim.adafactor(hparam("lr", 0.1))

    def final(lr: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        params, opt_state = {"w": torch.zeros(shape)}, optimizer.init({"w": torch.zeros(shape)})
        for _ in range(3):
            grads = {"w": params["w"] * weight}
            params, opt_state = optimizer.update(grads, opt_state, params, lambda scalar: lr)
        return params["w"].sum()

    slopes = torch.func.grad(final, argnums=(0, 1))(torch.tensor(0.1), torch.ones(shape))
    assert all(bool(slope.isfinite().all()) for slope in slopes)


@pytest.mark.parametrize(
    ("options", "error", "message"), [({"groups": {"*": {"is_factored": True}}}, TypeError, "no option 'is_factored'")]
)
def test_wrong_settings_are_refused_at_construction(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        optim.adafactor(**options)
