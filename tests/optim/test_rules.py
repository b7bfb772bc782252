"""The rules of optimizers against torch.optim, the papers' equations, and cases in which torch gives NaN."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from purecompose import optim
from purecompose.optim import lists
from purecompose.schedule import hparam, linear


class Twin(NamedTuple):
    """An optimizer of torch, and settings for the comparison."""

    theirs: type[torch.optim.Optimizer]
    values: dict[str, list[Any]]
    """Values of the settings."""
    groups: dict[str, dict[str, Any]]
    hparams: dict[str, Any]
    """Numbers that an hparam each has."""


_ADAM = {
    "lr": [0.01],
    "betas": [(0.9, 0.999), (0.0, 0.9), (0.5, 0.0), (0.95, 0.9999)],
    "eps": [1e-8, 1e-3],
    "weight_decay": [0.0, 1e-2, 0.5],
    "amsgrad": [False, True],
}
_ADAM_GROUPS = {
    "body.bias": {"weight_decay": 0.0, "amsgrad": True},
    "head.weight": {"lr": 0.1, "betas": (0.8, 0.9)},
    "head.bias": {"eps": 0.1},
}
_ADAM_HPARAMS = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}
TWINS: dict[str, Twin] = {
    "sgd": Twin(
        torch.optim.SGD,
        {
            "lr": [0.01],
            "momentum": [0.0, 0.5, 0.9],
            "dampening": [0.0, 0.3, 1.0],
            "weight_decay": [0.0, 1e-2, 0.5],
            "nesterov": [False, True],
        },
        {"body.bias": {"weight_decay": 0.0, "momentum": 0.0}, "head.weight": {"lr": 0.1, "dampening": 0.4}},
        {"lr": 0.01, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1},
    ),
    "adam": Twin(torch.optim.Adam, _ADAM, _ADAM_GROUPS, _ADAM_HPARAMS),
    "adamw": Twin(torch.optim.AdamW, _ADAM, _ADAM_GROUPS, _ADAM_HPARAMS),
    "rmsprop": Twin(
        torch.optim.RMSprop,
        {
            "lr": [0.01],
            "alpha": [0.99, 0.5, 0.0],
            "eps": [1e-8, 1e-3],
            "weight_decay": [0.0, 0.5],
            "momentum": [0.0, 0.9],
        },
        {
            "body.bias": {"weight_decay": 0.1, "momentum": 0.5},
            "head.weight": {"lr": 0.1, "alpha": 0.8},
            "head.bias": {"eps": 0.1, "centered": True},
        },
        {"lr": 0.01, "alpha": 0.9, "weight_decay": 0.1, "momentum": 0.5},
    ),
    "adagrad": Twin(
        torch.optim.Adagrad,
        {
            "lr": [0.01],
            "lr_decay": [0.0, 0.1],
            "weight_decay": [0.0, 0.5],
            "initial_accumulator_value": [0.0, 0.5],
            "eps": [1e-10, 1e-3],
        },
        {"body.bias": {"weight_decay": 0.1, "lr_decay": 0.5}, "head.weight": {"lr": 0.1}},
        {"lr": 0.01, "lr_decay": 0.1, "weight_decay": 0.1},
    ),
    "adafactor": Twin(
        torch.optim.Adafactor,
        {
            "lr": [1e-2, 0.3],
            "beta2_decay": [-0.8, -0.5, 0.0],
            "eps": [(None, 1e-3), (1e-3, 0.1), (1e-30, 0.0)],
            "d": [1.0, 2.0],
            "weight_decay": [0.0, 0.5],
        },
        {
            "body.weight": {"d": 2.0, "weight_decay": 0.1},
            "body.bias": {"lr": 0.5},
            "head.weight": {"beta2_decay": -0.5},
            "head.bias": {"eps": (1e-2, 1e-2)},
        },
        # Above 1 / sqrt(t) from the second update on, so that both branches of the minimum are used.
        {"lr": 0.4, "weight_decay": 0.1},
    ),
}
every_twin = pytest.mark.parametrize("name", TWINS)


@pytest.mark.parametrize("watched", [False, True])
@every_twin
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(data=st.data(), double=st.booleans())
def test_equals_torch(assert_like_torch, name: str, watched: bool, data: st.DataObject, double: bool):
    twin = TWINS[name]
    options = {setting: data.draw(st.sampled_from(values)) for setting, values in twin.values.items()}
    if options.get("nesterov"):
        options |= {"momentum": 0.9, "dampening": 0.0}
    if name == "adafactor" and not double:
        options["eps"] = (1e-7, 1e-3)  # 1e-30 squared is 0 in float32, on both sides
    dtype = torch.float64 if double else torch.float32
    with torch.set_grad_enabled(watched):
        assert_like_torch(getattr(optim, name)(**options), twin.theirs, options, dtype=dtype)


@every_twin
def test_defaults_and_groups_equal_torch(assert_like_torch, name: str):
    given = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1} if name == "sgd" else {}
    groups, tolerance = TWINS[name].groups, 1e-11 if name == "rmsprop" else None
    ours = getattr(optim, name)(**given, groups=groups)
    assert_like_torch(ours, TWINS[name].theirs, given, groups, tolerance=tolerance)


@every_twin
def test_hparams_equal_numbers(assert_like_torch, name: str):
    def named(setting: str, number: Any) -> Any:
        if isinstance(number, tuple):
            return tuple(named(f"{setting}{i}", one) for i, one in enumerate(number))
        return hparam(setting, number)

    numbers = TWINS[name].hparams
    ours = getattr(optim, name)(**{setting: named(setting, number) for setting, number in numbers.items()})
    assert_like_torch(ours, TWINS[name].theirs, numbers)


@pytest.mark.parametrize(
    ("make", "options", "slots"),
    [
        (optim.sgd, {}, []),
        (optim.sgd, {"momentum": 0.9}, ["momentum"]),
        (optim.sgd, {"momentum": 0.9, "dampening": 0.1}, ["step", "momentum"]),
        (optim.rmsprop, {}, ["square_avg"]),
        (optim.rmsprop, {"momentum": 0.9}, ["square_avg", "momentum"]),
        (optim.rmsprop, {"centered": True}, ["square_avg", "grad_avg"]),
    ],
)
def test_keeps_only_the_state_that_its_settings_need(tensors, make: Any, options: dict[str, Any], slots: list[str]):
    assert list(make(0.1, **options).init(tensors())) == slots
    (added,) = slots[-1:] or ["momentum"]
    partly = make(0.1, groups={"*.bias": options}).init(tensors())
    assert not options or list(partly[added]) == ["body.bias", "head.bias"]


# SGD and Lion


def test_a_scheduled_momentum_keeps_its_buffer_when_its_value_is_zero(tensors):
    params = tensors()
    optimizer = optim.sgd(0.1, momentum=0.9 * linear())
    new_params, opt_state = optimizer.update(
        tensors(1), optimizer.init(params), params, lambda scalar: torch.tensor(0.0)
    )
    torch.testing.assert_close(opt_state["momentum"], tensors(1))
    assert list(new_params) == list(params)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "dampening": 0.1}])
def test_nesterov_needs_momentum_and_no_dampening(options: dict[str, Any]):
    with pytest.raises(ValueError, match="nesterov=True needs momentum > 0 and dampening=0"):
        optim.sgd(0.1, nesterov=True, **options)


def by_hand(param: torch.Tensor, grads: list[torch.Tensor], lr: float, betas: Any, decay: float) -> torch.Tensor:
    """Return the result of the paper's algorithm 2: the decay is added to the sign, and the average is updated last."""
    average = torch.zeros_like(param)
    for grad in grads:
        blend = betas[0] * average + (1 - betas[0]) * grad
        param = param - lr * (torch.where(blend > 0, 1.0, torch.where(blend < 0, -1.0, 0.0)) + decay * param)
        average = betas[1] * average + (1 - betas[1]) * grad
    return param


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("betas", "decay"), [((0.9, 0.99), 0.0), ((0.0, 0.5), 0.1), ((0.95, 0.98), 1.0)])
def test_fifty_steps_are_the_papers_equations(tensors, watched: bool, dtype: torch.dtype, betas: Any, decay: float):
    optimizer, params = optim.lion(0.01, betas=betas, weight_decay=decay), tensors(0, dtype)
    grads = [tensors(step + 1, dtype) for step in range(50)]
    moved, opt_state = params, optimizer.init(params)
    with torch.set_grad_enabled(watched):
        for step_grads in grads:
            moved, opt_state = optimizer.update(step_grads, opt_state, moved)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-6
    for name, param in params.items():
        expected = by_hand(param.double(), [step[name].double() for step in grads], 0.01, betas, decay)
        torch.testing.assert_close(moved[name].double(), expected, rtol=tolerance, atol=tolerance)


