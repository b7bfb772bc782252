"""The Wasserstein GAN against a plain loop with two optimizers."""

import torch
from torch import Tensor

import purecompose as pc
from examples.wgan_gp import TURNS, Players, make
from tests.examples.agreement import assert_agrees, at_batch, repeated


def plain_loop(num_batches: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    _, state, batches = make(num_batches, dtype)
    torch.manual_seed(0)
    players = Players().to(dtype)
    generator, critic = players.generator, players.critic
    of_generator, of_critic = (
        torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.9)) for net in (generator, critic)
    )
    for number, batch in enumerate(repeated(batches, num_batches)):
        rng, each = at_batch(state, number).rng, torch.arange(len(batch))

        def noise(name: str, rng=rng, each=each) -> Tensor:
            return pc.random.normal(rng(name).per_example(each), (len(each), 2), dtype=dtype)

        for turn in range(TURNS):
            real = batch[:, turn]
            with torch.no_grad():
                fake = generator(noise(f"noise {turn}"))
            share = pc.random.uniform(rng(f"share {turn}").per_example(each), (len(each), 1), dtype=dtype)
            between = torch.lerp(fake, real, share).requires_grad_()
            (slopes,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = ((slopes.pow(2).sum(1).sqrt() - 1) ** 2).mean()
            of_critic.zero_grad()
            (critic(fake).mean() - critic(real).mean() + penalty).backward()
            of_critic.step()
        of_generator.zero_grad()
        (-critic(generator(noise("noise of the generator"))).mean()).backward()
        of_generator.step()
    return {name: param.detach() for name, param in players.named_parameters()}


def test_the_wasserstein_gan_agrees_with_a_plain_loop() -> None:
    assert_agrees(make, plain_loop)
