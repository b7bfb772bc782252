"""How many examples a batch has, in every form of batch: all that asks for the number gets the same one."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, algorithms as alg, batch as batches, compose, loop_events, losses, optim, tree
from purecompose.testing.process import played
from tests import helpers


CLASSES, SIZES = 3, (14, 6)
PRIOR = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
TABLE = torch.linspace(-1, 1, 4 * CLASSES, dtype=torch.float64).reshape(4, CLASSES)


@dataclass(frozen=True)
class Data:
    x: Tensor
    rest: dict[str, Any]


class Net(nn.Module):
    """A classifier that reads x, (N, ..., 4), and what all examples share, from the inputs."""

    def __init__(self, pick: Callable[..., tuple[Tensor, Any]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.pick = nn.Linear(4, CLASSES).double(), pick

    def forward(self, *inputs: Any) -> Tensor:
        x, shared = self.pick(*inputs)
        return self.linear(x) + shared


class OwnLoss(nn.Module):
    """A model that computes its own loss; each label has a row of a table that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(lambda x: (x, 0.0))

    def forward(self, bias: Tensor, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x) + bias[labels]
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def plain(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def with_prior(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs + targets["prior"].log(), targets["y"])


def with_classes(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs + targets["table"][0], targets["y"])


def of_samples(outputs: Tensor, targets: list[Any]) -> Tensor:
    return F.cross_entropy(outputs, torch.stack([label for _, label in targets]))


def ragged(x: Tensor, y: Tensor) -> list[Any]:
    return [(row.expand(1 + i % 3, -1), label) for i, (row, label) in enumerate(zip(x, y, strict=True))]


class Form(NamedTuple):
    make: Callable[[Tensor, Tensor], Any]
    """A batch of x (N, 4) and y (N,)."""
    pick: Callable[..., Any] | None = lambda x: (x, 0.0)
    loss: Callable[..., Any] = plain
    options: dict[str, Any] = {"input_field": "x", "target_field": "y"}
    maps: bool = True
    """Whether `per_example_clipping` takes it."""

    def state(self, **more: Any) -> State:
        net = OwnLoss() if self.pick is None else Net(self.pick)
        return State.create(
            net, loss=self.loss, optimizer=optim.sgd(0.5), duration="8ba", key=0, **self.options, **more
        )


PAIR: dict[str, Any] = {"input_field": 0, "target_field": 1}

FORMS = {
    "pair": Form(lambda x, y: (x, y), options=PAIR),
    "prior first": Form(lambda x, y: (x, {"prior": PRIOR, "y": y}), loss=with_prior, options=PAIR),
    "prior last": Form(lambda x, y: (x, {"y": y, "prior": PRIOR}), loss=with_prior, options=PAIR),
    "table in targets, first": Form(lambda x, y: (x, {"table": TABLE, "y": y}), loss=with_classes, options=PAIR),
    "table in targets, last": Form(lambda x, y: (x, {"y": y, "table": TABLE}), loss=with_classes, options=PAIR),
    "table elsewhere": Form(lambda x, y: {"table": TABLE, "x": x, "y": y, "id": [f"{i}" for i in range(len(x))]}),
    "position ids": Form(
        lambda x, y: {"at": TABLE[:1, 0], "x": x, "y": y},
        lambda at, x: (x, at),
        options={"input_field": ["at", "x"], "target_field": "y"},
    ),
    "table among inputs": Form(
        lambda x, y: {"table": TABLE, "x": x, "y": y},
        lambda table, x: (x, table.mean(0)),
        options={"input_field": ["table", "x"], "target_field": "y"},
    ),
    "dataclass": Form(
        lambda x, y: Data(x, {"shared": [TABLE, torch.tensor(2.0)], "y": y}),
        options={"input_field": "x", "target_field": (lambda b: b.rest["y"], lambda b, v: Data(b.x, {"y": v}))},
    ),
    "no target": Form(
        lambda x, y: {"x": x, "y": y, "table": TABLE[:1]},
        lambda b: (b["x"], b["y"][:, None].double()),
        lambda outputs, targets: outputs.square().mean(),
        {"input_field": batches.AS_ARGUMENT, "target_field": None},
    ),
    "own loss, table first": Form(lambda x, y: {"bias": TABLE, "x": x, "labels": y}, None, losses.model_loss, {}),
    "own loss, table last": Form(lambda x, y: {"labels": y, "x": x, "bias": TABLE}, None, losses.model_loss, {}),
    "sequences": Form(
        lambda x, y: (x.expand(5, -1, -1), y), lambda x: (x.mean(0), 0.0), options={**PAIR, "batch_dim": 1}, maps=False
    ),
    "ragged": Form(
        ragged,
        lambda b: (torch.stack([rows.mean(0) for rows, _ in b]), 0.0),
        of_samples,
        {
            "input_field": batches.AS_ARGUMENT,
            "target_field": batches.WHOLE,
            "splitter": batches.Splitter(len, lambda batch, start, stop: batch[start:stop]),
        },
        maps=False,
    ),
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))


