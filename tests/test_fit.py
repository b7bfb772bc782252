"""fit against the loop by hand: the order of events, the intervals of evaluation, how runs start, stop and go on."""

from collections import Counter

import pytest
import torch
from helpers import (
    assert_same,
    changing,
    copied,
    counter,
    decay,
    make_batch,
    make_batches,
    make_mlp,
    make_state,
    noise,
    recorder,
    run_steps,
)

import purecompose as pc
from purecompose import Evaluator, Event, compose, epoch_ends, evaluate, fit, loop_events, optim, schedule


def names(text: str) -> list[Event]:
    return [Event(name) for name in text.split()]


class Unsized:
    """Batches whose number nobody knows."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def events_of(num_batches, duration, *, k=1, evaluators=0, interval="1ep", state=None, data=None):
    """What observers and a recording algorithm see of a fit, in one list."""
    log = []
    inner = compose(loop_events).events
    eval_inner = names("EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD")
    recording = recorder(log, "inner", *[e for e in inner if e is not Event.BATCH_END], *eval_inner)

    def observer(event, state):
        del state
        log.append(("outer", event))

    data = make_batches(num_batches, size=4) if data is None else data
    state = make_state(batches_per_epoch=None, iteration_length=None) if state is None else state
    fit(
        compose(loop_events, [recording], microbatches=k),
        state,
        data,
        duration=duration,
        evaluate=[Evaluator(make_batches(1), interval=interval, label=str(i)) for i in range(evaluators)],
        observers=[observer],
    )
    return [event for _, event in log]


SLICE = "BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD "


def batch_events(k=1):
    return (
        "BEFORE_DATALOADER AFTER_DATALOADER BATCH_START BEFORE_TRAIN_BATCH "
        + SLICE * k
        + "AFTER_TRAIN_BATCH BATCH_END "
    )


EVALUATED = "EVAL_START EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD EVAL_BATCH_END EVAL_END "
ROUND = "EVAL_BEFORE_ALL " + EVALUATED + "EVAL_AFTER_ALL "


# Events


@pytest.mark.parametrize("is_sized", [True, False])
def test_the_sequence_of_one_epoch(is_sized):
    data = make_batches(2, size=4)
    found = events_of(2, "1ep", k=2, evaluators=1, data=data if is_sized else Unsized(data))
    expected = "FIT_START ITERATION_START EPOCH_START "
    expected += (batch_events(2) + "BATCH_CHECKPOINT ") * 2
    expected += "BEFORE_DATALOADER EPOCH_END " + ROUND + "EPOCH_CHECKPOINT FIT_END"
    assert found == names(expected)


def test_the_sequence_with_evaluations_at_batches():
    found = events_of(2, "2ba", evaluators=2, interval="2ba")
    expected = "FIT_START ITERATION_START EPOCH_START " + batch_events() + "BATCH_CHECKPOINT "
    expected += batch_events() + "EVAL_BEFORE_ALL " + EVALUATED * 2 + "EVAL_AFTER_ALL BATCH_CHECKPOINT "
    # The stop is the epoch's last batch: the epoch ends, but the data are not asked again.
    expected += "EPOCH_END EPOCH_CHECKPOINT FIT_END"
    assert found == names(expected)


def test_the_final_evaluation_comes_after_fit_end():
    found = events_of(4, "3ba", evaluators=1, interval="2ba")
    assert found[-len(names(ROUND)) - 1 :] == names("FIT_END " + ROUND)
    assert Counter(found)[Event.EVAL_START] == 2
    assert Event.EPOCH_END not in found and Event.EPOCH_CHECKPOINT not in found


@pytest.mark.parametrize("is_sized", [True, False])
@pytest.mark.parametrize(("num_batches", "epochs", "k"), [(1, 1, 1), (3, 1, 2), (2, 3, 1)])
def test_the_counts(num_batches, epochs, k, is_sized):
    data = make_batches(num_batches, size=4)
    data = data if is_sized else Unsized(data)
    found = Counter(events_of(num_batches, f"{epochs}ep", k=k, evaluators=2, data=data))
    steps = num_batches * epochs
    expected = dict.fromkeys(names("FIT_START ITERATION_START FIT_END"), 1)
    expected |= dict.fromkeys(names("EPOCH_START EPOCH_END EPOCH_CHECKPOINT"), epochs)
    expected |= dict.fromkeys(
        names("AFTER_DATALOADER BATCH_START BEFORE_TRAIN_BATCH AFTER_TRAIN_BATCH BATCH_END BATCH_CHECKPOINT"), steps
    )
    expected |= dict.fromkeys(names(SLICE), steps * k)
    expected |= {Event.BEFORE_DATALOADER: steps + epochs}
    expected |= dict.fromkeys(names("EVAL_BEFORE_ALL EVAL_AFTER_ALL"), epochs)
    expected |= dict.fromkeys(names(EVALUATED), 2 * epochs)
    assert found == expected


def iterations(state, data, duration):
    log = []

    def observer(event, state):
        if event.name.startswith(("ITERATION", "EPOCH_START")):
            log.append((event.name, state.timestamp.batch))

    end = fit(compose(loop_events), state, data, duration=duration, observers=[observer])
    return log, end


def test_iterations_of_epochs():
    log, end = iterations(make_state(iteration_length="2ep"), make_batches(2), "5ep")
    assert log == [
        ("ITERATION_START", 0),
        ("EPOCH_START", 0),
        ("EPOCH_START", 2),
        ("ITERATION_END", 4),
        ("ITERATION_CHECKPOINT", 4),
        ("ITERATION_START", 4),
        ("EPOCH_START", 4),
        ("EPOCH_START", 6),
        ("ITERATION_END", 8),
        ("ITERATION_CHECKPOINT", 8),
        ("ITERATION_START", 8),
        ("EPOCH_START", 8),
    ]
    assert end.timestamp.iteration == 2


class Embedder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(5, 3)

    def forward(self, ids):
        return self.table(ids).mean(1)


def token_setting(**options):
    """States and batches of 12 tokens each."""
    batch = {"input_ids": torch.arange(12).reshape(4, 3) % 5, "labels": torch.tensor([0, 1, 2, 0])}
    return make_state(Embedder(), input_key="input_ids", target_key="labels", **options), [batch] * 4


def test_iterations_of_tokens_end_within_epochs():
    state, data = token_setting(iteration_length="36tok")
    log, end = iterations(state, data, "7ba")
    expected = [
        ("ITERATION_START", 0),
        ("EPOCH_START", 0),
        ("ITERATION_END", 3),
        ("ITERATION_CHECKPOINT", 3),
        ("ITERATION_START", 3),
        ("EPOCH_START", 4),
        ("ITERATION_END", 6),
        ("ITERATION_CHECKPOINT", 6),
        ("ITERATION_START", 6),
    ]
    assert log == expected
    assert end.timestamp.iteration == 2
    first, middle = iterations(state, data, "3ba")
    second, _ = iterations(middle, data, "7ba")
    assert first + second == expected


@pytest.mark.parametrize(("duration", "num_batches"), [("1tok", 1), ("12tok", 1), ("25tok", 3), ("60tok", 5)])
def test_durations_in_tokens(duration, num_batches):
    state, data = token_setting()
    end = fit(compose(loop_events), state, data, duration=duration)
    assert (end.timestamp.batch, end.timestamp.token) == (num_batches, 12 * num_batches)


# Intervals of evaluation, the final one included


@pytest.mark.parametrize(
    ("interval", "duration", "expected"),
    [
        ("1ep", "5ep", 5),
        ("2ep", "8ep", 4),
        ("2iter", "8ep", 2),
        ("10ba", "8ep", 4),
        ("0.25dur", "4ep", 4),
        ("1ep", "4ep", 4),
        ("5ba", "4ep", 4),
        ("5ba", "10ba", 2),
        ("0.35dur", "4ep", 3),
        ("0.01dur", "100ba", 100),
        ("0.1dur", "70sp", 10),
        ("0.05dur", "80sp", 20),
        ("1sp", "10sp", 5),
        ("4sp", "3ep", 8),
        ("3sp", "1ep", 4),
        ("100ba", "1ep", 1),
    ],
)
@pytest.mark.parametrize("is_sized", [True, False])
def test_how_often_an_evaluator_runs(interval, duration, expected, is_sized):
    """Ten samples in batches of two; the parameters are those of the reference's own table, and a few more."""
    log = []
    data = make_batches(5, size=2)
    state = make_state(iteration_length="2ep", optimizer=optim.sgd(0.01))
    fit(
        compose(loop_events),
        state,
        data if is_sized else Unsized(data),
        duration=duration,
        evaluate=Evaluator([make_batch()], interval=interval),
        observers=[lambda event, state: log.append(state.timestamp) if event is Event.EVAL_START else None],
    )
    assert len(log) == expected
    assert len(set(log)) == expected


