"""A `TorchDispatchMode` that does not import Dynamo."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from purecompose._support.dynamo import called_by_dynamo


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
