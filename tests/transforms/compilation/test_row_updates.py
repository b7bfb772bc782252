"""Updates of large embeddings equal those of torch for sparse gradients, which are dense only where they are read."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, SparseAdam

import purecompose as pc
from purecompose import State, algorithms as alg, optim
from tests.transforms.compilation.compile_helpers import count, kept_graphs, made


SIZE, WIDTH = 2**15, 8  # as many bytes as the smallest table that is updated row by row


class Net(nn.Module):
    """Bags of rows, by one kind of look-up or by several, and a linear layer."""

    def __init__(self, kind: str, *, sparse: bool = True) -> None:
        super().__init__()
        self.kind, mode = kind, kind if kind in ("sum", "mean") else "mean"
        padding = None if kind == "plain" else 0
        self.table = nn.Embedding(SIZE, WIDTH, padding_idx=padding, sparse=sparse)
        if kind in ("sum", "mean"):
            self.table = nn.EmbeddingBag(SIZE, WIDTH, mode=mode, padding_idx=padding, sparse=sparse)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, indices: Tensor) -> Tensor:
        found = self.table(indices)
        if self.kind in ("plain", "twice"):
            found = found.mean(1)
        if self.kind == "twice":
            found = found + self.table(indices[:, 0])
        return self.head(found)


Rule = tuple[Any, Any]
RULES: dict[str, Rule] = {
    "sgd": (optim.sgd(0.5), lambda net: [SGD(net.parameters(), 0.5)]),
    "adagrad": (optim.adagrad(0.1, eps=1e-6), lambda net: [Adagrad(net.parameters(), 0.1, eps=1e-6)]),
    "sparse_adam": (
        optim.by_pattern({"table.weight": optim.sparse_adam(0.01)}, optim.adam(0.01)),
        lambda net: [SparseAdam([net.table.weight], 0.01), Adam(net.head.parameters(), 0.01)],
    ),
}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    return kept_graphs(monkeypatch)


def batches(num: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randint(40, (6, 5), generator=draw), torch.randint(3, (6,), generator=draw)) for _ in range(num)]


def new_state(net: nn.Module, optimizer: Any) -> State:
    return State.create(net, loss=pc.losses.cross_entropy, optimizer=optimizer, duration="9ba")


@pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks are implicitly disabled", "ignore:.torch.jit:DeprecationWarning"
)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["plain", "twice", "sum", "mean"])
@pytest.mark.parametrize("rule", RULES)
def test_eager_and_compiled_steps_equal_sparse_optimizers_of_torch(
    graphs: list[fx.GraphModule], rule: str, kind: str, backend: str
) -> None:
    torch.manual_seed(0)
    (ours, theirs), net = RULES[rule], Net(kind).double()
    step, fast = made(backend=backend)
    eager = other = new_state(net, ours)
    optimizers = theirs(net)
    for indices, labels in batches(6):
        eager, other = step(eager, (indices, labels)), fast(other, (indices, labels))
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(net(indices), labels).backward()
        for optimizer in optimizers:
            optimizer.step()
        for name, param in net.named_parameters():
            for state in (eager, other):
                torch.testing.assert_close(state.params[name], param.detach(), rtol=1e-9, atol=1e-9)
    if backend == "eager":  # Inductor gets another graph
        assert [count(graphs[0], name) for name in ("rows", "rows_at", "rows_at_")] == [0, 0, 1]
        assert not any(
            "backward" in str(node.target) and "embedding" in str(node.target) for node in graphs[0].graph.nodes
        )


@pytest.mark.parametrize("lr", [0.1, pc.hparam("lr", 0.1)])
def test_large_layers_move_by_the_same_bits_as_in_an_eager_step(graphs: list[fx.GraphModule], lr: Any) -> None:
    step, fast = made()
    state = new_state(nn.Linear(512, 1024), optim.sgd(lr))
    batch = torch.ones(4, 512), torch.zeros(4, dtype=torch.int64)
    assert pc.tree.equal(fast(state, batch).params, step(state, batch).params)
    assert count(graphs[0], "rows") == 1


@pytest.mark.parametrize("rule", RULES)
def test_a_row_that_many_indices_name_moves_by_the_sum_of_their_gradients(rule: str) -> None:
    net = Net("plain")
    with torch.no_grad():
        net.table.weight[:3] += 100  # to which the gradients of single examples add nothing
    (step, fast), state = made(), new_state(net, RULES[rule][0])
    batch = torch.arange(9000, dtype=torch.int32)[:, None] % 3, torch.arange(9000) % 2
    torch.testing.assert_close(dict(fast(state, batch).params), dict(step(state, batch).params), rtol=1e-6, atol=1e-6)
    assert (step(state, batch).params["table.weight"][:3] - net.table.weight[:3]).abs().max() > 1e-3


def test_rows_without_a_gradient_keep_their_bits_and_memory() -> None:
    _, fast = made()
    before = new_state(Net("plain"), RULES["sparse_adam"][0])
    after = before
    for batch in batches(3):
        after = fast(after, batch)
    for old, new in (
        (before.params["table.weight"], after.params["table.weight"]),
        (before.opt_state["exp_avg"]["table.weight"], after.opt_state["exp_avg"]["table.weight"]),
    ):
        assert torch.equal(old[40:], new[40:]) and not torch.equal(old[:40], new[:40])


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "methods, microbatches, donate, ops",
    [
        ([], 1, False, [0, 1, 0]),
        ([alg.gradient_clipping("norm", 0.01)], 1, True, [1, 0, 0]),
        ([alg.ema(half_life="2ba")], 1, True, [0, 0, 1]),
        ([alg.skip_nonfinite()], 1, True, [1, 0, 0]),
        ([], 2, True, [1, 0, 0]),
    ],
    ids=["keeps the state", "clips", "averages", "guards", "slices"],
)
def test_a_gradient_that_something_reads_is_dense_with_the_same_results(
    graphs: list[fx.GraphModule], methods: list[Any], microbatches: int, donate: bool, ops: list[int], backend: str
) -> None:
    step, fast = made(methods, microbatches=microbatches, donate=donate, backend=backend)
    eager = other = step.init(new_state(Net("plain"), RULES["sparse_adam"][0]))
    for batch in batches(4):
        eager, other = step(eager, batch), fast(other, batch)
    torch.testing.assert_close(dict(other.params), dict(eager.params))
    if backend == "eager":  # Inductor gets another graph
        assert [count(graphs[-1], name) for name in ("rows", "rows_at", "rows_at_")] == ops


@pytest.mark.parametrize("rule", RULES)
def test_a_population_updates_rows_as_single_members_do(rule: str) -> None:
    states = [new_state(Net("plain"), RULES[rule][0]) for _ in range(2)]
    step, (batch, *_) = made()[0], batches(1)
    members = pc.unstack_states(pc.population(step, 2)(pc.stack_states(states), batch))
    for member, state in zip(members, states, strict=True):
        torch.testing.assert_close(dict(member.params), dict(step(state, batch).params))


@pytest.mark.parametrize("optimizer", [optim.adam(), optim.sgd(0.1, momentum=0.9), optim.adagrad(weight_decay=0.1)])
def test_optimizers_that_move_all_rows_of_a_sparse_embedding_are_named(optimizer: Any) -> None:
    with pytest.warns(UserWarning, match=r"table.weight belongs to an embedding with sparse=True, but .* moves all"):
        new_state(Net("plain"), optimizer)
    new_state(Net("plain", sparse=False), optimizer)
