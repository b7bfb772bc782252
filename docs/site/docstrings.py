"""An extension of Griffe: docstrings as they are written in the package become Markdown."""

import ast
import re
import textwrap

import griffe
from reference import homes, modules


# A paragraph that ends in `::`, and the indented block after it; or an indented block after a paragraph.
LITERAL = re.compile(r"^(?P<intro>.*?)::\n\n?(?P<block>(?:(?: {4}.*)?\n)+)", re.M)
INDENTED = re.compile(r"(?<=\n\n)(?P<block>(?: {4}.*\n)(?:(?: {4}.*)?\n)*)")
NAME = re.compile(r"(?<![`\[])`([A-Za-z_][\w.]*)`(?![`\]])")


class Docstrings(griffe.Extension):
    """Turns literal blocks into highlighted code, and public names into links."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        del kwargs
        if obj.docstring and obj.path.startswith("purecompose"):
            obj.docstring.value = markdown(obj.docstring.value, obj.canonical_path)


def markdown(text: str, path: str = "") -> str:
    """Return a docstring as Markdown, with the sections of Griffe."""
    text = re.sub(r"^Example::$", "Example:\n", text + "\n", flags=re.M)
    head, mark, sections = _before_sections(text)
    head = LITERAL.sub(lambda match: f"{match['intro']}{':' if match['intro'] else ''}\n\n{_fenced(match['block'])}", head)
    head = INDENTED.sub(lambda match: _fenced(match["block"]), head)
    return _linked(head + mark + _examples(sections), path).rstrip()


def _before_sections(text: str) -> tuple[str, str, str]:
    match = re.search(r"^(?:Args|Attributes|Returns|Raises|Warns|Example|References|Note):$", text, re.M)
    return (text, "", "") if match is None else (text[: match.start()], "", text[match.start() :])


def _fenced(block: str) -> str:
    code = textwrap.dedent(block).strip("\n")
    return f"```{'python' if _is_python(code) else 'text'}\n{code}\n```\n\n"


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def _examples(sections: str) -> str:
    """Name the section as Griffe does; code in it that is no doctest becomes a block."""

    def renamed(match: re.Match[str]) -> str:
        body = match[1]
        if ">>>" not in body:
            body = textwrap.indent(_fenced(body), "    ")
        return f"Examples:\n{body}"

    return re.sub(r"^Example:\n((?:(?: {4}.*)?\n)+)", renamed, sections, flags=re.M)


def _linked(text: str, path: str) -> str:
    return text
