"""`plan`: the report before anything has run, on a machine without a GPU, too."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Set
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any

import thunder
import torch

from thunder_cg.analysis.sources import described, line_of
from thunder_cg.compat.compiled import OPTIONS, computation_and_inputs
from thunder_cg.compat.tensors import tensors_in, tree_map_only
from thunder_cg.diagnose.compiling import compiled_as, refuse_sharded, transform_of
from thunder_cg.errors import CudagraphError, NotCompiledError, OptionError
from thunder_cg.options import Options, taken_from
from thunder_cg.report.programs import made_by, original
from thunder_cg.report.report import Report, explain
from thunder_cg.runtime.compilation import name_of, with_advice
from thunder_cg.transform import CudagraphTransform


@dataclass(frozen=True, slots=True, repr=False)
class PlanReport(Report):
    """A `Report` of what would be captured. Nothing was run, so all counts are zero, and its `note` says so."""


def plan(
    fn_or_module: Any, /, *example_inputs: Any, kwargs: Mapping[str, Any] | None = None, **options: Any
) -> PlanReport:
    """Says what of a function or module would be captured, without running any of its operators.

    Thunder traces the Python code and the transform plans the traces, as in a first call. No operator runs, so no
    buffer, gradient or random state changes, and no memory is allocated for activations. Effects of the Python code,
    such as printing, happen as they do whenever Thunder traces. Thunder's ddp broadcasts parameters when it compiles:
    call this on all ranks then.

    Without a CUDA tensor among the inputs and parameters, the plan is for CUDA all the same: CPU tensors stand for CUDA
    ones, or meta tensors if there is one among the inputs, as then are all parameters and inputs. The note of the
    report says so. Only with meta tensors can the plan tell what the function moves to the CPU, or makes there.
    Thunder may choose other kernels for a stand-in than for a GPU, such as those of attention. With ``backend="tape"``
    the plan is for the CPU.

    Args:
        fn_or_module: a function or module, or what ``thunder.jit`` made of one, which is left as it is.
        example_inputs: its positional arguments. Only type, shape, strides, dtype and ``requires_grad`` count.
        kwargs: its keyword arguments.
        options: those of :func:`cudagraph_transform`. All others are for ``thunder.jit``, such as ``executors``.

    Returns:
        A `PlanReport` with a trace for the forward and, if an input or a parameter requires grad, one for the backward.
        If Thunder cannot compile the function, it says why, where and what to try.

    Raises:
        NotCompiledError: ``thunderfx`` made ``fn_or_module``, so Dynamo cuts it into graphs when it runs; or
            ``graphed_step`` did, which captures what a run of it does; or Thunder's fsdp did, and its whole parameters
            are gone.
        OptionError: a value that an option cannot have, an option that there is not, an argument of the function among
            the options, or no function at all.
        BackendError: there are CUDA tensors, and the backend does not work on this machine.
    """
    if (maker := made_by(fn_or_module)) not in (None, "thunder.jit"):
        fix = "call it a few times, and explain(it) says what is captured; or plan a module or function that it calls"
        problem = f"{maker} made this, and what it captures is known only once it has run"
        raise NotCompiledError(fn_or_module, problem, "plan", fix)
    if not callable(fn_or_module):
        raise OptionError("fn_or_module", fn_or_module, "a function or module", "pass the model", "plan")
    source = original(fn_or_module)
    _refuse_arguments(options, source)
    ours = taken_from(options, "plan", OPTIONS, may_be_others=False)
    before = transform_of(fn_or_module)
    settings = replace(before.options, **ours) if before is not None else Options(**ours)
    inputs = (example_inputs, dict(kwargs or {}))
    stand_in = _stand_in({each.device.type for each in (*tensors_in(inputs), *_state(source))}, settings.backend)
    if any(tensor.is_meta for tensor in _state(source)):  # as fsdp leaves them
        refuse_sharded(fn_or_module, source, "plan")
    if stand_in == "meta":
        inputs = tree_map_only(torch.Tensor, _on_meta, inputs)
        source = copy.deepcopy(source, {id(tensor): _on_meta(tensor) for tensor in _state(source)})
    jitted = compiled_as(fn_or_module, source, CudagraphTransform(settings, stand_in), options)
    counts: dict[str, Any] = {"calls": 0}
    try:
        computation_and_inputs(jitted, *inputs)
    except CudagraphError:
        raise
    except Exception as error:
        counts = _failure(error, source)
    report = explain(jitted)
    parts = {part.name: getattr(report, part.name) for part in fields(Report)}
    return PlanReport(**{**parts, **counts, "note": _note(stand_in)})


def _note(stand_in: str | None) -> str:
    if stand_in is None:
        return "Planned, not run."
    more = "; with meta tensors, a plan also shows what is on the CPU" if stand_in == "cpu" else ""
    return f"Planned, not run: {stand_in} tensors stand for CUDA ones{more}."


def _failure(error: Exception, source: Any) -> dict[str, Any]:
    """What a report has of an error that Thunder raised in its only call."""
    said = with_advice(error, name_of(source), described(error), line_of(error), is_of_dynamo=False)
    return {"calls": 1, "compile_failures": 1, "compile_failure": said}


def _refuse_arguments(options: Mapping[str, Any], source: Any) -> None:
    """Raises `OptionError` if one of the options is an argument of the function."""
    function = source.forward if isinstance(source, torch.nn.Module) else source
    parameters = {*signature(function).parameters} - {
        *signature(thunder.jit).parameters,
        *signature(Options).parameters,
    }
    for name, value in options.items():
        if name in parameters or isinstance(value, torch.Tensor):
            fix = f"it is an argument of {name_of(source)}: pass it in kwargs="
            raise OptionError(name, type(value), "an option of thunder.jit or cudagraph_transform", fix, "plan")


def _state(fn: Any) -> list[torch.Tensor]:
    """Parameters and buffers; none of a function."""
    return [*fn.parameters(), *fn.buffers()] if isinstance(fn, torch.nn.Module) else []


def _stand_in(devices: Set[str], backend: str) -> str | None:
    """The type of device that stands for a CUDA device; None if tensors on these devices stand for themselves."""
    if "cuda" in devices:
        return None
    if "meta" in devices:
        return "meta"
    return None if backend == "tape" else "cpu"


class _MetaTensor(torch.Tensor):
    """Thunder takes plain tensors for aliases if they have one address, and all plain meta tensors have."""


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one, without memory."""
    moved = tensor.detach().to("meta")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(moved, tensor.requires_grad)
    return moved.as_subclass(_MetaTensor).requires_grad_(tensor.requires_grad)
