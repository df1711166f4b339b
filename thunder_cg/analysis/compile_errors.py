"""What to try where Thunder raises while it compiles."""

from __future__ import annotations

import re

from thunder_cg import errors
from thunder_cg.analysis.advice import PACKS, PADDED, SLICE, for_read, for_size
from thunder_cg.analysis.rules import KEEP_ON_DEVICE
from thunder_cg.analysis.sources import LOOKED_UP, SourceLine
from thunder_cg.errors import CudagraphError

_TRANSFORMED = (
    "for torch.func, such as vmap or grad, compile the function that calls the transform with thunder_cg.thunderfx, "
    "and not what is transformed: thunder.jit takes no tensors of a transform"
)
_TO_COMPARE = (
    "call the function without Thunder: if that raises too, fix the function; if not, keep the operator out of what "
    "is compiled, with "
)
_THUNDERFX = "thunder_cg.thunderfx"
_SIZED = "for a result whose size depends on what a tensor holds, "
_READ = (
    "for a branch on what a tensor holds, or for int(), float() or `.tolist()` of it, choose with "
    "torch.where(condition, a, b) if it is a branch"
)
_NUMPY = (
    "for NumPy in what is compiled, call PyTorch's function for it, with care for other defaults: torch.median takes "
    "the lower one of two middle values, and torch.std and torch.var divide by n - 1"
)
_KEEPS_OUT = {
    False: f"{_THUNDERFX}, which leaves to Python or Inductor what Thunder does not follow",
    True: "torch.compiler.disable around a function of yours that calls it",
}


_NAMES = [name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, CudagraphError)]
_OURS = re.compile(rf"(.*?, graph \d+: )?({'|'.join(_NAMES)})( at |:)")  # they say themselves what to try


# fmt: off
# What to try if an error of Thunder's has one of these signs, regular expressions, in it.
_HINTS: dict[tuple[str, ...], str] = {
    ("Unsupported at ", "Unsupported: "):
        "leave out fullgraph=True: thunder_cg.explain then names each graph break, and what to change",
    ("BatchedTensor", "TensorWrapper", "transform API", "functorch", "wrapper_descriptor"): _TRANSFORMED,
    ("unhashable type: 'TensorProxy'", f"from {LOOKED_UP}"):
        "for sum() of a list, torch.func.functional_call, or modules in a list, a dict or a global variable, use "
        "thunder_cg.thunderfx, or hold the modules in a torch.nn.ModuleList of the module that is compiled",
    ("trying to set .", "Modifications "):
        "for an attribute, an item or a global variable that is set, return the value instead, or use "
        "thunder_cg.thunderfx, which leaves it to Python",
    (PACKS,): f"for a packed sequence, {PADDED}",
    (r"\.numpy\(\)", r"\bnumpy\."): _NUMPY,
    ("data dependen", "DataDependentOutput", "tolist"): _READ,
    ("is not a valid index for length", "None had an unexpected type"):
        f"for a number that is read from a tensor and bounds a slice, {SLICE}",
    (r"real number, not 'NoneType'", r"unsupported operand type\(s\) for .*'NoneType'", "Proxy name="):
        f"for a number that is read from a tensor, of which Thunder knows no value, {KEEP_ON_DEVICE}",
    (r"KeyError( at .*)?: None\b",):
        "for nn.LSTM, nn.GRU and nn.RNN, use thunder_cg.thunderfx with torch._dynamo.config.allow_rnn = True, which "
        "leaves them to Inductor",
    ("one_hot.* required positional argument",): "pass num_classes, for which Thunder has no default, to one_hot",
    ("required positional argument",): "pass the argument that is missing, for which Thunder may have no default",
    ("to be equal to and have the type of",):
        "for a number in a global variable, a list or a dictionary that the function reads and changes, which Thunder "
        "has changed while it traced, change it after the call, or use thunder_cg.thunderfx, which leaves it to Python",
    ("boolean advanced indexing", "not support tensor repeats", "DynamicOutputShape", "only specifying a condition"):
        _SIZED,
    ("has history None",):
        "for a tensor that an earlier compilation has left in a cache of Python's, such as a dictionary, fill the "
        "cache before the first call, or compute it in each call, or use thunder_cg.thunderfx, which fills it",
    ("too few dimensions",):
        "for a 0-dim tensor on the CPU, whose gradient Thunder gives another shape, compute it under torch.no_grad(), "
        "or give it a dimension, as with keepdim=True, or use a GPU",
    ("gradient transform", "VJP for", "automatic registration"):
        "for an operator without a gradient in Thunder, use thunder_cg.thunderfx, which has PyTorch's",
    ("'weakref.ReferenceType' object has no attribute",):
        "for a FlopCounterMode, take the mode off these calls, which never replay under it; count FLOPs of the module "
        "that is not compiled",
    (r"\.device=.* to be the same",):
        "for tensors on two devices, move the inputs to the device of the parameters, and make new tensors there",
    (r"\.dtype=.* to be the same",):
        "for tensors of two dtypes, cast the inputs to that of the parameters, or call it under torch.autocast",
    ("mark_non_differentiable",): "for hooks on gradients of a module, use thunder_cg.thunderfx, which calls them",
    ("no autograd formula",):
        "for an operator of torch.library, give it a gradient with torch.library.register_autograd",
    ("torch._ops.", r"call function \w+::\w+", "not registered"):
        "for an operator of torch.library, use thunder_cg.thunderfx, which keeps it, or register it with an executor "
        "of Thunder's (README, Your own operator)",
    ("Failed to find an executor",):
        "for an operator of torch.library that is registered with Thunder, pass "
        "executors=[thunder.executors.custom_op_ex.custom_op_ex, *thunder.get_default_executors()]",
    ("Trying to call function torch.",):
        "for a function that Thunder does not know, use thunder_cg.thunderfx, which keeps it or leaves it to Inductor",
}
# fmt: on


