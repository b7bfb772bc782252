"""The numbers of a run as a list of records, for tables and plots."""

from typing import Any

import torch
from torch import Tensor

from purecompose.event import Event
from purecompose.state import State


__all__ = ["History"]

# Unread tensors are kept on the device up to this number of records: one wait for the device in so many
# batches, and no unbounded pile of small allocations.
_MOST_UNREAD = 1000


class History:
    """Collects one record for each batch and one for each evaluation.

    A record is a dict of plain numbers. All have `batch` and `epoch`, how many of them have gone by. A
    batch's record adds `loss` and whatever 0-d metrics the algorithms reported; an evaluation's adds its
    metrics under the evaluator's label, such as `eval/accuracy`. Those of a population are lists, with a number
    for each member.

    Values stay on the device until they are read, so no batch waits for one.

    Example:
        >>> from purecompose import compose, fit, loop_events, losses, optim
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
        """An empty history."""
        self._records: list[dict[str, Any]] = []
        self._unread = 0

    def __call__(self, event: Event, state: State) -> None:
        """Takes down what BATCH_END and EVAL_END have to say."""
        if event is Event.BATCH_END:
            values = state.metrics if state.loss is None else {"loss": state.loss, **state.metrics}
        elif event is Event.EVAL_END:
            values = state.metrics
        else:
            return
        now = state.timestamp
        # Single numbers, of which a population has one for each member; its keys tell that it is one. Copies,
        # because a step that donates its state writes the next loss over this one.
        num_dims = state.key.ndim - 1
        kept = {name: value.detach().clone() for name, value in values.items() if value.ndim == num_dims}
        self._records.append({**kept, "batch": now.batch, "epoch": now.epoch})
        self._unread += 1
        if self._unread >= _MOST_UNREAD:
            self._read()

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records so far, in the order in which they came; reading them waits for the device."""
        self._read()
        return [dict(record) for record in self._records]

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """One quantity over the run: the batches at which it was noted, and its values.

        Raises:
            KeyError: No record has that name; the message lists the names there are.
        """
        found = [record for record in self.records if name in record]
        if not found:
            known = sorted({key for record in self._records for key in record})
            raise KeyError(f"no record has {name!r}; there are {', '.join(known) or 'no records yet'}")
        return [record["batch"] for record in found], [record[name] for record in found]

    def __len__(self) -> int:
        return len(self._records)

    def _read(self) -> None:
        """Turns the unread tensors into numbers, with one transfer for each dtype, device and shape."""
        unread = self._records[len(self._records) - self._unread :]
        groups: dict[Any, list[tuple[dict[str, Any], str, Tensor]]] = {}
        for record in unread:
            for name, value in record.items():
                if isinstance(value, Tensor):
                    groups.setdefault((value.dtype, value.device, value.shape), []).append((record, name, value))
        for entries in groups.values():
            numbers = torch.stack([value for _, _, value in entries]).tolist()
            for (record, name, _), number in zip(entries, numbers, strict=True):
                record[name] = number
        for record in unread:
            # The counters first, as they are read.
            numbers = {name: value for name, value in record.items() if name not in ("batch", "epoch")}
            counters = {name: record[name] for name in ("batch", "epoch")}
            record.clear()
            record.update(counters, **numbers)
        self._unread = 0
