"""`python -m thunder_cg doctor`: what this machine has, and what to change for CUDA graphs."""

from __future__ import annotations

import argparse
import gc
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from thunder_cg import executors
from thunder_cg.compat.distributed import capture_problem_of_settings
from thunder_cg.compat.thunder import nvfuserex
from thunder_cg.tools.results import driver


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table; `fix` is "" where nothing has to change."""

    name: str
    found: str
    fix: str = ""


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 1 if something is to be changed."""
    description = "Says what this machine has for CUDA graphs, and what to change. Exits with 1 if that is anything."
    argparse.ArgumentParser("python -m thunder_cg doctor", description=description).parse_args(argv)
    findings = [*_versions(), *_gpu(), *_kernels(), *_settings()]
    width = max(len(each.name) for each in findings)
    for each in findings:
        print(f"{each.name:{width}}  {each.found}")
        if each.fix:
            print(f"{'':{width}}  to change: {each.fix}")
    return int(any(each.fix for each in findings))


def _versions() -> Iterator[Finding]:
    yield Finding("python", platform.python_version())
    for package in ("thunder-cg", "lightning-thunder", "torch"):
        yield Finding(package, _version(package))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"


def _gpu() -> Iterator[Finding]:
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            yield Finding(f"cuda:{index}", f"{found.name}, {found.total_memory / 2**30:.0f} GiB")
        yield Finding("driver", f"{driver() or 'unknown'}, CUDA {torch.version.cuda}")
        allocator = torch.cuda.get_allocator_backend()
        fix = "unset backend: in PYTORCH_CUDA_ALLOC_CONF: graphs need the private pools of the native one"
        yield Finding("allocator", allocator, fix if allocator != "native" else "")
    elif driver():
        fix = "install a torch that was built with CUDA, of a version that the driver takes"
        yield Finding("GPU", f"torch sees none, and there is a driver {driver()}", fix)
    else:
        yield Finding("GPU", "none: the tape backend stands in for CUDA graphs, and is slower than no graphs")


def _kernels() -> Iterator[Finding]:
    chosen = [str(each.name) for each in executors()]
    yield Finding("thunder_cg.executors()", ", ".join(chosen))
    installed = next((name for name in ("nvfuser_direct", "nvfuser") if find_spec(name) is not None), None)
    if nvfuserex is not None:
        yield Finding("nvFuser", f"Thunder uses it: {_version(installed or 'nvfuser')}")
    elif installed is None:
        yield Finding("nvFuser", f"not installed; {chosen[-1]} fuses instead")
    else:
        fix = "install the nvFuser that was built for this torch: pip install '.[nvfuser]' takes a pair that fits"
        yield Finding("nvFuser", f"{installed} is installed, and Thunder cannot use it", fix if driver() else "")


_VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_GRAPH_REGISTER",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)


def _settings() -> Iterator[Finding]:
    """Variables that are set, and the garbage collector, which frees the arenas of outputs in reference cycles."""
    fixes = {}
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        fixes["CUDA_LAUNCH_BLOCKING"] = "unset it: the host waits for each launch"
    if (problem := capture_problem_of_settings()) is not None:
        fixes["TORCH_NCCL_BLOCKING_WAIT"] = f"{problem[1]}: {problem[0]}"
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") == "0":
        fixes["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "unset it: a process whose collectives in a graph never end goes on"
    for name in _VARIABLES:
        if name in os.environ:
            yield Finding(name, os.environ[name], fixes.get(name, ""))
    enabled = "on" if gc.isenabled() else "off: outputs in reference cycles hold arenas until it runs"
    yield Finding("garbage collector", f"{enabled}, thresholds {gc.get_threshold()}")
