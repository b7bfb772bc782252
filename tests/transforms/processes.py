"""Programs that run in several processes at once."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.pages import ROOT


def errors_of(attempts: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Return the errors of attempts that fail, by their names."""
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except (TypeError, ValueError, RuntimeError) as error:
            found[name] = str(error)
    return found


def run_processes(module: str, folder: Path, size: int, *arguments: str, timeout: float = 300) -> list[dict[str, Any]]:
    """Run a module once for each rank, and return what each has saved.

    Args:
        module: The module, which is given a file for the process group's store, its rank, the first argument, the
            folder, and further arguments. It saves its results as `{rank}.pt` in the folder.
        folder: The folder.
        size: The number of processes.
        arguments: The size, or the shape of the mesh, in words; and further arguments.
        timeout: Seconds for each process.
    """
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    shape, *others = arguments
    program = [sys.executable, "-m", module, str(folder / "store")]
    processes = [
        subprocess.Popen([*program, str(rank), shape, str(folder), *others], cwd=ROOT, env=environment)
        for rank in range(size)
    ]
    try:
        assert [process.wait(timeout) for process in processes] == [0] * size
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]
