"""Warnings name the caller's line."""

import warnings

import torch

import purecompose as pc
from purecompose import algorithms as alg


def test_a_warning_of_a_method_names_the_line_of_the_program() -> None:
    net, optimizer = torch.nn.Linear(2, 2), pc.optim.adamw(0.1)
    state = pc.State.create(net, loss=pc.losses.cross_entropy, optimizer=optimizer, duration="9ba")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pc.compose(pc.loop_events, [alg.schedule_free()]).init(state)
    assert [warning.filename for warning in caught] == [__file__]
