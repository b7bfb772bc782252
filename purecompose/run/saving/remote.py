"""Folders in remote storage, such as `s3://bucket/run`, by fsspec: local copies, read from there or sent there.

Everything is written to a local copy as to any other folder. A thread sends what has changed since, so that steps never
wait for the network. The index of a checkpoint is sent after its tensors and removed before them; so a reader finds a
checkpoint that is complete, or none. What is no longer kept is removed after the new has arrived, in full length.
"""

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from purecompose._support.messages import warn
from purecompose._support.urls import forget, is_remote, know, naming_urls
from purecompose.errors import CheckpointError, CheckpointWarning, DamagedError, UploadError
from purecompose.run.saving import folder as disk
from purecompose.run.saving.files import is_file_name, is_whole


T = TypeVar("T")

_WAITS = (0.5, 1.0, 2.0, 4.0)
"""Seconds between the attempts to read, to send or to remove a file."""
_INTERVAL = 1.0
"""Seconds between two looks at the local copy."""
_PATIENCE = 600.0
"""Seconds for which a process waits for another one on its host that reads the folder."""
_USER, _READ, _WRITER, _SENT = ".user-", ".read", ".writer", ".sent"
"""Names of files in a local copy: one names the process that makes it; the others mark it as complete; as that of the
process that sends what has changed; and as one of which everything could be sent, since a writer's copy may otherwise
hold the only files of a run."""


# The storage


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    Raises:
        ImportError: The package fsspec, or the one that it needs for this scheme, is not installed.
        ValueError: The scheme is unknown.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"{url}: remote storage needs fsspec: pip install 'purecompose[remote]'") from error
    try:
        fs, root = url_to_fs(url)
    except ImportError as error:
        raise ImportError(f"{url}: {error}") from error  # names the package, such as s3fs
    return fs, root.rstrip("/")


def _files_in(fs: Any, root: str) -> list[str]:
    """Return the names of all files below a path."""

    def found() -> list[str]:
        fs.invalidate_cache()
        return [name.removeprefix(root).lstrip("/") for name in fs.find(root)]

    names = [name for name in _tried(found) if name]
    for name in names:
        if ".." in Path(name).parts or os.sep != "/" and os.sep in name:
            raise DamagedError(f"{root} holds a file {name!r}, which would be written outside of a local copy")
    return names


def _download(fs: Any, source: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    _tried(lambda: fs.get_file(source, str(target)))


def _tried(do: Callable[[], T], on_failure: Callable[[], None] = lambda: None) -> T:
    """Return what a function returns, after several attempts if necessary; raise `OSError` if all fail.

    Args:
        do: The function.
        on_failure: Called after each attempt that fails.
    """
    for seconds in (*_WAITS, None):
        try:
            return do()
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:  # each storage has its own
            on_failure()
            if seconds is None:
                raise error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}") from error
            time.sleep(seconds)
    raise AssertionError("the last attempt returns or raises")


# Local copies


def new_name() -> str:
    """Return a name for a local copy that no other has."""
    return f"{disk.owner()}-{time.monotonic_ns():x}"


def _copy_named(name: str) -> Path:
    return Path(tempfile.gettempdir()).resolve() / f"purecompose-{name}"


def _make(copy: Path) -> None:
    copy.mkdir(mode=0o700)
    _note_user(copy)


def _note_user(copy: Path) -> None:
    """Note that this process uses a local copy, which others then do not remove."""
    (copy / f"{_USER}{disk.owner()}").touch()


def clear_copies() -> None:
    """Remove the local copies that processes of this user, which have ended, have left on this machine.

    One that holds files which could not be sent stays.
    """
    for copy in Path(tempfile.gettempdir()).resolve().glob("purecompose-*"):
        with contextlib.suppress(OSError, ValueError):  # another process removes it, or writes
            is_ours = not copy.is_symlink() and (os.name != "posix" or copy.stat().st_uid == os.getuid())
            users = [mark.name.removeprefix(_USER).split("-") for mark in copy.glob(f"{_USER}*")]
            have_ended = bool(users) and all(
                place == disk.short_place() and not disk.is_alive(int(pid), token) for pid, token, place in users
            )
            if is_ours and have_ended and ((copy / _SENT).exists() or not (copy / _WRITER).exists()):
                shutil.rmtree(copy, ignore_errors=True)


