import math
from pathlib import Path

import pytest

from purecompose.observers import read_records
from purecompose.records import RunFolder, read_run
from purecompose.records.layout import read_json, write_json
from tests.records.run_helpers import make_state, train


def test_a_half_finished_run_is_read(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "half", {"seed": 3})
    found = read_run(run.path)
    assert (found.name, found.config, found.records, found.result, found.plan) == ("half", {"seed": 3}, [], None, "")
    assert (found.starts, found.checkpoints, found.seconds, found.last_metrics) == ((), (), 0, {})
    train(run, until=6)
    run._records.flush()
    found = read_run(str(run.path))
    assert found.records == read_records(run.path / "records.jsonl") and found.result is None
    assert [(one.path.name, one.batch, one.epoch) for one in found.checkpoints] == [("ep0001-ba00000004", 4, 1)]
    (kept,) = found.checkpoints
    assert kept.num_bytes == sum(file.stat().st_size for file in kept.path.iterdir())
    assert kept.metrics == {"eval/accuracy": found.last_metrics["eval/accuracy"]}
    assert found.trained["weights"] == sum(p.numel() for p in make_state().params.values())


def test_a_folder_that_is_not_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder .*nowhere"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"is not the folder of a run: it has no config.toml"):
        read_run(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="got the file"):
        read_run(tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.toml", "lr = ", "config.toml is not valid TOML"),
        ("config.toml", "name = '\udcff'", "config.toml is not valid TOML"),
        ("history.json", "{", "history.json is damaged"),
        ("history.json", "[]", "history.json is damaged: expected a JSON object, got list"),
        ("history.json", '{"starts": [3]}', "history.json is damaged: unexpected content at .*starts"),
        ("history.json", '{"starts": [{"batch": 3}]}', "history.json is damaged: unexpected content at .*starts"),
        ("result.json", "nothing", "result.json is damaged"),
        ("records.jsonl", "nothing\n", "records.jsonl, line 1"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    RunFolder(tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=words):
        read_run(tmp_path / "run")


def test_numbers_that_are_not_finite_come_back_from_json(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"loss": math.inf, "all": [-math.inf, 1.5], "by": {"name": "nan-o"}})
    assert read_json(tmp_path / "a.json") == {"loss": math.inf, "all": [-math.inf, 1.5], "by": {"name": "nan-o"}}


def test_a_disk_that_fills_up_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    write_bytes = Path.write_bytes

    def half(self: Path, data: bytes) -> int:
        write_bytes(self, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"a": 2})
    assert read_json(path) == {"a": 1} and list(tmp_path.iterdir()) == [path]
