"""The choice of a backend by its name."""

from __future__ import annotations

import torch

from thunder_cg.runtime.backend import Backend
from thunder_cg.runtime.cuda import CudaBackend
from thunder_cg.runtime.tape import TapeBackend


def resolve(name: str) -> Backend:
    """The backend called ``name``; ``"auto"`` is ``cuda`` where there is a CUDA device and ``tape`` elsewhere.

    Raises:
        BackendError: ``cuda`` was asked for and there is no usable CUDA device.
    """
    if name == "tape" or (name == "auto" and not torch.cuda.is_available()):
        return TapeBackend()
    return CudaBackend()
