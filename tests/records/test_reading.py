import enum
import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from purecompose.observers import read_records
from purecompose.records import RunFolder, read_run
from purecompose.records.layout import checked_settings, read_json, to_toml, write_json
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
        ("config.toml", "lr = ", r"config\.toml is not valid TOML: .*; restore it from a copy"),
        ("config.toml", "a = " + "[" * 5000, "config.toml is not valid TOML"),
        ("config.toml", "name = '\udcff'", "config.toml is not valid TOML"),
        ("history.json", "{", "history.json is damaged"),
        ("history.json", "[]", "history.json is damaged: expected a JSON object, got list"),
        ("history.json", '{"starts": [3]}', "history.json is damaged: its starts cannot be read"),
        ("history.json", '{"starts": [{"batch": 3}]}', "history.json is damaged: its starts cannot be read: .*started"),
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


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | TEXT
VALUES = SCALARS | st.lists(SCALARS.filter(lambda one: one is not None), max_size=3)
FLAT = st.dictionaries(TEXT, VALUES, max_size=5)


@given(st.dictionaries(TEXT, VALUES | FLAT, max_size=6))
def test_a_file_in_toml_reads_back_as_it_was_given(config: dict) -> None:
    def known(settings: dict) -> dict:
        return {n: known(v) if isinstance(v, dict) else v for n, v in settings.items() if v is not None}

    # By repr, in which NaN is NaN, -0.0 is not 0.0 and True is not 1; tables come last.
    expected = known(config)
    ordered = {n: v for n, v in expected.items() if not isinstance(v, dict)} | expected
    order = [n for n, v in expected.items() if not isinstance(v, dict)]
    order += [n for n in expected if n not in order]
    read = tomllib.loads(to_toml(checked_settings(config, "test")))
    assert repr(read) == repr({n: ordered[n] for n in order})


def test_paths_tuples_and_enum_members_become_types_of_toml() -> None:
    class Color(enum.StrEnum):
        RED = "red"

    class Size(enum.IntEnum):
        LARGE = 3

    settings = checked_settings({"data": Path("a/b"), "betas": (0.9, 0.99), "color": Color.RED, "size": Size.LARGE}, "")
    assert tomllib.loads(to_toml(settings)) == {"data": "a/b", "betas": [0.9, 0.99], "color": "red", "size": 3}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([1], "here: expected settings by name, a mapping"),
        ({1: 2}, r"here: expected names of settings as strings, got 1 \(int\)"),
        ({"net": object()}, "here: net: expected a string, a number, a bool or a list"),
        ({"model": {"width": 1j}}, r"here: model.width: .* got 1j \(complex\)"),
        ({"model": {"deep": {"deeper": 1}}}, r"here: model.deep: .* \(dict\)"),
        ({"list": [1, None]}, r"here: list\[1\]: .* None"),
    ],
)
def test_values_that_toml_cannot_represent_are_refused(config: object, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        checked_settings(config, "here")  # pyright: ignore[reportArgumentType]
