"""Graphs for the tests: a stand-in for torch_geometric's `Batch`, and a network on graphs."""

import copy
from typing import Any, Self

import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, batch as batches, optim


class Store:
    """The tensors of a batch, and the record of how it was joined."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self._num_graphs, self._slice_dict = len(tensors["y"]), {"x": tensors["ptr"]}


class Graphs:
    """A stand-in for torch_geometric's `Batch`, with the part of its protocol that is used."""

    def __init__(self, store: Store) -> None:
        self.stores = [store]

    @classmethod
    def from_data_list(cls, graphs: list[dict[str, Tensor]]) -> Self:
        sizes = torch.tensor([0, *[len(graph["x"]) for graph in graphs]])
        ptr = sizes.cumsum(0)
        edges = [graph["edge_index"] + first for graph, first in zip(graphs, ptr, strict=False)]
        joined = {
            "x": torch.cat([graph["x"] for graph in graphs]),
            "edge_index": torch.cat(edges, 1),
            "y": torch.cat([graph["y"] for graph in graphs]),
            "batch": torch.arange(len(graphs)).repeat_interleave(sizes[1:]),
            "ptr": ptr,
        }
        return cls(Store(joined))

    @property
    def num_graphs(self) -> int:
        return vars(self.stores[0]).get("_num_graphs", self.ptr.numel() - 1)

    def apply(self, fn: Any) -> Self:
        store = self.stores[0]
        store.tensors = {name: fn(tensor) for name, tensor in store.tensors.items()}
        return self

    def to_dict(self) -> dict[str, Tensor]:
        return dict(self.stores[0].tensors)

    def __call__(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        tensors = {} if name.startswith("_") else self.stores[0].tensors
        if name not in tensors:
            raise AttributeError(name)
        return tensors[name]

    def __copy__(self) -> Self:
        return type(self)(copy.copy(self.stores[0]))

    def __getitem__(self, part: slice) -> list[dict[str, Tensor]]:
        return [self._graph(i) for i in range(self.num_graphs)[part]]

    def _graph(self, i: int) -> dict[str, Tensor]:
        rows = slice(self.ptr[i], self.ptr[i + 1])
        edges = self.edge_index[:, self.batch[self.edge_index[0]] == i] - self.ptr[i]
        return {"x": self.x[rows], "edge_index": edges, "y": self.y[i : i + 1]}


def make_graph(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num = 3 + seed % 4
    edges = torch.randint(0, num, (2, 2 * num + seed % 3), generator=generator)
    x = torch.randn(num, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "edge_index": edges, "y": torch.tensor([seed % 3])}


def own(graphs: list[dict[str, Tensor]]) -> Any:
    return Graphs.from_data_list(graphs)


class GraphNet(nn.Module):
    """One round of messages along the edges, and the sum over each graph's nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, graphs: Any) -> Tensor:
        hidden = self.first(graphs.x)
        source, target = graphs.edge_index
        hidden = torch.tanh(hidden.index_add(0, target, hidden[source]))
        return self.head(hidden.new_zeros(graphs.num_graphs, 8).index_add(0, graphs.batch, hidden))


def make_graph_state(**options: Any) -> State:
    torch.manual_seed(0)
    keys = {"input_field": batches.AS_ARGUMENT, "target_field": "y", "duration": "2ep"}
    net = GraphNet().double()
    return State.create(net, loss=pc.losses.cross_entropy, optimizer=optim.sgd(0.1), **{**keys, **options})
