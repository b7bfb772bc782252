"""The public names of a module, by the rule of type checkers: each is declared once."""

import ast
import inspect
import sys
from collections.abc import Callable


def public_names(source: str) -> list[str]:
    """Return the public names of a module, given its text, in the order of the text.

    They are those in `__all__`; without it, the names that the module defines, and those that it imports as themselves
    (`from .sgd import sgd as sgd`), also for type checkers only, unless they begin with an underscore.
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


def lister(module: str) -> Callable[[], list[str]]:
    """Return the `__dir__` of a public module: completion offers its public names, and not what it imports.

    Example:
        >>> import purecompose as pc
        >>> "accuracy" in dir(pc.metrics), "torch" in dir(pc.metrics), hasattr(pc.metrics, "torch")
        (True, False, True)
    """

    def listed() -> list[str]:
        try:
            return sorted(public_names(inspect.getsource(sys.modules[module])))
        except OSError:  # installed without sources
            return sorted(vars(sys.modules[module]))

    return listed
