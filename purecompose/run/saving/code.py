"""The identity of code: hashes of the functions and classes that a run calls, by which a replay detects changes.

They are hashes of bytecode, so that comments, line numbers and the place of a file do not matter, and functions that
were typed into a notebook have one too. The code of torch and of this library is known by version.
"""

import contextlib
import hashlib
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from purecompose._support.references import reached, read_by
from purecompose.core.operation import walk
from purecompose.core.program import Stage
from purecompose.core.state import State


_PYTHON = "(python)"
"""The version whose bytecode is hashed; another one compiles the same source differently."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = ("torch", "purecompose", "builtins")


def describe_code(state: State, step: Any, data: Any = None) -> dict[str, str]:
    """Return a hash of each function and class of the user, or of another library, that a run calls.

    Args:
        state: The state, for the network and the loss.
        step: The step, for methods and stages.
        data: The data, if a function of the user makes or collates them.

    Returns:
        Hashes by name, such as `train.Net`: the last part of the module's name, and the qualified name.
    """
    found: dict[str, dict[int, str]] = {}
    known: list[Any] = []  # so that no other object gets the identity of one that was found
    rest = deque(_roots(state, step, data))
    while rest:
        # Functions and objects may be of any kind; what cannot be read is left out, as training may work nevertheless.
        with contextlib.suppress(Exception):
            for thing in map(_undecorated, _called(rest.popleft())):
                name = _name_of(thing)
                if name is not None and id(thing) not in found.setdefault(name, {}):
                    found[name][id(thing)] = _digest(thing)
                    known.append(thing)
                    rest.append(thing)  # it may call functions of other modules
    hashes = {name: _joined(set(digests.values())) for name, digests in found.items() if digests}
    return {_PYTHON: f"{sys.version_info[0]}.{sys.version_info[1]}", **hashes}


def code_differences(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a line for each function or class that differs; none if either side is unknown or of another Python."""
    if not saved or not now or saved.get(_PYTHON) != now.get(_PYTHON):
        return []
    return [
        f"code: {name}: {_words(name, saved, now)}"
        for name in dict.fromkeys((*saved, *now))
        if saved.get(name) != now.get(name)
    ]


def _words(name: str, saved: Mapping[str, str], now: Mapping[str, str]) -> str:
    if name in saved and name in now:
        return "changed since the run"
    return "called by the run, not here" if name in saved else "called here, not by the run"


def _roots(state: State, step: Any, data: Any) -> Iterator[Any]:
    """Yield what a run calls: functions, objects that can be called, and classes."""
    context = state.context
    yield from (context.loss, type(context.loss), type(context.optimizer))
    yield from dict.fromkeys(type(module) for module in context.model.module.modules())
    yield from (node.fn for node in walk(step.program) if isinstance(node, Stage))
    for algorithm in step.algorithms:
        yield from (algorithm.match, algorithm.apply)
    for name in ("fn", "collate_fn"):
        if callable(found := getattr(data, name, None)):
            yield found
    yield from (type(one) for one in (data, getattr(data, "dataset", None)) if one is not None)


def _called(root: Any) -> Iterator[Any]:
    """Yield the functions and classes that a function, an object or the methods of a class call."""
    root = _undecorated(root)
    if not isinstance(root, type):
        is_read = callable(root) and not _is_installed(root)
        yield from (place.value for place in reached(root)) if is_read else ()
        return
    for cls in root.__mro__:
        if cls.__module__.partition(".")[0] not in _LIBRARIES:
            yield cls
            for _, method in _members(cls):
                if isinstance(method, types.FunctionType) and not _is_installed(method):
                    yield from (place.value for place in reached(method))


def _is_installed(thing: Any) -> bool:
    """Return whether a function belongs to an installed package, of which only what is called directly is hashed."""
    return isinstance(thing, types.FunctionType) and "site-packages" in thing.__code__.co_filename


def _undecorated(thing: Any) -> Any:
    """Return the function of the user inside of decorators of installed packages, such as `torch.no_grad()`."""
    inner = thing
    while _is_installed(inner) and isinstance(getattr(inner, "__wrapped__", None), types.FunctionType):
        inner = inner.__wrapped__
    return thing if _is_installed(inner) else inner


def _joined(digests: set[str]) -> str:
    """Return one hash for all functions of a name, such as the lambdas of a module."""
    if len(digests) == 1:
        return next(iter(digests))
    return hashlib.blake2b(" ".join(sorted(digests)).encode(), digest_size=6).hexdigest()


def _name_of(thing: Any) -> str | None:
    """Return the name of a function or class outside of torch and this library; `None` for anything else."""
    if not isinstance(thing, (type, types.FunctionType)):
        return None
    module = getattr(thing, "__module__", None) or ""
    if module.partition(".")[0] in _LIBRARIES:
        return None
    if module == "__main__":  # the file that was started; a replay may import it
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None) or ""
        module = spec.name if spec is not None else file.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
    return f"{module.rpartition('.')[2]}.{thing.__qualname__}"


def _digest(thing: Any) -> str:
    members = _members(thing) if isinstance(thing, type) else [("", thing)]
    parts = [(name, _function(one) if isinstance(one, types.FunctionType) else one) for name, one in members]
    return hashlib.blake2b(repr(parts).encode("utf-8", "replace"), digest_size=6).hexdigest()


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the functions and plain values in the body of a class."""
    for name, member in sorted(vars(cls).items()):
        if isinstance(member, property):
            member = member.fget
        elif isinstance(member, (staticmethod, classmethod)):
            member = member.__func__
        member = _undecorated(member)
        if isinstance(member, types.FunctionType) or (isinstance(member, _PLAIN) and not name.startswith("__")):
            yield name, member


def _function(function: types.FunctionType) -> Any:
    """Return the code of a function, with the plain values of its defaults, closure and globals."""
    read = [(place.where, _plain(place.value)) for place in read_by(function)]
    return _code(function.__code__), [(where, value) for where, value in read if value is not None]


def _code(code: types.CodeType) -> Any:
    constants = [_code(one) if isinstance(one, types.CodeType) else one for one in code.co_consts]
    # The order of a set of strings differs between processes.
    ordered = [sorted(one, key=repr) if isinstance(one, frozenset) else one for one in constants]
    return code.co_code, code.co_names, code.co_varnames, ordered


def _plain(value: Any) -> Any:
    """Return a number or text, or a tuple of them; `None` for anything else."""
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    return value if isinstance(value, _PLAIN) else None
