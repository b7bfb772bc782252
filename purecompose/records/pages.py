"""Pages: single files of HTML without scripts or external resources, from templates in this folder.

`page.html.jinja` is the frame, `parts.html.jinja` has sections and lists of pairs, and `page.css` the appearance.
Tables, and the appearance that notebooks share, are those of `purecompose._support.html`.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader
from markupsafe import Markup, escape

from purecompose._support.tables import breakable, columns, printable
from purecompose.records.layout import write_text


_HERE, _SHARED = "purecompose.records", "purecompose._support"


def write_page(path: str | os.PathLike[str], template: str, values: Mapping[str, Any], *, package: str = _HERE) -> Path:
    """Write a page to a file, in one move, and return the path; all texts are escaped.

    Args:
        path: The file.
        template: Name of the template.
        values: What it shows.
        package: The package with the template; the frame and the parts are those of this one.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader(_HERE, "."), PackageLoader(_SHARED, ".")]),
        autoescape=lambda name: name is not None and not name.endswith(".css"),
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": _marked(breakable), "unbroken_options": _unbroken_options}
    environment.globals["columns"] = _marked(columns)
    target = Path(path)
    write_text(target, environment.get_template(template).render(values))
    return target


def _marked(fn: Callable[..., str]) -> Callable[..., Markup]:
    """Return a function whose result is HTML and is not escaped again."""
    return lambda *args, **options: Markup(fn(*args, **options))


def _unbroken_options(command: str) -> Markup:
    """Return a command without line breaks inside its options."""
    option = r"(?<!\S)--?[\w-]{1,30}(?!\S)"
    return Markup(re.sub(option, r'<span class="whole">\g<0></span>', str(escape(_printable(command)))))


def _printable(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
