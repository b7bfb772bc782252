"""Displays of the progress of a run that renew themselves: a bar in a terminal, and one in a notebook."""

import sys
from typing import Any, NamedTuple, Protocol

from purecompose._support.html import fragment, note


class Shown(NamedTuple):
    """The contents of a display."""

    doing: str
    share: float | None
    """Share of the run that is done, 0 to 1; `None` if the run has no length."""
    done: str
    times: str
    numbers: str


class Display(Protocol):
    """A display."""

    def show(self, shown: Shown) -> None:
        """Replace the contents."""
        ...

    def close(self) -> None:
        """Leave the last contents, and restore the terminal; a second call does nothing."""
        ...


class TerminalDisplay:
    """A bar, which measures the times itself, with the numbers below it, since both do not fit into 80 columns."""

    def __init__(self, console: Any) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.table import Column
        from rich.text import Text

        self._bar = Bar(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=10)),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.fields[done]}", table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            TextColumn("left", table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task("training", total=None, done="")
        self._numbers = Text(no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._bar, self._numbers), console=console, refresh_per_second=5)

    def show(self, shown: Shown) -> None:
        """Replace the contents; the first call opens the display."""
        self._numbers.plain = shown.numbers
        total, completed = None if shown.share is None else 1.0, shown.share or 0.0
        self._bar.update(self._task, description=shown.doing, total=total, completed=completed, done=shown.done)
        self._live.start()

    def close(self) -> None:
        """Leave the last contents, and restore the terminal."""
        self._live.stop()


class NotebookDisplay:
    """A bar in the output of the running cell."""

    def __init__(self) -> None:
        from IPython.display import DisplayHandle  # pyright: ignore[reportMissingImports]

        self._handle, self._is_open = DisplayHandle(), False

    def show(self, shown: Shown) -> None:
        """Replace the contents; the first call opens the display."""
        line = "  ".join([shown.doing, shown.done, shown.times])
        bar = "" if shown.share is None else f'<div class="bar"><div style="width: {shown.share:.1%}"></div></div>'
        content = {
            "text/html": fragment(bar, note(line.replace("  ", " · "), ""), note(shown.numbers.replace("  ", " · "))),
            "text/plain": f"{line}  {shown.numbers}",
        }
        (self._handle.update if self._is_open else self._handle.display)(content, raw=True)
        self._is_open = True

    def close(self) -> None:
        """Leave the last contents."""


def is_in_notebook() -> bool:
    """Return whether this runs in a kernel of Jupyter, whose outputs can be replaced; IPython in a terminal is not."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None
