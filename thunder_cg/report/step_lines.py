"""The lines of a step that do what no replay does, read off its code, so that a report has all of them at once."""

from __future__ import annotations

import builtins
import inspect
import os
import random
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from thunder_cg.step.bytecode import instructions
from thunder_cg.step.calls import UNSTEADY

_READS = ("item", "tolist", "numpy")  # methods of tensors
_DOES: tuple[Any, ...] = (next, print, open)
_IF_TENSOR = "float() of a tensor"
PRINTS = "print()"


def unreplayed(function: Callable[..., Any]) -> Mapping[str, tuple[str, ...]]:
    """What the function's own lines do that no replay does, by place: ``{"train.py:18": ("next()",)}``."""
    function = inspect.unwrap(function)
    code, places = getattr(function, "__code__", None), dict[str, dict[str, None]]()
    if code is None:
        return {}
    for line, what in _calls(code, function.__globals__):
        places.setdefault(f"{os.path.basename(code.co_filename)}:{line}", {})[what] = None
    return {place: (*what,) for place, what in places.items()}


def _calls(code: Any, variables: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    value: Any = None  # the last global variable, or an attribute of a module there
    for operation, name, line, _ in instructions(code):
        if operation == "LOAD_GLOBAL":
            value = variables.get(name, getattr(builtins, name, None))
        elif operation in ("LOAD_ATTR", "LOAD_METHOD"):
            is_module = isinstance(value, (ModuleType, type))
            if name in _READS and not is_module:
                yield line, f"{name}()"
            value = getattr(value, str(name), None) if is_module else None
        elif operation != "PUSH_NULL":
            value = None
        if value is float:
            yield line, _IF_TENSOR
        elif callable(value) and (_is_among(value, _DOES) or _is_among(value, UNSTEADY) or _draws(value)):
            yield line, f"{value.__name__}()"


def _is_among(value: Any, functions: Any) -> bool:
    return any(value is each for each in functions)


def _draws(value: Any) -> bool:
    """Whether it draws Python's random numbers."""
    return getattr(value, "__self__", None) is random.random.__self__  # type: ignore[attr-defined]
