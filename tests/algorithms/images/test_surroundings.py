"""Augmentations of whole batches do not depend on the modes around a call, and their results own their memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from purecompose.algorithms import augmix, randaugment
from purecompose.algorithms.images import Primitive
from purecompose.functional import augmix_batch, randaugment_batch, sample_transform
from purecompose.random import key, uniform


KEY = key(3)
RANGE = (0.0, 1.0)
MAKERS: dict[str, Callable[..., Tensor]] = {"randaugment": randaugment_batch, "augmix": augmix_batch}
each_maker = pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)


def make_batch(dtype: torch.dtype = torch.float32) -> Tensor:
    values = uniform(key(1), (5, 3, 9, 8))
    return (values * 255).to(torch.uint8) if dtype == torch.uint8 else values.to(dtype)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another default device": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "inference mode": torch.inference_mode,
}


@each_maker
@pytest.mark.parametrize("around", SURROUNDINGS.values(), ids=SURROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16, torch.float64])
def test_modes_around_a_call_change_nothing(maker: Callable[..., Tensor], around: Any, dtype: torch.dtype) -> None:
    batch = make_batch(dtype)
    expected = maker(KEY, batch, value_range=RANGE)
    with around():
        assert torch.equal(maker(KEY, batch, value_range=RANGE), expected)


@each_maker
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_results_use_no_more_memory_than_needed(maker: Callable[..., Tensor], dtype: torch.dtype) -> None:
    for batch in (make_batch(dtype), make_batch(dtype)[:1], make_batch(dtype)[0]):
        changed = maker(KEY, batch, severity=5.0)
        assert changed.untyped_storage().nbytes() == changed.numel() * changed.element_size()
        mapped = torch.func.vmap(lambda one, batch=batch: maker(one, batch, severity=5.0))(torch.stack([KEY, key(4)]))
        assert mapped.untyped_storage().nbytes() == mapped.numel() * mapped.element_size()


@each_maker
def test_gradients_reach_the_severity_past_channels_of_one_value(maker: Callable[..., Tensor]) -> None:
    batch = make_batch()
    batch[:, 1] = 0.5

    def mean(severity: Tensor) -> Tensor:
        names = ("brightness", "autocontrast", "shear_x")
        return maker(KEY, batch, severity=severity, augmentation_set=names, value_range=RANGE).mean()

    gradient = torch.func.grad(mean)(torch.tensor(5.0))
    assert gradient.isfinite() and gradient != 0


@each_maker
def test_operations_may_compute_in_another_dtype(maker: Callable[..., Tensor]) -> None:
    def blurred(levels: Tensor, amount: Tensor) -> Tensor:
        return F.conv2d(levels, torch.ones(levels.shape[1], 1, 3, 3) / 9, padding=1, groups=levels.shape[1])

    own = (
        "rotate",
        Primitive("blur", blurred, lambda strength: strength.fraction),
        Primitive("double", lambda levels, amount: levels.double() / 2, lambda strength: strength.fraction),
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert maker(KEY, make_batch(), augmentation_set=own, value_range=RANGE).dtype == torch.float32


def test_later_changes_of_given_lists_have_no_effect() -> None:
    names, bounds = ["rotate"], [0.0, 1.0]
    batch = make_batch()
    methods = [
        randaugment(augmentation_set=names, value_range=bounds),  # pyright: ignore[reportArgumentType]
        augmix(augmentation_set=names),
    ]
    transforms = [
        sample_transform(randaugment_batch, augmentation_set=names, value_range=bounds),  # pyright: ignore[reportArgumentType]
        sample_transform(augmix_batch, augmentation_set=names),
    ]
    printed, made = [repr(method) for method in methods], [transform(batch[0], KEY) for transform in transforms]
    names[:], bounds[:] = ["solarize", "none such"], [0.0, 9.0]
    assert [repr(method) for method in methods] == printed
    assert all(torch.equal(fn(batch[0], KEY), before) for fn, before in zip(transforms, made, strict=True))
