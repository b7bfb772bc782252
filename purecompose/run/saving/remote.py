"""Folders in remote storage, such as `s3://bucket/run`, by fsspec: a local copy, which a thread keeps uploading.

Everything is written to the local copy as to any other folder. The thread sends what has changed since, so that steps
never wait for the network. The index of a checkpoint is sent after its tensors and removed before them; so a reader
finds a checkpoint that is complete, or none. What is no longer kept is removed after the new has arrived, in full
length.
"""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from purecompose._support.messages import warn
from purecompose._support.urls import forget, know
from purecompose.errors import CheckpointWarning, UploadError
from purecompose.run.saving import folder as disk
from purecompose.run.saving.copies import WRITER, clear_copies, copy_named, new_name, note_sent, note_user
from purecompose.run.saving.storage import download, file_system, files_in, tried
from purecompose.run.saving.tensors import is_file_name, is_whole


_INTERVAL = 1.0
"""Seconds between two looks at the local copy."""
_PATIENCE = 600.0
"""Seconds for which a process waits for another one on its host that reads the folder."""
_READ = ".read"
"""Name of the file that marks a local copy as complete."""


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

    Raises:
        ImportError: The package fsspec, or the one that it needs for this scheme, is not installed.
        ValueError: The scheme is unknown.
        OSError: The storage cannot be read in five attempts.
        DamagedError: It holds a name that would lead out of the local copy.
    """

    def __init__(self, url: str, *, name: str | None = None, is_writing: bool = True) -> None:
        self.url: str = url.rstrip("/")
        self.local: Path = copy_named(name or new_name())
        self._fs, self._root = file_system(self.url)
        self._sent: dict[str, tuple[int, int]] = {}
        self._there: set[str] = set()
        self._is_closing = threading.Event()
        self._problem: str | None = None
        clear_copies()
        self._is_first = self._begun()
        if is_writing:
            self._sent, self._there = _listed(self.local), set(files_in(self._fs, self._root))
        self._thread = threading.Thread(target=self._keep_sending, name="upload", daemon=True) if is_writing else None
        if self._thread is not None:
            note_sent(self.local, True)
            (self.local / WRITER).touch()
            self._thread.start()
        know(self.local, self.url)

    @property
    def has_writer(self) -> bool:
        """True if the process that sends what has changed uses this local copy, and so is on the same host."""
        return (self.local / WRITER).exists()

    def close(self) -> str | None:
        """Send everything, and remove the local copy; return what could not be sent, if anything."""
        forget(self.local)
        if self._thread is not None:
            self._is_closing.set()
            self._thread.join()
            if self._problem is not None:
                return f"{self._problem}; all is in {self.local}"
        if self._thread is not None or (self._is_first and not self.has_writer):
            shutil.rmtree(self.local, ignore_errors=True)
        return None

    def problem(self) -> str | None:
        """Return why the newest files are not sent yet; `None` if nothing is wrong."""
        return self._problem

    # Reading

    def _begun(self) -> bool:
        """Read the folder, or wait until another process has; return whether this one did."""
        mark = self.local / _READ
        try:
            self.local.mkdir(mode=0o700)
        except FileExistsError:
            deadline = time.monotonic() + _PATIENCE
            while not mark.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.url}: another process has not read it in {_PATIENCE:g} s") from None
                time.sleep(0.05)
            if os.name == "posix" and self.local.stat().st_uid != os.getuid():
                raise PermissionError(f"{self.url}: {self.local} belongs to another user") from None
            note_user(self.local)
            return False
        try:
            note_user(self.local)
            self._read()
        except BaseException:
            shutil.rmtree(self.local, ignore_errors=True)
            raise
        mark.touch()
        return True

    def _read(self) -> None:
        files = files_in(self._fs, self._root)
        for name in files:
            if not is_file_name(Path(name).name):
                self._download(name)
        for folder in (self.local, self.local / disk.CHECKPOINTS):
            found, damaged = disk.all_in(folder)
            for path in damaged:  # a run puts them aside, with all that is in them
                self._read_checkpoint(path, files)
            for one in found:
                self._read_checkpoint(one.path, files)
                if is_whole(one.path, one.index):
                    break

    def _read_checkpoint(self, path: Path, files: list[str]) -> None:
        for name in files:
            if (self.local / name).parent == path:
                self._download(name)

    def _download(self, name: str) -> None:
        download(self._fs, f"{self._root}/{name}", self.local / name)

    # Sending

    def _keep_sending(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closing.wait(_INTERVAL)
            try:
                self._send()
                self._problem = None
            except Exception as error:  # of any storage; what is not sent now is sent later
                self._problem = f"{self.url} cannot be written to: {type(error).__name__}: {error}"
            note_sent(self.local, self._problem is None)

    def _send(self) -> None:
        """Make the folder equal to the local copy."""
        now = _listed(self.local)
        if not self.has_writer:  # looked for after the files, which would be removed from the storage, too
            raise FileNotFoundError(f"another program has removed {self.local}")
        for name in sorted(now, key=_is_index):
            if self._sent.get(name) != now[name] and (self.local / name).exists():
                tried(lambda name=name: self._put(name), lambda: note_sent(self.local, False))
                self._sent[name] = now[name]
        # Only what the local copy has had: other files in the storage are not ours.
        gone = {name for name in self._sent.keys() - now.keys() if not (self.local / name).exists()}
        folders = {str(Path(name).parent) for name in gone if not (self.local / name).parent.exists()}
        gone |= {name for name in self._there if str(Path(name).parent) in folders}  # tensors that were not read
        for name in sorted(gone, key=_is_index, reverse=True):
            tried(lambda name=name: self._remove(name))

    def _remove(self, name: str) -> None:
        try:
            self._fs.rm_file(f"{self._root}/{name}")
        except FileNotFoundError:
            pass
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
        for name in names:
            file = Path(place, name)
            if not name.startswith("."):
                try:
                    status = file.stat()
                except FileNotFoundError:  # replaced in this moment
                    continue
                found[file.relative_to(folder).as_posix()] = status.st_size, status.st_mtime_ns
    return found


def _is_index(name: str) -> bool:
    return name.rpartition("/")[2] == disk.INDEX