@pytest.mark.parametrize(("interval", "expected"), [("1tok", 7), ("24tok", 4), ("25tok", 4), ("100tok", 1)])
def test_intervals_in_tokens(interval, expected):
    state, data = token_setting()
    log = []
    fit(
        compose(loop_events),
        state,
        data,
        duration="7ba",
        evaluate=Evaluator(data[:1], interval=interval),
        observers=[lambda event, _: log.append(event)],
    )
    assert log.count(Event.EVAL_START) == expected


def test_a_fraction_needs_a_duration():
    with pytest.raises(ValueError, match="fractions of the run need a run with a duration"):
        fit(
            compose(loop_events),
            make_state(duration=None),
            make_batches(2),
            duration="60sec",
            evaluate=Evaluator([make_batch()], interval="0.5dur"),
        )


def test_each_evaluator_has_its_own_interval_and_numbers():
    found = {"a": [], "b": []}
    tests = {"a": make_batches(1), "b": make_batches(2, size=3)}
    current = []

    def observer(event, state):
        if event is Event.BATCH_END:
            current[:] = [state]
        if event is Event.EVAL_END:
            (name,) = state.metrics
            expected = evaluate(current[0], tests[name], {name: pc.metrics.accuracy})[name]
            found[name].append((state.timestamp.batch, state.metrics[name].item() == expected))

    fit(
        compose(loop_events),
        make_state(),
        make_batches(3),
        duration="4ba",
        evaluate=[
            Evaluator(tests["a"], {"a": pc.metrics.accuracy}, "2ba"),
            Evaluator(tests["b"], {"b": pc.metrics.accuracy}, "3ba"),
        ],
        observers=[observer],
    )
    assert found == {"a": [(2, True), (4, True)], "b": [(3, True), (4, True)]}


