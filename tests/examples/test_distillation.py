"""Distillation: the example's step against a plain loop."""

import torch
from torch import Tensor

import purecompose as pc
from examples import distillation
from purecompose import tree


def plain_loop(num_batches: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    net = distillation.Pair(distillation.make_teacher()).to(dtype)
    net.teacher.eval()
    batches = [distillation.points(seed, dtype, wrong=0.5) for seed in range(20)]
    optimizer = torch.optim.Adam(net.student.parameters(), lr=3e-3)
    for i in range(num_batches):
        inputs, labels = batches[i % len(batches)]
        with torch.no_grad():
            teacher = net.teacher(inputs)
        optimizer.zero_grad()
        distillation.distillation_loss((net.student(inputs), teacher), labels, share=0.9)[0].backward()
        optimizer.step()
    return {name: param.detach() for name, param in net.named_parameters()}


def test_distillation_equals_a_plain_loop():
    step, start, batches = distillation.make(torch.float64)
    trained = pc.fit(step, start, batches, duration="25ba")
    torch.testing.assert_close(trained.params, plain_loop(25), rtol=1e-9, atol=1e-9)


def test_the_teacher_stands_still():
    step, start, batches = distillation.make()
    trained = pc.fit(step, start, batches, duration="3ba")
    teacher = {name for name in start.params if name.startswith("teacher.")}
    assert tree.equal(trained.buffers, start.buffers)
    assert all(torch.equal(trained.params[name], start.params[name]) for name in teacher)
    assert teacher.isdisjoint(trained.opt_state["exp_avg"])
    assert {*trained.metrics} == {"loss/soft", "loss/hard"}
