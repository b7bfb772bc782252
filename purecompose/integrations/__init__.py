"""Methods in the loops of other libraries: callbacks of Lightning and of Hugging Face's Trainer.

Each callback runs a list of methods at the places that its loop offers, by the passes and with the draws of a step of
this library. It refuses methods that need other places. The libraries are imported on first use.
"""

from purecompose._support import publish
from purecompose.integrations.callbacks import (
    lightning_callback as lightning_callback,
    trainer_callback as trainer_callback,
)
from purecompose.integrations.methods import LoopMethods as LoopMethods


publish(__name__)
