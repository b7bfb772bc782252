"""`compile`: a step that runs as compiled graphs."""

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from purecompose._support.device import arithmetic
from purecompose._support.internals import called_by_dynamo, get_eval_frame_callback, is_transforming, without_dynamo
from purecompose._support.messages import warn
from purecompose._support.specs import shown, suggests_keywords
from purecompose.core.compose import WHY_UNTRACED, Prepared, Step
from purecompose.core.context import Context
from purecompose.core.separable import is_due
from purecompose.core.state import State
from purecompose.core.values import NO_TEMPORARY
from purecompose.time import TimeUnit
from purecompose.transforms.compilation.backends import BACKENDS, MODES, Options
from purecompose.transforms.compilation.capture import state_of
from purecompose.transforms.compilation.execution import Launch, execute
from purecompose.transforms.compilation.graph_cache import GraphCache, environment
from purecompose.transforms.compilation.inductor import mode_options
from purecompose.transforms.compilation.parts import Entry, ExecutionPlan, Variants
from purecompose.transforms.signature import LASTING, Boundary, BufferLease, Signature, StateBuffers, spec_of


@suggests_keywords
def compile(  # noqa: A001
    step: Step,
    *,
    donate: bool = True,
    mode: str | None = None,
    backend: str | Callable[..., Any] = "inductor",
    fallback: bool = False,
    eager_below: int = 0,
    dynamic: bool | Literal["all"] = False,
    max_variants: int = 32,
    quiet: bool = False,
) -> "CompiledStep":
    """Return a step that computes the same in compiled code.

    Each schedule (which algorithms act) and each form of batch is traced once into a flat graph of tensor operations,
    forward, backward and update together, and compiled; from then on a step is one look-up and one call. No guards run.

    With `donate`, the new parameters are written into the old ones' memory, and the state that a step was given is
    *spent* if it was returned by this step: reading its `params`, `buffers`, `opt_state`, `slots` or `hparams` raises a
    `SpentStateError`. The first state is not affected, nor is any tensor that was read from a state, because reading
    returns a copy. `state.copy()` keeps a state.

    Under a transform of `torch.func`, and if a leaf requires a gradient, the step runs as composed.

    Args:
        step: A step made by `compose`, `population` or `data_parallel`.
        donate: True to write new values over old ones.
        mode: As in `torch.compile`: `"max-autotune"` benchmarks kernels, `"reduce-overhead"` replays CUDA graphs.
        backend: `"inductor"`; `"eager"`, which runs the traced graph without compiling it; or any other backend of
            `torch.compile`.
        fallback: True to run a step as composed, with one warning, instead of raising if it cannot be traced or
            Inductor fails on it.
        eager_below: Batches with fewer examples run as composed, such as the short last batch of an epoch.
        dynamic: True to leave the number of examples open: one variant serves all sizes from 2 on, if the algorithms
            permit it. `"all"` leaves all sizes of the batch open, such as the length of sequences. Code for a fixed
            size is faster.
        max_variants: Number of parts that may be compiled before a `VariantLimitError` reports the cause of so many.
        quiet: True to suppress announcements of compilations on standard error.

    Returns:
        The same step with additional methods `variants()` and `warmup(state, batch)`.

    Raises:
        TypeError, ValueError: An argument is of the wrong kind.

    Example:
        >>> from purecompose import State, compose, loop_events, losses, optim
        >>> net = torch.nn.Linear(2, 1)
        >>> state = State.create(net, loss=losses.mse, optimizer=optim.sgd(0.1), duration="1ep")
        >>> step = compile(compose(loop_events), backend="eager", quiet=True)
        >>> step(state, (torch.ones(4, 2), torch.zeros(4, 1))).timestamp.batch
        1
    """
    if isinstance(step, CompiledStep):
        raise TypeError("compile: the step is compiled already; compile(step.step, ...) compiles it again")
    if not isinstance(step, Step):
        raise TypeError(f"compile: expected a step, as compose(...) gives it, got {shown(step)}")
    options = Options(donate, backend, mode, fallback, eager_below, dynamic, max_variants, quiet)
    return CompiledStep(step, options.checked(step))


