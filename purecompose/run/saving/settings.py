"""The settings of a run's checkpoints: where, how often, and which are kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from purecompose._support.checks import check_flag, check_whole
from purecompose._support.urls import is_remote
from purecompose.run.saving.extra import check_extra
from purecompose.run.saving.folder import Found
from purecompose.run.stopping import mode_of
from purecompose.time.timestamp import Interval, interval_or_function


@dataclass(frozen=True)
class Checkpoints:
    """The settings of a run's checkpoints: folder, interval and number.

    If the disk is full at the end of a run, its last checkpoint replaces older ones that `keep` does not require in
    addition. If that is not enough, writing is repeated for a minute, and then it replaces others too, the oldest
    first, unless `keep` is `None`. The best one and at least one complete checkpoint are always kept.

    Args:
        folder: Folder of the checkpoints, which are one folder each; it must belong to this run only. Or a URL, such as
            `s3://bucket/run`: a thread sends them there from a local copy, see `purecompose.saving.mirror`.
        every: Interval between checkpoints: a number of epochs, batches, samples, tokens or seconds, or a fraction of
            the run; or a function `Timestamp -> bool` that returns whether one is due. There is always one at the end,
            and one when a signal ends the run.
        keep: Number of newest checkpoints to keep; `None` for all; or "log" to spread about log2(batches) of them
            evenly over the run, at most 20 of 100,000 batches, with one of its start: from these
            `purecompose.analysis` finds the state at any batch.
        best: Metric of an evaluator or of an algorithm, as for `EarlyStopping`. Whenever it improves on its best value,
            a checkpoint is written regardless of `every`, and the best one is kept.
        mode: "min" if lower values are better, "max" if higher ones are; by default what the evaluator's metric
            declares or its name says, see `metrics.is_lower_better`. If neither does, `fit` raises an error.
        background: True to write in a thread, so that a step waits only for a copy of the state. If two checkpoints
            are still to be written, a new one replaces the second.
        extra: What the data or the methods remember outside the state, such as an environment or a replay buffer: an
            object with `state_dict` and `load_state_dict`, or a tree of lists and dicts with such objects, tensors,
            arrays and plain values. Each checkpoint includes it as it is then, and `fit(resume=...)` puts it back in
            its place: tensors and containers are written to.

    Raises:
        TypeError, ValueError: An argument has the wrong kind.

    Example::

        fit(step, state, train, checkpoints=Checkpoints("run/checkpoints", every="1ep", keep=3), resume="auto")
    """

    folder: Path | str
    every: Interval | str = "1ep"
    keep: int | Literal["log"] | None = 3
    best: str | None = None
    mode: str | None = None
    background: bool = True
    extra: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        if not is_remote(self.folder):
            set_field(self, "folder", Path(self.folder))
        set_field(self, "every", interval_or_function(self.every, "Checkpoints: every", seconds=True))
        if self.keep is not None and self.keep != "log":
            check_whole(self.keep, "Checkpoints: keep", 1, hint="or 'log' for some of the whole run, or None for all")
        if self.mode not in (None, "min", "max"):
            raise ValueError(f"Checkpoints: mode={self.mode!r}: expected 'min' or 'max'")
        check_flag(self.background, "Checkpoints: background")
        check_extra(self.extra)


def surplus(found: Sequence[Found], settings: Checkpoints) -> list[Found]:
    """Return the checkpoints that need not be kept."""
    if settings.keep is None:
        return []
    rest = _between_others(found) if settings.keep == "log" else found[settings.keep :]
    rated = [(rating, one) for one in found if (rating := rating_of(one.index.metrics, settings)) is not None]
    # Among equal ones the earliest, which has been the best one all along.
    _, best = max(reversed(rated), key=lambda pair: pair[0], default=(None, None))
    return [one for one in rest if one is not best]


def surplus_before(found: Sequence[Found], settings: Checkpoints) -> list[Found]:
    """Return the checkpoints that need not be kept if there is a newer one."""
    if not found:
        return []
    newer = Found(found[0].path, replace(found[0].index, metrics={}))
    return surplus([newer, *found], settings)


def of_newest(settings: Checkpoints) -> Checkpoints:
    """Return the settings with only the newest checkpoint to keep, and the best one, unless all are."""
    return settings if settings.keep is None else replace(settings, keep=1)


def _between_others(found: Sequence[Found]) -> list[Found]:
    """Return the checkpoints to remove so that about log2(batches) remain, evenly spread.

    The one whose removal leaves the smallest gap goes first. The first and the newest remain.
    """
    kept, most = list(found), 2 + (found[0].index.batch.bit_length() if found else 0)
    while len(kept) > most:
        gaps = [kept[i - 1].index.batch - kept[i + 1].index.batch for i in range(1, len(kept) - 1)]
        smallest = min(gaps)
        kept.pop(max(i for i, gap in enumerate(gaps, 1) if gap == smallest))  # of equal ones the oldest
    return [one for one in found if all(one is not other for other in kept)]


def rating_of(metrics: Mapping[str, Any], settings: Checkpoints) -> float | None:
    """Return the metric that decides, with larger values being better; `None` if it was not measured."""
    value = None if settings.best is None else metrics.get(settings.best)
    if settings.best is None or not isinstance(value, (int, float)) or value != value:
        return None
    return -value if mode_of(settings.best, settings.mode) == "min" else value
