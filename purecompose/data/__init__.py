"""Data sets in memory and on disk, dealt out in keyed order, and the image sets of the examples."""

from purecompose.data.arrays import Arrays, Split, arrays, split
from purecompose.data.images import ImageData, load
from purecompose.data.loaders import SkippingWarning, epoch_batches
from purecompose.data.map_style import Loader, loader
from purecompose.data.prefetch import prefetch


__all__ = [
    "Arrays",
    "ImageData",
    "Loader",
    "SkippingWarning",
    "Split",
    "arrays",
    "epoch_batches",
    "load",
    "loader",
    "prefetch",
    "split",
]
