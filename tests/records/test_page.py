"""The page docs/runs.md as a program."""

import re
from pathlib import Path

import pytest

from purecompose.records import read_run
from tests.pages import ROOT


# There is a checkpoint every few milliseconds, so that a slow disk skips some, with a warning.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::purecompose.errors.CheckpointWarning")
@pytest.mark.filterwarnings("ignore:the run is .* long, and was")
def test_the_page_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    page = (ROOT / "docs" / "runs.md").read_text()
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(block, "runs.md", "exec"), names)  # noqa: S102
    printed = capsys.readouterr().out
    assert printed.startswith("30 {")
    assert "(0, 18, 'finished', {}), (18, 30, 'finished', {'duration': ['3ep', '5ep']})" in printed
    files = {file.name for file in Path("runs/plain").glob("[!.]*")}
    assert files == set(re.findall(r"^\| `([\w.]+)/?`", page, re.M))
    assert len(read_run("runs/mixup").records) == 18 + 3  # batches, evaluations
    assert Path("compared.png").exists() and Path("plain.html").exists()
