"""A deep ensemble: eight perceptrons, with their own weights and draws, learn the digits at once and predict together.

`pc.population` trains them in one step. The mean of their probabilities is compared with those of two of them.
"""

import sys

import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, compose, loop_events, optim


MEMBERS = 8


def member(seed: int, duration: str) -> State:
    """Return one network's state; the seed makes its weights, and its draws in dropout."""
    net = pc.nn.models.build("mlp", in_shape=(1, 8, 8), num_classes=10, seed=seed, hidden=(64,), dropout=0.2)
    return State.create(net, loss=pc.losses.cross_entropy, optimizer=optim.adam(5e-3), key=seed, duration=duration)


def scores(probabilities: Tensor, targets: Tensor) -> str:
    """Return the accuracy, and the cross entropy."""
    accuracy = (probabilities.argmax(-1) == targets).double().mean()
    return f"accuracy {accuracy:.3f}, loss {nn.functional.nll_loss(probabilities.log(), targets):.3f}"


def main(duration: str) -> None:
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    digits = pc.data.load("digits")
    train = pc.data.arrays(digits.train_inputs, digits.train_targets, batch_size=64)
    test = pc.data.arrays(digits.test_inputs, digits.test_targets, batch_size=128)

    ensemble = pc.population(compose(loop_events), MEMBERS)
    states = pc.stack_states([member(seed, duration) for seed in range(MEMBERS)])
    states = pc.fit(ensemble, states, train)
    outputs = torch.cat(pc.predict(states, test, step=ensemble), 1)  # (members, examples, classes)
    probabilities = outputs.softmax(-1)
    for seed in range(2):
        print(f"member {seed}: {scores(probabilities[seed], digits.test_targets)}")
    print(f"ensemble: {scores(probabilities.mean(0), digits.test_targets)}")


if __name__ == "__main__":
    main("2ep" if "--short" in sys.argv else "20ep")
