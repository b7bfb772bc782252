"""A compiled step agrees with the composed one for everything that a step can contain."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st
from torch import Tensor, nn

import purecompose as pc
from purecompose import Algorithm, Event, State, compose, loop_events, on, optim
from purecompose.core.program import events_in
from purecompose.core.scopes import Grad
from purecompose.loop import advance, update
from purecompose.schedule import cosine, hparam, linear
from purecompose.testing import strategies
from purecompose.testing.case import Subject
from purecompose.testing.tasks import TASKS
from purecompose.transforms.compilation import CompiledStep
from tests import shipped
from tests.helpers import (
    Unsized,
    changing,
    counter,
    decay,
    make_batch,
    make_batches,
    make_cnn,
    make_mlp,
    make_state,
    noise,
    without,
)
from tests.sampling import one_in
from tests.shipped_examples import examples_on_tasks
from tests.time.predicate_strategies import predicates
from tests.transforms.compilation.compile_helpers import (
    DONATE,
    assert_agree,
    assert_runs_agree,
    average,
    compiled,
    made,
    scaling,
    sharpness,
)


@pytest.mark.parametrize("donate", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("text, task", examples_on_tasks(quick=12))
def test_every_shipped_setting_agrees(text: str, task: str, donate: bool) -> None:
    step, fast = made([Subject.of(text).algorithm], donate=donate)
    state = step.init(TASKS[task].make_state(0, duration="20ba", batches_per_epoch=10))
    assert_runs_agree(step, fast, state, [TASKS[task].make_batch(seed, 6) for seed in range(20)])


OPTIMIZERS = {
    "sgd": optim.sgd(0.1),
    "momentum": optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "scheduled": optim.sgd(0.2 * cosine(warmup="0.2dur"), momentum=0.9),
    "hparams": optim.sgd(hparam("lr", 0.1) * linear()),
    "adam": optim.adam(1e-2),
    "adamw": optim.adamw(hparam("lr", 1e-2), weight_decay=0.1),
    "groups": optim.adam(1e-2, groups={"0.*": {"lr": 0.0}}),
}


@DONATE
@pytest.mark.parametrize("optimizer", one_in(3, OPTIMIZERS.values()))
def test_optimizers_and_schedules_agree(optimizer: Any, donate: bool) -> None:
    step, fast = made([noise()], donate=donate)
    state = step.init(make_state(optimizer=optimizer, duration="20ba"))
    assert_runs_agree(step, fast, state, make_batches(20))


def frozen(net: nn.Sequential) -> nn.Sequential:
    net[0].requires_grad_(False)
    return net


class Tied(nn.Module):
    """A network whose output layer uses the weight of the input layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Checkpointed(nn.Module):
    """A network that recomputes its middle part, dropout included, in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.outer = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(pc.nn.layers.checkpoint(lambda y: self.drop(torch.tanh(self.inner(y))), x))


class Scaled(nn.Module):
    """A network with a 0-d parameter, a 0-d buffer, and a parameter that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale, self.unused = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.scale * self.linear(x)


NETS = {
    "frozen": (lambda: frozen(make_mlp()), {}),
    "batch norm": (make_cnn, {}),
    "tied": (Tied, {}),
    "dropout": (lambda: make_mlp(dropout=0.4), {}),
    "bf16": (lambda: make_mlp(dropout=0.4), {"precision": "bf16"}),
    "float64": (lambda: make_mlp(dtype=torch.float64), {}),
    "checkpointed": (Checkpointed, {}),
    "buffers": (Scaled, {}),
    "channels last": (lambda: make_cnn().to(memory_format=torch.channels_last), {}),  # pyright: ignore[reportCallIssue]
}


@DONATE
@pytest.mark.parametrize("net, options", NETS.values(), ids=NETS)
def test_networks_agree(net: Any, options: dict[str, Any], donate: bool) -> None:
    torch.manual_seed(0)
    state = make_state(net(), optimizer=optim.adam(1e-2), **options)
    shape = (2, 6, 6) if "1.running_mean" in state.buffers else (4,)
    dtype = next(iter(state.params.values())).dtype
    step, fast = made(donate=donate)
    assert_runs_agree(step, fast, state, make_batches(20, shape=shape, dtype=dtype))


