"""Learns a learning rate and a label-smoothing strength: the gradient of a validation loss through whole steps.

Training is a function of its settings: `State.replace(hparams=...)`, then K steps, then a validation loss. This
program differentiates that function, in both forms that PyTorch has, holds both against central finite differences,
and descends on it. Many labels are wrong and there are few examples, so that a network which learns them by heart
does badly on others; it starts with a rate that is far too high, and next to no smoothing.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, algorithms as alg, compose, hparam, loop_events, optim


CLASSES, FEATURES, STEPS = 4, 16, 20
Batch = tuple[Tensor, Tensor]
Settings = dict[str, Tensor]


def noisy_points(key: Tensor, number: int) -> Batch:
    """Points around one centre a class; a third of the labels is drawn again. In float64, for the differences."""
    centres = pc.random.normal(pc.random.key(1), (CLASSES, FEATURES), dtype=torch.float64)
    where, noise, wrong, label = pc.random.split(key, 4)
    classes = pc.random.randint(where, (number,), 0, CLASSES)
    points = centres[classes] + 1.5 * pc.random.normal(noise, (number, FEATURES), dtype=torch.float64)
    drawn = pc.random.randint(label, (number,), 0, CLASSES)
    return points, torch.where(pc.random.bernoulli(wrong, 0.35, (number,)), drawn, classes)


def new_state(seed: int) -> State:
    """A network before its first step. `hparam` names the settings that live in the state."""
    torch.manual_seed(seed)  # for the initial weights only; all else draws from keys
    net = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, CLASSES)).double()
    optimizer = optim.sgd(hparam("lr", 0.3), momentum=0.9)
    return State.create(net, loss=pc.losses.cross_entropy, optimizer=optimizer, key=seed, duration=f"{STEPS}ba")


step = compose(loop_events, [alg.mixup(0.2), alg.label_smoothing(hparam("smoothing", 0.02))])


def train(start: State, batches: list[Batch], settings: Settings) -> State:
    """K whole steps with these settings; nothing here knows that it will be differentiated."""
    state = start.replace(hparams=settings)
    for i in range(STEPS):
        state = step(state, batches[i % len(batches)])
    return state


def loss_on(state: State, points: Batch) -> Tensor:
    """The plain cross entropy on other examples, without mixing or smoothing."""
    return nn.functional.cross_entropy(state.forward(points[0]), points[1])


def by_func(fn: Callable[[Settings], Tensor], settings: Settings) -> Settings:
    """The first form: a transform of the function."""
    return torch.func.grad(fn)(settings)


def by_autograd(fn: Callable[[Settings], Tensor], settings: Settings) -> Settings:
    """The second form: leaves that require a gradient, in `state.hparams`."""
    leaves = {name: value.clone().requires_grad_() for name, value in settings.items()}
    grads = torch.autograd.grad(fn(leaves), list(leaves.values()))
    return dict(zip(leaves, grads, strict=True))


def by_differences(fn: Callable[[Settings], Tensor], settings: Settings, size: float = 2e-6) -> Settings:
    """What both must be: two more trainings for each setting."""

    def slope(name: str, value: Tensor) -> Tensor:
        return (fn({**settings, name: value + size}) - fn({**settings, name: value - size})) / (2 * size)

    return {name: slope(name, value) for name, value in settings.items()}


def check(fn: Callable[[Settings], Tensor], settings: Settings) -> None:
    """Prints the three gradients side by side. Slopes below 0.01 are held against 0.01: rounding.

    Raises:
        AssertionError: One is off by more than a millionth.
    """
    expected = by_differences(fn, settings)
    print(f"{'d loss / d':<12}{'torch.func':>14}{'autograd':>14}{'differences':>14}{'relative gap':>14}")
    first, second = by_func(fn, settings), by_autograd(fn, settings)
    for name, value in expected.items():
        gap = max(abs(found[name] - value) / max(abs(value), 0.01) for found in (first, second))
        print(f"{name:<12}{first[name]:>14.8f}{second[name]:>14.8f}{value:>14.8f}{gap:>14.1e}")
        assert gap < 1e-6, f"{name}: the gradient through {STEPS} steps is off by {gap:.1e}"


def bounded(free: Settings) -> Settings:
    """Settings from numbers that may move freely: a rate is positive, a share lies between 0 and 1."""
    return {"lr": free["lr"].exp(), "smoothing": free["smoothing"].sigmoid()}


def learn(loss_of: Callable[[Settings], Tensor], settings: Settings, rounds: int) -> Settings:
    """Adam on the free numbers; a round is one training, and one backward pass through all of it."""
    free = {"lr": settings["lr"].log(), "smoothing": settings["smoothing"].logit()}
    outer = optim.adam(0.3, betas=(0.5, 0.9))  # two pure functions, which serve here as in a step
    memory = outer.init(free)
    print(f"\n{'round':>5}{'validation loss':>18}{'lr':>10}{'smoothing':>12}")
    for i in range(rounds + 1):
        grads, loss = torch.func.grad_and_value(lambda free: loss_of(bounded(free)))(free)
        if i % max(rounds // 8, 1) == 0:
            print(f"{i:>5}{loss:>18.4f}{bounded(free)['lr']:>10.4f}{bounded(free)['smoothing']:>12.4f}")
        if i < rounds:
            free, memory = outer.update(grads, memory, free)
    return bounded(free)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="12 rounds instead of 24")
    rounds = 12 if parser.parse_args().short else 24
    torch.set_num_threads(1)  # at this size more threads only wait for each other

    points, valid, test = (noisy_points(pc.random.key(10 + i), number) for i, number in enumerate((64, 512, 2048)))
    batches = [(points[0][i : i + 32], points[1][i : i + 32]) for i in range(0, 64, 32)]
    start = step.init(new_state(0))
    settings = {name: value.double() for name, value in start.hparams.items()}

    def validation_loss(settings: Settings) -> Tensor:
        return loss_on(train(start, batches, settings), valid)

    check(validation_loss, settings)
    learned = learn(validation_loss, settings, rounds)
    assert validation_loss(learned) < validation_loss(settings)
    check(validation_loss, learned)

    print("\nother initial weights, other draws, other examples:")
    for name, chosen in {"before": settings, "learned": learned}.items():
        losses = torch.stack([loss_on(train(step.init(new_state(seed)), batches, chosen), test) for seed in (1, 2, 3)])
        print(f"  test loss {name:<8} {losses.mean():.4f}")


if __name__ == "__main__":
    main()