def compiler_name(*, is_of_dynamo: bool) -> str:
    """Who raises while it compiles, if Dynamo reads the Python, or if Thunder does."""
    return "Dynamo or Thunder" if is_of_dynamo else "Thunder"


def to_try(problem: str, line: SourceLine | None = None, *, is_of_dynamo: bool, in_functorch: bool = False) -> str:
    """What to try if Thunder raises this: the type of the error, the line, and what it says. "" if it says so itself.

    Args:
        line: the same line of the user's code, to look what becomes of a value there.
        is_of_dynamo: Dynamo reads the Python, so `thunder_cg.thunderfx` is no help.
        in_functorch: inside of a transform of ``torch.func``.
    """
    if _OURS.match(problem) is not None:
        return ""
    if in_functorch:
        return _TRANSFORMED
    hints = (hint for signs, hint in _HINTS.items() if any(re.search(sign, problem) for sign in signs))
    hints = (_completed(hint, problem, line, is_of_dynamo=is_of_dynamo) for hint in hints)
    useful = (hint for hint in hints if not (is_of_dynamo and _THUNDERFX in hint))
    return next(useful, f"{_TO_COMPARE}{_KEEPS_OUT[is_of_dynamo]}")


def _completed(hint: str, problem: str, line: SourceLine | None, *, is_of_dynamo: bool) -> str:
    """A hint with what is known of the line, and with what else is there for `thunder.jit`."""
    if hint == _SIZED:
        return hint + for_size(f"{problem} {(line and line.text) or ''}")
    if hint not in (_READ, _NUMPY):
        return hint
    if hint == _READ and (fix := for_read(line)) != KEEP_ON_DEVICE:
        hint = f"for what Python reads from a tensor, {fix}"
    return hint if is_of_dynamo else f"{hint}; or use {_THUNDERFX}, which leaves it to Python"
