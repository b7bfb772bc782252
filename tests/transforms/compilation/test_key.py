"""The key of a graph: everything that the graph relies on is compared before every step."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import purecompose as pc
from purecompose import Event, State, hparam, optim
from purecompose.core.context import Static
from purecompose.schedule import cosine, linear
from tests.helpers import changing, make_batch, make_batches, make_cnn, make_mlp, make_state
from tests.sampling import one_in
from tests.transforms.compilation.compile_helpers import DONATE, assert_agree, assert_runs_agree, average, made


# The batch


BATCHES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "fewer": lambda x, y: (x[:5], y[:5]),
    "one": lambda x, y: (x[:1], y[:1]),
    "channels last": lambda x, y: (x.contiguous(memory_format=torch.channels_last), y),
    "transposed": lambda x, y: (x.transpose(2, 3).contiguous().transpose(2, 3), y),
    "sliced": lambda x, y: (torch.cat([x, x], 3)[..., ::2], y),
    "offset": lambda x, y: (torch.cat([x[:1], x])[1:], y),
    "expanded": lambda x, y: (x[:1].expand_as(x), y),
    "soft targets": lambda x, y: (x, torch.nn.functional.one_hot(y, 3).float()),
    "narrow targets": lambda x, y: (x, y.to(torch.uint8)),
    "list": lambda x, y: [x, y],
    "more members": lambda x, y: (x, y, torch.ones(len(y))),
    "parameter": lambda x, y: (torch.nn.Parameter(x, requires_grad=False), y),
}


@DONATE
@pytest.mark.parametrize("change", one_in(2, BATCHES.values()))
def test_a_batch_of_another_form_gives_the_right_numbers(change: Any, donate: bool) -> None:
    step, fast = made(donate=donate)
    plain = make_batches(4, shape=(2, 6, 6))
    batches = [change(*batch) if number in (1, 3) else batch for number, batch in enumerate(plain)]
    assert_runs_agree(step, fast, make_state(make_cnn()), batches)


@DONATE
def test_a_batch_of_another_dtype_gives_the_eager_error_or_numbers(donate: bool) -> None:
    step, fast = made(donate=donate)
    state, (x, y) = make_state(), make_batch()
    state = fast(state, (x, y))
    with pytest.raises(RuntimeError, match="(?i)dtype|double|float"):
        fast(state, (x.double(), y))
    cast = changing("cast", Event.AFTER_DATALOADER, lambda s: s.replace(inputs=s.inputs.float()))
    step, fast = made([cast], donate=donate)
    batches = [(x, y), (x.double(), y), (x.half(), y), (x.to(torch.int32), y), (x, y)]
    assert_runs_agree(step, fast, make_state(), batches)
    assert len(fast.variants()) == 4


def test_a_batch_that_requires_a_gradient_runs_the_composed_step() -> None:
    step, fast = made()
    x, y = make_batch()
    x.requires_grad_()
    loss = fast(make_state(), (x, y)).loss
    assert loss is not None and loss.requires_grad
    assert_agree(step(make_state(), (x, y)), fast(make_state(), (x, y)))
    assert len(fast.variants()) == 0
    with torch.no_grad():
        assert_agree(step(make_state(), (x, y)), fast(make_state(), (x, y)))


def test_a_batch_with_a_lazy_sign_gives_the_right_numbers() -> None:
    step, fast = made()
    x, y = make_batch()
    plain, negated = torch.complex(x, x).imag, torch.complex(x, x).conj().imag
    assert negated.is_neg() and negated.stride() == plain.stride()
    assert_runs_agree(step, fast, make_state(), [(plain, y), (negated, y)])


def test_constants_that_only_differ_in_sign_have_separate_graphs() -> None:
    def scale(state: State) -> State:
        return state.replace(inputs=state.inputs * torch.copysign(torch.ones(()), torch.tensor(state.batch["z"])))

    step, fast = made([changing("scale", Event.BATCH_START, scale)])
    x, y = make_batch()
    assert_runs_agree(
        step, fast, make_state(input_field="x", target_field="y"), [{"x": x, "y": y, "z": z} for z in (0.0, -0.0)]
    )


def test_sparse_batches_are_an_error() -> None:
    _, fast = made()
    x, y = make_batch()
    with pytest.raises(TypeError, match="to_dense"):
        fast(make_state(), (x.to_sparse(), y))


# The state


def with_loss(state: State, loss: Any) -> State:
    return state.replace(static=Static(state.context.replace(loss=loss), state.timestamp))


def sliced(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


CHANGES: dict[str, Callable[[State], State]] = {
    "strides": lambda s: s.replace(params={name: sliced(param) for name, param in s.params.items()}),
    "strides of one": lambda s: s.replace(params={**s.params, "0.weight": s.params["0.weight"].t().contiguous().t()}),
    "strides of momentum": lambda s: s.replace(opt_state=pc.tree.map(sliced, s.opt_state)),
    "no loss": lambda s: s.replace(loss=None),
    "wide loss": lambda s: s.replace(loss=torch.zeros((), dtype=torch.float64)),
    "another loss": lambda s: with_loss(s, other_loss),
    "another optimizer": lambda s: s.replace(optimizer=optim.sgd(0.01, momentum=0.5)),
    "frozen": lambda s: s.replace(frozen=frozenset({"0.weight"})),
    "bf16": lambda s: s.replace(precision="bf16"),
    "another model": lambda s: s.replace(model=make_state(relu_mlp()).model),
    "more slots": lambda s: s.replace(slots={**s.slots, "more": torch.ones(2)}),
    "slots in another order": lambda s: s.replace(slots={"ema": dict(reversed(s.slots["ema"].items()))}),
    "more hparams": lambda s: s.replace(hparams={**s.hparams, "x": torch.tensor(1.0)}),
    "wide hparams": lambda s: s.replace(hparams={"lr": torch.tensor(0.2, dtype=torch.float64)}),
    "another length": lambda s: s.replace(timestamp=s.timestamp.replace(run=pc.time.RunLength("40ba", 20))),
}


def other_loss(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return 2 * torch.nn.functional.cross_entropy(outputs, targets, reduction=reduction)


def relu_mlp() -> torch.nn.Sequential:
    net = make_mlp()
    net[1] = torch.nn.ReLU()
    return net


@DONATE
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_state_of_another_form_gives_the_right_numbers(change: Callable[[State], State], donate: bool) -> None:
    step, fast = made([average()], donate=donate)
    optimizer = optim.sgd(hparam("lr", 0.1), momentum=0.9)
    eager = leased = step.init(make_state(optimizer=optimizer, duration="20ba"))
    for number, batch in enumerate(make_batches(5)):
        if number in (0, 2):
            eager, leased = change(eager), change(leased)
        eager, leased = step(eager, batch), fast(leased, batch)
        assert_agree(eager.loss, leased.loss)
    assert_agree(eager, leased)
    assert eager.context == leased.context


def test_a_parameter_that_requires_a_gradient_runs_the_composed_step() -> None:
    step, fast = made()
    state = fast(make_state(), make_batch())
    weight = state.params["0.weight"].clone().requires_grad_()
    state = state.replace(params={**state.params, "0.weight": weight})
    after = fast(state, make_batch(1))
    assert after.params["0.weight"].requires_grad
    assert_agree(step(state, make_batch(1)).params, after.params)
    assert len(fast.variants()) == 1


def test_schedules_in_another_order_give_the_right_numbers() -> None:
    step, fast = made()
    first, second = optim.sgd(0.1 * linear()), optim.sgd(0.1 * cosine())
    run = {"duration": "8ba", "batches_per_epoch": 4}
    one = make_state(optimizer=first, **run).replace(optimizer=second)
    other = make_state(optimizer=second, **run).replace(optimizer=first).replace(optimizer=second)
    assert one.context == other.context and one.context.schedules != other.context.schedules
    for state in (one, other):
        state = state.replace(timestamp=state.timestamp.advance(8).advance(8))
        assert_agree(step(state, make_batch()), fast(state, make_batch()))


# Torch's settings


@pytest.fixture
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def test_the_default_dtype_is_part_of_the_key(default_dtype: None) -> None:
    del default_dtype
    tell = changing("tell", Event.BATCH_START, lambda s: s.replace(metrics={"one": torch.ones(())}))
    _, fast = made([tell])
    state = fast(make_state(), make_batch())
    assert state.metrics["one"].dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    assert fast(state, make_batch()).metrics["one"].dtype is torch.float64
    assert len(fast.variants()) == 2


def test_threads_and_determinism_are_part_of_the_key() -> None:
    _, fast = made()
    state = fast(make_state(), make_batch())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        state = fast(state, make_batch())
    finally:
        torch.set_num_threads(threads)
    assert len(fast.variants()) == 2
    try:
        torch.use_deterministic_algorithms(True)
        fast(state, make_batch())
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(fast.variants()) == 3


def test_autocast_around_the_call_gives_the_eager_numbers() -> None:
    step, fast = made()
    state = make_state()
    fast(state, make_batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_agree(step(state, make_batch()), fast(state, make_batch()))


@dataclasses.dataclass(frozen=True)
class Settings:
    """A member of a batch that compares by value."""

    factor: float
    name: str = "s"


def test_objects_in_a_batch_are_compared_by_value() -> None:
    scale = changing("scale", Event.BATCH_START, lambda s: s.replace(inputs=s.inputs * s.batch["set"].factor))
    step, fast = made([scale])
    batches = [{"x": x, "y": y, "set": Settings(1.0 + number % 2)} for number, (x, y) in enumerate(make_batches(5))]
    assert_runs_agree(step, fast, make_state(input_field="x", target_field="y"), batches)
    assert len(fast.variants()) == 2
