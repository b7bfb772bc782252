"""Simulated processes: they send each other what real ones would, and leave the process as it was."""

import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from purecompose._support.shards import whole
from purecompose.core.ranks import Ranks
from purecompose.testing.law import NotJudged
from purecompose.testing.simulated import simulated
from purecompose.transforms.sharding.placing import placed_on


@pytest.mark.parametrize("size", [2, 4])
def test_messages_are_those_of_several_processes(size: int) -> None:
    def act(mesh: Any) -> tuple[Any, ...]:
        ranks = Ranks.of(mesh.get_group())
        own = torch.arange(float(size)) + 10 * ranks.rank
        shard = placed_on(torch.arange(15.0).reshape(5, 3), mesh)
        largest = ranks.reduced([own], "max")[0]
        return ranks.rank, ranks.gather(own[:1]), ranks.scatter_sum(own), largest, whole(shard.norm()), whole(2 * shard)

    for rank, (own_rank, gathered, scattered, largest, norm, put_together) in enumerate(simulated(size, act)):
        assert own_rank == rank
        assert gathered.tolist() == [10 * other for other in range(size)]
        assert scattered.tolist() == [sum(rank + 10 * other for other in range(size))]
        assert largest.tolist() == [number + 10 * (size - 1) for number in range(size)]
        torch.testing.assert_close(norm, torch.arange(15.0).norm())
        assert put_together.tolist() == [[6 * row, 6 * row + 2, 6 * row + 4] for row in range(5)]


def test_each_process_has_its_rank_and_afterwards_there_is_none() -> None:
    def act(mesh: Any) -> list[Any]:
        found = []
        for _ in range(2):
            found += [os.environ["RANK"], os.environ["WORLD_SIZE"], dist.get_rank(), mesh.get_local_rank()]
            dist.barrier()
        return found

    before, hook = dict(os.environ), sys.excepthook
    assert simulated(2, act) == [2 * ["0", "2", 0, 0], 2 * ["1", "2", 1, 1]]
    assert dict(os.environ) == before and sys.excepthook is hook and not dist.is_initialized()


def test_processes_that_send_different_messages_are_reported() -> None:
    def act(mesh: Any) -> None:
        ranks = Ranks.of(mesh.get_group())
        ranks.exchange([torch.zeros(2 + ranks.rank)], "sum")

    with pytest.raises(RuntimeError, match=r"different messages \(process 0: AllReduce .* float32\[2\]; process 1: "):
        simulated(2, act)


def test_a_torch_without_process_groups_of_threads_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.testing._internal.distributed.multi_threaded_pg", None)
    with pytest.raises(NotJudged, match="cannot simulate processes by threads: it has no ThreadLocalWorld, "):
        simulated(2, lambda mesh: None)
