"""What Thunder compiled a trace for, and how long that took, for the log and the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

NAME = "thunder_cg.name"  # in the `meta` of a graph of Dynamo's: what the report calls it


def name_of(fn: Any) -> str:
    """The user's name for what is compiled: a module's class, a function's qualified name, "Net, graph 0"."""
    fn = getattr(fn, "_orig_mod", fn)
    name = fn.meta.get(NAME) if isinstance(fn, torch.fx.GraphModule) else None
    return str(name or getattr(fn, "__qualname__", type(fn).__name__))


@dataclass(slots=True)
class Compilation:
    """How the entry of Thunder's cache came to be that a program belongs to.

    Attributes:
        name: the user's, of what was compiled: a module's class, or a function's qualified name.
        training: the module's mode; None of a function, and of Dynamo's graphs.
        grad: whether gradients were enabled.
        autocast: the dtype of the autocast that was active, such as "bfloat16"; None if none was.
        seconds: from the beginning of Thunder's tracing until the last trace of the entry was partitioned.
    """

    name: str
    training: bool | None
    grad: bool
    autocast: str | None
    seconds: float = 0.0
