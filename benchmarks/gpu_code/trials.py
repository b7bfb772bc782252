"""Everything that ships, each in a small training step: what must become GPU code with the eager step's numbers."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, Step, algorithms as alg, losses, optim
from purecompose.nn import layers, models
from purecompose.schedule import cosine, hparam
from purecompose.testing import TASKS, Case, Subject, Task, make_task
from tests.shipped import SHIPPED


class Run(NamedTuple):
    """A step, the state before it, and the batches of several steps."""

    step: Step
    state: State
    batches: list[Any]

    @property
    def is_one_graph(self) -> bool:
        """True unless the step has parts by design: host algorithms between them, or slices of the batch."""
        return not self.step.cut.may_slice and not any(one.host for one in self.step.algorithms)

    @property
    def is_half(self) -> bool:
        """True if numbers are rounded to half precision."""
        half = any(param.element_size() < 4 for param in self.state.params.values())
        return half or self.state.context.precision in ("bf16", "fp16")


Trials = Mapping[str, Callable[[], Run]]


def _methods() -> Iterator[tuple[str, Callable[[], Run]]]:
    """Yield each method on all tasks that it accepts; further settings of it only on one task of each kind."""
    for row in SHIPPED.values():
        for number, source in enumerate(row.examples):
            kinds = set()
            for name in row.accepted:
                if number == 0 or TASKS[name].kind not in kinds:
                    yield f"method {row.name} {name}{number or ''}", partial(_method, source, TASKS[name])
                kinds.add(TASKS[name].kind)


def _method(source: str, task: Task) -> Run:
    # A whole run of four steps in two epochs, for methods that act from a certain time on.
    case, algorithm = Case(task, num_batches=4, epochs=2), alg_of(source)
    if algorithm.name not in STEPPED or task.is_half:
        return _run(case, algorithm)
    step = case.step(algorithm)
    return Run(step, step.init(case.state(dtype=torch.float64)), case.batches(torch.float64))


STEPPED = ("augmix", "randaugment")
"""Methods that round pixels to levels, where the last bit of a float32 decides on the next level: run in float64."""


def alg_of(source: str) -> Any:
    """Return an algorithm from the text of a call."""
    return Subject.of(source).algorithm


def _run(case: Case, *algorithms: Any, state: State | None = None) -> Run:
    step = case.step(*algorithms)
    return Run(step, step.init(case.state() if state is None else state), case.batches())


def _trained(
    task: Task, *algorithms: Any, microbatches: int = 1, dtype: torch.dtype | None = None, **options: Any
) -> Run:
    """Return three steps of a task with other options of the state."""
    case = Case(task, num_batches=3, epochs=2, microbatches=microbatches)
    state = task.make_state(0, dtype=dtype, duration="2ep", batches_per_epoch=2, **options)
    step = case.step(*algorithms)
    return Run(step, step.init(state), case.batches(dtype))


OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "sgd": lambda: optim.sgd(0.1),
    "sgd nesterov": lambda: optim.sgd(0.1 * cosine(), momentum=0.9, nesterov=True, weight_decay=1e-3),
    "decoupled_sgdw": lambda: optim.decoupled_sgdw(hparam("lr", 0.1), momentum=0.9, weight_decay=1e-3),
    "adam": lambda: optim.adam(1e-2),
    "adamw": lambda: optim.adamw(1e-2 * cosine(), groups={"*.bias": {"weight_decay": 0.0}}),
    "decoupled_adamw": lambda: optim.decoupled_adamw(hparam("lr", 1e-2), weight_decay=1e-3),
    "adafactor": lambda: optim.adafactor(1e-2),
    "adagrad": lambda: optim.adagrad(1e-2),
    "sparse_adam": lambda: optim.sparse_adam(1e-2),
    "rmsprop": lambda: optim.rmsprop(1e-2, momentum=0.9),
    "lion": lambda: optim.lion(1e-3),
    "muon": lambda: optim.by_pattern({"*": optim.muon(1e-2, ns_precision="full")}, optim.adamw(1e-3)),
    "by_pattern": lambda: optim.by_pattern({"*weight": optim.sgd(0.1, momentum=0.9)}, optim.adamw(1e-3)),
    "layerwise": lambda: optim.adamw(1e-2, groups=optim.layerwise(_blocks(0), 1e-2, 0.5)),
}


def _blocks(seed: int) -> nn.Module:
    del seed
    return nn.Sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), nn.Linear(4, 3))


class _Tagger(nn.Module):
    """A network of tokens without attention.

    The biases of the keys in an attention have a gradient that is zero but for rounding; optimizers that divide by its
    size make noise of it that is as large as other updates.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        whole: Any = TASKS["tokens"].make_net(seed)
        self.embedding, self.norm, self.head = whole.embedding, nn.LayerNorm(whole.head.in_features), whole.head

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(ids))).movedim(1, -1)


