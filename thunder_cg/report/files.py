"""What all reports can do: be printed, shown in a notebook, and saved to files of which the suffix says the form."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from thunder_cg.errors import CudagraphError
from thunder_cg.files import refuse_foreign, replace
from thunder_cg.report import html, markdown, schema, terminal
from thunder_cg.report.dot import dump_dot

T = TypeVar("T", bound="FunctionReport")
Forms = Mapping[str, tuple[str, Callable[[], str]]]  # by suffix: how files of the form begin, and the content

_TEXT_MARK = "thunder_cg report\n"


class Printed(ABC):
    """What is printed, left as a notebook cell's last line, and saved. No file is overwritten that is no report."""

    __slots__ = ()
    _title: ClassVar[str]  # of its page

    @abstractmethod
    def _text(self) -> str: ...

    @abstractmethod
    def _repr_html_(self) -> str: ...

    def _forms(self) -> Forms:
        return {
            ".html": (html.MARK, lambda: html.page(self._repr_html_(), self._title)),
            ".txt": (_TEXT_MARK, lambda: f"{_TEXT_MARK}\n{terminal.wrap(self._text())}\n"),
        }

    def save(self, path: str | Path) -> None:
        """Writes it to a file: one page that needs nothing else, or what else the suffix says.

        Args:
            path: ends with .html or .txt; of the report of a function or a step also with .md, or .json (see
                :mod:`thunder_cg.report.schema`).

        Raises:
            ValueError: it ends otherwise.
            FileExistsError: there is a file that is no report. Earlier reports are replaced.
        """
        path, forms = Path(path), self._forms()
        if path.suffix not in forms:
            raise ValueError(f"{path} ends with {path.suffix!r}; this is saved as one of {', '.join(forms)}")
        mark, form = forms[path.suffix]
        refuse_foreign(path, mark)
        replace(path, form())

    def __str__(self) -> str:
        return terminal.fit(self._text())

    __repr__ = __str__


class FunctionReport(Printed):
    """The report of a function or of a step. It refers to the function, but neither files nor comparisons have that."""

    __slots__ = ("_function",)
    _function: Callable[[], Any]  # a weak reference, as a report keeps no function

    def about(self: T, fn: Any) -> T:
        """The report, with what it is about."""
        object.__setattr__(self, "_function", weakref.ref(fn))
        return self

    def _function_for(self, method: str) -> Any:
        fn = self._function() if hasattr(self, "_function") else None
        if fn is None:
            problem = "this report has no function: it is a plan, it was loaded, or its function is gone"
            raise CudagraphError(f"{type(self).__name__}.{method}: {problem}; call thunder_cg.{method}(fn, ...)")
        return fn

    @abstractmethod
    def _markdown(self) -> str: ...

    def _forms(self) -> Forms:
        forms = super()._forms()
        return {
            ".html": forms[".html"],
            ".md": (markdown.MARK, self._markdown),
            ".json": (schema.MARK, lambda: schema.dumps(self)),
            ".txt": forms[".txt"],
        }

    def to_dict(self) -> dict[str, Any]:
        """The whole report as dicts, lists, strings, numbers and None, ready for `json.dumps`."""
        return dict(schema.plain(asdict(self)))  # type: ignore[call-overload]

    @classmethod
    def load(cls: type[T], path: str | Path) -> T:
        """The report that `save` wrote to a .json file. ValueError if the file is something else."""
        return schema.loads(cls, Path(path).read_text(encoding="utf-8"), str(path))

    def show(self) -> None:
        """Prints the text: on a terminal in colour, unless the environment variable NO_COLOR is set."""
        terminal.show(self._text())

    def dump_dot(self, region: str, path: str | Path) -> None:
        """Writes the graph of a region, or of a whole step, to a file for Graphviz: :func:`thunder_cg.dump_dot`.

        Raises:
            CudagraphError: the report was loaded from a file, or its function is gone.
        """
        dump_dot(self._function_for("dump_dot"), region, path)
