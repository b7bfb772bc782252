"""Populations: each member equals its single run, for all methods, batches and programs."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import (
    Algorithm,
    Event,
    State,
    algorithms as alg,
    compose,
    loop_events,
    on,
    optim,
    population,
    stack_states,
    tree,
    unstack_states,
)
from purecompose.core.scopes import Grad
from purecompose.loop import advance, update
from purecompose.observers import History, Progress
from purecompose.testing.case import Subject
from purecompose.testing.tasks import TASKS
from purecompose.transforms.population import Stacked
from tests.helpers import (
    assert_same,
    changing,
    counter,
    loss_of,
    make_batch,
    make_batches,
    make_cnn,
    make_mlp,
    make_state,
    noise,
    run_steps,
)
from tests.shipped_examples import computes_in_half, examples_on_tasks


def make_members(num: int = 3, net: Any = make_mlp, **options: Any) -> list[State]:
    """Return states with different weights, keys and learning rates."""
    options = {"optimizer": optim.sgd(pc.hparam("lr", 0.1), momentum=0.9), **options}
    states = [make_state(net(seed), key=seed, **options) for seed in range(num)]
    return [with_rate(state, 0.1 / (1 + i)) for i, state in enumerate(states)]


def with_rate(state: State, value: float) -> State:
    return state.replace(hparams={**state.hparams, "lr": torch.tensor(value)}) if "lr" in state.hparams else state


def assert_members(states: State, expected: Sequence[State], tolerance: float = 2e-5, floor: float = 1e-6) -> None:
    """Assert that integers are equal and floats as close as different matmul kernels allow."""
    found = unstack_states(states)
    assert len(found) == len(expected)
    for one, alone in zip(found, expected, strict=True):
        assert list(map(str, tree.differences(one, alone, tolerance=lambda _: tree.Tolerance(tolerance, floor)))) == []
        assert one.timestamp == alone.timestamp and one.context == alone.context


def assert_agrees(step: pc.Step, members: list[State], batches: Sequence[Any], **options: Any) -> State:
    """Assert that a population over shared batches equals its members' single runs, and return it."""
    pop, alone = population(step, len(members), **options), [step.init(state) for state in members]
    states = pop.init(stack_states(members))
    assert_members(states, alone, 0)
    for batch in batches:
        states, alone = pop(states, batch), [step(state, batch) for state in alone]
    assert_members(states, alone)
    return states


def penalty(points: Callable[[Tensor], Tensor]) -> Algorithm:
    """Return a penalty on the network's slope at points made from the inputs."""

    def add(state: State) -> State:
        x = points(state.inputs).requires_grad_()
        (slope,) = torch.autograd.grad(state.forward(x).sum(), x, create_graph=True)
        return state.replace(loss=loss_of(state) + slope.square().sum(1).mean())

    return changing("penalty", Event.AFTER_LOSS, add)


def test_gradients_may_be_taken_within_the_steps_gradient():
    mixed = penalty(lambda x: 0.3 * x + 0.7 * x.flip(0))
    assert_agrees(compose(loop_events, [mixed], microbatches=2), make_members(), make_batches(3))


def test_a_gradient_with_respect_to_the_batch_is_named_with_its_remedy():
    step = population(compose(loop_events, [penalty(lambda x: x)]), 3)
    with pytest.raises(RuntimeError, match=r"made outside of it, at .*x = x\.detach\(\)\.requires_grad_\(\)"):
        step(stack_states(make_members()), make_batch())


# Every method


@cache
def runs(text: str, name: str) -> tuple[pc.Step, list[State], list[Any], list[State]]:
    """Run four steps of each member by itself, the third with a smaller batch."""
    step, task = compose(loop_events, [Subject.of(text).algorithm]), TASKS[name]
    start = [step.init(task.make_state(seed, duration="6ba", batches_per_epoch=2)) for seed in range(3)]
    start = [with_rate(state, 0.1 / (1 + i)) for i, state in enumerate(start)]
    batches = [task.make_batch(seed, size) for seed, size in enumerate((6, 6, 5, 6))]
    return step, start, batches, [run_steps(step, state, batches) for state in start]


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize(("text", "name"), examples_on_tasks(quick=6))
def test_each_member_equals_its_single_run(text, name, chunk_size):
    step, start, batches, expected = runs(text, name)
    states = run_steps(population(step, 3, chunk_size), stack_states(start), batches)
    # In half precision other kernels round differently, by up to the precision of the format.
    tolerance, floor = (2e-2, 2e-3) if computes_in_half(name) else (1e-4, 1e-6)
    if computes_in_half(name):  # a metric such as SAM's sharpness is a difference of losses, each with 8 bits
        metrics = stack_states(expected).metrics
        torch.testing.assert_close(states.metrics, metrics, rtol=tolerance, atol=2**-6, equal_nan=True)
        states, expected = states.replace(metrics={}), [state.replace(metrics={}) for state in expected]
    assert_members(states, expected, tolerance, floor)
    losses = torch.stack([loss_of(state) for state in expected])
    torch.testing.assert_close(loss_of(states), losses, rtol=tolerance, atol=floor)
    assert not tree.equal(expected[0].params, expected[1].params)  # the members differ


