"""Files that the package writes: whole or not at all, and never in the place of somebody else's."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from thunder_cg.errors import FolderError, ForeignFileError

MARK = "written by python -m thunder_cg"  # what a file of ours that is no result file has near its beginning
_BEGINNING = 2000  # characters that may hold the mark


def refuse_foreign(path: Path | None, mark: str = MARK) -> None:
    """Checks, before the work, that `path` may be written. Does nothing without a path.

    Raises:
        ForeignFileError: there is a file without the mark in its first 2,000 characters, or a folder.
        FolderError: no folder can be there for it.
    """
    refuse_without_folder(path)
    if path is None or not (path.is_file() or path.is_dir()):  # a pipe or a terminal has nothing to lose
        return
    with suppress(OSError, UnicodeDecodeError), path.open(encoding="utf-8") as file:
        if mark in file.read(_BEGINNING):
            return
    raise ForeignFileError(path)


def refuse_without_folder(path: Path | None) -> None:
    """Checks, before the work, that there is a folder for `path`, or can be one. FolderError otherwise."""
    if path is not None and not path.exists():
        folder = next(each for each in path.absolute().parents if each.exists())
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise FolderError(path, folder)


def replace(path: Path, text: str) -> None:
    """Writes a file with this text in the place of what is there. Whoever interrupts it leaves the file as it was.

    What is no file, such as /dev/stdout, gets the text as it is.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # not the link that leads to it
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    """The mask of this process, which only setting it tells."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
