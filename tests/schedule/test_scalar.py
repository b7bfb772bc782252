"""Scalars: products, their values in and out of a state, and finding the parts in a tree."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from purecompose.schedule import (
    Hparam,
    Product,
    Schedule,
    collect,
    constant,
    cosine,
    hparam,
    linear,
    number,
    resolve,
    scheduled,
)
from purecompose.time import RunLength, Timestamp


NOW = Timestamp(batch=2, run=RunLength("8ba"))


def value(scalar: Any, **hparams: float) -> Any:
    tensors = {name: torch.tensor(x, dtype=torch.float64) for name, x in hparams.items()}
    return resolve(scalar, hparams=tensors, scheduled=lambda schedule: schedule(NOW))


def test_products_are_flat_and_keep_the_order() -> None:
    lr, falling, wave = hparam("lr", 0.1), linear(), cosine()
    assert 0.1 * falling == Product((0.1, falling))
    assert falling * 2 == Product((falling, 2))
    assert lr * falling == Product((lr, falling))
    assert (2 * lr) * (falling * wave) == Product((2, lr, falling, wave))
    assert hash(2 * lr) == hash(2 * hparam("lr", 0.1))


parts = st.lists(
    st.one_of(
        st.floats(-2, 2),
        st.builds(hparam, st.sampled_from(["a", "b"]), st.floats(-2, 2)),
        st.builds(constant, st.floats(-2, 2)),
    ),
    min_size=1,
    max_size=5,
)


@given(parts, st.floats(-2, 2), st.floats(-2, 2))
def test_a_product_resolves_to_the_product_of_its_parts(factors: list, a: float, b: float) -> None:
    scalar = math.prod(factors, start=cosine())
    assert isinstance(scalar, Product) and len(scalar.factors) == len(factors) + 1
    expected = cosine()(NOW)
    for factor in factors:
        if isinstance(factor, Hparam):
            expected *= {"a": a, "b": b}[factor.name]
        else:
            expected *= factor(NOW) if isinstance(factor, Schedule) else factor
    assert float(value(scalar, a=a, b=b)) == pytest.approx(expected, rel=1e-12, abs=1e-300)


def test_resolve_of_each_kind() -> None:
    assert value(0.5) == 0.5 and type(value(3)) is float
    assert value(linear()) == 0.75
    assert value(hparam("lr", 0.1), lr=7.0).item() == 7.0
    assert value(2 * linear()) == 1.5
    with pytest.raises(TypeError, match=r"a product of them, got 'fast' \(str\); .* is state.hparams\['fast'\]"):
        value("fast")
    with pytest.raises(TypeError, match=r"got '1e-3' \(str\); write the number without quotes"):
        value("1e-3")


def test_gradients_flow_to_hparams() -> None:
    lr = torch.tensor(3.0, requires_grad=True)
    step = resolve(0.5 * hparam("lr", 0.1) * linear(), hparams={"lr": lr}, scheduled=lambda s: s(NOW))
    assert isinstance(step, torch.Tensor)
    (grad,) = torch.autograd.grad(step, lr)
    assert grad.item() == 0.375


def test_a_missing_hparam_is_named() -> None:
    with pytest.raises(KeyError, match=r"hparam 'lr' is not in state.hparams.*\['decay'\].*step.init"):
        value(0.1 * hparam("lr", 0.1), decay=1.0)


def test_number_outside_a_state() -> None:
    assert number(3) == 3.0 and type(number(3)) is float
    assert number(hparam("lr", 0.25)) == 0.25
    assert number(2 * hparam("lr", 0.25) * hparam("other", 3)) == 1.5
    for scalar in (cosine(), 0.1 * cosine()):
        with pytest.raises(TypeError, match=r"call schedule\(timestamp\)"):
            number(scalar)
    for no_scalar in (None, "0.1", True, torch.tensor(1.0)):
        with pytest.raises(TypeError, match="expected a number, an hparam"):
            number(no_scalar)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("other", ["2", True, None, torch.tensor(2.0)])
def test_only_scalars_multiply(other: Any) -> None:
    for scalar in (cosine(), hparam("lr", 0.1), 2 * cosine()):
        with pytest.raises(TypeError):
            _ = scalar * other
        with pytest.raises(TypeError):
            _ = other * scalar


def halve(timestamp: Timestamp) -> float:
    return 0.5**timestamp.batch


def test_plain_functions_are_schedules() -> None:
    assert scheduled(halve)(NOW) == 0.25 and value(4.0 * scheduled(halve)) == 1.0
    assert scheduled(halve) == scheduled(halve) and hash(scheduled(halve)) == hash(scheduled(halve))
    assert scheduled(halve) != scheduled(lambda timestamp: 0.5**timestamp.batch)
    assert scheduled(lambda timestamp: timestamp.batch)(NOW) == 2.0


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (torch.tensor(1.0), TypeError, "value at batch 2: expected a finite number, got a torch.float32 tensor"),
        (None, TypeError, "expected a finite number, got None"),
        (math.inf, ValueError, "expected a finite number, got inf"),
    ],
)
def test_a_schedule_must_give_a_finite_number(result: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        scheduled(lambda timestamp: result)(NOW)


@dataclasses.dataclass(frozen=True)
class Tree:
    lr: Any
    groups: Any = ()
    inner: Any = None


def test_collect_finds_the_distinct_ones_in_order() -> None:
    lr, decay, late = hparam("lr", 0.1), hparam("decay", 0.0), hparam("late", 1.0)
    tree = Tree(
        lr=0.1 * lr * cosine(),
        groups=(("*.bias", {"decay": decay, "lr": lr}), [linear(), cosine()]),
        inner=Tree(lr=late * decay, groups=(None, torch.ones(2), Tree)),
    )
    assert collect(tree, Hparam) == (lr, decay, late)
    assert collect(tree, Schedule) == (cosine(), linear())
    outer = Tree(lr=lr, inner=Tree(decay))
    assert collect(outer, Tree) == (outer,)  # found objects are not searched
    assert collect(0.1, Hparam) == collect(torch.ones(2), Hparam) == ()


def test_collect_distinguishes_equal_names_with_different_defaults() -> None:
    assert len(collect((hparam("lr", 0.1), hparam("lr", 0.2), hparam("lr", 0.1)), Hparam)) == 2