def test_methods_together_and_dropout():
    methods = [alg.mixup(0.3), alg.label_smoothing(0.1), alg.selective_backprop(0, 1.0, full_every=2), counter()]
    members = make_members(4, lambda seed: make_mlp(seed, dropout=0.5), batches_per_epoch=3)
    states = assert_agrees(compose(loop_events, [*methods, noise()]), members, make_batches(4), chunk_size=3)
    assert states.slots["counter"].tolist() == [4] * 4


def test_batch_normalisation_and_microbatches():
    batches = make_batches(3, size=7, shape=(2, 6, 6))
    assert_agrees(compose(loop_events, [alg.mixup(0.3)], microbatches=2), make_members(net=make_cnn), batches)


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 5])
def test_each_member_may_have_its_own_batches(chunk_size):
    step = compose(loop_events, [alg.mixup(0.3), noise()], microbatches=2)
    members = [step.init(state) for state in make_members(input_field="x", target_field="y")]
    pop, states = population(step, 3, chunk_size, batches="each"), stack_states(members)
    for t, size in enumerate((6, 6, 4)):
        own = [dict(zip(("x", "y"), make_batch(10 * t + i, size), strict=True)) for i in range(3)]
        members = [step(state, batch) for state, batch in zip(members, own, strict=True)]
        stacked = {name: torch.stack([batch[name] for batch in own]) for name in ("x", "y")}
        states = pop(states, {**stacked, "set": "train"})
    assert_members(states, members)
    assert (states.timestamp.sample, states.timestamp.batch) == (16, 3)


# Programs


def test_two_players():
    first = [Grad(pc.loop.forward, pc.loop.loss, wrt="0.*"), update(wrt="0.*")]
    second = [Grad(pc.loop.forward, Event.BEFORE_LOSS, pc.loop.loss, Event.AFTER_LOSS, wrt="3.*"), update(wrt="3.*")]
    program = [*first, *second, advance, Event.BATCH_END]
    assert_agrees(compose(program, [alg.label_smoothing(0.1)]), make_members(4), make_batches(3), chunk_size=3)


def test_used_gradients_are_used_for_every_chunk():
    program = [
        Grad(pc.loop.forward, pc.loop.loss),
        update(wrt="0.*"),
        Grad(pc.loop.forward, pc.loop.loss),
        update(wrt="3.*"),
        advance,
    ]
    assert_agrees(compose(program), make_members(4), make_batches(2), chunk_size=1)
    again = compose([Grad(pc.loop.forward, pc.loop.loss), update, update, advance])
    with pytest.raises(RuntimeError, match="an earlier update has used every gradient"):
        population(again, 2, 1)(stack_states(make_members(2)), make_batch())


def sharpness(scale: float = 0.05) -> Algorithm:
    """Return an algorithm that uses the gradient at the point uphill, as SAM does."""

    def uphill(state: State) -> State:
        assert state.grads is not None
        norm = tree.global_norm(state.grads)
        point = {name: state.params[name] + scale * grad / norm for name, grad in state.grads.items()}
        grads, loss = state.gradient({**state.params, **point})
        return state.replace(grads=grads, metrics={**state.metrics, "uphill": loss})

    return changing("sharpness", Event.AFTER_TRAIN_BATCH, uphill)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_second_gradient(microbatches):
    step = compose(loop_events, [sharpness(), alg.mixup(0.3)], microbatches=microbatches)
    members = make_members(3, lambda seed: make_mlp(seed, dropout=0.3))
    states = assert_agrees(step, members, make_batches(3), chunk_size=2)
    assert states.metrics["uphill"].shape == (3,)