def test_groups_and_hparams_of_lion_equal_numbers(tensors):
    moving = optim.lion(hparam("lr", 0.01), betas=(hparam("b1", 0.8), 0.9), weight_decay=hparam("wd", 0.1))
    grouped = optim.lion(1.0, groups={"*": {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}})
    params, opt_state = tensors(0), moving.init(tensors(0))
    for step in range(5):
        ours = moving.update(tensors(step + 1), opt_state, params)
        theirs = grouped.update(tensors(step + 1), opt_state, params)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        params, opt_state = ours


def test_every_element_moves_by_the_learning_rate_and_none_without_a_gradient(tensors):
    params, grads = tensors(0), tensors(1)
    grads["body.bias"][0] = 0.0
    moved, _ = optim.lion(0.25).update(grads, optim.lion().init(params), params)
    expected = {name: param - 0.25 * grads[name].sign() for name, param in params.items()}
    assert all(torch.equal(moved[name], expected[name]) for name in params)
    assert moved["body.bias"][0] == params["body.bias"][0]


def test_only_the_sign_passes_no_gradient(tensors):
    # With p of shape (3, 4): d sum(p') / d lr = -sum(sign) - wd sum(p), d / d b1 = 0.
    params = {"w": tensors(0)["body.weight"]}
    grads, opt_state = {"w": tensors(1)["body.weight"]}, {"exp_avg": {"w": tensors(2)["body.weight"]}}
    optimizer = optim.lion(hparam("lr", 0.1), betas=(hparam("b1", 0.9), 0.99), weight_decay=0.5)

    def total(lr: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        values = {"lr": lr, "b1": beta}
        moved, _ = optimizer.update(grads, opt_state, params, lambda scalar: values[scalar.name])  # type: ignore
        return moved["w"].sum()

    to_lr, to_beta = torch.func.grad(total, argnums=(0, 1))(torch.tensor(0.1).double(), torch.tensor(0.9).double())
    sign = (0.9 * opt_state["exp_avg"]["w"] + 0.1 * grads["w"]).sign()
    torch.testing.assert_close(to_lr, -sign.sum() - 0.5 * params["w"].sum())
    assert to_beta.item() == 0.0


# Adam


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


# RMSprop


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_centered_equals_torch(assert_like_torch, watched: bool, momentum: float):
    options = {"lr": 0.01, "alpha": 0.9, "momentum": momentum, "centered": True}
    with torch.set_grad_enabled(watched):
        # The mean of squares minus the squared mean loses digits, differently on both sides.
        assert_like_torch(optim.rmsprop(**options), torch.optim.RMSprop, options, tolerance=1e-9)
        options = {**options, "eps": 0.1}
        assert_like_torch(optim.rmsprop(**options), torch.optim.RMSprop, options, dtype=torch.float32)


def test_a_variance_that_is_rounded_below_zero_counts_as_zero():
    # The mean is exactly 1 and the mean of squares one bit less, as can result from rounding.
    optimizer, params = optim.rmsprop(0.1, centered=True, eps=0.5), {"w": torch.zeros(1)}
    almost_one = torch.tensor([1.0 - 2.0**-24])
    opt_state = {"square_avg": {"w": almost_one}, "grad_avg": {"w": torch.ones(1)}}
    for watched in (False, True):
        with torch.set_grad_enabled(watched):
            moved, _ = optimizer.update({"w": torch.ones(1)}, opt_state, params)
        torch.testing.assert_close(moved["w"], torch.tensor([-0.2]))


# Adafactor


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


# The arithmetic on lists where its two forms, `_foreach` kernels and loops, could differ


X = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).abs() + 0.1


@pytest.mark.parametrize("watched", [False, True])
def test_mean_squares_are_those_of_double_precision(watched: bool):
    # 300^2 is beyond float16.
    tensors = [torch.tensor([300.0, 100.0], dtype=torch.float16), torch.zeros(2, 2), X]
    with torch.set_grad_enabled(watched):
        means = lists.mean_squares(tensors, torch.float32)
    torch.testing.assert_close(means, torch.tensor([5e4, 0.0, (X.double() ** 2).sum().item() / 6]))


def test_functorch_levels_are_detected_under_no_grad():
    seen = []
    with torch.no_grad():
        torch.func.vmap(lambda x: (seen.append(lists.is_plain()), x)[1])(torch.ones(2))
    assert seen == [False]


def test_the_root_has_no_slope_at_zero_and_lets_nan_through():
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    roots, lost = lists.root_plus([x, torch.tensor([float("nan")])], [torch.tensor(1.0)] * 2)
    torch.testing.assert_close(roots.detach(), torch.tensor([1.0, 3.0]))
    (slope,) = torch.autograd.grad(roots.sum(), x)
    torch.testing.assert_close(slope, torch.tensor([0.0, 0.25]))
    assert bool(lost.isnan())
