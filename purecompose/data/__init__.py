"""Data sets in memory and on disk in keyed order, and image sets and texts for the examples."""

from purecompose.data.arrays import Arrays, Split, arrays, split
from purecompose.data.images import ImageData, load
from purecompose.data.loaders import StateStream, epoch_batches, stream
from purecompose.data.map_style import Loader, loader, shared
from purecompose.data.prefetch import prefetch
from purecompose.data.text import CharacterVocabulary, TextData, load_text, text_windows
from purecompose.errors import SkippingWarning


__all__ = [
    "Arrays",
    "CharacterVocabulary",
    "ImageData",
    "Loader",
    "SkippingWarning",
    "Split",
    "StateStream",
    "TextData",
    "arrays",
    "epoch_batches",
    "load",
    "load_text",
    "loader",
    "prefetch",
    "shared",
    "split",
    "stream",
    "text_windows",
]
