"""Formatting of numbers and times."""

import math
from typing import Any


def number(value: Any, name: str = "") -> str:
    """Return a number as text; for a list with one number per member of a population, the median and the range.

    Example:
        >>> number(0.98765, "eval/accuracy"), number(12345), number(1.5e-05), number([0.5, 0.25, 1.0])
        ('98.77%', '12,345', '1.5e-05', '0.5 (0.25 to 1)')
    """
    if isinstance(value, list) and value and all(isinstance(one, (int, float)) for one in value):
        members = sorted(one for one in value if math.isfinite(one))
        if not members:
            return "not finite"
        half = len(members) // 2
        middle = (members[half] + members[-half - 1]) / 2
        return f"{number(middle, name)} ({number(members[0], name)} to {number(members[-1], name)})"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if "accuracy" in name and 0 <= value <= 1:
        return f"{value:.2%}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return a time in seconds as text.

    Example:
        >>> duration(0.25), duration(75), duration(7500)
        ('0.25 s', '1 min 15 s', '2 h 05 min')
    """
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"
