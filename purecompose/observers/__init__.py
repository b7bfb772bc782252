"""Observers read a run and never change it: functions `(event, state) -> None`.

history = History()
with Progress() as progress:
    state = fit(step, state, data, observers=[history, progress])
"""

from purecompose.observers.history import History
from purecompose.observers.progress import Progress
from purecompose.observers.stopwatch import Stopwatch


__all__ = ["History", "Progress", "Stopwatch"]
