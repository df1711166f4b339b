"""The choice of a backend by its name."""

import torch

from thunder_cg.runtime.backend import Backend
from thunder_cg.runtime.cuda import CudaBackend
from thunder_cg.runtime.tape import TapeBackend


class PlanningBackend(TapeBackend):
    """Of a plan for CUDA devices that is made without one: it runs and captures nothing."""

    name = "cuda"
    device_type = "cuda"


def resolve(name: str) -> Backend:
    """``"auto"`` is ``cuda`` where there is a CUDA device, else ``tape``. BackendError if ``cuda`` cannot run."""
    if name == "tape" or (name == "auto" and not torch.cuda.is_available()):
        return TapeBackend()
    return CudaBackend()
