"""Data sets in memory, dealt out in keyed order, and the image sets of the examples."""

from purecompose.data.arrays import Arrays, Split, arrays, split
from purecompose.data.images import ImageData, load
from purecompose.data.prefetch import prefetch


__all__ = ["Arrays", "ImageData", "Split", "arrays", "load", "prefetch", "split"]
