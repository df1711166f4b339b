"""The text report on a terminal: in the columns that there are, and in colour.

A library such as rich would need the same patterns, and a second way for where it is not installed; its wrapping knows
no indents that are deeper than the line's.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator

COLUMNS = 80  # of a file, and of a terminal that does not say
_BOLD, _GREEN, _RED, _DIM = "1", "32", "31", "2"
_COLOURS = (
    (re.compile(r"(?m)\A.+$|^What is not in a graph, .*:$"), _BOLD),
    (re.compile(r"\bCUDAGraph\d+\b"), _GREEN),
    (re.compile(r"\bto change it:"), _GREEN),
    (re.compile(r"\b(?:runs eagerly|not replayed|Not replayed)\b"), _RED),
    (re.compile(r"(?m)(?<=^ {8})why:"), _DIM),
)


def show(text: str) -> None:
    """Prints the text, in colour if this is a terminal. NO_COLOR in the environment means no colour (no-color.org)."""
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print(colour(fit(text)) if coloured else fit(text))


def fit(text: str) -> str:
    """The text in the columns of the terminal, where the output goes to one; else the text as it is."""
    return wrap(text, shutil.get_terminal_size((COLUMNS, 24)).columns) if sys.stdout.isatty() else text


def wrap(text: str, columns: int = COLUMNS) -> str:
    """Breaks long lines between words; what follows is indented by four more than its line."""
    return "\n".join(part for line in text.splitlines() for part in _wrapped(line, columns))


def _wrapped(line: str, columns: int) -> Iterator[str]:
    indent = " " * (len(line) - len(line.lstrip()))
    parts = textwrap.wrap(
        line.strip(),
        columns,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    yield from parts or [""]


def colour(text: str) -> str:
    """The text with the terminal's codes for colours."""
    for pattern, code in _COLOURS:
        text = pattern.sub(rf"\033[{code}m\g<0>\033[0m", text)
    return text
