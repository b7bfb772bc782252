"""Reading of folders in remote storage: a local copy of what is needed, for a while."""

import contextlib
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from purecompose._support.urls import forget, is_remote, know, naming_urls
from purecompose.errors import CheckpointError
from purecompose.run.saving.copies import clear_copies, copy_named, new_name, note_user
from purecompose.run.saving.folder import INDEX
from purecompose.run.saving.storage import download, file_system, files_in


@contextlib.contextmanager
def fetched(path: Path | str, names: Collection[str] = (INDEX,)) -> Iterator[Path]:
    """Return a scope with a folder, which is a local copy if the path is a URL.

    Tensors are read when their file is opened; the other checkpoints next to one, when they are looked for.

    Args:
        path: The folder of a run, of checkpoints or of one checkpoint.
        names: The names of the files that are read at once; of one checkpoint, also those of its run.

    Raises:
        FileNotFoundError: There is nothing at the URL.
        ImportError, ValueError, DamagedError, OSError: See `file_system` and `files_in`.
    """
    if not is_remote(path):
        yield Path(path)
        return
    clear_copies()
    top = copy_named(new_name())
    try:
        top.mkdir(mode=0o700)
        note_user(top)
        copy = _Copy(str(path).rstrip("/"), top)
        with copy.known(), naming_urls():
            copy.read(names)
            yield copy.local
    finally:
        shutil.rmtree(top, ignore_errors=True)


class _Copy:
    """A local copy of parts of a folder in remote storage, and of the two folders around it."""

    def __init__(self, url: str, top: Path) -> None:
        self._url, self._top = url, top
        self._fs, root = file_system(url)
        names = [name for name in root.split("/") if name][-3:]
        self._base = root.removesuffix("/".join(names))
        self.local = top.joinpath(*names)
        self._around = [folder for folder in self.local.parents if folder.is_relative_to(top) and folder != top]
        self._files: dict[Path, list[Path]] = {}

    @contextlib.contextmanager
    def known(self) -> Iterator[None]:
        """Return a scope in which messages name the URL, and what is missing is read when it is opened."""
        url, folders = self._url, [self.local, *self._around]
        for folder in folders:
            know(folder, url, self._fetch if folder == folders[-1] else None)
            url = url.rpartition("/")[0]
        try:
            yield
        finally:
            for folder in folders:
                forget(folder)

    def read(self, names: Collection[str]) -> None:
        """Read the files of these names."""
        found = self._listed(self.local)
        if not found:
            raise FileNotFoundError(f"there is nothing at {self._url}")
        self.local.mkdir(parents=True)
        for file in found:
            if file.name in names:
                self._download(file)
        if (self.local / INDEX).exists() and len(self._around) == 2:
            for name in {*names} - {INDEX}:
                with contextlib.suppress(FileNotFoundError):
                    self._download(self._around[1] / name)

    def _fetch(self, path: Path) -> None:
        """Read a file that is missing, or the indexes of the checkpoints in a folder around this one."""
        try:
            if path in self._around and path not in self._files:
                for file in self._listed(path):
                    if file.name == INDEX and file.parent.parent == path and not file.exists():
                        self._download(file)
            elif not path.exists() and any(path in files for files in self._files.values()):
                self._download(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def _listed(self, folder: Path) -> list[Path]:
        """Return the files in a folder, by their places in the copy."""
        if folder not in self._files:
            self._files[folder] = [folder / name for name in files_in(self._fs, self._source(folder))]
        return self._files[folder]

    def _download(self, file: Path) -> None:
        download(self._fs, self._source(file), file)

    def _source(self, path: Path) -> str:
        return f"{self._base}{path.relative_to(self._top).as_posix()}"
