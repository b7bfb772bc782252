"""Staged matching against asking every predicate again, and what a match may read."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from purecompose import losses, optim
from purecompose.core.algorithm import Algorithm
from purecompose.core.application import Matcher
from purecompose.core.state import State
from purecompose.errors import MatchError
from purecompose.time import RunLength, Timestamp
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, Predicate, after, epoch_ends, every, on, through
from tests.time.predicate_strategies import EVENTS, Pair, at_time, pairs, runs, walks


BATCH = (torch.arange(24.0).reshape(8, 3), torch.arange(8) % 2)


def make(match: Any, name: str = "watcher", *, host: bool = False) -> Algorithm:
    return Algorithm(name, match, lambda event, state: state, host=host)


@pytest.fixture(scope="module")
def state() -> State:
    net = nn.Linear(3, 2)
    optimizer = optim.sgd(0.1, momentum=0.9)
    return State.create(net, loss=losses.cross_entropy, optimizer=optimizer, duration="4ep", batches_per_epoch=5)


def acts(
    match: Callable[[Any], Any],
    state: State,
    *,
    batch: Any = BATCH,
    event: Event = Event.AFTER_DATALOADER,
    host: bool = False,
) -> bool:
    """Return whether an algorithm with this plain function of the state acts at an event."""
    algorithm = make(lambda _, state: match(state), host=host)
    matcher = Matcher([algorithm], [event])
    now = state.timestamp
    bits = matcher.schedule(state, batch, now, now.advance(8))
    return matcher.matched(bits, event, [algorithm]) == (algorithm,)


# Staged matching is equivalent to matching


def sibling(run: RunLength) -> RunLength:
    """Return another run in which the same predicates have an answer."""
    assert run.duration is not None
    epoch = None if run.batches_per_epoch is None else run.batches_per_epoch + 1
    return RunLength(run.duration * 3, epoch)


@st.composite
def visits(draw: st.DrawFn, run: RunLength) -> list[tuple[Timestamp, Timestamp]]:
    """Draw steps (now, later) along walks in several runs: forwards, backwards, in jumps, from run to run."""
    twin = RunLength(run.duration, run.batches_per_epoch)
    points = [point for each in (run, twin, sibling(run)) for point in draw(walks(each, max_size=12))]
    starts = draw(st.lists(st.integers(0, len(points) - 1), min_size=1, max_size=5))
    found = []
    for start in starts:
        for now in points[start : start + draw(st.integers(1, 12))]:
            samples, stays = draw(st.integers(0, 9)), draw(st.booleans())
            found.append((now, now if stays else now.advance(samples, samples % 3)))
    return found


@settings(max_examples=100)
@given(st.data())
def test_the_schedule_equals_evaluating_every_predicate_again(data: st.DataObject) -> None:
    run = data.draw(runs())
    drawn: list[Pair] = data.draw(st.lists(pairs(run, max_leaves=4), min_size=1, max_size=4))
    drawn.append(Pair(after("3sp"), lambda _, time: time.sample >= 3))
    if run.batches_per_epoch is not None:
        drawn = [pair for pair in drawn if data.draw(st.booleans())] or drawn
    algorithms = [make(pair.predicate, f"a{i}") for i, pair in enumerate(drawn)]
    # In another run a fraction means other batches, so the predicates themselves are the reference here. Their
    # own correctness is tested in test_predicates.py.
    matcher = Matcher(algorithms, EVENTS)
    for now, later in data.draw(visits(run)):
        bits = matcher.schedule(None, None, now, later)  # pyright: ignore[reportArgumentType]
        for event in EVENTS:
            moment = at_time(later if event.sees_new_time else now)
            expected = tuple(a for a in algorithms if a.match(event, moment))
            assert matcher.matched(bits, event, algorithms) == expected


def test_an_interval_within_epochs_of_unknown_length_is_asked_again_after_another_epoch() -> None:
    """A step may be used again from an earlier state, whose first epoch was shorter."""
    algorithms, run = [make(every(70, in_epoch=True))], RunLength("900ba")

    def at(first: int, batches: int) -> tuple[Timestamp, Timestamp]:
        now = Timestamp(run=run)
        for _ in range(first):
            now = now.advance()
        now = now.advance_epoch()
        for _ in range(batches):
            now = now.advance()
        return now, now.advance()

    fresh, used = Matcher(algorithms, EVENTS), Matcher(algorithms, EVENTS)
    used.schedule(None, None, *at(12, 5))  # pyright: ignore
    expected = fresh.schedule(None, None, *at(10, 69))  # pyright: ignore
    assert expected and used.schedule(None, None, *at(10, 69)) == expected  # pyright: ignore


@pytest.mark.parametrize(
    ("match", "event", "first", "second"),
    [
        # (batch, epoch, batch in the epoch) before and after each step; every answer is yes, then no.
        (after("2ep"), Event.BATCH_START, ((3, 2, 0), (4, 2, 1)), ((3, 1, 0), (4, 2, 0))),
        (after("1ep"), Event.BATCH_END, ((3, 0, 3), (4, 1, 0)), ((3, 0, 3), (4, 0, 4))),
        (~through("1ep"), Event.BATCH_START, ((3, 1, 1), (4, 1, 2)), ((4, 1, 0), (5, 1, 1))),
        (after("7ba"), Event.BATCH_START, ((7, 0, 7), (7, 0, 7)), ((6, 0, 6), (7, 0, 7))),
        (after("8ba"), Event.BATCH_END, ((7, 0, 7), (8, 0, 8)), ((7, 0, 7), (7, 0, 7))),
    ],
)
def test_a_single_counter_that_moves_is_noticed(match: Any, event: Event, first: Any, second: Any) -> None:
    algorithm, run = make(match), RunLength("9ep")
    matcher, acted = Matcher([algorithm], [event]), []
    for step in (first, second, first):
        now, later = (Timestamp(batch=batch, epoch=epoch, batch_in_epoch=own, run=run) for batch, epoch, own in step)
        bits = matcher.schedule(None, None, now, later)  # pyright: ignore[reportArgumentType]
        acted.append(matcher.matched(bits, event, [algorithm]) == (algorithm,))
    assert acted == [True, False, True]


def walk(matcher: Matcher, state: State, count: int) -> Iterator[tuple[Timestamp, int]]:
    """Yield the schedules of the first steps of a run."""
    now = state.timestamp
    for _ in range(count):
        later = now.advance(8)
        yield now, matcher.schedule(state, BATCH, now, later)
        now = later


def test_each_bit_of_a_schedule_answers_one_open_question(state: State) -> None:
    algorithms = [
        make(on("before_loss"), "a"),
        make(on("before_loss") & after("10ba"), "b"),
        make(on("before_loss", "batch_end") & every(2), "c"),
        make(NEVER, "d"),
    ]
    matcher = Matcher(algorithms, [Event.BEFORE_LOSS, Event.BATCH_END, Event.BEFORE_LOSS])
    asked = [(q.event, q.algorithm.name) for q in matcher.questions]
    assert asked == [(Event.BEFORE_LOSS, "b"), (Event.BEFORE_LOSS, "c"), (Event.BATCH_END, "c")]
    assert matcher.always == {(Event.BEFORE_LOSS, "a")}
    schedules = [bits for _, bits in walk(matcher, state, 20)]
    assert schedules == [0b000, 0b110] * 5 + [0b001, 0b111] * 5
    names = [a.name for a in matcher.matched(0b011, Event.BEFORE_LOSS, algorithms)]
    assert names == ["a", "b", "c"]
    assert matcher.matched(0b011, Event.BATCH_END, algorithms) == ()


# Plain functions


def test_a_plain_function_is_not_called_if_other_predicates_settle_it(state: State) -> None:
    asked = []

    def match(event: Event, state: Any) -> bool:
        asked.append((event, state.timestamp.batch))
        return True

    matcher = Matcher([make(on("before_loss") & after("3ba") & match)], [Event.INIT, Event.BEFORE_LOSS])
    assert [bits for _, bits in walk(matcher, state, 6)] == [0, 0, 0, 1, 1, 1]
    assert asked == [(Event.BEFORE_LOSS, batch) for batch in (3, 4, 5)]


@pytest.mark.parametrize(
    "match",
    [
        lambda state: state.inputs.shape == (8, 3),
        lambda state: state.targets.dtype == torch.int64,
        lambda state: state.num_examples == 8,
        lambda state: len(state.batch[0]) == 8 and state.batch[0].dim() == 2,
        lambda state: state.batch[0].numel() == 24 and state.batch[0].stride() == (3, 1),
        lambda state: state.batch[0].is_floating_point() and not state.batch[0].requires_grad,
        lambda state: state.batch[0].ndim == 2 and state.batch[0].device == state.device,
        lambda state: sum(p.numel() for p in state.params.values()) == 8,
        lambda state: state.opt_state is not None and state.slots == {},
        lambda state: state.loss.ndim == 0 and state.timestamp.batch == 0,
        lambda state: state.timestamp.run.batches_per_epoch == 5,
        lambda state: "weight" in state.model.param_names and state.context.precision == "fp32",
    ],
)
def test_static_facts_and_shapes_can_be_read(match: Callable[[Any], bool], state: State) -> None:
    assert acts(match, state) is True
    assert acts(lambda state: not match(state), state) is False


@pytest.mark.parametrize(
    "match",
    [
        lambda state: state.batch[0].sum() > 0,
        lambda state: state.targets[0] == 1,
        lambda state: float(state.key[0]),
        lambda state: 3 in state.batch[1],
        lambda state: max(state.batch[1]),
        lambda state: torch.any(state.batch[1]),
        lambda state: torch.ones(()) * state.loss,
        lambda state: np.asarray(state.batch[0]).sum(),
        lambda state: state.params["weight"].norm() > 1,
        lambda state: state.loss < 1,
        lambda state: state.metrics["accuracy"].item() > 0.5,
    ],
)
def test_a_match_that_reads_a_value_gets_an_error_with_remedies(match: Callable[[Any], Any], state: State) -> None:
    state = state.replace(loss=torch.tensor(0.5), metrics={"accuracy": torch.tensor(0.9)})
    with pytest.raises(MatchError, match="^watcher: match failed at Event.AFTER_DATALOADER: ") as caught:
        acts(match, state)
    for text in ("the value of a tensor was read", "host=True", "torch.where"):
        assert text in str(caught.value)


@pytest.mark.parametrize("match", [lambda state: state.forward(state.inputs), lambda state: state.rng("x")])
def test_a_match_cannot_call_methods_of_the_state(match: Callable[[Any], Any], state: State) -> None:
    with pytest.raises(MatchError, match=r"the result of state\.\w+\(...\) is not known yet"):
        acts(match, state)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A batch that checks its fields, as some do."""

    image: Tensor
    note: str

    def __post_init__(self) -> None:
        assert isinstance(self.image, Tensor)


