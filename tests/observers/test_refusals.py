"""What observers refuse, with words of the message."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from purecompose import Event
from purecompose.observers import (
    History,
    Image,
    MLflow,
    NaNs,
    Profile,
    Progress,
    Recorder,
    Records,
    TensorBoard,
    WandB,
    image_samples,
    learning_rate,
    memory,
    read_records,
    speed,
    text_samples,
)
from tests.observers.observer_helpers import Kept, at, make_population, make_state


def monitored(monitor: Any) -> None:
    Recorder(Kept(), monitors=monitor)(Event.BATCH_END, at(make_state(), 1))


def sampled(make: Any, kind: Any = image_samples) -> None:
    kind(make, every="1ba")(at(make_state(), 1))


CALLS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: Recorder(print), TypeError, r"expected a sink, an object with write\(records\)"),  # pyright: ignore
    (lambda: Recorder(Kept(), group=0), ValueError, "Recorder: group"),
    (lambda: Recorder(Kept(), seconds=-1), ValueError, "Recorder: seconds"),
    (lambda: Recorder(Kept(), every="0ba"), ValueError, "Recorder: every"),
    (lambda: Recorder(Kept(), every="10sec"), ValueError, "Recorder: every"),
    (lambda: Recorder(Kept(), monitors=["lr"]), TypeError, "monitors: expected functions"),  # pyright: ignore
    (lambda: Recorder(Kept(), monitors=memory), TypeError, "monitors: expected functions"),  # pyright: ignore
    (lambda: monitored(lambda state: 0.5), TypeError, r"monitor <lambda>: expected a dict.*0.5 \(float\)"),
    (lambda: monitored(lambda state: {"odd": b"x"}), TypeError, "monitor <lambda>: 'odd': expected a number"),
    (lambda: monitored(lambda state: {"odd": torch.ones(3)}), TypeError, "'odd': expected a number"),
    (lambda: monitored(lambda state: {"odd": True}), TypeError, "'odd': expected a number"),
    (lambda: Records("run.csv"), ValueError, r"ends in \.jsonl, got 'run.csv'"),
    (lambda: read_records("missing.jsonl"), FileNotFoundError, "missing.jsonl"),
    (lambda: History().series("loss"), KeyError, "no record has 'loss'; there are no records yet"),
    (lambda: NaNs(action="stop"), ValueError, "action: expected one of 'raise', 'warn', got 'stop'"),
    (lambda: NaNs("0ba"), ValueError, "NaNs: every"),
    (lambda: Profile("traces", active=0), ValueError, "Profile: active"),
    (lambda: Profile("traces", wait=1.5), TypeError, "Profile: wait"),  # pyright: ignore
    (lambda: learning_rate(0.1), TypeError, "names of settings"),  # pyright: ignore
    (lambda: speed(0), ValueError, "speed: window"),
    (lambda: image_samples(id, num_columns=0), ValueError, "image_samples: num_columns"),  # pyright: ignore
    (lambda: text_samples(str, every="often"), ValueError, "text_samples: every"),
    (lambda: text_samples(str, every="1ba")(at(make_population(2), 1)), ValueError, "single state"),
    (lambda: sampled(lambda net: [1]), TypeError, "a floating or uint8 tensor"),
    (lambda: sampled(lambda net: torch.ones(3, 4, 4)), ValueError, r"\(N, C, H, W\).*\(3, 4, 4\)"),
    (lambda: sampled(lambda net: 3, text_samples), TypeError, "a str or several"),
    (lambda: Image(torch.ones(2, 2, 3)), TypeError, "Image: expected a uint8"),
    (lambda: TensorBoard(), TypeError, "expected either a folder"),
    (lambda: WandB("digits"), TypeError, r"WandB: expected a run of wandb or settings={...}, got 'digits'"),
]


@pytest.mark.parametrize(("call", "error", "words"), CALLS)
def test_a_wrong_argument_is_refused(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [
        (Progress, "rich.console", "cli"),
        (MLflow, "mlflow", "mlflow"),
        (WandB, "wandb", "wandb"),
        (lambda: TensorBoard("runs"), "torch.utils.tensorboard", "tensorboard"),
    ],
)
def test_a_missing_library_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=rf"pip install 'purecompose\[{extra}\]'"):
        make()
