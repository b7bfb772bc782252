"""What a report shows of runs: their numbers as curves (which columns share a panel, and their places along the
horizontal axis), and what the network predicts for examples of known classes.
"""

import base64
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose.data.arrays import described
from purecompose.records.layout import RunRecords


AXES = {
    "batch": "batch",
    "epoch": "epoch",
    "time/sample": "samples",
    "time/token": "tokens",
    "time/seconds": "wall-clock time (s)",
}
"""The columns that may lie along the horizontal axis, with their names there."""
SMOOTHED_FROM = 80
"""Number of points from which on noisy lines are smoothed."""
_NO_EVALUATION = ("lr", "loss", "speed/", "memory/", "time/seconds")
_SETTLES = 10
"""Number of batches after the start of a process whose rates say little: few batches, the first of them slow."""


class Series:
    """A column of a run's records: the places along the horizontal axis, and the numbers, also of members."""

    def __init__(self, run: int, column: str, x: Sequence[float], y: Sequence[Any]) -> None:
        self.run, self.column, self.x = run, column, x
        rows = [listed(value) for value in y]
        self.num_members = max(map(len, rows), default=0)
        padded = [[*row, *[math.nan] * (self.num_members - len(row))] for row in rows]
        self.y = torch.tensor(padded, dtype=torch.float64).reshape(len(rows), self.num_members)

    @property
    def is_noisy(self) -> bool:
        """True for numbers of single batches, which are smoothed if there are many."""
        return self.column == "loss" or self.column.startswith(("speed/", "train/"))

    @cached_property
    def spread(self) -> Tensor:
        """Lowest, median and highest finite number of each point, (3, points); NaN if there is none."""
        finite = torch.where(self.y.isfinite(), self.y, math.nan)
        if self.num_members == 1:
            return finite.T.expand(3, -1)
        levels = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
        # In pieces, because torch bounds the size of what it sorts.
        return torch.cat([torch.nanquantile(part, levels, dim=1) for part in finite.split(10_000)], dim=1)

    @cached_property
    def not_finite(self) -> list[float]:
        """The places of numbers that are not finite."""
        is_bad = ~self.y.isfinite().all(1)
        return [at for at, bad in zip(self.x, is_bad.tolist(), strict=True) if bad]


class Panel(NamedTuple):
    """The series that share a pair of axes."""

    title: str
    kind: str
    """"loss", "metric", "lr", "speed" or "memory"."""
    series: tuple[Series, ...]
    """A column of a run has several if its process has started several times and its rates are drawn."""

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(one.column for one in self.series))

    @property
    def bad(self) -> str:
        """How many numbers are not finite, in words; empty if all are."""
        found = [at for series in self.series for at in series.not_finite]
        total = sum(len(series.x) for series in self.series)
        return f"{len(found):,} of {total:,} not finite, the first at {min(found):,.10g}" if found else ""

    @property
    def is_share(self) -> bool:
        """True if the numbers are shown in percent."""
        shares = (bool(((one.y >= 0) & (one.y <= 1) | ~one.y.isfinite()).all()) for one in self.series)
        return "accuracy" in self.title and all(shares)

    @property
    def is_logarithmic(self) -> bool:
        """True for losses that fall by a factor of more than 30."""
        values = torch.cat([one.spread.flatten() for one in self.series])
        values = values[values.isfinite()]
        return self.kind == "loss" and len(values) > 0 and bool(0 < 30 * values.min() < values.max())


