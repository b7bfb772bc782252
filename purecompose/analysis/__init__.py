"""Analysis of recorded runs (`replay`, `bisect`, `explain`, `compare`), and experiments that train new ones (`ablate`,
`sweep`, `learning_rate_range`, `sensitivity`).

    run = RecordedRun("runs/first", step, state, data)
    state = replay(run, at="1234ba").state
    print(bisect(run, predicates.not_finite(), stays=True))
"""

from purecompose.analysis import predicates
from purecompose.analysis.ablation import ablate
from purecompose.analysis.comparing import CheckpointDifference, Comparison, compare
from purecompose.analysis.drawings import draw_ablation, draw_learning_rate_range
from purecompose.analysis.effects import FEWEST_SEEDS, Ablation, Cell, Effect, Interval, simultaneous_intervals
from purecompose.analysis.explaining import Example, Explanation, Layer, explain, explain_batch
from purecompose.analysis.replaying import MaxDifference, RecordedRun, Replay, replay
from purecompose.analysis.searching import Bisection, bisect
from purecompose.analysis.sensitivities import Derivative, Sensitivity, Window, sensitivity, window_of
from purecompose.analysis.sweeping import LearningRateRange, Sweep, Trial, learning_rate_range, sweep


__all__ = [
    "Ablation",
    "Bisection",
    "Cell",
    "CheckpointDifference",
    "Comparison",
    "Derivative",
    "Effect",
    "Example",
    "Explanation",
    "FEWEST_SEEDS",
    "Interval",
    "Layer",
    "LearningRateRange",
    "MaxDifference",
    "RecordedRun",
    "Replay",
    "Sensitivity",
    "Sweep",
    "Trial",
    "Window",
    "ablate",
    "bisect",
    "compare",
    "draw_ablation",
    "draw_learning_rate_range",
    "explain",
    "explain_batch",
    "learning_rate_range",
    "predicates",
    "replay",
    "sensitivity",
    "simultaneous_intervals",
    "sweep",
    "window_of",
]
