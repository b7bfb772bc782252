"""Pages: single files of HTML without scripts or external resources, from templates in this folder.

`page.html.jinja` is the frame, `parts.html.jinja` has tables and sections, and `page.css` the appearance.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader
from markupsafe import Markup, escape

from purecompose.records.layout import write_text


__all__ = ["breakable", "write_page"]


_HERE = "purecompose.records"


def write_page(path: str | os.PathLike[str], template: str, values: Mapping[str, Any], *, package: str = _HERE) -> Path:
    """Write a page to a file, in one move, and return the path; all texts are escaped.

    Args:
        path: The file.
        template: Name of the template.
        values: What it shows.
        package: The package with the template; the frame and the parts are those of this one.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader(_HERE, ".")]),
        autoescape=lambda name: name is not None and not name.endswith(".css"),
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": breakable, "unbroken_options": _unbroken_options}
    target = Path(path)
    write_text(target, environment.get_template(template).render(values))
    return target


def breakable(value: object, after: str = ",(") -> Markup:
    """Return text with optional line breaks before words that follow a character of `after`, such as a comma."""
    return Markup("<wbr>").join(re.split(rf"(?<=[{re.escape(after)}])(?=[^\W\d])", _printable(str(value))))


def _unbroken_options(command: str) -> Markup:
    """Return a command without line breaks inside its options."""
    option = r"(?<!\S)--?[\w-]{1,30}(?!\S)"
    return Markup(re.sub(option, r'<span class="whole">\g<0></span>', str(escape(_printable(command)))))


def _printable(value: Any) -> Any:
    """Return text without control characters, which HTML does not allow even if escaped."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return "".join(c if c.isprintable() or c in "\t\n" else "\ufffd" if c != "\r" else "" for c in value)
