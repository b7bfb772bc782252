"""Rooms stand on floors: every import goes down, as the table in CONTRIBUTING.md says."""

import ast
import pathlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest


ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "purecompose"
FILES = sorted(PACKAGE.rglob("*.py"))
ROWS = re.findall(r"^\| (\d+) \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
TABLE = [(room, int(floor)) for floor, rooms in ROWS for room in re.findall(r"`(\w+)`", rooms)]
FLOORS = dict(TABLE)


class Import(NamedTuple):
    """One name that a file takes from the package."""

    room: str
    line: int
    is_on_top: bool


def room_of(file: pathlib.Path) -> str:
    """The module, or the package as a whole."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


ROOMS = {room_of(file) for file in FILES}


def imports_in(source: str) -> Iterator[Import]:
    """All imports from the package, by the room they come from."""
    module = ast.parse(source)
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == "purecompose":
                # A name that is no room is one of the public names.
                room = rest[0] if rest and rest[0] in ROOMS else "__init__"
                yield Import(room, node.lineno, node in module.body)


def complaints(room: str, source: str) -> list[str]:
    """What is wrong with the imports of a room's file."""
    found = []
    for room_of_import, line, is_on_top in imports_in(source):
        if not is_on_top:
            found.append(f"line {line}: imports {room_of_import} elsewhere than at the top of the file")
        if room_of_import != room and FLOORS[room_of_import] >= FLOORS[room]:
            floors = f"floor {FLOORS[room]} imports {room_of_import} of floor {FLOORS[room_of_import]}"
            found.append(f"line {line}: {room} of {floors}")
    return found


def test_every_room_is_in_the_table_once() -> None:
    assert {room for room, count in Counter(room for room, _ in TABLE).items() if count > 1} == set()
    assert set(FLOORS) == ROOMS
    assert [int(floor) for floor, _ in ROWS] == list(range(len(ROWS)))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_to_lower_floors(file: pathlib.Path) -> None:
    assert complaints(room_of(file), file.read_text()) == []


@pytest.mark.parametrize(
    ("room", "source", "expected"),
    [
        ("event", "from purecompose.state import State", "event of floor 1 imports state of floor 6"),
        ("event", "import purecompose.tree", "event of floor 1 imports tree of floor 1"),
        ("loop", "from purecompose import losses, compose", "imports compose of floor 10"),
        ("fit", "from purecompose import State", "imports __init__ of floor 16"),
        ("fit", "def run():\n    from purecompose.state import State", "line 2: imports state elsewhere"),
        ("fit", "if TYPE_CHECKING:\n    from purecompose.state import State", "line 2: imports state elsewhere"),
    ],
)
def test_an_import_that_goes_up_is_found(room: str, source: str, expected: str) -> None:
    (complaint,) = complaints(room, source)
    assert expected in complaint


def test_imports_inside_a_package_are_free() -> None:
    assert complaints("optim", "from purecompose.optim.lists import add\nfrom purecompose.schedule import number") == []


def test_the_package_imports_no_compiler() -> None:
    """Which takes two seconds: only a step that is compiled needs it."""
    compilers = "{'torch._dynamo', 'torch._inductor'}"
    code = f"import sys, purecompose; print(sorted({compilers} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"
