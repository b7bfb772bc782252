"""`muon` against torch.optim.Muon, and its iteration against singular values."""

from typing import Any

import numpy as np
import pytest
import torch

from purecompose import optim, schedule
from purecompose.optim.matrices import orthogonalized
from purecompose.schedule import hparam


SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "heavy": {"momentum": 0.5, "weight_decay": 0.0},
    "plain momentum": {"nesterov": False, "weight_decay": 1.0},
    "no momentum": {"momentum": 0.0},
    "iteration": {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3, "eps": 10.0},
}


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_equals_torch(assert_like_torch, settings: str, adjust: Any, dtype: torch.dtype, watched: bool):
    # The iteration in bfloat16 has the same bits as torch's, so only float32's last digits differ. If the decay is
    # 1/10 and not a power of two, torch rounds 1 - lr wd, in every step in the same direction.
    lr = 2.0**-5
    options = {"weight_decay": 0.1 if dtype is torch.float64 else 0.125, **SETTINGS[settings]}
    ours = optim.muon(lr, adjust_lr=adjust, **options)
    theirs = {"lr": lr, "adjust_lr_fn": adjust, **options}
    with torch.set_grad_enabled(watched):
        assert_like_torch(ours, torch.optim.Muon, theirs, dtype=dtype, only="*.weight")


def test_groups_equal_torch(assert_like_torch):
    groups = {"body.weight": {"lr": 0.1, "nesterov": False}, "head.weight": {"weight_decay": 0.0, "momentum": 0.5}}
    assert_like_torch(optim.muon(groups=groups), torch.optim.Muon, {}, groups, only="*.weight")


def test_hparams_equal_numbers(assert_like_torch):
    ours = optim.muon(hparam("lr", 0.02), momentum=hparam("m", 0.9), weight_decay=hparam("wd", 0.2))
    options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.2}
    assert_like_torch(ours, torch.optim.Muon, options, only="*.weight")


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(5, 5), (3, 7), (7, 3), (1, 4), (4, 1)])
@pytest.mark.parametrize("steps", [1, 5])
def test_the_iteration_is_its_polynomial_of_the_singular_values(shape: tuple[int, int], steps: int):
    # An odd polynomial of a matrix acts on its singular values and leaves the vectors: x = U S V' gives U p(S) V'.
    given = matrix(*shape)
    u, s, v = np.linalg.svd(given.numpy(), full_matrices=False)
    s = s / np.linalg.norm(s)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(orthogonalized(given, steps=steps), torch.from_numpy(u * s @ v))