def test_lasting_tensors_have_one_row_per_member_in_memory():
    """Also if all members set the same value: a tensor with one row read n times could not be written to."""

    def keep(event: Event, state: State) -> State:
        fresh = state.inputs if event is Event.BATCH_START else torch.zeros(8, 4)
        return state.replace(slots={"kept": {"inputs": fresh, "fresh": torch.ones(2)}})

    step = compose(loop_events, [Algorithm("kept", on(Event.INIT, Event.BATCH_START), keep)])
    batch = make_batch()
    states = assert_agrees(step, make_members(), [batch])
    for leaf in (states.slots["kept"]["inputs"], states.slots["kept"]["fresh"]):
        assert leaf.shape[0] == 3 and leaf.stride(0) > 0
    assert torch.equal(states.slots["kept"]["inputs"][1], batch[0])


def test_the_first_run_of_a_members_batch_size_is_checked() -> None:
    def write(state: State) -> State:
        if state.num_examples == 5:
            state.params["0.weight"].mul_(2)
        return state

    pop = population(compose(loop_events, [changing("write", Event.BATCH_START, write)]), 3, batches="each")
    batches = [tuple(torch.stack([t] * 3) for t in make_batch(size=size)) for size in (8, 5)]
    states = pop(stack_states(make_members()), batches[0])
    with pytest.raises(pc.errors.ContractError, match="write at .*in place into state.params"):
        pop(states, batches[1])


def test_a_match_sees_the_shapes_of_a_member():
    seen = []

    def match(event: Event, state: Any) -> bool:
        if event is Event.BATCH_START:
            seen.append((state.batch[0].shape, state.params["0.weight"].shape, state.key.shape))
        return event is Event.BATCH_START

    step, (inputs, targets) = compose(loop_events, [Algorithm("look", match, lambda event, state: state)]), make_batch()
    states = stack_states([step.init(state) for state in make_members()])
    seen.clear()
    population(step, 3)(states, (inputs, targets))
    population(step, 3, batches="each")(states, (inputs.expand(3, 8, 4), targets.expand(3, 8)))
    assert set(seen) == {((8, 4), (8, 4), (2,))}


# Checks of the first run


def test_a_draw_without_a_key_is_refused():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + torch.randn(3)

    def draw(state: State) -> State:
        return state.replace(metrics={"noise": torch.randn(())})

    states = stack_states(make_members())
    with pytest.raises(pc.errors.UnkeyedRandomError, match=r"torch.randn\(\(\)\).*state.example_rng") as caught:
        population(compose(loop_events, [changing("draw", Event.BATCH_START, draw)]), 3)(states, make_batch())
    assert "in draw at Event.BATCH_START" in caught.value.__notes__
    keyed = stack_states([make_state(Noisy(), key=seed) for seed in range(2)])
    after = population(compose(loop_events), 2)(keyed, make_batch())  # draws in a network get keys
    assert loss_of(after).isfinite().all()


def test_a_changed_shape_is_reported_with_algorithm_and_path():
    widen = changing("widen", Event.BATCH_END, lambda s: s.replace(slots={"widen": torch.zeros(2)}))
    with pytest.raises(pc.errors.ContractError, match=r"widen at .*state.slots\['widen'\] from absent"):
        population(compose(loop_events, [widen]), 3)(stack_states(make_members()), make_batch())


# Outer events, init, plan


def test_init_runs_for_every_member():
    def remember(event: Event, state: State) -> State:
        drawn = pc.random.uniform(state.rng("start"), (2,))
        return state.replace(slots={**state.slots, "start": drawn})

    step = compose(loop_events, [Algorithm("start", on(Event.INIT), remember), alg.mixup(pc.hparam("alpha", 0.3))])
    states = assert_agrees(step, make_members(), make_batches(2))
    assert states.hparams["alpha"].shape == (3,) and len(states.slots["start"].unique()) == 6


def test_members_with_different_shapes_after_init_are_an_error():
    def remember(event: Event, state: State) -> State:
        return state.replace(slots={"size": torch.zeros(int(state.hparams["lr"] * 30))})

    step = compose(loop_events, [Algorithm("size", on(Event.INIT), remember)])
    with pytest.raises(ValueError, match=r"init: state.slots\['size'\] is float32\[1\] in member 1, and float32\[3\]"):
        population(step, 3).init(stack_states(make_members()))


