"""The diffusion model against a plain loop."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

import purecompose as pc
from examples.ddpm import Diffusion, make
from tests.examples.agreement import assert_agrees, draws_of_forward, repeated
from tests.helpers import assert_close, run_steps


def plain_run(num_batches: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters and their moving average."""
    _, state, batches = make(num_batches, dtype)
    torch.manual_seed(0)
    net = Diffusion().to(dtype)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    average = copy.deepcopy(net)
    for number, points in enumerate(repeated(batches, num_batches)):
        with draws_of_forward(state, number, len(points)):
            predicted, noise = net(points)
        optimizer.zero_grad()
        F.mse_loss(predicted, noise).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, param in zip(average.parameters(), net.parameters(), strict=True):
                mean.lerp_(param, 0.01 if number else 1.0)
    live, averaged = ({name: param.detach() for name, param in one.named_parameters()} for one in (net, average))
    return live, averaged


def plain_loop(num_batches: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return plain_run(num_batches, dtype)[0]


def test_the_diffusion_model_agrees_with_a_plain_loop() -> None:
    assert_agrees(make, plain_loop)


def test_the_average_for_sampling_agrees_with_a_plain_loop() -> None:
    step, state, batches = make(8, torch.float64)
    end = run_steps(step, state, repeated(batches, 8))
    assert_close(pc.with_weights(end, "ema").params, plain_run(8, torch.float64)[1], rtol=1e-10, atol=1e-10)
