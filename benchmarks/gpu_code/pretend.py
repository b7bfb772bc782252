"""Answers to what torch, Inductor and Triton ask of a device, so that they write code for one that is not there.

The answers replace functions of torch and Triton for the rest of the process, which should do nothing else.
"""

import contextlib
import ctypes
import importlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_code.devices import H100, Device


CUDA = torch.device("cuda", 0)


class InterfaceError(RuntimeError):
    """torch or Triton is not as this harness knows it."""


def replace(path: str, value: Any) -> None:
    """Replace an attribute of a module or a class, such as `"torch.cuda.is_available"`.

    Raises:
        InterfaceError: There is no such attribute.
    """
    module, _, name = path.rpartition(".")
    owner = find(module)
    if not hasattr(owner, name):
        raise InterfaceError(f"torch {torch.__version__} has no {path}, which the harness replaces; {_ADVICE}")
    setattr(owner, name, value)


def find(path: str) -> Any:
    """Return a module, or what is in one, by its full name.

    Raises:
        InterfaceError: There is none.
    """
    names = path.split(".")
    for end in range(len(names), 0, -1):
        try:
            found = importlib.import_module(".".join(names[:end]))
        except ModuleNotFoundError:
            continue
        for name in names[end:]:
            if not hasattr(found, name):
                break
            found = getattr(found, name)
        else:
            return found
    raise InterfaceError(f"torch {torch.__version__} has no {path}, which the harness needs; {_ADVICE}")


def pretend(device: Device = H100) -> None:
    """Let torch, Inductor and Triton behave as if a device were present.

    Raises:
        InterfaceError: torch is not a CUDA build, the stand-ins are missing, or an interface has moved.
    """
    check_environment()
    find("torch._C")._ensureCUDADeviceGuardSet = lambda: None
    folder = pathlib.Path(os.environ["GPU_CODE_STAND_INS"])
    ctypes.CDLL(str(folder / "device_guard.so")).install_device_guard()
    _replace_device(device)
    _replace_triton_driver(device)
    _replace_cudnn()
    _fold_constants_on_host()
    replace("torch._inductor.config.shape_padding", False)  # products are padded where a measurement says so


def check_environment() -> None:
    """Raise an `InterfaceError` unless this is a CUDA build of torch, with the stand-ins."""
    if torch.version.cuda is None or "GPU_CODE_STAND_INS" not in os.environ:
        raise InterfaceError(
            f"GPU code is written by a CUDA build of torch with stand-ins for its driver, and this is torch "
            f"{torch.__version__}: start by `bash benchmarks/gpu_code/run`, with GPU_CODE_PYTHON naming a Python that "
            "has such a torch"
        )


def _replace_device(device: Device) -> None:
    facts, (major, minor) = device.facts, device.capability
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "_DeviceGuard": lambda device: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
        "get_device_name": lambda device=None: facts.name,
        "get_device_capability": lambda device=None: device_capability,
        "get_device_properties": lambda device=None: facts,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
    }
    device_capability = (major, minor)
    for name, answer in answers.items():
        replace(f"torch.cuda.{name}", answer)
    interface = "torch._dynamo.device_interface.CudaInterface"
    replace(f"{interface}.is_available", staticmethod(lambda: True))
    replace(f"{interface}.get_compute_capability", staticmethod(lambda device=None: f"{major}{minor}"))
    replace(f"{interface}.get_raw_stream", staticmethod(lambda device: 0))
    replace(f"{interface}.get_device_properties", staticmethod(lambda device=None: facts))
    replace(f"{interface}.Worker.get_device_properties", staticmethod(lambda device=None: facts))
    # Fake tensors would otherwise start the driver.
    replace("torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init", property(lambda self: True))


def _replace_triton_driver(device: Device) -> None:
    target = find("triton.backends.compiler.GPUTarget")("cuda", 10 * device.capability[0] + device.capability[1], 32)

    class Driver:
        """Triton's view of the device."""

        launcher_cls = None

        def get_current_target(self) -> Any:
            return target

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return CUDA

        def map_python_to_cpp_type(self, name: str) -> str:
            return name

    find("triton.runtime.driver.driver").set_active(Driver())


def _replace_cudnn() -> None:
    """Let cuDNN compute all convolutions, in channels-last where an image or a filter is."""

    def memory_format(image: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
        is_last = any(suggested(x) is torch.channels_last for x in (image, weight))
        return torch.channels_last if is_last else torch.contiguous_format

    suggested = find("torch._prims_common.suggest_memory_format")
    cudnn = find("torch._C._ConvBackend.Cudnn")
    replace("torch._C._select_conv_backend", lambda *args, **kwargs: cudnn)
    replace("torch._C._conv_determine_backend_memory_format", memory_format)
    replace("torch.backends.cudnn.is_available", lambda: True)


def _fold_constants_on_host() -> None:
    """Let Inductor compute the constants that it folds, one element each, on the host."""

    class OnHost(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            def on_host(value: Any) -> Any:
                return torch.device("cpu") if isinstance(value, torch.device) else value

            given = kwargs or {}
            return func(*map(on_host, args), **{name: on_host(value) for name, value in given.items()})

    path = "torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder._deduce_value"
    deduce = find(path)

    def deduce_on_host(self: Any, node: Any) -> Any:
        with OnHost():
            return deduce(self, node)

    replace(path, deduce_on_host)


_ADVICE = "adapt benchmarks/gpu_code, or take the version of torch that benchmarks/gpu_code/run names"