def data(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (size,), generator=generator)


def value(form: Form, batch: Any) -> Tensor:
    """Return the loss of a batch, from the network and the loss themselves."""
    state = form.state()
    inputs = batches.get(batch, state.context.input_field)
    outputs = state.forward(inputs)
    if form.pick is None:
        return outputs["loss"]
    targets = batches.get(batch, state.context.target_field)
    return form.loss(outputs, targets)


assert_near = functools.partial(helpers.assert_near, rtol=1e-6, atol=1e-9)


@forms
@pytest.mark.parametrize("size", [14, 1])
def test_the_number_is_that_of_x(form, size):
    assert form.state().context.layout.num_examples(form.make(*data(size))) == size


@forms
def test_evaluation_weighs_batches_by_their_examples(form):
    given = [form.make(*data(size)) for size in SIZES]
    expected = sum(size * value(form, batch).item() for size, batch in zip(SIZES, given, strict=True)) / sum(SIZES)
    found = pc.evaluate(form.state(), given, {} if form.pick else {"loss": pc.metrics.mean_loss(form.loss)})
    assert found["loss"] == pytest.approx(expected, rel=1e-6)


@forms
def test_slices_give_the_whole_and_time_counts_the_examples(form):
    ends = []
    for step in (compose(loop_events), compose(loop_events, microbatches=2), compose(loop_events, microbatch_size=4)):
        state = form.state()
        for size in SIZES:
            state = step(state, form.make(*data(size)))
        ends.append(state)
    assert [end.timestamp.sample for end in ends] == [20, 20, 20]
    for end in ends[1:]:
        assert_near(end.params, ends[0].params)
        assert_near(end.loss, ends[0].loss)


@pytest.mark.parametrize("name", ["prior first", "own loss, table first"])
def test_compiled_steps_and_processes_see_the_same_examples(name):
    form, step = FORMS[name], compose(loop_events, microbatches=2)
    batch = form.make(*data(6))
    expected = step(form.state(), batch).params
    compiled = pc.compile(step, backend="eager", quiet=True, dynamic=True)
    assert_near(compiled(form.state(), batch).params, expected)
    for state in played(step, 2)(lambda one: one(form.state(), batch)):
        assert_near(state.params, expected)


def test_draws_belong_to_examples_where_the_inputs_contain_a_table():
    form = FORMS["table among inputs"]._replace(pick=lambda table, x: (F.dropout(x), table.mean(0)))
    ends = [compose(loop_events, microbatches=k)(form.state(), form.make(*data(6))) for k in (1, 3)]
    assert_near(ends[1].params, ends[0].params)


@pytest.mark.parametrize("form", [form for form in FORMS.values() if form.maps])
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_each_example_is_clipped(form, chunk_size):
    x, y = data(6)
    state = form.state()
    step = compose(loop_events, [alg.per_example_clipping(0.1, chunk_size=chunk_size)])
    found = step(step.init(state), form.make(x, y))
    plain_step, expected = compose(loop_events), {name: torch.zeros_like(param) for name, param in state.params.items()}
    for i in range(6):
        one = plain_step(state, form.make(x[i : i + 1], y[i : i + 1])).params
        grads = {name: (state.params[name] - param) / 0.5 for name, param in one.items()}
        norm = tree.global_norm(grads)
        for name, grad in grads.items():
            expected[name] += grad * (0.1 / norm).clamp(max=1) / 6
    assert_near({name: (state.params[name] - param) / 0.5 for name, param in found.params.items()}, expected)


@pytest.mark.parametrize(
    "names",
    [("prior first", "prior last"), ("table elsewhere", "pair"), ("own loss, table first", "own loss, table last")],
)
def test_methods_count_the_same_examples(names):
    warmup, noise = alg.batch_size_warmup(0.5, initial_share=0.5, multiple=1), alg.gradient_noise_scale(decay=0.0)
    found = []
    for form in map(FORMS.__getitem__, names):
        state, step = form.state(), compose(loop_events, [warmup])
        assert step(step.init(state), form.make(*data(14))).metrics["batch_size_warmup/batch_size"] == 7
        step = compose(loop_events, [noise])
        found.append(step(step.init(state), form.make(*data(14))).metrics["gradient_noise_scale/trace"].item())
    assert found[0] == pytest.approx(found[1])


