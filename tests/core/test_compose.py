"""compose: rejected arguments, when `match` is called, what algorithms may do, and what a step keeps."""

import dataclasses
import re
import warnings

import pytest
import torch

import purecompose as pc
from purecompose import Algorithm, Event, State, algorithms as alg, compose, loop, loop_events, on, optim, schedule
from purecompose.errors import MatchError
from purecompose.loop import advance, update
from purecompose.time.predicates import Predicate
from tests.helpers import (
    assert_close,
    assert_same,
    changing,
    decay,
    make_batch,
    make_batches,
    make_mlp,
    make_state,
    noise,
    recorder,
    run_steps,
)


# Rejected arguments

STRANGER = r"expected an Algorithm, got .*call a factory"
WHOLE_NUMBER = "microbatches: expected an int >= 1, got"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((loop_events, [noise(), decay(), noise()]), {}, ValueError, "two algorithms are named 'noise'"),
        ((loop_events, [noise]), {}, TypeError, STRANGER),
        ((loop_events, ["mixup"]), {}, TypeError, STRANGER),
        ((loop_events,), {"passes": ["filo"]}, TypeError, "is not a pass"),
        (([Event.BATCH_START, 3],), {}, TypeError, "neither an event, a stage"),
        ((alg.mixup(0.2),), {}, TypeError, r"put a single algorithm into a list, compose\(\[mixup\(alpha=0.2"),
        (([alg.mixup],), {}, TypeError, r"mixup is a factory: call it, as in compose\(\[mixup\(\)\]\)"),
        (
            ([alg.mixup(0.2), *loop_events],),
            {},
            TypeError,
            r"mixup.* stands in the loop program; algorithms are the se",
        ),
        (([alg.mixup(0.2), "batch_start"],), {}, TypeError, r"second argument, compose\(loop_events, \[\.\.\.\]\), or"),
        (([alg.mixup(0.2)], [alg.ema()]), {}, TypeError, "two lists of algorithms, of which the first has mixup"),
        (([alg.mixup(0.2)], []), {}, TypeError, "two lists of algorithms"),
        ((loop_events, alg.mixup(0.2)), {}, TypeError, "put a single one into a list"),
        (("batch_start",), {}, TypeError, "is not a program"),
        ((3,), {}, TypeError, "is not a program"),
        ((["batch_strat"],), {}, ValueError, "no event is called 'batch_strat'; did you mean 'batch_start'"),
        (([*loop_events[:-1], advance],), {}, ValueError, "put `advance` into the program once"),
        (([advance, Event.BATCH_START],), {}, ValueError, "BATCH_START belongs before the program's advance"),
        (([Event.BATCH_END, advance],), {}, ValueError, "BATCH_END belongs after the program's advance"),
        (([loop.Microbatches(Event.BATCH_END), advance],), {}, ValueError, "BATCH_END belongs after"),
        (([advance, loop.Microbatches(loop.Grad(Event.AFTER_LOSS))],), {}, ValueError, "AFTER_LOSS belongs before"),
        ((loop_events,), {"microbatches": 0}, ValueError, WHOLE_NUMBER),
        ((loop_events,), {"microbatches": True}, TypeError, WHOLE_NUMBER),
    ],
)
def test_wrong_arguments_are_rejected(arguments, options, error, words):
    with pytest.raises(error, match=words):
        compose(*arguments, **options)


@pytest.mark.parametrize("make", [list, tuple, iter])
def test_a_list_of_algorithms_stands_for_the_usual_loop(make):
    """With all other arguments as usual, and to the same bits."""
    algorithms = [noise(), decay()]
    short, long = compose(make(algorithms), microbatches=2), compose(loop_events, algorithms, microbatches=2)
    assert short.program == long.program and short.algorithms == long.algorithms and repr(short) == repr(long)
    state, batches = make_state(make_mlp(dropout=0.3)), make_batches(3)
    assert_same(run_steps(short, short.init(state), batches), run_steps(long, long.init(state), batches))
    assert compose(make([])).program == loop_events


