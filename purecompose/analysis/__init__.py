"""Questions to runs: what a run did at a batch, where it went wrong, and in what two runs differ.

run = RecordedRun("runs/first", step, state, data)
state = replay(run, at="1234ba").state
print(bisect(run, predicates.not_finite(), stays=True))
"""

from purecompose.analysis import predicates
from purecompose.analysis.comparing import Comparison, Growth, compare
from purecompose.analysis.explaining import Example, Explanation, Layer, explain, explain_batch
from purecompose.analysis.gaps import Gap
from purecompose.analysis.recorded import RecordedRun
from purecompose.analysis.replaying import Replay, replay
from purecompose.analysis.searching import Bisection, bisect


__all__ = [
    "Bisection",
    "Comparison",
    "Example",
    "Explanation",
    "Gap",
    "Growth",
    "Layer",
    "RecordedRun",
    "Replay",
    "bisect",
    "compare",
    "explain",
    "explain_batch",
    "predicates",
    "replay",
]
