"""The numbers of a run as a list of records, for tables and plots."""

from typing import Any

from purecompose.core.state import State
from purecompose.observers.unread import read, record_of
from purecompose.time.event import Event


# Number of records whose tensors stay on the device before they are read: few waits for the device, but no unbounded
# number of small allocations.
_MOST_UNREAD = 1000


class History:
    """An observer that collects one record for each batch and one for each evaluation.

    A record is a dict of plain numbers. Every record has `batch` and `epoch`, the numbers of completed batches and
    epochs. A batch's record adds `loss` and the 0-d metrics that the algorithms reported; an evaluation's record adds
    its metrics under the evaluator's label, such as `eval/accuracy`. For a population, these are lists with a number
    for each member.

    Metrics that are not single numbers are left out, with one warning each.

    Values stay on the device until they are read, so no batch waits for one.

    Example:
        >>> from purecompose import compose, fit, loop_events, losses, optim
        >>> import torch
        >>> net = torch.nn.Linear(3, 2)
        >>> state = State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1), duration="2ep")
        >>> data = [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))]
        >>> history = History()
        >>> state = fit(compose(loop_events), state, data, observers=[history])
        >>> [sorted(record) for record in history.records]
        [['batch', 'epoch', 'loss'], ['batch', 'epoch', 'loss']]
        >>> history.series("loss")[0]
        [1, 2]
    """

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []
        self._unread = 0
        self._left_out: set[str] = set()

    def __call__(self, event: Event, state: State) -> None:
        """Add a record at BATCH_END and EVAL_END."""
        record = record_of(event, state, self._left_out)
        if record is None:
            return
        self._records.append(record)
        self._unread += 1
        if self._unread >= _MOST_UNREAD:
            self._read()

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records so far, in order of time; reading them waits for the device."""
        self._read()
        return [dict(record) for record in self._records]

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Return a quantity over the run: the batches at which it was recorded, and its values.

        Raises:
            KeyError: No record has that name; the message lists the existing names.
        """
        found = [record for record in self.records if name in record]
        if not found:
            known = sorted({key for record in self._records for key in record})
            raise KeyError(f"no record has {name!r}; there are {', '.join(known) or 'no records yet'}")
        return [record["batch"] for record in found], [record[name] for record in found]

    def __len__(self) -> int:
        return len(self._records)

    def _read(self) -> None:
        read(self._records[len(self._records) - self._unread :])
        self._unread = 0
