"""Has Thunder trace Python in half of the time, while something of ours is compiled.

Thunder (0.2.6) interprets the model's Python. A third of the time that it takes to compile a language model, it
disassembles functions, each time anew that one is called. For half of the rest it looks up builtins such as ``len``, by
interpreting two subscripts for each. Both find the same every time, and no guard comes of either.
"""

from __future__ import annotations

import builtins
import dis
import functools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from thunder.core import interpreter

__all__ = ["faster_tracing"]

_look_up = interpreter.globals_lookup
_lock = threading.Lock()
_inside = 0  # how many are inside of `faster_tracing`, of all threads
_patches = ExitStack()


@contextmanager
def faster_tracing() -> Iterator[None]:
    """Inside, on any thread, Thunder keeps what it disassembles, and looks builtins up itself."""
    global _inside
    with _lock:
        _inside += 1
        if _inside == 1:
            disassembled = functools.cache(lambda code: (*dis.get_instructions(code),))
            namespace = SimpleNamespace(**{**vars(dis), "get_instructions": disassembled})
            _patches.enter_context(patch.multiple(interpreter, dis=namespace, globals_lookup=_look_up_global))
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
