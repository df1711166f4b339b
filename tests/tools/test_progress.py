"""A bar on a terminal, lines in a file."""

from __future__ import annotations

import io

import pytest

from thunder_cg.tools.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_draws_a_bar_on_a_terminal_and_writes_lines_elsewhere() -> None:
    terminal, plain = Terminal(), io.StringIO()
    for stream in (terminal, plain):
        progress = Progress(4, stream)
        progress.tick("a: turn 1")
        progress.tick("a: turn 2")
        progress.tick("c", 0)  # nothing is shown
        progress.tick("b", 2)
        progress.show("d")
        progress.clear()
    assert f"[{'#' * 12}{' ' * 12}] 2/4" in terminal.getvalue() and "\n" not in terminal.getvalue()
    assert [line.split(" ", 2)[2] for line in plain.getvalue().splitlines()] == ["a: turn 1", "b", "d"]


def test_bar_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that wraps would leave its first part behind."""
    monkeypatch.setenv("COLUMNS", "60")
    terminal = Terminal()
    progress = Progress(4, terminal)
    progress.tick("a long stage " * 9)
    progress.clear()
    bar, blank, end = terminal.getvalue().split("\r")[1:]
    assert len(bar) == len(blank) == 59 and "1/4" in bar
    assert not blank.strip() and not end
