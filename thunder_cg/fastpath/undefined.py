"""Thunder's own nodes in autograd's graph, with None for gradients that PyTorch has none of.

Autograd makes zeros of the gradients that it has left undefined before such a node sees them. A hook sees them before.
Another hook has a backward through the gradients that such a node returns raise: see Note [Second derivatives].
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from thunder_cg.analysis.undefined import undefined_too
from thunder_cg.compat.autograd import raising_if_differentiated, register_own
from thunder_cg.compat.compilation import connect_with
from thunder_cg.compat.thunder import CacheEntry, connect_to_autograd
from thunder_cg.errors import NO_SECOND_DERIVATIVES
from thunder_cg.runtime.program import program_of

_logger = logging.getLogger(__name__)
_ANOMALY = (
    "torch.autograd.set_detect_anomaly raises at Thunder's backward, with and without graphs: 'Tensor.item() cannot be "
    "called on meta tensors'; pass check_nan=False, or compile with thunder_cg.thunderfx, which has no such tensors"
)
_OF_OUTPUT, _OF_CALL = "ThunderOutputFunctionBackward", "ThunderFunctionBackward"  # nodes


@cache
def _warn_of_anomaly_detection() -> None:
    _logger.warning(_ANOMALY)


def connect(entry: CacheEntry, arguments: dict[str, Any]) -> None:
    """Ties the results of a call to autograd.

    Args:
        arguments: those of Thunder's function for it.
    """
    looks_for_nan = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    if looks_for_nan and not arguments["disable_split_autograd"]:
        _warn_of_anomaly_detection()
    program = program_of(entry.backward_traces)
    if program is None:
        connect_to_autograd(**arguments)
        return
    run, routes = arguments["backward_fn"], program.routes
    defined: list[Sequence[Any]] = []

    def note(gradients: Sequence[Any]) -> None:
        defined[:] = [tuple(None if gradient is None else True for gradient in gradients)]

    def backward(saved: list[Any], gradients: list[Any]) -> Sequence[Any]:
        found: Sequence[Any] = run(saved, gradients)
        return undefined_too(found, routes, defined[0]) if defined and None in defined[0] else found

    connect_to_autograd(**{**arguments, "backward_fn": backward if routes else run})
    nodes = (getattr(result, "grad_fn", None) for result in arguments["flat_output"])
    node = next((each for each in nodes if type(each).__name__ in (_OF_OUTPUT, _OF_CALL)), None)
    if node is None:
        return
    if routes:
        register_own(node.register_prehook, note)
    # In a capture, Thunder makes one node, whatever the option says.
    computes = node if type(node).__name__ == _OF_CALL else node.next_functions[0][0]
    register_own(computes.register_hook, _refuse_second_derivatives)


def _refuse_second_derivatives(gradients: Sequence[Any], _: Sequence[Any]) -> Sequence[Any] | None:
    return raising_if_differentiated(gradients, NO_SECOND_DERIVATIVES) if torch.is_grad_enabled() else None


connect_with(connect)
