"""Run folders: their records, curves and reports.

with RunFolder("runs/first", {"lr": 0.1}) as run:
    run.begin(step, state)
    state = fit(step, state, data, observers=run.observer, checkpoints=run.checkpoints(), resume=run.resume)
"""

from purecompose.records.drawing import draw_curves
from purecompose.records.folder import RunFolder
from purecompose.records.reading import Kept, RunRecords, Start, read_run
from purecompose.records.report import write_report


__all__ = ["Kept", "RunFolder", "RunRecords", "Start", "draw_curves", "read_run", "write_report"]