def _optimizers() -> Iterator[tuple[str, Callable[[], Run]]]:
    tasks = {name: TASKS[name] for name in ("vectors", "images")}
    tasks["tokens"] = Task("tagger", _Tagger, TASKS["tokens"].batch, TASKS["tokens"].loss, TASKS["tokens"].options)
    for name, optimizer in OPTIMIZERS.items():
        if name == "layerwise":
            blocks = Task("blocks", _blocks, TASKS["vectors"].batch)
            yield f"optimizer {name}", lambda o=optimizer, t=blocks: _trained(t, optimizer=o())
            continue
        for task in tasks:
            yield f"optimizer {name} {task}", lambda o=optimizer, t=tasks[task]: _trained(t, optimizer=o())


def _pairs(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that compares the outputs of a batch with each other."""
    places = torch.arange(len(outputs), device=outputs.device)
    return F.cross_entropy(outputs @ outputs.T, places) + F.cross_entropy(outputs, targets)


class _WithLoss(nn.Module):
    """A network that takes a whole batch and returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        logits = self.linear(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits}


def _series(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 7, 4, generator=generator), torch.randint(1, 5, (size, 3), generator=generator)


def _numbers(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 3, generator=generator)


def _views() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4)))


class _Taught(nn.Module):
    """A student beside a frozen teacher."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.student, self.teacher = TASKS["vectors"].make_net(seed), TASKS["vectors"].make_net(seed + 1)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher(x)


class _Drawing(nn.Module):
    """A network that draws in every dtype."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = TASKS["vectors"].make_net(seed)

    def forward(self, x: Tensor) -> Tensor:
        floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        noise = sum(torch.rand(x.shape, dtype=dtype, device=x.device) for dtype in floats)
        noise = noise + torch.randint(5, x.shape, device=x.device) + torch.randn(x.shape, device=x.device)
        return self.net(F.dropout(x + noise.to(x.dtype), 0.3))


DRAWING = Task("draws", _Drawing, TASKS["vectors"].batch)


def _with_loss(name: str, loss: Any) -> Task:
    return Task(name, TASKS[name].net, TASKS[name].batch, loss, TASKS[name].options)


LOSSES: Mapping[str, Callable[[], Task]] = {
    "cross_entropy": lambda: TASKS["vectors"],
    "CrossEntropy smooth": lambda: _with_loss("vectors", losses.CrossEntropy(label_smoothing=0.1)),
    "CrossEntropy weight": lambda: _with_loss("vectors", losses.CrossEntropy(weight=(1.0, 2.0, 0.5))),
    "CrossEntropy soft": lambda: TASKS["soft"],
    "CrossEntropy ignored": lambda: TASKS["tokens"],
    "binary_cross_entropy": lambda: _with_loss("vectors", losses.binary_cross_entropy),
    "BinaryCrossEntropy examples": lambda: _with_loss("soft", losses.BinaryCrossEntropy(mean_over="examples")),
    "focal": lambda: _with_loss("vectors", losses.focal),
    "binary_focal": lambda: _with_loss("soft", losses.binary_focal),
    "info_nce": lambda: Task("views", lambda seed: _views(), TASKS["vectors"].batch, losses.info_nce),
    "distillation": lambda: Task("taught", _Taught, TASKS["vectors"].batch, losses.distillation),
    "mse": lambda: Task("numbers", TASKS["vectors"].net, _numbers, losses.mse),
    "ctc": lambda: Task("series", lambda seed: nn.Linear(4, 5), _series, losses.ctc),
    "model_loss": lambda: Task("own loss", lambda seed: _WithLoss(), TASKS["vectors"].batch, losses.model_loss),
    "over_batch": lambda: _with_loss("vectors", losses.over_batch(_pairs)),
    "of torch": lambda: _with_loss("vectors", F.cross_entropy),
}