def test_a_step_prints_and_is_replaced():
    step = compose(loop_events, [noise()], microbatches=2)
    assert repr(step) == "Step(noise())"
    other = step.replace(algorithms=[decay()])
    assert repr(other) == "Step(decay())"
    assert (other.program, other.microbatches) == (step.program, 2)


# A plain list of events


def test_a_plain_list_of_events_is_a_program():
    log = []
    events = [Event.EVAL_START, "batch_start", Event.AFTER_LOSS]
    step = compose(events, [recorder(log, "a", Event.AFTER_LOSS, Event.BATCH_START, Event.FIT_END)])
    state, batch = make_state(), make_batch()
    end = step(state, batch)
    assert log == [("a", Event.BATCH_START), ("a", Event.AFTER_LOSS)]
    assert_same(end.params, state.params)
    assert end.timestamp == state.timestamp


# Staged matching


def test_a_plain_match_is_called_once_per_event_and_step():
    asked = []

    def match(event, state):
        asked.append((event, state.timestamp.batch))
        return event is Event.BEFORE_FORWARD

    log = []
    chosen = Algorithm("plain", match, recorder(log, "plain").apply)
    step = compose(loop_events, [chosen], microbatches=3)
    state = step.init(make_state())
    asked.clear()
    state = run_steps(step, state, make_batches(2))
    expected = [(e, batch + e.sees_new_time) for batch in range(2) for e in step.events]
    assert asked == expected
    assert log == [("plain", Event.BEFORE_FORWARD)] * 6


def test_predicates_about_later_events_do_not_stop_init():
    halfway = decay("halfway")
    at_epochs = Algorithm("at_epochs", on(Event.EPOCH_END) & pc.after(0.5), halfway.apply)
    step = compose(loop_events, [at_epochs])
    state = step.init(make_state(duration=None))
    with pytest.raises(MatchError, match="at_epochs: match failed at Event.EPOCH_END"):
        step.fire(Event.EPOCH_END, state)


# Host algorithms


def test_a_host_algorithm_runs_in_place_and_may_change_shapes():
    log = []

    def halve(state: State) -> State:
        log.append(("halve", state.timestamp.batch, len(state.inputs)))
        return state.replace(batch=tuple(member[:4] for member in state.batch))

    def look(name):
        return lambda state: (log.append((name, len(state.inputs))), state)[1]

    step = compose(
        loop_events,
        [
            changing("before", Event.BATCH_START, look("before")),
            changing("halve", Event.BATCH_START, halve, host=True),
            changing("after", Event.BATCH_START, look("after")),
        ],
    )
    inputs, targets = make_batch(size=8)
    end = step(make_state(), (inputs, targets))
    assert log == [("before", 8), ("halve", 0, 8), ("after", 4)]
    assert_same(end.params, compose(loop_events)(make_state(), (inputs[:4], targets[:4])).params)
    assert end.timestamp.sample == 8


def test_a_host_algorithm_sees_the_new_time_at_batch_end():
    times = []

    def apply(event, state):
        times.append((event, state.timestamp.batch, state.timestamp.epoch))
        return state

    host = Algorithm("host", on(Event.BATCH_START, Event.BATCH_END), apply, host=True)
    run_steps(compose(loop_events, [host]), make_state(batches_per_epoch=2), make_batches(2))
    start, end = Event.BATCH_START, Event.BATCH_END
    assert times == [(start, 0, 0), (end, 1, 0), (start, 1, 0), (end, 2, 1)]


def test_a_host_algorithm_may_change_the_static_part():
    freeze = changing("freeze", Event.BATCH_END, lambda s: s.replace(frozen=frozenset({"0.weight"})), host=True)
    step = compose(loop_events, [freeze])
    first = step(make_state(), make_batch())
    second = step(first, make_batch())
    assert first.context.frozen == {"0.weight"}
    assert first.timestamp.batch == 1
    assert torch.equal(first.params["0.weight"], second.params["0.weight"])
    assert not torch.equal(first.params["0.bias"], second.params["0.bias"])


