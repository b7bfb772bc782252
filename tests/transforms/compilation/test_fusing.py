"""Limits on what Inductor fuses, with stand-ins for the nodes of its scheduler."""

from types import SimpleNamespace
from typing import Any

from purecompose.transforms.compilation.fusing import fusing_within_lists


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
