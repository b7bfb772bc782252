"""Callbacks of Lightning and of Hugging Face's Trainer that run methods."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from purecompose.core.algorithm import Algorithm
from purecompose.integrations.methods import LoopMethods
from purecompose.time.event import Event


def lightning_callback(
    methods: Sequence[Algorithm],
    *,
    key: int | Tensor = 0,
    num_classes: int | None = None,
    input_field: Any = 0,
    target_field: Any = 1,
) -> Any:
    """Return a `lightning.Callback` that runs methods on batches, the model, gradients and weights.

    Methods on the model act at `setup`, before the optimizer is created; those on batches before `training_step`, with
    mixed or smoothed targets as weights of classes (N, C, ...); those on gradients before the step of an optimizer;
    and averages after each batch, which validation, tests and predictions then use. Lightning's checkpoints contain the
    key, the time and the slots, so that a resumed run draws and averages the same. Each process draws by its own key.

    Args:
        methods: The methods.
        key: The seed of the draws, or a key.
        num_classes: The number of classes; needed for methods that mix or smooth targets.
        input_field: The field of a batch with the model's input, as for `State.create`.
        target_field: The field with the target; `None` if there is none.

    Returns:
        The callback. Its attribute `methods` is a `LoopMethods`, so that `callback.methods.weights("ema")` are averaged
        weights.

    Raises:
        ImportError: Lightning is not installed.
        UnsupportedError: A method needs what Lightning's loop does not have, as SAM does.
        TypeError: In the run: batches are neither lists nor dictionaries, which Lightning lets a callback change.
    """
    is_older = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
    library = importlib.import_module("pytorch_lightning" if is_older else "lightning")
    held = LoopMethods(methods, key=key, num_classes=num_classes, input_field=input_field, target_field=target_field)
    return type("MethodsCallback", (_LightningHooks, library.Callback), {})(held)


class _LightningHooks:
    def __init__(self, methods: LoopMethods) -> None:
        self.methods = methods

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.methods.net is not pl_module:
            self.methods.start(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        epochs, steps, batches = trainer.max_epochs, trainer.max_steps, trainer.num_training_batches
        duration = f"{epochs}ep" if epochs and epochs > 0 else None
        duration = f"{steps}up" if steps > 0 else duration
        size = int(batches) if batches < float("inf") else None
        self.methods.set_length(duration, size, trainer.accumulate_grad_batches)
        self.methods.rank = trainer.global_rank

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.methods.changes_batches:
            return
        if not isinstance(batch, list | dict):
            raise TypeError(
                f"lightning_callback: expected batches that are lists or dictionaries, got {type(batch).__name__}, "
                "which a callback cannot change: let collate_fn return a list"
            )
        changed = self.methods.on_batch(batch)
        if isinstance(batch, list):
            batch[:] = changed
        else:
            batch.update(changed)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.methods.on_gradients(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.methods.at_batch_end(batch)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.methods.use_averages()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.methods.use_live()

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self.methods.use_averages(Event.PREDICT_START)

    on_test_start, on_test_end, on_predict_end = on_validation_start, on_validation_end, on_validation_end

    def state_dict(self) -> dict[str, Any]:
        return self.methods.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.methods.load_state_dict(state_dict)


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
        The callback, whose `methods` are a `LoopMethods`, as of `lightning_callback`.

    Raises:
        ImportError: Transformers is not installed.
        UnsupportedError: A method needs what a callback of the `Trainer` does not have, such as batches.
        ValueError: In the run: gradients are scaled, by fp16 with `max_grad_norm=0`.
        FileNotFoundError: In the run: it resumes from a checkpoint without the file.
    """
    transformers = importlib.import_module("transformers")
    held = LoopMethods(methods, key=key, has_batches=False, target_field=None)
    return type("MethodsCallback", (_TrainerHooks, transformers.TrainerCallback), {})(held)


def _file(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "purecompose.pt"


class _TrainerHooks:
    def __init__(self, methods: LoopMethods) -> None:
        self.methods = methods

    def on_init_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.methods.start(others["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        changes_gradients = any(Event.AFTER_TRAIN_BATCH in method.events for method in self.methods.methods)
        if args.fp16 and not args.max_grad_norm and changes_gradients:
            raise ValueError(
                "trainer_callback: with fp16, the Trainer unscales gradients only for its own clipping: instead of "
                "max_grad_norm=0 give a large number, such as 1e9"
            )
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
