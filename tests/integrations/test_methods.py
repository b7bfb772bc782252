"""Methods in another loop act as in a step: same draws, same gradients, same averages; others are refused."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import purecompose as pc
from purecompose import Algorithm, algorithms as alg
from purecompose.errors import UnsupportedError
from purecompose.integrations import LoopMethods


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "gradient_accumulation": (2,),
    "gradient_clipping": ("norm", 0.05),
    "initialize": ("zeros", "5.*"),
    "per_example_clipping": (1.0,),
}
REFUSED = {
    "sam": "computes gradients again",
    "per_example_clipping": "computes gradients again",
    "gradient_accumulation": "BEFORE_TRAIN_BATCH, Event.FIT_END",
    "gradient_noise_scale": "BEFORE_TRAIN_BATCH, Event.AFTER_BACKWARD",
    "gyro_dropout": "BATCH_START, Event.BEFORE_FORWARD, Event.AFTER_FORWARD",
    "layer_freezing": "BATCH_START",
    "loss_scaling": "BEFORE_BACKWARD, Event.AFTER_BACKWARD",
    "selective_backprop": "BATCH_START, Event.AFTER_FORWARD",
    "skip_nonfinite": "BATCH_START",
    "test_time_averaging": "EVAL_AFTER_FORWARD, Event.PREDICT_AFTER_FORWARD",
    "training_metrics": "BATCH_START, Event.AFTER_BACKWARD",
    "decoupled_weight_decay": "changes the optimizer",
    "schedule_free": "reads the optimizer",
    "patch_whitening": "sets weights by a pass",
    "no_op_model": "replaces the whole network",
}
"""The methods that no other loop can hold, and the reasons. All others are compared with a step."""
SEQUENCES = ("alibi", "seq_length_warmup")
"""Methods of language models, which the images of this test do not suit."""


def new_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def make_batches(number: int = 5) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.rand(6, 3, 8, 8, generator=generator), torch.randint(4, (6,), generator=generator)]
        for _ in range(number)
    ]


def by_step(methods: list[Algorithm]) -> pc.State:
    step = pc.compose(pc.loop_events, methods)
    state = pc.State.create(
        new_net(), loss=pc.losses.cross_entropy, optimizer=pc.optim.sgd(0.1), key=3, duration="1ep", batches_per_epoch=5
    )
    state = step.init(state)
    for batch in make_batches():
        state = step(state, batch)
    return state


def by_loop(held: LoopMethods, start: int = 0, stop: int = 5, net: nn.Module | None = None) -> nn.Module:
    if net is None:
        net = new_net()
        held.start(net)
        held.set_length("1ep", 5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in make_batches()[start:stop]:
        inputs, targets = held.on_batch(batch)
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        held.on_gradients()
        optimizer.step()
        held.at_batch_end([inputs, targets])
    return net


def make(name: str) -> Algorithm:
    return alg.FACTORIES[name](*ARGUMENTS.get(name, ()))


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*(changed nothing|no effect)")
@pytest.mark.parametrize("name", sorted({*alg.FACTORIES} - {*REFUSED, *SEQUENCES}))
def test_a_method_trains_as_in_a_step(name: str) -> None:
    held = LoopMethods([make(name)], key=3, num_classes=4)
    net, state = by_loop(held), by_step([make(name)])
    close(dict(net.named_parameters()), state.params)
    if name in ("ema", "swa", "lookahead"):
        assert held.state.slots.keys() == state.slots.keys() == {name}
    assert held.state.timestamp.batch == 5


def test_methods_act_in_the_order_of_a_step_and_averages_serve_evaluations() -> None:
    methods = [
        alg.label_smoothing(0.1),
        alg.ema("2ba"),
        alg.gradient_clipping("norm", 0.05),
        alg.cutmix(),
        alg.cutout(),
    ]
    held = LoopMethods(methods, key=3, num_classes=4)
    net, state = by_loop(held), by_step(methods)
    close(dict(net.named_parameters()), state.params)
    averages = pc.surgery.with_weights(state, "ema")
    live = copy.deepcopy(net.state_dict())
    held.use_averages()
    close(dict(net.named_parameters()), averages.params)
    held.use_live()
    assert all(torch.equal(live[name], tensor) for name, tensor in net.state_dict().items())
    close({name: held.weights("ema")[name] for name in averages.params}, averages.params)


def test_a_loop_continues_to_the_same_bits() -> None:
    methods = [alg.mixup(), alg.ema("2ba"), alg.gradient_clipping("norm", 0.05)]
    whole = by_loop(LoopMethods(methods, key=3, num_classes=4))
    first = LoopMethods(methods, key=3, num_classes=4)
    net = by_loop(first, stop=2)
    second = LoopMethods(methods, key=7, num_classes=4)  # the key is that of the checkpoint
    second.start(net)
    second.load_state_dict(first.state_dict())
    by_loop(second, start=2, net=net)
    assert all(torch.equal(whole.state_dict()[name], tensor) for name, tensor in net.state_dict().items())
    assert second.state.timestamp.batch == 5
    with pytest.raises(ValueError, match="saved values are those of other methods than mixup$"):
        other = LoopMethods([alg.mixup()], num_classes=4)
        other.start(net)
        other.load_state_dict(first.state_dict())


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_loop_cannot_hold_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{name}: not in another loop, because .*{REFUSED[name]}.*own_loop"):
        LoopMethods([make(name)], num_classes=4).start(new_net())


def test_targets_need_the_number_of_classes() -> None:
    with pytest.raises(
        ValueError, match="^label_smoothing: it changes targets, for which the callback needs num_class"
    ):
        LoopMethods([alg.label_smoothing()])
    for num_classes, method in ((None, alg.mixup()), (4, alg.mixup(interpolate_loss=True))):
        held = LoopMethods([method], num_classes=num_classes)
        held.start(new_net())
        held.set_length("1ep", 5)
        with pytest.raises(ValueError, match="give num_classes, and leave out interpolate_loss=True"):
            held.on_batch(make_batches()[0])


def test_ranks_draw_differently_and_keep_the_key_of_the_run() -> None:
    mixed = []
    for rank in (0, 1, 1):
        held = LoopMethods([alg.mixup()], key=3, num_classes=4)
        held.rank = rank
        held.start(new_net())
        mixed.append(held.on_batch(make_batches()[0])[0])
        assert torch.equal(held.state.key, pc.random.key(3))
    assert torch.equal(mixed[1], mixed[2]) and not torch.equal(mixed[0], mixed[1])