def test_a_convergent_iteration_gives_the_nearest_orthogonal_matrix():
    u, _, v = np.linalg.svd(matrix(4, 6).numpy(), full_matrices=False)
    result = orthogonalized(matrix(4, 6), coefficients=(1.875, -1.25, 0.375), steps=40)
    torch.testing.assert_close(result, torch.from_numpy(u @ v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("precision", ["bf16", "full"])
def test_a_gradient_of_zero_changes_nothing_and_dtypes_are_kept(dtype: torch.dtype, precision: Any):
    params = {"w": matrix(3, 2).to(dtype)}
    optimizer = optim.muon(0.1, weight_decay=0.0, ns_precision=precision)
    moved, opt_state = optimizer.update({"w": torch.zeros(3, 2, dtype=dtype)}, optimizer.init(params), params)
    assert torch.equal(moved["w"], params["w"]) and moved["w"].dtype == opt_state["momentum"]["w"].dtype == dtype


def test_full_precision_is_near_to_bfloat16():
    params, grads = {"w": matrix(16, 8).float()}, {"w": matrix(16, 8, 1).float()}
    moves = []
    for precision in ("bf16", "full"):
        optimizer = optim.muon(1.0, weight_decay=0.0, ns_precision=precision)
        moves.append(optimizer.update(grads, optimizer.init(params), params)[0]["w"] - params["w"])
    assert 0 < (moves[0] - moves[1]).abs().max() < 0.03
    rows_over_columns = 2**0.5  # "original": sqrt(max(1, 16 / 8))
    values = torch.linalg.svdvals(moves[1]) / rows_over_columns
    assert 0.6 < values.min() and values.max() < 1.25


def test_maps_in_bfloat16_as_coarsely_as_it_computes():
    optimizer = optim.muon(1.0, weight_decay=0.0)
    params = {"w": torch.zeros(3, 8, 6)}
    grads = {"w": torch.stack([matrix(8, 6, seed).float() for seed in range(3)])}

    def member(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return optimizer.update({"w": grad}, optimizer.init({"w": param}), {"w": param})[0]["w"]

    with torch.no_grad():
        mapped = torch.vmap(member)(params["w"], grads["w"])
        looped = torch.stack([member(*pair) for pair in zip(params["w"], grads["w"], strict=True)])
    # The elements, about 0.4, have an error of 0.03 in both cases: bfloat16's 0.004, times slopes of 3.4.
    torch.testing.assert_close(mapped, looped, rtol=0, atol=0.1)
    values = torch.linalg.svdvals(mapped) / (8 / 6) ** 0.5
    assert 0.6 < values.min() and values.max() < 1.25


SHAPES = {"a": (8, 6), "b": (6, 8), "c": (8, 6), "d": (6, 6), "e": (3, 8), "f": (8, 3)}


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "full"])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_matrices_of_one_shape_move_as_each_alone(adjust: Any, precision: Any, mapped: bool):
    optimizer = optim.muon(1.0, weight_decay=0.0, adjust_lr=adjust, ns_precision=precision)
    params = {name: torch.zeros(2, *shape) for name, shape in SHAPES.items()}
    grads = {name: torch.stack([matrix(*SHAPES[name], i).float() for i in (k, k + 9)]) for k, name in enumerate(SHAPES)}

    def moved(params: dict[str, torch.Tensor], grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return optimizer.update(grads, optimizer.init(params), params)[0]

    def alone(name: str, member: int) -> torch.Tensor:
        return moved({name: params[name][member]}, {name: grads[name][member]})[name]

    with torch.no_grad():
        if mapped:
            together = torch.vmap(moved)(params, grads)
        else:
            ends = [
                moved(*({n: t[member] for n, t in given.items()} for given in (params, grads))) for member in (0, 1)
            ]
            together = {name: torch.stack([end[name] for end in ends]) for name in SHAPES}
        for name in SHAPES:
            # bfloat16 rounds elsewhere under vmap; see test_maps_in_bfloat16_as_coarsely_as_it_computes.
            tolerance = 1e-5 if precision == "full" else 0.1 if mapped else 0.02
            expected = torch.stack([alone(name, 0), alone(name, 1)])
            torch.testing.assert_close(together[name], expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("precision", ["bf16", "full"])
def test_matrices_of_one_shape_are_iterated_in_one_product(precision: Any):
    optimizer = optim.muon(1.0, ns_precision=precision, ns_steps=2)
    params = {name: torch.zeros(shape, device="meta") for name, shape in SHAPES.items()}
    with torch.no_grad(), torch.profiler.profile(acc_events=True) as profile:
        optimizer.update(params, optimizer.init(params), params)
    names = [event.name for event in profile.events() or ()]
    # Two products for x and the square of its gram matrix, in two iterations: of a and c together, of four alone.
    assert names.count("aten::baddbmm") == 2 * 2 and names.count("aten::addmm") == 4 * 2 * 2


@pytest.mark.parametrize("shape", [(3,), (), (2, 3, 4)])
def test_parameters_other_than_matrices_are_refused_with_a_remedy(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"muon: expected real matrices, got 'b' of shape .*optim.by_pattern"):
        optim.muon().init({"w": torch.zeros(2, 2), "b": torch.zeros(shape)})


def test_a_filter_moves_like_the_matrix_of_its_rows():
    param, grad = torch.ones(6, 2, 3, 3), matrix(6, 18).float()
    optimizer = optim.muon(0.1 * schedule.linear(), filters=True, ns_precision="full")
    params, grads = {"w": param}, {"w": grad.view(param.shape)}
    with torch.no_grad():  # as in a step, where the values of schedules are tensors
        moved, _ = optimizer.update(grads, optimizer.init(params), params, lambda scalar: torch.tensor(0.1))
    params = {"w": param.flatten(1)}
    expected, _ = optimizer.update({"w": grad}, optimizer.init(params), params, lambda scalar: torch.tensor(0.1))
    torch.testing.assert_close(moved["w"].flatten(1), expected["w"])


def test_only_filters_leave_matrices_to_another_optimizer():
    optimizer = optim.by_pattern({"*": optim.muon(0.1, filters="only")}, optim.sgd(0.1))
    params = {"conv": torch.ones(6, 2, 3, 3), "head": torch.ones(2, 6), "bias": torch.ones(2)}
    assert list(optimizer.init(params)["momentum"]) == ["conv"]
