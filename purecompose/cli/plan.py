"""`plan`: show the algorithms that act at each event, at a point of a run."""

import argparse
from pathlib import Path

from purecompose._support.messages import say
from purecompose.cli.kinds import TEXT
from purecompose.cli.own import allowed_by
from purecompose.cli.setup import Setup, completed, fixed_arithmetic, plain_warnings, prepare, reported_as
from purecompose.cli.sources import chosen, settings_of
from purecompose.core.state import State
from purecompose.time import Time, TimeUnit
from purecompose.time.units import snapped


def show_plan(options: argparse.Namespace) -> None:
    """Print the algorithms that act at each event at a point of a run, either one with a folder or a new one."""
    earlier = {} if options.run is None else settings_of(Path(options.run))
    settings, data = completed(chosen(options, earlier), allowed=allowed_by(options))
    with fixed_arithmetic(settings["threads"]), plain_warnings():
        setup = prepare(settings, data)
        with reported_as("--at"):
            state = _moved(setup, options.at)
        say(setup.step.plan(state, next(iter(setup.train_data))))


def _moved(setup: Setup, at: str) -> State:
    """Return the state with the counters of a point of its run; nothing else changes."""
    state = setup.state
    batches, length = _in_batches(setup, Time.of(at)), _in_batches(setup, state.timestamp.run.duration)
    if batches is None or batches < 0:
        raise ValueError(f"{at}: expected a point of the run, such as 0.6dur, 5ep or 100ba")
    if length is not None and batches > length:
        raise ValueError(f"{at}: the run ends earlier, after {length:g} batches")
    samples = setup.train_data.batch_size
    return state.replace(timestamp=state.timestamp.advance_by(int(batches), samples, samples * _tokens(setup)))


def _in_batches(setup: Setup, time: Time | None) -> float | None:
    """Return a time as a number of batches of the loader's size; None if that is not known."""
    run, samples = setup.state.timestamp.run, setup.train_data.batch_size
    if time is None or (time.unit is TimeUnit.TOKEN and not _tokens(setup)):
        return None
    if time.unit is TimeUnit.DURATION:
        length = _in_batches(setup, run.duration)
        return None if length is None else snapped(time.value * length)
    sizes = {TimeUnit.SAMPLE: samples, TimeUnit.TOKEN: samples * _tokens(setup)}
    return time.value / sizes[time.unit] if time.unit in sizes else run.in_batches(time)


def _tokens(setup: Setup) -> int:
    """Return the number of tokens per example, 0 for images."""
    return setup.data.in_shape[0] if setup.kind is TEXT else 0
