"""Several processes simulated by one, for laws about `data_parallel`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
from torch import Tensor

from purecompose.core.compose import Step
from purecompose.core.ranks import Ranks
from purecompose.testing.process import as_rank
from purecompose.transforms.data_parallel import shared_program


T = TypeVar("T")


def played(step: Step, size: int) -> Callable[[Callable[[Step], T]], list[T]]:
    """Simulate the processes of `data_parallel(step)` one after the other.

    A process that needs a number from the others is abandoned, and starts again when all have reached that point. This
    works because its function is pure, and does the same each time.

    Args:
        step: A step from `compose`.
        size: Number of processes.

    Returns:
        A function that takes a function of each process's step, and returns the results, process by process. It raises
        a `RuntimeError` if they send messages of different forms, or different numbers of them.

    Example:
        >>> from purecompose import compose, loop_events
        >>> play = played(compose(loop_events), 2)
        >>> play(lambda step: step.ranks.reduced([torch.tensor(1.0 + step.ranks.rank)], "sum"))
        [[tensor(3.)], [tensor(3.)]]
    """
    parts = [_Part("", rank, size) for rank in range(size)]

    def play(act: Callable[[Step], T]) -> list[T]:
        answers: list[list[Tensor]] = []
        while True:
            ends, questions = [], []
            for rank, part in enumerate(parts):
                part.begin(answers)
                # A new step each time, since the first run of a step sends more messages.
                cast = step.replace(program=shared_program(step.program, part, is_checked=True))
                try:
                    with as_rank(rank, size):
                        ends.append(act(cast))
                except _Unanswered as question:
                    questions.append(question)
            if not questions:
                return ends
            answers.append(_answer(questions, size))

    return play


@dataclass(frozen=True)
class _Part(Ranks):
    """A process that knows the answers to its first messages."""

    answers: list[list[Tensor]] = field(default_factory=list, compare=False)
    """The answers that have not been used yet."""

    def begin(self, answers: Sequence[list[Tensor]]) -> None:
        self.answers[:] = answers

    def exchange(self, tensors: Sequence[Tensor], how: Literal["sum", "min", "max"]) -> list[Tensor]:
        if not self.answers:
            raise _Unanswered(list(tensors), how)
        return self.answers.pop(0)

    def gather(self, own: Tensor) -> Tensor:
        rows = torch.stack([own if rank == self.rank else torch.zeros_like(own) for rank in range(self.size)])
        return self.exchange([rows], "sum")[0].flatten(0, 1)


class _Unanswered(BaseException):
    """A message whose answer is not known yet; a BaseException, so that no handler treats it as an error."""

    def __init__(self, tensors: list[Tensor], how: str) -> None:
        super().__init__()
        self.tensors, self.how = tensors, how


def _answer(questions: list[_Unanswered], size: int) -> list[Tensor]:
    forms = {(one.how, tuple((tensor.shape, tensor.dtype) for tensor in one.tensors)) for one in questions}
    if len(questions) < size or len(forms) > 1:
        raise RuntimeError("processes wait for each other: they send different messages, or not as many")
    together = [torch.stack(one) for one in zip(*[question.tensors for question in questions], strict=True)]
    how = questions[0].how
    return [one.sum(0, dtype=one.dtype) if how == "sum" else getattr(one, f"a{how}")(0) for one in together]
