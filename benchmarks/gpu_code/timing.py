"""Predicted times, by a model of three terms.

A kernel takes the longer of two times: its bytes at the device's bandwidth, and its operations at the peak rate of
their dtype. Kernels of a CUDA graph start one after the other, with a gap between them. Without CUDA graphs, the host
launches them one after the other while the device works, and the slower of the two decides:

    device = sum(gap + max(bytes / bandwidth, operations / rate))
    with CUDA graphs = device
    without = max(device, launches * launch)

A real step takes longer: no kernel reaches peak rates, and short ones leave most of the device idle. The model is for
comparing code of the same products.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from benchmarks.gpu_code.devices import Device
from benchmarks.gpu_code.writing import Code, Node


class Times(NamedTuple):
    """Predicted seconds of a step."""

    with_graphs: float
    without_graphs: float


def times(codes: Iterable[Code], device: Device) -> Times:
    """Return the predicted times of a step that runs these codes one after the other.

    Args:
        codes: The codes.
        device: The device.
    """
    codes = list(codes)
    launches = sum(code.num_launches for code in codes)
    work = sum(node_time(node, device) for code in codes for node in code.nodes)
    on_device = work + launches * device.gap
    return Times(on_device, max(on_device, launches * device.launch))


def node_time(node: Node, device: Device) -> float:
    """Return the predicted seconds of one kernel, without its launch."""
    rate = device.rates.get(node.dtype, device.rates[torch.float32])
    return max(node.num_bytes / device.bandwidth, node.flops / rate)