# Programs


@DONATE
def test_two_updates_with_a_varying_method_between_agree(donate: bool) -> None:
    program = (
        Event.AFTER_DATALOADER,
        Grad(pc.loop.forward, pc.loop.loss, wrt="0.*"),
        Event.AFTER_TRAIN_BATCH,
        update(wrt="0.*"),
        Grad(pc.loop.forward, pc.loop.loss, wrt="3.*"),
        update(wrt="3.*"),
        advance,
        Event.BATCH_END,
    )
    step = compose(program, [sharpness(when=pc.every(2)), decay(when=pc.every(3)), noise(when=pc.every(5))])
    assert_runs_agree(step, compiled(step, donate=donate), make_state(duration="12ba"), make_batches(12))


@DONATE
@pytest.mark.parametrize("microbatches", [1, 2])
def test_an_event_in_two_segments_varies_both(microbatches: int, donate: bool) -> None:
    parts = [
        (Grad(Event.BEFORE_FORWARD, pc.loop.forward, pc.loop.loss, wrt=part), update(wrt=part))
        for part in ("0.*", "3.*")
    ]
    if microbatches > 1:
        parts = [(pc.loop.Microbatches(gradient), step) for gradient, step in parts]
    step = compose(
        [*parts[0], *parts[1], advance], [scaling("scale", Event.BEFORE_FORWARD, 3.0, 2)], microbatches=microbatches
    )
    assert_runs_agree(step, compiled(step, donate=donate), make_state(duration="6ba"), make_batches(6))


@DONATE
@pytest.mark.parametrize("program", [(Event.AFTER_DATALOADER,), (pc.loop.forward, pc.loop.loss), (advance,)], ids=str)
def test_programs_that_train_nothing_agree(program: Any, donate: bool) -> None:
    step = compose(program, [noise()] if Event.AFTER_DATALOADER in program else [])
    fast = compiled(step, donate=donate)
    first = make_state()
    second = fast(first, make_batch())
    third = fast(second, make_batch(1))
    assert_agree(step(step(first, make_batch()), make_batch(1)), third)
    assert third.timestamp.batch == (2 if advance in program else 0)


def test_gradients_set_by_the_caller_are_applied() -> None:
    step = compose((update, advance))
    state = make_state()
    state = state.replace(grads={name: torch.ones_like(param) for name, param in state.params.items()})
    assert_agree(step(state, make_batch()).params, compiled(step)(state, make_batch()).params)


# Batches


@dataclasses.dataclass
class Example:
    """A batch of a class that is not a registered pytree."""

    x: Tensor
    y: Tensor
    name: str = "train"