# Equal runs


def by_hand(step, state, batches, epochs):
    state = step.init(state.replace(timestamp=state.timestamp.replace(run=pc.RunLength(f"{epochs}ep", len(batches)))))
    for _ in range(epochs):
        for batch in batches:
            state = step(state, batch)
    return state


def rich_step(k=1):
    chosen = [noise(), counter(), decay(when=epoch_ends()), noise("late", when=pc.after(0.5))]
    return compose(loop_events, chosen, microbatches=k)


def rich_state(**options):
    optimizer = optim.adam(0.05 * schedule.cosine(warmup="2ba"))
    return make_state(make_mlp(dropout=0.3), optimizer=optimizer, key=5, **options)


@pytest.mark.parametrize("k", [1, 2])
def test_fit_is_the_loop_by_hand(k):
    step, batches = rich_step(k), make_batches(4)
    found = fit(step, rich_state(), batches, duration="3ep")
    expected = by_hand(rich_step(k), rich_state(), batches, 3)
    assert_same(found, expected)
    assert found.timestamp == expected.timestamp


def test_fit_leaves_its_input_as_it_was():
    step = rich_step()
    state, batches = step.init(rich_state()), make_batches(3)
    before, batches_before, time = copied(state), copied(batches), state.timestamp
    fit(step, state, batches)
    assert_same(state, before)
    assert_same(batches, batches_before)
    assert state.timestamp is time


