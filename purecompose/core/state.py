"""The state: an immutable pytree with all values of a training run.

Between steps the state is the checkpoint: nothing is kept outside it. Its tensors are leaves; the
model, the loss, the optimizer and the host's counters form one static part, whose equality ignores the counters,
so that states of different times and seeds can be mapped, stacked and subtracted.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from purecompose import batch as batches, losses, random, tree
from purecompose._support.device import PRECISIONS
from purecompose._support.specs import shown, suggests_keywords
from purecompose.core.calls import per_example, rng_of_turn, run_loss, run_model
from purecompose.core.clock import joined, scalars_of
from purecompose.core.context import Context, Splitter, Static, describe_moment, state_as_html
from purecompose.core.ranks import Sharing
from purecompose.core.values import TENSOR_FIELDS, Values, fields_where
from purecompose.losses.evaluation import weighted_field
from purecompose.nn.model import Split, from_module, from_modules
from purecompose.nn.network import warn_of_dropped
from purecompose.nn.splitting import sparse_tables
from purecompose.optim.protocol import check_optimizer, checked_init
from purecompose.optim.wrapping import warn_of_moved_rows
from purecompose.random.keys import as_rng
from purecompose.schedule import Hparam, Schedule, collect
from purecompose.time import RunLength, Time, Timestamp
from purecompose.time.event import named_time


@dataclass(frozen=True, eq=False, repr=False)
class State(Values):
    """All values of a training run, as an immutable pytree.

    Make one with `State.create`, a changed copy with `replace`. Fields that are `None` are not leaves.

    Example::

        state = State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1), duration="20ep")
        state = state.replace(params=new_params)
    """

    @classmethod
    @suggests_keywords
    @torch.inference_mode(False)  # tensors made in inference mode can never be differentiated
    def create(
        cls,
        net: nn.Module,
        *,
        loss: Callable[..., Any],
        optimizer: Any,
        key: int | Tensor = 0,
        duration: Time | str | None = None,
        batches_per_epoch: int | None = None,
        input_field: batches.Field | None = None,
        target_field: batches.Field | None = 1,
        weight_field: batches.Field | None = None,
        batch_dim: int = 0,
        splitter: Splitter | None = None,
        num_tokens: Callable[[Any], int] | None = None,
        precision: str = "fp32",
        eval_mode: Sequence[str] = (),
        train_mode: Sequence[str] = (),
        device: torch.device | str | None = None,
    ) -> "State":
        """Return the state at the start of a run.

        Args:
            net: The network; it is copied and never touched. Parameters with `requires_grad=False` start frozen. It
                trains in the mode that its modules are in, or in training mode if all are in evaluation mode.
            loss: `(outputs, targets, reduction="mean") -> loss`, 0-d, or `-> (loss, parts)`, with 0-d tensors by name;
                or `losses.model_loss` for a model that computes its own. The parameters and buffers of a module are in
                the state, with names that begin with "loss.". Schedules and named scalars among its attributes, or the
                keywords of a `functools.partial`, are filled in.
            optimizer: A pure optimizer, such as `optim.sgd(0.1)`, or a frozen dataclass of your own with `init` and
                `update`; see `optim.Optimizer`.
            key: The run's seed, or its key (int64 of shape (2,)).
            duration: The run's length, such as `"20ep"`; fractions of a run need one.
            batches_per_epoch: The epoch's length in batches; without it, times cannot be given in fractions of
                an epoch.
            input_field: The field of a batch with the model's input; by default the first member, or the whole batch
                for `losses.model_loss`. See `purecompose.batch`.
            target_field: The field of a batch with the target, which may be the input's; `None` if there is no target,
                and the loss is called with `None` in its place.
            weight_field: The field of a batch with a weight for each example, (N,), at least 0; by default all count
                alike. The loss is then sum_i w_i l_i / sum_i w_i, from the losses of single examples, and has no parts.
            batch_dim: The dimension of the batch's tensors that indexes the examples: 1 for sequences (T, N, ...).
                Tensors without this dimension have their examples along the first.
            splitter: A `purecompose.batch.Splitter`, instead of `batch_dim`, for examples that do not lie along a
                dimension.
            num_tokens: `batch -> int`, the number of tokens that the run's time counts; by default the size of
                `input_ids`, padding included.
            precision: `"fp32"`; `"tf32"`, the same with products rounded on NVIDIA's GPUs, which is off otherwise;
                or `"bf16"` or `"fp16"` for a forward pass under autocast, with parameters and loss in float32;
                `"fp16"` needs `algorithms.loss_scaling`.
            eval_mode, train_mode: Names and patterns (`fnmatch`) of modules that train in this mode, with all that they
                contain, unless patterns match parts of them: `eval_mode=["backbone"]`.
            device: The device of the state; by default the network's.

        Raises:
            TypeError, ValueError: An argument is of the wrong kind; the message names it and the remedy.

        Warns:
            UserWarning: An embedding has `sparse=True`, and the optimizer moves all of its rows in each step.
        """
        target_field = weighted_field(loss, input_field, target_field, weight_field)
        is_split = isinstance(net, Split)
        net, parts = net if is_split else (net, from_module(net, eval_mode=eval_mode, train_mode=train_mode))
        parts, loss, loss_model = joined(parts, loss, net)
        check_optimizer(optimizer, "optimizer")
        warn_of_moved_rows(optimizer, parts.params, sparse_tables(net))
        if precision not in PRECISIONS:
            raise ValueError(f"precision={precision!r}: expected one of {', '.join(PRECISIONS)}")
        by_default = batches.WHOLE if isinstance(loss, losses.ModelLoss) else 0
        scalars = optimizer, tuple(scalars_of(loss).values())
        is_double = any(param.dtype in (torch.float64, torch.complex128) for param in parts.params.values())
        context = Context(
            parts.model,
            loss,
            optimizer,
            parts.frozen,
            precision,
            by_default if input_field is None else input_field,
            target_field,
            batch_dim,
            splitter,
            num_tokens,
            schedules=collect(scalars, Schedule),
            loss_model=loss_model,
            loss_dtype=torch.float64 if is_double else torch.float32,
        ).with_settings(parts.buffers, {})
        run = RunLength(None if duration is None else named_time(duration, "State.create: duration"), batches_per_epoch)
        tensors = (*parts.params.values(), *parts.buffers.values())
        state = cls(
            params=parts.params,
            buffers=parts.buffers,
            opt_state=checked_init(optimizer, parts.params, parts.frozen),
            slots={},
            hparams={},
            key=as_rng(key, "State.create").key if isinstance(key, Tensor) else random.key(key),
            static=Static(context, Timestamp(run=run)),
            # There is no loss yet; NaN keeps the structure the same before and after the first step.
            loss=torch.full((), torch.nan, dtype=context.loss_dtype),
        )
        return state.with_hparams(collect(scalars, Hparam)).to(device or next((t.device for t in tensors), "cpu"))

    @classmethod
    def create_many(
        cls, nets: Iterable[nn.Module], *, keys: Iterable[int | Tensor] | None = None, **settings: Any
    ) -> "list[State]":
        """Return the states of many runs, equal to those of `create`, in less time for networks of one architecture.

        For a population, stack the states (`stack_states`).

        Args:
            nets: The networks.
            keys: The seed or key of each run; by default 0, 1, 2, ...
            settings: All other arguments of `create`, the same for all.

        Raises:
            TypeError, ValueError: As for `create`; or there is another number of keys than of networks.

        Example:
            >>> from purecompose import losses, optim
            >>> nets = [nn.Linear(2, 1) for _ in range(3)]
            >>> states = State.create_many(nets, loss=losses.mse, optimizer=optim.sgd(0.1), duration="1ep")
            >>> [state.key.tolist() for state in states] == [random.key(seed).tolist() for seed in range(3)]
            True
        """
        nets = list(nets)
        keys = list(range(len(nets)) if keys is None else keys)
        if len(keys) != len(nets):
            raise ValueError(f"State.create_many: expected a key for each of {len(nets)} networks, got {len(keys)}")
        if "key" in settings:
            raise TypeError("State.create_many: each network has its own key: write keys=range(100, 108), not key=")
        parts = from_modules(nets, **{name: settings[name] for name in _MODES if name in settings})
        return [
            cls.create(cast(nn.Module, Split(net, own)), key=key, **settings)
            for net, own, key in zip(nets, parts, keys, strict=True)
        ]

    # Changing

    def with_hparams(self, wanted: Iterable[Hparam]) -> "State":
        """Add the named scalars that the state lacks, with their defaults; existing ones keep their values."""
        known: dict[str, float] = {}
        for hparam in wanted:
            if not isinstance(hparam, Hparam):
                raise TypeError(
                    f"with_hparams: expected hparams, such as [schedule.hparam('lr', 0.1)], got {shown(hparam)}; a new "
                    "value is set by state.replace(hparams={**state.hparams, 'lr': torch.tensor(0.1)})"
                )
            if known.setdefault(hparam.name, hparam.default) != hparam.default:
                raise ValueError(f"hparam {hparam.name!r} has two defaults: {known[hparam.name]} and {hparam.default}")
        new = {
            name: torch.tensor(default, dtype=torch.float32, device=self.device)
            for name, default in known.items()
            if name not in self.hparams
        }
        return self.replace(hparams={**self.hparams, **new}) if new else self

    def to(self, device: torch.device | str) -> "State":
        """Return the state on another device; shared tensors stay where they already are."""
        return tree.map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, self)

    @torch.inference_mode(False)
    def copy(self) -> "State":
        """Return a deep copy, whose tensors no compiled step overwrites."""
        return tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self)

    # Using

    def rng(self, name: str) -> random.Rng:
        """Return the generator of the draws called `name`, derived from the run's key, the batch and the name.

        The same name in the same step yields the same draws, at any event. Other names, steps, evaluations, events
        outside of the step, and turns of a repeated stage or scope yield unrelated draws.
        """
        return rng_of_turn(self, name)

    def example_rng(self, name: str) -> random.Rng:
        """Return a generator like `rng` for draws about single examples.

        Each example gets the same draws in a microbatch as in the whole batch.
        """
        indices = torch.arange(self.num_examples, dtype=torch.int64, device=self.device)
        if self.first_example is not None:
            indices = indices + self.first_example
        return self.rng(name).per_example(indices)

    def gradient(self, params: dict[str, Tensor], sharing: Sharing = "all") -> tuple[dict[str, Tensor], Tensor]:
        """Return the running step's gradient at other parameters: same batch, microbatches, algorithms and draws.

        Its buffers, slots and metrics are discarded. It is meant for algorithms that need a second gradient, at
        AFTER_TRAIN_BATCH.

        Args:
            params: All parameters by name.
            sharing: If several processes share the batch (`data_parallel`): "all" for the mean over their parts,
                "own" for this process's part only, "none" for the whole batch, computed here. In a single process
                these are the same.

        Returns:
            The gradients of the trainable parameters that the loss reaches, and the loss (0-d).

        Raises:
            RuntimeError: No gradient has been taken yet in this step.
            ValueError: `sharing` has another value.
        """
        if self.regrad is None:
            raise RuntimeError("state.gradient(params) works inside a step, at events after its gradient")
        return self.regrad(params, sharing)

    def gradients(
        self, of: Sequence[Callable[..., Tensor]], params: dict[str, Tensor] | None = None, sharing: Sharing = "all"
    ) -> list[tuple[dict[str, Tensor], Tensor]]:
        """Return the running step's gradients of several losses, as for PCGrad: otherwise as `gradient` returns them.

        Each loss takes the place of the state's own in the step's gradient. With one microbatch in one process the
        forward pass is run once for all, else once for each. What algorithms add to the loss is added to each of them.

        Args:
            of: Losses `(outputs, targets) -> loss`, as for `State.create`. Only the state's own, `state.context.loss`,
                may have parameters, or write into its buffers.
            params: All parameters by name; by default the state's.
            sharing: See `gradient`.

        Returns:
            A pair for each loss: gradients and loss. All have the same parameters, with zeros for those that only other
            losses reach.

        Raises:
            TypeError, ValueError: One of them is not a loss, has parameters, or writes into its buffers; or in the
                first run, it reads parameters, named scalars or schedules that are not in the state, or it is not the
                mean over microbatches or processes (see `losses.over_batch`).
            RuntimeError: See `gradient`; or the program's gradient is not that of the stage `loss`.
        """
        if self.regrad is None:
            raise RuntimeError("state.gradients(of=...) works inside a step, at events after its gradient")
        return self.regrad.gradients(of, self.params if params is None else params, sharing)

    def forward(self, inputs: Any, *, train: bool = False, name: str | None = None) -> Any:
        """Return the network's outputs for these inputs.

        In a step each pass draws other numbers (dropout and the like), by the order of the passes in a stage, or in an
        algorithm at an event. Outside of a step the same call draws the same numbers.

        Args:
            inputs: One argument, a list of arguments, or a mapping of keyword arguments.
            train: True to run modules in training mode: with dropout, drawn by the state's key, and batch statistics.
                Buffers that the pass changes (running statistics) are dropped either way; `call` keeps them.
            name: A name for the network's draws: passes with the same name in one step share them, for example one
                dropout mask for two inputs.

        Warns:
            UserWarning: In the first run of a step, with `train`: the network wrote into buffers.
        """
        check_single(self, "state.forward(inputs)", "unstack_states(state) gives each of them")
        outputs, buffers = self.run_model(inputs, train=train, rng_name=name)
        if train and self.clock is not None:
            warn_of_dropped(self.buffers, buffers)
        return outputs

    def call(self, inputs: Any, *, train: bool = True, name: str | None = None) -> tuple[Any, "State"]:
        """Return the network's outputs, and the state with the buffers that it wrote; arguments as for `forward`.

        Example:
            >>> from purecompose import losses, optim
            >>> state = State.create(nn.BatchNorm1d(2), loss=losses.mse, optimizer=optim.sgd(0.1))
            >>> outputs, state = state.call(torch.ones(4, 2))
            >>> state.buffers["running_mean"]
            tensor([0.1000, 0.1000])
        """
        check_single(self, "state.call(inputs)", "unstack_states(state) gives each of them")
        outputs, buffers = self.run_model(inputs, train=train, rng_name=name)
        return outputs, self.replace(buffers=buffers)

    def run_model(self, inputs: Any, *, train: bool, rng_name: str | None = None) -> tuple[Any, dict[str, Tensor]]:
        """Return the network's outputs, and the buffers after the pass. `rng_name` is the `name` of `forward`."""
        return run_model(self, inputs, train=train, rng_name=rng_name)

    def per_example(self, fn: Callable[["State"], Any]) -> Any:
        """Return values that a function computes for each example of the batch, without a gradient.

        If several processes share the batch (`data_parallel`, `fully_sharded`), each computes them for its part, with
        the draws of the whole batch, and all receive all of them. The values of an example must depend on that example
        only.

        Args:
            fn: Function of a state. It returns a tensor, or a pytree of tensors, with one row for each example of that
                state's batch.

        Raises:
            ValueError: A tensor does not have one row for each example.

        Example:
            >>> from purecompose import losses, optim
            >>> state = State.create(nn.Linear(2, 3), loss=losses.cross_entropy, optimizer=optim.sgd(0.1))
            >>> state = state.replace(batch=(torch.ones(4, 2), torch.tensor([0, 1, 2, 0])))
            >>> state.per_example(lambda part: part.forward(part.inputs).argmax(1) == part.targets).shape
            torch.Size([4])
        """
        return per_example(self, fn)

    def call_loss(
        self, fn: Callable[[Callable[..., Any]], Any], *, train: bool, num_examples: int | None = None
    ) -> tuple[Any, dict[str, Tensor]]:
        """Call a function with the state's loss, and return its result and the buffers after it.

        A module's parameters and buffers are those of the state, called "loss.*", for the duration of the call, and
        schedules and named scalars among the loss's attributes are tensors with their present values.

        Args:
            fn: Function of the loss.
            train: True to call a module in training mode.
            num_examples: Number of examples, for draws; by default the batch's.
        """
        return run_loss(self, fn, train=train, num_examples=num_examples)

    def __repr__(self) -> str:
        lease, moment = self.lease, describe_moment(self.static.timestamp)
        if lease is not None and not lease.is_live:
            return f"State({self.model!r}, spent, {moment}, device={str(self.device)!r})"
        size = sum(tensor.numel() for tensor in self.params.values())
        members = f"{len(self.key)} members, " if self.key.ndim > 1 else ""
        return (
            f"State({members}{self.model!r}, {size:,} weights, {moment}, slots={list(self.slots)}, "
            f"device={str(self.device)!r})"
        )

    def _repr_html_(self) -> str:
        if self.lease is not None and not self.lease.is_live:
            return state_as_html(repr(self), [])
        moment = describe_moment(self.timestamp) if isinstance(self.timestamp, Timestamp) else "inside a step"
        members = f"{len(self.key)} members, " if self.key.ndim > 1 else ""
        fields = [(name, getattr(self, name)) for name in fields_where(holds_values=True)]
        return state_as_html(f"State {moment}: {members}{self.model!r}, on {self.device}", fields)


_MODES = ("eval_mode", "train_mode")


def check_single(state: State, where: str, remedy: str) -> None:
    """Raise a `ValueError` if a state is a population's."""
    if state.key.ndim > 1:
        raise ValueError(f"{where}: expected a single state, got a stacked one of {len(state.key)} members: {remedy}")


def _flatten(state: State) -> tuple[tuple[str, ...], tuple[Any, ...], Hashable]:
    values = [(name, value) for name in TENSOR_FIELDS if (value := getattr(state, name)) is not None]
    return tuple(name for name, _ in values), tuple(value for _, value in values), state.static


def _unflatten(names: tuple[str, ...], children: Iterable[Any], static: Any) -> State:
    state = object.__new__(State)
    state.__dict__.update(_NO_FIELDS, static=static)
    state.__dict__.update(zip(names, children, strict=True))
    return state


_NO_FIELDS = dict.fromkeys(TENSOR_FIELDS)
tree.register_node(State, _flatten, _unflatten)
