"""Code that cannot be traced is reported by name and line, or runs eagerly; plain bugs keep their own error."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import purecompose as pc
from purecompose import Algorithm, Event, State
from purecompose.errors import TraceError
from tests.helpers import changing, make_batch, make_batches, make_state
from tests.transforms.compilation.compile_helpers import assert_agree, assert_runs_agree, average, made


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


@pytest.mark.parametrize("event", [Event.AFTER_DATALOADER, Event.BEFORE_FORWARD], ids=lambda event: event.name)
@pytest.mark.parametrize("fn, name", CASES)
def test_an_algorithm_that_reads_numbers_is_named_with_its_line(
    fn: Callable[[Tensor], Tensor], name: str, event: Event
) -> None:
    _, fast = made([reading(fn, event)])
    with pytest.raises(TraceError) as caught:
        fast(make_state(), make_batch())
    text = str(caught.value)
    assert f"reader at {event}" in text and f"the line of {name}" in text and "test_capture.py" in text
    assert all(way in text for way in ("torch.where", "in the data", "host=True", "fallback=True"))
    assert caught.value.__cause__ is not None


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("fn, name", CASES)
def test_a_network_that_reads_numbers_is_named_with_its_line(fn: Callable[[Tensor], Tensor], name: str) -> None:
    _, fast = made()
    with pytest.raises(TraceError) as caught:
        fast(make_state(Layer(fn)), make_batch())
    text = str(caught.value)
    assert "forward" in text and f"the line of {name}" in text and "test_capture.py" in text


def test_a_layer_of_torch_that_reads_numbers_is_named() -> None:
    class Adaptive(nn.AdaptiveLogSoftmaxWithLoss):
        def forward(self, input_: Tensor, target_: Any = None) -> Any:
            return self.predict(input_)

    _, fast = made()
    with pytest.raises(TraceError, match="in the layer '1' .Adaptive"):
        fast(make_state(nn.Sequential(nn.Linear(4, 4), Adaptive(4, 3, [1, 2], div_value=1))), make_batch())


def test_functions_of_torch_that_read_lengths_are_named_with_what_replaces_them() -> None:
    def ctc(outputs: Tensor, targets: Tensor) -> Tensor:
        ones = torch.ones_like(targets)
        return F.ctc_loss(outputs.log_softmax(1)[None], targets[:, None], ones, ones)

    def packed(x: Tensor) -> Tensor:
        return pack_padded_sequence(x[..., None], torch.full((8,), 3), batch_first=True).data.sum() + x

    with pytest.raises(TraceError, match=r"in the stage loss.* losses\.ctc\(.*is the same loss and compiles"):
        made()[1](make_state(nn.Linear(4, 3), loss=ctc), make_batch())
    with pytest.raises(TraceError, match=r"in the stage forward.*Pass the layer padded sequences"):
        made()[1](make_state(Layer(packed)), make_batch())


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("fn, name", CASES)
def test_fallback_runs_the_composed_step_with_one_warning(
    fn: Callable[[Tensor], Tensor], name: str, donate: bool
) -> None:
    step, fast = made(fallback=True, donate=donate)
    with warnings.catch_warnings(record=True) as told:
        warnings.filterwarnings("ignore", "Converting a tensor with requires_grad")
        warnings.filterwarnings("always", "a step cannot be compiled")
        assert_runs_agree(step, fast, make_state(Layer(fn)), make_batches(4))
    assert [warning.category for warning in told] == [UserWarning]
    assert f"the line of {name}" in str(told[0].message) and told[0].filename.endswith("compile_helpers.py")
    assert len(fast.variants()) == 0


@pytest.mark.parametrize("event", [Event.AFTER_DATALOADER, Event.BEFORE_FORWARD], ids=lambda event: event.name)
@pytest.mark.parametrize("donate", [True, False])
def test_fallback_keeps_an_algorithm_outside_of_the_gradient_between_compiled_parts(donate: bool, event: Event) -> None:
    step, fast = made([reading(by_if, event), average()], fallback=True, donate=donate)
    runs = "reader.* runs between compiled parts" if event is Event.AFTER_DATALOADER else "such steps run eagerly"
    with pytest.warns(UserWarning, match=f"in reader at .*As fallback=True asks, {runs}") as told:
        assert_runs_agree(step, fast, step.init(make_state()), [*make_batches(5), make_batch(9, size=5)])
    assert len(told) == 1
    assert [variant.hits for variant in fast.variants()] == ([4] if event is Event.AFTER_DATALOADER else [])


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
