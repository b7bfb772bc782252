"""The errors and warnings that callers may want to catch."""

from purecompose.core.contract import FormError
from purecompose.core.given import ContractError, GlobalDrawError, InPlaceError
from purecompose.core.matching import MatchError
from purecompose.core.passes import MixedLossWarning, OrderError
from purecompose.data.loaders import SkippingWarning
from purecompose.nn.keyed.scope import UnkeyedRandomError
from purecompose.run.saving.errors import (
    CheckpointError,
    CheckpointWarning,
    DamagedError,
    MismatchError,
    UploadError,
)
from purecompose.transforms.compilation import TraceError, VariantLimitError
from purecompose.transforms.donation import SpentStateError
from purecompose.transforms.rank_timeouts import RankTimeoutError


__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "ContractError",
    "DamagedError",
    "FormError",
    "GlobalDrawError",
    "InPlaceError",
    "MatchError",
    "MismatchError",
    "MixedLossWarning",
    "OrderError",
    "RankTimeoutError",
    "SkippingWarning",
    "SpentStateError",
    "TraceError",
    "UnkeyedRandomError",
    "VariantLimitError",
    "UploadError",
]
