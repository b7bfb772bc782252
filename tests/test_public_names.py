"""The public names: a frozen list, where they come from, and what they import."""

import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import types

import purecompose as pc
from purecompose import _support


ROOT = pathlib.Path(__file__).parents[1]
LIST = pathlib.Path(__file__).with_name("public_names.txt")
REMEDY = """
The public names have changed. If that is meant:
  * a name that was in a release stays for one more version and warns (CONTRIBUTING.md, "Releases");
  * each change has a line in CHANGELOG.md;
  * write the new list: python -m tests.test_public_names
"""
FIRST_STEP = """
import torch
import purecompose as pc
step = pc.compose(pc.loop_events, [pc.algorithms.label_smoothing(0.1)])
state = pc.State.create(torch.nn.Linear(2, 2), loss=pc.losses.cross_entropy, optimizer=pc.optim.sgd(0.1))
step(step.init(state), (torch.zeros(3, 2), torch.tensor([0, 1, 1])))
"""


def exported(module: types.ModuleType) -> list[str]:
    return _support.public_names(inspect.getsource(module))


def public_modules() -> dict[str, types.ModuleType]:
    """Return the modules with public names: the package, `testing`, and modules that are public names themselves."""
    found: dict[str, types.ModuleType] = {}

    def visit(path: str, module: types.ModuleType) -> None:
        if module in found.values():
            return
        found[path] = module
        for name in exported(module):
            if inspect.ismodule(member := getattr(module, name)):
                visit(f"{path}.{name}", member)

    visit("pc", pc)
    return found


def public_names() -> list[str]:
    return sorted(f"{path}.{name}" for path, module in public_modules().items() for name in exported(module))


def imported_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return set(done.stdout.split())


def test_public_names_are_those_that_are_listed() -> None:
    now, before = public_names(), LIST.read_text().split()
    changes = [f"+ {name}" for name in now if name not in before] + [f"- {name}" for name in before if name not in now]
    assert changes == [], REMEDY
    assert now == before, "the list is not sorted"


def test_public_modules_are_imported_by_their_public_paths_and_list_their_names() -> None:
    for path, module in public_modules().items():
        assert importlib.import_module(path.replace("pc", "purecompose", 1)) is module
        assert dir(module) == sorted(exported(module)), path


def test_names_in_the_documentation_exist_and_modules_among_them_can_be_imported() -> None:
    found: set[str] = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        found |= set(re.findall(r"\b(?:pc|purecompose)((?:\.[A-Za-z_]\w*)+)", page.read_text()))
    assert {".functional", ".metrics.accuracy", ".saving.save_weights"} <= found
    for name in sorted(found):
        path, value = "purecompose", pc
        for part in name.split(".")[1:]:
            if not inspect.ismodule(value):
                break
            path, value = f"{path}.{part}", getattr(value, part, None) or importlib.import_module(f"{path}.{part}")
            assert not inspect.ismodule(value) or importlib.import_module(path) is value, path


def test_all_files_give_the_same_version() -> None:
    given = {name: (ROOT / name).read_text() for name in ("pyproject.toml", "CITATION.cff")}
    found = {name: re.search(r"^version(?: =|:) \"?([\d.]+)", text, re.M) for name, text in given.items()}
    assert {name: match and match[1] for name, match in found.items()} == dict.fromkeys(given, pc.__version__)


def test_what_is_not_used_is_not_imported() -> None:
    """The compiler takes two seconds, which only a compiled step needs; the others are extras."""
    imported = imported_by(FIRST_STEP)
    assert "purecompose.core.state" in imported
    compiler, extras = {"torch._dynamo", "torch._inductor"}, {"hypothesis", "rich", "safetensors"}
    assert imported & {*compiler, *extras} == set()


if __name__ == "__main__":
    LIST.write_text("\n".join(public_names()) + "\n")
