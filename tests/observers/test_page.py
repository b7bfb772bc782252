"""The code of docs/observers.md runs."""

import pathlib
import re
from typing import Any

import pytest
import torch

from tests.pages import ROOT


PAGE = ROOT / "docs" / "observers.md"


def test_the_page_runs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in re.finditer(r"```python\n(.*?)```", PAGE.read_text(), re.S):
            exec(compile(block[1], PAGE.name, "exec"), names)  # noqa: S102
    printed = capsys.readouterr().out
    first = printed.splitlines()[:4]
    assert [line.rsplit(" ", 2)[0] for line in first] == ["2 0 64", "4 0 128", "6 1 192", "6 1 192"]
    assert [float(line.split()[3]) for line in first[:3]] == pytest.approx([0.1 * (1 - b / 18) for b in (1, 3, 5)])
    assert re.search(r"^History\(21 records, the last of batch 18: loss=[\d.]+, eval/accuracy=[\d.]+\)$", printed, re.M)
    assert "'norm/weights':" in printed and "[('epoch', 6), ('time/sample', 6), ('loss', 6)]" in printed
    assert re.search(r"^batch 1: the loss is nan$", printed, re.M)
    assert "['batches_5_to_7.json']" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("generated.jsonl", "generated.samples", "metrics.csv", "run.jsonl", "traces")
    ]
    samples = {path.name for path in (tmp_path / "generated.samples/ba00000018").iterdir()}
    assert samples == {"answers_0.txt", "answers_1.txt", "digits.png"}
