"""`train --recipe`: the published recipes run by their names."""

import pytest

from purecompose import recipe
from purecompose.cli import main
from purecompose.recipes import RECIPES


NETWORK = ("--model", "resnet8(width=16)", "--duration", "4ba", "--batch-size", "16", "--quiet")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--recipe", name, *NETWORK]) == 0
    captured = capsys.readouterr()
    assert "test accuracy" in captured.out and captured.err == ""


def test_a_recipe_is_a_list_of_methods_like_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--recipe", "hot", "--model", "resnet8(width=16)"]) == 0
    out = capsys.readouterr().out
    assert all(method.name in out for method in recipe("hot"))


def test_a_recipe_and_a_list_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--recipe", "mild", "--algorithms", "mixup", *NETWORK]) == 2
    assert "--recipe: expected it, or --algorithms, not both" in capsys.readouterr().err


def test_unknown_recipes_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one of mild, medium, hot, got 'spicy'"):
        recipe("spicy")
