"""Methods in a loop that is not a step: what the loop's tensors go through at each of its places."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from purecompose import batch as batches, losses, optim, random, tree
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.compose import Step
from purecompose.core.loop import advance
from purecompose.core.passes import DEFAULT_PASSES
from purecompose.core.program import Stage
from purecompose.core.state import State
from purecompose.errors import UnsupportedError
from purecompose.losses import Mixture
from purecompose.run.saving.files import time_from_plain, time_to_plain
from purecompose.surgery.weights import averages_in, to_module, with_weights
from purecompose.time import RunLength, Time
from purecompose.time.event import Event


_MODEL = frozenset({Event.INIT})
_BATCH = frozenset({Event.AFTER_DATALOADER})
_TARGETS = frozenset({Event.BEFORE_LOSS, Event.AFTER_LOSS})
_WEIGHTS = frozenset({Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.EVAL_START, Event.PREDICT_START})


class LoopMethods:
    """Methods that run in a loop of your own.

    Call the functions below at the places that the example shows; the callbacks for Lightning and for Hugging Face's
    Trainer are built on them. Methods that act at an event which the loop does not have, compute gradients again, or
    change the optimizer are refused. Time is counted in the loop's batches. The draws are those of a step with the same
    key, in the same batch.

    Args:
        methods: The methods, in their order of application unless the passes change it.
        key: The seed of the draws, or a key.
        has_batches: True if the loop lets its batches be changed.
        num_classes: The number of classes; mixed and smoothed targets become weights of this many classes.
        settings: `input_field` and `target_field` of batches, as for `State.create`.

    Attributes:
        state: The state: time, draws and slots of the methods, and weights as they last were.
        net: The network, after `start`.
        rank: The number of this process, if each process has batches of its own: their draws differ.
        changes_batches: True if a method changes inputs or targets.

    Raises:
        UnsupportedError: A method cannot act in this loop; the message names it and says why.
        ValueError: A method changes targets, and `num_classes` is not given.

    Example:
        >>> from purecompose import algorithms as alg
        >>> net = nn.Linear(3, 2)
        >>> held = LoopMethods([alg.mixup(), alg.gradient_clipping("norm", 1.0), alg.ema("10ba")], num_classes=2)
        >>> held.start(net)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> inputs, targets = held.on_batch([torch.ones(4, 3), torch.tensor([0, 1, 1, 0])])
        >>> nn.functional.cross_entropy(net(inputs), targets).backward()
        >>> held.on_gradients()
        >>> optimizer.step()
        >>> held.at_batch_end([inputs, targets])
        >>> list(held.weights("ema"))
        ['weight', 'bias']
    """

    def __init__(
        self,
        methods: Sequence[Algorithm],
        *,
        key: int | Tensor = 0,
        has_batches: bool = True,
        num_classes: int | None = None,
        **settings: Any,
    ) -> None:
        self.methods: tuple[Algorithm, ...] = tuple(methods)
        self._key, self._num_classes, self._settings = key, num_classes, settings
        places = _MODEL | _WEIGHTS | (_BATCH if has_batches else set()) | (_TARGETS if num_classes else set())
        for method in self.methods:
            _check_has_place(method, places, has_batches)
        self._grads: dict[str, Tensor] = {}
        self._batch: Any = None
        give = Stage("gradients of the loop", lambda state: state.replace(grads=dict(self._grads)))
        self._on_batch = self._step(
            Event.AFTER_DATALOADER,
            Stage("outputs", lambda state: state.replace(outputs=self._scores(state))),
            Event.BEFORE_LOSS,
            Stage("result", self._keep),
            Event.AFTER_LOSS,
        )
        self._on_grads = self._step(give, Event.AFTER_TRAIN_BATCH)
        self._at_end = self._step(give, advance, Event.BATCH_END)
        self._live: dict[str, Tensor] | None = None
        self.changes_batches: bool = any((_BATCH | _TARGETS) & {*method.events} for method in self.methods)
        self.rank: int = 0
        self.net: nn.Module | None = None
        self.state: State

    def start(self, net: nn.Module) -> None:
        """Let the methods replace modules of a network, and make their slots; the loop then creates its optimizer.

        Args:
            net: The network, whose children are replaced by changed copies if a method replaces modules.

        Raises:
            UnsupportedError: A method changes the optimizer, which is the loop's.
        """
        self.net, shell = net, nn.Module()
        for name, child in net.named_children():
            shell.add_module(name, child)
        for name, param in net.named_parameters(recurse=False):
            shell.register_parameter(name, param)
        fresh = State.create(
            shell, loss=losses.cross_entropy, optimizer=optim.sgd(0.0), key=self._key, **self._settings
        )
        self.state = self._on_batch.init(fresh)
        names = ", ".join(method.name for method in self.methods if Event.INIT in method.events)
        if self.state.optimizer != fresh.optimizer:
            raise _refusal(names, "one of them changes the optimizer at INIT, which belongs to the loop")
        is_same = all(fresh.params.get(name) is param for name, param in self.state.params.items())
        if not is_same or self.state.model is not fresh.model:
            changed = to_module(self.state)
            if type(changed) is not nn.Module:
                raise _refusal(names, "one of them replaces the whole network")
            for name, child in changed.named_children():
                setattr(net, name, child)

    def set_length(
        self, duration: str | None, batches_per_epoch: int | None = None, batches_per_update: int = 1
    ) -> None:
        """Tell the methods how long the run is, such as "20ep", and the batches of an epoch and of an update."""
        run = RunLength(None if duration is None else Time.of(duration), batches_per_epoch, batches_per_update)
        self.state = self.state.replace(timestamp=dataclasses.replace(self.state.timestamp, run=run))

    def on_batch(self, batch: Any) -> Any:
        """Return a batch as the methods change it.

        Raises:
            ValueError: Targets are mixed, and there is no `num_classes`, or the method needs the loss.
        """
        if not self.changes_batches:
            return batch
        now, key = self._seen(), self.state.key
        now = now.replace(key=random.fold_in(key, self.rank)) if self.rank else now
        self.state = self._on_batch.finish(self._on_batch.fold(now, batch)).replace(key=key)
        return self._batch

    def on_gradients(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Let the methods change the gradients of the network, before its optimizer reads them.

        Gradients are those of the loss: a `GradScaler` unscales them before.

        Args:
            optimizer: One of several optimizers, to pass the gradients of its parameters only.
        """
        assert self.net is not None
        params = dict(self.net.named_parameters())
        groups = [] if optimizer is None else optimizer.param_groups
        own = {param for group in groups for param in group["params"]} or {*params.values()}
        self._grads = {name: param.grad for name, param in params.items() if param.grad is not None and param in own}
        batch = (torch.empty(1, device=self.state.device), None) if self._batch is None else self._batch
        end = self._on_grads.fold(self._seen(), batch)
        for name, grad in (end.grads or {}).items():
            if grad is not self._grads[name]:
                params[name].grad = grad.detach().to(params[name].dtype)
        self._grads, self.state = dict(end.grads or {}), self._on_grads.finish(end)

    def at_batch_end(self, batch: Any) -> None:
        """Let the methods act on the new weights, and count the batch."""
        before = self._seen()
        self.state = self._at_end(before, batch)
        self._write(before)

    def use_averages(self, event: Event = Event.EVAL_START) -> None:
        """Let the network have the weights of an evaluation or a prediction, until `use_live` is called."""
        if self._live is not None:
            return
        before = self._seen()
        self._live = {name: tensor.clone() for name, tensor in self._tensors().items()}
        self._write(before, self._on_batch.fire(event, before))

    def use_live(self) -> None:
        """Give the network its own weights back."""
        for name, tensor in self._tensors().items():
            tensor.copy_((self._live or {}).get(name, tensor))
        self._live = None

    def weights(self, name: str) -> dict[str, Tensor]:
        """Return averaged weights and buffers by name, for `net.load_state_dict(..., strict=False)`.

        Args:
            name: The name of the method, such as "ema".

        Raises:
            ValueError: There are no averages of this name.
        """
        averaged = with_weights(self._seen(), name)
        averages_in(averaged, name)
        return {**averaged.params, **averaged.buffers}

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors from which a run continues with the same draws and slots."""
        return {"key": self.state.key, "time": time_to_plain(self.state.timestamp), "slots": self._memory()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from `state_dict`, after `start` with the same methods.

        Raises:
            ValueError: The slots of these methods are others.
        """
        given, device = list(saved["slots"]), self.state.device
        if [leaf.shape for leaf in self._memory()] != [leaf.shape for leaf in given]:
            names = ", ".join(method.name for method in self.methods)
            raise ValueError(f"the saved values are those of other methods than {names}")
        rest = iter(given)
        slots, hparams = tree.map(
            lambda leaf: next(rest).to(device) if isinstance(leaf, Tensor) else leaf,
            (self.state.slots, self.state.hparams),
        )
        moment = time_from_plain(saved["time"])
        self.state = self.state.replace(slots=slots, hparams=hparams, key=saved["key"].to(device), timestamp=moment)

    def _memory(self) -> list[Tensor]:
        return [leaf for leaf in tree.leaves((self.state.slots, self.state.hparams)) if isinstance(leaf, Tensor)]

    def _step(self, *program: Event | Stage) -> Step:
        return Step(program, self.methods, tuple(DEFAULT_PASSES))

    def _tensors(self) -> dict[str, Tensor]:
        assert self.net is not None, "start has not been called"
        named = {**dict(self.net.named_parameters()), **dict(self.net.named_buffers())}
        return {name: tensor.detach() for name, tensor in named.items()}

    def _seen(self) -> State:
        """Return the state with the weights that the network has now, on its device."""
        tensors = self._tensors()
        device = next(iter(tensors.values())).device
        self.state = self.state if self.state.device == device else self.state.to(device)
        return self.state.replace(
            params={name: tensors[name] for name in self.state.params},
            buffers={name: tensors.get(name, buffer) for name, buffer in self.state.buffers.items()},
        )

    def _write(self, before: State, after: State | None = None) -> None:
        after, tensors = after or self.state, self._tensors()
        for old, new in ((before.params, after.params), (before.buffers, after.buffers)):
            for name, value in new.items():
                if value is not old[name]:
                    tensors[name].copy_(value)

    def _scores(self, state: State) -> Tensor | None:
        """Return outputs of the right shape, from which methods on targets read the number of classes."""
        if self._num_classes is None:
            return None
        targets = Mixture.of(state.targets).targets[0]
        is_dense = targets.is_floating_point()
        shape = targets.shape if is_dense else (targets.shape[0], self._num_classes, *targets.shape[1:])
        return torch.zeros((), device=targets.device).expand(shape)

    def _keep(self, state: State) -> State:
        self._batch, targets = state.batch, state.targets
        if isinstance(targets, Mixture):
            if self._num_classes is None or targets.interpolate_loss:
                raise ValueError(
                    "the loss of the loop takes one target for an example, and mixed ones become weights of classes: "
                    "give num_classes, and leave out interpolate_loss=True"
                )
            self._batch = batches.put(state.batch, state.context.target_field, targets.soft(state.outputs))
        return state


def _check_has_place(method: Algorithm, places: Collection[Event], has_batches: bool) -> None:
    """Raise an `UnsupportedError` if a method needs what the loop does not have."""
    if Trait.RENEWS_GRADIENTS in method.traits:
        raise _refusal(method.name, "it computes gradients again, which only a step can")
    if Trait.READS_OPTIMIZER in method.traits:
        raise _refusal(method.name, "it reads the optimizer, which belongs to the loop")
    if Trait.SETS_WEIGHTS in method.traits and not _BATCH.isdisjoint(method.events):
        raise _refusal(method.name, "it sets weights by a pass through the network, which only a step can")
    missing = [event for event in method.events if event not in places]
    if missing and set(missing) <= _TARGETS and has_batches:
        raise ValueError(f"{method.name}: it changes targets, for which the callback needs num_classes=")
    if missing:
        raise _refusal(method.name, f"it acts at {', '.join(map(str, missing))}, which the loop does not have")


def _refusal(names: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{names}: not in another loop, because {reason}. Train by a step, or call its core: see the page own_loop of "
        "the documentation"
    )
