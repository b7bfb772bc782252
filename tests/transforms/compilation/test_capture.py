"""Code that cannot be traced is reported by name and line, or runs eagerly; plain bugs keep their own error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import Algorithm, Event, State
from purecompose.errors import TraceError
from tests.helpers import changing, make_batch, make_batches, make_state
from tests.transforms.compilation.compile_helpers import assert_agree, assert_runs_agree, made


def by_if(x: Tensor) -> Tensor:
    if x.sum() > 0:  # the line of if
        return x
    return -x


UNTRACEABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "if": by_if,
    "float": lambda x: x * float(x.detach().mean()),  # the line of float
    "item": lambda x: x * x.mean().item(),  # the line of item
    "mask": lambda x: x + x[x > 0].sum(),  # the line of mask
    "nonzero": lambda x: x * x.nonzero().shape[0],  # the line of nonzero
    "numpy": lambda x: x * float(x.detach().numpy().mean()),  # the line of numpy
}
CASES = [pytest.param(fn, name, id=name) for name, fn in UNTRACEABLE.items()]


class Layer(nn.Module):
    """A linear layer followed by a user's function."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.fn = nn.Linear(4, 3), fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.linear(x))


def reading(fn: Callable[[Tensor], Tensor], event: Event = Event.BATCH_START, **options: Any) -> Algorithm:
    return changing("reader", event, lambda state: state.replace(inputs=fn(state.inputs)), **options)


def test_fallback_compiles_the_schedules_that_it_can() -> None:
    step, fast = made([reading(by_if, when=pc.every(3))], fallback=True)
    with pytest.warns(UserWarning, match="reader"):
        assert_runs_agree(step, fast, make_state(), make_batches(9))
    (variant,) = fast.variants()
    assert variant.hits == 6  # two before the reader acts first ran in an earlier graph, and that step ran as composed


def test_a_host_algorithm_may_read_numbers() -> None:
    step, fast = made([reading(by_if, host=True)])
    assert_runs_agree(step, fast, make_state(), make_batches(4))


# Plain bugs


def raising(error: Exception) -> Algorithm:
    def fail(state: State) -> State:
        del state
        raise error

    return changing("bug", Event.BATCH_START, fail)


@pytest.mark.parametrize(
    "error", [ValueError("boom"), KeyError("w"), RuntimeError("no"), ZeroDivisionError()], ids=repr
)
@pytest.mark.parametrize("fallback", [True, False])
def test_plain_bugs_keep_their_error(error: Exception, fallback: bool) -> None:
    _, fast = made([raising(error)], fallback=fallback)
    with pytest.raises(type(error)) as caught:
        fast(make_state(), make_batch())
    assert caught.value is error
    assert "in bug at Event.BATCH_START" in caught.value.__notes__


def test_wrong_shapes_keep_their_error() -> None:
    step, fast = made()
    batch = (torch.ones(8, 5), make_batch()[1])
    with pytest.raises(RuntimeError) as eager:
        step(make_state(), batch)
    with pytest.raises(type(eager.value)) as caught:
        fast(make_state(), batch)
    assert not isinstance(caught.value, TraceError)
    assert any("in the stage forward" in note for note in caught.value.__notes__)


# Contract violations are reported at the first compiled call


BREAKERS: dict[str, tuple[Callable[[State], State], str]] = {
    "slots": (lambda s: s.replace(slots={**s.slots, "new": torch.ones(())}), "slots"),
    "dtype": (lambda s: s.replace(hparams={k: p.double() for k, p in s.hparams.items()}), "hparams"),
    "in place": (lambda s: (s.params["0.bias"].add_(1), s)[1], "in place"),
    "in the dictionary": (lambda s: (s.params.__setitem__("0.bias", s.params["0.bias"] * 2), s)[1], "dictionary"),
    "no state": (lambda s: None, "must return a State"),  # pyright: ignore[reportAssignmentType]
    "static": (lambda s: s.replace(frozen=frozenset({"0.bias"})), "static part"),
}


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("fn, words", BREAKERS.values(), ids=BREAKERS)
def test_broken_contracts_come_through(fn: Callable[[State], State], words: str, donate: bool) -> None:
    with pytest.raises(pc.errors.ContractError) as eager:
        made([changing("breaker", Event.BATCH_START, fn)])[0](
            make_state(optimizer=pc.optim.sgd(pc.hparam("lr", 0.1))), make_batch()
        )
    _, fast = made([changing("breaker", Event.BATCH_START, fn)], donate=donate)
    state = make_state(optimizer=pc.optim.sgd(pc.hparam("lr", 0.1)))
    before = state.copy()
    with pytest.raises(pc.errors.ContractError, match=words) as caught:
        fast(state, make_batch())
    assert "breaker" in str(caught.value) and type(caught.value) is type(eager.value)
    assert_agree(before, state, tolerance=0)


@pytest.mark.parametrize("donate", [True, False])
def test_the_clock_is_read_in_every_step(donate: bool) -> None:
    def show(event: Event, state: State) -> State:
        clock = state.clock
        assert clock is not None
        told = {
            f"{event.name}/{name}": getattr(clock, name) for name in ("batch", "epoch", "sample", "elapsed", "draw")
        }
        return state.replace(metrics={**state.metrics, **told})

    step, fast = made([Algorithm("show", pc.on(Event.BATCH_START, Event.BATCH_END), show)], donate=donate)
    state = make_state(duration="2ep", batches_per_epoch=3)
    assert_runs_agree(step, fast, state, make_batches(6), tolerance=0)
    assert len(fast.variants()) == 1


def test_open_sizes_do_not_leave_in_the_metrics_as_symbols() -> None:
    def told(state: State) -> State:
        return state.replace(metrics={"n": torch.full((), state.num_examples)})

    tell = changing("tell", Event.BATCH_START, told)
    step, fast = made([tell], dynamic=True)
    assert_runs_agree(step, fast, make_state(), [make_batch(seed, size) for seed, size in enumerate((4, 6, 5))])
