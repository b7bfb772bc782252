"""Analysis of recorded runs (`replay`, `bisect`, `explain`, `compare`), and experiments that train new ones (`ablate`,
`sweep`, `learning_rate_range`, `sensitivity`).

    run = RecordedRun("runs/first", step, state, data)
    state = replay(run, at="1234ba").state
    print(bisect(run, predicates.not_finite(), stays=True))
"""

from purecompose.analysis import predicates as predicates
from purecompose.analysis.ablation import ablate as ablate
from purecompose.analysis.comparing import (
    CheckpointDifference as CheckpointDifference,
    Comparison as Comparison,
    compare as compare,
)
from purecompose.analysis.drawings import (
    draw_ablation as draw_ablation,
    draw_learning_rate_range as draw_learning_rate_range,
)
from purecompose.analysis.effects import (
    FEWEST_SEEDS as FEWEST_SEEDS,
    Ablation as Ablation,
    Cell as Cell,
    Effect as Effect,
    Interval as Interval,
    simultaneous_intervals as simultaneous_intervals,
)
from purecompose.analysis.explaining import (
    Example as Example,
    Explanation as Explanation,
    Layer as Layer,
    explain as explain,
    explain_batch as explain_batch,
)
from purecompose.analysis.replaying import (
    MaxDifference as MaxDifference,
    RecordedRun as RecordedRun,
    Replay as Replay,
    replay as replay,
)
from purecompose.analysis.searching import Bisection as Bisection, bisect as bisect
from purecompose.analysis.sensitivities import (
    Derivative as Derivative,
    Sensitivity as Sensitivity,
    Window as Window,
    sensitivity as sensitivity,
    window_of as window_of,
)
from purecompose.analysis.sweeping import (
    LearningRateRange as LearningRateRange,
    Sweep as Sweep,
    Trial as Trial,
    learning_rate_range as learning_rate_range,
    sweep as sweep,
)