def panels_of(runs: Sequence[RunRecords]) -> list[Panel]:
    """Return the panels of numbers, by batches; a quantity in training and in evaluations shares one."""
    columns = [*dict.fromkeys(name for run in runs for record in run.records for name in record)]
    evaluated = list(dict.fromkeys(name for run in runs for name in evaluation_columns(run.records)))
    trained = [name for name in columns if name.startswith("train/") and name not in evaluated]
    groups: dict[str, list[str]] = {}
    for name in (*(name for name in columns if name == "loss"), *evaluated, *trained):
        groups.setdefault(name.partition("/")[2] or name, []).append(name)
    wanted: list[tuple[str, str, list[str]]] = []
    for quantity, names in groups.items():
        title = quantity if len(names) > 1 else "training loss" if names[0] == "loss" else names[0]
        wanted.append((title, "loss" if quantity == "loss" else "metric", names))
    # The rates of parameter groups are drawn for a single run only; with several there would be too many lines.
    lrs = [name for name in columns if name == "lr" or (len(runs) == 1 and name.startswith("lr/"))]
    rates = [name for name in ("speed/samples", "speed/batches") if name in columns]
    wanted += [("learning rate", "lr", lrs)]
    wanted += [(f"throughput ({name.removeprefix('speed/')} / s)", "speed", [name]) for name in rates[:1]]
    wanted += [("memory (MB)", "memory", [name for name in columns if name.startswith("memory/")])]
    panels, at = [], [places(run, "batch") for run in runs]
    for title, kind, names in wanted:
        series = [part for column in names for i, run in enumerate(runs) for part in _series_of(run, i, column, at[i])]
        if drawn := tuple(one for one in series if one.x):
            panels.append(Panel(title, kind, drawn))
    return panels


def places(run: RunRecords, x: str) -> list[float]:
    """Return the place of each record along an axis; NaN before the first record that has one.

    A record without `x`, as of an evaluation, has the place of the one before it. Epochs grow evenly with the batches.
    """
    if x == "epoch":
        return _epochs(run)
    found, at = [], math.nan
    for record in run.records:
        value = record.get(x)
        at = float(value) if isinstance(value, int | float) else at
        found.append(at)
    return found


def _epochs(run: RunRecords) -> list[float]:
    ends = {0: 0}  # the batch at which each epoch has ended
    for record in run.records:
        ends.setdefault(record["epoch"], record["batch"])
    known, found = list(ends.items()), []
    sizes = {
        epoch: (after - batch) / (following - epoch)
        for (epoch, batch), (following, after) in zip(known, known[1:], strict=False)
    }
    # The last epoch may be incomplete: it is as long as the one before it, if there is one.
    sizes[known[-1][0]] = next(reversed(sizes.values()), math.inf)
    for record in run.records:
        epoch = record["epoch"]
        found.append(epoch + (record["batch"] - ends[epoch]) / sizes[epoch])
    return found


def _series_of(run: RunRecords, index: int, column: str, at: Sequence[float]) -> Iterator[Series]:
    """Yield a column of a run, given the place of each record; of a rate, one part for each start of the process."""
    is_rate, is_memory = column.startswith("speed/"), column.startswith("memory/")
    starts = [start.batch for start in run.starts[1:] if start.batch and is_rate]
    for begin, end in zip([0, *starts], [*starts, math.inf], strict=True):
        first = begin + _SETTLES if begin else 0
        found = [
            (place, record[column] / 1e6 if is_memory else record[column])
            for place, record in zip(at, run.records, strict=True)
            if column in record and not math.isnan(place) and first <= record["batch"] <= end
        ]
        yield Series(index, column, [place for place, _ in found], [value for _, value in found])


def names_of(runs: Sequence[RunRecords]) -> list[str]:
    """Return the runs' names, preceded by the names of parent folders if they are equal."""
    names, depth = [run.name for run in runs], 2
    while len(set(names)) < len(names) and depth <= max(len(run.path.resolve().parts) for run in runs):
        names, depth = ["/".join(run.path.resolve().parts[-depth:]) for run in runs], depth + 1
    return names


