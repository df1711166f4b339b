"""Where the user wrote what an op does. Thunder names a line of the code that it interprets, which may be generated."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import currentframe
from traceback import walk_stack, walk_tb
from types import MappingProxyType

from thunder_cg.compat.lines import PACKAGES, is_pythons, is_torchs, is_tracers, runs_compiled_code
from thunder_cg.compat.operators import names_in_namespace
from thunder_cg.compat.thunder import BoundSymbol

# For a line of generated code, by file name and number: the stack, as Python prints it, of what it was generated from.
# For an argument of generated code, by its name and 0: that of its first use.
Stacks = Mapping[tuple[str, int], str]
_NO_STACKS: Stacks = MappingProxyType({})
LOOKED_UP = "a value that it looked up"  # in the place of Thunder's list of how it did so


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of source code; as a string ``"model.py:38"``."""

    file: str
    number: int

    @property
    def text(self) -> str | None:
        """What the line says: more than the file name that a notebook gives a cell."""
        return linecache.getline(self.file, self.number).strip() or None

    @property
    def is_installed(self) -> bool:
        """Whether it is of a package that somebody else wrote, most likely."""
        return any(packages in self.file for packages in PACKAGES)

    @property
    def is_users(self) -> bool:
        """Whether it is neither PyTorch's nor Thunder's, nor of Python's library."""
        return not (is_torchs(self.file) or is_tracers(self.file) or is_pythons(self.file))

    def __str__(self) -> str:
        return f"{_notebook_cell(self.file) or os.path.basename(self.file)}:{self.number}"


def _notebook_cell(file: str) -> str | None:
    """``"In[5]"``, if a file stands for a cell of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cells = getattr(shell, "compile", None)
    named = cells.format_code_name(file) if cells is not None and hasattr(cells, "format_code_name") else None
    return str(named[1]) if named is not None else None


_GENERATED = re.compile(r"<eval_with_key>")


def line_behind(file: str, number: int, stacks: Stacks) -> SourceLine | None:
    """The line behind a line that was interpreted, in the user's code or in a module of PyTorch's; None if unknown."""
    if _GENERATED.match(file):
        frames = user_frames(stacks.get((file, number)))
        return frames[-1] if frames else None
    return None if is_tracers(file) else SourceLine(file, number)


def user_frames(stack: str | None) -> list[SourceLine]:
    """The lines of a stack, as Python prints it, that are the user's; the innermost is last."""
    found = re.findall(r'File "([^"]+)", line (\d+)', stack or "")
    return users(SourceLine(file, int(number)) for file, number in found)


def users(frames: Iterable[SourceLine]) -> list[SourceLine]:
    """Those of the lines that are neither PyTorch's nor Thunder's, nor of Python's library."""
    return [line for line in frames if line.is_users]


def users_level() -> int:
    """The ``stacklevel`` with which what calls this warns at the line of the user's that has led to it."""
    frames = (frame for frame, _ in walk_stack(currentframe()))
    files = [frame.f_code.co_filename for frame in frames][1:]
    written = (level for level, file in enumerate(files, 1) if SourceLine(file, 1).is_users and _is_written(file))
    return next(written, 2)


def calling_line() -> SourceLine | None:
    """The line of the user's that calls what is compiled, on this thread; None if there is none, as in a backward.

    What Dynamo has compiled has frames with the user's lines, too, below the one that runs it.
    """
    # Without its own, which would refer to itself, so that what all of them hold would live until a garbage collection.
    frames = [frame for frame, _ in walk_stack(currentframe())][1:]
    start = next((i for i, frame in enumerate(frames) if runs_compiled_code(frame.f_code)), 0)
    lines = (SourceLine(frame.f_code.co_filename, frame.f_lineno) for frame in frames[start:])
    return next((line for line in lines if line.is_users and _is_written(line.file)), None)


def _is_written(file: str) -> bool:
    """Whether somebody has written the code of a frame, and no compiler."""
    return os.path.exists(file) or _notebook_cell(file) is not None or file in ("<stdin>", "<string>")


_CUT_NAME = re.compile(r"torch\._ops\.(\w+)\.(?!\w)")  # of an operator of torch.library, in a message of Thunder's


def described(error: BaseException, stacks: Stacks = _NO_STACKS, at: str | None = None) -> str:
    """The type of an error, where in the user's code it was raised, and the first sentence of its message.

    Args:
        at: the line, if it is known; else the traceback says it.
    """
    raised, lines = _raised_at(error, stacks)
    cause = error.__cause__ if raised and error.__cause__ is not None else error
    own = [line for line in lines if not line.is_installed]
    where = f" at {at or called_from([*own[-1:], *lines[-1:]])}" if at or lines else ""
    said = re.sub(r"ProvenanceRecord\(\n.*?^\)\s*", f"{LOOKED_UP} ", str(cause), flags=re.MULTILINE | re.DOTALL)
    said = said.strip().partition("\n")[0].partition(". ")[0].rstrip(".!")
    if (cut := _CUT_NAME.search(said)) is not None:
        words = re.findall(r"\w+", (own[-1].text if own else "") or "")
        if len(called := [name for name in names_in_namespace(cut[1]) if name in words]) == 1:
            said = said.replace(cut[0], f"{cut[1]}::{called[0]}")
    said = re.sub(r"<(?:built-in )?(?:method|function) (\S+?)(?: (?:of|at) [^>]*)?>(?!\.)", r"\1", said)
    return f"{type(cause).__name__}{where}: {said or 'no message'}"


def line_of(error: BaseException, stacks: Stacks = _NO_STACKS) -> SourceLine | None:
    """The innermost line of the user's code at which an error was raised; None if it is not known."""
    _, lines = _raised_at(error, stacks)
    return next((line for line in reversed(lines) if not line.is_installed), None)


def _raised_at(error: BaseException, stacks: Stacks) -> tuple[bool, list[SourceLine]]:
    """Whether the error or its cause was raised in the user's code, and the lines, or those that a transform was at."""
    errors = [each for each in (error, error.__cause__) if each is not None]
    lines = [line for each in errors for line in _lines_of(each, stacks)]
    return bool(lines), lines or [*_traced_lines(error, stacks)]


def _lines_of(error: BaseException, stacks: Stacks) -> list[SourceLine]:
    frames = ((frame.f_code.co_filename, number) for frame, number in walk_tb(error.__traceback__))
    return users(line for file, number in frames if (line := line_behind(file, number, stacks)) is not None)


def _traced_lines(error: BaseException, stacks: Stacks) -> Iterator[SourceLine]:
    """The lines of the operators that Thunder's transforms were busy with, the innermost last."""
    for frame, _ in walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, BoundSymbol) and value.source_filename and value.source_positions is not None:
                line = line_behind(value.source_filename, value.source_positions.lineno, stacks)
                yield from users([line] if line is not None else [])


def called_from(frames: Sequence[SourceLine]) -> str | None:
    """The innermost line, and from where it is called: ``"model.py:38, called from train.py:7"``."""
    inner = dict.fromkeys(map(str, reversed(frames)))
    return ", called from ".join(inner) or None
