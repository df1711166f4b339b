"""What trial calls of a compiled function change, and how it is put back."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from thunder_cg.compat.tensors import tensors_in
from thunder_cg.report.programs import original
from thunder_cg.runtime.tensors import is_sparse
from thunder_cg.verify.compare import same_bits


class StateBefore:
    """The values of tensors, and the states of the generators of the CPU and of the devices that tensors are on.

    Args:
        written: their values are kept, unless they are sparse.
        others: their devices count, too.
    """

    def __init__(self, written: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> None:
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in written if not is_sparse(tensor)]
        devices = {tensor.device for tensor in (*written, *others) if tensor.device.type == "cuda"}
        self._generators = [(device, torch.cuda.get_rng_state(device)) for device in devices]
        self._generator = torch.get_rng_state()

    def restore(self) -> None:
        """Puts all back. A tensor that has its value still is not written."""
        with torch.no_grad():
            for tensor, saved in self._tensors:
                if not same_bits(tensor, saved):
                    tensor.copy_(saved)
        torch.set_rng_state(self._generator)
        for device, state in self._generators:
            torch.cuda.set_rng_state(state, device)


@contextmanager
def state_kept(fn: Any, inputs: Any) -> Iterator[None]:
    """Inside, calls of ``fn`` may change buffers, inputs and generators; at the end, these are as they were."""
    module = _module(fn)
    buffers = [*module.buffers()] if module is not None else []
    parameters = [*module.parameters()] if module is not None else []
    state = StateBefore([*buffers, *tensors_in(inputs)], parameters)
    try:
        yield
    finally:
        state.restore()


def _module(fn: Any) -> torch.nn.Module | None:
    """The module that was compiled, or whose method was; None if there is none."""
    if not isinstance(fn, torch.nn.Module):
        fn = original(fn)
    if not isinstance(fn, torch.nn.Module) and callable(fn):
        fn = getattr(inspect.unwrap(fn), "__self__", None)
    return fn if isinstance(fn, torch.nn.Module) else None
