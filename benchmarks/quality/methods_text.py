"""What does each method do by itself on text: the time to a quality, and the cost of a step?

    PURECOMPOSE_DATA=folder python benchmarks/quality/methods_text.py

The network and the data of `shakespeare.py`, trained by `fit` without compilation: plainly, and with one method at a
time, with the same seeds, learning rates and number of batches. `methods.py` makes the table and the picture.
"""

import shakespeare
from _methods import sides
from _task import Task, run

from purecompose import optim, schedule


METHODS = {
    "alibi": "alibi(1.0)",
    "batch_size_warmup": "batch_size_warmup(0.3)",
    "ema": "ema('20ba')",
    "gated_linear_units": "gated_linear_units()",
    "gradient_clipping": "gradient_clipping('norm', 1.0)",
    "label_smoothing": "label_smoothing(0.02)",
    "layer_freezing": "layer_freezing(0.5, 0.7)",
    "lookahead": "lookahead()",
    "sam, every 5th batch": "sam(0.1, every=5)",
    "schedule_free": "schedule_free()",
    "selective_backprop": "selective_backprop(0.3, 0.9, 0.5)",
    "seq_length_warmup": "seq_length_warmup(0.3, 16, 64, 16)",
    "stochastic_depth": "stochastic_depth('sample', 0.1)",
    "swa": "swa(0.8, 1.0, '10ba')",
}
"""Methods for the GPT."""
TOGETHER = ()
"""Groups of methods."""


ADAMW = optim.adamw(0.005 * schedule.linear(alpha_f=0.0, warmup="0.1dur"), betas=(0.9, 0.99), weight_decay=0.1)
SETTINGS = {"batch_size": 12, "steps": 500, "compile": False}

TASK = Task(
    name="methods_text",
    title="tiny Shakespeare, a GPT of 0.8 million parameters",
    metric="validation loss",
    target=2.2,
    shown=(1.8, 3.0),
    sides=sides(METHODS, TOGETHER, shakespeare.train, ADAMW, SETTINGS),
    tuning={},
    is_lower_better=True,
    precisions=("bf16",),
)


if __name__ == "__main__":
    run(TASK, __doc__)
