"""Run folders: their records and reports.

with RunFolder("runs/first", {"lr": 0.1}) as run:
    run.begin(step, state)
    state = fit(step, state, data, observers=run.observer, checkpoints=run.checkpoints(), resume=run.resume)
"""

from purecompose._support import publish
from purecompose.records.contents import Mistake as Mistake, Predictions as Predictions
from purecompose.records.folder import RunFolder as RunFolder
from purecompose.records.layout import Kept as Kept, RunRecords as RunRecords, Start as Start, read_run as read_run
from purecompose.records.listing import list_runs as list_runs
from purecompose.records.report import write_report as write_report


publish(__name__)
