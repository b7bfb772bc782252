"""Data sets in memory and on disk in keyed order, and image sets and texts for the examples."""

from purecompose._support import publish
from purecompose.data.arrays import Arrays as Arrays, Split as Split, arrays as arrays, split as split
from purecompose.data.bucketing import Buckets as Buckets, buckets as buckets
from purecompose.data.files import (
    CharacterVocabulary as CharacterVocabulary,
    ImageData as ImageData,
    TextData as TextData,
    load as load,
    load_text as load_text,
    text_windows as text_windows,
)
from purecompose.data.loaders import StateStream as StateStream, epoch_batches as epoch_batches, stream as stream
from purecompose.data.map_style import Loader as Loader, loader as loader, shared as shared
from purecompose.data.reader import prefetch as prefetch
from purecompose.errors import SkippingWarning as SkippingWarning


publish(__name__)
