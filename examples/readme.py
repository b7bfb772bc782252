"""The README's program on scikit-learn's digits: fifteen lines around two lists of batches."""

import argparse

import torch

import purecompose as pc
from purecompose import DEFAULT_PASSES, State, algorithms as alg, compose, data, loop_events, optim


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--short", action="store_true", help="two epochs instead of twenty")
epochs = 2 if parser.parse_args().short else 20

digits = data.load("digits")
batches = list(data.arrays(digits.train_inputs, digits.train_targets, 32))
test_batches = list(data.arrays(digits.test_inputs, digits.test_targets, 256))

net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
mixup, sb = alg.mixup(alpha=0.2), alg.selective_backprop(start=0.5, end=0.9, keep=0.5)
step = compose(loop_events, [mixup, sb], passes=DEFAULT_PASSES)

state = State.create(
    net,
    loss=pc.losses.cross_entropy,
    optimizer=optim.sgd(0.1, momentum=0.9),
    key=0,
    duration=f"{epochs}ep",
    batches_per_epoch=len(batches),
)
state = step.init(state)  # Event.INIT: surgery, slots
for _ in range(epochs):
    for batch in batches:  # batch = (inputs, targets)
        state = step(state, batch)  # the fold over loop_events
print(pc.evaluate(state, test_batches, metrics={"accuracy": pc.metrics.accuracy}))
