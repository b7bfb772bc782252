"""`export`: the network of a recorded run in files for other programs."""

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch

from purecompose import batch as batches, saving
from purecompose._support.messages import say, with_urls
from purecompose.cli.options import File, Shown, UsageError, check_target, reported_as
from purecompose.cli.results import KeptRun, Which, at_checkpoint
from purecompose.cli.setup import arithmetic_of
from purecompose.core.state import State
from purecompose.surgery import with_weights


_FORMS: Mapping[str, Callable[[State, Any, Path], Path]] = {
    ".onnx": lambda state, inputs, path: saving.export_onnx(state, inputs, path, dynamic_shapes=_any_batch()),
    ".pt2": lambda state, inputs, path: saving.export_program(state, inputs, path, dynamic_shapes=_any_batch()),
    ".safetensors": lambda state, inputs, path: saving.save_weights(state, path),
}
"""The functions that write a file, by its ending."""


def export(
    kept: KeptRun,
    *,
    out: list[File],
    checkpoint: Which = "newest",
    weights: Annotated[str, Shown("NAME")] | None = None,
) -> None:
    """Write the network of a run's checkpoint to files for other programs.

    Args:
        kept: The run.
        out: File, whose ending gives its form: *.onnx; *.pt2 for torch.export; *.safetensors for the weights alone; may
            be repeated.
        checkpoint: Name of the checkpoint, or one of these.
        weights: Write the averages of a method instead, such as ema.

    Examples:
        python -m purecompose export runs/a --out net.onnx
        python -m purecompose export runs/a --checkpoint best --out net.pt2 --out net.safetensors --weights ema

    Networks are in evaluation mode, and accept batches of any size if their code does.
    """
    for path in out:
        if Path(path).suffix.lower() not in _FORMS:
            raise UsageError(f"--out: {path}: expected a file name that ends in {', '.join(_FORMS)}")
        check_target("--out", path)
    if kept.settings().get("seeds", 1) > 1:
        raise UsageError(f"{kept.run} trained a population; only a single network can be exported")
    settings, data = kept.completed(checkpoint)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it names packages that are not installed
    with arithmetic_of(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's exporters
        trained = at_checkpoint(kept.run, checkpoint, settings, data)
        state = trained.state.to("cpu")
        with reported_as("--weights"):
            state = state if weights is None else with_weights(state, weights)
        first = next(iter(trained.setup.test_data.to("cpu")))
        inputs = batches.get(first, state.context.input_field)[:2]  # sizes of 1 would become constants
        for path in out:
            with reported_as("--out", OSError):
                _FORMS[Path(path).suffix.lower()](state, inputs, Path(path))
            say(f"{with_urls(trained.checkpoint)} in {path}")


def _any_batch() -> Any:
    """Return dynamic shapes in which the first size of the only argument is open."""
    return ({0: torch.export.Dim.AUTO},)