class CompiledStep(Step):
    """A step whose calls run compiled; made by `compile`. Its other methods run as composed."""

    def __init__(self, step: Step, options: Options) -> None:
        super().__init__(step.program, step.algorithms, step.passes, step.cut, step.members)
        self.step: Step = step
        self.options: Options = options
        self._graphs = GraphCache(step, options)
        self._met: set[Any] = set()
        self._most_examples = 0
        self._has_met_smaller = False
        self._eager: dict[Any, tuple[Context, ExecutionPlan]] = {}

    @called_by_dynamo(WHY_UNTRACED)
    def __call__(self, state: State, batch: Any) -> State:
        """Return the state after one batch; see `compile`."""
        if get_eval_frame_callback() is not None:
            return without_dynamo(lambda _: self(state, batch))
        if not isinstance(state, State):
            raise TypeError(f"step(state, batch): expected a State first, got {type(state).__name__}")
        lease: BufferLease | None = state.lease
        if lease is not None:
            lease.check()
        prepared = self.step.prepare(state, batch)
        try:
            info, tensors = _inspect(batch)
            plan_key = (prepared.bits, info, environment())
            if plan_key in self._eager and self._is_still_eager(plan_key, state):
                return self.step(state, batch)
            launch = None if self._must_be_eager(state, batch, info) else self._launch(state, lease)
        except TypeError as error:
            self._graphs.fall_back(error)
            return self.step(state, batch)
        if launch is None:
            return self.step(state, batch)
        plan = launch.entry.plans.get(plan_key)
        if plan is None and self._is_watched_first(prepared):
            return self.step(state, batch)
        if plan is None or (self.has_advance and is_due(state.timestamp.batch)):
            self._check_separable(state, batch, prepared)
        context = state.static.context
        with arithmetic(context.precision, state.key.device), self.guarded(state, batch, is_first=False):
            plan = plan or self._find(launch.entry, plan_key, prepared)
            if not plan.is_refused:
                return execute(self._graphs, launch, prepared, tensors, plan)
        self._eager[plan_key] = state.static.context, plan  # so that the next step sets up no buffers in vain
        return self.step(state, batch)

    def variants(self) -> Variants:
        """Return what has been compiled so far; it prints as a table."""
        return Variants(self._graphs.variants)

    def warmup(self, state: State, *examples: Any) -> Variants:
        """Compile all variants that a run from this state will need.

        Args:
            state: The state at the start of the run; it is neither changed nor spent.
            examples: Batches, one of each signature that will occur. Processes that share batches must all call it.

        Returns:
            As `variants`. Parts after a host algorithm are not compiled ahead: its result decides the signature.

        Raises:
            TypeError: The first argument is not a state.
            ValueError: There is no batch; or the length of the run in such batches is unknown: it has neither a
                duration nor an epoch's length, is counted in epochs without `batches_per_epoch`, or in tokens that
                they lack.
        """
        if not isinstance(state, State):
            raise TypeError(f"warmup(state, *batches): expected a State first, got {type(state).__name__}")
        if not examples:
            raise ValueError("warmup(state, *batches): expected a batch of each form that will come, got none")
        if state.lease is not None:
            state = state.copy()
        for batch in examples:
            for prepared in _moments(self.step, state, batch):
                info, _ = _inspect(batch)
                launch = None if self._must_be_eager(state, batch, info) else self._launch(state, None)
                if launch is not None:
                    plan_key = (prepared.bits, info, environment())
                    with arithmetic(state.static.context.precision, state.key.device):
                        if plan_key not in launch.entry.plans:
                            self._find(launch.entry, plan_key, prepared)
        return self.variants()

    def replace(self, **changes: Any) -> "CompiledStep":
        return CompiledStep(self.step.replace(**changes), self.options)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the step and the options; what has been compiled is compiled again, or read from the cache on disk."""
        return CompiledStep, (self.step, self.options)

    def __repr__(self) -> str:
        return f"compile({self.step!r}, {len(self._graphs.variants)} variants)"

    def _check_separable(self, state: State, batch: Any, prepared: Prepared) -> None:
        """Check that the batch may be cut, as composed, on the buffers, of which a read field would be a copy."""
        if any(one.separable is not None for one in self.step.lowered(prepared.bits)):
            if state.lease is not None:
                values, signatures = state.lease.buffers.values, state.lease.buffers.signatures
                fields = {name: signatures[name].build(values[name]) for name in LASTING}
                prepared = self.step.prepare(state_of(state.static, None, {**fields, **state.__dict__}), batch)
            with arithmetic(state.context.precision, state.device), self.guarded(state, batch, is_first=False):
                self.step.check_separable(prepared)

    def _must_be_eager(self, state: State, batch: Any, info: "_BatchInfo") -> bool:
        if info.is_differentiated or is_transforming() or torch.is_inference_mode_enabled():
            return True
        fields = state.__dict__
        # Temporary fields that the caller set are read by the composed step only. A loop costs less than any(...).
        for name in NO_TEMPORARY:
            if fields.get(name) is not None:
                return True
        floor = self.options.eager_below
        return bool(floor) and self.num_examples(state, batch) < floor

    def _is_still_eager(self, plan_key: Any, state: State) -> bool:
        """Return whether a step that ran as composed does so again, which is known before its buffers are set up."""
        context, plan = self._eager[plan_key]
        if context is state.static.context and plan.is_refused:
            return True
        del self._eager[plan_key]
        return False

    def _is_watched_first(self, prepared: Prepared) -> bool:
        """Return whether this is the first step of a schedule with host algorithms, which cannot run on fake tensors.

        It runs as composed, and is watched in that run: in a separate run for the checks, they would act twice.
        """
        case = prepared.bits, prepared.num_examples
        if case in self._met or not self._graphs.has_host(prepared.bits):
            return False
        self._met.add(case)
        return True

    def _find(self, entry: Entry, plan_key: Any, prepared: Prepared) -> ExecutionPlan:
        """Build the plan for a schedule and a batch that occur for the first time."""
        self._note_size(prepared.num_examples)
        bits, start = prepared.bits, prepared.start()
        signatures = {**entry.signatures, "batch": Signature.of(start.batch)[0], "clock": Signature.of(start.clock)[0]}
        boundary = Boundary.start(start.static, signatures, is_donated=self.options.donate)
        watched = None if self._graphs.has_host(bits) else start
        if len(entry.plans) == _MOST_PLANS:  # of batches that differ in size and share their graphs
            entry.plans.pop(next(iter(entry.plans)))
        plan = entry.plans[plan_key] = self._graphs.plan_or_eager(boundary, bits, start=watched)
        return plan

    def _note_size(self, num_examples: int) -> None:
        """Say once that a smaller batch than before is compiled for itself, and how to prevent that."""
        most, self._most_examples = self._most_examples, max(num_examples, self._most_examples)
        if num_examples >= most or self.options.dynamic or self._has_met_smaller:
            return
        self._has_met_smaller = True
        self.options.announce(
            f"purecompose: a batch has {num_examples} examples, fewer than the {most} before, and is compiled for "
            f"itself. drop_last=True of the data leaves it out, compile(eager_below={most}) runs it uncompiled, and "
            "compile(dynamic=True) has one variant for all sizes\n"
        )

    def _launch(self, state: State, lease: BufferLease | None) -> Launch | None:
        """Return the inputs of the step's execution, or `None` if a tensor of the state requires a gradient."""
        fields, is_donated = state.__dict__, self.options.donate
        if lease is not None and lease.entry is None:
            lease = None  # a host algorithm's lease: the enclosing step will write into the buffers
        if (
            lease is not None
            and lease.buffers.is_donated is is_donated
            and not lease.is_read
            and fields.keys().isdisjoint(LASTING)
        ):
            key, loss, context, graphs = lease.origin
            is_unchanged = fields["key"] is key and fields["loss"] is loss and state.static.context is context
            if is_unchanged and graphs is self._graphs:
                return Launch(lease.buffers, lease.entry, state, lease)
            return self._with_entry(lease.buffers, state, lease=lease)
        found: dict[str, tuple[Signature, list[Tensor]]] = {}
        keeps = lease is not None and lease.buffers.is_donated is is_donated
        for name in LASTING:
            if lease is None or not (keeps and lease.has_kept(name, fields)):
                found[name] = Signature.of(getattr(state, name))
        if torch.is_grad_enabled() and any(t.requires_grad for _, tensors in found.values() for t in tensors):
            return None
        if lease is not None and keeps and is_donated:
            old = lease.buffers
            if all(signature.is_alike(old.signatures[name]) for name, (signature, _) in found.items()):
                copies = [pair for name, (_, new) in found.items() for pair in zip(old.values[name], new, strict=True)]
                return self._with_entry(old, state, lease=lease, copies=copies)
        found |= {name: Signature.of(getattr(state, name)) for name in LASTING if name not in found}
        return self._with_entry(_new_buffers(found, is_donated=is_donated), state)

    def _with_entry(self, buffers: StateBuffers, state: State, **rest: Any) -> Launch:
        signatures = {**buffers.signatures, "key": Signature.of(state.key)[0], "loss": Signature.of(state.loss)[0]}
        return Launch(buffers, self._graphs.entry(state.context, signatures), state, **rest)


