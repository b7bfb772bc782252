"""The pages of the API reference, one for each public module, generated from the public names."""

import inspect

from names import homes, modules, names_in


def page_of(module: str) -> str:
    return f"reference/{module.removeprefix('purecompose.')}.md"


def pages() -> dict[str, tuple[str, str]]:
    """Return the title and the text of each page, by its path."""
    at = homes()
    return {page_of(path): (path, "\n".join(_page(path, module, at))) for path, module in modules().items()}


def _page(path: str, module: object, at: dict[str, str]) -> list[str]:
    here = list(names_in(path, module))  # pyright: ignore[reportArgumentType]
    own = [name.path for name in here if at[name.path] == name.path]
    lines = [f"# {path}", "", f"::: {path}", "    options:", "      show_root_heading: false", "      members: false"]
    lines += ["", "| name | |", "| --- | --- |"]
    lines += [f"| [`{name.path.rpartition('.')[2]}`][{at[name.path]}] | {_summary(name.value)} |" for name in here]
    for name in own:
        heading, label = name.replace("purecompose", "pc", 1), name.rpartition(".")[2]
        lines += ["", f"::: {name}", "    options:", f"      heading: '{heading}'", f"      toc_label: '{label}'"]
    return lines


def _summary(value: object) -> str:
    """Return the first sentence of a docstring, on one line."""
    has_own = inspect.isfunction(value) or inspect.isclass(value)
    doc = inspect.cleandoc(value.__doc__ or "") if has_own else ""
    return " ".join(doc.partition("\n\n")[0].split()).replace("|", "\\|")
