"""Reports in files: the suffix says the form, and no file is overwritten that is no report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from thunder_cg.files import refuse_foreign, replace
from thunder_cg.report import html, markdown, schema, terminal, text

if TYPE_CHECKING:
    from thunder_cg.report.differences import Differences
    from thunder_cg.report.report import Report
    from thunder_cg.report.step import StepReport

T = TypeVar("T")
Forms = Mapping[str, tuple[str, Callable[[T], str]]]  # by suffix: how files of the form begin, and the content

_TEXT_MARK = "thunder_cg report\n"


def _text(said: str) -> str:
    return f"{_TEXT_MARK}\n{terminal.wrap(said)}\n"


OF_REPORT: Forms[Report] = {
    ".html": (html.MARK, lambda report: html.page(html.render(report), "CUDA graphs")),
    ".md": (markdown.MARK, markdown.render),
    ".json": (schema.MARK, schema.dumps),
    ".txt": (_TEXT_MARK, lambda report: _text(text.render(report))),
}
OF_STEP: Forms[StepReport] = {
    ".html": (html.MARK, lambda report: html.page(html.lines(report.lines()), "CUDA graphs of a step")),
    ".md": (markdown.MARK, lambda report: markdown.lines(report.lines())),
    ".json": (schema.MARK, schema.dumps),
    ".txt": (_TEXT_MARK, lambda report: _text("\n".join(report.lines()))),
}
OF_DIFFERENCES: Forms[Differences] = {
    ".html": (html.MARK, lambda differences: html.page(html.differences(differences), "CUDA graphs, before and after")),
    ".txt": (_TEXT_MARK, lambda differences: _text(str(differences))),
}


def save(content: T, path: Path, forms: Forms[T]) -> None:
    """Writes a report, or differences, in the form of the path's suffix: `thunder_cg.report.Report.save`."""
    if path.suffix not in forms:
        raise ValueError(f"{path} ends with {path.suffix!r}; this is saved as one of {', '.join(forms)}")
    mark, form = forms[path.suffix]
    refuse_foreign(path, mark)
    replace(path, form(content))
