"""Observers read a run and never change it: functions `(event, state) -> None`.

history = History()
with Progress() as progress, Records("run.jsonl", monitors=[learning_rate(), speed()]) as records:
    state = fit(step, state, data, observers=[history, progress, records])
"""

from purecompose._support import publish
from purecompose.observers.diagnosis import NaNs as NaNs, Profile as Profile
from purecompose.observers.monitors import (
    image_samples as image_samples,
    learning_rate as learning_rate,
    memory as memory,
    speed as speed,
    text_samples as text_samples,
    updates as updates,
)
from purecompose.observers.progress import Progress as Progress, Stopwatch as Stopwatch
from purecompose.observers.recorder import (
    History as History,
    Image as Image,
    Monitor as Monitor,
    Recorder as Recorder,
    Sink as Sink,
)
from purecompose.observers.records import Records as Records, read_records as read_records
from purecompose.observers.trackers import CSV as CSV, MLflow as MLflow, TensorBoard as TensorBoard, WandB as WandB


publish(__name__)
