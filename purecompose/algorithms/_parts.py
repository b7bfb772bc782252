"""Parts that methods share: declared settings with their checks, reported numbers, a choice among states, surgery."""

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor, nn

from purecompose import batch as batches, losses, optim, random, surgery, tree
from purecompose._support.messages import warn
from purecompose._support.specs import suggests_keywords
from purecompose.batch.fields import with_members
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.compose import compose
from purecompose.core.loop import loop_events
from purecompose.core.state import State
from purecompose.core.values import TENSOR_FIELDS
from purecompose.errors import FormError
from purecompose.losses.evaluation import with_weights
from purecompose.losses.targets import Mixture, per_row
from purecompose.nn.layers.replacing import recast
from purecompose.random.keys import as_rng
from purecompose.schedule.declared import Within
from purecompose.surgery.weights import to_module
from purecompose.time import Time, TimeLike, TimeUnit
from purecompose.time.event import Event, named_point
from purecompose.time.predicates import NEVER, on
from purecompose.time.timestamp import checked_interval


def checked_patterns(patterns: Any, where: str) -> tuple[str, ...]:
    """Require patterns of parameters' names, a sequence of strings and not a single string; return them as a tuple."""
    is_several = isinstance(patterns, Sequence) and not isinstance(patterns, str)
    if not is_several or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{where}: expected patterns of names, such as ('head.*',), got {patterns!r}")
    return tuple(patterns)


def checked_where(where: Any, where_from: str) -> tuple[str, ...] | None:
    """Require a pattern of names, several of them, or `None` for everything; return them as a tuple."""
    return None if where is None else checked_patterns([where] if isinstance(where, str) else where, where_from)


def checked_field(field: batches.Field | None, role: str) -> batches.Field | None:
    """Require a valid field of the batch, or `None` for the state's own field."""
    if field is not None:
        batches.check_field(field, role)
    return field


def checked_written_field(field: Any, role: str) -> Any:
    """Require a field that can be written, also in a list of fields, or `None` for the state's own field."""
    if isinstance(checked_field(field, role), list):
        return [checked_written_field(part, role) for part in field]
    if callable(field):
        raise TypeError(
            f"{role}={field!r} is read-only, but this member of the batch is replaced: expected an index, a name, or "
            "a pair (getter, setter), with setter(batch, value) -> new batch"
        )
    return field


def checked_period(period: Any, where: str) -> Time:
    """Require a positive time in a unit that can be counted in batches."""
    time = checked_interval(period, where, TimeUnit.BATCH)
    if time.unit not in (TimeUnit.BATCH, TimeUnit.UPDATE, TimeUnit.EPOCH, TimeUnit.DURATION):
        raise ValueError(
            f"{where}={str(time)!r}: expected batches (ba), updates (up), epochs (ep) or a share of the run (dur)"
        )
    return time


Patterns: TypeAlias = Annotated[Sequence[str], checked_patterns]
Where: TypeAlias = Annotated[str | Sequence[str] | None, checked_where]
Field: TypeAlias = Annotated[batches.Field | None, checked_field]
WrittenField: TypeAlias = Annotated[batches.Field | None, checked_written_field]
Point: TypeAlias = Annotated[TimeLike | float, named_point]
Period: TypeAlias = Annotated[TimeLike, checked_period]
Elapsed: TypeAlias = Annotated[float, Within(0, hint="it is the share of the run that is over")]


def chosen_fields(
    state: State, input_field: batches.Field | None, target_field: batches.Field | None
) -> tuple[batches.Field | None, batches.Field | None]:
    """Return a method's fields of input and target, by default those of the state."""
    context = state.context
    return (
        context.input_field if input_field is None else input_field,
        context.target_field if target_field is None else target_field,
    )


def check_reads_targets(name: str, loss_fn: Callable[..., Tensor], target_field: batches.Field | None) -> None:
    """Raise a `TypeError` if the loss reads no changed targets, as if the model computes it, or there are none."""
    if not getattr(loss_fn, "reads_targets", True):
        raise TypeError(f"{name}: the loss {loss_fn!r} reads no targets, which {name} would change: leave out {name}")
    if isinstance(loss_fn, losses.ModelLoss):
        raise TypeError(
            f"{name}: expected a loss of outputs and targets, got {loss_fn!r}, which the model computes "
            f"from its own labels, so that {name} would change nothing; give State.create a loss such as "
            f"losses.cross_entropy, or leave out {name}"
        )
    if target_field is None:
        raise TypeError(
            f"{name}: expected a batch with targets, but the state has target_field=None: give the field of the "
            f"targets, State.create(..., target_field=...), or leave out {name}"
        )


def needed_rng(key: Tensor | random.Rng | None, core: str, when: str) -> random.Rng:
    """Return the key as an `Rng`, or raise a `TypeError` that explains when a key is needed."""
    if key is None:
        raise TypeError(f"{core}: expected a key {when}, got None")
    return as_rng(key, core)


