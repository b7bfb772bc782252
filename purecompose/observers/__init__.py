"""Observers read a run and never change it: functions `(event, state) -> None`.

history = History()
with Progress() as progress, Records("run.jsonl", monitors=[learning_rate(), speed()]) as records:
    state = fit(step, state, data, observers=[history, progress, records])
"""

from purecompose.observers.adapters import MLflow, TensorBoard
from purecompose.observers.history import History
from purecompose.observers.layers import activations, updates
from purecompose.observers.monitors import learning_rate, memory, moments, speed, system
from purecompose.observers.nans import NaNs
from purecompose.observers.profile import Profile
from purecompose.observers.progress import Progress
from purecompose.observers.recorder import Monitor, Recorder, Sink
from purecompose.observers.records import Records, read_records
from purecompose.observers.stopwatch import Stopwatch
from purecompose.observers.trackers import Comet, Neptune, Tracker, WandB


__all__ = [
    "Comet",
    "History",
    "MLflow",
    "Monitor",
    "NaNs",
    "Neptune",
    "Profile",
    "Progress",
    "Recorder",
    "Records",
    "Sink",
    "Stopwatch",
    "TensorBoard",
    "Tracker",
    "WandB",
    "activations",
    "learning_rate",
    "memory",
    "moments",
    "read_records",
    "speed",
    "system",
    "updates",
]