@pytest.mark.parametrize("wrap", [lambda sample: sample, lambda sample: {"part": [sample]}])
def test_dataclasses_in_a_batch_are_sealed(wrap: Callable[[Sample], Any], state: State) -> None:
    batch = wrap(Sample(BATCH[0], "train"))

    def sample(state: Any) -> Sample:
        return state.batch["part"][0] if isinstance(state.batch, dict) else state.batch

    assert acts(lambda state: sample(state).note == "train" and len(sample(state).image) == 8, state, batch=batch)
    assert acts(lambda state: isinstance(sample(state), Sample), state, batch=batch)
    with pytest.raises(MatchError, match="the value of a tensor was read"):
        acts(lambda state: sample(state).image.sum() > 0, state, batch=batch)
    assert isinstance(sample(state.replace(batch=batch)).image, Tensor)


@pytest.mark.parametrize("event", [Event.AFTER_DATALOADER, Event.BATCH_END])
def test_a_host_match_sees_values_and_the_time_of_its_event(event: Event, state: State) -> None:
    assert acts(lambda state: state.batch[0].sum() == 276, state, host=True, event=event)
    assert acts(lambda state: state.forward(state.inputs).shape == (8, 2), state, host=True, event=event)
    assert acts(lambda state: isinstance(state, State), state, host=True, event=event)
    batch = 1 if event is Event.BATCH_END else 0
    assert acts(lambda state: state.timestamp.batch == batch, state, host=True, event=event)
    assert state.batch is None


