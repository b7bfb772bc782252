"""Which checkpoints of a run are kept, and which is the newest or the best."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from purecompose._support.messages import is_remote
from purecompose._support.specs import check_flag, check_whole, suggests_keywords
from purecompose.run.rules import rating_of
from purecompose.run.saving import folder as disk
from purecompose.run.saving.files import DECIDES
from purecompose.run.saving.folder import Found
from purecompose.run.saving.leaves import check_extra
from purecompose.time.timestamp import Interval, interval_or_function


T = TypeVar("T")


@suggests_keywords
@dataclass(frozen=True)
class Checkpoints:
    """The settings of a run's checkpoints: folder, interval and number.

    Args:
        folder: Folder of this run's checkpoints, which are one folder each. Or a URL, such as `s3://bucket/run`: a
            thread sends them there from a local copy, see `purecompose.saving.mirror`.
        every: Interval between checkpoints: a number of epochs, batches, samples, tokens or seconds, or a fraction of
            the run; or a function `Timestamp -> bool` that returns whether one is due. There is always one at the end,
            and one when a signal ends the run.
        keep: Number of newest checkpoints to keep; `None` for all; or "log" to spread about log2(batches) of them
            evenly over the run, at most 20 of 100,000 batches, with one of its start: from these
            `purecompose.analysis` finds the state at any batch.
        best: Metric of an evaluator or of an algorithm, as for `EarlyStopping`. Whenever its value is among the best
            `keep_best`, a checkpoint is written regardless of `every`, and kept in addition to the newest ones.
            `purecompose.saving.best` and `ranked` find it.
        keep_best: Number of best checkpoints to keep; `None` for all that were evaluated. Of equal values the earlier
            one is better; NaN is never kept as the best.
        mode: "min" if lower values are better, "max" if higher ones are; by default what the evaluator's metric
            declares or its name says, see `metrics.is_lower_better`. If neither does, `fit` raises an error.
        background: True to write in a thread, so that a step waits only for a copy of the state. If two checkpoints
            are still to be written, a new one replaces the second.
        extra: What the data or the methods remember outside the state, such as a replay buffer: an object with
            `state_dict` and `load_state_dict`, or a dict of such objects. Each checkpoint includes what `state_dict`
            returns, of tensors, arrays, plain values and containers, and `fit(resume=...)` loads it.

    Raises:
        TypeError, ValueError: An argument has the wrong kind.

    Example::

        fit(step, state, train, checkpoints=Checkpoints("run/checkpoints", every="1ep", keep=3), resume="auto")
    """

    folder: Path | str
    every: Interval | str = "1ep"
    keep: int | Literal["log"] | None = 3
    best: str | None = None
    keep_best: int | None = field(default=1, kw_only=True)
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
        if self.keep_best is not None:
            check_whole(self.keep_best, "Checkpoints: keep_best", 1, hint="or None for all that were evaluated")
        if self.keep_best != 1 and self.best is None:
            raise ValueError(
                f"Checkpoints: keep_best={self.keep_best} needs the metric that decides, as in best='eval/loss'; keep= "
                "is the number of newest checkpoints"
            )
        if self.mode not in (None, "min", "max"):
            raise ValueError(f"Checkpoints: mode={self.mode!r}: expected 'min' or 'max'")
        check_flag(self.background, "Checkpoints: background")
        check_extra(self.extra)

    def rating(self, metrics: Mapping[str, Any]) -> float | None:
        """Return the value of the metric `best`, with larger numbers being better; `None` if there is none."""
        return None if self.best is None else rating_of(metrics, self.best, self.mode)


def surplus(found: Sequence[Found], settings: Checkpoints) -> list[Found]:
    """Return the checkpoints that need not be kept; `found` are all of them, the newest first."""
    if settings.keep is None:
        return []
    rest = _between_others(found) if settings.keep == "log" else found[settings.keep :]
    best = {id(one) for _, one in best_in(found, settings)}
    return [one for one in rest if id(one) not in best]


def best_in(found: Sequence[Found], settings: Checkpoints) -> list[tuple[float, Found]]:
    """Return the best checkpoints of some, the newest first, with their ratings: as many as are kept.

    Among equal ones the earliest is the best, as it has been all along.
    """
    return best_of([(settings.rating(one.index.metrics), one) for one in reversed(found)], settings.keep_best)


def best_of(rated: Iterable[tuple[float | None, T]], most: int | None) -> list[tuple[float, T]]:
    """Return the pairs with the best ratings, at most this many, the best first and among equal ones the first."""
    pairs = [(rating, one) for rating, one in rated if rating is not None]
    return sorted(pairs, key=lambda pair: -pair[0])[:most]


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


def newest(folder: Path | str) -> Path | None:
    """Return the newest checkpoint in a folder, by its index; `None` if there is none.

    Args:
        folder: A folder of checkpoints.

    Raises:
        ValueError: The folder is a URL.

    Example:
        >>> import tempfile
        >>> newest(tempfile.mkdtemp()) is None
        True
    """
    found = _all_in(folder, "newest")
    return found[0].path if found else None


class Ranked(NamedTuple):
    """A checkpoint, and the value of the metric by which checkpoints are compared.

    Attributes:
        path: Folder of the checkpoint.
        value: Value of the metric.
    """

    path: Path
    value: float


def best(folder: Path | str, metric: str | None = None, mode: str | None = None) -> Path | None:
    """Return the best checkpoint in a folder; `None` if no checkpoint has a value of the metric.

    Args:
        folder: A folder of checkpoints.
        metric: The metric; by default that of `Checkpoints(best=...)`.
        mode: See `ranked`.

    Raises:
        ValueError: See `ranked`.

    Example::

        state = pc.load(pc.saving.best("run/checkpoints"), like=state)
    """
    found = ranked(folder, metric, mode)
    return found[0].path if found else None


def ranked(folder: Path | str, metric: str | None = None, mode: str | None = None) -> list[Ranked]:
    """Return the checkpoints in a folder that have a value of a metric, the best first; of equal ones the earlier.

    These are the best that `Checkpoints(best=..., keep_best=k)` keeps, and those of the newest ones that were
    evaluated. NaN is not a value.

    Args:
        folder: A folder of checkpoints.
        metric: The metric; by default that of `Checkpoints(best=...)`, which the run has noted in its checkpoints.
        mode: "min" if lower values are better, "max" if higher ones are; by default what the run has noted, or else
            what the name of the metric says.

    Raises:
        ValueError: The folder is a URL; `metric` is not given and no checkpoint names one; or `mode` is not given, and
            neither a checkpoint nor the metric's name says which values are better.

    Example::

        for path, value in pc.saving.ranked("run/checkpoints"):
            print(f"{value:.4f}  {path}")
    """
    found = _all_in(folder, "ranked")
    noted = next((one.index.memory[DECIDES] for one in found if DECIDES in one.index.memory), {})
    chosen = noted.get("metric") if metric is None else metric
    if chosen is None:
        if not found:
            return []
        known = sorted({name for one in found for name in one.index.metrics})
        raise ValueError(
            f"ranked: no checkpoint in {folder} says which metric decides, since the run had no Checkpoints(best=...): "
            f"give metric=, one of {', '.join(known) or 'none'}"
        )
    if mode is None and chosen == noted.get("metric"):
        mode = noted.get("mode")
    settings = Checkpoints(folder, best=chosen, keep_best=None, mode=mode)
    return [Ranked(one.path, one.index.metrics[chosen]) for _, one in best_in(found, settings)]


def _all_in(folder: Path | str, where: str) -> list[Found]:
    """Return a run's checkpoints in a local folder, the newest first."""
    if is_remote(folder):
        raise ValueError(f"{where}: {folder} is in remote storage: give the folder of `with mirror(url) as folder`")
    return disk.all_in(Path(folder))[0]