def test_events_outside_the_step_run_for_every_member():
    def mark(state: State) -> State:
        drawn = pc.random.uniform(state.rng("mark"), ())
        return state.replace(params={name: param + drawn for name, param in state.params.items()})

    late = on(Event.EPOCH_END) & pc.after("1ba")
    step = compose(loop_events, [Algorithm("mark", late, lambda event, state: mark(state), host=True)])
    members, batch = make_members(), make_batch()
    pop, states = population(step, 3), stack_states(members)
    assert pop.fire(Event.EPOCH_END, states) is states  # not yet
    states, members = pop(states, batch), [step(state, batch) for state in members]
    assert_members(pop.fire(Event.EPOCH_END, states), [step.fire(Event.EPOCH_END, state) for state in members])
    with pytest.raises(ValueError, match="fires inside the step"):
        pop.fire(Event.BATCH_END, states)


def test_plan_and_replace():
    step = compose(loop_events, [alg.mixup(0.3), alg.selective_backprop(0, 1.0, full_every=0)])
    pop, states = population(step, 3, 2, "each"), stack_states(make_members())
    assert pop.plan(states).order(Event.AFTER_DATALOADER) == ("selective_backprop", "mixup")
    other = pop.replace(algorithms=[noise()], microbatches=2)
    assert other.members == Stacked(3, 2, "each") and other.microbatches == 2
    assert repr(population(compose(loop_events, [noise()]), 3)) == "population(Step(noise()), 3)"


# Host algorithms


def smaller_inputs() -> Algorithm:
    """Return an algorithm that changes shapes depending on values, which is impossible in traced code."""

    def apply(event: Event, state: State) -> State:
        kept = 6 - state.timestamp.batch
        order = torch.tensor(sorted(range(len(state.inputs)), key=lambda i: state.inputs[i].sum().item())[:kept])
        weight = state.params["0.weight"].flatten()[0].item()
        return state.replace(inputs=state.inputs[order] * weight, targets=state.targets[order])

    return Algorithm("smaller", on(Event.AFTER_DATALOADER), apply, host=True)


@pytest.mark.parametrize("batches", ["shared", "each"])
def test_host_algorithms_act_on_member_after_member(batches):
    members, step = make_members(), compose(loop_events, [alg.mixup(0.3), smaller_inputs(), counter()])
    pop = population(step, 3, 2, batches)
    states, members = pop.init(stack_states(members)), [step.init(state) for state in members]
    for inputs, targets in make_batches(3):
        given = (inputs.expand(3, 8, 4), targets.expand(3, 8)) if batches == "each" else (inputs, targets)
        states, members = pop(states, given), [step(state, (inputs, targets)) for state in members]
    assert_members(states, members)


def test_host_algorithms_that_give_members_different_shapes_are_an_error():
    def part(event: Event, state: State) -> State:
        return state.replace(inputs=state.inputs[: 2 + int(30 * state.hparams["lr"])])

    step = compose(loop_events, [Algorithm("part", on(Event.AFTER_DATALOADER), part, host=True)])
    with pytest.raises(ValueError, match=r"part.*state.batch\[0\] is float32\[3, 4\] in member 1, and float32\[5, 4\]"):
        population(step, 3)(stack_states(make_members()), make_batch())


# fit, evaluation, observers


def test_fit_with_evaluation_and_observers(capsys):
    inputs, targets = make_batch(size=30)
    train, test = pc.data.arrays(inputs, targets, batch_size=8), make_batches(2)
    step, members, history = compose(loop_events, [alg.mixup(0.3)]), make_members(), History()
    evaluator = pc.Evaluator(test, {"accuracy": pc.metrics.accuracy, "loss": pc.losses.cross_entropy}, every="1ep")
    pop, start = population(step, 3), stack_states(members)
    with Progress(live=False) as progress:
        states = pc.fit(pop, start, train, evaluate=evaluator, observers=[history, progress])
    assert "2.0/2 ep" in capsys.readouterr().out

    class Order:
        """Data for which all members use the order of the first member's key."""

        def epoch(self, key: Tensor, epoch: int, start: int) -> Any:
            return train.epoch(members[0].key, epoch, start)

        def __len__(self) -> int:
            return len(train)

    alone = [History() for _ in members]
    ends = [
        pc.fit(step, state, Order(), evaluate=evaluator, observers=[own])
        for state, own in zip(members, alone, strict=True)
    ]
    assert_members(states, ends)
    for name in ("loss", "eval/accuracy", "eval/loss"):
        _, found = history.series(name)
        expected = zip(*[own.series(name)[1] for own in alone], strict=True)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(list(expected)), rtol=1e-4, atol=1e-5)


