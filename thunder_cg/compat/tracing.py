"""Has Thunder trace Python in half of the time, while something of ours is compiled.

Thunder (0.2.6) interprets the model's Python. A third of the time that it takes to compile a language model, it
disassembles functions, each time anew that one is called. For half of the rest it looks up builtins such as ``len``, by
interpreting two subscripts for each. Both find the same every time, and no guard comes of either. For each exception,
such as the one at the end of a loop, it waits busily for a thread of its own, which keeps that thread from running.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from thunder.core import interpreter

__all__ = ["faster_tracing"]

_look_up = interpreter.globals_lookup
_get_frame_of_thread = interpreter.InterpreterFrame.get_or_make_python_frame
_lock = threading.Lock()
_inside = 0  # how many are inside of `faster_tracing`, of all threads
_patches = ExitStack()


@contextmanager
def faster_tracing() -> Iterator[None]:
    """Inside, on any thread, Thunder keeps what it disassembles, looks builtins up itself, and lets its thread run."""
    global _inside
    with _lock:
        _inside += 1
        if _inside == 1:
            disassembled = functools.cache(lambda code: (*dis.get_instructions(code),))
            namespace = SimpleNamespace(**{**vars(dis), "get_instructions": disassembled})
            _patches.enter_context(patch.multiple(interpreter, dis=namespace, globals_lookup=_look_up_global))
            frame = patch.object(interpreter.InterpreterFrame, "get_or_make_python_frame", _get_frame)
            _patches.enter_context(frame)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _patches.close()


def _look_up_global(variables: Any, name: Any) -> Any:
    known, wanted = interpreter.unwrap(variables), interpreter.unwrap(name)
    if wanted not in known and known.get("__builtins__") in (builtins, vars(builtins)):
        builtin = vars(builtins).get(wanted)
        if callable(builtin):
            return interpreter.wrap_const(builtin)
    return _look_up(variables, name)


def _get_frame(frame: Any) -> Any:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        return _get_frame_of_thread(frame)
    finally:
        sys.setswitchinterval(interval)
