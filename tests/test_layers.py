"""Every import goes to a lower layer, as the table in CONTRIBUTING.md says, and no two modules import each other."""

import ast
import pathlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest


ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "purecompose"
FILES = sorted(PACKAGE.rglob("*.py"))
ROWS = re.findall(r"^\| (\d+) \| (.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
TABLE = [(entry, int(layer)) for layer, entries in ROWS for entry in re.findall(r"`(\w+)`", entries)]
# The public names and the module that starts the command line are above all layers.
LAYERS = {**dict(TABLE), "__init__": len(ROWS), "__main__": len(ROWS)}
# The command line is written against the public names, as a user's program is.
READS_PUBLIC_NAMES = {"cli"}


class Import(NamedTuple):
    """One name that a file imports from the package."""

    entry: str
    """The module or package directly under `purecompose`."""
    module: str
    line: int
    is_on_top: bool


def entry_of(file: pathlib.Path) -> str:
    """Return the module or package directly under `purecompose` to which a file belongs."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(file: pathlib.Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


ENTRIES = {entry_of(file) for file in FILES}
MODULES = {module_of(file): file for file in FILES}


def imports_in(source: str) -> Iterator[Import]:
    """Yield all imports from the package, also those by a string."""
    module = ast.parse(source)
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [ast.literal_eval(one) for one in node.args if isinstance(one, ast.Constant)]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == "purecompose":
                # Any other name is one of the public names.
                entry = rest[0] if rest and rest[0] in ENTRIES else "__init__"
                imported = name if name in MODULES else name.rpartition(".")[0]
                yield Import(entry, imported, node.lineno, node in module.body or isinstance(node, ast.Call))


def complaints(entry: str, source: str) -> list[str]:
    """Return what is wrong with the imports of an entry's file."""
    found = []
    for imported in imports_in(source):
        if not imported.is_on_top and entry != "__init__":  # public names are imported on first use
            found.append(f"line {imported.line}: imports {imported.entry} elsewhere than at the top of the file")
        if imported.entry == "__init__" and entry in READS_PUBLIC_NAMES:
            continue
        if imported.entry != entry and LAYERS[imported.entry] >= LAYERS[entry]:
            layers = f"layer {LAYERS[entry]} imports {imported.entry} of layer {LAYERS[imported.entry]}"
            found.append(f"line {imported.line}: {entry} of {layers}")
    return found


def cycle_among(imports: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle, the first one again at the end; empty where there are none."""
    done: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for imported in sorted(imports.get(module, ())):
            if cycle := search(imported, [*path, module]):
                return cycle
        done.add(module)
        return []

    return next((cycle for module in sorted(imports) if (cycle := search(module, []))), [])


def test_every_entry_is_in_the_table_once() -> None:
    assert {entry for entry, count in Counter(entry for entry, _ in TABLE).items() if count > 1} == set()
    assert set(LAYERS) == ENTRIES
    assert [int(layer) for layer, _ in ROWS] == list(range(12))
    assert len(ENTRIES) <= 30


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_to_lower_layers(file: pathlib.Path) -> None:
    assert complaints(entry_of(file), file.read_text()) == []


def test_no_modules_import_each_other() -> None:
    imports = {
        name: {imported.module for imported in imports_in(file.read_text())} - {name} for name, file in MODULES.items()
    }
    assert cycle_among(imports) == []


@pytest.mark.parametrize(
    ("entry", "source", "expected"),
    [
        ("time", "from purecompose.core.state import State", "time of layer 2 imports core of layer 5"),
        ("time", "import purecompose.random", "time of layer 2 imports random of layer 2"),
        ("core", "importlib.import_module('purecompose.run.fit')", "core of layer 5 imports run of layer 8"),
        ("core", "from purecompose import losses, algorithms", "imports algorithms of layer 7"),
        ("run", "from purecompose import State", "imports __init__ of layer 12"),
        ("run", "def fit():\n    from purecompose.core.state import State", "line 2: imports core elsewhere"),
        ("run", "if TYPE_CHECKING:\n    from purecompose.core.state import State", "line 2: imports core elsewhere"),
    ],
)
def test_an_import_that_goes_up_is_found(entry: str, source: str, expected: str) -> None:
    (complaint,) = complaints(entry, source)
    assert expected in complaint


def test_imports_inside_an_entry_may_go_either_way_but_not_in_a_circle() -> None:
    assert complaints("optim", "from purecompose.optim.lists import add\nfrom purecompose.schedule import number") == []
    assert cycle_among({"a": {"b"}, "b": {"c", "d"}, "c": {"d"}, "d": {"b"}}) == ["b", "c", "d", "b"]