def test_evaluate_and_predict():
    step, members, data = compose(loop_events), make_members(), make_batches(3)
    states, pop = stack_states(members), population(step, 3, 2)
    metrics = {"accuracy": pc.metrics.accuracy, "loss": pc.losses.cross_entropy}
    found = pc.evaluate(states, data, metrics, step=pop)
    alone = [pc.evaluate(state, data, metrics) for state in members]
    assert found["accuracy"] == [values["accuracy"] for values in alone]
    assert found["loss"] == pytest.approx([values["loss"] for values in alone])
    for outputs, *own in zip(pc.predict(states, data, step=pop), *[pc.predict(s, data) for s in members], strict=True):
        torch.testing.assert_close(outputs, torch.stack(own))
    for use in (pc.evaluate, pc.predict):
        with pytest.raises(ValueError, match="a stacked one of 3 members: give step=population"):
            use(states, data)


# Stacking


def test_stacking_and_unstacking_are_inverse():
    members = [compose(loop_events)(state, make_batch()) for state in make_members(4)]
    states = stack_states(members)
    assert states.key.shape == (4, 2) and states.params["0.weight"].shape == (4, 8, 4)
    found = unstack_states(states)
    for one, state in zip(found, members, strict=True):
        assert_same(one, state)
    # They have separate memory, because a compiled step may overwrite the population's.
    states.params["0.weight"].zero_()
    assert_same(found[2], members[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.replace(optimizer=optim.sgd(0.2)), r"member 1 has another optimizer than member 0.*hparams={"),
        (lambda s: make_members(2)[1], "member 1 has another loss"),
        (lambda s: s.replace(timestamp=s.timestamp.advance()), "member 1 stands at another time than member 0"),
        (lambda s: s.replace(slots={"a": torch.zeros(2)}), r"state.slots\['a'\] is float32\[2\] in member 1.*absent"),
        (lambda s: s.replace(hparams={"lr": s.hparams["lr"].double()}), r"\['lr'\] is float64\[\] in member 1"),
        (lambda s: s.to("meta"), "on meta in member 1"),
    ],
)
def test_states_that_cannot_be_stacked_are_an_error(change, message):
    first, second = make_members(2, loss=nn.functional.cross_entropy)
    with pytest.raises(ValueError, match=message):
        stack_states([first, change(second)])


STACKED = stack_states(make_members())
COMPOSED = compose(loop_events)
wrong: Any = population  # for arguments that a type checker refuses


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: population(COMPOSED, 0), ValueError, "population: n"),
        (lambda: wrong(COMPOSED, 2.0), TypeError, "population: n"),
        (lambda: population(COMPOSED, 2, chunk_size=0), ValueError, "population: chunk_size"),
        (lambda: population(COMPOSED, 2, batches="own"), ValueError, "batches='own': expected one of 'shared', 'each'"),
        (lambda: wrong(lambda state, batch: state, 2), TypeError, "made by compose, got function"),
        (lambda: stack_states([]), ValueError, "at least one"),
        (lambda: stack_states([make_state(), wrong]), TypeError, "expected States, got function"),
        (
            lambda: stack_states([*make_members(2), make_state(nn.Linear(4, 3))]),
            ValueError,
            "member 2 has another model",
        ),
        (lambda: unstack_states(make_state()), ValueError, "got a single one; stack_states"),
        (
            lambda: unstack_states(with_rate(STACKED, 0.1)),
            ValueError,
            r"expected 3 rows.*got float32\[\] in state.hparams",
        ),
        (lambda: population(COMPOSED, 3)(make_state(), make_batch()), ValueError, "of 3 members, got a single one"),
        (lambda: population(COMPOSED, 2)(STACKED, make_batch()), ValueError, "of 2 members, got one of 3; population"),
        (
            lambda: population(COMPOSED, 3, batches="each")(STACKED, make_batch()),
            ValueError,
            "dimension of 3 members, got",
        ),
        (lambda: wrong(COMPOSED, 3)(3, make_batch()), TypeError, "expected a State first, got int"),
        (lambda: COMPOSED(STACKED, make_batch()), ValueError, r"stacked one of 3 members: population\(step, n\)"),
        (
            lambda: STACKED.forward(make_batch()[0]),
            ValueError,
            "expected a single state, got a stacked one of 3 members",
        ),
    ],
)
def test_wrong_uses_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_population_of_one():
    assert_agrees(compose(loop_events, [alg.mixup(0.3)]), make_members(1), make_batches(2))
