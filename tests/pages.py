"""Run the programs of a documentation page."""

import pathlib
import re
from importlib.util import find_spec
from typing import Any

import torch


ROOT = pathlib.Path(__file__).parents[1]


def run_page(name: str, section: str | None = None) -> dict[str, Any]:
    """Run a page's blocks one after the other and return their names; errors have the page's line numbers.

    A block "python requires PACKAGES" is left out unless these packages are installed. With the title of a section
    (###), only the blocks before the first of these sections run, and those of this one.
    """
    text = (ROOT / "docs" / name).read_text()
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)  # for the weights of the pages' networks
        for block in re.finditer(r"```python(?: requires (.*?))?\n(.*?)```", text, re.S):
            if any(find_spec(package) is None for package in (block[1] or "").split()):
                continue
            titles = re.findall(r"^### (.*)$", text[: block.start()], re.M)
            if section is not None and titles[-1:] not in ([], [section]):
                continue
            lines_before = text[: block.start(2)].count("\n")
            exec(compile("\n" * lines_before + block[2], name, "exec"), names)  # noqa: S102
    return names
