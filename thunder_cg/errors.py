"""Every exception of the package. A message says what happened, where, both values, and what to do about it.

Those that only have something run eagerly keep the two apart: `SkipReason`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

NO_SECOND_DERIVATIVES = (
    "Thunder has no second derivatives, with and without CUDA graphs, and this backward goes through a gradient that a "
    "compiled function has computed with create_graph=True; do not compile what is differentiated twice, or detach() "
    "the gradient if it is meant as a constant"
)


class SkipReason(NamedTuple):
    """Why something is not captured, or runs eagerly.

    Attributes:
        fix: what changes that, where somebody can; "" if it needs no change, or nothing changes it.
    """

    problem: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.problem}; {self.fix}" if self.fix else self.problem


class CudagraphError(Exception):
    """Base of all errors that thunder_cg raises on purpose."""


_Error = TypeVar("_Error", bound=CudagraphError)


class OptionError(CudagraphError, ValueError):
    """An option of a function of this package has a value that it cannot have."""

    def __init__(
        self, option: str, given: object, expected: str, fix: str, function: str = "cudagraph_transform"
    ) -> None:
        super().__init__(f"{function}({option}={given!r}): expected {expected}; {fix}")


class BackendError(CudagraphError, RuntimeError):
    """The backend that was asked for cannot work on this machine."""

    def __init__(self, backend: str, problem: str, fix: str) -> None:
        super().__init__(f"cudagraph_transform(backend={backend!r}): {problem}; {fix}")


class VersionError(CudagraphError, ImportError):
    """A package that this one needs is outside the range that was tested, or is not installed."""

    def __init__(self, package: str, found: str | None, supported: str) -> None:
        problem = f"{package} {found} is installed" if found is not None else f"{package} is not installed"
        fix = f"pip install '{package}{supported}'"
        super().__init__(f"thunder_cg needs {package} {supported}, but {problem}; {fix}")


class CaptureError(CudagraphError, RuntimeError):
    """Something was to run eagerly, and ``strict=`` forbids that."""

    def __init__(self, where: str, problem: str, fix: str, option: str = "strict=") -> None:
        super().__init__(f"{where}: {problem}; {fix}, or drop {option} to let it run eagerly")


class CollectiveError(CudagraphError, RuntimeError):
    """A collective of ``torch.distributed`` was called in what Thunder compiles in a form that it cannot trace."""

    def __init__(self, name: str, problem: str, fix: str) -> None:
        super().__init__(f"torch.distributed's {name}, in a compiled function: {problem}; {fix}")


class LayoutError(CudagraphError, RuntimeError):
    """Inductor compiled for a tensor whose strides are those of PyTorch, and Thunder computes it with other ones."""

    def __init__(self, line: str | None, found: object, expected: object) -> None:
        where = (
            f"at {line or 'a line unknown to Dynamo'}, Inductor got a tensor that Thunder computed with strides {found}"
        )
        problem = f"and that has {expected} in PyTorch; a copy would not do, as it is written in place or viewed"
        super().__init__(f"{where} {problem}; call .contiguous() on it before")


class SharedMemoryError(CudagraphError, RuntimeError):
    """Two arguments have elements in common and are not the same view, and one of them is written in place."""

    def __init__(self, first: tuple[object, ...], other: tuple[object, ...]) -> None:
        facts = ("offset {} bytes, shape {}, strides {} and {}{}".format(*each) for each in (first, other))
        problem = f"two arguments overlap, with {' and with '.join(facts)}, and one of them is written in place"
        what = "Thunder would read the first in the place of the other"
        super().__init__(f"{problem}; {what}; pass the whole tensor and take its parts inside, or pass a clone of one")


class WrongGradientWarning(UserWarning):
    """Thunder computes another gradient than PyTorch, writes too late, or raises, with and without graphs."""


class ForeignFileError(CudagraphError, FileExistsError, ValueError):
    """There is a file, or a folder, that this package did not write."""

    def __init__(self, path: object) -> None:
        super().__init__(f"{path} exists, and thunder_cg did not write it; name another file, or remove this one")


class FolderError(CudagraphError, OSError, ValueError):
    """A file is to be written where no folder can be."""

    def __init__(self, path: object, folder: object) -> None:
        super().__init__(f"{path} cannot be written, as {folder} is no folder that may be changed; name another file")


class TransformConflictError(CudagraphError, ValueError):
    """Two of the transforms that Thunder was given capture CUDA graphs."""

    def __init__(self, given: Sequence[str], graphs: Sequence[str], fix: str | None = None) -> None:
        others = [name for name in graphs if name != "CudagraphTransform"]
        if fix is None:
            fix = f"drop {' and '.join(others)}" if others else "drop all but one cudagraph_transform()"
        super().__init__(f"transforms=[{', '.join(given)}]: {len(graphs)} of them capture CUDA graphs; {fix}")


class ShardedModuleError(CudagraphError, TypeError):
    """``fully_shard`` was applied to a compiled module, or before or after that to a module in it or around it."""

    def __init__(self, module: object) -> None:
        problem = "Thunder has parameters of its own, which fully_shard does not shard: each rank would train alone"
        fix = (
            "shard with thunder.distributed.fsdp(thunder.jit(model, ...)), "
            "or compile what fully_shard made of the model with thunder.dynamo.thunderfx"
        )
        sharded = f"fully_shard was applied to parameters of the {type(module).__name__} that thunder.jit compiled"
        super().__init__(f"{sharded}. {problem}; {fix}")


class FunctionalCallError(CudagraphError, TypeError):
    """``torch.func.functional_call`` was to give a compiled module other parameters, which its calls do not see."""

    def __init__(self, module: object) -> None:
        name = type(module).__name__
        problem = f"the {name} that thunder.jit compiled keeps its own parameters, with and without graphs"
        fix = (
            "compile a function that makes the call on the module itself: "
            "thunder_cg.thunderfx(lambda parameters, x: functional_call(module, parameters, (x,)))"
        )
        super().__init__(f"torch.func.functional_call: {problem}; {fix}")


class DisagreementWarning(UserWarning):
    """`verify` found a graph that does not do what its ops do: earlier replays of it may have been wrong."""


class Skipped(CudagraphError, RuntimeError):
    """Something runs eagerly.

    Attributes:
        reason: why.
        may_pass: whether a later call may do better.
    """

    def __init__(self, problem: object, fix: str = "", *, may_pass: bool = False) -> None:
        self.reason, self.may_pass = SkipReason(str(problem), fix), may_pass
        super().__init__(str(self.reason))


class CaptureRefused(Skipped):
    """What a backend raises while capturing, for an operation that a graph cannot hold."""


def without_frames(error: _Error) -> _Error:
    """An error that may be kept: frames hold what the code that raised it has made, with tensors and maybe a graph."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class CaptureLater(CaptureRefused):
    """What keeps a step from being captured in this call only."""

    def __init__(self, problem: str, fix: str = "") -> None:
        super().__init__(problem, fix, may_pass=True)


