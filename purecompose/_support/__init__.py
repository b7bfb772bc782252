"""Shared helpers: argument checks, tables, files, devices, warnings; the library's version, and the public names of a
module, by the rule of type checkers: each is declared once.
"""

import ast
import dis
import inspect
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from purecompose._support.other_names import instead_of_name


__version__ = "0.1.0"
"""The version of the library, MAJOR.MINOR.PATCH."""

INSTALLED: dict[str, Callable[..., Any]] = {}
"""Functions of higher layers that lower ones call. The public names, which are above all layers, install them: how a
step is called within "torch.compile"."""


def public_names(source: str) -> list[str]:
    """Return the public names of a module, given its text: those in `__all__`, or what it defines or imports as itself.

    `from .sgd import sgd as sgd` imports as itself, also for type checkers only; names with an underscore are private.
    """
    names = list[str]()
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name("__all__")], value=listed):
                return ast.literal_eval(listed)
            case (
                ast.ImportFrom(names=aliases)
                | ast.If(test=ast.Name("TYPE_CHECKING"), body=[ast.ImportFrom(names=aliases)])
            ):
                names += [alias.asname for alias in aliases if alias.asname and alias.asname == alias.name]
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                names.append(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
    return [name for name in names if name[0] != "_" or name == "__version__"]


def publish(module: str) -> None:
    """Let a public module list its public names only, for completion, and explain names that it does not have."""

    def names() -> list[str]:
        try:
            return sorted(public_names(inspect.getsource(sys.modules[module])))
        except OSError:  # installed without sources
            return sorted(vars(sys.modules[module]))

    contents = vars(sys.modules[module])
    contents["__dir__"] = names
    contents.setdefault("__getattr__", lambda name: refuse(module, name))  # the package has its own


def refuse(module: str, name: str) -> NoReturn:
    """Raise the error of a module without this attribute, for its `__getattr__`, with the name to write if known."""
    hint = instead(name, module)
    text = f"module {module!r} has no attribute {name!r}{hint and ';' + hint}"
    asks = sys._getframe(2)
    if hint and asks.f_code.co_code[asks.f_lasti] == dis.opmap["IMPORT_FROM"]:
        raise ImportError(f"cannot import name {name!r} from {module!r};{hint}", name=module)
    # With the module, Python adds what is spelled in a similar way.
    raise AttributeError(text, name=name, obj=None if hint else sys.modules[module])


def instead(name: str, module: str = "purecompose") -> str:
    """Return a hint for a name that a module, or an object, does not have; "" if nothing is known of it."""
    return "" if name.startswith("_") else instead_of_name(name) or _spelled(module, name)


def _spelled(module: str, name: str) -> str:
    """Return a hint at a public name that differs in its module, in capitals or in underscores only."""
    package = sys.modules["purecompose"]
    modules = [package, *(member for member in map(package.__dict__.get, dir(package)) if inspect.ismodule(member))]
    for each in sorted(modules, key=lambda each: each.__name__ != module):
        for one in dir(each):
            if one.replace("_", "").lower() == name.replace("_", "").lower():
                return f" write {each.__name__.replace('purecompose', 'pc', 1)}.{one}"
    return ""
