"""What does an eager step of the small MLP consist of, beside its arithmetic?

    python benchmarks/eager_parts.py

The same step with more and more of the library around the arithmetic, from the bare operations to the composed step.
Each row adds one part to the row before; its cost is the difference. CPU time on one thread; the sides take turns.
"""

import copy
import statistics
import time
from collections.abc import Callable

import torch
from _subjects import LR, MOMENTUM, Subject, by_hand, going_on, mlp, new_state
from _timing import Row, arguments, in_turn, parse, save
from torch import Tensor, nn
from torch.nn import functional as F

from purecompose import State, compose, loop_events
from purecompose._support.internals import GradMode, gradients
from purecompose.core import loop
from purecompose.core.gradient import differentiate
from purecompose.core.operation import NO_PURPOSE, Carry
from purecompose.nn.differentiable import OwnDerivatives


# torch.optim itself is built on the `_foreach` functions, but torch exports them under private names.
# pyright: reportPrivateImportUsage=false

Take = Callable[[State], State]


def ladder(subject: Subject) -> dict[str, Callable[[], object]]:
    """The loop by hand, and our step from its arithmetic on, each with one part more."""
    batch = subject.inputs, subject.targets
    step = compose(loop_events)
    state = step(step.init(new_state(subject)), batch)  # after the first run, which is checked
    prepared = step.prepare(state, batch)
    run, start = step.operation(prepared.bits), prepared.start()
    net = copy.deepcopy(subject.net).train()  # the bare sides put their leaves into it
    layers = {name: module for name, module in net.named_modules() if isinstance(module, nn.Linear)}
    places = [(layer._parameters, key) for layer in layers.values() for key in ("weight", "bias")]

    def grads_of(state: State, loss_of: Callable[[State], Tensor]) -> dict[str, Tensor]:
        with GradMode(True):
            leaves = {name: param.detach().requires_grad_() for name, param in state.params.items()}
            loss = loss_of(state.replace(params=leaves))
            found = gradients(loss, [*leaves.values()])
        return {name: grad for name, grad in zip(leaves, found, strict=True) if grad is not None}

    def bare(state: State) -> Tensor:
        for (container, key), leaf in zip(places, state.params.values(), strict=True):
            container[key] = leaf  # pyright: ignore[reportArgumentType]
        return F.cross_entropy(net(subject.inputs), subject.targets)

    def updated(state: State, grads: dict[str, Tensor]) -> State:
        params, opt_state = state.optimizer.update(grads, state.opt_state, state.params, state.scalar)
        return state.replace(params=params, opt_state=opt_state)

    def arithmetic(state: State) -> State:
        grads, names = grads_of(state, bare), tuple(state.params)
        momenta = torch._foreach_add([*grads.values()], [*state.opt_state["momentum"].values()], alpha=MOMENTUM)
        params = torch._foreach_add([*state.params.values()], momenta, alpha=-LR)
        momentum = dict(zip(names, momenta, strict=True))
        return state.replace(params=dict(zip(names, params, strict=True)), opt_state={"momentum": momentum})

    def stages(state: State) -> Tensor:
        with state.model.skeleton(train=True).held():
            loss = loop.loss.fn(loop.forward.fn(state)).loss
        assert loss is not None
        return loss

    own = OwnDerivatives()

    def with_grad(state: State) -> State:
        body = lambda carry, purpose: carry._replace(state=loop.loss.fn(loop.forward.fn(carry.state)))  # noqa: E731
        end = differentiate(body, Carry(state), state.context.trainable, own, NO_PURPOSE).state
        assert end.grads is not None
        return updated(end, end.grads).replace(grads=None)

    def in_turn(take: Take) -> Callable[[], None]:
        now = start

        def run() -> None:
            nonlocal now
            with GradMode(False):
                now = take(now)

        return run

    takes: dict[str, Take] = {
        "its arithmetic, with new tensors": arithmetic,
        "+ the optimizer's update": lambda state: updated(state, grads_of(state, bare)),
        "+ forward and loss as stages, tensors bound to the network": lambda s: updated(s, grads_of(s, stages)),
        "+ Grad": with_grad,
        "+ the fold over the whole program": lambda state: run(Carry(state), NO_PURPOSE).state,
    }
    sides: dict[str, Callable[[], object]] = {"by hand": by_hand(subject)}
    for name, take in takes.items():
        sides[name] = in_turn(take)
    sides["+ decisions on the host and clean-up: the composed step"] = going_on(step, state, batch)
    return sides


def main() -> None:
    args = parse(arguments(__doc__, blocks=150, calls=20))
    torch.set_num_threads(1)
    sides = ladder(mlp())
    for side in sides.values():
        for _ in range(5 * args.calls):
            side()

    def block(name: str) -> float:
        begin = time.process_time()
        for _ in range(args.calls):
            sides[name]()
        return (time.process_time() - begin) / args.calls

    seconds = in_turn(list(sides), block, args.blocks)
    # The lower decile: what other processes on the machine do can only make a block slower.
    us = {name: statistics.quantiles(values, n=10)[0] * 1e6 for name, values in seconds.items()}
    rows: list[Row] = []
    before: float | None = None  # the loop by hand is not a part of ours
    for name, value in us.items():
        more = "" if before is None else round(value - before)
        rows.append(
            {"side": name, "us a step": round(value), "more": more, "of by hand": round(value / us["by hand"], 3)}
        )
        before = None if name == "by hand" else value
    save("eager_parts", rows, args.out)


if __name__ == "__main__":
    main()
