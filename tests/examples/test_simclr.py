"""SimCLR against a plain loop."""

import torch
import torch.nn.functional as F
from torch import Tensor

import purecompose as pc
from examples.simclr import Encoder, make
from tests.examples.agreement import assert_agrees, at_batch, repeated


def views_of(images: Tensor, shifts: Tensor, noise: Tensor) -> list[Tensor]:
    """Return two views of each image, made one by one: a shift by up to one pixel, and noise."""
    views = []
    for view in range(2):
        shifted = []
        for image, (row, column) in zip(images, shifts[:, view].tolist(), strict=True):
            shifted.append(F.pad(image, (1, 1, 1, 1))[:, row : row + 8, column : column + 8])
        views.append(torch.stack(shifted) + 0.3 * noise[:, view, None])
    return views


def plain_loop(num_batches: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    _, state, batches = make(num_batches, dtype)
    torch.manual_seed(0)
    net = Encoder().to(dtype)
    log_temperature = torch.nn.Parameter(torch.tensor(0.5).log().to(dtype))
    optimizer = torch.optim.Adam([*net.parameters(), log_temperature], lr=2e-3)
    for number, images in enumerate(repeated(batches, num_batches)):
        rng, each = at_batch(state, number).rng, torch.arange(len(images))
        shifts = pc.random.randint(rng("shifts").per_example(each), (len(images), 2, 2), 0, 3)
        noise = pc.random.normal(rng("noise").per_example(each), (len(images), 2, 8, 8), dtype=dtype)
        first, second = (F.normalize(net(v[:, None])[:, 0], dim=1) for v in views_of(images, shifts, noise))
        both = torch.cat([first, second])
        similarities = torch.exp(both @ both.T / log_temperature.exp())
        others = similarities.sum(1) - similarities.diagonal()
        positive = torch.exp((first * second).sum(1) / log_temperature.exp()).repeat(2)
        optimizer.zero_grad()
        (-torch.log(positive / others)).mean().backward()
        optimizer.step()
    params = {**dict(net.named_parameters()), "loss.log_temperature": log_temperature}
    return {name: param.detach() for name, param in params.items()}


def test_simclr_agrees_with_a_plain_loop() -> None:
    assert_agrees(make, plain_loop)
