"""The public names of the package, and the pages of the API reference, one for each public module.

A name is public if the package or one of its public modules exports it. An object with several public
names is documented under the shortest.
"""

import itertools
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import griffe

from purecompose._support import public_names


ROOT = Path(__file__).parents[2]

Found = griffe.Object | griffe.Alias


class Name(NamedTuple):
    """A public name that is not a module."""

    path: str
    """Its public path, such as `purecompose.optim.sgd`."""
    target: Found

    @property
    def last(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring, on one line."""
        return " ".join(self.target.docstring.value.partition("\n\n")[0].split()) if self.target.docstring else ""


@cache
def package() -> griffe.ModulesCollection:
    """Read the package, without importing it."""
    loader = griffe.GriffeLoader(search_paths=[ROOT])
    loader.load("purecompose")
    loader.resolve_aliases(implicit=True)
    return loader.modules_collection


def _member(module: Found, name: str) -> Found:
    """Return a member, and never the module of the same name: `optim.sgd` is a function in `optim/sgd.py`."""
    return package()[module.imports.get(name, f"{module.path}.{name}")]


@cache
def modules() -> dict[str, list[Name]]:
    """Return the public names of each public module."""
    found: dict[str, list[Name]] = {}
    seen: set[str] = set()
    waiting = ["purecompose"]
    while waiting:
        path = waiting.pop(0)
        module = package()[path]
        if module.is_alias:
            module = module.final_target  # pyright: ignore[reportAttributeAccessIssue]
        if module.path in seen:
            continue
        seen.add(module.path)
        exports = public_names(Path(str(module.filepath)).read_text())
        members = {f"{path}.{name}": _member(module, name) for name in exports}
        waiting += [name for name, member in members.items() if member.is_module]
        found[path] = [Name(name, member) for name, member in members.items() if not member.is_module]
    return dict(sorted(found.items()))


@cache
def homes() -> dict[str, Name]:
    """Return the name under which each object is documented, by its path in the source."""
    names = sorted((name for names in modules().values() for name in names), key=lambda name: name.path.count("."))
    found: dict[str, Name] = {}
    for name in names:
        found.setdefault(name.target.canonical_path, name)
    return found


def anchor(name: Name) -> str:
    """Return the anchor on the site: the public path, or that in the source if a module is at the public path."""
    home = homes()[name.target.canonical_path]
    return home.target.canonical_path if package()[home.path].is_module else home.path


CODE = re.compile(r"(?<![\[`])`([A-Za-z_][\w.]*)((?:\([^`]*\))?)`(?![\]`])")


@cache
def _anchors() -> dict[str, str]:
    """Return the anchors of the public names, by all their paths, and of types also by their names."""
    names = [name for names in modules().values() for name in names]
    paths = {name.path: anchor(name) for name in names}
    types = {name.last: anchor(name) for name in homes().values() if name.target.is_class}
    return {**types, **paths}


def linked(text: str, *, has_short_names: bool) -> str:
    """Turn names in code marks into links to the reference: `pc.fit`, and with short names also `State`."""

    def link(match: re.Match[str]) -> str:
        name = re.sub(r"^pc\.", "purecompose.", match[1])
        found = [name] if not has_short_names else [f"purecompose.{name}", name] if "." in name else [name]
        target = next(
            (_anchors()[path] for path in found if path in _anchors() and ("." in path or has_short_names)), None
        )
        return match[0] if target is None else f"[{match[0]}][{target}]"

    return CODE.sub(link, text)


def page_of(module: str) -> str:
    return f"reference/{module.removeprefix('purecompose.')}.md"


INDEX = "reference/names.md"
BOOSTS = {"testing": 0.1, "functional": 0.1, "nn": 0.25, "analysis": 0.35, "": 8}
"""What a match in the page of a name counts in the search, by the first part of its module; 0.8 in all others."""


def pages() -> dict[str, tuple[str, str]]:
    """Return the title and the text of the pages of modules and of the index of names, by their paths."""
    found = {page_of(module): (_shown(module), _page(module)) for module in modules()}
    return {INDEX: ("All names", _index()), **found}


def pages_of_names() -> dict[str, str]:
    """Return the page of each public object, by its path."""
    found = {}
    for name in homes().values():
        module = name.path.rpartition(".")[0]
        options = f"    options:\n      heading: '{_shown(name.path)}'\n      toc_label: '{name.last}'\n"
        above = f"[{_shown(module)}](../{module.removeprefix('purecompose.')}.md)"
        boost = BOOSTS.get(module.removeprefix("purecompose").strip(".").partition(".")[0], 0.8)
        head = f"---\ntitle: {name.last}\nsearch: {{boost: {boost}}}\n---\n"
        text = f"{head}\n{above}\n\n::: {anchor(name)}\n{options}      heading_level: 1\n"
        found[f"{page_of(module).removesuffix('.md')}/{name.last}.md"] = text
    return found


def _shown(path: str) -> str:
    return path.replace("purecompose", "pc", 1)


def _page(module: str) -> str:
    names = modules()[module]
    lines = [f"# {_shown(module)} {{#{module}}}", "", f"::: {module}", "    options:"]
    lines += ["      show_root_heading: false", "      show_root_toc_entry: false", "      members: false", ""]
    return "\n".join(lines) + "\n" + _table(names)


def _index() -> str:
    """Return a page with all public objects by their first letters."""
    lines = ["# All public names", ""]
    public = (name for name in homes().values() if not name.last.startswith("__"))
    names = sorted(public, key=lambda name: (name.last.lower(), name.path))
    for letter, group in itertools.groupby(names, key=lambda name: name.last[0].upper()):
        rows = [f"[`{name.last}`][{anchor(name)}] in {_shown(name.path.rpartition('.')[0])}  " for name in group]
        lines += [f"## {letter}", "", *rows, "{: .names }", ""]
    return "\n".join(lines)


def _table(names: list[Name]) -> str:
    rows = [f"| [`{name.last}`][{anchor(name)}] | {name.summary.replace('|', chr(92) + '|')} |" for name in names]
    return "\n".join(["| name | summary |", "| --- | --- |", *rows]) + "\n" if rows else ""
