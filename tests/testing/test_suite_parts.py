"""The laws of parts: what they compare, and what they report."""

import pytest
import torch

from purecompose import Algorithm, Event, algorithms as alg, on
from purecompose.testing.case import Case
from purecompose.testing.law import LawViolation, NotJudged
from purecompose.testing.suite import parts
from purecompose.testing.suite.parts import microbatches_agree, ranks_agree, shards_agree
from purecompose.testing.tasks import TASKS
from purecompose.transforms.sharding.step import fully_sharded
from tests.helpers import changing


def looking():
    """Return a list, and an algorithm that appends the number of examples to it at BEFORE_FORWARD."""
    seen = []

    def look(state):
        seen.append(state.num_examples)
        return state

    return seen, changing("subject", Event.BEFORE_FORWARD, look)


# microbatches_agree


@pytest.mark.parametrize("given_number, taken", [(1, 2), (2, 2), (3, 3)])
def test_the_microbatches_of_the_case_are_used_or_else_two(given_number, taken):
    sizes, look = looking()
    assert microbatches_agree(look, Case(batch_size=6, microbatches=given_number))
    assert sizes == [6] + taken * [6 // taken]


def test_batch_norm_is_disabled_and_the_rest_of_the_network_is_judged():
    case = Case(task=TASKS["images"], batch_size=4)
    centred = changing("subject", Event.BEFORE_FORWARD, lambda s: s.replace(inputs=s.inputs - s.inputs.mean(0)))
    assert microbatches_agree(alg.label_smoothing(0.1), case)
    with pytest.raises(LawViolation, match="grads"):
        microbatches_agree(centred, case)


def test_an_error_only_in_slices_breaks_the_law():
    weights = torch.linspace(0, 1, 4)[:, None]
    weighted = changing("subject", Event.BEFORE_FORWARD, lambda state: state.replace(inputs=state.inputs * weights))
    with pytest.raises(LawViolation, match="raised only with 2 microbatches: RuntimeError") as caught:
        microbatches_agree(weighted, Case(batch_size=4))
    assert caught.value.event is Event.BEFORE_FORWARD
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_metrics_that_are_single_numbers_agree_and_others_may_differ():
    def report(state):
        return state.replace(metrics={**state.metrics, "loss": state.loss, "size": state.outputs[:1]})

    assert microbatches_agree(changing("subject", Event.AFTER_LOSS, report), Case())

    def square(state):
        return state.replace(metrics={**state.metrics, "square": state.loss**2})

    with pytest.raises(LawViolation) as caught:
        microbatches_agree(changing("subject", Event.AFTER_LOSS, square), Case())
    assert caught.value.path == "metrics['square']"


# ranks_agree


@pytest.mark.parametrize("seed, sizes", [(0, [3, 2]), (1, [2, 2, 1])])
def test_processes_share_the_batch(seed, sizes):
    seen, look = looking()
    assert ranks_agree(look, Case(batch_size=5, seed=seed))
    assert seen[: len(sizes) + 1] == [5, *sizes]


def test_processes_that_diverge_are_reported():
    def shrink(event, state):
        if event is Event.AFTER_LOSS:
            return state.replace(metrics={**state.metrics, "own": state.outputs.detach()})
        factor = 1 - 1e-3 * state.metrics["own"].abs().mean()
        return state.replace(params={name: factor * param for name, param in state.params.items()})

    own_outputs = Algorithm("shrink", on(Event.AFTER_LOSS, Event.BATCH_END), shrink)
    with pytest.raises(LawViolation, match="params") as caught:
        ranks_agree(own_outputs, Case())
    assert list(caught.value.values) == ["in process 0", "in process 1"]


def test_processes_that_wait_for_each_other_are_reported():
    def report(state):
        own = {} if state.first_example == 0 else {"later": state.loss}
        return state.replace(metrics={**state.metrics, **own})

    with pytest.raises(LawViolation, match="raised only with 2 processes: RuntimeError: processes wait"):
        ranks_agree(changing("subject", Event.AFTER_LOSS, report), Case())


# shards_agree


def test_what_happens_between_steps_is_compared_after_each_batch() -> None:
    def report(state):
        weight = state.params["0.weight"]
        own = weight.to_local() if hasattr(weight, "to_local") else weight
        return state.replace(metrics={**state.metrics, "size": own.abs().sum()})

    subject = changing("subject", Event.EPOCH_END, report)
    assert shards_agree(subject, Case(batches_per_epoch=3, num_batches=2)) is False
    with pytest.raises(LawViolation) as caught:
        shards_agree(subject, Case(batches_per_epoch=3, num_batches=3))
    assert (caught.value.event, caught.value.path) == (Event.EPOCH_END, "metrics['size']")


def test_what_cannot_be_divided_by_layer_is_not_judged() -> None:
    by_layer, by_step = Case(seed=1), Case(seed=2)
    with pytest.raises(NotJudged, match="use gather='step'"):
        shards_agree(alg.gradient_noise_scale(), by_layer)
    assert shards_agree(alg.gradient_noise_scale(), by_step) is True


def test_an_error_that_is_not_a_refusal_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(step, *args):
        if step.algorithms[0].events == (Event.AFTER_LOSS,):
            raise ValueError("too many values to unpack")
        return fully_sharded(step, *args)

    monkeypatch.setattr(parts, "fully_sharded", failing)
    with pytest.raises(LawViolation, match="raised only with 4 processes .*too many values"):
        shards_agree(changing("subject", Event.AFTER_LOSS, lambda state: state), Case(seed=1))


@pytest.mark.parametrize(("microbatches", "evaluated"), [(1, ()), (2, ("1",))])
def test_batch_norm_sees_the_whole_batch_unless_microbatches_cut_it(microbatches, evaluated):
    found = set()

    def look(state):
        found.add(state.model.evaluated_parts)
        return state

    case = Case(TASKS["images"], batch_size=4, microbatches=microbatches)
    assert shards_agree(changing("subject", Event.BATCH_START, look), case) is True
    assert found == {evaluated}
