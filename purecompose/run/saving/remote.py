"""Folders in remote storage, such as `s3://bucket/run`, by fsspec: local copies, read from there or sent there.

Everything is written to a local copy as to any other folder. A thread sends what has changed since, so that steps never
wait for the network. The index of a checkpoint is sent after its tensors and removed before them, so that a reader
finds it complete or not at all. What is no longer kept is removed after the new has arrived.
"""

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from purecompose._support.messages import forget, is_remote, know, naming_urls, required, warn
from purecompose.errors import CheckpointError, CheckpointWarning, DamagedError, UploadError
from purecompose.run.saving import folder as disk
from purecompose.run.saving.files import is_file_name, is_whole


_INTERVAL = 1.0
"""Seconds between two looks at the local copy."""
_TRIES = 5
"""Number of attempts to send what is left when a run ends."""
_PREFIX, _MARK = "purecompose-", ".copy"
"""What the names of local copies begin with, and the name of a file in those that are sent."""


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it; for the errors see `Mirror`."""
    fsspec = required(url, "'purecompose[remote]'", "fsspec.core")
    fs, root = fsspec.url_to_fs(url)  # an ImportError names the package for the scheme, such as s3fs
    return fs, root.rstrip("/")


def _files_in(fs: Any, root: str) -> list[str]:
    """Return the names of all files below a path."""
    fs.invalidate_cache()
    names = [name.removeprefix(root).lstrip("/") for name in _reading(fs.find, root)]
    for name in names:
        if ".." in Path(name).parts or os.sep != "/" and os.sep in name:
            raise DamagedError(f"{root} holds a file {name!r}, which would be written outside of a local copy")
    return [name for name in names if name]


def _download(fs: Any, source: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    _reading(fs.get_file, source, str(target))


def _reading(read: Callable[..., Any], *arguments: str) -> Any:
    """Call a function that reads; each storage has errors of its own, which become an `OSError`."""
    try:
        return read(*arguments)
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


@contextmanager
def fetched(path: Path | str) -> Iterator[Path]:
    """Return a scope with a folder of a run, of checkpoints or of one checkpoint; of a URL, with a local copy.

    Tensors are read when their file is opened, everything else at once; of one checkpoint, also the other files of its
    run. For the errors see `Mirror`; if there is nothing at the URL, it is a `FileNotFoundError`.
    """
    if not is_remote(path):
        yield Path(path)
        return
    url = str(path).rstrip("/")
    fs, root = file_system(url)
    is_one = disk.is_name(Path(root).name)  # with those next to it, and the run
    base, *inner = root.rsplit("/", is_one + (is_one and Path(root).parent.name == disk.CHECKPOINTS))
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as copy:
        top = Path(copy).resolve()
        local = top.joinpath(*inner)

        def fetch(file: Path) -> None:
            try:
                with contextlib.suppress(FileNotFoundError):
                    if not file.exists():
                        _download(fs, f"{base}/{file.relative_to(top).as_posix()}", file)
            except OSError as error:
                raise CheckpointError(f"{file} cannot be read: {error}") from error

        names = _files_in(fs, base)
        if not any((top / name).is_relative_to(local) for name in names):
            raise FileNotFoundError(f"there is nothing at {url}")
        know(top, url.rsplit("/", len(inner))[0], fetch)
        try:
            with naming_urls():
                for name in names:
                    if not is_file_name(Path(name).name):
                        fetch(top / name)
                yield local
        finally:
            forget(top)


class Mirror:
    """A local copy of a folder in remote storage, kept for the length of a run, and sent there as it changes.

    Of the checkpoints there, the tensors of the newest complete one are read, and the indexes of all: so older ones
    can be removed, but not loaded. `local` is the local copy, and `problem` says why the newest files are not sent yet,
    if so. With several processes one `sends`.
    """

    def __init__(self, url: str, *, sends: bool = True) -> None:
        self.url: str = url.rstrip("/")
        self.problem: str | None = None
        self._fs, self._root = file_system(self.url)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_sending, name="upload", daemon=True) if sends else None
        self.local: Path = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
        try:
            (self.local / _MARK).touch()
            self._read()
        except BaseException:
            shutil.rmtree(self.local, ignore_errors=True)
            raise
        if self._thread is not None:
            self._sent, self._there = _listed(self.local), set(_files_in(self._fs, self._root))
            self._thread.start()
        know(self.local, self.url)

    def close(self) -> str | None:
        """Send everything, and remove the local copy; return what could not be sent, if anything."""
        forget(self.local)
        if self._thread is not None:
            self._is_closing.set()
            self._thread.join()
        if self.problem is not None:
            return f"{self.problem}; all is in {self.local}"
        shutil.rmtree(self.local, ignore_errors=True)
        return None

    def _read(self) -> None:
        files = _files_in(self._fs, self._root)

        def read(names: list[str]) -> None:
            for name in names:
                _download(self._fs, f"{self._root}/{name}", self.local / name)

        read([name for name in files if not is_file_name(Path(name).name)])
        for folder in (self.local, self.local / disk.CHECKPOINTS):
            found, damaged = disk.all_in(folder)
            for path in damaged:  # a run puts them aside, with all that is in them
                read([name for name in files if (self.local / name).parent == path])
            for one in found:
                read([name for name in files if (self.local / name).parent == one.path])
                if is_whole(one.path, one.index):
                    break

    def _keep_sending(self) -> None:
        left = _TRIES
        while left:
            is_last = self._is_closing.wait(_INTERVAL)
            try:
                self._send()
                self.problem = None
            except Exception as error:  # of any storage; what is not sent now is sent later
                self.problem = f"{self.url} cannot be written to: {type(error).__name__}: {error}"
            if is_last:
                left = 0 if self.problem is None else left - 1
                time.sleep(_INTERVAL if left else 0)

    def _send(self) -> None:
        """Make the folder equal to the local copy."""
        now = _listed(self.local)
        if not (self.local / _MARK).exists():  # looked for after the files: none would be left in the storage
            raise FileNotFoundError(f"another program has removed {self.local}")
        for name in sorted(now, key=_is_index):
            if self._sent.get(name) != now[name] and (self.local / name).exists():
                self._put(name)
                self._sent[name] = now[name]
        # Only what the local copy has had: other files in the storage are not ours.
        gone = {name for name in self._sent.keys() - now.keys() if not (self.local / name).exists()}
        folders = {str(Path(name).parent) for name in gone if not (self.local / name).parent.exists()}
        gone |= {name for name in self._there if str(Path(name).parent) in folders}  # tensors that were not read
        for name in sorted(gone, key=_is_index, reverse=True):
            self._remove(name)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}")
        self._there.discard(name)
        self._sent.pop(name, None)

    def _put(self, name: str) -> None:
        target = f"{self._root}/{name}"
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        try:
            size = (self.local / name).stat().st_size
            self._fs.put_file(str(self.local / name), target)
            self._fs.invalidate_cache(target.rpartition("/")[0])
            if (found := self._fs.size(target)) not in (size, None) and (self.local / name).stat().st_size == size:
                raise OSError(f"{target} has {found:,} of {size:,} bytes after it was sent")
        except FileNotFoundError:
            if (self.local / name).exists():  # otherwise it has been replaced by a later checkpoint
                raise
        self._there.add(name)


@contextmanager
def sent_from(copy: Mirror) -> Iterator[Path]:
    """Return a scope with the folder of a local copy, at whose end everything is sent; see `mirror`."""
    try:
        yield copy.local
    except BaseException:
        if (problem := copy.close()) is not None:
            warn(problem, CheckpointWarning)
        raise
    if (problem := copy.close()) is not None:
        raise UploadError(problem)


@contextmanager
def mirror(url: str) -> Iterator[Path]:
    """Return a scope with a local copy of a folder in remote storage, which is uploaded as it changes.

    Whatever takes a folder can be given the local one: `RunFolder`, `Checkpoints`, your own files. A killed run leaves
    in the storage what a thread has sent, up to a second after it was written, and its newest complete checkpoint.

    Args:
        url: The folder, such as `s3://bucket/run`; see `Mirror`, also about errors.

    Raises:
        UploadError: At the end of the scope, something could not be sent; the message names the local copy, which is
            kept.
        ImportError, ValueError: See `Mirror`.

    Example::

        with pc.saving.mirror("s3://bucket/runs/a") as folder:
            run = pc.records.RunFolder(folder, resume=True)
            pc.fit(step, state, data, checkpoints=run.checkpoints(), resume=run.resume, observers=run.observer)
            run.finish()
    """
    with sent_from(Mirror(url)) as folder:
        yield folder


def _listed(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of the files in a folder, by name; hidden ones are being written."""
    found = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (Path(place, name) for name in names if not name.startswith(".")):
            with contextlib.suppress(FileNotFoundError):  # replaced in this moment
                status = file.stat()
                found[file.relative_to(folder).as_posix()] = status.st_size, status.st_mtime_ns
    return found


def _is_index(name: str) -> bool:
    return name.rpartition("/")[2] == disk.INDEX
