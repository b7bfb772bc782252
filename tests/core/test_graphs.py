"""Batches of graphs and packed sequences: counted by themselves, and cut only by a splitter."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import purecompose as pc
from purecompose import State, algorithms as alg, batch as batches, compose, data, loop_events, optim
from tests.graphs import GraphNet, make_graph, make_graph_state, own
from tests.helpers import assert_near, assert_same, trained_by_torch


def geometric(graphs: list[dict[str, Tensor]]) -> Any:
    library = pytest.importorskip("torch_geometric.data")
    return library.Batch.from_data_list([library.Data(**graph) for graph in graphs])


def cut(graphs: Any, start: int, stop: int) -> Any:
    return type(graphs).from_data_list(graphs[start:stop])


GRAPHS = [[make_graph(seed) for seed in range(first, first + num)] for first, num in ((0, 5), (5, 5), (10, 3))]


def torch_params(make: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    graphs = map(make, GRAPHS)
    return trained_by_torch(GraphNet().double(), lambda net, one: nn.functional.cross_entropy(net(one), one.y), graphs)


def forms() -> dict[str, Any]:
    step = compose(loop_events)
    return {
        "composed": (step, {}),
        "compiled": (pc.compile(step, backend="eager", quiet=True), {}),
        "cut": (compose(loop_events, microbatches=2), {"splitter": pc.batch.Splitter(lambda b: b.num_graphs, cut)}),
    }


@pytest.mark.parametrize("make", [own, geometric])
@pytest.mark.parametrize("form", forms())
def test_graphs_train_as_in_torch(make: Any, form: str) -> None:
    step, options = forms()[form]
    state = pc.fit(step, make_graph_state(**options), [make(graphs) for graphs in GRAPHS], duration="1ep")
    assert_near(state.params, torch_params(make), 1e-12, 0.0)
    assert state.timestamp.sample == 13
    data_batches = [make(graphs) for graphs in GRAPHS]
    losses = [nn.functional.cross_entropy(state.forward([b]), b.y, reduction="sum").item() for b in data_batches]
    assert pc.evaluate(state, data_batches)["loss"] == pytest.approx(sum(losses) / 13, rel=1e-12)


@pytest.mark.parametrize("make", [own, geometric])
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (compose(loop_events, [alg.mixup()]), "mixup: expected examples along dimension 0 .* got a batch of graphs"),
        (compose(loop_events, [alg.selective_backprop()]), "selective_backprop: expected examples"),
        (compose(loop_events, microbatches=2), "microbatches=2: the batch would be cut, and a batch of graphs"),
    ],
)
def test_what_takes_rows_for_graphs_is_refused(make: Any, step: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step(step.init(make_graph_state()), make(GRAPHS[0]))


@pytest.mark.parametrize("make", [own, geometric])
def test_tensors_of_graphs_are_read_and_replaced(make: Any) -> None:
    graphs = make(GRAPHS[0])
    before = dict(graphs.to_dict())
    doubled = batches.map_tensors(lambda tensor: 2 * tensor, graphs)
    assert type(doubled) is type(graphs) and doubled.num_graphs == 5
    assert_same(dict(graphs.to_dict()), before)
    assert_same(batches.tensors(doubled), [2 * tensor for tensor in batches.tensors(graphs)])
    assert_same(batches.put(graphs, "y", graphs.y + 1).y, graphs.y + 1)
    assert_same(next(data.prefetch([graphs], "meta")).x.device, torch.device("meta"))
    with pytest.raises(KeyError, match=r"no member 'label'; it has the attributes \['x', 'edge_index'"):
        batches.get(graphs, "label")
    for change in (lambda: batches.split(graphs, 2), lambda: batches.take(graphs, torch.tensor([0]))):
        with pytest.raises(ValueError, match="not its examples: to cut it, give State.create"):
            change()


class Recurrent(nn.Module):
    """The last output of a recurrent layer for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 3)

    def forward(self, packed: PackedSequence) -> Tensor:
        return self.layer(packed)[1][-1]


@pytest.mark.parametrize("is_sorted", [True, False])
def test_packed_sequences_are_counted_by_sequence(is_sorted: bool) -> None:
    lengths = (5, 3, 2) if is_sorted else (2, 5, 3)
    torch.manual_seed(0)
    packed = pack_sequence([torch.randn(length, 4) for length in lengths], enforce_sorted=is_sorted)
    batch = packed, torch.tensor([0, 1, 2])
    net = Recurrent()
    state = State.create(net, loss=pc.losses.cross_entropy, optimizer=optim.sgd(0.1), duration="2ba")
    loss = nn.functional.cross_entropy(net(packed), batch[1])
    loss.backward()
    end = compose(loop_events)(state, batch)
    assert end.timestamp.sample == 3 and end.loss is not None and torch.allclose(end.loss, loss)
    for name, param in net.named_parameters():
        assert param.grad is not None and torch.allclose(end.params[name], param - 0.1 * param.grad)
    on_meta = next(data.prefetch([batch], "meta"))[0]
    assert (on_meta.data.device.type, on_meta.batch_sizes.device.type) == ("meta", "cpu")
    with pytest.raises(pc.errors.TraceError, match="fallback=True"):
        pc.compile(compose(loop_events), backend="eager", quiet=True)(state, batch)
    with pytest.raises(ValueError, match="microbatches=3: the batch would be cut, and a batch of .* packed sequences"):
        compose(loop_events, microbatches=3)(state, batch)


def test_graphs_in_a_dict_are_not_cut_by_nodes() -> None:
    """A dict does not say that it holds graphs; the faults that follow name the remedy."""

    class OnDict(GraphNet):
        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:  # pyright: ignore
            hidden = torch.tanh(self.first(x).index_add(0, edge_index[1], self.first(x)[edge_index[0]]))
            return self.head(hidden.new_zeros(5, 8).index_add(0, batch, hidden))

    step = compose(loop_events, microbatches=2)
    graphs = own(GRAPHS[0]).to_dict()
    options = {"loss": pc.losses.cross_entropy, "optimizer": optim.sgd(0.1), "duration": "2ba"}
    fields: dict[str, Any] = {"input_field": ["x", "edge_index", "batch"], "target_field": "y"}
    state = State.create(OnDict().double(), **options, **fields)
    for each in (compose(loop_events), step):
        with pytest.raises(ValueError, match=r"21 \(by .* or 5 \(by .*splitter=batch.Splitter"):
            each(state, graphs)
    with pytest.raises(IndexError) as caught:
        step(state, {**graphs, "y": torch.zeros(21, dtype=torch.int64), "ptr": None})
    assert "with all of ['int64[2, 46]']; if members of the batch point to its rows" in "".join(caught.value.__notes__)
    counted = state.replace(splitter=pc.batch.Splitter(lambda batch: len(batch["y"])))
    assert compose(loop_events)(counted, graphs).timestamp.sample == 5
    with pytest.raises(ValueError, match="microbatches=2: the batch would be cut"):
        step(counted, graphs)
