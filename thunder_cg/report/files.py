"""Reports in files: the suffix says the form, and no file is overwritten that is no report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from thunder_cg.files import refuse_foreign, replace
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
    refuse_foreign(path, mark)
    replace(path, form(report))
