"""Checkpoints and run folders in remote storage."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import purecompose as pc
from purecompose import compose, loop_events, tree
from purecompose.cli import load_run, main
from purecompose.run.saving import remote
from purecompose.run.saving.keeping import Keeper
from tests.helpers import make_batch, make_state
from tests.pages import ROOT


fsspec = pytest.importorskip("fsspec")
pytestmark = pytest.mark.filterwarnings("ignore:.*; trying again")
DATA = [make_batch(size=8, seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def store() -> Iterator[None]:
    """Start an object store with the interface of S3 on the loopback."""
    pytest.importorskip("s3fs")
    module = pytest.importorskip("moto.server")
    server = module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    words = {"ENDPOINT_URL": f"http://{host}:{port}", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**words, "DEFAULT_REGION": "us-east-1"}.items():
            patch.setenv(f"AWS_{name}", value)
        fsspec.filesystem("s3").mkdir("bucket")
        yield
    server.stop()


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "s3":
        request.getfixturevalue("store")
        yield f"s3://bucket/{time.monotonic_ns()}"
    else:
        yield "memory://bucket/run"
        fsspec.filesystem("memory").rm("/", recursive=True)


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep local copies apart from those of other tests, which a run would remove if their process has ended."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("copies")))


def run(url: str, duration: str, state: Any = None, resume: Any = "auto", **settings: Any) -> pc.State:
    saved = pc.Checkpoints(url, **{"every": "2ba", "keep": 2, "background": False, **settings})
    state = make_state() if state is None else state
    return pc.fit(compose(loop_events), state, DATA, duration=duration, checkpoints=saved, resume=resume)


def names(url: str) -> list[str]:
    """Return the names of the files in the storage."""
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return sorted(name.removeprefix(f"{root}/") for name in fs.find(root))


def local_copies() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("purecompose-*"))


def test_a_run_continues_from_remote_storage_to_the_same_bits(url):
    before = local_copies()
    whole = pc.fit(compose(loop_events), make_state(), DATA, duration="3ep")
    run(url, "5ba")
    run(url, "7ba")
    assert [name.partition("/")[0] for name in names(url)[::2]] == ["ep0001-ba00000006", "ep0001-ba00000007"]
    resumed = run(url, "3ep")
    assert tree.equal(resumed.params, whole.params)
    *_, newest = {name.partition("/")[0] for name in names(url) if "12" in name}
    assert tree.equal(pc.load(f"{url}/{newest}", make_state()).params, whole.params)
    again = pc.fit(compose(loop_events), make_state(), DATA, duration="4ep", resume=f"{url}/{newest}")
    assert again.timestamp.batch == 16
    assert local_copies() == before


def test_an_index_is_sent_last_and_removed_first_after_what_replaces_it(monkeypatch):
    done: list[tuple[str, str]] = []
    for kind in ("_put", "_remove"):
        real = getattr(remote.Mirror, kind)
        monkeypatch.setattr(
            remote.Mirror, kind, lambda self, name, kind=kind, real=real: (done.append((kind, name)), real(self, name))
        )
    run("memory://order/run", "4ba", keep=1)
    run("memory://order/run", "6ba", keep=1)
    for kind, is_reversed in (("_put", False), ("_remove", True)):
        for one in {name.partition("/")[0] for k, name in done if k == kind}:
            of_one = [name.partition("/")[2] for k, name in done if k == kind and name.startswith(one)]
            assert of_one == sorted(["state.safetensors", "index.json"], reverse=not is_reversed)
    kinds = [kind for kind, name in done if "ba00000006" in name or kind == "_remove"]
    assert kinds == ["_put", "_put", "_remove", "_remove"]


def test_other_files_in_the_storage_stay(monkeypatch):
    fs = fsspec.filesystem("memory")
    for name in ("exported/state.safetensors", "notes.txt"):
        fs.pipe_file(f"/other/run/{name}", b"mine")
    run("memory://other/run", "2ba", keep=1)
    run("memory://other/run", "4ba", keep=1)
    assert [name for name in names("memory://other/run") if not name.startswith("ep")] == [
        "exported/state.safetensors",
        "notes.txt",
    ]


def test_a_checkpoint_with_a_damaged_index_is_put_aside_with_its_tensors():
    run("memory://aside/run", "4ba")
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/aside/run/ep0001-ba00000004/index.json", b"{")
    with pytest.warns(pc.errors.CheckpointWarning, match="put aside"):
        run("memory://aside/run", "4ba")
    (aside,) = {name.partition("/")[0] for name in names("memory://aside/run") if "damaged" in name}
    assert f"{aside}/state.safetensors" in names("memory://aside/run")


def breaking(monkeypatch: pytest.MonkeyPatch, num_failures: float) -> list[str]:
    """Let files fail to be sent some times, and return the list of attempts."""
    tried: list[str] = []
    fs = type(fsspec.filesystem("memory"))
    real = fs.put_file

    def put(self: Any, source: str, target: str, **settings: Any) -> Any:
        tried.append(target)
        if len(tried) <= num_failures:
            raise ConnectionError("the network is down")
        return real(self, source, target, **settings)

    monkeypatch.setattr(fs, "put_file", put)
    monkeypatch.setattr(remote, "_INTERVAL", 0.01)
    return tried


def test_what_cannot_be_sent_stays_in_the_local_copy(monkeypatch):
    before = local_copies()
    breaking(monkeypatch, float("inf"))
    with pytest.warns(pc.errors.CheckpointWarning, match="ConnectionError: the network is down; all is in"):
        state = run("memory://down/run", "2ba")
    (kept,) = local_copies() - before
    (saved,) = kept.glob("ep*")
    assert tree.equal(pc.load(saved, make_state()).params, state.params)
    with pytest.raises(pc.errors.UploadError, match="network is down"), remote.mirror("memory://down/run") as folder:
        (folder / "notes.txt").write_text("kept")
    shutil.rmtree(kept)
    assert (folder / "notes.txt").read_text() == "kept"
    shutil.rmtree(folder)


@pytest.mark.parametrize("num", [1, 1000])
def test_a_storage_that_shortens_files_is_noticed_before_the_local_copy_is_removed(num, monkeypatch):
    before, shortened = local_copies(), []
    fs = type(fsspec.filesystem("memory"))
    real = fs.put_file

    def put(self: Any, source: str, target: str, **settings: Any) -> None:
        real(self, source, target, **settings)
        if target.endswith(".safetensors") and len(shortened) < num:
            shortened.append(target)
            self.pipe_file(target, self.cat_file(target)[:-8])

    monkeypatch.setattr(fs, "put_file", put)
    monkeypatch.setattr(remote, "_INTERVAL", 0.01)
    message = "no warning" if num == 1 else r"safetensors has [\d,]+ of [\d,]+ bytes after it was sent; all is in"
    with pytest.warns(match=message) if num > 1 else contextlib.nullcontext():
        state = run("memory://short/run", "2ba")
    if num == 1:  # it was sent again
        (name,) = (name for name in names("memory://short/run") if name.endswith("index.json"))
        saved = f"memory://short/run/{Path(name).parent}"
    else:
        (kept,) = local_copies() - before
        (saved,) = kept.glob("ep*")
    assert tree.equal(pc.load(saved, make_state()).params, state.params)
    fsspec.filesystem("memory").rm("/short", recursive=True)


def test_the_storage_stays_as_it_is_if_another_program_removes_the_local_copy(url):
    run(url, "4ba")
    before, copy = names(url), remote.Mirror(url)
    shutil.rmtree(copy.local)
    assert f"another program has removed {copy.local}" in (copy.close() or "")
    assert names(url) == before


def test_a_damaged_object_is_never_loaded(url):
    whole = run(f"{url}/whole", "8ba")
    run(f"{url}/damaged", "6ba")
    fs, root = fsspec.core.url_to_fs(f"{url}/damaged")
    newest = max(name for name in fs.find(root) if name.endswith(".safetensors"))
    content = bytearray(fs.cat_file(newest))
    content[-3] ^= 1
    fs.pipe_file(newest, bytes(content))
    damaged, older = (f"{url}/damaged/ep0001-ba0000000{batch}" for batch in (6, 4))
    text = f"{damaged}/state.safetensors has been changed .* the next older whole one is {older}"
    for load in (lambda: pc.load(damaged, make_state()), lambda: run("memory://else", "8ba", resume=damaged)):
        with pytest.raises(pc.saving.DamagedError, match=text) as raised:
            load()
        assert "purecompose-" not in str(raised.value.__cause__)
    with pytest.warns(pc.errors.CheckpointWarning, match=f"{damaged}/.* put aside, and continuing from {older}"):
        assert tree.equal(run(f"{url}/damaged", "8ba").params, whole.params)


PROGRAM = """
import os, sys, time, torch
from pathlib import Path
from purecompose.time.event import Event
from tests.run.saving.test_remote import *

