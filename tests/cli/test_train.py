"""Whole commands, in this process: results, repeatability, refusals."""

import re
import socket
import subprocess
import sys

import pytest
import torch

from purecompose import compose, data, loop_events, losses, optim, schedule
from purecompose.algorithms import BY_NAME
from purecompose.cli import main
from purecompose.cli.training import checksum
from purecompose.core.state import State
from purecompose.nn import models


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def found_checksum(text: str) -> str:
    match = re.search(r"checksum\W+([0-9a-f]{16}) \(1 thread\)", text)
    assert match is not None, text
    return match[1]


def test_a_short_run_learns_and_ends_with_a_table(capsys) -> None:
    out = run(capsys, "train", "--duration", "5ep")
    lines = [line for line in out.splitlines() if re.match(r"[1-5]\.0/5 ep ", line)]
    assert len({line.split()[0] for line in lines}) == 5  # on a busy machine there are lines within epochs, too
    assert all("loss" in line and "accuracy" in line and "ba/s" in line for line in lines)
    accuracy = re.search(r"test accuracy\W+([\d.]+)%", out)
    assert accuracy is not None and float(accuracy[1]) >= 95.0
    assert f"accuracy {float(accuracy[1]):.1f}%" in lines[-1]
    assert re.search(r"steps\W+110, [\d.]+ per second", out)  # 5 epochs of 1437 // 64 batches
    assert "\x1b" not in out


def test_same_seed_same_bits(capsys) -> None:
    arguments = ("train", "--duration", "1ep", "--quiet", "--model", "mlp")
    first, second = (found_checksum(run(capsys, *arguments)) for _ in range(2))
    other = found_checksum(run(capsys, *arguments, "--seed", "1"))
    assert first == second != other


def test_the_command_is_the_hand_written_loop(capsys) -> None:
    out = run(
        capsys, *"train --quiet --model mlp(hidden=16) --algorithms none --duration 30ba --seed 5".split(),
        *"--optimizer sgd(0.1,momentum=0.9) --schedule linear --batch-size 100".split(),
    )  # fmt: skip
    digits = data.load("digits")
    net = models.build("mlp", in_shape=digits.in_shape, num_classes=10, seed=5, hidden=16)
    state = State.create(
        net,
        loss=losses.cross_entropy,
        optimizer=optim.sgd(0.1 * schedule.linear(), momentum=0.9),
        key=5,
        duration="30ba",
        batches_per_epoch=14,
    )
    batches = data.arrays(digits.train_inputs, digits.train_targets, 100, drop_last=True)
    step = compose(loop_events)
    for epoch in range(3):
        for batch in batches.epoch(state.key, epoch):
            if not state.timestamp.is_finished():
                state = step(state, batch)
    assert found_checksum(out) == checksum(state.params)


def test_the_process_is_not_changed(capsys) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    run(capsys, "train", "--duration", "3ba", "--threads", "2", "--quiet")
    assert torch.get_num_threads() == 1
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.get_rng_state(), before)


def test_plans_differ_along_the_run(capsys) -> None:
    start = run(capsys, "plan")
    later = run(capsys, "plan", "--at", "0.6dur")

    def rows(plan: str) -> list[list[str]]:
        return [line.split()[1:3] for line in plan.splitlines() if line.startswith("AFTER_DATALOADER")]

    assert rows(start) == [["0", "mixup"], ["-", "selective_backprop"]]
    assert rows(later) == [["0", "selective_backprop"], ["1", "mixup"]]
    assert run(capsys, "plan", "--at", "24ep") == run(capsys, "plan", "--at", f"{24 * 22}ba")


