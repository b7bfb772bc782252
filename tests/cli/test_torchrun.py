"""`train` in several processes, as torchrun starts them."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from purecompose.cli import main
from tests.pages import ROOT


pytestmark = pytest.mark.slow

TRAIN = ("-m", "purecompose", "train", "--quiet", "--threads", "1", "--checkpoint-every", "5ba", "--duration")


def _environment(**more: Any) -> dict[str, str]:
    return {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), **{k: str(v) for k, v in more.items()}}


@contextlib.contextmanager
def _processes(*words: str, size: int = 2) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the processes with the variables that torchrun would set."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = [
        subprocess.Popen(
            [sys.executable, *TRAIN, *words],
            env=_environment(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        yield found
    finally:
        for process in found:
            process.kill()
            process.communicate()


def _ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Return the exit status and the output of each."""
    texts = [process.communicate(timeout=240) for process in processes]
    return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]


def _wait_for_checkpoint(out: Path) -> None:
    deadline = time.monotonic() + 90
    while not list(out.glob("checkpoints/ep*/index.json")):
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.02)


def _result(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two processes that nothing interrupts."""
    out = tmp_path_factory.mktemp("uncut") / "run"
    with _processes("6ep", "--out", str(out)) as processes:
        (status, printed, _), (other_status, other_printed, _) = _ended(processes)
    assert (status, other_status) == (0, 0)
    assert "test accuracy" in printed and not other_printed
    return out


def test_the_result_is_that_of_one_process(uncut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(uncut)]) == 0 and not capsys.readouterr().err
    assert main([*TRAIN[2:], "6ep", "--out", str(tmp_path / "one")]) == 0
    ours, theirs = _result(uncut), _result(tmp_path / "one")
    assert ours["batches"] == theirs["batches"]
    assert ours["metrics"]["eval/accuracy"] == pytest.approx(theirs["metrics"]["eval/accuracy"], abs=0.01)


@pytest.mark.parametrize("shard", [[], ["--shard", "layer"]])
def test_a_signal_to_one_process_ends_all_after_the_same_batch(uncut: Path, tmp_path: Path, shard: list[str]) -> None:
    out = tmp_path / "run"
    words = ("6ep", "--out", str(out), "--resume")
    with _processes(*words, *shard) as processes:
        _wait_for_checkpoint(out)
        processes[1].send_signal(signal.SIGTERM)
        ended = _ended(processes)
    assert [status for status, _, _ in ended] == [143, 143]
    assert "the run is saved in" in ended[0][2] and not ended[1][2]
    with _processes(*words, size=1 if shard else 2) as processes:
        assert [status for status, _, _ in _ended(processes)] == [0] * len(processes)
    if not shard:  # another number of processes rounds differently
        assert _result(out)["checksum"] == _result(uncut)["checksum"]
    assert _result(out)["epochs"] == _result(uncut)["epochs"]


def test_the_end_of_a_process_ends_the_others_with_one_message(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with _processes("60ep", "--out", str(out), size=3) as processes:
        _wait_for_checkpoint(out)
        processes[1].kill()
        ended = _ended(processes)
    assert [status for status, _, _ in ended] == [1, -signal.SIGKILL, 1]
    messages = [text for _, _, text in ended if "error:" in text]
    assert len(messages) == 1, "\n---\n".join(messages)
    (message,) = messages
    assert "rank 1" in message and "has ended" in message


@pytest.mark.parametrize("shard", [[], ["--shard"]])
def test_killed_processes_are_started_again_and_go_on_with_the_same_bits(
    uncut: Path, tmp_path: Path, shard: list[str]
) -> None:
    out = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "10"]
    words = ["6ep", "--out", str(out), "--resume", *shard]
    agent = subprocess.Popen([*torchrun, *TRAIN, *words], env=_environment(), stderr=subprocess.DEVNULL)
    try:
        _wait_for_checkpoint(out)
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        assert agent.wait(timeout=400) == 0
    finally:
        agent.kill()
    if not shard:
        assert _result(out)["checksum"] == _result(uncut)["checksum"]
    assert _result(out)["epochs"] == _result(uncut)["epochs"]
