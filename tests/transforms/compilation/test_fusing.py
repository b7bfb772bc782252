"""Limits on what Inductor fuses, with stand-ins for the nodes of its scheduler."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from purecompose.transforms.compilation.gpu import fusing_near, fusing_within_lists


class Part:
    """A stand-in for a node of Inductor's scheduler; a list is one with parts."""

    def __init__(self, reads: str, writes: str, *snodes: "Part") -> None:
        self.snodes, self.writes = snodes, writes
        self.read_writes = SimpleNamespace(reads=[SimpleNamespace(name=name) for name in reads])

    def is_foreach(self) -> bool:
        return bool(self.snodes)

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(get_name=lambda name=name: name) for name in self.writes]


def test_what_several_tensors_of_a_list_depend_on_is_not_fused_into_the_kernel() -> None:
    class Owner:
        @classmethod
        def can_fuse(cls, producer: Part, consumer: Part) -> bool:
            return True

    plain, made, single = Owner.__dict__["can_fuse"], Part("", "ab", Part("", "a"), Part("", "b")), Part("", "x")
    with fusing_within_lists(SimpleNamespace(ForeachKernelSchedulerNode=Owner)):
        assert Owner.can_fuse(single, Part("", "", Part("x", "p"), Part("y", "q")))
        assert not Owner.can_fuse(single, Part("", "", Part("x", "p"), Part("xy", "q")))
        assert Owner.can_fuse(made, Part("", "", Part("a", "p"), Part("b", "q")))
        assert not Owner.can_fuse(made, Part("", "", Part("a", "p"), Part("ab", "q")))
        assert not Owner.can_fuse(made, Part("", "", Part("b", "p"), Part("a", "q")))
        assert Owner.can_fuse(made, Part("a", "p"))
    assert Owner.__dict__["can_fuse"] is plain


def make_buffer(size: int, *readers: Any) -> Any:
    node = SimpleNamespace(get_size=lambda: [size], get_dtype=lambda: torch.float32, has_tensor_output=lambda: True)
    return SimpleNamespace(node=node, users=[SimpleNamespace(node=reader) for reader in readers])


@pytest.mark.parametrize(
    "after, size, later_reader, is_fused",
    [
        (200, 1000, None, False),  # the logits of a first pass
        (200, 10, None, True),  # saves more than it keeps
        (200, 1000, 250, True),  # is kept anyway
        (20, 1000, None, True),  # may run early, though it comes late
    ],
    ids=["keeps", "small", "read later", "early"],
)
def test_fusions_far_apart_keep_no_more_than_they_save(
    after: int, size: int, later_reader: int | None, is_fused: bool
) -> None:
    class Scheduler:
        def can_fuse(self, one: Any, other: Any, is_sorted: bool = False) -> bool:
            return not is_sorted

        def score_fusion_memory(self, one: Any, other: Any) -> int:
            return 100

    early, between, late = (
        SimpleNamespace(min_order=place, max_order=place, ancestors=[], read_writes=None) for place in (10, after, 300)
    )
    readers = [early] if later_reader is None else [early, SimpleNamespace(min_order=later_reader)]
    early.read_writes = SimpleNamespace(reads=[SimpleNamespace(name="logits"), SimpleNamespace(name="arg0")])
    early.get_outputs = lambda: [make_buffer(1)]
    late.ancestors = ["between"]
    scheduler: Any = Scheduler()
    scheduler.name_to_node = {"between": between}
    scheduler.name_to_buf = {"logits": make_buffer(size, *readers)}
    plain = Scheduler.can_fuse
    with fusing_near(SimpleNamespace(Scheduler=Scheduler)):
        assert scheduler.can_fuse(early, late) is scheduler.can_fuse(late, early) is is_fused
        assert not scheduler.can_fuse(early, late, is_sorted=True)
    assert Scheduler.can_fuse is plain