@pytest.mark.parametrize("stop", range(1, 8))
def test_going_on_from_anywhere_equals_one_run(stop):
    step, batches = rich_step(), make_batches(4)
    # The run's whole length is known from the start: schedules look at it.
    state = rich_state(duration="2ep", batches_per_epoch=4)
    whole = fit(step, state, batches)
    middle = run_steps(step, step.init(state), (batches * 2)[:stop])
    end = fit(step, middle, batches)
    assert_same(end, whole)
    assert end.timestamp == whole.timestamp


@pytest.mark.parametrize("is_sized", [True, False])
def test_two_fits_equal_one(is_sized):
    step, batches = compose(loop_events, [noise(), counter()]), make_batches(4)
    data = batches if is_sized else Unsized(batches)
    whole = fit(step, make_state(), data, duration="2ep")
    for first in ("3ba", "4ba", "1ep", "5ba"):
        middle = fit(step, make_state(), data, duration=first)
        end = fit(step, middle, data, duration="2ep")
        assert_same(end, whole)
        assert end.timestamp.replace(run=whole.timestamp.run) == whole.timestamp


def test_mid_epoch_the_epoch_does_not_start_again():
    log = []
    step, batches = compose(loop_events), make_batches(4)
    middle = fit(step, make_state(), batches, duration="2ba")
    fit(step, middle, batches, duration="1ep", observers=[lambda event, _: log.append(event)])
    assert log[:2] == names("FIT_START BEFORE_DATALOADER")
    assert Event.EPOCH_START not in log and Event.ITERATION_START not in log
    assert log.count(Event.EPOCH_END) == 1


def test_evaluation_never_changes_training():
    def zero(state):
        return state.replace(params={name: torch.zeros_like(param) for name, param in state.params.items()})

    average = changing("average", Event.EVAL_START, zero)
    spoil = changing("spoil", Event.EVAL_BEFORE_ALL, zero)
    step = compose(loop_events, [noise(), average, spoil])
    state, batches = make_state(make_mlp(dropout=0.3)), make_batches(3)
    plain = fit(step, state, batches)
    evaluated = fit(step, state, batches, evaluate=Evaluator(make_batches(2), interval="1ba"))
    assert_same(evaluated, plain)


def test_outer_events_change_the_state():
    halve = changing(
        "halve",
        Event.EPOCH_END,
        lambda s: s.replace(params={name: param / 2 for name, param in s.params.items()}),
    )
    batches, plain = make_batches(2), compose(loop_events)
    end = fit(compose(loop_events, [halve]), make_state(), batches, duration="1ep")
    expected = run_steps(plain, make_state(), batches).params
    assert_same(end.params, {name: param / 2 for name, param in expected.items()})


def test_fit_initialises_once():
    log = []
    step = compose(loop_events, [recorder(log, "a", Event.INIT)])
    state = fit(step, make_state(), make_batches(2), duration="1ep")
    fit(step, state, make_batches(2), duration="2ep")
    assert log == [("a", Event.INIT)]


# Durations and lengths


def test_the_duration_is_the_whole_runs():
    step, batches = compose(loop_events), make_batches(3)
    state = fit(step, make_state(duration="1ep"), batches)
    assert (state.timestamp.epoch, state.timestamp.batch) == (1, 3)
    assert fit(step, state, batches, duration="4ba").timestamp.batch == 4
    assert fit(step, state, batches, duration="30sp").timestamp.sample == 32
    assert fit(step, make_state(), batches, duration="2ep").timestamp.run.duration == pc.Time.of("2ep")


