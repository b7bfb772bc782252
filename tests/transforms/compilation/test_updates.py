"""Fused updates write into donated buffers, unless old values are read after them."""

import pytest
from torch import fx, nn

from purecompose import Algorithm, Event, State, algorithms as alg, on, optim
from tests.helpers import make_batches, make_state
from tests.transforms.compilation.compile_helpers import assert_runs_agree, count, kept_graphs, made


def deep() -> nn.Module:
    """Return a network with enough parameters for one operation to update them."""
    return nn.Sequential(*[layer for _ in range(17) for layer in (nn.Linear(4, 4), nn.Tanh())], nn.Linear(4, 3))


def change(event: Event, state: State) -> State:
    """Remember the parameters at the start of a step, and how they have changed at its end."""
    old = state.params
    if event in (Event.INIT, Event.BATCH_START):
        return state.replace(slots={"change": old})
    return state.replace(slots={"change": {name: old[name] - last for name, last in state.slots["change"].items()}})


CHANGE = Algorithm("change", on(Event.INIT, Event.BATCH_START, Event.BATCH_END), change)


def descend(event: Event, state: State) -> State:
    assert state.grads is not None
    biases = [name for name, param in state.params.items() if param.shape == (4,)]
    others = zip(biases, biases[-1:] + biases[:-1], strict=True)
    return state.replace(grads={**state.grads, **{name: state.params[other] for name, other in others}})


DESCEND = Algorithm("descend", on(Event.AFTER_TRAIN_BATCH), descend)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    return kept_graphs(monkeypatch)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "methods, donate, in_place",
    [([], True, 1), ([alg.ema(half_life="2ba")], True, 1), ([CHANGE], True, 0), ([DESCEND], True, 0), ([], False, 0)],
    ids=["plain", "reads the new values", "reads the old values", "has parameters as gradients", "keeps the state"],
)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_updates_are_in_place_where_no_old_value_is_read_later(
    graphs: list[fx.GraphModule], backend: str, methods: list[Algorithm], donate: bool, in_place: int
) -> None:
    step, fast = made(methods, donate=donate, backend=backend)
    state = step.init(make_state(deep(), optimizer=optim.adamw(0.01, weight_decay=0.1, amsgrad=True)))
    # Differences in rounding grow through many layers.
    assert_runs_agree(step, fast, state, make_batches(4), tolerance=1e-4)
    if backend == "eager":  # Inductor gets another graph
        (graph,) = graphs
        assert (count(graph, "adam_"), count(graph, "adam")) == (in_place, 1 - in_place)
