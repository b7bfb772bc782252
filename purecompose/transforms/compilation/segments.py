"""Segments: places to cut a step so that the numbers of variants of its parts add up instead of multiplying."""

from collections.abc import Sequence
from typing import NamedTuple

from purecompose.core.compose import Step
from purecompose.core.operation import Lowered, Node
from purecompose.core.program import Update, events_in
from purecompose.core.scopes import Scope


class Stretch(NamedTuple):
    """Consecutive operations of a step: compiled as one graph, or run between two graphs."""

    segment: int
    """Segment of the program that it belongs to."""
    number: int
    """Place in the step; differs from `segment` if host algorithms divide a segment."""
    lowered: tuple[Lowered, ...]
    kind: str
    """"graph"; "host", a host algorithm or a scope in which one acts; or "sliced", a scope whose body runs compiled on
    slice after slice."""
    bits: int
    """Part of the schedule that decides which algorithms act in it."""


class Segments:
    """The cuts of one step.

    A scope, an update, and the nodes between them may each be a segment. A boundary costs some microseconds, so a cut
    is made only between two pieces that both depend on the schedule: if only one piece varies, the whole has as many
    variants as the piece.
    """

    def __init__(self, step: Step) -> None:
        """Determine the cuts from the program and the predicates of the step's algorithms."""
        varying = {question.event for question in step.matcher.questions if not question.algorithm.host}
        self._of_node: list[int] = []
        segment, is_varying = 0, False
        for piece in _pieces(step.program):
            piece_varies = any(event in varying for event in events_in(piece))
            if is_varying and piece_varies:
                segment, is_varying = segment + 1, False
            is_varying = is_varying or piece_varies
            self._of_node += [segment] * len(piece)
        questions = step.matcher.questions
        compiled = sum(1 << i for i, question in enumerate(questions) if not question.algorithm.host)
        self._masks = [0] * (segment + 1)
        for node, number in zip(step.program, self._of_node, strict=True):  # an event may be in several segments
            self._masks[number] |= step.matcher.mask(events_in([node])) & compiled

    @property
    def num(self) -> int:
        """The number of segments."""
        return len(self._masks)

    def stretches(self, operations: Sequence[Lowered], bits: int) -> list[Stretch]:
        """Return a schedule's operations, cut between segments and around host algorithms, without empty stretches."""
        runs: list[tuple[int, str, list[Lowered]]] = []
        for lowered in operations:
            segment, kind = self._of_node[lowered.node], _kind(lowered)
            if kind != "graph" or not runs or runs[-1][:2] != (segment, "graph"):
                runs.append((segment, kind, []))
            runs[-1][2].append(lowered)
        return [
            Stretch(segment, number, tuple(members), kind, bits & self._masks[segment])
            for number, (segment, kind, members) in enumerate(runs)
        ]


def _kind(lowered: Lowered) -> str:
    if lowered.is_host:
        return "host"
    return "graph" if lowered.with_slices is None else "sliced"


def _pieces(program: Sequence[Node]) -> list[list[Node]]:
    pieces: list[list[Node]] = [[]]
    for node in program:
        is_own = isinstance(node, (Scope, Update))
        if pieces[-1] and (is_own or isinstance(pieces[-1][-1], Scope)):
            pieces.append([])
        pieces[-1].append(node)
    return pieces