class _BatchInfo(NamedTuple):
    """The properties of a batch that decide how a step runs, computed as cheaply as possible."""

    signature: Hashable
    is_differentiated: bool
    """True if a tensor in it requires a gradient."""


def _inspect(batch: Any) -> tuple[_BatchInfo, list[Tensor]]:
    if type(batch) is tuple:
        specs, requires_grad = [], False
        for tensor in batch:
            if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
                break
            specs.append((tensor.dtype, tensor.shape, tensor.stride(), tensor.device))
            requires_grad = requires_grad or tensor.requires_grad
        else:
            return _BatchInfo(tuple(specs), requires_grad and torch.is_grad_enabled()), list(batch)
    signature, tensors = Signature.of(batch)
    return _BatchInfo(signature, torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)), tensors


def _new_buffers(found: dict[str, tuple[Signature, list[Tensor]]], *, is_donated: bool) -> StateBuffers:
    signatures, values = {}, {}
    for name in LASTING:
        signature, tensors = found[name]
        tensors = [tensor.detach() for tensor in tensors]
        if is_donated:
            # Each tensor is cloned separately: a slot may alias a parameter, and each needs its own memory.
            tensors = [tensor.clone() for tensor in tensors]
            signature = signature.with_specs(map(spec_of, tensors))
        signatures[name], values[name] = signature, tensors
    return StateBuffers(signatures, values, is_donated=is_donated)