def reported(state: State, name: str, numbers: Mapping[str, float]) -> State:
    """Add host numbers to the state's metrics as `f"{name}/{key}"`, 0-d float32, on the state's device."""
    # torch.full, because a copy from the host would wait for a GPU.
    made = {
        f"{name}/{key}": torch.full((), value, dtype=torch.float32, device=state.device)
        for key, value in numbers.items()
    }
    return state.replace(metrics={**state.metrics, **made})


def selected(name: str, masks: list[Tensor], results: list[State], start: State) -> State:
    """Return the state whose values are those of the result whose mask is true, or of the start if none is."""
    by_example = masks[0].ndim > 0
    changes = {}
    for field in TENSOR_FIELDS:
        values, old = [getattr(result, field) for result in results], getattr(start, field)
        if all(value is old for value in values):
            continue
        if by_example and field not in ("batch", "slots", "metrics"):
            raise ValueError(f"{name}: per_example=True: expected a method that changes the batch only, not {field}")
        if field == "batch":
            *values, old = with_weights([*values, old], start.context.target_field)
        choose = _chooser(name, f"state.{field}", masks)
        is_by_key = field in ("slots", "metrics")
        changes[field] = _by_key(choose, values, old) if is_by_key else choose([*values, old])
    return start.replace(**changes)


def _by_key(choose: Callable[[list[Any]], Any], values: list[dict[str, Any]], old: dict[str, Any]) -> dict[str, Any]:
    """Choose among dicts key by key; a key that one of the methods adds or removes is added or removed."""
    removed = {key for key in old if any(key not in value for value in values)}
    kept = {key: None for value in [old, *values] for key in value if key not in removed}
    every_value = [*values, old]
    made = {key: next(value[key] for value in every_value if key in value) for key in kept}
    return {key: choose([value.get(key, made[key]) for value in every_value]) for key in kept}


def _chooser(name: str, where: str, masks: list[Tensor]) -> Callable[[list[Any]], Any]:
    """Return a function of one value for each mask, and one more for where no mask is true."""

    def leaf(*values: Any) -> Any:
        if all(value is values[0] for value in values):
            return values[0]
        if any(isinstance(value, Mixture) for value in values) or _are_targets(values):
            mixtures = [Mixture.of(value) for value in values]
            if len({targets.shape for mixture in mixtures for targets in mixture.targets}) > 1:
                return _either(mixtures, masks)
            num, by_loss = max(len(one.weights) for one in mixtures), any(one.interpolate_loss for one in mixtures)
            return tree.map(leaf, *[mixture.extended(num, by_loss) for mixture in mixtures])
        if len({type(value) for value in values}) == 1 and not isinstance(values[0], Tensor):
            members = [tree.members(value) for value in values]  # of dataclasses and objects
            if all(members):
                return with_members(values[0], choose(members))
        if not all(isinstance(value, Tensor) and value.shape == values[0].shape for value in values):
            shapes = " or ".join(dict.fromkeys(_words(value) for value in values))
            raise FormError(
                f"{name}: {where} is {shapes}, by what is chosen: expected methods that keep shapes and structure, or, "
                "outside of the gradient, host=True, which chooses on the host, where they may differ"
            )
        result = values[-1]
        for mask, value in zip(masks[::-1], values[-2::-1], strict=True):
            if mask.ndim and not (value.ndim and len(value) == len(mask)):
                raise ValueError(
                    f"{name}: per_example=True: {where}: expected a tensor with {len(mask)} examples in its first "
                    f"dimension, got {_words(value)}"
                )
            result = torch.where(per_row(mask, value) if mask.ndim else mask, value, result)
        return result

    def choose(values: list[Any]) -> Any:
        try:
            return tree.map(leaf, *values, is_leaf=lambda node: isinstance(node, Mixture))
        except (FormError, TypeError, ValueError) as error:
            if str(error).startswith(name):
                raise
            raise FormError(f"{name}: {where} has another structure, by what is chosen; use host=True") from error

    return choose


def _are_targets(values: Sequence[Any]) -> bool:
    """Return whether values are targets in two forms: class indices (N, ...) and dense (N, C, ...)."""
    forms = {(value.ndim, value.is_floating_point()) for value in values if isinstance(value, Tensor)}
    low, high = min(forms, default=(0, True)), max(forms, default=(0, True))
    return len(forms) == 2 and low == (high[0] - 1, False) and low[0] > 0


def _either(mixtures: Sequence[Mixture], masks: Sequence[Tensor]) -> Mixture:
    """Return all terms of several mixtures, in which those of the mixtures that are not chosen have weight 0."""
    chosen = [*masks, ~torch.stack(list(masks)).any(0)]
    return Mixture(
        tuple(targets for mixture in mixtures for targets in mixture.targets),
        tuple(weight * mask for mixture, mask in zip(mixtures, chosen, strict=True) for weight in mixture.weights),
        any(mixture.interpolate_loss for mixture in mixtures),
        mixtures[0].is_weighted,
    )


def _words(value: Any) -> str:
    return tree.describe(value, with_device=False) if isinstance(value, Tensor) else type(value).__name__


