"""Graph network: the example's step against a plain loop."""

import torch
from torch import Tensor
from torch.nn import functional as F

import purecompose as pc
from examples import graphs


def plain_loop(num_batches: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = graphs.GraphNetwork().to(dtype)
    batches = [graphs.graphs(seed, dtype) for seed in range(20)]
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for i in range(num_batches):
        batch = batches[i % len(batches)]
        optimizer.zero_grad()
        F.mse_loss(net(batch), batch["energy"]).backward()
        optimizer.step()
    return {name: param.detach() for name, param in net.named_parameters()}


def test_a_graph_network_equals_a_plain_loop():
    step, start, batches = graphs.make(torch.float64)
    trained = pc.fit(step, start, batches, duration="25ba")
    torch.testing.assert_close(trained.params, plain_loop(25), rtol=1e-9, atol=1e-9)


def test_parts_of_a_batch_of_graphs_are_graphs_of_their_own():
    batch = graphs.graphs(0, torch.float64)
    torch.manual_seed(0)
    net = graphs.GraphNetwork().double()
    cut = torch.cat([net(graphs.part(batch, start, start + 16)) for start in range(0, 64, 16)])
    torch.testing.assert_close(cut, net(batch))
