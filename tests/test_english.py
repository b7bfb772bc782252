"""Docstrings, comments, messages and pages are in plain English: a short list of words, and the form of docstrings."""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

from tests.pages import ROOT


PACKAGE = sorted((ROOT / "purecompose").rglob("*.py"))
TEXTS = [
    *PACKAGE,
    *(path for folder in ("docs", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.*"))),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]

# What a reader would have to decode, and what to write.
WORDS = {
    r"(?<!there )(?<!There )\b(is|are|was|were) no (?!longer|matter|other\b)": "is not a",
    r"\b[Tt]old\b": "reported, named, called",
    r"\b[Aa]new\b": "again",
    r"\b([Nn]ob|[Ss]omeb)ody\b|\b[Ww]ho(ever|m)\b": "name the code or the person",
    r"\b([Oo]ne|nobody)'s own\b": "your own",
    r"\b[Gg]o(es)? on (from|with|to|at|in)\b|\bwent on\b": "continues, resumes",
    r"\b[Tt]akes? down\b": "records",
    r"\bas ever\b": "as usual",
    r"\b(all|whole) the same\b(?! )": "nevertheless",
    r"\bhalf-way\b": "halfway",
    r"\bwhat came\b": "the value",
    r"\bis it as\b": "is the same as",
}

NOT_IMPERATIVE = re.compile(
    r"(The|An?|What|Whether|How|Who|Which|Where|Why|It|This|Returns|Raises|Gives|Makes|Takes|Computes|Adds|Reads|Writes|"
    r"Bounds|Clips|Covers|Spreads|Reverses|Honours|Standardizes|Shrinks|Checks|Builds|Sets|Runs|Says|Tells|Looks|Puts|Keeps|Holds|Lets|Applies|Compares|Finds|Calls)\b"
)


@pytest.mark.parametrize("pattern", WORDS)
def test_texts_avoid_words_that_must_be_decoded(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in TEXTS
        if path.suffix in (".py", ".md", ".jinja")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not found, f"write {WORDS[pattern]!r}:\n" + "\n".join(found)


def without_code(page: str) -> str:
    """Return a page with empty lines for its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", lambda block: "\n" * block[0].count("\n"), page, flags=re.S | re.M)


def test_prose_of_pages_has_at_most_120_columns() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in TEXTS
        if path.suffix == ".md"
        for number, line in enumerate(without_code(path.read_text()).splitlines(), 1)
        if len(line) > 120 and not re.match(r"\s*(\||!?\[[^]]*\]\(\S*\)$)", line)  # tables, and links alone
    ]
    assert not found, "\n".join(found)


def documented(path: pathlib.Path) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield each function and class with its place and its docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (
            text := ast.get_docstring(node)
        ):
            yield node, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", text


def is_property(node: ast.AST) -> bool:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(ast.unparse(decorator).endswith(("property", "setter")) for decorator in decorators)


def test_summaries_of_functions_are_imperative() -> None:
    found = [
        f"{place}: {text.splitlines()[0]}"
        for path in PACKAGE
        for node, place, text in documented(path)
        if not isinstance(node, ast.ClassDef) and not is_property(node) and NOT_IMPERATIVE.match(text)
    ]
    assert not found, "\n".join(found)


def entries(text: str) -> Iterator[str]:
    """Yield the descriptions under Args, Raises, Attributes and Warns."""
    for section in re.findall(r"^(?:Args|Raises|Attributes|Warns):\n((?:    .*\n?|\n(?=    ))+)", text, re.M):
        for entry in re.split(r"\n(?=    \S)", section.rstrip("\n")):
            name, colon, description = entry.partition(": ")
            if colon and re.fullmatch(r"    [\w*`., ]+", name):
                yield description


def test_entries_of_docstrings_begin_with_a_capital_letter_and_end_with_a_period() -> None:
    found = [
        f"{place}: {description[:80]}"
        for path in PACKAGE
        for _, place, text in documented(path)
        for description in entries(text)
        # A symbol of a paper ("k, the number of ...") and a dtype keep their case.
        if re.match(r"(?!b?float|int)[a-z]{2}", description) or not description.rstrip().endswith(".")
    ]
    assert not found, "\n".join(found)
