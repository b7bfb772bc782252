"""The end of a run of several processes that a signal ends."""

import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from purecompose.core.ranks import Ranks
from purecompose.run.interruptions import CommonEnd


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> list[CommonEnd]:
    """Return the ends of two processes."""
    store = HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    found = [CommonEnd(Ranks("group", rank, 2)) for rank in range(2)]
    found[1]._place = found[0]._place
    return found


def test_on_cpus_all_end_after_the_next_batch(pair: list[CommonEnd]) -> None:
    cpu = torch.device("cpu")
    assert pair[1].due(5, None, cpu) is None
    assert pair[0].due(5, signal.SIGTERM, cpu) is None
    assert [one.due(6, None, cpu) for one in pair] == [signal.SIGTERM] * 2


def test_with_gpus_no_process_is_further_than_where_all_end(
    pair: list[CommonEnd], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    class Event:
        def record(self, stream: Any) -> None:
            pass

        def synchronize(self) -> None:
            done.append(self)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    gpu = torch.device("cuda", 0)
    # The second process has sent two batches more than the first, whose messages they need, to its GPU.
    assert [pair[1].due(batch, None, gpu) for batch in (4, 5, 6, 7)] == [None] * 4
    assert len(done) == 2  # it has waited for batches 4 and 5
    assert pair[0].due(5, signal.SIGTERM, gpu) is None
    assert [one.due(8, None, gpu) for one in pair] == [signal.SIGTERM] * 2