@contextmanager
def fetched(path: Path | str, names: Collection[str] = (disk.INDEX,)) -> Iterator[Path]:
    """Return a scope with a folder, which is a local copy if the path is a URL.

    Tensors are read when their file is opened; the other checkpoints next to one, when they are looked for.

    Args:
        path: The folder of a run, of checkpoints or of one checkpoint.
        names: The names of the files that are read at once; of one checkpoint, also those of its run.

    Raises:
        FileNotFoundError: There is nothing at the URL.
        DamagedError: The storage holds a name that would lead out of the local copy.
        ImportError, ValueError, OSError: See `Mirror`.
    """
    if not is_remote(path):
        yield Path(path)
        return
    clear_copies()
    url, top = str(path).rstrip("/"), _copy_named(new_name())
    fs, root = file_system(url)
    parts = [part for part in root.split("/") if part][-3:]  # at most a run, its checkpoints and one of them
    base, outer, local = root.removesuffix("/".join(parts)), top / parts[0], top.joinpath(*parts)

    def get(file: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            _download(fs, f"{base}{file.relative_to(top).as_posix()}", file)

    def fetch(place: Path) -> None:
        """Read a file that is missing, or the indexes of the checkpoints in a folder."""
        try:
            files = [place]
            if not place.suffix:
                found = _files_in(fs, f"{base}{place.relative_to(top).as_posix()}")
                files = [place / name for name in found if name.count("/") == 1 and name.endswith(f"/{disk.INDEX}")]
            for file in files:
                if not file.exists():
                    get(file)
        except OSError as error:
            raise CheckpointError(f"{place} cannot be read: {error}") from error

    try:
        _make(top)
        found = [local / name for name in _files_in(fs, root)]
        if not found:
            raise FileNotFoundError(f"there is nothing at {url}")
        local.mkdir(parents=True)
        wanted = [file for file in found if file.name in names]
        if local / disk.INDEX in found and len(parts) == 3:
            wanted += [outer / name for name in {*names} - {disk.INDEX}]
        know(outer, url.removesuffix("/".join(parts)) + parts[0], fetch)
        with naming_urls():
            for file in wanted:
                get(file)
            yield local
    finally:
        forget(outer)
        shutil.rmtree(top, ignore_errors=True)


class Mirror:
    """A local copy of a folder in remote storage, kept for the length of a run.

    Of the checkpoints there, the tensors of the newest complete one are read, and the indexes of all: so older ones
    can be removed, but not loaded.

    Args:
        url: The folder: `s3://`, `gs://`, `file://` or another scheme of fsspec.
        name: A name that the processes of a run share, and no other run has; by default, that of this process. The
            first process on a host that uses it reads the folder, the others wait for it.
        is_writing: True for the process that sends what has changed.

    Attributes:
        url: The URL.
        local: The local copy.
        problem: Why the newest files are not sent yet; `None` if nothing is wrong.

    Raises:
        ImportError: The package fsspec, or the one that it needs for this scheme, is not installed.
        ValueError: The scheme is unknown.
        OSError: The storage cannot be read in five attempts.
        DamagedError: It holds a name that would lead out of the local copy.
    """

    def __init__(self, url: str, *, name: str | None = None, is_writing: bool = True) -> None:
        self.url: str = url.rstrip("/")
        self.local: Path = _copy_named(name or new_name())
        self.problem: str | None = None
        self._fs, self._root = file_system(self.url)
        self._is_closing = threading.Event()
        clear_copies()
        self._is_first = self._begun()
        self._thread = threading.Thread(target=self._keep_sending, name="upload", daemon=True) if is_writing else None
        if self._thread is not None:
            self._sent, self._there = _listed(self.local), set(_files_in(self._fs, self._root))
            for mark in (_SENT, _WRITER):
                (self.local / mark).touch()
            self._thread.start()
        know(self.local, self.url)

    @property
    def has_writer(self) -> bool:
        """True if the process that sends what has changed uses this local copy, and so is on the same host."""
        return (self.local / _WRITER).exists()

    def close(self) -> str | None:
        """Send everything, and remove the local copy; return what could not be sent, if anything."""
        forget(self.local)
        if self._thread is not None:
            self._is_closing.set()
            self._thread.join()
            if self.problem is not None:
                return f"{self.problem}; all is in {self.local}"
        if self._thread is not None or (self._is_first and not self.has_writer):
            shutil.rmtree(self.local, ignore_errors=True)
        return None

    # Reading

    def _begun(self) -> bool:
        """Read the folder, or wait until another process has; return whether this one did."""
        mark = self.local / _READ
        try:
            _make(self.local)
        except FileExistsError:
            deadline = time.monotonic() + _PATIENCE
            while not mark.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.url}: another process has not read it in {_PATIENCE:g} s") from None
                time.sleep(0.05)
            if os.name == "posix" and self.local.stat().st_uid != os.getuid():
                raise PermissionError(f"{self.url}: {self.local} belongs to another user") from None
            _note_user(self.local)
            return False
        try:
            self._read()
        except BaseException:
            shutil.rmtree(self.local, ignore_errors=True)
            raise
        mark.touch()
        return True

    def _read(self) -> None:
        files = _files_in(self._fs, self._root)

        def read(names: Collection[str]) -> None:
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

    # Sending

    def _keep_sending(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closing.wait(_INTERVAL)
            try:
                self._send()
                self.problem = None
            except Exception as error:  # of any storage; what is not sent now is sent later
                self.problem = f"{self.url} cannot be written to: {type(error).__name__}: {error}"
            self._note_sent(self.problem is None)

    def _note_sent(self, is_sent: bool) -> None:
        """Note whether everything is sent; if not, this copy may hold the only files of the run."""
        with contextlib.suppress(OSError):  # a full disk
            (self.local / _SENT).touch() if is_sent else (self.local / _SENT).unlink(missing_ok=True)

    def _send(self) -> None:
        """Make the folder equal to the local copy."""
        now = _listed(self.local)
        if not self.has_writer:  # looked for after the files, which would be removed from the storage, too
            raise FileNotFoundError(f"another program has removed {self.local}")
        for name in sorted(now, key=_is_index):
            if self._sent.get(name) != now[name] and (self.local / name).exists():
                _tried(lambda name=name: self._put(name), lambda: self._note_sent(False))
                self._sent[name] = now[name]
        # Only what the local copy has had: other files in the storage are not ours.
        gone = {name for name in self._sent.keys() - now.keys() if not (self.local / name).exists()}
        folders = {str(Path(name).parent) for name in gone if not (self.local / name).parent.exists()}
        gone |= {name for name in self._there if str(Path(name).parent) in folders}  # tensors that were not read
        for name in sorted(gone, key=_is_index, reverse=True):
            _tried(lambda name=name: self._remove(name))

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
def mirror(url: str, *, name: str | None = None, is_writing: bool = True) -> Iterator[Path]:
    """Return a scope with a local copy of a folder in remote storage, which is uploaded as it changes.

    Whatever takes a folder can be given the local one: `RunFolder`, `Checkpoints`, your own files. A killed run leaves
    in the storage what a thread has sent, up to a second after it was written, and its newest complete checkpoint.

    Args:
        url: The folder, such as `s3://bucket/run`; see `Mirror`, also about errors.
        name: A name that the processes of a run share; see `Mirror`.
        is_writing: True for the process that sends what has changed.

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
    copy = Mirror(url, name=name, is_writing=is_writing)
    try:
        yield copy.local
    except BaseException:
        if (problem := copy.close()) is not None:
            warn(problem, CheckpointWarning)
        raise
    if (problem := copy.close()) is not None:
        raise UploadError(problem)


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