def surgery_method(
    name: str,
    rules: surgery.Rules,
    where: str | Sequence[str] | None = None,
    *,
    is_neutral: bool = False,
    traits: frozenset[Trait] = frozenset({Trait.REQUIRED_ON_LOAD, Trait.REPLACES_LAYERS}),
) -> Algorithm:
    """Return a method that replaces modules of the network at INIT, and does nothing afterwards.

    Args:
        rules: See `surgery.operate`. The types of the new modules have the rule `None`: a network that contains them
            has been changed already.
        where: The `where` of the method: patterns of the modules to change, with all that they contain; by default the
            parts of the network with trainable parameters.
    """

    patterns = None if where is None else tuple(where)

    def apply(event: Event, state: State) -> State:
        del event
        changed, _ = surgery.operate(state, rules, name=name, where=patterns, skips_frozen=patterns is None)
        return changed

    if patterns is None:
        traits = traits | {Trait.SKIPS_FROZEN_PARTS}
    return Algorithm(name, NEVER if is_neutral else on(Event.INIT), apply, traits=traits)


@suggests_keywords
def apply_surgery(net: nn.Module, method: Algorithm, *, key: int | Tensor = 0) -> nn.Module:
    """Return a copy of a network as a method on the model changes it at INIT; the network is not modified.

    The copy has separate weights, and is in the same mode (train or eval). Create the optimizer from the copy. What the
    method does at other events, such as changing a rate, is left out.

    Args:
        net: The network.
        method: A method that replaces modules, such as `algorithms.blurpool()`.
        key: The seed or key with which new parameters are drawn.

    Raises:
        ValueError: The method does not replace modules.

    Example:
        >>> from purecompose.algorithms import squeeze_excite
        >>> apply_surgery(nn.Conv2d(128, 128, 3), squeeze_excite(0.125)).se.squeeze
        Linear(in_features=128, out_features=16, bias=False)
    """
    if Trait.REQUIRED_ON_LOAD not in method.traits:
        raise ValueError(f"apply_surgery: expected a method that replaces modules, got {method!r}")
    # Half precision, since methods may act only there.
    state = State.create(net, loss=losses.mse, optimizer=optim.sgd(0.0), key=key, precision="bf16")
    changed_net = to_module(compose(loop_events, [method]).init(state))
    return changed_net if any(module.training for module in net.modules()) else changed_net.eval()


def warn_of_nothing(name: str, wanted: str, module: nn.Module, advice: str) -> None:
    there = ", ".join(sorted({type(child).__name__ for child in module.modules()}))
    warn(f"{name} has no effect: it looked for {wanted} and found none in a network of {there}. {advice}")


class _ByName(type):
    """Metaclass for classes whose instances are the objects with a class of a certain name in their MRO."""

    def __instancecheck__(cls, thing: Any) -> bool:
        wanted = cls.__dict__["of"]
        return any((kind.__module__, kind.__qualname__) == wanted for kind in type(thing).__mro__)


class _ByIdentity(type):
    """Metaclass for classes whose instances are the members of a container."""

    def __instancecheck__(cls, thing: Any) -> bool:
        return thing in cls.__dict__["members"]


def one_of(members: Container[Any], shown: str) -> type[nn.Module]:
    """Return a class, for `isinstance` and the rules of a surgery, whose instances are certain modules.

    Example:
        >>> first = nn.Linear(2, 2)
        >>> isinstance(first, one_of([first], "first")), isinstance(nn.Linear(2, 2), one_of([first], "first"))
        (True, False)
    """
    return _ByIdentity(shown, (nn.Module,), {"members": members})


def stand_in(module: str, name: str) -> type[nn.Module]:
    """Return a class, for `isinstance` and the rules of a surgery, whose instances are those of the class of a name.

    The module of that class is not imported.

    Example:
        >>> isinstance(nn.Linear(2, 2), stand_in("torch.nn.modules.linear", "Linear"))
        True
    """
    return _ByName(name, (nn.Module,), {"of": (module, name)})


class Derived(nn.Module):
    """Base of mixins that `changed` adds to a foreign class; their methods override those of the class."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is created at run time, so pickle cannot find it by its name.
        mixin, kind = type(self).__bases__
        return _blank, (mixin, kind), self.__dict__


def changed(module: nn.Module, mixin: type[Derived] | None = None, **children: nn.Module) -> nn.Module:
    """Return a copy of a module with some methods and children replaced, and the same parameters and attributes.

    Args:
        mixin: A class whose methods override the module's.
        children: Modules that replace the children or attributes of these names.
    """
    # Not copy.copy, which parametrized modules refuse.
    twin = recast(module, type(module) if mixin is None else _derived(mixin, type(module)))
    vars(twin)["_modules"] = {**module._modules, **children}
    for name in children:
        vars(twin).pop(name, None)  # a plain attribute, such as a function, would hide the child
    return twin


@functools.cache  # one class for each pair, because architectures are compared by their classes
def _derived(mixin: type[Derived], kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {"__module__": __name__, "__doc__": mixin.__doc__})


def _blank(mixin: type[Derived], kind: type[nn.Module]) -> nn.Module:
    made = _derived(mixin, kind)
    return made.__new__(made)
