"""Clears what earlier calls have left on the stack, before a capture looks at the arguments of kernels.

Note [Stale arguments]
    A kernel's arguments are structures that its caller has on the stack. PyTorch fills only a part of some, such as the
    lists of tensors of a fused optimizer. The rest is what an earlier call left there: addresses of another model's
    tensors, too. So a capture that looks for addresses among the arguments begins with a stack of zeros.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NBYTES = 96 * 2**10  # twice that is written: deeper than the calls of a step, and less than any thread's stack


class _Block(ctypes.Structure):
    _fields_ = [("content", ctypes.c_char * _NBYTES)]


_ignores_its_argument = ctypes.PYFUNCTYPE(ctypes.c_int, _Block)(("Py_IsInitialized", ctypes.pythonapi))


def clear_stack(byte: int = 0) -> None:
    """Has each byte of the free stack of this thread be ``byte``, where a large argument is passed on the stack."""
    block = _Block()
    ctypes.memset(ctypes.addressof(block), byte, _NBYTES)
    _ignores_its_argument(block)


def on_thread_of_backwards(device: torch.device, fn: Callable[[], None]) -> None:
    """Calls ``fn`` on the thread on which autograd runs backwards for the device."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros((), device=device, requires_grad=True)
        torch.autograd.grad(_CallInBackward.apply(x, fn), x)


class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, fn: Callable[[], None]) -> Tensor:
        context.fn = fn
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        context.fn()
        return (*gradients, None)