def _moments(step: Step, state: State, batch: Any) -> Iterator[Prepared]:
    """Yield the prepared step of each schedule in the rest of the run, with batches like this one."""
    run, seen = state.timestamp.run, set()
    unit = TimeUnit.EPOCH if run.duration is None else run.duration.unit
    if unit is TimeUnit.EPOCH and run.batches_per_epoch is None:
        raise ValueError(
            "warmup: the run's length in batches is not known: give State.create batches_per_epoch (fit learns it from "
            "the data only later), or a duration in batches"
        )
    end = None if run.duration is not None else state.timestamp.epoch + 1
    while not state.timestamp.is_finished() and state.timestamp.epoch != end:
        prepared = step.prepare(state, batch)
        if prepared.bits not in seen:
            seen.add(prepared.bits)
            yield prepared
        if prepared.later == state.timestamp:
            return
        if unit in (TimeUnit.SAMPLE, TimeUnit.TOKEN) and prepared.later.get(unit) == state.timestamp.get(unit):
            raise ValueError(f"warmup: the batch has no {unit.name.lower()}s, so a run of {run.duration} never ends")
        state = state.replace(timestamp=prepared.later)


_MOST_PLANS = 4096
"""Largest number of plans kept for states of one form."""


def call_in_torch_compile(step: Step, state: State, batch: Any, backend: Any) -> State:
    """Return the state after one batch."""
    known = step._cache.within_torch_compile
    compiled = next((one for given, one in known if given is backend or given == backend), None)
    if compiled is None:
        compiled = compile(step, donate=False, fallback=True, quiet=True, **_options(backend))
        known.append((backend, compiled))
    return compiled(state, batch)


def _options(backend: Any) -> dict[str, Any]:
    """Return the arguments of `torch.compile` as arguments of `compile`."""
    name = getattr(backend, "compiler_name", None)
    if name is None:  # a stance of torch.compiler is set
        return {}
    options = {"backend": name if name in BACKENDS else backend, "dynamic": backend.dynamic is True}
    config = getattr(backend, "config", None)  # Inductor's, as mode and options have set it
    if config:
        options["mode"] = next((mode for mode in MODES[2:] if mode_options(mode, backend.dynamic) == config), None)
        if options["mode"] is None:
            warn("torch.compile(options=...) has no effect on a step: pc.compile(step) takes mode, but no options")
    return options
