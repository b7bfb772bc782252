"""DP-SGD clips the gradient of each example and adds noise, so that a network learns little about any of them.

A fifth of the labels is wrong, and a plain network learns many of these by heart. How private a run is follows from its
noise, its batches and its length by an accountant: see docs/algorithms/per_example_clipping.md.
"""

import sys

import torch

import purecompose as pc
from purecompose import Algorithm, State, algorithms as alg, compose, loop_events, optim


digits = pc.data.load("digits")
keys = pc.random.split(pc.random.key(0), 2)
WRONG = pc.random.bernoulli(keys[0], 0.2, (len(digits.train_targets),))
SHIFT = torch.where(WRONG, pc.random.randint(keys[1], WRONG.shape, 1, 10), 0)
LABELS = (digits.train_targets + SHIFT) % 10


def trained(methods: list[Algorithm], duration: str) -> State:
    net = pc.nn.models.build("mlp", in_shape=(1, 8, 8), num_classes=10, seed=0, hidden=(64,))
    optimizer = optim.sgd(0.5 if methods else 0.1, momentum=0.9)
    state = State.create(net, loss=pc.losses.cross_entropy, optimizer=optimizer, key=0, duration=duration)
    return pc.fit(compose(loop_events, methods), state, pc.data.arrays(digits.train_inputs, LABELS, batch_size=64))


def main(duration: str) -> None:
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    private = alg.per_example_clipping(0.1, noise_multiplier=1.0)
    test = pc.data.arrays(digits.test_inputs, digits.test_targets, batch_size=256)
    for name, methods in {"plain": [], "DP-SGD": [private]}.items():
        state = trained(methods, duration)
        accuracy = pc.evaluate(state, test, ["accuracy"])["accuracy"]
        memorized = (state.forward(digits.train_inputs[WRONG]).argmax(1) == LABELS[WRONG]).double().mean()
        print(f"{name}: accuracy {accuracy:.3f}, wrong labels learned {memorized:.3f}")


if __name__ == "__main__":
    main("2ep" if "--short" in sys.argv else "30ep")
