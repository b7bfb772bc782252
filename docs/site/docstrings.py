"""An extension of Griffe: docstrings as written in the package become Markdown."""

import re

from griffe import Extension, Object


class Docstrings(Extension):
    """Turns examples into highlighted code, and blocks after `::` into code blocks."""

    def on_object(self, *, obj: Object, **kwargs) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
