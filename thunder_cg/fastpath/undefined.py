"""Thunder's own nodes in autograd's graph, with None for gradients that PyTorch has none of.

Autograd makes zeros of the gradients that it has left undefined before such a node sees them. A hook sees them before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder_cg.analysis.undefined import undefined_too
from thunder_cg.compat.thunder import CacheEntry, connect_to_autograd, connect_with
from thunder_cg.fastpath.accumulate import register_own
from thunder_cg.runtime.program import program_of

_NODES = ("ThunderOutputFunctionBackward", "ThunderFunctionBackward")


def connect(entry: CacheEntry, arguments: dict[str, Any]) -> None:
    """Ties the results of a call to autograd.

    Args:
        arguments: those of Thunder's function for it.
    """
    program = program_of(entry.backward_traces)
    if program is None or not program.routes:
        connect_to_autograd(**arguments)
        return
    run, routes = arguments["backward_fn"], program.routes
    defined: list[Sequence[Any]] = []

    def note(gradients: Sequence[Any]) -> None:
        defined[:] = [tuple(None if gradient is None else True for gradient in gradients)]

    def backward(saved: list[Any], gradients: list[Any]) -> Sequence[Any]:
        found: Sequence[Any] = run(saved, gradients)
        return undefined_too(found, routes, defined[0]) if defined and None in defined[0] else found

    connect_to_autograd(**{**arguments, "backward_fn": backward})
    nodes = (getattr(result, "grad_fn", None) for result in arguments["flat_output"])
    node = next((each for each in nodes if type(each).__name__ in _NODES), None)
    if node is not None:
        register_own(node.register_prehook, note)


connect_with(connect)
