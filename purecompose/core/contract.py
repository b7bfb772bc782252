"""The contract of a step, checked in the first run of each schedule."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.internals import has_values
from purecompose._support.messages import warn
from purecompose._support.specs import shown
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.calls import Marks, Named, watched
from purecompose.core.clock import changed_constant, constants_of
from purecompose.core.state import State
from purecompose.core.values import fields_where
from purecompose.errors import ContractError, FormError
from purecompose.time.event import Event


_KEEP_FORM = fields_where(keeps_form=True)


class Observe(Protocol):
    """A function called with each application of an algorithm: the state before, the state after, the exit code."""

    def __call__(
        self, algorithm: Algorithm, event: Event, before: State, after: State, exit_code: int | None, /
    ) -> None: ...


class Contract:
    """Checks of one step: its input is not modified, and values that outlive the step keep their form."""

    def __init__(self, start: State, observe: Observe | None = None) -> None:
        """Record the form of the state, and the version and memory of each tensor."""
        self._start, self._observe = start, observe
        self.unapplied: list[str] = []
        """The algorithms that have changed gradients since the last update, each with the event."""
        self.has_drawn = False
        """True if a key of the step's draws has been read."""
        self._editors: list[tuple[Event, str]] = []
        """The algorithms that have changed the gradients since the event last fired; see `_note_gradients`."""
        self._history: list[tuple[str, Event, set[str]]] = []
        """The applications: algorithm and event in words, event, and the paths of changed forms and new metrics."""
        self._marks = Marks(lambda: _lasting(start))

    def apply(
        self, algorithm: Algorithm, event: Event, before: State, apply: Callable[[], tuple[State, int | None]]
    ) -> tuple[State, int | None]:
        where = f"{algorithm.name} at {event}"
        return self._kept(apply, algorithm.apply, where, before, event, may_change=algorithm.host)

    def note(self, algorithm: Algorithm, event: Event, before: State, after: State, exit_code: int | None) -> None:
        where = f"{algorithm.name} at {event}"
        touched = {
            f"metrics[{name!r}]" for name, value in after.metrics.items() if value is not before.metrics.get(name)
        }
        self._history.append((where, event, touched.union(_changed_forms(before, after))))
        if after.grads and after.grads is not before.grads:
            self.unapplied.append(where)
            self._note_gradients(algorithm, event)
        if self._observe is not None:
            self._observe(algorithm, event, before, after, exit_code)

    def _note_gradients(self, algorithm: Algorithm, event: Event) -> None:
        """Warn if an algorithm computes the gradients again after others have changed them at the same event."""
        if (event, algorithm.name) in self._editors or any(earlier is not event for earlier, _ in self._editors):
            self._editors = []  # another event, or the next microbatch
        if self._editors and Trait.RENEWS_GRADIENTS in algorithm.traits:
            earlier = ", ".join(name for _, name in self._editors)
            warn(
                f"{algorithm.name} at {event} computes the gradients again: what {earlier} did to them is lost; leave "
                "one of them out, or combine them in one method"
            )
        self._editors.append((event, algorithm.name))

    def refuse_observer(self, error: Exception) -> None:
        if self._observe is not None:
            raise error

    def check(self, end: State) -> None:
        """Compare the end of the step with its start."""
        self._marks.check("the step itself")
        self._check_metrics(end)
        frozen, start = end.context.frozen, self._start
        # A part that has been thawed has memory of the optimizer now.
        before = _specs(start if start.context.frozen == frozen else start.replace(frozen=frozen))
        after = _specs(end)
        for path in _differing(before, after):
            culprit, where = self._culprit(path, "the step itself")
            remedy = "make slots and surgery at INIT"
            if where is None and path.startswith("buffers"):
                remedy = "if forward gives a buffer its shape, run the network once on a batch before State.create"
            raise FormError(
                f"{culprit} changed state.{path} from {before.get(path, 'absent')} to {after.get(path, 'absent')}: "
                f"a step keeps the structure, shapes and dtypes of what outlives it; {remedy}",
                where,
            )

    def run_stage(self, stage: Any, state: State) -> Any:
        return self._kept(lambda: stage.fn(state), stage.fn, f"the stage {stage!r}", state)

    def run_scope(
        self, name: str, around: Callable[[Callable[..., State], State], Any], body: Callable[..., State], state: State
    ) -> Any:
        """Return the result of a scope of your own, whose body is watched by itself; raise as `apply` does."""
        marks, what = self._marks_of(state), f"the scope {name}"

        def run_body(inner: State, turn: int | None = None) -> State:
            for one in marks:
                one.check(what)
            return body(inner, turn)

        return watched(lambda: around(run_body, state), what, marks)

    def _kept(
        self,
        call: Callable[[], Any],
        fn: Any,
        what: str,
        state: State,
        event: Event | None = None,
        may_change: bool = False,
    ) -> Any:
        """Return the result of a call of user code, which leaves what it is given as it is.

        Where a graph is captured, it must also leave what it reads outside of the state.
        """
        constants = () if may_change or has_values(state.key) else constants_of(fn)
        result = watched(call, what, self._marks_of(state), event)
        if changed := changed_constant(constants):
            raise ContractError(
                f"{what} changes {changed}, which compiled code would not do again: it keeps the values of one call. "
                "Remember values in state.slots[name], and count batches by state.timestamp",
                event,
            )
        return result

    def _marks_of(self, state: State) -> list[Marks]:
        """Return the marks of the step's input, and of what an earlier part of the step has computed."""
        return [self._marks, Marks(lambda: tensors_in(state, "batch", "outputs", "grads"), with_values=True)]

    def run_update(self, state: State, update: Callable[[], Any]) -> Any:
        culprit = f"the update of the optimizer {state.optimizer!r}"
        remedy = "return new tensors (mul instead of mul_) by the same names"
        result = watched(update, culprit, [self._marks], remedy=remedy)
        wanted = (
            "expected the pair (params, opt_state): all parameters by name, and what init gave, with the structure, "
            "shapes and dtypes that both came with"
        )
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise FormError(f"{culprit} returned {_summary(result)}: {wanted}")
        for name, new in zip(("params", "opt_state"), result, strict=True):
            before, after = _specs_of(name, getattr(state, name)), _specs_of(name, new)
            for path in _differing(before, after):
                came = f"{path} = {after.get(path, 'absent')} where it was {before.get(path, 'absent')}"
                raise FormError(f"{culprit} returned {came}: {wanted}")
            if list(before) != list(after):
                raise FormError(f"{culprit} returned {name} in another order: {', '.join(after)}: {wanted}")
        return result

    def _check_metrics(self, end: State) -> None:
        for name, metric in end.metrics.items():
            if isinstance(metric, Tensor) or metric is self._start.metrics.get(name):
                continue
            culprit, where = self._culprit(f"metrics[{name!r}]", "a stage of the program")
            raise FormError(
                f"state.metrics[{name!r}]: expected a tensor, got {shown(metric)} from {culprit}: observers read "
                "tensors; write torch.full((), number, device=state.device) for a number",
                where,
            )

    def _culprit(self, path: str, other: str) -> tuple[str, Event | None]:
        """Return the last algorithm that changed a form or metric, with its event; or something else."""
        found = [(where, event) for where, event, touched in self._history if path in touched]
        return found[-1] if found else (other, None)


