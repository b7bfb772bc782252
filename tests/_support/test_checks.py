"""Argument checks use uniform error messages."""

import math

import pytest
import torch

from purecompose._support.checks import check_flag, check_number, check_whole, is_number, shown


class Index:
    def __index__(self):
        return 3


def test_valid_arguments_are_returned():
    assert check_flag(True, "f: x") is True
    assert check_whole(3, "f: x", 0, 3) == check_whole(Index(), "f: x") == 3
    assert check_number(2, "f: x", 2, 3) == 2.0 and type(check_number(2, "f: x")) is float


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: check_flag(1, "f: x"), TypeError, "f: x: expected True or False, got 1 (int)"),
        (lambda: check_whole(True, "f: x"), TypeError, "f: x: expected an int, got True (bool)"),
        (lambda: check_whole(2.0, "f: x", 1), TypeError, "f: x: expected an int >= 1, got 2.0 (float)"),
        (lambda: check_whole(0, "f: x", 1, 4), ValueError, "f: x: expected an int in [1, 4], got 0 (int)"),
        (lambda: check_whole(5, "f: x", high=4), ValueError, "f: x: expected an int <= 4, got 5 (int)"),
        (
            lambda: check_whole(torch.tensor(1), "f: x"),
            TypeError,
            "f: x: expected an int, got a torch.int64 tensor of shape ()",
        ),
        (lambda: check_number("1", "f: x"), TypeError, "f: x: expected a finite number, got '1' (str)"),
        (lambda: check_number(math.nan, "f: x"), ValueError, "f: x: expected a finite number, got nan (float)"),
        (
            lambda: check_number(0, "f: x", 0, 1, above=True, hint="1 is all"),
            ValueError,
            "f: x: expected a finite number in (0, 1], got 0 (int); 1 is all",
        ),
        (
            lambda: check_number(1.0, "f: x", 0, 1, below=True),
            ValueError,
            "f: x: expected a finite number in [0, 1), got 1.0 (float)",
        ),
        (
            lambda: check_number(0, "f: x", 0, above=True),
            ValueError,
            "f: x: expected a finite number > 0, got 0 (int)",
        ),
    ],
)
def test_invalid_arguments_are_refused(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


def test_a_bool_is_not_a_number_and_functions_and_long_values_are_short():
    assert is_number(1.5) and not is_number(True)
    assert shown(is_number) == "is_number (function)"
    assert shown("a" * 200) == f"'{'a' * 76}... (str)"
