"""Arguments of keys and draws that are refused, and the words of the error."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from purecompose import random
from purecompose.random import Rng


KEY: Any = random.key(0)
ROWS: Any = Rng(KEY).per_example(torch.arange(3))
NAN = math.nan

REFUSED: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    *((random.key, (seed,), {}, TypeError, "key: seed: expected an int") for seed in (1.0, True, "1", None)),
    *((random.key, (seed,), {}, ValueError, r"\[0, 2\*\*64\)") for seed in (-1, 2**64)),
    (random.split, (KEY, -1), {}, ValueError, "num >= 0, got -1"),
    (random.split, (KEY, 2.0), {}, TypeError, "split: num"),
    (random.fold_in, (KEY, 2**64), {}, ValueError, "64 bits"),
    (random.fold_in, (Rng(KEY), torch.tensor(1)), {}, TypeError, "expected a str or an int for an Rng"),
    *((random.fold_in, (KEY, data), {}, TypeError, "fold_in") for data in (1.5, True, "a", torch.tensor([1]))),
    *((random.salt, (name,), {}, TypeError, "name of a draw") for name in (True, 1.0, None)),
    *(
        (Rng(KEY).per_example, (wrong,), {}, TypeError, "global indices")
        for wrong in (True, [0, 1], torch.tensor([0.0]), torch.zeros(2, 2, dtype=torch.int64))
    ),
    *(
        (random.bits, (wrong, 3), {}, TypeError, r"expected a key, an int64 tensor of shape \(2,\)")
        for wrong in (torch.zeros(2), torch.zeros(3, dtype=torch.int64), KEY[None], 7, Rng(torch.zeros(2)))
    ),
    (random.bits, (KEY, (2, -1)), {}, ValueError, "sizes >= 0"),
    *(
        (random.bits, (KEY, wrong), {}, TypeError, "expected a shape")
        for wrong in (2.0, (2, 1.0), True, "3", torch.tensor([2, 3]))
    ),
    (random.bits, (ROWS, (4, 2)), {}, ValueError, r"number of examples, 3, got shape \(4, 2\)"),
    (random.uniform, (KEY, 2), {"low": 1.0, "high": 1.0}, ValueError, "low < high"),
    (random.uniform, (KEY, 2), {"low": NAN}, ValueError, "low < high"),
    (random.uniform, (KEY, 2), {"high": 1e5, "dtype": torch.float16}, ValueError, "range of torch.float16"),
    (random.uniform, (KEY, 2), {"low": -3e38, "high": 3e38}, ValueError, "range of torch.float32"),
    (
        random.uniform,
        (KEY, 2),
        {"low": 1.0001, "high": 1.0002, "dtype": torch.bfloat16},
        ValueError,
        "no torch.bfloat16",
    ),
    (random.normal, (KEY, 2), {"std": -1}, ValueError, "std >= 0, got -1"),
    *((random.bernoulli, (KEY, p, 2), {}, ValueError, r"probability in \[0, 1\]") for p in (-0.1, 1.1, NAN)),
    (random.bernoulli, (KEY, (2, 3), 0.5), {}, TypeError, "with a probability p"),
    *((random.randint, (KEY, 2, *ends), {}, ValueError, "low < high") for ends in ((0, 0), (-(2**62), 2**62))),
    *(
        call
        for wrong in (0.0, -1.0, NAN, math.inf)
        for call in (
            (random.gamma, (KEY, wrong, 2), {}, ValueError, "expected a finite number > 0"),
            (random.beta, (KEY, wrong, 1.0, 2), {}, ValueError, "expected a finite number > 0"),
            (random.beta, (KEY, 1.0, wrong, 2), {}, ValueError, "expected a finite number > 0"),
            (random.exponential, (KEY, 2), {"rate": wrong}, ValueError, "expected a finite number > 0"),
        )
    ),
    *(
        (draw, (KEY, *given), {"dtype": torch.int32}, TypeError, r"expected a dtype of .* got torch\.int32")
        for draw, given in (
            (random.uniform, (2,)),
            (random.normal, (2,)),
            (random.exponential, (2,)),
            (random.gamma, (1.0,)),
            (random.beta, (1.0, 1.0)),
        )
    ),
    (random.permutation, (KEY, -1), {}, ValueError, "permutation: n"),
    (random.permutation, (KEY, torch.tensor(3)), {}, ValueError, "without dimensions"),
    *((random.permutation, (KEY, n), {}, TypeError, "permutation: n: expected an int") for n in (2.0, True, None)),
    (random.choice, (KEY, 3, 4), {}, ValueError, "k=4 of n=3"),
    (random.choice, (KEY, -1, 0), {}, ValueError, "choice: n"),
    (random.choice, (KEY, 3, 2.0), {}, TypeError, "choice: k: expected an int"),
    *((random.choice, (KEY, 3, 2, p), {}, ValueError, "finite weights >= 0") for p in ([1.0, -1, 1], [1, NAN, 1.0])),
    (random.choice, (KEY, 3, 2, [1.0, 0.0, 0.0]), {}, ValueError, "only 1 of the weights"),
    (random.choice, (KEY, 3, 2, torch.ones(4)), {}, ValueError, r"expected 3 weights.*\(4,\)"),
]


@pytest.mark.parametrize(("call", "args", "options", "error", "words"), REFUSED)
def test_wrong_arguments_are_refused(
    call: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call(*args, **options)
