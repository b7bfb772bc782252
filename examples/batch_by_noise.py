"""A language model whose sequences and batches grow together, as fast as the noise of its gradients asks for.

A step needs as many tokens as the critical batch size, which `gradient_noise_scale` measures. Few tokens are short
sequences; once these have their full length, there are more of them.
"""

import argparse
import inspect
import sys

import torch

import purecompose as pc
from purecompose import Algorithm, Event, State, algorithms as alg, compose, functional, loop_events, on, optim
from purecompose.nn import layers, models


LENGTH, ROWS, SHORTEST, FEWEST = 64, 32, 8, 8  # of the longest sequences and the largest batch; at the start


def by_noise(name: str = "by_noise", noise: str = "gradient_noise_scale") -> Algorithm:
    """Return a method that doubles the tokens of a step when its gradient is mostly noise.

    Batches of ids (N, L) are cut to the first rows and words; both sizes are powers of two where N and L are.
    """

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            return state.replace(slots={**state.slots, name: torch.tensor(FEWEST * SHORTEST)})
        tokens, measured, (num, longest) = int(state.slots[name]), state.slots[noise], state.inputs.shape
        critical = functional.critical_batch_size(measured.squared_norm, measured.trace).item()  # in rows
        if measured.weight > 0.6 and tokens < num * longest and critical * min(longest, tokens // FEWEST) > tokens:
            tokens, measured = 2 * tokens, pc.tree.map(torch.zeros_like, measured)  # measured again
        length = min(longest, tokens // FEWEST)
        kept = state.context.layout.take(state.batch, torch.arange(min(num, tokens // length)))
        batch = functional.set_batch_sequence_length(kept, length)
        found = {"tokens": torch.tensor(tokens), "length": torch.tensor(length)}
        slots = {**state.slots, name: found["tokens"], noise: measured}
        return state.replace(batch=batch, slots=slots, metrics={**state.metrics, **found})

    return Algorithm(name, on(Event.INIT, Event.AFTER_DATALOADER), apply, host=True)


def main(duration: str) -> None:
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    text = inspect.getsource(argparse)
    ids = torch.tensor([min(ord(letter), 127) for letter in text])
    windows = ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)].unflatten(0, (-1, LENGTH + 1))
    batches = pc.data.arrays(windows[:, :-1], windows[:, 1:], ROWS, drop_last=True)
    net = layers.ClassesSecond(models.build("gpt", in_shape=(LENGTH,), num_classes=128, seed=0, width=64, depth=2))
    state = State.create(net, loss=pc.losses.cross_entropy, optimizer=optim.adamw(3e-3), key=0, duration=duration)
    step = compose(loop_events, [by_noise(), alg.gradient_noise_scale()], microbatches=2)
    shown = []

    def show(event: Event, state: State) -> None:
        now = {name: float(value) for name, value in state.metrics.items()}
        if event is Event.BATCH_END and now["tokens"] not in shown:
            shown.append(now["tokens"])
            rows, batch = now["tokens"] / now["length"], state.timestamp.batch
            print(f"batch {batch}: {rows:.0f} sequences of {now['length']:.0f}, loss {state.loss:.2f}")

    end = pc.fit(step, state, batches, observers=show)
    print(f"end: loss {pc.evaluate(end, batches)['loss']:.2f}")


if __name__ == "__main__":
    main("100ba" if "--short" in sys.argv else "400ba")
