"""PPO: a network learns to balance poles on carts. `data.stream` makes each batch, a rollout, from the state.

One step trains eight times on a rollout. `Checkpoints(extra=carts)` saves where the carts are, and runs resume exactly.
"""

import sys

import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import Event, State, Step, compose, data, loop, optim


class Carts(nn.Module):
    """Sixteen carts with poles, and rollouts of 64 steps; their places are position, speed, angle, angular speed."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.places, self.length = nn.Buffer(torch.zeros(16, 4, dtype=dtype)), nn.Buffer(torch.zeros(()))

    def move(self, actions: Tensor) -> Tensor:  # 0.02 s, with a push to the left (0) or to the right (1)
        _, speed, angle, spin = self.places.unbind(1)
        push = (20.0 * actions - 10 + 0.05 * spin.square() * angle.sin()) / 1.1
        turn = (9.8 * angle.sin() - angle.cos() * push) / (2 / 3 - 0.05 / 1.1 * angle.cos().square())
        return self.places + 0.02 * torch.stack([speed, push - 0.05 / 1.1 * turn * angle.cos(), spin, turn], 1)

    def forward(self, state: State) -> list[Tensor]:  # places, actions, log probabilities, advantages (GAE), returns
        seen = []
        for draw in pc.random.uniform(state.rng("rollout"), (64, 16, 5)).to(self.places.dtype):
            log_probs, values = split(state.forward(self.places))
            actions = (draw[:, 0] < log_probs[:, 1].exp()).long()
            new_places = self.move(actions)
            has_fallen = (new_places[:, 0].abs() > 2.4) | (new_places[:, 2].abs() > 0.21)
            seen.append([self.places, actions, log_probs.gather(1, actions[:, None])[:, 0], values, has_fallen])
            self.places = torch.where(has_fallen[:, None], 0.1 * draw[:, 1:] - 0.05, new_places)
        places, actions, log_probs, values, ends = map(torch.stack, zip(*seen, strict=True))
        advantages, advantage, following = torch.empty_like(values), 0.0, split(state.forward(self.places))[1]
        for i in reversed(range(64)):  # each step has the reward 1
            advantage = 1 - values[i] + torch.where(ends[i], 0.0, 0.99 * (following + 0.95 * advantage))
            advantages[i], following = advantage, values[i]
        self.length = 1024 / ends.sum().clamp(min=1)
        scaled = (advantages - advantages.mean()) / advantages.std()
        return [rows.flatten(0, 1) for rows in (places, actions, log_probs, scaled, advantages + values)]


def split(outputs: Tensor) -> tuple[Tensor, Tensor]:
    return outputs[:, :2].log_softmax(1), outputs[:, 2]  # log probabilities of both actions (N, 2), and values (N,)


def ppo_loss(outputs: Tensor, targets: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    (log_probs, values), (actions, old_log_probs, advantages, returns) = split(outputs), targets
    ratio = (log_probs.gather(1, actions[:, None])[:, 0] - old_log_probs).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    value, entropy = (values - returns).square().mean(), -(log_probs.exp() * log_probs).sum(1).mean()
    return policy + 0.01 * value - 0.01 * entropy, {"policy": policy, "value": value, "entropy": entropy}


def make(dtype: torch.dtype = torch.float32) -> tuple[Step, State, data.StateStream]:
    torch.manual_seed(0)  # for the initial weights; rollouts are drawn from the state's key
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)).to(dtype)
    state = State.create(net, loss=ppo_loss, optimizer=optim.adam(0.01), target_field=[1, 2, 3, 4])
    once = (loop.Microbatches(loop.Grad(loop.forward, loop.loss)), loop.update)
    step = compose((Event.AFTER_DATALOADER, *(8 * once), loop.advance, Event.BATCH_END))
    return step, state, data.stream(Carts(dtype))


def main(duration: str) -> None:
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    step, start, batches = make()
    assert isinstance(carts := batches.fn, Carts)
    lengths = [carts.length.item() for _ in pc.training(step, start, batches, duration=duration)]
    print(f"length {lengths[0]:.0f} -> {lengths[-1]:.0f}: steps per fall of a pole")


if __name__ == "__main__":
    main("30ba" if "--short" in sys.argv else "100ba")
