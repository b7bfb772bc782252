"""Inductor's start: its modules, its folders, and its C++ compiler, made ready in threads while a step is traced."""

import contextlib
import functools
import importlib
import os
import pathlib
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch


class Inductor(NamedTuple):
    """The modules of torch that compile a graph."""

    package: Any
    compile_fx: Any
    decomposition: Any
    functions: Any
    graph: Any
    ir: Any
    lowering: Any
    scheduler: Any
    virtualized: Any


def start_inductor(device: torch.device) -> Inductor:
    """Import Inductor and, for the CPU, begin to make its C++ compiler ready, both at most once in a process."""
    ensure_cache()
    builder, modules = _import()
    if device.type == "cpu":
        _start_compiler(builder)
    return modules.result()


def inductor_for(device: torch.device) -> Inductor:
    """Return Inductor, ready to compile for a device."""
    modules = start_inductor(device)
    if device.type == "cpu":
        _start_compiler(_import().builder).result()
    return modules


class _Imports(NamedTuple):
    builder: Future[tuple[Any, Any, Any]]
    """Inductor's configuration, its instruction sets, and its code cache, which calls the C++ compiler."""
    modules: Future[Inductor]


@functools.cache
def _import() -> _Imports:
    """Return futures of the modules, which are imported on first use because it takes seconds.

    Ctrl-C does not interrupt the import in a thread: Inductor's kernels are registered in a table, of which an import
    that is interrupted and started again would leave some out.
    """
    pool = ThreadPoolExecutor(1)
    imports = _Imports(pool.submit(_import_builder), pool.submit(_import_modules))
    pool.shutdown(wait=False)
    return imports


def mode_options(mode: str, dynamic: Any) -> dict[str, Any]:
    return importlib.import_module("torch._inductor").list_mode_options(mode, dynamic)


def constant_source(name: str) -> Any:
    """Return where torch's errors say that an open size comes from."""
    return importlib.import_module("torch._dynamo.source").ConstantSource(name)


def _import_builder() -> tuple[Any, Any, Any]:
    names = ("config", "cpu_vec_isa", "codecache")
    modules: list[Any] = [importlib.import_module(f"torch._inductor.{name}") for name in names]
    config, instructions, cache = modules
    # Inductor keeps precompiled headers, which are compiled into kernels, under the shared temporary folder, whatever
    # TORCHINDUCTOR_CACHE_DIR says. They belong into our cache folder if that is in use.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") == str(_cache_folder()):
        cache._HEADER_DIR = str(_cache_folder() / "precompiled_headers")
        cache._HEADER_LOCK_DIR = str(_cache_folder() / "precompiled_headers" / "locks")
    return config, instructions, cache


def _import_modules() -> Inductor:
    return Inductor(*(importlib.import_module(f"torch{name}") for name in _MODULES))


_MODULES = (
    "._inductor",
    "._inductor.compile_fx",
    "._inductor.decomposition",
    ".utils._sympy.functions",
    "._inductor.graph",
    "._inductor.ir",
    "._inductor.lowering",
    "._inductor.scheduler",
    "._inductor.virtualized",
)


@functools.cache
def _start_compiler(builder: Future[tuple[Any, Any, Any]]) -> Future[None]:
    """Return a future that is done when the vector instructions are known; the header is compiled after that.

    Both wait for processes, so the thread leaves Python's lock to the import and to the trace of the step. Inductor
    does again what fails here, with errors that say what is wrong.
    """
    pool = ThreadPoolExecutor(1)
    known = pool.submit(_find_instructions, builder)
    pool.submit(_precompile_header, builder)
    pool.shutdown(wait=False)
    return known


def _find_instructions(builder: Future[tuple[Any, Any, Any]]) -> None:
    """Let Inductor take the vector instructions that torch's own kernels use for granted.

    It would compile a file with each set of instructions that the processor has, four seconds on a new machine, to see
    whether compiler and torch support it; a compiler that does not is too old for Inductor's code as well.
    """
    with contextlib.suppress(Exception):
        config, instructions, _ = builder.result()
        flags = instructions.x86_isa_checker()
        if torch.backends.cpu.get_cpu_capability() == ("AVX512" if "avx512" in flags else "AVX2"):
            with config.patch({"cpp.vec_isa_ok": True}):
                instructions.valid_vec_isa_list()  # keeps its result


def _precompile_header(builder: Future[tuple[Any, Any, Any]]) -> None:
    """Let Inductor compile the header of all its kernels, as it does before the first of them."""
    with contextlib.suppress(Exception):
        _, _, cache = builder.result()
        cache.CppPythonBindingsCodeCache.load_async("")


def _cache_folder() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "purecompose" / f"torch-{torch.__version__}"


def _is_torchs_default(folder: str) -> bool:
    """Return whether this is the folder that torch writes into the environment, at the latest when it first traces."""
    place, name = os.path.split(folder)
    return place == tempfile.gettempdir() and name.startswith("torchinductor_")


@contextlib.contextmanager
def replaced(owner: type, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Return a scope in which a method of a class of Inductor is another function, which gets the method first."""
    plain: Any = owner.__dict__[name]
    is_of_class = isinstance(plain, classmethod)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return function(plain.__func__ if is_of_class else plain, *args, **kwargs)

    try:
        setattr(owner, name, classmethod(changed) if is_of_class else changed)
        yield
    finally:
        setattr(owner, name, plain)


def ensure_cache() -> None:
    """Set Inductor's cache on disk to a folder that only this user can write to, unless the user has named one.

    Code found in the cache is run. By default the cache has a fixed name under the shared temporary folder, where
    another user could have placed files first.
    """
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if named is not None and not _is_torchs_default(named):
        return
    folder = _cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError as error:
        warnings.warn(f"no cache folder at {folder} ({error}): compiled steps go to the temporary one", stacklevel=2)
        return
    is_ours = not hasattr(os, "getuid") or facts.st_uid == os.getuid()
    if not is_ours or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{folder} can be written to by others, and what lies there would be run: chmod 700 it, or set "
            "TORCHINDUCTOR_CACHE_DIR to a folder of your own"
        )
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
