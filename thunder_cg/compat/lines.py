"""Has Thunder keep the user's lines, in what is compiled with a transform of this package.

Thunder (0.2.6) notes the innermost line that is not its own, which may be one of a module of PyTorch's, or of this
package. It gives that line to what one of its passes makes of an operator, but not if that is for the backward.
"""

from __future__ import annotations

import linecache
import os
import re
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

import thunder
import torch
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import InterpreterRuntimeCtx
from thunder.core.symbol import BoundSymbol

from thunder_cg.compat.thunder import before_symbols, is_ours

_copy = BoundSymbol.from_bsym
_innermost = InterpreterRuntimeCtx.get_current_user_source_location


def _directory(module: Any) -> str:
    return os.path.join(os.path.dirname(module.__file__), "")


_PYTHON = _directory(os)
PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))  # where they are installed
_PYTHONS_PACKAGES = tuple(_PYTHON + each.lstrip(os.sep) for each in PACKAGES)
_TORCH, _THUNDER = _directory(torch), _directory(thunder)
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_TOOLS = os.path.join(_PACKAGE, "tools", "")  # which have models


_COMMENT = re.compile(r"\s*# (/.*):(\d+): \t")  # before what the trace has of a line


def line_in_trace(file: str, line: int) -> tuple[str, int] | None:
    """The user's file and line of what a trace, whose code Thunder names ``file``, has in this line of its code."""
    if not file.startswith("thunder."):
        return None
    comments = filter(None, map(_COMMENT.match, reversed(linecache.getlines(file)[:line])))
    return next(((found[1], int(found[2])) for found in comments), None)


def is_torchs(file: str) -> bool:
    """Whether a file is PyTorch's."""
    return file.startswith(_TORCH)


def runs_compiled_code(code: CodeType) -> bool:
    """Whether it is the function of Dynamo's that calls what Dynamo has compiled."""
    return code.co_name == "compile_wrapper" and code.co_filename == os.path.join(_TORCH, "_dynamo", "eval_frame.py")


def is_pythons(file: str) -> bool:
    """Whether a file is of Python's library, and of no package that is installed beside it."""
    return file.startswith((_PYTHON, "<frozen")) and not file.startswith(_PYTHONS_PACKAGES)


def is_tracers(file: str) -> bool:
    """Whether a file is Thunder's or this package's, which call operators for the user, or stands for a trace."""
    return bool(
        file.startswith(_THUNDER)
        or (file.startswith(_PACKAGE) and not file.startswith(_TOOLS))
        or re.fullmatch(r"thunder\.\w+_\d+", file)
    )


@cache
def keep_lines() -> None:
    """From now on, an operator has the line in the user's code, and what computes its gradient has its line."""
    InterpreterRuntimeCtx.get_current_user_source_location = _users_line
    BoundSymbol.from_bsym = _copied
    before_symbols(_give_line)


def _users_line(context: Any) -> Any:
    """The file and the positions of the innermost frame of the user's; of PyTorch's if there is none."""
    if not is_ours(get_compile_data()):
        return _innermost(context)
    frames = [frame for frame in reversed(context.frame_stack) if not is_tracers(frame.code.co_filename)]
    if not frames:
        return _innermost(context)  # a model of Thunder's own, such as those of its tests
    users = next((frame for frame in frames if not is_torchs(frame.code.co_filename)), frames[0])
    positions = users.positions
    if users is not frames[0] and positions is not None:
        positions = _LineOf(positions.lineno, (), in_library=True)
    return users.code.co_filename, positions


def _copied(bound: Any, **changes: Any) -> Any:
    """A copy of a symbol. A pass that makes several symbols of one gives all of them its line, last of all."""
    if changes and bound.source_filename is not None and is_ours(get_compile_data()):
        changes = {key: value for key, value in changes.items() if not key.startswith("source_")}
    return _copy(bound, **changes)


def _give_line(processor: Any, bound: Any) -> None:
    """Has a pass over a trace give what it makes of a symbol its line."""
    at = bound.source_positions
    if at is not None and not arguments_at(bound):
        at = _LineOf(at.lineno, tuple(proxy.name for proxy in bound.flat_proxy_args), is_called_by_torch(bound))
    processor.new_trace.set_current_source_location(bound.source_filename, at)


class _LineOf(NamedTuple):
    """A line, and what else is known of it.

    Attributes:
        arguments: their names, of the symbol that this one was made of.
        in_library: a module of PyTorch's has called the operator, which the line calls.
    """

    lineno: int
    arguments: tuple[str, ...]
    in_library: bool


def arguments_at(bound: Any) -> tuple[str, ...]:
    """The arguments of the operator of the user that a symbol was made of; none if it is that operator."""
    at = bound.source_positions
    return at.arguments if isinstance(at, _LineOf) else ()


def is_called_by_torch(bound: Any) -> bool:
    """Whether the line of a symbol is the user's, and the operator is called by a module of PyTorch's."""
    at = bound.source_positions
    return isinstance(at, _LineOf) and at.in_library
