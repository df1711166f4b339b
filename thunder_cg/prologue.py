"""One C++ check of all parameters and buffers in the prologue, in place of a Python check for each.

Once the kernels are graphs, Thunder's prologue is most of a call's host time, and these checks are much of it.
They are still made, one by one, wherever the C++ check does not hold, which admits nothing that they would not.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple

import torch
from thunder.core.prims import PrimIDs
from thunder.core.proxies import NumberProxy
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from torch._C._dynamo.guards import TensorGuards

from thunder_cg.compat.torch import tensor_guards
from thunder_cg.executor import executor


class Metadata(NamedTuple):
    """What a compiled function relies on of a parameter or buffer."""

    shape: tuple[int, ...]
    device: str
    dtype: torch.dtype
    requires_grad: bool

    def check(self, tensor: Any) -> None:
        """AssertionError if ``tensor`` is anything else: Thunder then tries the next compiled function."""
        assert isinstance(tensor, torch.Tensor), f"expected a tensor, got a {type(tensor).__name__}"
        found = Metadata(tuple(tensor.shape), str(tensor.device), tensor.dtype, tensor.requires_grad)
        assert found == self, f"expected {self}, got {found}"


class ParameterCheck:
    """Checks all parameters and buffers of a call."""

    def __init__(self, expected: tuple[Metadata, ...]) -> None:
        self.expected = expected
        self._fast: dict[bool, TensorGuards] = {}  # by inference mode, in which PyTorch dispatches differently

    def __call__(self, *tensors: Any) -> None:
        inference = torch.is_inference_mode_enabled()
        fast = self._fast.get(inference)
        if fast is not None and fast.check(*tensors):
            return
        for tensor, metadata in zip(tensors, self.expected):
            metadata.check(tensor)
        # Strides are Thunder's to ignore. Tied weights occur twice, which TensorGuards never admits.
        if len(set(map(id, tensors))) == len(tensors):
            self._fast[inference] = tensor_guards(tensors, strides=False)


def with_one_check(prologue: TraceCtx, names: Set[str]) -> TraceCtx:
    """``prologue`` with one symbol in place of the metadata checks of the tensors called ``names``."""
    checks = {
        id(symbol): symbol
        for symbol in prologue.bound_symbols
        if symbol.sym.id is PrimIDs.CHECK_TENSOR_SHAPE_AND_METADATA
        and symbol.args[0].name in names
        and not any(isinstance(size, NumberProxy) for size in symbol.args[1])
    }
    if len(checks) < 2:
        return prologue
    check = ParameterCheck(tuple(Metadata(tuple(s.args[1]), *s.args[2:]) for s in checks.values()))
    tensors = [symbol.args[0] for symbol in checks.values()]
    combined = executor.bind("cudagraph_check_parameters", check, tensors, None, has_effect=True)
    *_, last = checks
    trace = from_trace(prologue)
    trace.bound_symbols = [
        combined if id(symbol) == last else symbol
        for symbol in prologue.bound_symbols
        if id(symbol) not in checks or id(symbol) == last
    ]
    trace.set_provenance(TraceProvenance("One check of all parameters and buffers"))
    return trace