def _changed_forms(before: State, after: State) -> list[str]:
    """Return the key paths at which structure, shape or dtype has changed."""
    pairs = [(name, getattr(before, name), getattr(after, name)) for name in _KEEP_FORM]
    changed = [(_specs_of(name, old), _specs_of(name, new)) for name, old, new in pairs if old is not new]
    return [path for ours, theirs in changed for path in _differing(ours, theirs)]


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [path for path in {**before, **after} if before.get(path) != after.get(path)]


def check_slots(state: State) -> None:
    """Raise a `FormError` if a slot contains anything but tensors."""
    for path, leaf in tree.leaves_with_paths(state.slots).items():
        if not isinstance(leaf, Tensor):
            raise FormError(
                f"state.slots{path} is {leaf!r} ({type(leaf).__name__}): slots hold tensors, so that states stack, "
                "map and save; write torch.zeros(()) for a number"
            )


def _lasting(state: State) -> Named:
    return [
        (f"state.{name}{path}", leaf)
        for name in (*_KEEP_FORM, "key")
        for path, leaf in tree.leaves_with_paths(getattr(state, name)).items()
        if isinstance(leaf, Tensor)
    ]


def tensors_in(state: State, *fields: str) -> Named:
    return [(f"state.{name}", tensor) for name in fields for tensor in batches.tensors(getattr(state, name))]


def _specs(state: State) -> dict[str, Any]:
    return {path: spec for name in _KEEP_FORM for path, spec in _specs_of(name, getattr(state, name)).items()}


def _specs_of(name: str, value: Any) -> dict[str, Any]:
    return {
        f"{name}{path}": tree.describe(leaf, with_device=False) if isinstance(leaf, Tensor) else repr(leaf)
        for path, leaf in tree.leaves_with_paths(value).items()
    }


def _summary(result: Any) -> str:
    if isinstance(result, Mapping):
        return f"a {type(result).__name__} of {', '.join(map(repr, list(result)[:3])) or 'nothing'}"
    return f"{len(result)} things" if isinstance(result, tuple | list) else shown(result)
