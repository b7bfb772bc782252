"""The folder of a run, and what is read and drawn from it.

with RunFolder("runs/first", {"lr": 0.1}) as run:
    run.begin(step, state)
    state = fit(step, state, data, observers=run.observer, checkpoints=run.checkpoints(), resume=run.resume)
"""

from purecompose.runs.curves import draw_curves
from purecompose.runs.folder import RunFolder
from purecompose.runs.reading import Kept, RunRecords, read_run
from purecompose.runs.report import write_report
from purecompose.runs.starts import Start


__all__ = ["Kept", "RunFolder", "RunRecords", "Start", "draw_curves", "read_run", "write_report"]
