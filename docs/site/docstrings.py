"""An extension of Griffe: docstrings as they are written in the package become Markdown."""

import ast
import re
import textwrap

import griffe
from reference import linked


# An indented block, alone or after a paragraph that ends in `::`.
BLOCK = re.compile(r"(?:^(.*?)::\n\n?|(?<=\n\n))((?: {4}.*\n)(?:(?: {4}.*)?\n)*)", re.M)
SECTION = re.compile(r"^(?:Args|Attributes|Returns|Raises|Warns|Example|References|Note):$", re.M)
DECLARED = re.compile(r"_declare\((\w+)\)")
EXAMPLE = re.compile(r"^Example:\n((?:(?: {4}.*)?\n)+)", re.M)
ERRORS = re.compile(r"^    [A-Z]\w+(?:, [A-Z]\w+)+(?=: )", re.M)


class Docstrings(griffe.Extension):
    """Turns literal blocks into highlighted code, fields into a section, and public names into links."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: object) -> None:
        del kwargs
        _prepare(pkg)


def _prepare(obj: griffe.Object) -> None:
    if obj.docstring:
        obj.docstring.value = linked(markdown(obj.docstring.value), has_short_names=True)
    for member in obj.members.values():
        if isinstance(member, griffe.Object):
            _prepare(member)
    if isinstance(obj, griffe.Function):
        _declare_parameters(obj)
    if isinstance(obj, griffe.Class):
        _drop_properties(obj)
        if obj.docstring:
            _list_fields(obj, obj.docstring)


def _declare_parameters(function: griffe.Function) -> None:
    """Give a function with the decorator `_declare(other)` the parameters of the other one without its first."""
    for decorator in function.decorators:
        if (declared := DECLARED.fullmatch(str(decorator.value))) and function.parent is not None:
            _, *parameters = function.parent.members[declared[1]].parameters  # pyright: ignore[reportAttributeAccessIssue]
            function.parameters = griffe.Parameters(*parameters)


def _drop_properties(obj: griffe.Class) -> None:
    """Leave out the properties of a state's fields, which stand where a default would."""
    for field in obj.attributes.values():
        if str(field.value).startswith("_field("):
            field.value = None
    init = obj.members.get("__init__")
    for parameter in init.parameters if isinstance(init, griffe.Function) else ():
        if str(parameter.default).startswith("_field("):
            parameter.default = None


def _list_fields(obj: griffe.Class, docstring: griffe.Docstring) -> None:
    """Describe the fields of a class, also inherited ones, in its docstring, in place of a heading for each."""
    is_enum = any("Enum" in str(base) for base in obj.bases)
    fields = []
    inherited = {} if is_enum else {name: one for base in reversed(obj.mro()) for name, one in base.attributes.items()}
    for name, field in {**inherited, **obj.attributes}.items():
        # Kept, since the fields of a base are listed for each class.
        text = field.extra["listed"].setdefault("text", field.docstring.value if field.docstring else "")
        if is_enum and not text and name.isupper():
            text = str(field.value).strip("\"'")
        if text and not name.startswith("_") and "\n\n" not in text:
            fields.append(f"    {name}: {' '.join(text.split())}\n")
            if name in obj.attributes:
                field.docstring = None
    if fields:
        text = docstring.value
        has_section = "\nAttributes:\n" in text
        section = "\nAttributes:\n" + "".join(fields)
        docstring.value = text.replace("\nAttributes:\n", section) if has_section else f"{text}\n{section}"


def markdown(text: str) -> str:
    """Return a docstring as Markdown, with the sections of Griffe."""
    text = re.sub(r"^Example::$", "Example:\n", text + "\n", flags=re.M)
    start = match.start() if (match := SECTION.search(text)) else len(text)
    head = BLOCK.sub(_block, text[:start])
    sections = EXAMPLE.sub(_example, text[start:])
    # Several types of errors are a union.
    return (head + ERRORS.sub(lambda match: match[0].replace(",", " |"), sections)).rstrip()


def _block(match: re.Match[str]) -> str:
    intro = f"{match[1]}:\n\n" if match[1] else ""
    return intro + _fenced(match[2])


def _fenced(block: str) -> str:
    code = textwrap.dedent(block).strip("\n")
    return f"```{'python' if _is_python(code) else 'text'}\n{code}\n```\n\n"


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def _example(match: re.Match[str]) -> str:
    """Name the section as Griffe does; code in it that is not a doctest becomes a block."""
    return f"Examples:\n{match[1] if '>>>' in match[1] else textwrap.indent(_fenced(match[1]), '    ')}"
