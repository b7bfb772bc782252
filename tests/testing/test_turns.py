"""Threads in turn: the order, and the end after an error."""

import threading
from contextvars import ContextVar

import pytest

from purecompose.testing import simulated as module
from purecompose.testing.simulated import Turns


def test_threads_run_in_the_order_of_their_places() -> None:
    order: list[tuple[int, int]] = []
    begun: list[int] = []
    turns = Turns(3, begun.append)

    def act(place: int) -> int:
        for number in range(4):
            order.append((number, place))
            assert turns.meet(place, 10 * number + place) == [10 * number + other for other in range(3)]
        return place

    assert turns.run(act) == [0, 1, 2]
    assert order == [(number, place) for number in range(4) for place in range(3)]
    assert begun == 5 * [0, 1, 2]


def test_what_all_have_given_is_seen_once_before_any_thread_goes_on() -> None:
    found: list[list[int]] = []
    turns = Turns(2)

    def act(place: int) -> int:
        turns.meet(place, place, found.append)
        return len(found)

    assert turns.run(act) == [1, 1] and found == [[0, 1]]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("number", [0, 1])
def test_an_error_in_one_thread_ends_all(place: int, number: int) -> None:
    turns, ended = Turns(3), []

    def act(own: int) -> None:
        try:
            for round_number in range(3):
                if (own, round_number) == (place, number):
                    raise KeyError("wrong")
                turns.meet(own, None)
        finally:
            ended.append(own)

    before = threading.active_count()
    with pytest.raises(KeyError, match="wrong"):
        turns.run(act)
    assert threading.active_count() == before
    assert len(ended) == len(set(ended)) and (number == 0 or len(ended) == 3)


def test_an_error_of_what_all_have_given_ends_all() -> None:
    turns = Turns(2)

    def wrong(given: list[int]) -> None:
        raise ValueError(f"{given} do not fit")

    with pytest.raises(ValueError, match=r"\[0, 1\] do not fit"):
        turns.run(lambda place: turns.meet(place, place, wrong))


@pytest.mark.parametrize("longer", [0, 1])
def test_threads_that_wait_for_one_that_has_ended_are_an_error(longer: int) -> None:
    turns = Turns(2)

    def act(place: int) -> None:
        for _ in range(2 + (place == longer)):
            turns.meet(place, None)

    with pytest.raises(RuntimeError, match="wait for each other"):
        turns.run(act)


def test_a_thread_that_waits_for_a_lock_of_another_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.2)
    turns, lock, before = Turns(2), threading.Lock(), threading.active_count()

    def act(place: int) -> None:
        with lock:
            turns.meet(place, None)

    with pytest.raises(RuntimeError, match="thread 1 of 2 has not waited or ended"):
        turns.run(act)
    assert threading.active_count() == before


def test_threads_have_the_context_of_the_caller() -> None:
    variable: ContextVar[int] = ContextVar("variable", default=0)
    variable.set(3)
    assert Turns(2).run(lambda place: variable.get()) == [3, 3]