class Encoding(dict):
    """A dictionary with attributes, as returned by tokenizers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


BATCHES = {
    "list": (lambda x, y: [x, y], 0, 1),
    "dict": (lambda x, y: {"x": x, "y": y}, "x", "y"),
    "dataclass": (Example, "x", "y"),
    "encoding": (lambda x, y: Encoding(x=x, y=y), "x", "y"),
    "nested": (lambda x, y: {"in": [x, {"mask": x > 0}], "y": y}, lambda batch: batch["in"][0], "y"),
    "constants": (lambda x, y: {"x": x, "y": y, "temperature": 2.0, "set": "train", "none": None}, "x", "y"),
}


@DONATE
@pytest.mark.parametrize("build, input_field, target_field", BATCHES.values(), ids=BATCHES)
def test_batches_of_any_structure_agree(build: Any, input_field: Any, target_field: Any, donate: bool) -> None:
    def warm(state: State) -> State:
        temperature = state.batch.get("temperature", 1.0) if isinstance(state.batch, dict) else 1.0
        return state.replace(outputs=state.outputs / temperature)

    step, fast = made([changing("warm", Event.AFTER_FORWARD, warm)], donate=donate)
    state = make_state(input_field=input_field, target_field=target_field)
    assert_runs_agree(step, fast, state, [build(*batch) for batch in make_batches(20)])
    assert len(fast.variants()) == 1


def test_changing_constants_in_a_batch_are_never_baked_in() -> None:
    warm = changing("warm", Event.BATCH_START, lambda s: s.replace(inputs=s.inputs * s.batch["scale"]))
    step, fast = made([warm])
    scales = [1.0, 2.0, 1, True, 0.5, 1.0]
    batches = [{"x": x, "y": y, "scale": scale} for (x, y), scale in zip(make_batches(6), scales, strict=True)]
    assert_runs_agree(step, fast, make_state(input_field="x", target_field="y"), batches)
    assert len(fast.variants()) == 5  # 1.0 twice; 1, 1.0 and True are three things


def test_arrays_in_a_batch_that_change_in_place_are_seen() -> None:
    numpy = pytest.importorskip("numpy")
    weights = numpy.ones(4, dtype="float32")
    warm = changing("warm", Event.BATCH_START, lambda s: s.replace(inputs=s.inputs * float(s.batch["w"][0])))
    step, fast = made([warm])
    state, (x, y) = make_state(input_field="x", target_field="y"), make_batch()
    batch = {"x": x, "y": y, "w": weights}
    assert_agree(step(state, batch), fast(state, batch))
    weights[:] = 3
    assert_agree(step(state, batch), fast(state, batch))


# Other features of a step


def test_fit_evaluate_and_predict_agree() -> None:
    step, fast = made([average(when=pc.every(2)), noise()])
    batches = make_batches(4)
    evaluator = pc.Evaluator(batches[:2], {"accuracy": pc.metrics.accuracy})
    told: dict[str, list[Any]] = {"eager": [], "fast": []}
    ends = {}
    for name, one in (("eager", step), ("fast", fast)):
        note = lambda event, state, name=name: told[name].append((event, cloned_metrics(state)))  # noqa: E731
        ends[name] = pc.fit(one, make_state(), Unsized(batches), evaluate=evaluator, observers=[note])
    assert_agree(ends["eager"], ends["fast"])
    assert [event for event, _ in told["eager"]] == [event for event, _ in told["fast"]]
    assert_agree([m for _, m in told["eager"]], [m for _, m in told["fast"]])
    leased = fast(ends["fast"].replace(timestamp=make_state().timestamp), batches[0])
    first = pc.evaluate(leased, batches, {"accuracy": pc.metrics.accuracy})
    assert first == pc.evaluate(leased.copy(), batches, {"accuracy": pc.metrics.accuracy})


def cloned_metrics(state: State) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.metrics.items()}


def test_the_composed_step_and_its_relatives_take_leased_states() -> None:
    step, fast = made([counter()])
    leased = fast(step.init(make_state()), make_batch())
    kept = leased.copy()
    assert_agree(step(kept, make_batch(1)), step(leased, make_batch(1)))
    end, trace = pc.traced(fast)(leased, make_batch(1))  # pyright: ignore[reportArgumentType]
    assert trace["counter", Event.BATCH_END].ran
    assert_agree(step(kept, make_batch(1)), end)
    assert_agree(kept, fast.fire(Event.EPOCH_END, leased))
    assert str(fast.plan(leased)) == str(step.plan(kept))
    assert_agree(fast(leased, make_batch(1)), step(kept, make_batch(1)))  # none of them has spent it


def test_gradients_through_a_compiled_step_equal_the_composed_ones() -> None:
    step, fast = made()
    state, batch = make_state(optimizer=optim.sgd(hparam("lr", 0.1))), make_batch()

    def after(one: Any) -> Tensor:
        lr = torch.tensor(0.1, requires_grad=True)
        loss = one(one(state.replace(hparams={"lr": lr}), batch), batch).loss
        return torch.autograd.grad(loss, lr)[0]

    torch.testing.assert_close(after(step), after(fast))
    by_func = torch.func.grad(lambda lr: fast(fast(state.replace(hparams={"lr": lr}), batch), batch).loss)
    torch.testing.assert_close(by_func(torch.tensor(0.1)), after(step))
    assert len(fast.variants()) == 0


def test_replace_compiles_the_new_step_with_the_same_options() -> None:
    _, fast = made(donate=False, max_variants=7)
    other = fast.replace(algorithms=[noise()])
    assert isinstance(other, CompiledStep) and other.options == fast.options
    assert [algorithm.name for algorithm in other.algorithms] == ["noise"]
    assert_agree(other.step(make_state(), make_batch()), other(make_state(), make_batch()))


@pytest.mark.parametrize(
    "error, words, options",
    [
        (TypeError, "donate", {"donate": 1}),
        (TypeError, "fallback", {"fallback": None}),
        (TypeError, "quiet", {"quiet": "no"}),
        (TypeError, "dynamic", {"dynamic": 2}),
        (ValueError, "max-autotune", {"mode": "fast"}),
        (TypeError, "backend", {"backend": 3}),
        (ValueError, "nonsense", {"backend": "nonsense"}),
        (ValueError, "max_variants", {"max_variants": 0}),
        (ValueError, "eager_below", {"eager_below": -1}),
        (TypeError, "eager_below", {"eager_below": 2.5}),
    ],
)
def test_compile_rejects_bad_arguments(error: type[Exception], words: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=words):
        pc.compile(compose(loop_events), **options)


def test_an_argument_that_is_not_a_step_is_rejected() -> None:
    step, fast = made()
    with pytest.raises(TypeError, match=r"step\.step"):
        pc.compile(fast)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="compose"):
        pc.compile(make_mlp())  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="expected a State first, got tuple"):
        fast(make_batch(), step)  # pyright: ignore[reportArgumentType]


def test_inference_mode_raises_the_error_of_the_composed_step() -> None:
    _, fast = made()
    with torch.inference_mode(), pytest.raises(RuntimeError, match="no_grad"):
        fast(make_state(), make_batch())


@DONATE
def test_states_made_in_inference_mode_agree(donate: bool) -> None:
    step, fast = made(donate=donate)
    with torch.inference_mode():
        lr = torch.tensor(0.05)
    state = make_state(optimizer=optim.sgd(hparam("lr", 0.1))).replace(hparams={"lr": lr})
    after = fast(state, make_batch())
    assert after.hparams["lr"] == lr
    assert_agree(step(step(state, make_batch()), make_batch()), fast(after, make_batch()))


# Any step at all


def timed(name: str, event: Event, when: Any, host: bool) -> Algorithm:
    """Return an algorithm that acts when a drawn predicate holds, on the fields that exist at the event."""

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            return state.replace(slots={**state.slots, name: torch.zeros(())})
        told = {**state.metrics, f"{name}/{event.name}": state.slots[name]}
        new = state.replace(slots={**state.slots, name: state.slots[name] + 1}, metrics=told)
        if event.sees_new_time:
            return new.replace(params={key: param * 0.95 for key, param in state.params.items()})
        if new.inputs.is_floating_point() and event in (Event.AFTER_DATALOADER, Event.BATCH_START):
            return new.replace(
                inputs=new.inputs + 0.1 * pc.random.normal(new.rng(name), tuple(new.inputs.shape)).to(new.inputs)
            )
        return new

    return Algorithm(name, on(Event.INIT) | (on(event) & when), apply, host=host)


RUN = pc.time.RunLength("8ba", batches_per_epoch=4)


@DONATE
@pytest.mark.filterwarnings("ignore:.* which the program does not have")
@settings(max_examples=3, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking takes minutes
@given(data=st.data())
def test_any_step_agrees(data: st.DataObject, donate: bool) -> None:
    task = data.draw(strategies.tasks())
    program = loop_events
    for name in data.draw(st.sets(st.sampled_from(sorted({e.canonical_name for e in events_in(loop_events)})))):
        program = without(program, name)
    methods = data.draw(shipped.algorithm_lists(task=task, max_size=2))
    inside = set(events_in([n for n in program if isinstance(n, (Grad, pc.loop.Microbatches))]))
    for number in range(data.draw(st.integers(0, 3))):
        events = [event for event in events_in(program)]
        if not events:
            break
        event = data.draw(st.sampled_from(events))
        host = event not in inside and data.draw(st.booleans())
        methods.append(timed(f"m{number}", event, data.draw(predicates(RUN)), host))
    step = compose(program, methods, microbatches=data.draw(st.integers(1, 2)))
    state = step.init(task.make_state(data.draw(st.integers(0, 9)), duration="8ba", batches_per_epoch=4))
    batches = [task.make_batch(seed, 4) for seed in range(4)]
    assert_runs_agree(step, compiled(step, donate=donate), state, batches, tolerance=3e-5)
