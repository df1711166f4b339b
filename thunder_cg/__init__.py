"""CUDA graphs for Lightning Thunder: captured where that is safe, eager where it is not, and able to say why.

What comes in: a module or function, through ``thunder.jit(fn, transforms=[cudagraph_transform()])``, or through
``thunderfx`` and ``thunder.compile``. What goes out: the same function, whose later calls replay CUDA graphs, and with
`explain` a report of what was captured, what was not, and why. Who owns what: the compiled function owns all graphs and
their memory, and both go with it. This module holds the public names and nothing else. ``ARCHITECTURE.md``, beside it,
is the map for readers of the code.
"""

from thunder_cg.compat.versions import check_versions

check_versions()

from thunder_cg.dynamo import thunderfx  # noqa: E402
from thunder_cg.errors import (  # noqa: E402  (the versions are checked before Thunder is imported)
    BackendError,
    CaptureError,
    CudagraphError,
    DisagreementWarning,
    NotCompiledError,
    OptionError,
    VersionError,
)
from thunder_cg.kernels import executors  # noqa: E402
from thunder_cg.report.profile import profile  # noqa: E402
from thunder_cg.report.report import Report, explain  # noqa: E402
from thunder_cg.step import graphed_step  # noqa: E402
from thunder_cg.transform import CUDAGraphPlugin, cudagraph_transform  # noqa: E402

__all__ = [
    "BackendError",
    "CUDAGraphPlugin",
    "CaptureError",
    "CudagraphError",
    "DisagreementWarning",
    "NotCompiledError",
    "OptionError",
    "Report",
    "VersionError",
    "cudagraph_transform",
    "executors",
    "explain",
    "graphed_step",
    "profile",
    "thunderfx",
]
