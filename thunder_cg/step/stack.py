"""Clears what earlier calls have left on the stack, before a capture looks at the arguments of kernels.

Note [Stale arguments]
    A kernel's arguments are structures that its caller has on the stack. PyTorch fills only a part of some, such as the
    lists of tensors of a fused optimizer. The rest is what an earlier call left there: addresses of another model's
    tensors, too. So a capture that looks for addresses among the arguments begins with a stack of zeros.
"""

from __future__ import annotations

import ctypes

_NBYTES = 96 * 2**10  # twice that is written: deeper than the calls of a step, and less than any thread's stack


class _Block(ctypes.Structure):
    _fields_ = [("content", ctypes.c_char * _NBYTES)]


_ignores_its_argument = ctypes.PYFUNCTYPE(ctypes.c_int, _Block)(("Py_IsInitialized", ctypes.pythonapi))


def clear_stack(byte: int = 0) -> None:
    """Has each byte of the free stack of this thread be ``byte``, where a large argument is passed on the stack."""
    block = _Block()
    ctypes.memset(ctypes.addressof(block), byte, _NBYTES)
    _ignores_its_argument(block)
