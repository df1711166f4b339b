"""Functions written at run time: straight-line code with everything bound, where a call's host time counts."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from functools import cache
from itertools import count
from types import CodeType
from typing import Any

_numbers = count()


class Code:
    """The source of a function and the objects that it names."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._names: dict[str, Any] = {}

    def name(self, value: Any, hint: str) -> str:
        """A name for ``value`` in the source."""
        name = hint
        for i in count(1):
            if self._names.setdefault(name, value) is value:
                return name
            name = f"{hint}_{i}"
        raise AssertionError

    def add(self, line: str, depth: int = 1) -> None:
        """Adds a line, ``depth`` blocks deep."""
        self._lines.append("    " * depth + line)

    def function(self, signature: str) -> Callable[..., Any]:
        """The function. Tracebacks show its source."""
        exec(_compiled("\n".join([f"def {signature}:", *self._lines, ""])), self._names)
        made: Callable[..., Any] = self._names[signature.partition("(")[0]]
        return made


@cache
def _compiled(source: str) -> CodeType:
    """Recordings of one program differ in the objects that are bound, seldom in the source."""
    file = f"<thunder_cg call {next(_numbers)}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    return compile(source, file, "exec")
