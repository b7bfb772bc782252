"""A graph network: messages between neighbours give the energy of spins on graphs of different sizes.

A batch is one large graph, of which a `Splitter` counts and cuts out the single ones: microbatches are then exact.
"""

import sys

import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, Step, compose, loop_events, losses, optim


Graphs = dict[str, Tensor]
"""Spins (nodes, 1), edges (2, E) of node numbers, the graph of each node (nodes,), and energies (graphs, 1)."""


def graphs(seed: int, dtype: torch.dtype, number: int = 64) -> Graphs:
    """Return random graphs of 6 to 15 spins, each linked to a random other one; opposite neighbours cost energy."""
    keys = pc.random.split(pc.random.key(seed), 3)
    sizes = pc.random.randint(keys[0], (number,), 6, 16)
    graph = torch.arange(number).repeat_interleave(sizes)
    size, first, node = sizes[graph], (sizes.cumsum(0) - sizes)[graph], torch.arange(len(graph))
    other = first + (node - first + 1 + pc.random.randint(keys[1], graph.shape, 0, 1000) % (size - 1)) % size
    spins = (2 * pc.random.randint(keys[2], (len(graph), 1), 0, 2) - 1).to(dtype)
    edges = torch.stack([torch.cat([node, other]), torch.cat([other, node])])
    energy = -mean_by_graph(spins * spins[other], graph, number)
    return {"spins": spins, "edges": edges, "graph": graph, "energy": energy}


def mean_by_graph(values: Tensor, graph: Tensor, number: int) -> Tensor:
    zeros = values.new_zeros(number, values.shape[1])
    return zeros.index_add(0, graph, values) / zeros.index_add(0, graph, torch.ones_like(values))


def part(batch: Graphs, start: int, stop: int) -> Graphs:
    """Return the graphs from `start` to `stop`, whose nodes are numbered from 0."""
    first, last = torch.searchsorted(batch["graph"], torch.tensor([start, stop])).tolist()
    edges = batch["edges"][:, (batch["edges"][0] >= first) & (batch["edges"][0] < last)] - first
    spins, graph = batch["spins"][first:last], batch["graph"][first:last] - start
    return {"spins": spins, "edges": edges, "graph": graph, "energy": batch["energy"][start:stop]}


class GraphNetwork(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(1, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2 * width, width), nn.ReLU()) for _ in range(depth))

    def forward(self, batch: Graphs) -> Tensor:
        x, (source, target) = self.embed(batch["spins"]), batch["edges"]
        for layer in self.layers:
            x = x.index_add(0, target, layer(torch.cat([x[source], x[target]], 1)))
        return self.head(mean_by_graph(x, batch["graph"], len(batch["energy"])))


def make(dtype: torch.dtype = torch.float32) -> tuple[Step, State, list[Graphs]]:
    torch.manual_seed(0)  # for the initial weights
    splitter = pc.batch.Splitter(lambda batch: len(batch["energy"]), part)
    fields = {"input_field": pc.batch.AS_ARGUMENT, "target_field": "energy", "splitter": splitter}
    state = State.create(GraphNetwork().to(dtype), loss=losses.mse, optimizer=optim.adam(3e-3), **fields)
    return compose(loop_events), state, [graphs(seed, dtype) for seed in range(20)]


def main(duration: str) -> None:
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    step, start, batches = make()
    end, test = pc.fit(step, start, batches, duration=duration), [graphs(99, torch.float32)]
    before, after = (pc.evaluate(state, test)["loss"] for state in (start, end))
    print(f"loss {before:.4f} -> {after:.4f}; energies have a variance of {test[0]['energy'].var():.3f}")


if __name__ == "__main__":
    main("100ba" if "--short" in sys.argv else "1000ba")
