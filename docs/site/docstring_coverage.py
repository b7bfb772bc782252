"""What docstrings of public names must have: arguments, errors, and for most of them an example.

python docs/site/docstring_coverage.py        # the figures, and what is missing
"""

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import griffe
from reference import homes


FEWEST_EXAMPLES = 0.8
# Parameters that no caller passes; Hypothesis gives `draw` to a composite strategy.
GIVEN = ("self", "cls", "draw")


class Coverage(NamedTuple):
    """The public functions and classes, by what their docstrings have."""

    num_names: int
    """All public names."""
    undocumented: list[str]
    callables: list[str]
    arguments: list[str]
    """Names with a parameter that is not described, and which."""
    errors: list[str]
    """Names whose code raises errors that are not described."""
    examples: list[str]
    """Names without an example."""

    @property
    def faults(self) -> list[str]:
        """What must be mended, one line each."""
        missing = [f"{name}: no docstring" for name in self.undocumented]
        missing += [f"{name} in the docstring" for name in (*self.arguments, *self.errors)]
        if self.share_with_example < FEWEST_EXAMPLES:
            missing.append(f"only {self.share_with_example:.1%} have an example: {', '.join(self.examples)}")
        return missing

    @property
    def share_with_example(self) -> float:
        return 1 - len(self.examples) / len(self.callables)

    def __str__(self) -> str:
        count = len(self.callables)
        return (
            f"{self.num_names} public names, {len(self.undocumented)} without a docstring; of {count} functions and "
            f"classes {count - len(self.arguments)} describe all arguments, {count - len(self.errors)} their errors, "
            f"{count - len(self.examples)} ({self.share_with_example:.0%}) have an example"
        )


def coverage() -> Coverage:
    found = Coverage(len(homes()), [], [], [], [], [])
    for name in homes().values():
        target = name.target.final_target if isinstance(name.target, griffe.Alias) else name.target
        text = _text(target)
        if not text:
            found.undocumented.append(name.path)
        if not isinstance(target, griffe.Function | griffe.Class) or _is_error(target) or _is_law(target):
            continue
        found.callables.append(name.path)
        described = set(_described(target, text))
        if missing := set(_parameters(target, described)) - described:
            found.arguments.append(f"{name.path}: no {', '.join(sorted(missing))}")
        if "\nRaises:" not in text and _raises(target):
            found.errors.append(f"{name.path}: no errors")
        if ">>>" not in text and "\nExample:" not in text:
            found.examples.append(name.path)
    return found


def _text(target: griffe.Object) -> str:
    """Return the docstring; for a class with that of `__init__`."""
    made_by = target.members.get("__init__") if isinstance(target, griffe.Class) else None
    return "\n".join(obj.docstring.value for obj in (target, made_by) if obj is not None and obj.docstring)


def _is_law(target: griffe.Object) -> bool:
    """Whether a function is a value of `Law`, which is called by `check` and not by users."""
    return isinstance(target, griffe.Function) and any("define_law" in str(item.value) for item in target.decorators)


def _is_error(target: griffe.Object) -> bool:
    return isinstance(target, griffe.Class) and target.name.endswith(("Error", "Warning"))


def _parameters(target: griffe.Function | griffe.Class, described: set[str]) -> Iterator[str]:
    """Yield the parameters of a call; keywords that are described by their names stand for `**settings`."""
    names = {parameter.name for parameter in target.parameters}
    for parameter in target.parameters:
        name = parameter.name
        if parameter.kind is griffe.ParameterKind.var_keyword and described - names:
            continue
        if name not in GIVEN and not name.startswith("_"):
            yield name
    if isinstance(target, griffe.Class) and any(str(base) == "NamedTuple" for base in target.bases):
        yield from (name for name, field in target.attributes.items() if "property" not in field.labels)


def _described(target: griffe.Function | griffe.Class, text: str) -> Iterator[str]:
    """Yield the names in the sections of arguments and attributes, and the fields with a docstring of their own."""
    for section in re.findall(r"^(?:Args|Attributes):\n((?: {4}.*\n|\n)+)", text + "\n", re.M):
        for names in re.findall(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*):", section, re.M):
            yield from (name.lstrip("*") for name in names.split(", "))
    if isinstance(target, griffe.Class):
        yield from (name for name, field in target.attributes.items() if field.docstring)


def _raises(target: griffe.Function | griffe.Class) -> bool:
    """Whether a function, or a class's construction, has a `raise` of its own."""
    functions: Iterable[griffe.Object | griffe.Alias] = (target,)
    if isinstance(target, griffe.Class):
        functions = [target.members[name] for name in ("__init__", "__post_init__") if name in target.members]
    return any(
        isinstance(node, ast.Raise) and node.exc is not None
        for function in functions
        for statement in ast.parse(textwrap.dedent(function.source)).body
        for node in _own_nodes(statement)
    )


def _own_nodes(root: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function but for those in functions inside it."""
    for node in ast.iter_child_nodes(root):
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield node
            yield from _own_nodes(node)


if __name__ == "__main__":
    found = coverage()
    print(*found.faults, found, sep="\n")
