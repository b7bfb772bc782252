"""Algorithms: pairs of pure functions with a name and the facts that passes use."""

import dataclasses
import enum
import functools
import inspect
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, Protocol, cast

from purecompose._support.specs import suggests_keywords
from purecompose.core.state import State
from purecompose.schedule import Hparam, Schedule, collect
from purecompose.schedule.declared import Settings
from purecompose.time import Time
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, Predicate, as_predicate


_P = ParamSpec("_P")


class Match(Protocol):
    """A function that decides on the host, from static facts and shapes only, whether the algorithm acts."""

    def __call__(self, event: Event, state: State, /) -> bool: ...


class Apply(Protocol):
    """A function that returns the new state, optionally with an exit code for the trace."""

    def __call__(self, event: Event, state: State, /) -> State | tuple[State, int]: ...


class Trait(enum.Enum):
    """A property that an algorithm declares for passes and transforms, which do not know algorithms by name.

    Example::

        Algorithm("noise", on(Event.AFTER_DATALOADER), noise, traits={Trait.AUGMENTS_EXAMPLES})
    """

    SELECTS_EXAMPLES = "picks examples of the raw batch: comes first"
    LIMITS_BATCHES = "trains on a part of each batch, of a size that it sets: comes before what picks examples"
    AUGMENTS_EXAMPLES = "changes examples one by one: comes before what mixes them and weighs their parts"
    MIXES_EXAMPLES = "mixes the examples of a batch with each other"
    FUSES_LAYERNORM = "replaces layer norms by fused ones: comes last"
    EDITS_LOSS = "replaces the loss value itself, not the targets: two of these do not compose"
    SCALES_LOSS = "scales the loss for its gradient: the last before the gradient, the first after it"
    RENEWS_GRADIENTS = "computes the gradients again, from the batch: comes before what edits or collects them"
    CLIPS_EXAMPLES = "bounds the gradients of single examples: the last of those that compute gradients again"
    REPLACES_GRADIENTS = "replaces all gradients without reading them, but for their names"
    COLLECTS_GRADIENTS = "adds up the gradients of several batches, and keeps them for later"
    CLIPS_GRADIENTS = "bounds the gradients: comes after whatever computes or collects them"
    AVERAGES_WEIGHTS = "averages weights: comes after what moves them once the optimizer has"
    SETS_WEIGHTS = "sets initial weights on purpose, also frozen ones: comes before what copies or averages them"
    SETS_BUFFERS = "replaces the network's buffers on purpose: averages, re-estimated statistics"
    REPLACES_OUTPUTS = "replaces outputs in evaluation and prediction on purpose: means over views of the inputs"
    STOPS_GRADIENTS = "stops gradients on purpose: targets from its own outputs, straight-through estimates"
    READS_OPTIMIZER = "reads settings of the optimizer: the state must have the one that updates the weights"
    SECOND_ORDER = "needs gradients of gradients"
    REPLACES_LAYERS = "finds layers by their types and puts others in their place: comes before what splits layers"
    SHORTENS_SEQUENCES = "cuts sequences to a length: comes after what writes them into rows"
    MEASURES_MICROBATCHES = "measures microbatches: what it remembers and reports depends on how a batch is cut"
    SKIPS_FROZEN_PARTS = "at INIT, does not change parts of the network without trainable parameters"
    REQUIRED_ON_LOAD = "changes the model, so a checkpoint cannot be loaded without it"