AMBIGUOUS = {
    "flattened targets": ((torch.ones(6, 5), torch.zeros(30)), PAIR, ["6 (by batch[0])", "30 (by batch[1])"]),
    "boxes of one image": ((torch.ones(1, 3, 8, 8), torch.zeros(5, 4)), PAIR, ["1 (by batch[0])", "5 (by batch[1])"]),
    "two in common": (
        ({"a": torch.ones(4), "b": torch.ones(6)}, {"c": torch.ones(4), "d": torch.ones(6)}),
        PAIR,
        ["4 (by batch[0]['a'], batch[1]['c'])", "6 (by batch[0]['b'], batch[1]['d'])"],
    ),
    "sequences": ((torch.ones(5, 8, 2), torch.zeros(8)), PAIR, ["batch_dim=1", "5 (by batch[0]) or 8 (by batch[1])"]),
    "own loss without labels": (
        {"bias": torch.ones(4, 3), "x": torch.ones(9, 4)},
        {"input_field": batches.WHOLE, "target_field": None},
        ["4 (by batch['bias'])", "9 (by batch['x'])"],
    ),
}


def images(num: int, boxes: int) -> list[Any]:
    return [(torch.ones(3, 8, 8 + i), {"boxes": torch.ones(boxes, 4)}) for i in range(num)]


WHOLE: dict[str, Any] = {"input_field": batches.AS_ARGUMENT, "target_field": batches.WHOLE}


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (images(4, 1), WHOLE),
        (images(4, 3), WHOLE),
        (images(4, 3), {**WHOLE, "target_field": None}),
        (images(4, 2), PAIR),
        (tuple(zip(*images(4, 1), strict=True)), PAIR),
        (tuple(zip(*images(4, 3), strict=True)), PAIR),
    ],
)
def test_samples_that_are_not_collated_need_a_splitter(batch, options):
    """The rows of the tensors are channels, or boxes."""
    state = Form(lambda x, y: None, options=options).state()
    with pytest.raises(ValueError, match="cannot tell.*splitter=batch.Splitter"):
        compose(loop_events)(state, batch)


@pytest.mark.parametrize(("batch", "options", "words"), AMBIGUOUS.values(), ids=list(AMBIGUOUS))
def test_what_is_ambiguous_is_an_error_with_the_candidates_and_the_remedy(batch, options, words):
    state = Form(lambda x, y: None, options=options).state()
    for call in (lambda: compose(loop_events)(state, batch), lambda: pc.evaluate(state, [batch])):
        with pytest.raises(ValueError, match="cannot tell how many examples the batch has") as caught:
            call()
        assert all(word in str(caught.value) for word in [*words, "leading dimension of 1", "splitter=batch.Splitter"])


@pytest.mark.filterwarnings(
    "ignore:the network's outputs for an example depend:UserWarning"
)  # 4 examples: by the table
@pytest.mark.parametrize("sizes", [(8, 4), (4, 8)])
@pytest.mark.parametrize("name", ["table in targets, first", "table among inputs", "own loss, table last"])
def test_a_table_is_not_cut_where_it_has_as_many_rows_as_the_batch(name, sizes):
    """TABLE has 4 rows, which a batch of 4 would give to its examples."""
    form = FORMS[name]
    first, second = (form.make(x, y % 2) for x, y in map(data, sizes))
    cut, whole, state = compose(loop_events, microbatches=2), compose(loop_events), form.state()
    after = cut(state, first)
    with pytest.raises(ValueError, match=r"(\['table'\]|\['bias'\]) \(4, 3\) would be .* leading dimension of 1"):
        cut(after, second)
    assert whole(after, second).timestamp.sample == 12
    assert cut(after, form.make(*data(1))).timestamp.sample == sizes[0] + 1
    for method in (alg.per_example_clipping(1.0), alg.gradient_noise_scale()):
        step, state = compose(loop_events, [method]), form.state()
        after = step(step.init(state), first)
        with pytest.raises(ValueError, match="would be"):
            step(after, second)


def flattened(size: int) -> Any:
    return torch.randn(size, 5, 4), torch.arange(5 * size) % CLASSES


