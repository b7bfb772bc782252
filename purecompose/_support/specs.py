"""Arguments: calls written as text, which are parsed and never run as code, and checks.

A text, such as `mixup(alpha=0.2),label_smoothing`, is a list of names separated by commas, each with or without
arguments in parentheses. A name may have a module in front, `my_module:name`. Arguments are literals: numbers, quoted
strings, True, False, None, and tuples, lists and dicts of these; or calls, as in `sometimes(mixup(), 0.5)`. A time such
as `0.1dur` needs no quotes.

A check returns the value, or raises with a message of the form "where: expected what, got value (type); hint". `where`
names the function and the argument, such as "sgd: lr".
"""

import ast
import functools
import inspect
import math
import numbers
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import FunctionType
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.nn import Module

from purecompose._support.other_names import instead_of_name, instead_of_setting


OWN_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""A name with a module in front."""

# A string, which stays as it is; a name with a module; or a number with a unit. The latter two are not valid Python and
# are quoted; `1e5` and `2j`, which are, do not match.
_QUOTED = re.compile(
    r"""(?P<string>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|"""
    rf"(?<![\w.]){OWN_NAME.pattern}|"
    r"(?<![\w.])(?:(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:ep|ba|up|sp|tok|dur|sec)"
    r"|(?=\d)(?:\d+h)?(?:\d+m)?(?:\d+s)?)(?![\w.]|\s*=)",
    re.ASCII | re.IGNORECASE,
)


class SpecError(ValueError):
    """A text contains an unknown name, or arguments that its factory does not accept; the message is one line."""


@dataclass(frozen=True, repr=False)
class Call:
    """A name with arguments, literals or calls; `str` returns a text that parses to the same call."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        arguments = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{self.name}({', '.join(arguments)})"

    @property
    def names(self) -> set[str]:
        """Its name, and those of the calls among its arguments."""
        inner = (value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Call))
        return {self.name}.union(*(call.names for call in inner))


def parse(text: str) -> tuple[Call, ...]:
    """Return the calls listed in a text; the empty text and `none` list no calls."""
    line = "".join(" " if character.isspace() else character for character in text).strip()
    if line.lower() in ("", "none"):
        return ()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in strings
            quoted = _QUOTED.sub(lambda found: found[0] if found["string"] else repr(found[0]), line)
            expression = ast.parse(quoted, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise SpecError(
            f"cannot read {line if len(line) <= 80 else line[:77] + '...'!r}: {reason}; expected names separated by "
            "commas, each with or without arguments in parentheses; text is quoted, and a time is a number and ep, ba, "
            "up, sp, tok, dur or sec"
        ) from error
    return tuple(map(_call, expression.elts if isinstance(expression, ast.Tuple) else [expression]))


def parse_one(text: str) -> Call:
    """Return the only call in a text, such as "adam(lr=2e-3)"."""
    calls = parse(text)
    if len(calls) != 1:
        raise SpecError(f"expected one name, with or without arguments, got {len(calls)} in {text!r}")
    return calls[0]


def build(call: Call, factories: Mapping[str, Callable[..., Any]], kind: str) -> Any:
    """Call the factory with the call's name and arguments; `kind` is a word for what they make, for messages.

    Raises:
        SpecError: No factory has the name, it has no such parameter, or it refuses a value.
    """
    check_name(call.name, factories, kind)
    factory = factories[call.name]
    _check_arguments(call, inspect.signature(factory))

    def value(given: Any) -> Any:
        return build(given, factories, kind) if isinstance(given, Call) else given

    args, kwargs = map(value, call.args), {name: value(given) for name, given in call.kwargs.items()}
    try:
        return factory(*args, **kwargs)
    except (TypeError, ValueError) as error:
        prefix = "" if str(error).startswith(call.name) else f"{call.name}: "
        raise SpecError(f"{prefix}{error}") from error


def by_name(call: Call, factories: Mapping[str, Callable[..., Any]]) -> Call:
    """Return the call with all arguments by name, or unchanged if that is impossible, as `build` then reports."""
    if call.name not in factories:
        return call
    parameters = inspect.signature(factories[call.name]).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    given = dict(zip(names, call.args, strict=False))
    takes_others = any(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL) for parameter in parameters
    )
    if takes_others or len(call.args) > len(names) or given.keys() & call.kwargs.keys():
        return call
    return Call(call.name, kwargs={**given, **call.kwargs})