# Time inside a step


def rates(*values: float) -> schedule.Schedule:
    """Return a schedule that reads a list, which has no entry for times after the run."""
    return schedule.scheduled(lambda timestamp: values[timestamp.batch])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_list_of_rates_may_end_where_the_run_does(compiled):
    step = compose(loop_events)
    step = pc.compile(step, backend="eager") if compiled else step
    end = run_steps(step, make_state(optimizer=optim.sgd(rates(0.1, 0.2, 0.3))), make_batches(3))
    expected = make_state(optimizer=optim.sgd(schedule.linear(0.1, 0.4, t_max="3ba")))
    assert_close(end.params, run_steps(step, expected, make_batches(3)).params)
    with pytest.raises(IndexError) as caught:
        step(end, make_batch())
    assert "at batch 3" in caught.value.__notes__[0] and "rates" in caught.value.__notes__[0]


def test_reading_a_schedule_past_its_end_after_advance_is_an_error():
    last = rates(1.0)
    late = changing("late", Event.BATCH_END, lambda s: s.replace(metrics={"r": s.scalar(last)}), config={"r": last})
    with pytest.raises(IndexError) as caught:
        step = compose(loop_events, [late])
        step(step.init(make_state()), make_batch())
    assert "at batch 1" in caught.value.__notes__[0]


def test_the_clock_is_old_before_and_new_after_advance():
    seen = {}

    def apply(event, state):
        clock = state.clock
        seen[event] = (clock.batch.item(), clock.epoch.item(), clock.sample.item(), clock.elapsed.item())
        return state

    step = compose(loop_events, [Algorithm("look", on(Event.BATCH_START, Event.BATCH_END), apply)])
    state = make_state(batches_per_epoch=2, duration="2ep")
    end = run_steps(step, state, make_batches(2))
    assert seen == {Event.BATCH_START: (1, 0, 8, 0.25), Event.BATCH_END: (2, 1, 16, 0.5)}
    assert (end.timestamp.epoch, end.timestamp.batch_in_epoch, end.clock) == (1, 0, None)


def test_stages_after_advance_read_the_new_time():
    seen = []

    def stage(state: State) -> State:
        assert state.clock is not None
        seen.append(state.clock.batch.item())
        return state

    program = [pc.loop.Grad(pc.loop.forward, pc.loop.loss), stage, advance, stage, update]
    optimizer = optim.sgd(0.1 * schedule.linear(1.0, 0.0, t_max="4ba"))
    end = compose(program)(make_state(optimizer=optimizer), make_batch())
    assert seen == [0, 1]
    # The update after advance uses the rate of batch 1: 0.75 of the whole.
    expected = compose(loop_events)(make_state(optimizer=optim.sgd(0.075)), make_batch())
    assert_close(end.params, expected.params)


# The order in real steps


def test_the_caller_chooses_the_passes():
    log = []
    chosen = [recorder(log, name, Event.AFTER_LOSS, Event.BATCH_START) for name in "ab"]

    def drop_a(algorithms, event):
        return [a for a in algorithms if a.name != "a" or event is Event.BATCH_START]

    compose(loop_events, chosen, passes=[drop_a])(make_state(), make_batch())
    assert log == [("a", Event.BATCH_START), ("b", Event.BATCH_START), ("b", Event.AFTER_LOSS)]