def _losses() -> Iterator[tuple[str, Callable[[], Run]]]:
    for name, task in LOSSES.items():
        yield f"loss {name}", lambda t=task: _trained(t())


def _precisions() -> Iterator[tuple[str, Callable[[], Run]]]:
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        for kind in ("vectors", "images", "tokens"):
            task = make_task(kind, precision=precision)
            yield f"precision {precision} {kind}", partial(_trained, task)
            if precision == "fp16":
                yield f"precision scaled fp16 {kind}", partial(_trained, task, alg.loss_scaling())
                yield (
                    f"precision overflow fp16 {kind}",
                    partial(_trained, task, alg.loss_scaling(2.0**127, backoff_factor=2.0**-120)),
                )


def _parts() -> Iterator[tuple[str, Callable[[], Run]]]:
    """Yield steps in microbatches, with losses that couple examples, and of populations."""
    for task in ("vectors", "images", "tokens", "bf16_tokens"):
        yield f"microbatches {task}", partial(_trained, TASKS[task], microbatches=2)
        yield f"population {task}", partial(_population, TASKS[task])
    yield "draws", partial(_trained, DRAWING)
    yield "population draws", partial(_population, DRAWING)
    yield "microbatches over_batch", lambda: _trained(LOSSES["over_batch"](), microbatches=2)
    mixed = "cutmix(1.0)", "ema('2ba')", "sam()", "gradient_clipping('norm', 0.1)"
    yield "microbatches mixed", lambda: _trained(TASKS["images"], *map(alg_of, mixed), microbatches=2)
    yield "population mixed", lambda: _population(TASKS["images"], *map(alg_of, mixed))
    yield "together", lambda: _trained(TASKS["images"], alg.label_smoothing(0.1), *map(alg_of, mixed))


def _population(task: Task, *algorithms: Any) -> Run:
    case = Case(task, num_batches=3)
    step = case.step(*algorithms)
    members = [step.init(case.state(key=key)) for key in range(3)]
    return Run(pc.population(step, 3), pc.stack_states(members), case.batches())


NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"hidden": (8, 6), "dropout": 0.2},
    "cnn": {"width": 4, "dropout": 0.2},
    "airbench": {"widths": (4, 6)},
    "resnet8": {"width": 4},
    "resnet20": {"width": 2},
    "resnet18": {"width": 4, "small_images": True},
    "resnet50": {"width": 2, "small_images": True},
    "vit": {"width": 8, "depth": 1, "num_heads": 2, "dropout": 0.2},
    "gpt": {"width": 8, "depth": 1, "num_heads": 2, "dropout": 0.2},
}
"""The options of small forms of `models.MODELS`."""


def _networks() -> Iterator[tuple[str, Callable[[], Run]]]:
    for name in models.MODELS:
        # The statistics of so deep a network, over few examples, make 1 of 1e-7 in three steps.
        for precision in ("fp64" if name == "resnet50" else "fp32", "bf16"):
            yield f"network {name} {precision}", partial(_network, name, precision)


def _network(name: str, precision: str) -> Run:
    is_text = name == "gpt"
    shape = (8,) if is_text else (3, 16, 16) if "resnet" in name or name == "airbench" else (3, 8, 8)

    def make_net(seed: int) -> nn.Module:
        net = models.build(name, in_shape=shape, num_classes=5, seed=seed, **NETWORKS[name])
        return layers.ClassesSecond(net) if is_text else net

    def make_batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        if is_text:
            ids = torch.randint(5, (size, 9), generator=generator)
            return ids[:, :-1].clone(), ids[:, 1:].clone()
        return torch.randn(size, *shape, generator=generator), torch.randint(5, (size,), generator=generator)

    options: dict[str, Any] = {"dtype": torch.float64} if precision == "fp64" else {"precision": precision}
    return _trained(Task(name, make_net, make_batch), optimizer=optim.sgd(0.01, momentum=0.9), **options)


def trials() -> Trials:
    """Return all trials by name; the first word of a name is the kind of what is tried."""
    return dict([*_methods(), *_optimizers(), *_losses(), *_precisions(), *_parts(), *_networks()])
