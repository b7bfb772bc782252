"""Compiled parts of a step replayed as CUDA graphs.

The step of a small network is a hundred short kernels, and launching them costs more than running them. Nothing in a
step reads a host clock or a generator, and donated buffers keep their addresses, so CUDA graphs record the launches.
"""

from typing import Any

import torch
from torch import Tensor, fx

from purecompose.transforms.compilation.backends import Compiled


def check_on_device(graph: fx.GraphModule, device: torch.device) -> None:
    """Raise a `ValueError` if a graph computes with tensors on the host, whose numbers a recording would repeat."""
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.device != device:
            what = "an argument" if node.op == "placeholder" else f"the result of {node.target}"
            raise ValueError(
                f"compile: mode='reduce-overhead': {what}, {value.dtype} of shape {tuple(value.shape)}, is on "
                f"{value.device}, and the state on {device}; a CUDA graph would repeat its numbers. Create it on the "
                "device of the inputs, or leave the mode out"
            )


class Replay:
    """A compiled part, recorded at its second call: the first one loads kernels and chooses algorithms.

    A recording repeats the same kernels with the same arguments, so it assumes of the part and its calls:

    * *Fixed addresses.* The bound arguments are donated buffers, which stay where they are; a part has a recording for
      each set of them. All other arguments are copied to fixed places. What the part allocates, results included, is in
      the recording's own memory, which the next replay overwrites, so results are copied out.
    * *No host work between kernels.* The part is one graph that reads no value and copies nothing between host and
      device. It draws by counters from keys, which are arguments, and not from a generator. Time and schedules are
      an argument too, the clock, which is sent to the device before the call.
    * *Static shapes and numbers.* The look-up of the part has compared shapes, strides and dtypes of all arguments.
      What kernels take by value, such as sizes and the settings of an optimizer, are constants of the code.

    `Options.checked` refuses steps of which this is not true. Of a step in several parts, only the first one is
    recorded, since the results of one part, which the next one takes, are in new memory.

    Args:
        call: The part.
        num_bound: The number of leading arguments that are the same tensors in every call. The others are copied to
            fixed places.
    """

    def __init__(self, call: Compiled, num_bound: int) -> None:
        self._call, self._num_bound = call, num_bound
        self._is_warm = False
        self._graph: Any = None
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []

    def __call__(self, args: list[Tensor]) -> list[Tensor]:
        """Return the part's results, in new memory."""
        if self._graph is None:
            if not self._is_warm:
                results = list(self._call(args))
                self._is_warm = True
                return results
            self._record(args)
        else:
            for place, value in zip(self._inputs, args[self._num_bound :], strict=True):
                _memory_of(place).copy_(_memory_of(value), non_blocking=True)
        self._graph.replay()  # pyright: ignore[reportOptionalMemberAccess]
        return [output.clone() for output in self._outputs]

    def _record(self, args: list[Tensor]) -> None:
        """Record the launches with their addresses; this runs nothing."""
        self._inputs = [_alike(tensor) for tensor in args[self._num_bound :]]
        graph = torch.cuda.CUDAGraph()
        # The current device may be another one; a thread that pins batches, say, does not disturb the recording.
        stream = torch.cuda.Stream(args[0].device)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._outputs = list(self._call([*args[: self._num_bound], *self._inputs]))
        self._graph = graph


def _alike(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, which the part relies on; `clone` would close gaps and copy repeats."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    _memory_of(copy).copy_(_memory_of(tensor))
    return copy


def _memory_of(tensor: Tensor) -> Tensor:
    """Return the memory between a tensor's first and last element, which can be copied for any strides."""
    if tensor.is_contiguous():
        return tensor
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,))
