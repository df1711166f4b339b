"""CUDA graphs for Lightning Thunder: captured where that is safe, eager where it is not, and able to say why.

What comes in: a module or function, through ``thunder.jit(fn, transforms=[cudagraph_transform()])``, or through
``thunderfx`` and ``thunder.compile``. What goes out: the same function, whose later calls replay CUDA graphs, and with
`explain` a report of what was captured, what was not, and why. Who owns what: the compiled function owns all graphs and
their memory; both go with it, or before it by `release`. This module holds the public names, which only the command
line imports late.
``ARCHITECTURE.md``, beside it, is the map for readers of the code.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from thunder_cg.compat.versions import check_versions

# Python has "-m" there while it locates what `python -m thunder_cg` or a tool of it runs. The commands import what
# they need, so that `--help` does not wait for torch.
_runs_command = any(word == "thunder_cg" or word.startswith("thunder_cg.tools.") for word in sys.orig_argv)
if TYPE_CHECKING or not (sys.argv[:1] == ["-m"] and _runs_command):
    check_versions()  # before Thunder is imported

    from thunder_cg.diagnose.bisection import Bisection, bisect
    from thunder_cg.diagnose.planning import PlanReport, plan
    from thunder_cg.dynamo import thunderfx
    from thunder_cg.errors import (
        BackendError,
        CaptureError,
        CudagraphError,
        DisagreementWarning,
        NotCompiledError,
        OptionError,
        VersionError,
        WrongGradientWarning,
    )
    from thunder_cg.kernels import executors
    from thunder_cg.memory import release
    from thunder_cg.report.dot import dump_dot
    from thunder_cg.report.report import Report, explain, profile
    from thunder_cg.step import graphed_step
    from thunder_cg.transform import CUDAGraphPlugin, cudagraph_transform
else:

    def __getattr__(name: str) -> Any:
        """Imports the public names when a command asks for the first one."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.reload(sys.modules[__name__]), name)


__all__ = [
    "BackendError",
    "Bisection",
    "CUDAGraphPlugin",
    "CaptureError",
    "CudagraphError",
    "DisagreementWarning",
    "NotCompiledError",
    "OptionError",
    "PlanReport",
    "Report",
    "VersionError",
    "WrongGradientWarning",
    "bisect",
    "cudagraph_transform",
    "dump_dot",
    "executors",
    "explain",
    "graphed_step",
    "plan",
    "profile",
    "release",
    "thunderfx",
]
