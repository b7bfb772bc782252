"""The README's program: a small network on scikit-learn's digits, with two methods."""

import argparse

import torch

import purecompose as pc
from purecompose import algorithms as alg


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--short", action="store_true", help="two epochs instead of twenty")
epochs = 2 if parser.parse_args().short else 20

digits = pc.data.load("digits")
train = pc.data.arrays(digits.train_inputs, digits.train_targets, batch_size=32)
test = pc.data.arrays(digits.test_inputs, digits.test_targets, batch_size=256)

net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
state = pc.State.create(
    net,
    loss=pc.losses.cross_entropy,
    optimizer=pc.optim.sgd(0.1, momentum=0.9),
    key=0,
    duration=f"{epochs}ep",
    batches_per_epoch=len(train),
)
step = pc.compose(pc.loop_events, [alg.mixup(0.2), alg.selective_backprop(start=0.5, end=0.9, keep=0.5)])
state = step.init(state)  # methods replace modules and create their memory
for epoch in range(epochs):
    for batch in train.epoch(state.key, epoch):  # the order follows from the key, and so do all draws
        state = step(state, batch)  # a new state; the old one is as it was
print(pc.evaluate(state, test, metrics=["accuracy"]))
