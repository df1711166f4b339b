"""The choice of a backend by its name."""

import logging
from functools import cache

import torch

from thunder_cg.runtime.backend import Backend
from thunder_cg.runtime.cuda import CudaBackend
from thunder_cg.runtime.tape import TapeBackend

_logger = logging.getLogger(__name__)


class PlanningBackend(TapeBackend):
    """Of a plan for CUDA devices that is made without one: it runs and captures nothing."""

    name = "cuda"
    device_type = "cuda"


def resolve(name: str) -> Backend:
    """``"auto"`` is ``cuda`` where there is a CUDA device, else ``tape``. BackendError if ``cuda`` cannot run."""
    if name == "auto" and not torch.cuda.is_available():
        _warn_of_the_tape()
        return TapeBackend()
    return TapeBackend() if name == "tape" else CudaBackend()


@cache
def _warn_of_the_tape() -> None:
    """Once in a process."""
    _logger.warning(
        'backend="auto" takes the tape, because torch.cuda.is_available() is False: it records and replays on the CPU, '
        'which is slower than no graphs; run on a GPU, or pass backend="tape" if that is meant'
    )