def check_name(name: str, known: Mapping[str, Any], kind: str) -> None:
    """Raise `SpecError` for an unknown name, with a suggestion."""
    if name not in known:
        hint = _sentence(did_you_mean(name, known) or instead_of_name(name))
        raise SpecError(f"no {kind} is called {name!r};{hint} {'K' if hint else 'k'}nown: {', '.join(sorted(known))}")


def describe(name: str, signature: inspect.Signature) -> str:
    """Return a function's signature as text: parameters with defaults, but without annotations and addresses."""
    plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    shown = [
        one if one.default is one.empty or "<" not in repr(one.default) else one.replace(default=_ELIDED)
        for one in plain
    ]
    return f"{name}{inspect.Signature(shown)}"


class _Elided:
    def __repr__(self) -> str:
        return "..."


_ELIDED = _Elided()


def _check_arguments(call: Call, signature: inspect.Signature) -> None:
    parameters = signature.parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in call.kwargs:
        if name not in parameters and not takes_any:
            hint = _sentence(instead_of_setting(call.name, name) or did_you_mean(name, parameters))
            has = f"{'It' if hint else 'it'} has {', '.join(parameters) or 'no parameters'}"
            raise SpecError(f"{call.name} has no parameter {name!r};{hint} {has}")
    try:
        signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        raise SpecError(f"{call.name}: {error}; it is {describe(call.name, signature)}") from error


def _sentence(hint: str) -> str:
    """Return a hint as the end of a sentence; "" stays as it is."""
    return hint if not hint or hint.endswith(("?", ".")) else f"{hint}."


def did_you_mean(name: str, known: Iterable[str], *, shown: Mapping[str, str] | None = None) -> str:
    """Return the start of a hint if a name is close to one or two known ones, else ""."""
    close = get_close_matches(str(name), list(known), n=2)
    close = close if shown is None else [shown[one] for one in close]
    return f" did you mean {' or '.join(map(repr, close))}?" if close else ""


def _call(node: ast.expr) -> Call:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name = call.func.id if isinstance(call.func, ast.Name) else str(getattr(call.func, "value", ""))
    if not isinstance(call.func, ast.Name) and not OWN_NAME.fullmatch(name):
        module, dot, attribute = ast.unparse(call.func).rpartition(".")
        hint = f"; what a module defines is given as {module}:{attribute}" if dot and attribute.isidentifier() else ""
        raise SpecError(f"expected a name, with or without arguments in parentheses, got {ast.unparse(node)}{hint}")
    kwargs = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise SpecError(f"{name}: write the arguments out, not as **{ast.unparse(keyword.value)}")
        if keyword.arg in kwargs:
            raise SpecError(f"{name}: {keyword.arg} is given twice")
        kwargs[keyword.arg] = _literal(keyword.value, f"{name}: {keyword.arg}=")
    return Call(name, tuple(_literal(argument, f"{name}: ") for argument in call.args), kwargs)


def _literal(node: ast.expr, role: str) -> Any:
    if isinstance(node, ast.Call):
        return _call(node)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise SpecError(
            f"{role}{ast.unparse(node)} is not a literal: expected a number, a string in quotes, a time such as 5ep, "
            "True, False, None, a tuple, list or dict of these, or a call such as mixup()"
        ) from error


F = TypeVar("F", bound=Callable[..., Any])


def frozen(setting: Any) -> Any:
    """Return a setting with lists, nested ones included, converted to tuples."""
    return tuple(map(frozen, setting)) if isinstance(setting, list | tuple) else setting


def check_flag(value: Any, where: str) -> bool:
    """Require an actual bool; 0 and 1 are rejected."""
    if not isinstance(value, bool):
        raise TypeError(f"{where}: expected True or False, got {shown(value)}")
    return value


