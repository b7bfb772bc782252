"""Functions that Dynamo, the tracer of `torch.compile`, calls instead of tracing them.

`torch.compiler.disable` does this too, but imports Dynamo, which takes two seconds, and its functions do not learn
whether they are called within `torch.compile`. `DispatchMode` is a `TorchDispatchMode` that does not import Dynamo.
"""

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode


try:
    _dynamo: Any = importlib.import_module("torch._C._dynamo.eval_frame")
except ImportError:  # a private module, which a later version may not have: Dynamo then traces these functions
    _dynamo = None


Fn = TypeVar("Fn", bound=Callable[..., Any])

get_eval_frame_callback: Callable[[], Any] = getattr(_dynamo, "get_eval_frame_callback", lambda: None)


def called_by_dynamo(reason: str) -> Callable[[Fn], Fn]:
    """Return a decorator for a function that Dynamo calls after a break of its graph.

    In the function `get_eval_frame_callback()` is not `None` if it is called within `torch.compile`. Dynamo would then
    trace the functions that it calls; `without_dynamo` prevents this.

    Args:
        reason: Text for Dynamo's error where its graph must not break (`fullgraph=True`).
    """

    def mark(fn: Any) -> Any:
        fn._torchdynamo_disable, fn._torchdynamo_disable_msg = True, reason
        if _dynamo is not None:
            skip = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT)
            _dynamo.set_code_exec_strategy(fn.__code__, skip)
        return fn

    return mark


@called_by_dynamo("it turns Dynamo off")
def without_dynamo(fn: Callable[[Any], Any]) -> Any:
    """Call `fn(backend)` with Dynamo turned off, where `backend` is that of the `torch.compile` around it."""
    callback = _dynamo.set_eval_frame(None)
    backend: Any = callback
    try:
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        return fn(backend)
    finally:
        _dynamo.set_eval_frame(callback)


class DispatchMode(TorchDispatchMode):
    """Base class of modes whose `__torch_dispatch__` Dynamo does not trace.

    torch sees to this by importing Dynamo when the mode is first used: one second, in the first step of a run that
    compiles nothing.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__torch_dispatch__ = called_by_dynamo("it watches operations")(cls.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