def views(size: int) -> Any:
    return torch.randn(2 * size, 4), torch.arange(size) % CLASSES


def points(size: int) -> Any:
    return {"interior": torch.rand(5 * size, 4), "boundary": torch.rand(size, 4)}


class Solution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(4, 1)

    def forward(self, points: dict[str, Tensor]) -> Any:
        return {name: self.value(x) for name, x in points.items()}


def residual(outputs: dict[str, Tensor], targets: None) -> Tensor:
    return outputs["interior"].square().mean() + outputs["boundary"].square().mean()


@pytest.mark.parametrize(
    ("make", "net", "loss", "count", "options"),
    [
        (flattened, nn.Sequential(nn.Linear(4, CLASSES), nn.Flatten(0, 1)), plain, lambda b: len(b[0]), PAIR),
        (
            views,
            nn.Linear(4, CLASSES),
            lambda outputs, y: F.cross_entropy(outputs, y.repeat(2)),
            lambda b: len(b[1]),
            PAIR,
        ),
        (points, Solution(), residual, lambda b: len(b["boundary"]), {**WHOLE, "target_field": None}),
    ],
)
def test_a_function_that_counts_is_enough_where_nothing_is_cut(make, net, loss, count, options):
    settings: dict[str, Any] = {"loss": loss, "optimizer": optim.sgd(0.1), "duration": "2ep", **options}
    step, data = compose(loop_events), [make(6), make(4)]
    with pytest.raises(ValueError, match=r"splitter=batch.Splitter\(lambda batch: len\(batch\["):
        step(State.create(net, **settings), data[0])
    state = State.create(net, splitter=batches.Splitter(count), **settings)
    end = pc.fit(step, state, data, evaluate=pc.Evaluator(data))
    assert end.timestamp.sample == 20
    context = end.context
    values = [
        loss(end.forward(batches.get(b, context.input_field)), batches.get(b, context.target_field)) for b in data
    ]
    assert pc.evaluate(end, data)["loss"] == pytest.approx((6 * values[0] + 4 * values[1]).item() / 10, rel=1e-6)
    with pytest.raises(ValueError, match="microbatches=2: the batch would be cut"):
        compose(loop_events, microbatches=2)(state, data[0])


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(9, 4), nn.Linear(4, CLASSES)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bags(ids, offsets))


def ctc(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
    lengths = torch.full((len(outputs),), outputs.shape[1])
    return F.ctc_loss(outputs.log_softmax(-1).transpose(0, 1), targets["all"], lengths, targets["lengths"])


@pytest.mark.parametrize(
    ("net", "loss", "batch", "options"),
    [
        (
            nn.Linear(4, 5),
            ctc,
            (torch.ones(4, 9, 4), {"all": torch.ones(6).long(), "lengths": torch.tensor([2, 1, 2, 1])}),
            PAIR,
        ),
        (
            Bags(),
            plain,
            {"ids": torch.arange(9), "at": torch.tensor([0, 3, 5, 7]), "y": torch.tensor([0, 1, 2, 0])},
            {"input_field": ["ids", "at"], "target_field": "y"},
        ),
    ],
)
def test_concatenated_members_are_counted_and_refer_to_a_splitter_where_they_are_cut(net, loss, batch, options):
    state = State.create(net, loss=loss, optimizer=optim.sgd(0.1), **options)
    plain_step = compose(loop_events)
    assert plain_step(state, batch).timestamp.sample == 4
    for step in (compose(loop_events, microbatches=2), lambda *given: played(plain_step, 2)(lambda one: one(*given))):
        with pytest.raises(RuntimeError) as caught:
            step(state, batch)
        assert "with all of ['int64[" in "".join(caught.value.__notes__)
        assert "splitter=batch.Splitter" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("settings", [[1, 2, 3, 4], ("a", "b", "c", "d"), np.arange(4)])
def test_settings_in_a_list_are_not_cut_where_they_are_as_many_as_the_examples(settings):
    step = compose(loop_events, microbatches=2)
    make = lambda size: dict(zip("xy", data(size), strict=True)) | {"id": list(range(size)), "set": settings}  # noqa: E731
    for first, second in ((8, 4), (4, 8)):
        state = Form(lambda x, y: None).state()
        with pytest.raises(ValueError, match=r"\['set'\] \(4,\) would be .* named tuple"):
            step(step(state, make(first)), make(second))
    state = Form(lambda x, y: None).state()
    assert step(step(state, make(8)), make(6)).timestamp.sample == 14
