"""Reports in files: the suffix says the form, and no file is overwritten that is no report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from thunder_cg.report import html, markdown, schema, terminal, text

if TYPE_CHECKING:
    from thunder_cg.report.report import Report

_TEXT_MARK = "thunder_cg report\n"
_FORMS: Mapping[str, tuple[str, Callable[[Report], str]]] = {  # by suffix: how files of the form begin, and the content
    ".html": (html.MARK, lambda report: html.page({"": report}, "CUDA graphs")),
    ".md": (markdown.MARK, markdown.render),
    ".json": (schema.MARK, schema.dumps),
    ".txt": (_TEXT_MARK, lambda report: f"{_TEXT_MARK}\n{terminal.wrap(text.render(report))}\n"),
}


def save(report: Report, path: Path) -> None:
    """Writes the report in the form of the path's suffix. See :meth:`thunder_cg.report.Report.save`."""
    if path.suffix not in _FORMS:
        raise ValueError(f"{path} ends with {path.suffix!r}; a report is saved as one of {', '.join(_FORMS)}")
    mark, form = _FORMS[path.suffix]
    write(path, form(report), mark)


def write(path: Path, content: str, mark: str) -> None:
    """Writes a file at once: one that is interrupted leaves the old file, or none.

    Raises:
        FileExistsError: there is a file that does not begin with ``mark``, as ``content`` does.
    """
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(mark.encode())) != mark.encode():
                raise FileExistsError(f"{path} is a file that thunder_cg did not write; name another one, or remove it")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(content, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
