"""Open sizes: one graph for batches of many sizes, which is never used for a size it does not fit."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from purecompose import Event, State, algorithms as alg, every
from purecompose.batch import Splitter
from purecompose.core.context import Layout
from purecompose.testing.case import Subject
from purecompose.testing.tasks import TASKS
from purecompose.transforms.compilation.capture import fake_mode
from purecompose.transforms.compilation.sizes import Sizes, can_open, size_of
from purecompose.transforms.signature import Signature
from tests.graphs import make_graph, make_graph_state, own
from tests.helpers import changing, counter, make_batch, make_cnn, make_mlp, make_state, noise
from tests.sampling import one_in
from tests.shipped_examples import examples_on_tasks
from tests.transforms.compilation.compile_helpers import (
    DONATE,
    assert_runs_agree,
    average,
    made,
    scaling,
    sharpness,
    swap,
)


def signature(value: Any) -> Signature:
    return Signature.of(value)[0]


def fields(batch: Any) -> dict[str, Signature]:
    return {"batch": signature(batch), "outputs": signature(None)}


def of_sizes(sizes: Sequence[int], **options: Any) -> list[Any]:
    return [make_batch(seed, size, **options) for seed, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("batch", "layout", "size"),
    [
        ((torch.ones(()), torch.ones(5, 2), torch.ones(3)), Layout(field=1), 5),
        (
            {"a": torch.ones(3), "b": torch.ones(3, 1), "x": torch.ones(5, 2), "y": torch.ones(5)},
            Layout("x", 0, None, None, "y"),
            5,
        ),
        ((torch.ones(6, 5), torch.ones(30)), Layout(splitter=Splitter(lambda batch: len(batch[0]))), 0),
        (None, Layout(), 0),
        ((torch.ones(()),), Layout(), 0),
    ],
)
def test_the_size_is_the_number_of_examples_if_they_are_rows(batch: Any, layout: Layout, size: int) -> None:
    assert size_of({"batch": signature(batch)}, layout) == size


def test_a_size_allows_what_the_trace_assumed() -> None:
    traced, mode = fields(torch.ones(8, 2)), fake_mode()
    sizes = Sizes(mode, traced, Layout(), is_all=False)

    def allowed(*numbers: int) -> list[int]:
        return [n for n in numbers if sizes.allows(fields(torch.ones(n, 2)))]

    with mode:
        x = sizes.empty("batch", 0, traced["batch"].specs[0])
        assert allowed(100) == [100]
        if x.shape[0] > 6:
            x = x * 2
        assert allowed(0, 1, 2, 6, 7, 8, 100) == [7, 8, 100]
        _ = x.view(-1, 4) if x.shape[0] % 2 == 0 else x
    assert allowed(6, 7, 8, 9, 10) == [8, 10]


# Steps


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 fixes the size of dense targets in cross entropy")
@DONATE
def test_one_variant_serves_all_sizes(donate: bool) -> None:
    step, fast = made([noise(), average(), alg.label_smoothing(0.1), swap()], dynamic=True, donate=donate)
    state = step.init(make_state(make_cnn()))
    assert_runs_agree(step, fast, state, of_sizes((4, 8, 5, 9, 2), shape=(2, 6, 6)))
    assert len(fast.variants()) == 1
    assert [variant.batch for variant in fast.variants()] == ["nx2x6x6 n"]


def test_code_that_branches_on_the_size_has_a_variant_for_each_branch() -> None:
    def branch(state: State) -> State:
        factor = 2.0 if state.num_examples > 6 else 0.5
        return state.replace(inputs=state.inputs * factor * state.num_examples)

    step, fast = made([changing("branch", Event.BATCH_START, branch)], dynamic=True)
    assert_runs_agree(step, fast, make_state(), of_sizes((4, 8, 5, 9, 1, 2, 7)))
    assert len(fast.variants()) == 3  # above 6, not above, and a single example


SIZED: dict[str, Callable[[State], State]] = {
    "metric": lambda s: s.replace(metrics={"n": torch.ones(()) * s.num_examples}),
    "vector": lambda s: s.replace(metrics={"x": s.inputs[:, 0], "twice": torch.cat([s.inputs, s.inputs])}),
    "half": lambda s: s.replace(batch=tuple(member[: max(1, s.num_examples // 2)] for member in s.batch)),
    "pairs": lambda s: s.replace(batch=tuple(member[: s.num_examples // 2 * 2] for member in s.batch)),
    "weighted": lambda s: s.replace(inputs=s.inputs * torch.arange(s.num_examples)[:, None] / s.num_examples),
    "python": lambda s: s.replace(inputs=s.inputs * float(s.num_examples**0.5)),
    "fold": lambda s: s.replace(inputs=s.inputs.view(-1, 2, 4).flip(1).flatten(0, 1)) if s.num_examples % 2 == 0 else s,
    "table": lambda s: s.replace(inputs=s.inputs + torch.eye(4)[: min(s.num_examples, 4)].sum(0)),
    "is eight": lambda s: s.replace(inputs=s.inputs * 3) if s.num_examples == 8 else s,
}  # fmt: skip


@DONATE
@pytest.mark.parametrize("fn", SIZED.values(), ids=SIZED)
def test_code_that_uses_the_size_agrees(fn: Callable[[State], State], donate: bool) -> None:
    step, fast = made([changing("sized", Event.AFTER_DATALOADER, fn), counter()], dynamic=True, donate=donate)
    assert_runs_agree(step, fast, step.init(make_state()), of_sizes((4, 8, 5, 9, 8, 1)))


@pytest.mark.parametrize("chance", [4, 3, 8], ids=["features", "classes", "hidden"])
def test_sizes_that_happen_to_equal_other_dimensions_agree(chance: int) -> None:
    step, fast = made([noise(), average()], dynamic=True)
    assert_runs_agree(step, fast, step.init(make_state(make_mlp(dropout=0.3))), of_sizes((chance, 5, 7, chance)))


@DONATE
def test_members_of_a_batch_without_a_dimension_of_examples_agree(donate: bool) -> None:
    weigh = changing("weigh", Event.AFTER_FORWARD, lambda s: s.replace(outputs=s.outputs * s.batch["w"].sum()))
    step, fast = made([weigh], dynamic=True, donate=donate)
    weights = torch.linspace(0, 1, 4)
    batches = [{"x": x, "y": y, "w": weights} for x, y in of_sizes((4, 5, 6, 4))]
    assert_runs_agree(step, fast, make_state(input_field="x", target_field="y"), batches)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "sliced": lambda x: torch.cat([x, x], 3)[..., ::2],
    "expanded": lambda x: x[:1].expand_as(x),
    "every other": lambda x: torch.stack([x, x], 1).flatten(0, 1)[::2],
}


@pytest.mark.parametrize("dynamic", [True, "all"])
@pytest.mark.parametrize("lay", one_in(6, LAYOUTS))
def test_layouts_agree(lay: str, dynamic: bool | str) -> None:
    step, fast = made([noise()], dynamic=dynamic)
    batches = [
        (LAYOUTS[lay](x) if seed % 2 else x, y)
        for seed, (x, y) in enumerate(of_sizes((4, 4, 5, 5, 7, 7, 1, 1), shape=(2, 6, 6)))
    ]
    assert_runs_agree(step, fast, make_state(make_cnn()), batches)


@pytest.mark.slow
@DONATE
def test_boundaries_and_slices_agree(donate: bool) -> None:
    methods = [scaling("a", Event.AFTER_DATALOADER, 1.1, 2), sharpness(when=every(3)), alg.mixup(0.2), noise()]
    step, fast = made(methods, dynamic=True, donate=donate, microbatches=3)
    assert_runs_agree(step, fast, step.init(make_state()), of_sizes((6, 8, 9)))


# All sizes of the batch


def test_all_sizes_are_open_unless_an_operation_needs_one() -> None:
    def make(rows: int, columns: int, other: int) -> dict[str, Signature]:
        return fields((torch.ones(rows, columns), torch.ones(2, other), torch.ones(rows), torch.ones(6, 5)[:rows, :4]))

    traced, mode = make(5, 3, 5), fake_mode()
    sizes = Sizes(mode, traced, Layout(), is_all=True)
    with mode:
        x, _, weights, part = (sizes.empty("batch", i, spec) for i, spec in enumerate(traced["batch"].specs))
        _ = (x @ torch.ones(3, 4) * part).sum(1) * weights
    others = {"rows": make(6, 3, 5), "edges": make(5, 3, 9), "both": make(2, 3, 5), "features": make(5, 4, 5)}
    found = {name for name, other in others.items() if sizes.allows(other)}
    assert found == {"rows", "edges", "both"}
    assert all(sizes.fits("batch", traced["batch"], other) for other in others.values())
    for other in (make(5, 1, 5), make(5, 3, 0), fields((torch.ones(3, 5).t(), *[torch.ones(2)] * 3))):
        assert not sizes.fits("batch", traced["batch"], other)
    assert sizes.describe("batch", traced["batch"]) == [("n", 3), ("n", "n"), ("n",), ("n", 4)]
    assert can_open(fields(torch.ones(1, 2)), Layout(), is_all=True) and not can_open(
        fields(torch.ones(1, 1)), Layout(), is_all=True
    )


class Pooled(nn.Module):
    """A mean over positions, the same for every length, with dropout for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout, self.head = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(torch.tanh(self.linear(x))).mean(1))


