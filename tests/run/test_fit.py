"""fit against a manual loop: how runs start, stop and continue."""

import time
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import Evaluator, Event, compose, fit, loop_events, optim, schedule
from purecompose.metrics import as_metric
from purecompose.time.predicates import epoch_ends
from tests.helpers import (
    Unsized,
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


# Equal runs


def by_hand(step, state, batches, epochs):
    state = step.init(
        state.replace(timestamp=state.timestamp.replace(run=pc.time.RunLength(f"{epochs}ep", len(batches))))
    )
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
def test_fit_equals_a_manual_loop(k):
    step, batches = rich_step(k), make_batches(4)
    found = fit(step, rich_state(), batches, duration="3ep")
    expected = by_hand(rich_step(k), rich_state(), batches, 3)
    assert_same(found, expected)
    assert found.timestamp == expected.timestamp


def test_fit_continues_a_loop_of_your_own_that_knew_no_epochs():
    step, batches = compose(loop_events, [noise()]), make_batches(4)
    state = run_steps(step, step.init(make_state(duration="20ba")), batches * 2)
    assert (state.timestamp.epoch, state.timestamp.batch_in_epoch) == (0, 8)
    found = fit(step, state, batches)
    assert (found.timestamp.epoch, found.timestamp.batch) == (5, 20)
    further = step(state, batches[0])
    with pytest.raises(ValueError, match="at batch 9 of epoch 0, but the data have 4 batches: .*batches_per_epoch=4"):
        fit(step, further, batches)


def test_fit_does_not_change_its_arguments():
    step = rich_step()
    state, batches = step.init(rich_state()), make_batches(3)
    before, batches_before, time = copied(state), copied(batches), state.timestamp
    fit(step, state, batches)
    assert_same(state, before)
    assert_same(batches, batches_before)
    assert state.timestamp is time


@pytest.mark.parametrize("stop", range(1, 8))
def test_continuing_from_anywhere_equals_one_run(stop):
    step, batches = rich_step(), make_batches(4)
    # The run's whole length is given from the start, because schedules depend on it.
    state = rich_state(duration="2ep", batches_per_epoch=4)
    whole = fit(step, state, batches)
    middle = run_steps(step, step.init(state), (batches * 2)[:stop])
    end = fit(step, middle, batches)
    assert_same(end, whole)
    assert end.timestamp == whole.timestamp


def test_fit_from_the_middle_of_an_epoch_does_not_start_it_again():
    log = []
    step, batches = compose(loop_events), make_batches(4)
    middle = fit(step, make_state(), batches, duration="2ba")
    fit(step, middle, batches, duration="1ep", observers=[lambda event, _: log.append(event)])
    assert log[:2] == [Event.FIT_START, Event.BEFORE_DATALOADER]
    assert Event.EPOCH_START not in log
    assert log.count(Event.EPOCH_END) == 1


def test_evaluation_never_changes_training():
    def zero(state):
        return state.replace(params={name: torch.zeros_like(param) for name, param in state.params.items()})

    average = changing("average", Event.EVAL_START, zero)
    spoil = changing("spoil", Event.EVAL_BEFORE_ALL, zero)
    step = compose(loop_events, [noise(), average, spoil])
    state, batches = make_state(make_mlp(dropout=0.3)), make_batches(3)
    plain = fit(step, state, batches)
    evaluated = fit(step, state, batches, evaluate=Evaluator(make_batches(2), every="1ba"))
    assert_same(evaluated, plain)


def test_evaluators_of_one_round_start_from_the_state_after_eval_before_all():
    zero = changing(
        "zero",
        Event.EVAL_BEFORE_ALL,
        lambda s: s.replace(params={name: torch.zeros_like(param) for name, param in s.params.items()}),
    )
    losses = []

    def observer(event, state):
        if event is Event.EVAL_END:
            losses.extend(value.item() for value in state.metrics.values())

    evaluators = [Evaluator(make_batches(2)), Evaluator(make_batches(1), label="other")]
    fit(compose(loop_events, [zero]), make_state(), make_batches(2), evaluate=evaluators, observers=[observer])
    # Two rounds of two evaluators; with zero weights all classes are equally likely.
    assert losses == pytest.approx([torch.tensor(3.0).log().item()] * 4)


def test_outer_events_change_the_state():
    halve = changing(
        "halve", Event.EPOCH_END, lambda s: s.replace(params={name: param / 2 for name, param in s.params.items()})
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


# Runs that would never end


def test_a_run_in_tokens_needs_tokens():
    with pytest.raises(ValueError, match="in tokens .duration 60tok., but batch 0 has none: .*'input_ids'"):
        fit(compose(loop_events), make_state(), make_batches(2), duration="60tok")


def test_a_run_in_samples_needs_samples():
    empty = (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="in samples .duration 60sp., but batch 1 has none"):
        fit(compose(loop_events), make_state(), [make_batches(1)[0], empty], duration="60sp")
    assert fit(compose(loop_events), make_state(), [make_batches(1)[0], empty], duration="3ba").timestamp.batch == 3


# Durations and lengths


def test_the_duration_is_the_length_of_the_whole_run():
    step, batches = compose(loop_events), make_batches(3)
    state = fit(step, make_state(duration="1ep"), batches)
    assert (state.timestamp.epoch, state.timestamp.batch) == (1, 3)
    assert fit(step, state, batches, duration="4ba").timestamp.batch == 4
    assert fit(step, state, batches, duration="30sp").timestamp.sample == 32
    assert fit(step, make_state(), batches, duration="2ep").timestamp.run.duration == pc.time.Time.of("2ep")


def test_a_finished_run_is_an_error():
    step = compose(loop_events)
    state = fit(step, make_state(), make_batches(2))
    for duration, end, longer in ((None, "the end of its 2ep", "4ep"), ("3ba", "past the end of its 3ba", "8ba")):
        said = f'nothing left to train: .* at epoch 2 .batch 4., {end}; give fit .*, as in duration="{longer}"$'
        with pytest.raises(ValueError, match=said):
            fit(step, state, make_batches(2), duration=duration)
        assert fit(step, state, make_batches(2), duration=longer).timestamp.batch == 8


def test_seconds_are_a_budget_of_this_call(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

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
    with pytest.raises(ValueError, match="no batch came in epoch 1.*exhausted"):
        fit(compose(loop_events), make_state(), (batch for batch in make_batches(2)), duration="2ep")
    end = fit(compose(loop_events), make_state(), (batch for batch in make_batches(2)), duration="1ep")
    assert end.timestamp.batch == 2


def test_fewer_batches_than_the_state_expects():
    state = make_state(batches_per_epoch=4)
    with pytest.raises(ValueError, match="ended after 3 batches of epoch 0, but .* batches_per_epoch is 4"):
        fit(compose(loop_events), state, Unsized(make_batches(3)))


def test_batches_beyond_the_expected_number_are_not_read():
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


class Lengthless(Unsized):
    """Data that have `__len__` but no length, as a DataLoader over a stream."""

    epoch = 3  # an attribute of that name is not yet keyed data

    def __len__(self):
        raise TypeError("object of type 'Stream' has no len()")


def test_a_length_that_cannot_be_determined_is_unknown():
    end = fit(compose(loop_events), make_state(), Lengthless(make_batches(3)), duration="2ep")
    assert (end.timestamp.batch, end.timestamp.run.batches_per_epoch) == (6, None)


def test_in_epochs_of_unknown_length_schedules_change_at_epoch_ends():
    optimizer = optim.sgd(schedule.linear())
    data = Unsized(make_batches(2))
    with pytest.warns(UserWarning, match="epochs have no known length"):
        end = fit(compose(loop_events), make_state(optimizer=optimizer), data, duration="2ep")
    expected = make_state(optimizer=optim.sgd(1.0))
    expected = run_steps(compose(loop_events), expected, data.batches)
    expected = run_steps(compose(loop_events), expected.replace(optimizer=optim.sgd(0.5)), data.batches)
    assert_same(end.params, expected.params)


class Keyed:
    """Data whose order depends on the run's key and the epoch."""

    def __init__(self, batches):
        self.batches, self.asked = batches, []

    def epoch(self, key, epoch, start):
        self.asked.append((epoch, start))
        order = pc.random.permutation(pc.random.fold_in(key, epoch), len(self.batches)).tolist()
        return (self.batches[i] for i in order[start:])


def test_keyed_data_continue_in_the_same_order():
    step = compose(loop_events, [noise()])
    data = Keyed(make_batches(6))
    whole = fit(step, make_state(), data, duration="2ep")
    assert data.asked == [(0, 0), (1, 0)]
    middle = fit(step, make_state(), data, duration="8ba")
    end = fit(step, middle, data, duration="2ep")
    assert data.asked[2:] == [(0, 0), (1, 0), (1, 2)]
    assert_same(end, whole)


# Batch by batch


def test_training_yields_every_state_and_ends_with_the_result_of_fit():
    step, batches = rich_step(), make_batches(4)
    states = list(pc.training(step, rich_state(), batches, duration="2ep"))
    assert [state.timestamp.batch for state in states] == [1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert_same(states[-1], fit(step, rich_state(), batches, duration="2ep"))
    state = step.init(rich_state(duration="2ep", batches_per_epoch=4))
    for found, batch in zip(states, [*batches, *batches], strict=False):
        state = step(state, batch)
        assert_same(found, state)


@pytest.mark.parametrize("is_stop", [True, False])
def test_a_metric_used_for_decisions_must_be_a_single_number(tmp_path, is_stop):
    mean = as_metric(lambda outputs, targets: outputs.mean())
    by_class = mean._replace(compute=lambda acc: torch.zeros(3))
    decided: dict[str, Any] = {"stop": pc.EarlyStopping("eval/by_class", mode="min")}
    decided = (
        decided
        if is_stop
        else {"checkpoints": pc.Checkpoints(tmp_path, best="eval/by_class", mode="min", background=False)}
    )
    evaluator = Evaluator(make_batches(1), {"by_class": by_class})
    with pytest.raises(TypeError, match=r"eval/by_class: expected a single number.*shape \(3,\)"):
        fit(compose(loop_events), make_state(), make_batches(2), evaluate=evaluator, **decided)


@pytest.mark.parametrize("run", [fit, pc.training])
def test_the_error_for_an_unknown_setting_names_the_right_one(run):
    given = compose(loop_events), make_state(), make_batches(1)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'epochs'; write pc.State.create"):
        run(*given, epochs=3)
    with pytest.raises(TypeError, match=rf"^{run.__name__}\(\) got .*'observer'; did you mean 'observers'\?$"):
        run(*given, observer=print)
    with pytest.raises(TypeError, match=r"compose\(\) got .*'microbatch'; did you mean 'microbatch"):
        compose(loop_events, microbatch=4)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"compose\(\) got .*'seed'; write pc.State.create\(key=3\)$"):
        compose(loop_events, seed=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"compile\(\) got .*'microbatches'; write pc.compose\(microbatches=4\)$"):
        pc.compile(given[0], microbatches=4)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("resumes", [False, True])
def test_a_longer_run_says_what_becomes_of_its_schedules(resumes, tmp_path):
    """A rate that has fallen to 0 rises again; with an end of its own it stays as it is, in silence."""

    def start(duration, **options):
        rate = 0.003 * pc.schedule.cosine(**options)
        return make_state(optimizer=pc.optim.sgd(rate), duration=duration, batches_per_epoch=2)

    def longer(end, folder, **options):
        kept = pc.Checkpoints(folder, background=False)
        if resumes:
            return fit(compose(loop_events), start("4ep", **options), make_batches(2), checkpoints=kept, resume="auto")
        return fit(compose(loop_events), end, make_batches(2), duration="4ep")

    for name, options in (("follows", {}), ("fixed", {"t_max": "2ep"})):
        kept = pc.Checkpoints(tmp_path / name, background=False)
        end = fit(compose(loop_events), start("2ep", **options), make_batches(2), checkpoints=kept)
        if options:
            assert longer(end, tmp_path / name, **options).timestamp.epoch == 4
        else:
            with pytest.warns(UserWarning, match=r"is 4ep long, and was 2ep: at batch 4 cosine.* is 0\.5, and was 0\."):
                longer(end, tmp_path / name)


def test_an_interval_without_a_length_in_this_run_is_an_error_in_the_first_batch() -> None:
    acting = changing("late", Event.BATCH_END, lambda state: state, when=pc.after(0.7) & pc.every("1ep"))
    step = compose(loop_events, [acting])
    with pytest.raises(pc.errors.MatchError, match="late: match failed at Event.BATCH_END"):
        step(make_state(duration="10ep"), make_batch())


def test_a_schedule_without_a_value_in_this_run_is_an_error_before_the_first_batch() -> None:
    late = compose(loop_events, [pc.algorithms.ema("1ep", start=0.7)])
    with pytest.raises(ValueError, match="half_life='1ep' and every='1ba' cannot be counted in batches in this run"):
        next(pc.training(late, make_state(duration="10ep"), (batch for batch in make_batches(2))))


def test_a_run_continues_after_the_end_of_a_schedule_whose_method_no_longer_acts() -> None:
    rate = pc.schedule.from_torch(torch.optim.lr_scheduler.OneCycleLR, every="1ba", total_steps=4, max_lr=0.1)
    early = changing("early", Event.BATCH_END, lambda state: state, when=pc.before("4ba"), config={"rate": rate})
    step = compose(loop_events, [early])
    end = fit(step, make_state(duration="3ep"), make_batches(2))
    assert fit(step, end, make_batches(2), duration="4ep").timestamp.batch == 8
