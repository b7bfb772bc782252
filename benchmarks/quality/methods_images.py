"""What does each method do by itself on images: the time to a quality, and the cost of a step?

    PURECOMPOSE_DATA=folder python benchmarks/quality/methods_images.py

The network and the data of `mnist.py`, trained by `fit` without compilation: plainly, and with one method at a time,
with the same seeds, learning rates and number of batches. `methods.py` makes the table and the picture.
"""

import mnist
from _methods import sides
from _task import Task, run

from purecompose import optim, schedule


METHODS = {
    "augmix": "augmix(1.0, depth=1, width=2)",
    "batch_size_warmup": "batch_size_warmup(0.3)",
    "blurpool": "blurpool()",
    "channels_last": "channels_last()",
    "colout": "colout(0.1, 0.1)",
    "cutmix": "cutmix(1.0)",
    "cutout": "cutout(length=0.3)",
    "ema": "ema('20ba')",
    "gradient_clipping": "gradient_clipping('norm', 1.0)",
    "label_smoothing": "label_smoothing(0.1)",
    "layer_freezing": "layer_freezing(0.5, 0.7)",
    "lookahead": "lookahead()",
    "mixup": "mixup(0.2)",
    "progressive_resizing": "progressive_resizing('resize', 0.7, 0.3)",
    "randaugment": "randaugment(3, 1)",
    "sam": "sam(0.05)",
    "sam, every 5th batch": "sam(0.1, every=5)",
    "schedule_free": "schedule_free()",
    "selective_backprop": "selective_backprop(0.3, 0.9, 0.5)",
    "squeeze_excite": "squeeze_excite(0.25, min_channels=16)",
    "swa": "swa(0.8, 1.0, '10ba')",
    "weight_standardization": "weight_standardization(1)",
}
"""Methods for the convolutional network, with settings that fit a single epoch."""
TOGETHER = (("channels_last", "ema"), ("channels_last", "ema", "label_smoothing"))
"""Groups of methods."""


ADAMW = optim.adamw(0.01 * schedule.linear(alpha_f=0.0, warmup="0.1dur"), weight_decay=0.01)
SETTINGS = {"batch_size": 64, "epochs": 1.0, "compile": None}

TASK = Task(
    name="methods_images",
    title="MNIST, a convolutional network of 61 thousand parameters",
    metric="accuracy",
    target=0.985,
    shown=(0.95, 1.0),
    sides=sides(METHODS, TOGETHER, mnist.train, ADAMW, SETTINGS),
    tuning={},
    precisions=("bf16",),
)


if __name__ == "__main__":
    run(TASK, __doc__)
