"""Forward passes that run once within a check, and are then replaced by their outputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose import batch as batches
from purecompose._support.functorch import is_transforming
from purecompose._support.messages import warn
from purecompose.core.halves import Comparison, NotMeanError, Variant, coarsest, is_differentiable, largest
from purecompose.core.state import State


_Result = tuple[Any, dict[str, Tensor]]


class _Recorded(NamedTuple):
    """A forward pass that need not run again."""

    outputs: Any
    """The outputs, detached, with a row for each example."""
    has_grad: list[bool]
    """Whether each of their tensors required a gradient."""
    buffers: dict[str, Tensor]
    """The buffers after it."""
    inputs: list[Tensor]
    """The tensors of its inputs, in the last run on all examples."""


class ForwardPasses:
    """The forward passes of a stage on a few examples, whose first run is recorded.

    In later runs each of them is replaced by rows of its outputs, as leaves of a graph, unless the outputs do not have
    a row for each example, the stage differentiates with respect to its inputs, or the stage computes its parameters.

    Attributes:
        are_replaced: False if a pass of the last run was not replaced.
        have_rows: False if outputs of a recorded pass seem to have a row for each example, but have a fixed number.
        leaves: The tensors that replaced outputs of passes, in the last run.
        grads: Gradients of the losses with respect to them.
        eps: Relative precision of the coarsest dtype on the way to the losses of all examples, in the last run.
    """

    def __init__(self, num_examples: int, stage: str = "", *, may_replace: bool = True) -> None:
        self._num, self._stage, self._may_replace = num_examples, stage, may_replace
        self._recorded: list[_Recorded | None] = []
        self.have_rows = True
        self.begin(None)

    def begin(self, given: Variant | None) -> None:
        """Begin a run: the first one, or one in which the outputs are given."""
        self._given, self._index, self.leaves = given, 0, list[Tensor]()
        self.are_replaced, self.grads, self.eps = self._may_replace, list[Tensor](), 0.0

    def compared(self) -> Comparison:
        """Return a scope in which a stage or a method runs."""
        return Comparison(self._given is not None and self._given.is_double)

    def run(self, call: Callable[..., _Result], inputs: Any, state: State) -> _Result:
        """Return the outputs of a forward pass, a function of its inputs, and the buffers after it."""
        if not self._may_replace or is_transforming():
            self.are_replaced = False
            return call(inputs)
        if self._given is None:
            self._recorded.append(self._record(call, inputs, state))
        found, self._index = self._recorded[self._index], self._index + 1
        if found is None:
            self.are_replaced = False
            return call(inputs)
        if self._given is not None:
            self._recorded[self._index - 1] = found = self._with_inputs(found, self._given, batches.tensors(inputs))
        has_grad = iter(found.has_grad)
        return batches.map_tensors(lambda tensor: self._leaf(tensor, next(has_grad)), found.outputs), found.buffers

    def differentiate(self, loss: Tensor) -> None:
        """Differentiate a loss with respect to the outputs that replaced passes."""
        if self._given is None:  # only the outputs are needed
            return
        if len(self._given.rows) == self._num:
            self.eps = max(self.eps, coarsest(loss))
        if self.leaves:
            self.grads += torch.autograd.grad(loss, self.leaves, retain_graph=True, materialize_grads=True)

    def _record(self, call: Callable[..., _Result], inputs: Any, state: State) -> _Recorded | None:
        given, known = batches.tensors(inputs), set(map(id, self.leaves))
        if any(one.requires_grad and one.is_leaf and id(one) not in known for one in given):
            return None
        if not all(param.is_leaf for param in state.params.values()):
            return None
        outputs, buffers = call(inputs)
        tensors = batches.tensors(outputs)
        if not tensors or not all(one.shape[:1] == (self._num,) for one in tensors):
            return None
        with torch.no_grad():
            draws = state.context.model.skeleton(train=True).draws
            self.have_rows &= (has_rows := self._compare_mixed(call, inputs, tensors, draws=bool(draws)))
        if not has_rows:
            return None
        outputs = batches.map_tensors(lambda tensor: tensor.detach(), outputs)
        return _Recorded(outputs, [one.requires_grad for one in tensors], buffers, given)

    def _compare_mixed(self, call: Callable[..., _Result], inputs: Any, ours: list[Tensor], *, draws: bool) -> bool:
        """Warn if outputs of the last examples change when two of them take the places of the others, or without these.

        Without the others, the batch is smaller and so rounded otherwise: only large changes count, as by a capacity.
        None count if the network draws, as it may draw for all examples in the shape that those of a few have.

        Returns:
            True; or False if outputs without the others are not fewer, such as those of the members of an ensemble.
        """
        num, half = self._num, -(-self._num // 2)
        rows = torch.arange(num, device=ours[0].device)
        rows[:half], rows[:half:2] = num - 1, half

        def run(rows: Tensor, **skipped: int) -> list[Tensor]:
            def taken(tensor: Tensor) -> Tensor:
                return tensor.index_select(0, rows) if tensor.shape[:1] == (num,) else tensor

            return batches.tensors(call(batches.map_tensors(taken, inputs), **skipped)[0])

        def is_mixed(theirs: list[Tensor], tolerance: float) -> bool:
            pairs = [(one[half:], other[half - num :]) for one, other in zip(ours, theirs, strict=True)]
            return any(
                is_differentiable(one) and largest(one - other) > tolerance * largest(our)
                for our, (one, other) in zip(ours, pairs, strict=True)
            )

        fewer = run(rows.new_tensor(range(half, num)), skipped=half)
        if not all(one.shape[:1] == (num - half,) for one in fewer):
            return False
        if is_mixed(run(rows), 1e-5) or (not draws and is_mixed(fewer, 0.05)):
            warn(
                "the network's outputs for an example depend on the other examples of the batch, and so differ in "
                "microbatches, on several processes and with gradient_accumulation. Let it compute them from the "
                "example itself (a capacity for each sequence, not for the batch); batch normalisation is an "
                "exception"
            )
        return True

    def _with_inputs(self, found: _Recorded, given: Variant, inputs: list[Tensor]) -> _Recorded:
        """Return the pass with its inputs if these are of all examples; otherwise compare them with recorded ones."""
        if len(given.rows) == self._num:
            return found._replace(inputs=[tensor.detach() for tensor in inputs])
        for whole, ours in zip(found.inputs, inputs, strict=True):
            theirs = whole[given.rows.start : given.rows.stop] if whole.shape[:1] == (self._num,) else whole
            if theirs.shape != ours.shape:  # such as of sequences that are cut to the longest of a batch
                raise RuntimeError("other shapes")
            if torch.equal(theirs, ours):
                continue
            tolerance = torch.finfo(ours.dtype).eps ** 0.5 * largest(theirs) if is_differentiable(ours) else 0
            if largest(ours - theirs if is_differentiable(ours) else (ours != theirs).float()) > tolerance:
                raise NotMeanError(
                    f"{self._stage} gives the network other inputs for an example when other examples are in "
                    "the batch, and so others in microbatches, on several processes and with gradient_accumulation: "
                    "let it compute them from the example itself, and draw by state.example_rng; or write "
                    "losses.over_batch(stage)"
                )
        return found

    def _leaf(self, tensor: Tensor, has_grad: bool) -> Tensor:
        if self._given is not None:
            tensor = self._given.part(tensor, self._num)
        if not has_grad:
            return tensor
        self.leaves.append(tensor.detach().requires_grad_())
        return self.leaves[-1]
