"""Output to a terminal: control characters of texts from outside are shown, and never sent."""

import re
import sys
from typing import Any


# Control characters, except tabs and ends of lines; marks of the direction of writing; halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: object) -> str:
    """Return a text with escapes of Python for what would control a terminal.

    Example:
        >>> escaped("red: " + chr(27) + "[31m")
        'red: \\\\x1b[31m'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def say(*values: object, file: Any = None, **settings: Any) -> None:
    """Print, escaped for standard output and standard error; files get the values as they are."""
    is_shown = file in (None, sys.stdout, sys.stderr)
    print(*(map(escaped, values) if is_shown else values), file=file, **settings)