def test_host_algorithms_are_refused_inside_a_gradient():
    host = Algorithm("host", on(Event.BEFORE_LOSS), lambda event, state: state, host=True)
    with pytest.raises(ValueError, match="host at Event.BEFORE_LOSS: a Grad with a host algorithm in it"):
        compose(loop_events, [host])
    hidden = Algorithm("hidden", lambda event, state: event is Event.AFTER_FORWARD, host.apply, host=True)
    step = compose(loop_events, [hidden])  # a plain function has no known events until it is called
    with pytest.raises(ValueError, match="hidden .* Event.AFTER_FORWARD"):
        step(step.init(make_state()), make_batch())


def test_after_the_gradient_batch_and_outputs_are_whole():
    seen = []

    def look(state):
        assert not state.outputs.requires_grad
        seen.append((state.num_examples, state.outputs))
        return state

    events = (Event.AFTER_TRAIN_BATCH, Event.BATCH_END)
    looks = [changing(f"look {event}", event, look) for event in events]
    batch = make_batch(size=8)
    end = compose(loop_events, looks, microbatch_size=8)(make_state(), batch)
    with torch.no_grad():
        expected = make_mlp()(batch[0])
    assert [num for num, _ in seen] == [8, 8]
    for _, outputs in seen:
        torch.testing.assert_close(outputs, expected)
    assert end.outputs is None


@pytest.mark.parametrize(
    "read",
    [torch.mean, len, list, lambda outputs: outputs.mean(), lambda outputs: outputs[0], lambda outputs: 1 - outputs],
)
def test_the_outputs_of_the_last_slice_are_not_taken_for_those_of_the_batch(read):
    look = changing("look", Event.AFTER_TRAIN_BATCH, lambda state: state.replace(loss=read(state.outputs)))
    with pytest.raises(RuntimeError, match=r"in 2 parts .*state\.forward\(state\.inputs\)") as caught:
        compose(loop_events, [look], microbatches=2)(make_state(), make_batch())
    assert "in look at Event.AFTER_TRAIN_BATCH" in caught.value.__notes__


@pytest.mark.parametrize("transform", [lambda step: step, lambda step: pc.compile(step, backend="eager", quiet=True)])
def test_sealed_outputs_pass_through_every_kind_of_step(transform):
    """Two parts of a step follow the slices in a compiled step, with the outputs between them."""
    host = dataclasses.replace(changing("host", Event.AFTER_TRAIN_BATCH, lambda state: state), host=True)
    algorithms = [host, alg.ema("2ba")]
    step, nested = compose(loop_events, algorithms, microbatches=2), loop.Microbatches(*loop_events[3:4])
    start, batch = step.init(make_state()), make_batch(size=8)
    end = transform(step)(start, batch)
    inner = transform(compose((*loop_events[:3], nested, *loop_events[4:]), algorithms, microbatches=2))(start, batch)
    members = transform(pc.population(step, 2))(pc.stack_states([start, start]), batch)
    for found in (inner, pc.unstack_states(members)[1]):
        assert_close(found.params, end.params)


# What does nothing


def test_a_program_with_a_grad_and_no_update_warns_once() -> None:
    state, batch = make_state(), make_batch()
    step = compose([pc.loop.Grad(pc.loop.forward, pc.loop.loss), pc.loop.advance])
    with pytest.warns(UserWarning, match="trains nothing: its program has a Grad and no update"):
        after = step(state, batch)
    assert step(after, batch).params is state.params  # does not warn again


@pytest.mark.parametrize(
    "transform, state",
    [
        (lambda step: step, lambda: make_state(make_mlp(dropout=0.5))),
        (lambda step: step.replace(algorithms=[noise()]), make_state),
        (lambda step: pc.compile(step, backend="eager", quiet=True), lambda: make_state(make_mlp(dropout=0.5))),
        (lambda step: pc.population(step, 1), lambda: pc.stack_states([make_state(make_mlp(dropout=0.5))])),
    ],
    ids=["network", "algorithm", "compiled", "population"],
)
def test_draws_that_each_step_repeats_are_reported(transform, state) -> None:
    program = [Event.AFTER_DATALOADER, pc.loop.Grad(pc.loop.forward, pc.loop.loss), pc.loop.update]
    step = transform(compose(program))
    with pytest.warns(UserWarning, match="repeat the draws of this one.*has no `advance`"):
        after = step(state(), make_batch())
    step(after, make_batch())  # does not warn again
    transform(compose([*program, pc.loop.advance]))(state(), make_batch())


