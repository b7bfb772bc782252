"""Analysis of recorded runs (`replay`, `bisect`, `compare`), and experiments that train new ones (`ablate`, `sweep`,
`learning_rate_range`).

    run = RecordedRun("runs/first", step, state, data)
    state = replay(run, at="1234ba").state
    print(bisect(run, predicates.not_finite(), stays=True))
"""

from purecompose._support import publish
from purecompose.analysis import predicates as predicates
from purecompose.analysis.ablation import ablate as ablate
from purecompose.analysis.effects import (
    FEWEST_SEEDS as FEWEST_SEEDS,
    Ablation as Ablation,
    Cell as Cell,
    Effect as Effect,
    Interval as Interval,
    simultaneous_intervals as simultaneous_intervals,
)
from purecompose.analysis.proposing import Range as Range
from purecompose.analysis.replaying import RecordedRun as RecordedRun, Replay as Replay, replay as replay
from purecompose.analysis.searching import (
    Bisection as Bisection,
    CheckpointDifference as CheckpointDifference,
    Comparison as Comparison,
    bisect as bisect,
    compare as compare,
)
from purecompose.analysis.sweeping import (
    LearningRateRange as LearningRateRange,
    Sweep as Sweep,
    Trial as Trial,
    learning_rate_range as learning_rate_range,
    sweep as sweep,
)


publish(__name__)
