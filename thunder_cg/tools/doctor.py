"""`python -m thunder_cg doctor`: what this machine has, and what to change for CUDA graphs."""

from __future__ import annotations

import gc
import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec

from thunder_cg.compat.versions import SUPPORTED, check_version
from thunder_cg.errors import VersionError
from thunder_cg.tools.arguments import Parser


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table; `fix` is "" where nothing has to change."""

    name: str
    found: str
    fix: str = ""


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 1 if something is to be changed."""
    description = "Says what this machine has for CUDA graphs, and what to change. Exits with 1 if that is anything."
    Parser("python -m thunder_cg doctor", description=description).parse_args(argv)
    findings = [*_versions()]
    if not any(each.fix for each in findings):  # what looks further imports torch and Thunder
        findings += [*_gpu(), *_kernels(), *_variables(), *_host()]
    width = max(len(each.name) for each in findings)
    for each in findings:
        print(f"{each.name:{width}}  {each.found}")
        if each.fix:
            print(f"{'':{width}}  to change: {each.fix}")
    changes = sum(bool(each.fix) for each in findings)
    print(f"\n{changes} to change" if changes else "\nNothing to change.")
    return int(changes > 0)


def _versions() -> Iterator[Finding]:
    yield Finding("python", platform.python_version())
    yield Finding("thunder-cg", _version("thunder-cg"))
    for package in sorted(SUPPORTED):
        fix = ""
        try:
            check_version(package)
        except VersionError as error:
            fix = str(error)
        yield Finding(package, _version(package), fix)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"


def _gpu() -> Iterator[Finding]:
    import torch

    from thunder_cg.compat import cuda
    from thunder_cg.tools.results import driver

    if not torch.cuda.is_available():
        if driver():
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
            fix = "install a torch that was built with CUDA, of a version that the driver takes"
            yield Finding("GPU", f"torch, {built}, sees none, and there is a driver {driver()}", fix)
        else:
            yield Finding("GPU", "none: the tape backend stands in for CUDA graphs, and is slower than no graphs")
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield Finding(f"cuda:{index}", f"{found.name}, {found.total_memory / 2**30:.0f} GiB")
    yield Finding("driver", f"{driver() or 'unknown'}; torch was built for CUDA {torch.version.cuda}")
    if cuda.driver is None:
        fix = f"pip install 'cuda-bindings=={(torch.version.cuda or '12').partition('.')[0]}.*'"
        yield Finding("cuda-bindings", "not installed: copies in and out are kernels besides the graph", fix)
    else:
        yield Finding("cuda-bindings", _version("cuda-bindings"))
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        yield Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    allocator = torch.cuda.get_allocator_backend()
    fix = "unset backend: in PYTORCH_CUDA_ALLOC_CONF: graphs need the private pools of the native one"
    yield Finding("allocator", allocator, fix if allocator != "native" else "")


def _kernels() -> Iterator[Finding]:
    import torch

    from thunder_cg import executors
    from thunder_cg.compat.thunder import get_default_executors, nvfuserex
    from thunder_cg.tools.results import driver

    chosen = [str(each.name) for each in executors()]
    yield Finding("thunder_cg.executors()", ", ".join(chosen))
    fix = ""
    if chosen[-1] == "inductor" and torch.cuda.is_available() and find_spec("triton") is None:
        fix = "pip install triton: Inductor compiles its fusions with it, and without it they run operator by operator"
    yield Finding("fuser", f"{chosen[-1]}, with executors=thunder_cg.executors()", fix)
    defaults = [str(each.name) for each in get_default_executors()]
    yield Finding("without executors=", f"Thunder takes {', '.join(defaults) or 'none'}")
    yield _nvfuser(chosen[-1], is_used=nvfuserex is not None, has_driver=bool(driver()))


def _nvfuser(fuser: str, *, is_used: bool, has_driver: bool) -> Finding:
    """Whether nvFuser is there, and built for this torch: the name of its package says for which."""
    module = next((name for name in ("nvfuser_direct", "nvfuser") if find_spec(name) is not None), None)
    if module is None:
        return Finding("nvFuser", f"not installed; {fuser} fuses instead")
    package = next(iter(packages_distributions().get(module, ())), module)
    built = re.search(r"torch(\d)(\d+)$", package)
    here = ".".join(_version("torch").split(".")[:2])
    pair = f", built for torch {built[1]}.{built[2]}" if built else ""
    found = f"{package} {_version(package)}{pair}"
    if is_used and (built is None or f"{built[1]}.{built[2]}" == here):
        return Finding("nvFuser", f"Thunder uses it: {found}")
    fix = f"install the one that was built for torch {here}, or take a pair that fits: pip install '.[nvfuser]'"
    problem = "with another torch" if is_used else "and Thunder cannot use it"
    return Finding("nvFuser", f"{found} is installed, {problem}", fix if is_used or has_driver else "")


_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NAMES = (
    *_ALLOCATOR,
    *("CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING", "TORCH_DISTRIBUTED_DEBUG"),
)
_PREFIXES = ("NCCL_", "TORCH_NCCL_")


def _variables() -> Iterator[Finding]:
    """The variables that are set of those by which PyTorch, CUDA and NCCL change what a graph can hold."""
    for name in sorted(os.environ):
        if name in _NAMES or name.startswith(_PREFIXES):
            yield Finding(name, os.environ[name], _fix_of(name, os.environ[name]))


def _fix_of(name: str, value: str) -> str:
    """What to change about a variable; "" if nothing."""
    from thunder_cg.compat.distributed import capture_problem_of_settings, setting_of_nccl

    if name in _ALLOCATOR and "cudaMallocAsync" in value:
        return "unset backend:cudaMallocAsync: graphs need the private pools of the native allocator"
    if name == "PYTORCH_NO_CUDA_MEMORY_CACHING":
        return "unset it: graphs need the private pools of the caching allocator"
    if name == "CUDA_LAUNCH_BLOCKING" and value != "0":
        return "unset it: the host waits for each launch"
    if (reason := capture_problem_of_settings()) is not None and reason.problem.startswith(f"{name}="):
        return f"{reason.fix}: {reason.problem}"
    if (name, value) == setting_of_nccl("ASYNC_ERROR_HANDLING") and value == "0":
        return "unset it: a process whose collectives in a graph never end goes on"
    return ""


def _host() -> Iterator[Finding]:
    """The garbage collector, which frees the arenas of outputs in reference cycles, and Python itself."""
    from thunder_cg.compat.guards import attribute_writes_are_reported

    enabled = "on" if gc.isenabled() else "off"
    fix = "gc.enable(): outputs in reference cycles hold memory pools of graphs until it runs"
    yield Finding("garbage collector", f"{enabled}, thresholds {gc.get_threshold()}", "" if gc.isenabled() else fix)
    if not attribute_writes_are_reported():
        fix = "take Python 3.13.1 or later: each call checks all modules, since this one does not report writes"
        yield Finding("attribute writes", "not reported by this Python", fix)