def check_whole(value: Any, where: str, low: float = -math.inf, high: float = math.inf, *, hint: str = "") -> int:
    """Require an int or an object with `__index__`, but not a float or a tensor, whose value may be on a device."""
    if type(value) is int and low <= value <= high:  # the usual case, which runs in every step
        return value
    is_int = hasattr(value, "__index__") and not isinstance(value, bool | Tensor)
    if is_int and low <= operator.index(value) <= high:
        return operator.index(value)
    raise (ValueError if is_int else TypeError)(_refusal(where, f"an int{_range(low, high)}", value, hint))


def check_number(
    value: Any,
    where: str,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    above: bool = False,
    below: bool = False,
    hint: str = "",
) -> float:
    """Require a finite real number and return it as a float."""
    if is_number(value) and math.isfinite(value) and low <= value <= high:
        if not (above and value == low) and not (below and value == high):
            return float(value)
    wanted = f"a finite number{_range(low, high, above=above, below=below)}"
    raise (ValueError if is_number(value) else TypeError)(_refusal(where, wanted, value, hint))


def is_callable_with(fn: Any, num_args: int) -> bool:
    """Return whether a function takes this many positional arguments; true if its signature is unknown."""
    try:
        inspect.signature(fn).bind(*[None] * num_args)
    except TypeError:
        return False
    except ValueError:  # a function in C may have none
        return True
    return True


def is_number(value: Any) -> bool:
    """Return whether the value is a real number; a bool is not."""
    if type(value) is float:  # the usual case, which runs in every step
        return True
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """Describe a value for a message: a tensor by dtype and shape, others by value (at most 80 characters) and type."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    # In one line, since that of torch's optimizers has many; without the address of a function.
    text = value.__qualname__ if isinstance(value, FunctionType) else " ".join(repr(value).split())
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def _refusal(where: str, wanted: str, value: Any, hint: str) -> str:
    return f"{where}: expected {wanted}, got {shown(value)}{f'; {hint}' if hint else ''}"


def _range(low: float, high: float, *, above: bool = False, below: bool = False) -> str:
    if high < math.inf and low > -math.inf:
        return f" in {'(' if above else '['}{low:g}, {high:g}{')' if below else ']'}"
    parts = [f"{'>' if above else '>='} {low:g}"] if low > -math.inf else []
    parts += [f"{'<' if below else '<='} {high:g}"] if high < math.inf else []
    return "".join(f" {part}" for part in parts)


def check_keywords(given: Iterable[str], function: Callable[..., Any]) -> None:
    """Raise if a function has no parameter of a given name; the message names the right one, or lists all."""
    known = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in given:
        if name not in known:
            names = [name for name in known if name not in ("cls", "self")]
            hint = instead_of_setting(_name(function), name, names) or did_you_mean(name, names)
            raise TypeError(
                f"{_name(function)}() got an unexpected keyword argument {name!r};"
                f"{hint or ' it takes ' + ', '.join(names)}"
            )


def suggests_keywords(function: F) -> F:
    """Decorate a function, or a class, to explain calls with arguments that it does not take.

    An unknown keyword is explained as by `check_keywords`, any other mistake by the signature. The arguments are alive
    until the function returns, so it is not for functions that release the memory of one.
    """
    if isinstance(function, type):
        decorated: Any = function
        decorated.__init__ = suggests_keywords(decorated.__init__)
        return decorated

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            has_params = args and isinstance(args[0], Iterator | list | Module)  # given to an optimizer, as in torch
            if has_params and (hint := instead_of_setting(_name(function), "params")):
                raise TypeError(f"{_name(function)}() got params ({type(args[0]).__name__});{hint}") from None
            signature = inspect.signature(function)
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                check_keywords(kwargs, function)
                call = describe(_name(function), signature).replace("(self, ", "(")
                raise TypeError(f"{error}; it is {call}") from None
            raise

    return cast(F, checked)


def _name(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__")
