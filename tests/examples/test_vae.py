"""The variational autoencoder against a plain loop."""

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.vae import VAE, make
from tests.examples.agreement import assert_agrees, draws_of_forward, repeated


def plain_loop(num_batches: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    _, state, batches = make(num_batches, dtype)
    torch.manual_seed(0)
    net = VAE().to(dtype)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for number, images in enumerate(repeated(batches, num_batches)):
        beta = min(1.0, number / (0.5 * num_batches))
        with draws_of_forward(state, number, len(images)):
            logits, mean, log_var = net(images)
        reconstruction = F.binary_cross_entropy_with_logits(logits, images.flatten(1), reduction="sum") / len(images)
        kl = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum() / len(images)
        optimizer.zero_grad()
        (reconstruction + beta * kl).backward()
        optimizer.step()
    return {name: param.detach() for name, param in net.named_parameters()}


def test_the_vae_agrees_with_a_plain_loop() -> None:
    assert_agrees(make, plain_loop)