torch.set_num_threads(1)

def killed(event, state):
    if event is Event.BATCH_END and state.timestamp.batch == 5:
        while not list(Path(sys.argv[1]).glob("run/*ba00000004/index.json")):
            time.sleep(0.05)
        os._exit(9)

saved = pc.Checkpoints(f"file://{sys.argv[1]}/run", "2ba")
pc.fit(compose(loop_events), make_state(), DATA, duration="8ba", checkpoints=saved, observers=killed)
"""


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    there, elsewhere = tmp_path / "storage", tmp_path / "host"
    elsewhere.mkdir()
    environment = {**os.environ, "TMPDIR": str(elsewhere), "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", PROGRAM, str(there)], env=environment, timeout=120).returncode == 9
    resumed = run(f"file://{there}/run", "8ba")
    whole = pc.fit(compose(loop_events), make_state(), DATA, duration="8ba")
    assert tree.equal(resumed.params, whole.params)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the run is .* long, and was")
def test_the_command_line_keeps_its_folder_in_remote_storage(url, tmp_path, capsys):
    words = ["train", "--quiet", "--model", "mlp", "--batch-size", "359"]
    for out in (str(tmp_path / "here"), url):
        assert main([*words, "--duration", "1ep", "--out", out]) == 0
    assert {"report.html", "records.jsonl", "config.toml", "checkpoints/ep0001-ba00000004/index.json"} <= {*names(url)}
    for out in (str(tmp_path / "here"), url):
        assert main([*words, "--duration", "2ep", "--out", out, "--resume"]) == 0
    with remote.fetched(url) as folder:
        ours, theirs = (json.loads((one / "result.json").read_text()) for one in (folder, tmp_path / "here"))
    assert ours["checksum"] == theirs["checksum"]
    printed = capsys.readouterr().out
    assert f"{url}/report.html" in printed and "/purecompose-" not in printed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with three checkpoints."""
    out = tmp_path_factory.mktemp("trained") / "one"
    words = ["train", "--quiet", "--model", "mlp", "--batch-size", "479", "--checkpoint-every", "1ba"]
    with pytest.MonkeyPatch.context() as patch:  # a thread would skip checkpoints on a busy machine
        patch.setattr(Keeper, "_enqueue", lambda self, pool, task: self._write(task))
        assert main([*words, "--duration", "1ep", "--out", str(out)]) == 0
    return out