def test_algorithms_are_listed_in_groups(capsys) -> None:
    lines = run(capsys, "algorithms").splitlines()
    assert {line.split()[0] for line in lines if line.startswith("  ")} == BY_NAME.keys()
    assert lines[0] == "On the batch" and all(len(line) <= 100 for line in lines)
    card = run(capsys, "algorithms", "mixup")
    assert card.startswith("mixup(alpha=0.2") and "Beta distribution" in card


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["train", "--algorithms", "mixpu"], "--algorithms: no algorithm is called 'mixpu'"),
        (
            ["train", "--set", "mixup.alfa=0.4"],
            "--set: mixup.alfa: mixup has no parameter 'alfa'; did you mean 'alpha'?",
        ),
        (["train", "--set", "mixup.alpha=-1"], "--set: mixup.alpha: mixup: alpha: expected "),
        (["train", "--set", "model.widht=3"], "--set: model.widht: cnn has no option 'widht'; did you mean 'width'?"),
        (
            ["train", "--algorithms", "mixup(alpha=-1)", "--set", "mixup.interpolate_loss=True"],
            "--set: mixup.interpolate_loss: mixup: alpha",
        ),
        (
            ["train", "--optimizer", "sgd", "--set", "optimizer.momentum=0.9"],
            "optimizer.momentum: sgd: missing a required",
        ),
        (
            ["train", "--model", "cnn(widht=3)"],
            "--model: cnn has no option 'widht'; did you mean 'width'? its options are cnn(",
        ),
        (["train", "--schedule", "cosine(warmup=0.1durr)"], "--schedule: cannot read"),
        (["train", "--model", "mlp(3)"], "options by name, as in mlp(hidden=(256, 128), dropout=0.0)"),
        (["train", "--optimizer", "muon(0.02)"], "--optimizer: muon moves only matrices; choose them"),
        (["train", "--schedule", "cosine(warmup='90ep')"], "--schedule: warmup=90ep is longer"),
        (["train", "--duration", "0ep"], "--duration: 0ep"),
        (["train", "--batch-size", "0"], "--batch-size: "),
        (["train", "--microbatches", "65"], "expected at most 64 slices, one per example of a batch, got 65"),
        (["train", "--seed", str(2**64)], "--seed: "),
        (["train", "--seed", "x"], "train: error: argument --seed: expected a whole number, got 'x'"),
        (["train", "--validation", "x"], "argument --validation: expected a number, got 'x'"),
        (["train", "--out", ""], "argument --out: expected a name, got an empty string"),
        (["train", "--data", "digit", "--resume"], "--resume: give the folder of the run"),
        (["train", "--threads", "0"], "--threads: "),
        (["train", "--device", "bogus"], "--device: 'bogus'"),
        (["plan", "--at", "2dur"], "--at: 2dur: the run ends earlier, after 880 batches"),
        (["plan", "nowhere"], "plan: error: nowhere is not a run's folder: it does not exist; create one with train"),
        (["train", "--durration", "1ep"], "there is no option --durration; did you mean '--duration'"),
        (["algorithms", "mixpu"], "no algorithm is called 'mixpu'; did you mean 'mixup'?"),
        (["report"], "report: error: the following arguments are required: RUN"),
        (["trian"], "did you mean 'train'?"),
        ([], "COMMAND"),
    ],
)
def test_usage_errors_are_one_line_and_status_2(capsys, arguments: list[str], part: str) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("python -m purecompose")
    assert captured.err.count("\n") == 1
    assert part in captured.err


def test_a_missing_package_is_one_line_and_status_1(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["train"]) == 1
    assert "pip install 'purecompose[cli]'" in capsys.readouterr().err


FAILING = {
    "seq_length_warmup": (
        "TypeError: seq_length_warmup: expected sequences",
        "; in seq_length_warmup at Event.AFTER_DATALOADER (--traceback",
    ),
    "progressive_resizing": (
        "RuntimeError: ",  # torch's own words differ
        "[64, 1, 4, 4], int64[64]) (--",
    ),
}


@pytest.mark.parametrize("method", FAILING)
def test_an_error_in_a_step_is_one_line_and_status_1(capsys, method: str) -> None:
    arguments = ["train", "--quiet", "--model", "mlp", "--duration", "2ba", "--algorithms", method]
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    start, part = FAILING[method]
    assert captured.err.startswith(f"python -m purecompose train: error: {start}") and part in captured.err
    with pytest.raises(Exception, match=start.partition(": ")[2] or "mat1 and mat2") as caught:
        main([*arguments, "--traceback"])
    assert type(caught.value).__name__ == start.partition(":")[0]


def test_an_interrupt_is_one_line_and_status_130(capsys, monkeypatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("purecompose.cli.training.fit", interrupted)
    assert main(["train", "--quiet"]) == 130
    assert capsys.readouterr().err == "python -m purecompose train: interrupted\n"


def test_an_interrupt_while_torch_imports_is_one_line_as_well(capsys, monkeypatch) -> None:
    raised: list[BaseException] = [AttributeError("half imported"), KeyboardInterrupt()]

    def importing(*_: object, **__: object) -> None:
        raise raised.pop()

    monkeypatch.setattr(torch, "use_deterministic_algorithms", importing)
    assert main(["train", "--quiet", "--threads", "2"]) == 130
    assert capsys.readouterr().err == "python -m purecompose train: interrupted\n"
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_and_version(capsys, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    assert "purecompose" in capsys.readouterr().out


@pytest.mark.slow
def test_the_module_runs_and_passes_on_the_status() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "purecompose", "train", "--model", "cn"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1 and "did you mean 'cnn'?" in result.stderr


def test_checksums_depend_on_names_dtypes_shapes_and_bits() -> None:
    one = torch.tensor([[1.0, 2.0]])
    different = [
        {"w": one},
        {"v": one},
        {"w": one.T},
        {"w": one.double()},
        {"w": one.view(torch.int32)},
        {"w": one.nextafter(torch.tensor(3.0))},
        {"w": torch.tensor(1.0)},
    ]
    assert len({checksum(params) for params in different}) == len(different)
    # They do not depend on the order of names, strides or identity.
    strided = torch.tensor([[1.0, 0.0, 2.0, 0.0]])[:, ::2]
    assert checksum({"a": one, "b": one}) == checksum({"b": strided, "a": one.clone()})


def test_several_processes_that_cannot_find_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--duration", "1ba"]) == 2
    err = capsys.readouterr().err
    assert "WORLD_SIZE=2, but RANK=, LOCAL_RANK=, MASTER_PORT=, MASTER_ADDR=: start the processes by torchrun" in err
    monkeypatch.delenv("WORLD_SIZE")
    assert main(["train", "--duration", "1ba", "--shard"]) == 2
    assert "start several by torchrun" in capsys.readouterr().err


def test_a_port_that_another_program_uses_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        given = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        assert main(["train", "--duration", "1ba"]) == 2
    err = capsys.readouterr().err
    assert f"port {port} is in use by another program" in err and err.count("\n") == 1
