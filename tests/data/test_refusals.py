"""Arguments of `purecompose.data` that are refused: what was given, where, and what to do instead."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from purecompose import Evaluator, data, predict
from purecompose.data import CharacterVocabulary, arrays, loader, prefetch, split, text_windows
from purecompose.data.loaders import check_batches
from purecompose.random import key


X, Y, THREE, PAIR = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), [1, 2, 3], {"train": [1], "test": [2]}
FIVE: Any = arrays(torch.zeros(5, 2), torch.arange(5), 2)
WORDS = CharacterVocabulary("abc")


class Unsized:
    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([(X, Y)])


REFUSED: list[tuple[Callable[[], Any], Any, str]] = [
    (lambda: arrays(X, Y), TypeError, "batch_size is missing; write arrays(inputs, targets, batch_size)"),
    (lambda: arrays(X, Y, 0), ValueError, "batch_size: expected an int >= 1, got 0"),
    (lambda: arrays(X, Y, True), TypeError, "batch_size: expected an int >= 1, got True (bool)"),
    (lambda: arrays(X[:0], Y[:0], 2), ValueError, "at least one example, got inputs of shape (0, 3)"),
    (lambda: arrays(X, Y, 6, drop_last=True), ValueError, "batch_size=6 (int) is more than the 4 examples"),
    (lambda: arrays(X[:3], Y, 2), ValueError, "3 inputs do not pair with 4 targets"),
    (lambda: arrays(torch.zeros(()), Y, 2), ValueError, "inputs with examples along the first axis, got a 0-d"),
    (lambda: arrays(X, Y.to("meta"), 2), ValueError, "inputs are on cpu and targets on meta"),
    (lambda: arrays([1.0], Y, 1), TypeError, "inputs to be a tensor, got list; use torch.as_tensor"),  # pyright: ignore
    (lambda: arrays(X, Y, 1, names=("a",)), TypeError, "expected two names"),
    (lambda: arrays(X, Y, 1, names=("a", "a")), ValueError, "got 'a' twice"),
    (lambda: arrays(X, None, 1, names=("a", "b")), TypeError, "one name, such as ('image',)"),
    (lambda: FIVE.epoch(key(0), -1), ValueError, "epoch: expected an int >= 0, got -1"),
    (lambda: FIVE.epoch(key(0), 0, 4), ValueError, "start: expected an int in [0, 3], got 4"),
    (lambda: FIVE.epoch(0, 0), TypeError, "epoch: key: expected a key"),
    *[
        (lambda size=size: split(X, Y, size, seed=0), error, "split: expected size")
        for size, error in [(0, ValueError), (4, ValueError), (1.0, ValueError), (0.05, ValueError), (True, TypeError)]
    ],
    (lambda: loader([], 2), ValueError, "the data set is empty"),
    (lambda: loader(Unsized(), 2), TypeError, "got Unsized; a stream has no order"),
    (lambda: loader(Stream(), 2), TypeError, "got Stream; a stream"),
    (lambda: loader(DataLoader(TensorDataset(X)), 2), TypeError, "got DataLoader; a stream"),
    (lambda: loader(PAIR, 2), TypeError, "with the keys ['train', 'test']; choose one of them"),
    (lambda: loader(3, 2), TypeError, "got int"),
    (lambda: loader(THREE, 2).epoch(key(0), 0, 3), ValueError, "start"),
    (lambda: loader(THREE, 2).epoch(key(0), -1), ValueError, "epoch"),
    *[
        (lambda options=options: loader(THREE, **{"batch_size": 2, **options}), (TypeError, ValueError), words)
        for options, words in [
            ({"batch_size": 2.0}, "batch_size"),
            ({"batch_size": 9, "drop_last": True}, "no batch at all"),
            ({"workers": -1}, "-1 (int)"),
            ({"transform": 3}, "a function, got 3 (int)"),
            ({"transform": lambda sample: sample}, "cannot be called as transform(sample, rng)"),
            ({"transform": lambda sample, rng: sample, "rng": None}, "cannot be called as transform(sample)"),
            ({"rng": "jax"}, "'torch', 'numpy', 'key' or None"),
            ({"collate": 1}, "collate"),
            ({"shuffle": 1}, "shuffle"),
            ({"prefetch_factor": 2}, "multiprocessing"),
            ({"persistent_workers": True}, "num_workers > 0"),
            ({"workers": 1, "timeout": -1}, "timeout"),
            ({"pin_memory": "yes"}, "pin_memory: expected True or False"),
            *[
                ({name: None}, f"unexpected keyword argument '{name}'; it takes dataset, batch_size, shuffle")
                for name in ("in_order", "generator", "worker_init_fn")
            ],
        ]
    ],
    (lambda: prefetch([], "cpu", 0), ValueError, "prefetch: size"),
    (lambda: prefetch([], "cpu", True), TypeError, "prefetch: size"),
    (lambda: CharacterVocabulary(""), ValueError, "at least one"),
    (lambda: CharacterVocabulary("abca"), ValueError, "got these more often: 'a'"),
    (lambda: CharacterVocabulary(3), TypeError, "a text, got 3"),  # pyright: ignore
    (lambda: WORDS.decode(torch.tensor([0, 3])), IndexError, "from 0 to 2, got 3"),
    (lambda: WORDS.decode(torch.tensor([-1])), IndexError, "from 0 to 2, got -1"),
    (lambda: text_windows(torch.zeros(9), 2), TypeError, "tensor of integers, got a torch.float32"),
    (lambda: text_windows(Y > 0, 2), TypeError, "got a torch.bool"),
    (lambda: text_windows(Y.view(2, 2), 2), ValueError, "(num_tokens,), got shape (2, 2)"),
    (lambda: text_windows(Y, 0), ValueError, "text_windows: length"),
    (lambda: data.stream(3), TypeError, "expected a function state -> batch, got 3"),  # pyright: ignore
    (lambda: data.shared(loader(THREE, 2)), RuntimeError, "torchrun"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_an_argument_is_refused(call: Callable[[], Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        call()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (TensorDataset(X, Y), "got the data set TensorDataset, which gives single examples: wrap it in data.loader"),
        ((X, Y), "got inputs and targets"),
        ([X, Y], "got inputs and targets"),
        (X, "got a torch.float32 tensor"),
        ({"x": X, "y": Y}, "got a mapping"),
        (None, "got None"),
        ("train", "got 'train'"),
        (list, "got <class 'list'>"),
    ],
)
def test_what_is_not_batches_is_refused(given: Any, words: str) -> None:
    for where, call in {
        "fit: data": lambda: check_batches(given, "fit: data"),
        "Evaluator: data": lambda: Evaluator(given),
        "predict: data": lambda: predict(None, given),  # pyright: ignore
    }.items():
        with pytest.raises(TypeError, match=f"^{where}: expected batches.*{re.escape(words)}"):
            call()


@pytest.mark.parametrize(
    "given",
    [[(X, Y)], (X, X), [X, torch.zeros(4, 5)], iter([(X, Y)]), FIVE, DataLoader(TensorDataset(X, Y)), Stream()],
    ids=lambda given: type(given).__name__,
)
def test_batches_of_every_kind_are_accepted(given: Any) -> None:
    check_batches(given, "fit: data")
    assert "tensor" not in repr(Evaluator(given))  # in memory or not, they print without their numbers