@DONATE
@pytest.mark.slow
def test_one_variant_serves_sequences_of_every_number_and_length(donate: bool) -> None:
    torch.manual_seed(0)
    step, fast = made([noise(), average()], dynamic="all", donate=donate, max_variants=2)
    batches = [make_batch(seed, 4 + seed % 3, shape=(2 + seed % 37, 4)) for seed in range(40)]
    assert_runs_agree(step, fast, step.init(make_state(Pooled())), batches)
    assert [variant.batch for variant in fast.variants()] == ["nxnx4 n"]


def test_one_variant_serves_graphs_of_every_size() -> None:
    step, fast = made(dynamic="all", max_variants=1)
    batches = [own([make_graph(seed + i) for i in range(2 + seed % 4)]) for seed in range(40)]
    assert_runs_agree(step, fast, make_graph_state(), batches)
    (variant,) = fast.variants()
    assert variant.batch == "nx4 2xn n n n" and variant.hits == 40


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_inductor_leaves_all_sizes_open() -> None:
    """The size of the features is open, until the first layer requires a certain one."""
    step, fast = made(dynamic="all", backend="inductor", max_variants=1)
    assert_runs_agree(step, fast, make_state(), [make_batch(seed, 4 + seed) for seed in range(3)])


def test_known_graphs_serve_a_new_size_without_a_trace() -> None:
    """A trace takes a quarter of a second, which batches that change in size would pay in every step."""
    calls: list[int] = []

    class Counted(Pooled):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x.ndim)
            return super().forward(x)

    _, fast = made(dynamic="all")
    state = make_state(Counted())
    for seed in range(3):
        state = fast(state, make_batch(seed, 4 + seed, shape=(5 + seed, 4)))
        if not seed:
            calls.clear()
    assert not calls


@pytest.mark.slow
def test_parts_of_a_step_agree_with_all_sizes_open() -> None:
    methods = [scaling("a", Event.AFTER_DATALOADER, 1.1, 2), sharpness(when=every(3)), alg.mixup(0.2), noise()]
    step, fast = made(methods, dynamic="all")
    batches = [make_batch(seed, 4 + seed % 3, shape=(3 + seed, 4)) for seed in range(7)]
    assert_runs_agree(step, fast, step.init(make_state(Pooled())), batches)


@pytest.mark.parametrize("dynamic", [True, pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("text, task", examples_on_tasks(quick=60))
def test_shipped_settings_agree(text: str, task: str, dynamic: bool | str) -> None:
    step, fast = made([Subject.of(text).algorithm], dynamic=dynamic)
    state = step.init(TASKS[task].make_state(0, duration="5ba", batches_per_epoch=3))
    assert_runs_agree(step, fast, state, [TASKS[task].make_batch(i, size) for i, size in enumerate((4, 6, 5, 4, 3))])
