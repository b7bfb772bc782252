"""Observers read a run and never change it: functions `(event, state) -> None`.

history = History()
with Progress() as progress, Records("run.jsonl", monitors=[learning_rate(), speed()]) as records:
    state = fit(step, state, data, observers=[history, progress, records])
"""

from purecompose.observers.monitors import activations, learning_rate, memory, moments, speed, system, updates
from purecompose.observers.nans import NaNs
from purecompose.observers.profile import Profile
from purecompose.observers.progress import Progress
from purecompose.observers.recorder import History, Image, Monitor, Recorder, Sink
from purecompose.observers.records import Records, read_records
from purecompose.observers.samples import image_samples, text_samples
from purecompose.observers.stopwatch import Stopwatch
from purecompose.observers.trackers import Comet, MLflow, TensorBoard, WandB


__all__ = [
    "Comet",
    "History",
    "Image",
    "MLflow",
    "Monitor",
    "NaNs",
    "Profile",
    "Progress",
    "Recorder",
    "Records",
    "Sink",
    "Stopwatch",
    "TensorBoard",
    "WandB",
    "activations",
    "image_samples",
    "learning_rate",
    "memory",
    "moments",
    "read_records",
    "speed",
    "system",
    "text_samples",
    "updates",
]
