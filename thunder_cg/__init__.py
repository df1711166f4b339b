"""CUDA graphs for Lightning Thunder: captured where that is safe, eager where it is not, and able to say why."""

from thunder_cg.compat.versions import check_versions

check_versions()

from thunder_cg.errors import (  # noqa: E402  (the versions are checked before Thunder is imported)
    BackendError,
    CaptureError,
    CudagraphError,
    DisagreementWarning,
    NotCompiledError,
    OptionError,
    VersionError,
)
from thunder_cg.report.report import Report, explain  # noqa: E402
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
    "explain",
]
