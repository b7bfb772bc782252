"""A callback of Hugging Face's Trainer that runs methods."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from purecompose.core.algorithm import Algorithm
from purecompose.integrations.methods import LoopMethods


def trainer_callback(methods: Sequence[Algorithm], *, key: int | Tensor = 0) -> Any:
    """Return a `transformers.TrainerCallback` that runs methods on the model, gradients and weights.

    Methods on the model act when the `Trainer` is created, those on gradients after its own clipping
    (`max_grad_norm=0` switches that off), averages after each step of the optimizer, which is one batch of the methods'
    time; evaluations during training use them. Checkpoints of the `Trainer` contain a file with the key, the time and
    the slots, so that a resumed run continues them.

    Args:
        methods: The methods. A callback of the `Trainer` gets no batches: call cores in `compute_loss` for those.
        key: The seed of the draws, or a key.

    Returns:
        The callback. Its attribute `methods` is a `LoopMethods`, so that `callback.methods.weights("ema")` are averaged
        weights.

    Raises:
        ImportError: Transformers is not installed.
        UnsupportedError: A method needs what a callback of the `Trainer` does not have, such as batches.
        FileNotFoundError: In the run: it resumes from a checkpoint without the file.
    """
    import transformers

    held = LoopMethods(methods, key=key, has_batches=False, target_field=None)
    return type("MethodsCallback", (_Hooks, transformers.TrainerCallback), {})(held)


def _file(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "purecompose.pt"


class _Hooks:
    """The hooks of the callback."""

    def __init__(self, methods: LoopMethods) -> None:
        self.methods = methods

    def on_init_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.methods.start(others["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step:
            self.methods.load_state_dict(torch.load(_file(args, state), map_location="cpu"))
        self.methods.set_length(f"{state.max_steps}ba")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.methods.on_gradients()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.methods.at_batch_end((torch.empty(args.train_batch_size * args.gradient_accumulation_steps),))
        self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if control.should_evaluate:
            self.methods.use_averages()

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.methods.use_live()

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.is_world_process_zero:
            torch.save(self.methods.state_dict(), _file(args, state))