class NoRoom(CaptureRefused):
    """What keeps a step from being captured: its graph does not fit into the memory budget.

    It may pass if older graphs went for it.
    """


class RanksDiffer(Skipped):
    """What keeps a region that communicates from being captured on this rank: another rank does something else.

    It may pass if the ranks may agree at a later call.

    Attributes:
        no_answer: whether the other rank said nothing.
        needs_meeting: whether the other rank tries again only when the ranks meet.
    """

    def __init__(
        self, problem: str, fix: str = "", *, may_pass: bool, no_answer: bool = False, needs_meeting: bool = False
    ) -> None:
        super().__init__(problem, fix, may_pass=may_pass)
        self.no_answer, self.needs_meeting = no_answer, needs_meeting


class OptionsDiffer(CudagraphError, RuntimeError):
    """Another rank has not compiled a function that communicates with the same options, or not with the transform."""

    def __init__(self, label: str, problem: str) -> None:
        why = "ranks that differ would make their collectives in another order, and get each other's tensors"
        super().__init__(f"{label}: {problem}; {why}; compile it on all ranks alike")


class ReplayRefused(Skipped):
    """What a graph raises that could not be launched. Nothing of it ran, so its ops may run instead."""

    def __init__(self, problem: object) -> None:
        super().__init__(f"the graph was not launched: {problem}")


class NotCompiledError(CudagraphError, TypeError):
    """:func:`thunder_cg.explain`, or a function like it, was given something that this package did not transform."""

    def __init__(
        self,
        given: object,
        problem: str,
        function: str = "explain",
        fix: str = "pass what thunder.jit(fn, transforms=[cudagraph_transform()]) returned",
    ) -> None:
        super().__init__(f"{function}({type(given).__name__}): {problem}; {fix}")
