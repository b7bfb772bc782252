"""Properties of the GPUs that code is written for and that times are predicted for.

Capabilities, sizes and limits are those of table "Technical Specifications per Compute Capability" of NVIDIA's CUDA C++
Programming Guide. Bandwidths and peak rates are those of the data sheets "NVIDIA H100 Tensor Core GPU" (SXM), "NVIDIA
A100 Tensor Core GPU" (80 GB, SXM) and "NVIDIA L4 Tensor Core GPU", without sparsity.

Launch costs are of the order of those in NVIDIA's technical blog, "Getting Started with CUDA Graphs" (2019): about 3 us
between the starts of short kernels that a C++ loop launches, 0.5 us within a CUDA graph. The host's cost of a launch
from Inductor's Python wrapper is assumed to be 6 us, on all devices.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch


@dataclass(frozen=True)
class Device:
    """A kind of GPU."""

    name: str
    capability: tuple[int, int]
    num_processors: int
    """Number of streaming multiprocessors."""
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes per second."""
    rates: dict[torch.dtype, float]
    """Operations per second of matrix products, by dtype."""
    l2_cache: int
    """Bytes."""
    shared_memory: int
    """Bytes of shared memory that one block may use."""
    launch: float = field(default=6e-6, kw_only=True)
    """Seconds that the host needs to launch a kernel or to call a library."""
    gap: float = field(default=0.5e-6, kw_only=True)
    """Seconds between two kernels of a CUDA graph."""

    @property
    def facts(self) -> SimpleNamespace:
        """The properties under the names of `torch.cuda.get_device_properties`."""
        major, minor = self.capability
        return SimpleNamespace(
            name=self.name,
            major=major,
            minor=minor,
            multi_processor_count=self.num_processors,
            total_memory=self.memory,
            L2_cache_size=self.l2_cache,
            shared_memory_per_block=48 * 2**10,
            shared_memory_per_block_optin=self.shared_memory,
            shared_memory_per_multiprocessor=self.shared_memory + 2**10,
            regs_per_multiprocessor=2**16,
            max_threads_per_multi_processor=1536 if self.capability == (8, 9) else 2048,
            max_threads_per_block=1024,
            warp_size=32,
            gcnArchName="",
            uuid="",
            pci_bus_id=0,
        )


def _rates(half: float, single: float, double: float) -> dict[torch.dtype, float]:
    return {torch.bfloat16: half, torch.float16: half, torch.float32: single, torch.float64: double}


H100 = Device(
    "NVIDIA H100 80GB HBM3", (9, 0), 132, 80 * 2**30, 3.35e12, _rates(989e12, 67e12, 67e12), 50 * 2**20, 227 * 2**10
)
A100 = Device(
    "NVIDIA A100-SXM4-80GB",
    (8, 0),
    108,
    80 * 2**30,
    2.039e12,
    _rates(312e12, 19.5e12, 19.5e12),
    40 * 2**20,
    163 * 2**10,
)
L4 = Device("NVIDIA L4", (8, 9), 58, 24 * 2**30, 0.3e12, _rates(121e12, 30.3e12, 0.47e12), 48 * 2**20, 99 * 2**10)

DEVICES = {"H100": H100, "A100": A100, "L4": L4}