def test_a_custom_update_causes_no_warning_about_a_missing_update() -> None:
    def descend(state: State) -> State:
        assert state.grads is not None
        params = {name: param - 0.1 * state.grads[name] for name, param in state.params.items()}
        return state.replace(params=params)

    state, batch = make_state(), make_batch()
    for step in (
        compose([pc.loop.Grad(pc.loop.forward, pc.loop.loss), descend, pc.loop.advance]),
        compose(
            [pc.loop.Grad(pc.loop.forward, pc.loop.loss), Event.AFTER_TRAIN_BATCH, pc.loop.advance],
            [changing("descent", Event.AFTER_TRAIN_BATCH, descend)],
        ),
    ):
        assert not torch.equal(step(state, batch).params["0.weight"], state.params["0.weight"])


@pytest.mark.parametrize("program", [pc.loop.eval_events, pc.loop.predict_events])
def test_training_methods_are_silently_absent_from_evaluation(program: tuple[pc.Event, ...]) -> None:
    compose(loop_events, [decay()]).replace(program=program)


@pytest.mark.parametrize(
    ("match", "duration", "is_warned"),
    [
        (pc.after("1ep"), "9ba", True),
        (pc.after(0.5), "9ep", True),
        (pc.after(0.5), "9ba", False),
        (pc.after("1ba"), "9ep", False),
    ],
    ids=["epochs", "fraction of epochs", "fraction of batches", "batches"],
)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_time_that_never_advances_is_reported_if_a_match_depends_on_it(
    match: Predicate, duration: str, is_warned: bool, is_compiled: bool
) -> None:
    step = compose(loop_events, [Algorithm("late", on(Event.BATCH_END) & match, lambda event, state: state)])
    if is_compiled:
        step = pc.compile(step, backend="eager", quiet=True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step(step.init(make_state(duration=duration)), make_batch())
    places = [found.filename for found in warned if "epochs have no known length" in str(found.message)]
    assert places == [__file__] * is_warned


def test_an_error_in_a_stage_names_its_argument() -> None:
    def fails(state: State) -> State:
        raise ValueError("no reason")

    with pytest.raises(ValueError) as caught:
        compose([fails, advance])(make_state(), make_batch())
    assert caught.value.__notes__ == ["in the stage fails, with batch tuple(float32[8, 4], int64[8])"]


@pytest.mark.parametrize(
    ("dtype", "remedy"), [(torch.float64, r"tensor\.float\(\)$"), (torch.uint8, r"tensor\.float\(\) / 255$")]
)
def test_an_error_of_the_network_on_a_batch_of_another_dtype_says_how_to_convert_it(dtype, remedy) -> None:
    inputs, targets = make_batch()
    with pytest.raises(RuntimeError) as caught:
        compose(loop_events)(make_state(), (inputs.to(dtype), targets))
    assert re.search(f"the batch has {dtype}, .*{remedy}", caught.value.__notes__[-1])


@pytest.mark.parametrize("cut", [{"microbatches": 4}, {"microbatch_size": 2}])
def test_cutting_batches_that_the_program_leaves_whole_is_reported(cut):
    program = [Event.BATCH_START, pc.loop.Grad(pc.loop.forward, pc.loop.loss), pc.loop.update, pc.loop.advance]
    with pytest.warns(UserWarning, match=rf"{next(iter(cut))}=.\) sets the slices of Microbatches, which the program"):
        compose(program, **cut)
    compose(pc.loop.eval_events, **cut)
    compose([*program[:1], pc.loop.Microbatches(*program[1:2]), *program[2:]], **cut)
