"""Sequence to sequence: the example's step against a plain loop."""

import torch
from torch import Tensor
from torch.nn import functional as F

import purecompose as pc
from examples import translation


def plain_loop(num_batches: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = translation.Translator().to(dtype)
    batches = [translation.words(seed) for seed in range(50)]
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for i in range(num_batches):
        batch = batches[i % len(batches)]
        optimizer.zero_grad()
        logits = net(batch["word"], batch["given"])
        F.cross_entropy(logits, batch["labels"], ignore_index=translation.PADDING).backward()
        optimizer.step()
    return {name: param.detach() for name, param in net.named_parameters()}


def test_translation_equals_a_plain_loop():
    step, start, batches = translation.make(torch.float64)
    trained = pc.fit(step, start, batches, duration="10ba")
    torch.testing.assert_close(trained.params, plain_loop(10), rtol=1e-9, atol=1e-9)


def test_words_are_reversed_behind_a_start_mark_and_before_an_end_mark():
    batch = translation.words(0)
    rows = zip(*(batch[name].tolist() for name in ("word", "given", "labels")), strict=True)
    for word, given, labels in rows:
        letters = [letter for letter in word if letter != translation.PADDING]
        padding = [translation.PADDING] * (translation.LONGEST - len(letters))
        assert labels == [*reversed(letters), translation.END, *padding]
        assert given == [translation.START, *reversed(letters), *padding]
