"""The algorithm that laws are tried on, and the text that creates it again."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from purecompose._support import specs
from purecompose._support.checks import shown
from purecompose.algorithms import FACTORIES
from purecompose.core.algorithm import Algorithm
from purecompose.time.event import Event
from purecompose.time.predicates import on


class Subject(NamedTuple):
    """The algorithm under test, and the text that creates it again, in this process or another."""

    algorithm: Algorithm
    """The algorithm."""
    source: str | None = None
    """The text that creates it; `None` if there is none."""

    @classmethod
    def of(cls, given: Algorithm | Subject | str) -> Subject:
        """Take an algorithm, `"package.module:attribute"`, or a shipped one as a call, `"mixup(alpha=0.2)"`.

        The attribute may be an algorithm or a function without required arguments that returns one.

        Raises:
            TypeError: It is something else.
            ValueError: The text does not name an algorithm; `ImportError` if its module cannot be imported.

        Example:
            >>> Subject.of("mixup(0.4)").algorithm
            mixup(alpha=0.4, interpolate_loss=False, per_example=False)
        """
        if isinstance(given, Subject):
            return given
        if isinstance(given, Algorithm):
            return cls(given)
        if not isinstance(given, str):
            hint = f"; call it, as in {given.__name__}()" if inspect.isfunction(given) else ""
            raise TypeError(
                f"expected an Algorithm or a text such as 'my_module:name' or 'mixup(0.2)', got {shown(given)}{hint}"
            )
        return cls(_imported(given) if ":" in given.partition("(")[0] else _shipped(given), given)

    @property
    def name(self) -> str:
        """The algorithm's name."""
        return self.algorithm.name

    def changed(self, **changes: Any) -> Subject:
        """Return the subject with a changed algorithm."""
        return Subject(dataclasses.replace(self.algorithm, **changes), self.source)

    def rebuilt(self) -> Subject:
        """Return a subject with a new algorithm, if there is a source text; otherwise the same one."""
        return self if self.source is None else _rebuilt(self.source, self.algorithm.events)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the source text if there is one, since most algorithms are closures."""
        if self.source is None:
            return Subject, (self.algorithm,)
        return _rebuilt, (self.source, self.algorithm.events)

    def renamed(self, name: str) -> Subject | None:
        """Return the same algorithm with another name; `None` without a source text whose factory accepts a name."""
        if self.source is None:
            return None
        if ":" not in self.source.partition("(")[0]:
            call = specs.parse_one(self.source)
            named = dataclasses.replace(call, kwargs={**call.kwargs, "name": name})
            return Subject(specs.build(named, FACTORIES, "algorithm"))
        factory = _found(self.source)
        if isinstance(factory, Algorithm) or "name" not in inspect.signature(factory).parameters:
            return None
        return Subject(factory(name=name))

    def only_at(self, event: Event) -> Subject:
        """Return the subject with an algorithm that acts only at INIT and at one event."""
        return self.changed(match=self.algorithm.predicate & on(Event.INIT, event))


def _rebuilt(source: str, events: tuple[Event, ...]) -> Subject:
    """Return a new subject from a source text, which may act at fewer events than the algorithm from the text."""
    subject = Subject.of(source)
    if subject.algorithm.events == events:
        return subject
    return subject.changed(match=subject.algorithm.predicate & on(*events))


def _shipped(text: str) -> Algorithm:
    return specs.build(specs.parse_one(text), FACTORIES, "algorithm")


def _found(text: str) -> Any:
    module_name, _, attribute = text.partition(":")
    module = importlib.import_module(module_name)
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise ValueError(f"{text}: {error}") from error


def _imported(text: str) -> Algorithm:
    found = _found(text)
    if not isinstance(found, Algorithm) and callable(found):
        found = _called(text, found)
    if not isinstance(found, Algorithm):
        raise ValueError(f"{text} is {found!r} ({type(found).__name__}), expected an Algorithm or a function for one")
    return found


def _called(text: str, factory: Callable[..., Any]) -> Any:
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        name
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in optional
    ]
    if required:
        attribute = text.rpartition(":")[2]
        raise ValueError(
            f"{text} has required arguments ({', '.join(required)}): define the algorithm in the module, as in "
            f"my_algorithm = {attribute}(...), and name that"
        )
    return factory()
