"""Arguments of runs that are refused: what was given, where, and what to do instead."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import Checkpoints, EarlyStopping, Evaluator, ReduceOnPlateau, Threshold, compose, fit, loop_events
from purecompose.observers import History
from tests.helpers import make_batches, make_state


ONE, TWO = make_batches(1), make_batches(2)
ERRORS = (TypeError, ValueError)
ACCURACY = pc.metrics.accuracy


class Untouchable(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        raise AssertionError("iterated")


def run(state: dict[str, Any] | None = None, data: Any = TWO, step: Any = None, **settings: Any) -> Any:
    step = compose(loop_events) if step is None else step
    return fit(step, make_state(**(state or {})), data, **settings)


def training(**settings: Any) -> Any:
    return pc.training(compose(loop_events), make_state(), TWO, **settings)


def without_advance() -> Any:
    return compose(tuple(node for node in loop_events if node not in (pc.loop.advance, pc.Event.BATCH_END)))


def finished(duration: str | None) -> Any:
    return fit(compose(loop_events), run(), TWO, duration=duration)


TWICE = [Evaluator(TWO), Evaluator(ONE), Evaluator(ONE, label="other")]
LOSS = Evaluator(TWO, {"loss": pc.losses.cross_entropy})
STACKED = "stop: a population with stopping rules does not work, because its members would stop at different times"


def evaluator(**settings: Any) -> Evaluator:
    return Evaluator([], **settings)


def stopped_members() -> Any:
    many, states = pc.population(compose(loop_events), 2), pc.stack_states([make_state(), make_state()])
    return fit(many, states, TWO, evaluate=LOSS, stop=Threshold("eval/loss", 0.1))


REFUSED: list[tuple[Callable[[], Any], Any, str]] = [
    # The run
    (lambda: run(step=without_advance()), ValueError, "no `advance`, so training would never end"),
    (lambda: run({"duration": None}), ValueError, "no duration: give State.create or fit one"),
    (lambda: finished(None), ValueError, 'the end of its 2ep; give fit a longer duration, as in duration="4ep"'),
    (lambda: finished("3ba"), ValueError, 'past the end of its 3ba; give fit a longer duration, as in duration="8ba"'),
    (lambda: run({"batches_per_epoch": 4}), ValueError, "2 batches, but the state's batches_per_epoch is 4"),
    (lambda: run(microbatches="4"), ValueError, "a number is given to compose"),
    (lambda: run(resume="auto"), ValueError, "say where, checkpoints=Checkpoints(folder)"),
    (lambda: run(resume=True), TypeError, "resume: expected 'auto' or the path of a checkpoint, got True (bool)"),
    (lambda: run(checkpoints="folder"), TypeError, "checkpoints: expected Checkpoints(folder), got 'folder'"),
    (lambda: run(observer=print), TypeError, "'observer'; did you mean 'observers'?"),
    (lambda: training(epochs=3), TypeError, "unexpected keyword argument 'epochs'"),
    # One or several
    (lambda: run(observers=[History]), TypeError, "observers: expected a function (event, state) -> None, or several"),
    (lambda: run(observers=3), TypeError, "got 3 (int)"),
    (lambda: run(observers="tensorboard"), TypeError, "got 'tensorboard'"),
    (lambda: run(observers=[object()]), TypeError, "got <object"),
    (lambda: run(observers=lambda state: None), TypeError, "<lambda>"),
    (
        lambda: run(stop="eval/loss"),
        TypeError,
        'stop: expected EarlyStopping("eval/loss") or a rule with metric, name, init, see and is_over, or several, got',
    ),
    (lambda: run(stop=SimpleNamespace(is_over=bool)), TypeError, "stop: expected EarlyStopping"),
    (lambda: run(stop=ReduceOnPlateau("eval/loss"), evaluate=LOSS), TypeError, "got ReduceOnPlateau("),
    (lambda: run(stop=[EarlyStopping]), TypeError, "got <class"),
    (lambda: run(adjust="eval/loss"), TypeError, 'adjust: expected ReduceOnPlateau("eval/loss") or a rule with metric'),
    (lambda: run(adjust=SimpleNamespace(see=min)), TypeError, "adjust: expected ReduceOnPlateau"),
    (lambda: run(adjust=Threshold("eval/loss", 0.1), evaluate=LOSS), TypeError, "without is_over, which is for stop="),
    (lambda: run(evaluate=pc.data.arrays(*ONE[0], batch_size=2)), TypeError, "expected Evaluator(data, metrics)"),
    (lambda: run(evaluate=torch.utils.data.DataLoader(Untouchable())), TypeError, "DataLoader"),
    (lambda: run(evaluate=TWO), TypeError, "(tuple)"),
    (lambda: run(evaluate=TWICE), ValueError, "two evaluators are labelled 'eval'"),
    (lambda: run(evaluate=LOSS, stop=[Threshold("eval/loss", 0.1)] * 2), ValueError, "the same name"),
    (stopped_members, ValueError, STACKED),
    # Metrics that nothing reports, or without a direction
    (lambda: run(stop=EarlyStopping("eval/los"), evaluate=LOSS), ValueError, "reports 'eval/los'; there are eval/loss"),
    (lambda: run(adjust=ReduceOnPlateau("eval/loss")), ValueError, "adjust: reduce_on_plateau(eval/loss, lr): no eval"),
    (
        lambda: run(checkpoints=Checkpoints("unused", best="eval/lss"), evaluate=LOSS),
        ValueError,
        "checkpoints: best: no evaluator reports 'eval/lss'",
    ),
    *[
        (
            lambda setting=setting: run(
                evaluate=Evaluator(TWO, {"gap": lambda outputs, _: outputs.mean(1)}), **setting
            ),
            ValueError,
            "'eval/gap': are lower or higher values better?",
        )
        for setting in [
            {"stop": EarlyStopping("eval/gap")},
            {"stop": Threshold("eval/gap", 1.0)},
            {"adjust": ReduceOnPlateau("eval/gap")},
            {"checkpoints": Checkpoints("unused", best="eval/gap")},
        ]
    ],
    # Evaluators
    *[(lambda every=every: evaluator(every=every), ValueError, "a positive time") for every in ("0ep", "10sec")],
    *[(lambda every=every: evaluator(every=every), ERRORS, f"every={every!r}: ") for every in (0.5, "often", None)],
    (lambda: evaluator(metrics=["accuracy", ACCURACY]), ValueError, "two metrics are called 'accuracy'"),
    (lambda: evaluator(metrics="acuracy"), ValueError, "did you mean 'accuracy'"),
    *[(lambda one=one: Evaluator([], {"one": one}), TypeError, "expected a Metric or a function") for one in (3, {})],
    (
        lambda: Evaluator([], {"one": lambda outputs: outputs}),
        TypeError,
        "cannot be called as metric(outputs, targets)",
    ),
    # Rules
    (lambda: EarlyStopping("eval/loss", patience="0ep"), ValueError, "patience='0ep'"),
    (lambda: EarlyStopping("eval/loss", patience="0.1dur"), ValueError, "expected epochs, batches, samples or tokens"),
    (lambda: EarlyStopping("eval/loss", patience="5sec"), ValueError, "not in seconds"),
    (lambda: EarlyStopping("eval/loss", min_delta=-1), ValueError, "min_delta"),
    (lambda: EarlyStopping(3), TypeError, "metric=3"),  # pyright: ignore
    (lambda: Threshold("eval/loss", 0.1, mode="low"), ValueError, "mode='low'"),
    (lambda: Threshold("eval/loss", "0.1"), TypeError, "value"),  # pyright: ignore
    (lambda: ReduceOnPlateau("eval/loss").init(make_state()), ValueError, "no hparam 'lr', only []; make it part of"),
    (lambda: ReduceOnPlateau("eval/loss", factor=1.0), ValueError, "factor=1.0: expected a number in (0, 1)"),
    (lambda: ReduceOnPlateau("eval/loss", cooldown="3ba"), ValueError, "expected a time in the unit of patience=10ep"),
    # Checkpoints
    (lambda: Checkpoints("unused", keep="all"), TypeError, "keep: expected an int >= 1, got 'all'"),  # pyright: ignore
    (lambda: Checkpoints("unused", keep=0), ValueError, "keep"),
    (lambda: Checkpoints("unused", every="0ep"), ValueError, "every"),
    (lambda: Checkpoints("unused", mode="low"), ValueError, "mode='low': expected 'min' or 'max'"),
    (lambda: Checkpoints("unused", background=1), TypeError, "background"),  # pyright: ignore
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_an_argument_is_refused(call: Callable[[], Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        call()
