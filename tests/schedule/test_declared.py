"""Settings that are declared by annotations: which values each form takes, and what a factory shows."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import pytest
import torch

from purecompose import Algorithm, factory, hparam, on
from purecompose.schedule import linear
from purecompose.schedule.declared import Within, check_of, checked


One: TypeAlias = Annotated[int, Within(1)]
Share: TypeAlias = Annotated[float, Within(0, 1)]


@pytest.mark.parametrize(
    "annotation, values",
    [
        (Literal["auto"] | Share, ["auto", 0.5]),
        (bool | One, [True, 3]),
        (bool | float, [False, 3, 0.5]),
        (Literal["all"] | Sequence[str], ["all", ["a"]]),
        (bool | Callable[..., Any], [True, len]),
        (Annotated[int | Sequence[int], Within(1)], [1, [0]]),
        (Literal[1, 0], [1, 0]),
        (Literal[1000, 2000], [int("1000")]),
        (Share | None, [None, 1]),
    ],
)
def test_each_part_of_an_annotation_takes_its_values(annotation: Any, values: list[Any]) -> None:
    check = check_of(annotation)
    assert check is not None
    assert [check(value, "f: x") for value in values] == values


@pytest.mark.parametrize(
    "annotation, value, error",
    [
        (Literal["auto"] | Share, -1, ValueError),
        (bool | One, 0, ValueError),
        (bool, 1, TypeError),
        (bool | float, "x", TypeError),
        (Literal[1, 0], True, TypeError),
        (Annotated[int, "a remark", Within(1)], 0, ValueError),
    ],
)
def test_other_values_are_refused(annotation: Any, value: Any, error: type[Exception]) -> None:
    check = check_of(annotation)
    assert check is not None
    with pytest.raises(error, match="f: x: expected"):
        check(value, "f: x")


@pytest.mark.parametrize("annotation", [str, Any | One, TypeVar("T") | bool, torch.Tensor | None])
def test_what_cannot_be_judged_is_not_checked(annotation: Any) -> None:
    assert check_of(annotation) is None


def test_further_positions_do_not_have_the_names_of_keywords() -> None:
    @checked
    def scaled(*values: float, share: Share = 0.5) -> tuple[float, ...]:
        return values

    assert scaled(5, 7) == (5, 7)
    with pytest.raises(ValueError, match="scaled: share: expected"):
        scaled(5, share=2)


def test_one_unknown_annotation_leaves_the_checks_of_the_others() -> None:
    @checked
    def own(first: "Unknown", share: Share = 0.5) -> None:  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
        del first, share

    own(None)
    with pytest.raises(ValueError, match="own: share"):
        own(None, 2)


def test_scalars_in_dictionaries_are_settings() -> None:
    @factory
    def weighted(weights: dict[str, Any], *, teacher: Any = None) -> Algorithm:
        del teacher
        return Algorithm("weighted", on("batch_end"), lambda event, state: state, config={})

    method = weighted({"a": hparam("a", 1.0), "b": linear()}, teacher=torch.nn.Linear(2, 2))
    assert [one.name for one in method.hparams] == ["a"] and len(method.schedules) == 1
    assert list(method.config) == ["weights"]
