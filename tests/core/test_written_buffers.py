"""Buffers that a network writes within a stage: `state.call` keeps them, `state.forward` drops them with a warning."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import purecompose as pc
from purecompose import State, compose, optim
from purecompose.core.scopes import Grad
from purecompose.loop import advance, update
from tests.helpers import assert_close, make_state, run_steps


class Players(nn.Module):
    """A generator with batch normalisation, and a critic with spectral norms; `part` says which one runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gen = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
        self.disc = nn.Sequential(spectral_norm(nn.Linear(3, 8)), nn.Tanh(), spectral_norm(nn.Linear(8, 1))).double()

    def forward(self, part: str, inputs: Tensor) -> Tensor:
        return getattr(self, part)(inputs)


def critic_loss(state: State) -> State:
    noise, real = state.batch
    made, state = state.call(["gen", noise])
    fake, state = state.call(["disc", made.detach()])
    true, state = state.call(["disc", real])
    return state.replace(loss=fake.mean() - true.mean())


def maker_loss(state: State) -> State:
    made, state = state.call(["gen", state.batch[0]])
    score, state = state.call(["disc", made])
    return state.replace(loss=-score.mean())


def make_pairs(num: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of noise and of real examples, in float64."""
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(6, 4), draw(6, 3)) for _ in range(num)]


def make_step(program: list[Any], *, is_compiled: bool) -> Any:
    step = compose(program)
    return pc.compile(step, backend="eager", quiet=True) if is_compiled else step


@pytest.mark.parametrize("is_compiled", [False, True])
def test_players_with_buffers_equal_a_manual_loop(is_compiled: bool) -> None:
    program = [Grad(critic_loss, wrt="disc.*"), update(wrt="disc.*"), Grad(maker_loss, wrt="gen.*"), update, advance]
    batches = make_pairs(20)
    end = run_steps(
        make_step(program, is_compiled=is_compiled), make_state(Players(), optimizer=optim.sgd(0.1)), batches
    )

    net = Players()
    gen, disc = (torch.optim.SGD(part.parameters(), 0.1) for part in (net.gen, net.disc))
    for noise, real in batches:
        disc.zero_grad()
        fake = net("disc", net("gen", noise).detach())
        (fake.mean() - net("disc", real).mean()).backward()
        disc.step()
        gen.zero_grad()
        (-net("disc", net("gen", noise)).mean()).backward()
        gen.step()
    assert_close({**end.params, **end.buffers}, dict([*net.named_parameters(), *net.named_buffers()]), atol=1e-12)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("part", ["gen", "disc"])
def test_dropped_buffers_are_reported_in_the_first_step(part: str, is_compiled: bool) -> None:
    def scored(state: State) -> State:
        inputs = state.batch[0] if part == "gen" else state.batch[1]
        return state.replace(loss=state.forward([part, inputs], train=True).square().mean())

    step = make_step([Grad(scored, wrt=f"{part}.*"), update, advance], is_compiled=is_compiled)
    batch, state = make_pairs(1)[0], make_state(Players(), optimizer=optim.sgd(0.1))
    with pytest.warns(UserWarning, match=rf"dropped what the network wrote into {part}.*state = state.call\(inputs\)"):
        state = step(state, batch)
    step(state, batch)  # a second warning would be an error


def test_a_pass_that_writes_nothing_is_not_reported() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    net.register_buffer("mask", torch.tensor([torch.nan, 1.0]))
    step = compose([Grad(lambda state: state.replace(loss=state.forward(state.inputs, train=True).mean())), update])
    step(make_state(net, eval_mode=["1"]), make_pairs(1)[0])