class _Call(NamedTuple):
    """The call of a factory that made an algorithm."""

    factory: "Callable[..., Algorithm]"
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def again(self) -> "Algorithm":
        return self.factory(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Algorithm:
    """A training method as data; the documentation calls its objects methods.

    Args:
        name: Name of its slot in the state, its draws and its rows in plans and traces; unique in a step.
        match: A predicate, or a function `(event, state) -> bool` of time and shapes.
        apply: A function `(event, state) -> state`, or `-> (state, exit code)`. It must be pure; inside a
            step it reads time from `state.clock` only.
        traits: Properties that passes and transforms use.
        runs_before: Names or traits of algorithms that must come later at every event where both act.
        runs_after: Names or traits of algorithms that must come earlier at every event where both act.
        host: True if it runs outside compiled code, where it may read tensors' values and the timestamp, and
            change shapes.
        config: The settings, for printing and for comparing with a checkpoint.
        reported: The metrics that it measures over batches, by their names in `state.metrics`, for rules that decide.
        parts: The methods of which it is made, as by `algorithms.one_of`; their slots and draws keep their names.
        batches_per_update: The number of batches for which it lets the optimizer update once: the unit "up" of times.

    Raises:
        TypeError, ValueError: `name` is not a non-empty string, `match` or `apply` cannot be called, or a
            constraint is neither a name nor a trait.

    Example:
        >>> from purecompose import on
        >>> noise = Algorithm("noise", on(Event.BATCH_START), lambda event, state: state)
        >>> noise
        noise()
    """

    name: str
    match: Match
    apply: Apply
    traits: frozenset[Trait] = frozenset()
    runs_before: tuple[str | Trait, ...] = ()
    runs_after: tuple[str | Trait, ...] = ()
    host: bool = False
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    reported: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    parts: tuple["Algorithm", ...] = ()
    batches_per_update: int = 1
    _made_by: _Call | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name={self.name!r}: an algorithm needs a name, a non-empty string")
        for role, given in (("match", self.match), ("apply", self.apply)):
            if callable(given):
                continue
            expected = "a function (event, state) -> " + ("bool" if role == "match" else "state")
            if role == "match":
                expected = f"a predicate, such as on(Event.BATCH_END), or {expected}"
            raise TypeError(f"{self.name}: {role}: expected {expected}, got {given!r} ({type(given).__name__})")
        fixed = {
            "match": as_predicate(self.match),
            "traits": frozenset(_references(self.name, "traits", self.traits, (Trait,))),
            "runs_before": _references(self.name, "runs_before", self.runs_before),
            "runs_after": _references(self.name, "runs_after", self.runs_after),
            "config": MappingProxyType(dict(self.config)),
        }
        for name, value in fixed.items():
            object.__setattr__(self, name, value)

    @property
    def predicate(self) -> Predicate:
        """`match` as a predicate."""
        return cast(Predicate, self.match)  # `__post_init__` has made it one

    @property
    def names(self) -> frozenset[str]:
        """Its name, and those of its parts: of slots, draws, and in constraints."""
        return frozenset({self.name}.union(*[part.names for part in self.parts]))

    @property
    def made_of(self) -> str:
        """The call that made it of its parts, as text: "one_of(mixup, cutmix)"; empty without parts."""
        call = self._made_by
        if call is None or not self.parts:
            return ""
        given = inspect.signature(call.factory).bind(*call.args, **call.kwargs).arguments
        settings = [f"{name}={given[name]!r}" for name in given if name not in ("method", "methods", "name")]
        return f"{call.factory.__name__}({', '.join([*[part.made_of or part.name for part in self.parts], *settings])})"

    @property
    def hparams(self) -> tuple[Hparam, ...]:
        """The named scalars among its settings."""
        return collect(dict(self.config), Hparam)

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """The schedules among its settings, which the step evaluates for it."""
        return collect(dict(self.config), Schedule)

    @property
    def events(self) -> tuple[Event, ...]:
        """The events at which it may act; for a plain `match` function all of them."""
        return tuple(event for event in Event if self.predicate.at(event) != NEVER)

    def __deepcopy__(self, memo: Any) -> "Algorithm":
        return self  # immutable

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the call of the factory, or the fields if there is no such call.

        Raises:
            pickle.PicklingError: `match` or `apply` is a local function, and the algorithm was not made by a `factory`.
        """
        if self._made_by is not None:
            return _Call.again, (self._made_by,)
        for role, function in (("match", self.match), ("apply", self.apply)):
            function = getattr(function, "fn", function)  # a predicate may wrap a plain function
            qualname = getattr(function, "__qualname__", "")
            if "<locals>" in qualname or "<lambda>" in qualname:
                raise pickle.PicklingError(
                    f"the algorithm {self.name!r} cannot be pickled: its {role} is the local function {qualname}. "
                    "Return the algorithm from a function at the top level of a module, decorated with "
                    "@purecompose.factory"
                )
        given = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self) if entry.init}
        return functools.partial(Algorithm, **{**given, "config": dict(self.config)}), ()

    def __repr__(self) -> str:
        given = [(key, value) for key, value in self.config.items() if key not in ("method", "methods")]
        settings = [f"{key}={(str(value) if isinstance(value, Time) else value)!r}" for key, value in given]
        name = self._made_by.factory.__name__ if self.parts and self._made_by else self.name
        return f"{name}({', '.join([*map(repr, self.parts), *settings])})"


def factory(make: Callable[_P, Algorithm]) -> Callable[_P, Algorithm]:
    """Decorate a function that makes an algorithm: check its arguments, show them, and make the algorithm picklable.

    Arguments are checked by their annotations, see `purecompose.schedule.declared`: `bool` and `Literal[...]`, and
    those with a declared range, such as `Annotated[float, Within(0, 1)]`. If the function gives no `config`, the
    arguments become the algorithm's, except for the name and what is not a setting, such as a network: they are in its
    repr, and a step finds the schedules and hparams among them.

    The functions inside an algorithm are usually closures, which `pickle` refuses. An algorithm from a decorated
    function is pickled as the call that made it: the function by its name, and the arguments. Multiprocessing, Ray and
    `torch.save` can then take it, and steps composed of it, to other processes.

    Args:
        make: A function at the top level of a module. Its arguments are kept, so they should not change afterwards.

    Returns:
        The same function, whose results remember their call.

    Example:
        >>> import pickle, purecompose as pc
        >>> pickle.loads(pickle.dumps(pc.algorithms.mixup(0.2)))
        mixup(alpha=0.2, interpolate_loss=False, per_example=False)
    """

    settings, explained = Settings(make), suggests_keywords(make)

    @functools.wraps(make)
    def made(*args: _P.args, **kwargs: _P.kwargs) -> Algorithm:
        checked = settings.checked(args, kwargs)
        algorithm = explained(*checked[0], **checked[1])
        algorithm = dataclasses.replace(algorithm, config=algorithm.config or settings.config(*checked))
        object.__setattr__(algorithm, "_made_by", _Call(made, args, kwargs))
        return algorithm

    return made


def identity(name: str = "identity") -> Algorithm:
    """Return the algorithm that never acts: the unit of composition.

    Args:
        name: Its name, unique in a step.

    Example:
        >>> identity().match
        never
    """
    return Algorithm(name, NEVER, lambda event, state: state)


def _references(owner: str, role: str, given: Any, kinds: tuple[type, ...] = (str, Trait)) -> tuple[str | Trait, ...]:
    found = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    if not all(isinstance(reference, kinds) for reference in found):
        wanted = "members of Trait" if role == "traits" else "algorithms' names or traits"
        raise TypeError(f"{owner}: {role}={given!r}: expected {wanted}")
    return found