@pytest.fixture
def sent(trained: Path) -> Iterator[str]:
    """Return the URL of this run in the storage."""
    fs = fsspec.filesystem("memory")
    for file in trained.rglob("*"):
        if file.is_file():
            fs.pipe_file(f"/runs/one/{file.relative_to(trained).as_posix()}", file.read_bytes())
    yield "memory://runs/one"
    fs.rm("/", recursive=True)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of files that are read of this run."""
    found: list[str] = []
    fs = type(fsspec.filesystem("memory"))
    real = fs.get_file

    def get(self: Any, source: str, target: str, **settings: Any) -> Any:
        found.append(source.removeprefix("/runs/one/"))
        return real(self, source, target, **settings)

    monkeypatch.setattr(fs, "get_file", get)
    return found


def in_checkpoint(batch: int, *names: str) -> list[str]:
    return [f"checkpoints/ep{batch // 3:04d}-ba{batch:08d}/{name}" for name in names]


NEWEST, SECOND = in_checkpoint(3, "state.safetensors"), in_checkpoint(2, "state.safetensors")


@pytest.mark.parametrize(
    "command, place, more, tensors",
    [
        ("evaluate", "", [], NEWEST),
        ("evaluate", "", ["--checkpoint", "ep0000-ba00000002"], SECOND),
        ("evaluate", "/checkpoints/ep0000-ba00000002", [], SECOND),
        ("predict", "", [], NEWEST),
        ("plan", "", [], []),
        ("report", "", ["--curves-only"], []),
    ],
)
def test_a_command_reads_the_tensors_it_needs(
    trained, sent, read, command, place, more, tensors, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main([command, f"{sent}{place}", *more]) == 0
    assert [name for name in read if name.endswith(".safetensors")] == tensors
    printed = capsys.readouterr()
    assert main([command, f"{trained}{place}", *more]) == 0
    there = capsys.readouterr()
    assert printed.out == there.out.replace(str(trained), sent) and printed.err == there.err


def test_a_checkpoint_is_read_without_its_neighbours(sent, read):
    found = load_run(sent, "ep0000-ba00000002")
    assert found.checkpoint == f"{sent}/checkpoints/ep0000-ba00000002" and found.state.timestamp.batch == 2
    read.clear()
    with pytest.warns(pc.errors.CheckpointWarning, match=f"^{found.checkpoint} continues"):  # threads, kernels
        pc.load(found.checkpoint, found.state)
    assert [name for name in read if name.endswith(".safetensors")] == in_checkpoint(2, "state.safetensors")


def test_a_command_names_a_damaged_checkpoint_and_the_whole_one_before(sent, capsys):
    fsspec.filesystem("memory").pipe_file(f"/runs/one/{in_checkpoint(3, 'state.safetensors')[0]}", b"none")
    newest, older = (f"{sent}/{in_checkpoint(batch, '')[0][:-1]}" for batch in (3, 2))
    assert main(["evaluate", sent]) == 1
    error = capsys.readouterr().err
    assert f"{newest}/state.safetensors has 4 bytes" in error and f"whole one is {older}\n" in error
    assert main(["evaluate", sent, "--checkpoint", "best-ever"]) == 2
    assert f"{sent}/checkpoints has no best-ever" in capsys.readouterr().err


def test_a_url_that_pathlib_has_changed_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("s3://bucket/run")
    attempts = (
        lambda: pc.Checkpoints(path),
        lambda: pc.load(path, make_state()),
        lambda: pc.save(make_state(), path),
        lambda: pc.records.RunFolder(path),
    )
    for attempt in attempts:
        with pytest.raises(ValueError, match="a local folder named 's3:'.*pass the URL as a str"):
            attempt()
    with pytest.raises(ValueError, match="RunFolder: s3://bucket/run is in remote storage"):
        pc.records.RunFolder("s3://bucket/run")
    assert not [*tmp_path.iterdir()]


def test_a_name_that_leads_out_of_the_local_copy_is_refused():
    fsspec.filesystem("memory").store["/out/run/../../x"] = fsspec.filesystem("memory").open("/one", "wb")
    with pytest.raises(pc.errors.DamagedError, match="outside of a local copy"):
        pc.load("memory://out/run", make_state())


def test_what_is_missing_is_named(monkeypatch, capsys):
    with pytest.raises(FileNotFoundError, match="there is nothing at memory://no/run"):
        pc.load("memory://no/run", make_state())
    with pytest.raises(ValueError, match="remote storage"):
        pc.save(make_state(), "memory://no/run")
    for words in (["evaluate", "memory://no/run"], ["train", "--out", "strange://bucket/run"]):
        assert main(words) == 2
    assert "there is nothing at memory://no/run" in capsys.readouterr().err
    with pytest.raises(ValueError, match="Protocol not known: strange"):
        run("strange://bucket/run", "1ba")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ImportError, match=r"pip install 'purecompose\[remote\]'"):
        run("memory://bucket/run", "1ba")