# Errors


def test_an_error_inside_a_match_names_the_algorithm(state: State) -> None:
    def match(event: Event, state: Any) -> bool:
        return state.batch["image"]

    matcher = Matcher([make(match, "cutout")], [Event.BATCH_START])
    with pytest.raises(MatchError, match="cutout: match failed at Event.BATCH_START: ") as caught:
        matcher.schedule(state, BATCH, state.timestamp, state.timestamp)
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize("predicate", [epoch_ends(), every("1ep"), ~epoch_ends() & after("1ba"), after(0.5)])
def test_a_run_that_cannot_answer_names_the_algorithm_and_leaves_the_matcher_whole(predicate: Predicate) -> None:
    matcher = Matcher([make(after("1ba"), "a"), make(predicate, "ema")], [Event.BATCH_END])
    known = Timestamp(run=RunLength("2ep", batches_per_epoch=2))
    expected = matcher.schedule(None, None, known, known.advance())  # pyright: ignore[reportArgumentType]
    unknown = Timestamp(batch=3, run=RunLength())
    for _ in range(2):
        with pytest.raises(MatchError, match="ema: match failed at Event.BATCH_END: .*State.create"):
            matcher.schedule(None, None, unknown, unknown.advance())  # pyright: ignore[reportArgumentType]
        again = matcher.schedule(None, None, known, known.advance())  # pyright: ignore[reportArgumentType]
        assert again == expected