def evaluation_columns(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the names of evaluation metrics, which are in records without values of batches; names may repeat."""
    for record in records:
        if not any(name.startswith(_NO_EVALUATION) for name in record):
            yield from (name for name in record if "/" in name and not name.startswith("time/"))


def listed(value: Any) -> list[Any]:
    """Return the numbers of a population's members, or a list of one number."""
    return value if isinstance(value, list) else [value]


class Predictions(NamedTuple):
    """Outputs of a network for examples of known classes, to be shown in a report.

    Args:
        outputs: The logits, (N, C).
        targets: The classes, (N,), int64, from 0.
        inputs: The examples, (N, ...); those of one or three channels, (N, 1 or 3, H, W), are shown as images.
        names: The names of the classes; by default their numbers.

    Example:
        >>> found = Predictions(torch.tensor([[2.0, 1.0], [3.0, 1.0]]), torch.tensor([0, 1]))
        >>> found.confusion().tolist()
        [[1, 0], [1, 0]]
        >>> [one.number for one in found.worst()]
        [1]
    """

    outputs: Tensor
    targets: Tensor
    inputs: Tensor | None = None
    names: Sequence[str] = ()

    def __repr__(self) -> str:
        return described(self)

    def confusion(self) -> Tensor:
        """Return the number of examples of each class (row) that are predicted as each class (column), (C, C), int64.

        Raises:
            ValueError: The shapes do not fit, or a target is not one of the C classes.
        """
        outputs, targets = _checked(self)
        count = outputs.shape[1]
        pairs = targets * count + outputs.argmax(1)
        return torch.bincount(pairs.cpu(), minlength=count * count).reshape(count, count)

    def worst(self, count: int = 24) -> "list[Mistake]":
        """Return the wrongly classified examples with the highest loss, the worst one first.

        Args:
            count: Maximal number of examples.

        Raises:
            ValueError: The shapes do not fit, or a target is not one of the C classes.
        """
        outputs, targets = _checked(self)
        shares = outputs.detach().float().softmax(1)
        classes = shares.argmax(1)
        (wrong,) = (classes != targets).nonzero(as_tuple=True)
        of_target = shares[wrong, targets[wrong]].nan_to_num(0.0)
        order = wrong[of_target.argsort(stable=True)]
        return [
            Mistake(i, self.name(int(targets[i])), self.name(int(classes[i])), float(shares[i].max()), self._picture(i))
            for i in order[:count].tolist()
        ]

    def name(self, number: int) -> str:
        """Return the name of a class."""
        return str(self.names[number]) if self.names else str(number)

    def _picture(self, i: int) -> str:
        """Return an example as a PNG in a data URL; "" if it is not an image, or Pillow is missing."""
        if self.inputs is None or self.inputs.ndim != 4 or self.inputs.shape[1] not in (1, 3):
            return ""
        try:
            import PIL.Image
        except ImportError:
            return ""
        pixels = self.inputs[i].detach().cpu().float()
        low, high = pixels.amin(), pixels.amax()
        grey = ((pixels - low) / (high - low).clamp(min=1e-12) * 255).byte().expand(3, -1, -1).permute(1, 2, 0)
        buffer = io.BytesIO()
        PIL.Image.frombytes("RGB", (grey.shape[1], grey.shape[0]), bytes(grey.flatten().tolist())).save(buffer, "PNG")
        return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


class Mistake(NamedTuple):
    """A wrongly classified example."""

    number: int
    """Its place among the examples, from 0."""
    target: str
    """Its class."""
    predicted: str
    """The class with the highest output."""
    probability: float
    """The probability that the network gives to `predicted`."""
    picture: str = ""
    """The example as a data URL, if it is an image."""


def _checked(given: Any) -> tuple[Tensor, Tensor]:
    """Return outputs and targets, int64; narrower integers would overflow."""
    outputs, targets = given.outputs, given.targets
    if outputs.ndim != 2 or targets.shape != outputs.shape[:1] or targets.is_floating_point():
        raise ValueError(
            "Predictions: expected outputs (N, C) and classes (N,), whole numbers, got "
            f"{tuple(outputs.shape)} and {targets.dtype} {tuple(targets.shape)}"
        )
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < outputs.shape[1]:
        raise ValueError(f"Predictions: expected targets from 0 to {outputs.shape[1] - 1}, got {int(targets.max())}")
    return outputs, targets.long()
