"""A stretch of a trace that Inductor has compiled, as the trace calls it."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from thunder_cg.analysis.sources import users_level
from thunder_cg.compat import thunder as compat
from thunder_cg.compat.tensors import storage_id
from thunder_cg.compat.torch_compile import (
    OWN_MEMORY,
    CompileError,
    TooManyLayouts,
    compile_donating,
    free_layouts,
    strides_of_results,
)
from thunder_cg.runtime.tensors import address_if_any, extent, is_dense


class Kernels:
    """What Inductor makes of a function of PyTorch's operators, at its first call.

    Attributes:
        in_torch: the function itself, as Thunder calls its traces.
        compiled: the same function, compiled.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.in_torch = compat.outside_of_autograd(function)
        compiled = torch.compile(function, fullgraph=True, dynamic=False, options=OWN_MEMORY)
        self.compiled = compat.outside_of_autograd(compiled)
        self._function, self._donating = function, dict[tuple[int, ...], Callable[..., Any]]()

    def donating(self, positions: tuple[int, ...]) -> Callable[..., Any]:
        """The function, compiled so that it may write over the arguments at these positions."""
        if positions not in self._donating:
            parameters = inspect.signature(self._function).parameters
            compiled = compile_donating(self._function, {[*parameters][i] for i in positions})
            self._donating[positions] = compat.outside_of_autograd(compiled)
        return self._donating[positions]


class Fusion:
    """A stretch of a trace, compiled by Inductor at its first call.

    Note [Layouts of convolutions]
        Convolutions are fastest with channels last, so Inductor converts to that and, at the end of what it compiles,
        back. Where a forward and its backward are compiled apart, it would convert whatever the forward saves. So a
        stretch with convolutions leaves its results as they are, and only what the caller gets is converted to the
        strides that PyTorch's operators give it, which fake tensors tell. That is a copy. So results stay in PyTorch's
        layouts where the caller gets a tensor and a view of it.

    Args:
        kernels: of the stretch, and of those that are equal.
        returned: of a stretch whose layouts Inductor may choose, the positions of the results that the caller gets.
        written: the positions of the arguments whose memory it writes.
        refuses_leaves: whether PyTorch refuses that where autograd accumulates a gradient for one of them.
        reduced: the positions of the results that all-reduces write, since in the trace they share memory with nothing.
            Each has memory of its own: Inductor may return one tensor as two results, or an argument.
        new: the positions of the results that are in no argument's memory in the trace. A backward may write over
            them, so each is copied if Inductor has returned an argument, in spite of `OWN_MEMORY`.

    Attributes:
        failure: why Inductor could not compile it, so that it runs operator by operator; None if it could.
    """

    def __init__(
        self,
        name: str,
        kernels: Kernels,
        returned: Sequence[int] | None,
        written: Sequence[int],
        refuses_leaves: bool,
        reduced: Sequence[int],
        new: Sequence[int],
    ) -> None:
        self._written, self._refuses_leaves = frozenset(written), refuses_leaves
        self._reduced, self._new = reduced, new
        self.__name__ = name
        self._kernels, self._in_torch, self._run, self._returned = kernels, kernels.in_torch, kernels.compiled, returned
        self._strides: dict[Any, Sequence[Any]] = {}  # of the results that the caller gets, by layouts of the arguments
        self.failure: str | None = None

    def __call__(self, *args: Any) -> Any:
        results = self._run_checked(args)
        if self._reduced:
            results = [*results]
            sharing = Counter(storage_id(each) for each in (*args, *results) if isinstance(each, torch.Tensor))
            for i in self._reduced:
                if sharing[storage_id(results[i])] > 1 or not is_dense(results[i]):
                    results[i] = results[i].clone()
        return results

    def donating(self, positions: tuple[int, ...]) -> Callable[..., Any]:
        """The fusion, as it may write over the arguments at these positions, whose memory nothing else needs."""
        if self._written or self._reduced:
            return self

        def call(*args: Any) -> Any:
            if self.failure is not None:
                return self._run_compiled(args)
            return self._run_compiled(args, self._kernels.donating(positions), positions)

        return call

    def _run_checked(self, args: Sequence[Any]) -> Any:
        if self._written:
            if _overlap(args, self._written):
                return self._run_in_torch(args, "it writes an argument that shares memory with another one")
            if self._refuses_leaves and any(args[i].is_leaf and args[i].requires_grad for i in self._written):
                return self._in_torch(*args)  # which raises
            # As in a graph. Inductor refuses to compile some writes to what requires grad.
            detached = [arg.detach() if i in self._written and arg.requires_grad else arg for i, arg in enumerate(args)]
            given = dict(zip(map(id, detached), args))
            return [given.get(id(result), result) for result in self._run_compiled(detached)]
        return self._run_compiled(args)

    def _run_in_torch(self, args: Sequence[Any], why: str) -> Any:
        if self.failure is None:
            warnings.warn(
                f"Inductor cannot compile {self.__name__}, which runs op by op: {why}", stacklevel=users_level()
            )
        self.failure = why
        return self._in_torch(*args)

    def _run_compiled(
        self, args: Sequence[Any], compiled: Callable[..., Any] | None = None, donated: Sequence[int] = ()
    ) -> Any:
        run = compiled or self._run
        try:
            if self._returned is None:
                return self._apart(run(*args), args, donated)
            with free_layouts():
                results = self._apart(run(*args), args, donated)
            self._lay_out(results, args)
            return results
        except TooManyLayouts:  # the others stay compiled
            return self._run_in_torch(args, "too many layouts of arguments, see torch._dynamo.config.recompile_limit")
        except CompileError as error:  # raised before anything ran
            self._run, self._returned = self._in_torch, None
            cause = str(error).strip().replace("raised:\n", "raised: ").splitlines()[0]
            return self._run_in_torch(args, f"{type(error).__name__}: {cause}")

    def _apart(self, results: Sequence[Any], args: Sequence[Any], donated: Sequence[int]) -> list[Any]:
        """The results, copied where one that is new is in the memory of an argument that is not donated."""
        given = {address_if_any(arg) for i, arg in enumerate(args) if i not in donated} - {0}
        copied = {i for i in self._new if address_if_any(results[i]) in given}
        return [each.clone() if i in copied else each for i, each in enumerate(results)]

    def _lay_out(self, results: list[Any], args: Sequence[Any]) -> None:
        """Copies what the caller gets where its strides are not PyTorch's."""
        layouts = tuple((arg.size(), arg.stride()) for arg in args if isinstance(arg, torch.Tensor))
        if layouts not in self._strides:
            self._strides[layouts] = strides_of_results(self._in_torch, args)
        for i in self._returned or ():
            result, strides = results[i], self._strides[layouts][i]
            if isinstance(result, torch.Tensor) and _is_laid_out_otherwise(result, strides):
                results[i] = result.new_empty_strided(result.size(), strides).copy_(result)


def _overlap(args: Sequence[Any], written: Iterable[int]) -> bool:
    """Whether a written argument may share elements with another one.

    PyTorch (2.11) compiles such arguments as views of one tensor, which it takes for another one when it is called.
    """
    spans = [extent(arg) if isinstance(arg, torch.Tensor) and arg.numel() else (0, 0) for arg in args]
    return any(
        spans[i][0] < end and start < spans[i][1] for i in written for j, (start, end) in enumerate(spans) if i != j
    )


def _is_laid_out_otherwise(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether the tensor has other strides, and could have these: they give each element a place of its own."""
    pairs = [(own, other) for size, own, other in zip(tensor.size(), tensor.stride(), strides) if size > 1]
    return any(own != other for own, other in pairs) and all(other for _, other in pairs)