def test_no_duration_anywhere():
    with pytest.raises(ValueError, match="no duration: give State.create or fit one"):
        fit(compose(loop_events), make_state(duration=None), make_batches(2))


def test_a_finished_run_is_an_error():
    step = compose(loop_events)
    state = fit(step, make_state(), make_batches(2))
    for duration in (None, "2ep", "3ba"):
        with pytest.raises(ValueError, match="nothing left to train"):
            fit(step, state, make_batches(2), duration=duration)


def test_seconds_are_a_budget_of_this_call(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("purecompose.fit.time.monotonic", lambda: now[0])

    def tick(event, state):
        now[0] += 1.0 if event is Event.BATCH_END else 0.0

    step, batches = compose(loop_events), make_batches(4)
    state = fit(step, make_state(duration=None), batches, duration="3sec", observers=[tick])
    assert state.timestamp.batch == 3
    assert state.timestamp.run.duration is None
    state = fit(step, state, batches, duration="2sec", observers=[tick])
    assert (state.timestamp.batch, state.timestamp.epoch) == (5, 1)
    assert fit(step, make_state(duration="2ba"), batches, duration="9sec", observers=[tick]).timestamp.batch == 2


@pytest.mark.parametrize("data", [[], (), Unsized([]), iter(())])
def test_no_batch_is_an_error(data):
    with pytest.raises(ValueError, match="has no batch|no batch came in epoch 0"):
        fit(compose(loop_events), make_state(), data)


def test_a_generator_is_used_up_after_one_epoch():
    with pytest.raises(ValueError, match="no batch came in epoch 1.*used up"):
        fit(compose(loop_events), make_state(), (batch for batch in make_batches(2)), duration="2ep")
    end = fit(compose(loop_events), make_state(), (batch for batch in make_batches(2)), duration="1ep")
    assert end.timestamp.batch == 2


def test_fewer_batches_than_the_state_expects():
    state = make_state(batches_per_epoch=4)
    with pytest.raises(ValueError, match="3 batches, but the state's batches_per_epoch is 4"):
        fit(compose(loop_events), state, make_batches(3))
    with pytest.raises(ValueError, match="ended after 3 batches of epoch 0, but .* batches_per_epoch is 4"):
        fit(compose(loop_events), state, Unsized(make_batches(3)))


def test_more_batches_than_the_state_expects_are_left():
    batches = make_batches(5)
    end = fit(compose(loop_events), make_state(batches_per_epoch=2), batches, duration="2ep")
    assert_same(end.params, run_steps(compose(loop_events), make_state(), batches[:2] * 2).params)
    assert (end.timestamp.epoch, end.timestamp.batch) == (2, 4)


def test_the_epochs_length_is_learnt_from_sized_data():
    end = fit(compose(loop_events), make_state(), make_batches(3), duration="1ep")
    assert end.timestamp.run.batches_per_epoch == 3
    unsized = fit(compose(loop_events), make_state(), Unsized(make_batches(3)), duration="1ep")
    assert unsized.timestamp.run.batches_per_epoch is None
    assert_same(unsized.params, end.params)


class Keyed:
    """Data whose order follows from the run's key and the epoch."""

    def __init__(self, batches):
        self.batches, self.asked = batches, []

    def epoch(self, key, epoch, start):
        self.asked.append((epoch, start))
        order = pc.random.permutation(pc.random.fold_in(key, epoch), len(self.batches)).tolist()
        return (self.batches[i] for i in order[start:])


def test_keyed_data_go_on_in_the_same_order():
    step = compose(loop_events, [noise()])
    data = Keyed(make_batches(6))
    whole = fit(step, make_state(), data, duration="2ep")
    assert data.asked == [(0, 0), (1, 0)]
    middle = fit(step, make_state(), data, duration="8ba")
    end = fit(step, middle, data, duration="2ep")
    assert data.asked[2:] == [(0, 0), (1, 0), (1, 2)]
    assert_same(end, whole)
