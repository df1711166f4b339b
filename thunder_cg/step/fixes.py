"""What keeps a step in Python, in words: where it is in the user's code, and what to do about it.

Each fix works if it is followed: tests/step/test_fixes.py follows them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from traceback import walk_tb
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributions import Distribution
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from thunder_cg.analysis.advice import PACKS, PADDED, for_read, for_size
from thunder_cg.analysis.rules import KEEP_ON_DEVICE
from thunder_cg.analysis.sources import SourceLine
from thunder_cg.compat.guards import names_of
from thunder_cg.compat.lines import line_in_trace
from thunder_cg.compat.tensors import tensors_in
from thunder_cg.errors import Skipped, SkipReason
from thunder_cg.step.bytecode import instructions
from thunder_cg.step.calls import is_of_package, line_with_code
from thunder_cg.step.facts import (
    REQUIRES_GRAD,
    WITH_HISTORY,
    Atom,
    Content,
    Difference,
    Facts,
    Same,
    difference,
    subject,
)
from thunder_cg.step.lookups import MISSING
from thunder_cg.step.numbers import FUSED, GroupNumbers
from thunder_cg.step.packages import is_installed, is_users

if TYPE_CHECKING:
    from thunder_cg.step.state import StepState

DENSE = "make the module whose gradient is sparse with sparse=False, as nn.Embedding(..., sparse=False)"
_STATE_OF_OPTIMIZER = re.compile(r"len\(.*\.state\)")
_PRIORITIES = "the priorities of torch.nn.attention.sdpa_kernel"
_RATE = "make the learning rate a tensor on the device, which a scheduler then writes"
_SAME_RATE = "write it into the tensor that is there, as in group['lr'].fill_(rate)"
_CONSTANT = (
    "keep it constant, as OneCycleLR and CyclicLR do with cycle_momentum=False; or call the optimizer's step() outside "
    "of the step, and clear gradients in it by model.zero_grad()"
)
_SET = "set it outside of the step;"
_NUMBER = re.compile(rf"\['({'|'.join(dict.fromkeys(key for keys in FUSED.values() for key in keys))})'\]")
_FUSES = "whose kernels take numbers that change"
_READ_ELSEWHERE = "have nothing in the step but the step() of {} read its param_groups"
_RANDOM = "draw with torch on the device"
_OWN_GENERATOR = "leave generator= out: the graph advances PyTorch's own generator alone"
_SET_BACK = "set requires_grad back in the same step, or set it outside of the step"
_DECIDES = "let the loop decide by it, and pass what it decides as an argument, such as True"
_LIGHTNINGS = (
    "Lightning counts the steps of its own optimizer in Python; take optimizers(use_pl_optimizer=False) in the step, "
    "end it with zero_grad(), and call optimizers().step() after it, which only counts then"
)
_MASKING = os.path.join("transformers", "masking_utils.py")
_MASKS = "Transformers chooses a mask by its values; pass attention_mask with 4 dimensions: batch, 1, queries, keys"
_OUTSIDE = "the host reads a value there; make that call outside of the step"
_IN_STEP = "do that outside of the step, or keep it in a tensor on the device that the step writes in place"
_COUNTED = "a graph goes on counting what the step only adds to, as self.n += x.size(0)"
_OF_DICTIONARY = ", if the step names the dictionary in no other way"
_AS_TENSOR = "pass it as a tensor on the device"
_IN_PLACE = "keep it in a tensor on the device, and write that in place"
_ADDS = "return what it adds, and add that outside of the step"
_KEYS = "make the lists and numbers in it before the first step, and keep them"
_BETWEEN = f"leave it as it is between steps, or {_IN_PLACE}"
_OPTIMIZER = "the optimizer reads its state on the host"
_CLEARS = "the optimizer goes on outside of the step; clear gradients in the step by model.zero_grad()"
_OWN_OPTIMIZER = f"{_IN_PLACE}, or take a capturable optimizer"
_SCALER = "the scaler reads on the host whether a gradient is infinite, unless the optimizer is fused"
_UPDATE = "the scaler notes in Python that the optimizer was unscaled or stepped; call update() in the same step"
_SCALE = "the scaler reads its scale on the host; call get_scale() outside of the step"
_FAKE = "FakeQuantize reads on the host whether it is on; take FusedMovingAvgObsFakeQuantize of torch.ao.quantization"
_AVERAGES = "the average of all steps reads their number on the host; make AveragedModel with avg_fn=get_swa_avg_fn()"
_BATCHES = "it reads the number of batches on the host, since it averages over all; make it with momentum=0.1"
_VALIDATION = "the distribution reads its arguments on the host; make it with validate_args=False"
_BACKWARD = "the backward reads a value on the host; torch.autograd.set_detect_anomaly does, unless check_nan=False"
_READ = "the host reads a value there; return the tensor, and read it outside of the step"
_COND = "torch.cond reads its condition on the host; take torch.where(condition, a, b), which computes both"
_MASK = "the number of elements depends on values"
_READ_OR_MASK = f"{_READ}; for a boolean index, take torch.where"
_NUMBERS = "a tensor is made of Python's numbers there; make it before the step"
_COPY = "a tensor is copied between host and device there; make it on the device before the step, or return it"
_HISTORY = (
    "a tensor with a history from before the step is still held, so autograd joins its stream; detach what you keep"
)
_NORM = "it reads whether the norm is finite; pass error_if_nonfinite=False, and look at the norm outside of the step"
_CTC = "ctc_loss reads the lengths on the host; compute it outside of the step, with its backward"
_ONE_HOT = (
    "one_hot reads the classes on the host; pass num_classes=, with which it does not on a GPU, or take "
    "(x.unsqueeze(-1) == torch.arange(n, device=x.device)).long()"
)
_HISTC = "histc reads its range on the host; pass min= and max="
_PUT = "a mask is read on the host there; take x = torch.where(mask, value, x) in the place of x[mask] = value"
_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_BY_NAME = {"LightningOptimizer": _LIGHTNINGS, "FakeQuantize": _FAKE}  # of classes that may not be there
_READERS = ("item", "tolist", "float")  # functions and methods that read what a tensor holds
_MOST_OTHERS = 3  # that are named beside what a reason is about
_READ_THEIR_RATE = ("Adadelta", "Muon", "RMSprop")  # on the host if it is a tensor, and nothing else
# By what the message of an error has in small letters; the first one counts.
_FIXES = {
    "legacy stream depend": _HISTORY,
    "torch.sparse_coo, which has no address, in a graph": DENSE,
    "cannot copy between cpu and cuda": _COPY,
    "aten.lift_fresh": _NUMBERS,
    "torchscript interpreter": "TorchScript may read values on the host; take the Python that it was made of",
    **dict.fromkeys(("aten.index", "aten._index_put", "aten.masked_select"), _MASK),
    **dict.fromkeys(("_local_scalar_dense", "makes the host wait", "capturable"), _READ),
    "generator that the graph does not know": _OWN_GENERATOR,
    "capturing": _READ_OR_MASK,  # CUDA does not say which operator it was
}
_OF_HOST = {_READ, _MASK, _NUMBERS, _READ_OR_MASK}
# Of functions that read on the host by themselves, by what is in the error, in the line, or in the names of PyTorch's
# functions that ran; the first one counts.
_OF_FUNCTIONS = {
    PACKS: PADDED,
    r"ctc_loss\b": _CTC,
    r"one_hot\(": _ONE_HOT,
    r"histc\b": _HISTC,
    "index_put": _PUT,
    r"aten\.(index|_?unique)|(masked_select|nonzero|argwhere|unique\w*|bincount|repeat_interleave)\b[.(]": _MASK,
}


class Changed(NamedTuple):
    """What a step has changed."""

    reason: SkipReason  # with the line; without a fix if that may be once only
    once: str = ""  # what to say then
    if_repeated: str = ""  # what to do about it if each step does it


def fix_of_change(change: Difference, facts: Facts, roots: Mapping[str, Any], *, in_step: bool) -> str:
    """What to do about a fact that changes in each step, or between steps. "" if that may be once only.

    Args:
        facts: of the state. They and ``roots`` name the optimizers.
    """
    label = subject(change.label).partition(" ")[0]
    named = {name: fact.value for name, fact in facts.items() if isinstance(fact, Same)} | dict(roots)
    owners = {name: value for name, value in named.items() if label.startswith(f"{name}.")}
    if (fix := _fix_of_torchs(change, label, owners, in_step=in_step)) is not None:
        return fix
    if fix_if_repeated(change) or (not owners and of_first_step(change)):
        return ""
    if isinstance(owner := named.get(label), torch.Generator):
        return _OWN_GENERATOR
    is_of_what = change.label.startswith("what ")
    if change.label.startswith("the state of") or (is_of_what and hasattr(owner, "random")):
        return _RANDOM
    if in_step and is_of_what and f"len({label})" in facts:
        return _KEYS
    if label.startswith("_Progress.") or ".optim_step_progress." in label:
        return _LIGHTNINGS
    if not in_step and isinstance(fact := facts.get(label), Atom) and fact.kind is int:
        return f"{_DECIDES}; or {_IN_PLACE}"
    then, now = change.shown
    if in_step and now.endswith(WITH_HISTORY):
        return "detach it at the end of the step: a graph keeps no history"
    if in_step and then != now and then.removesuffix(REQUIRES_GRAD) == now.removesuffix(REQUIRES_GRAD):
        return _SET_BACK
    if not in_step:
        return _BETWEEN
    counted = f"; {_COUNTED}{_OF_DICTIONARY * label.endswith(']')}" * f"{then}{now}".isdigit()
    return _ADDS if change.label.startswith("len(") else _IN_STEP + counted


def _fix_of_torchs(change: Difference, label: str, owners: Mapping[str, Any], *, in_step: bool) -> str | None:
    """The same for what optimizers, schedulers, scalers and averages of PyTorch's have; None for all else."""
    optimizer = next((value for value in owners.values() if isinstance(value, Optimizer)), None)
    if number := _NUMBER.search(label):
        if number[1] == "lr" and _is_tensor(change.before) and _is_tensor(change.after):
            return _of_rate(optimizer, _SAME_RATE)
        return f"{_SET} " * in_step + _of_number(optimizer, is_rate=number[1] == "lr")
    if in_step and "._per_optimizer_states" in label:
        return _UPDATE
    if in_step and (schedulers := [name for name, value in owners.items() if isinstance(value, LRScheduler)]):
        scheduled = owners[schedulers[0]].optimizer
        is_baked = not isinstance(scheduled.param_groups[0]["lr"], Tensor) and not GroupNumbers.all_of(scheduled)
        also = f"; {_of_number(scheduled, is_rate=True)}" * is_baked
        return f"call {min(schedulers, key=len)}.step() after the step{also}"
    is_own = optimizer is not None and (isinstance(optimizer, torch.optim.LBFGS) or is_users(type(optimizer)))
    if is_own and not in_step and ".state[" in label:
        return _CLEARS
    if isinstance(optimizer, torch.optim.LBFGS):
        return f"{_OPTIMIZER}; {_make(optimizer)}"
    if in_step and optimizer is not None and _is_number(change.before) and _is_number(change.after):
        return f"{_OPTIMIZER}; {_another(optimizer)}"
    if "['step']" in label and (optimizer is not None or ".state[" in label):
        return f"{_OPTIMIZER}; {_OWN_OPTIMIZER if optimizer is None else _make(optimizer)}"
    are_torchs = any(isinstance(value, (Optimizer, GradScaler, AveragedModel)) for value in owners.values())
    was_tensor = _is_tensor(change.before) and change.after is not MISSING
    return "" if are_torchs and not was_tensor else None


def _is_tensor(fact: Any) -> bool:
    return isinstance(fact, Same) and isinstance(fact.value, Tensor)


def _is_number(fact: Any) -> bool:
    return isinstance(fact, Atom) and fact.kind in (int, float)


def fix_if_repeated(change: Difference) -> str:
    """What to do about what a step makes in the place of None, if each step does."""
    is_made = change.shown[0] == "None" and (_is_tensor(change.after) or isinstance(change.after, Content))
    return _BETWEEN if is_made else ""


def of_first_step(change: Difference) -> str:
    """What to say of a change that needs no fix."""
    if change.label.startswith(_PRIORITIES):
        return ", as PyTorch does at the first attention: nothing to change"
    is_first = change.shown[0] == "0" and _STATE_OF_OPTIMIZER.fullmatch(change.label)
    return ", as in the first step of an optimizer: nothing to change" if is_first else ""


def _of_rate(optimizer: Optimizer | None, fix: str = _RATE) -> str:
    """How an optimizer follows a learning rate."""
    follows = optimizer is None or (_options(optimizer) and not _missing(optimizer))
    return fix if follows or optimizer is None else f"{fix}, and {_make(optimizer)}"


def _of_number(optimizer: Optimizer | None, *, is_rate: bool) -> str:
    """How a graph follows a learning rate, or another number of an optimizer."""
    otherwise = _of_rate(optimizer) if is_rate else _CONSTANT
    if type(optimizer) not in FUSED:
        return otherwise
    assert optimizer is not None
    if "fused" in _missing(optimizer):
        return f"{_make(optimizer, fused=True)}, {_FUSES}"
    return f"{_READ_ELSEWHERE.format(type(optimizer).__name__)}; or {otherwise}"


def first_changed(
    before: Mapping[str, Any], after: Mapping[str, Any], state: StepState, roots: Mapping[str, Any]
) -> Changed | None:
    """The first fact that a step changes; None if it changes none."""
    if (change := difference(before, after)) is None:
        return None
    if fix := fix_of_change(change, state.facts, roots, in_step=True):
        fix = "; ".join(filter(None, (fix, _also_changed(change, before, after, state, roots))))
    if_repeated = fix or fix_if_repeated(change)
    line = state.line_of(change.label) if if_repeated else ""
    return Changed(SkipReason(f"{change}{line}", fix), "" if fix else of_first_step(change), if_repeated)


def _also_changed(
    change: Difference, before: Mapping[str, Any], after: Mapping[str, Any], state: StepState, roots: Mapping[str, Any]
) -> str:
    """What else keeps the step in Python: "history['step'] (see train.py:31) changed, too". "" if nothing does.

    Only values and lengths are said, of those that belong to one name the first, and nothing that may change once only.
    """
    seen, others = {_root_of(change.label)}, []
    numbers = ((label, then) for label, then in before.items() if isinstance(then, (Atom, int)))  # or lengths
    changes = (Difference(label, then, after[label]) for label, then in numbers if after.get(label, then) != then)
    for also in changes:  # of tensors none, since one may have several names
        label, root = also.label, _root_of(also.label)
        if root not in seen and fix_of_change(also, state.facts, roots, in_step=True):
            seen.add(root)
            others.append(label + state.line_of(label))
    return f"{', '.join(others[:_MOST_OTHERS])} changed, too" if others else ""


def _root_of(label: str) -> str:
    """A name, or an attribute of the step's own object, which has all that a trainer keeps."""
    return re.sub(r"(?<!^self)[.\[ )].*", "", subject(label))


def fix_of_argument(value: Any) -> str:
    """What to do about an argument that is neither a tensor nor a plain value."""
    if isinstance(value, Mapping):
        return "pass its tensors, such as dict(batch)"
    if isinstance(value, (list, tuple)):
        return "pass its tensors, such as tuple(batch)"
    if hasattr(type(value), "__array__"):
        return _AS_TENSOR
    if is_dataclass(value) or tensors_in(names_of(value)):
        return "pass its tensors, such as a dict of them"
    return "have the step read it from outside"


def fix_of_changed_argument(fact: Any) -> str:
    """What to do about a value among the arguments that is another one in each call."""
    kind = fact.kind if isinstance(fact, Atom) else object
    advice = "; or, if the step branches by it, pass what that decides, such as i % 4 == 0" * issubclass(kind, int)
    return f"{_AS_TENSOR}{advice}" if issubclass(kind, (int, float, complex)) else "leave it out"


def reason_of(error: Exception) -> SkipReason:
    """What a capture raised, at which line of the user's, and what to do about it."""
    first_line = (str(error).strip() or "no message").splitlines()[0].rstrip(".")
    problem, known = error.reason if isinstance(error, Skipped) else (f"{type(error).__name__}: {first_line}", "")
    fix = next((fix for sign, fix in _FIXES.items() if sign in str(error).lower()), None)
    frames = [*walk_tb(error.__traceback__)]
    lines = [line_in_trace(frame.f_code.co_filename, at) or (frame.f_code.co_filename, at) for frame, at in frames]
    users = [i for i, (file, _) in enumerate(lines) if os.path.isfile(file) and not is_installed(file)]
    also = ""
    if users:
        last = users[-1]
        others = [each for each in lines[last + 1 :] if is_of_package(each[0])]  # whose last line would have to change
        problem += f", at {line_with_code(*lines[last])}"
        problem += f", in {line_with_code(*others[-1])}" if others else ""
        if fix in _OF_HOST:
            if later := [*dict.fromkeys(_later_reads(frames[i] for i in users))]:
                also = f"so {'does' if len(later) == 1 else 'do'} {' and '.join(later)}, if it is of a tensor"
            below = [frame for frame, _ in frames[last + 1 :]]
            fix = (None if others else _fix_of_function(problem, below)) or _fix_in_torch(below) or fix
        if fix in (_READ, _READ_OR_MASK, _MASK):
            fix = _fix_of_read(lines[last], others) or fix
    return SkipReason(problem, "; ".join(filter(None, (known, fix, also))))


def _fix_of_read(line: tuple[str, int], others: Sequence[tuple[str, int]]) -> str | None:
    """For a read on the host that a line of the user's makes, by way of other lines of packages if there are any."""
    if others:
        return _MASKS if others[-1][0].endswith(_MASKING) else _OUTSIDE
    if (fix := for_read(SourceLine(*line))) == KEEP_ON_DEVICE:
        return None
    return f"the host reads a value there; {fix.replace('the compiled function', 'the step')}"


def _later_reads(frames: Iterable[tuple[FrameType, int]]) -> Iterator[str]:
    """The lines of functions after those that run now that may read on the host as well."""
    for frame, now in frames:
        for name, value, line, _ in instructions(frame.f_code):
            if name in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL") and value in _READERS and line > now:
                yield f"{os.path.basename(frame.f_code.co_filename)}:{line}"


def _fix_in_torch(frames: Sequence[FrameType]) -> str | None:
    """For what the user's line has called, if that reads on the host by itself."""
    for frame in frames:
        owner, optimizer = frame.f_locals.get("self"), frame.f_locals.get("optimizer")
        if isinstance(owner, Distribution) and frame.f_code.co_name in ("__init__", "_validate_sample"):
            return _VALIDATION
        if frame.f_code is torch.cond.__code__:
            return _COND
        if frame.f_locals.get("error_if_nonfinite") is True:
            return _NORM
        if isinstance(owner, AveragedModel):
            return _AVERAGES
        if isinstance(owner, _NORMS) and owner.momentum is None:
            return _BATCHES
        if isinstance(owner, GradScaler) and frame.f_code.co_name == "get_scale":
            return _SCALE
        for kind in type(owner).__mro__:
            if kind.__name__ in _BY_NAME:
                return _BY_NAME[kind.__name__]
        if isinstance(owner, Optimizer):
            return f"{_OPTIMIZER}; {_make(owner)}"
        if isinstance(owner, GradScaler) and isinstance(optimizer, Optimizer):
            return f"{_SCALER}; {_make(optimizer, fused=True)}"
    return _BACKWARD if any(frame.f_code.co_name == "_engine_run_backward" for frame in frames) else None


def _fix_of_function(problem: str, frames: Sequence[FrameType]) -> str | None:
    """For what the user's line has called, if it is known to read on the host by itself."""
    said = " ".join([problem, *(frame.f_code.co_name for frame in frames)])
    fix = next((fix for names, fix in _OF_FUNCTIONS.items() if re.search(names, said)), None)
    return f"{_MASK}; {for_size(said)}".replace("the compiled function", "the step") if fix == _MASK else fix


def _make(optimizer: Optimizer, *, fused: bool = False) -> str:
    """How to have one that reads nothing on the host, whatever its learning rate is; ``fused`` if it has to be."""
    if is_users(type(optimizer)):
        return _OWN_OPTIMIZER
    name, missing = type(optimizer).__name__, _missing(optimizer)
    makes = [f"make {name} with {', '.join(f'{option}=True' for option in missing)}"] * bool(missing)
    for option, kept in (("betas", "numbers"), ("momentum", "a number")):  # which kernels read on the host
        if tensors_in(optimizer.param_groups[0].get(option, ())):
            return ", and ".join([f"keep the {option} of {name} {kept}", *makes])
    if makes and ("fused" in missing or not fused):
        return makes[0]
    if name in _READ_THEIR_RATE and isinstance(optimizer.param_groups[0]["lr"], Tensor) and not fused:
        return f"keep the learning rate of {name} a number"
    return _another(optimizer)


def _another(optimizer: Optimizer) -> str:
    """What to do about one that keeps numbers in Python, whatever its options are."""
    if is_users(type(optimizer)):
        return _OWN_OPTIMIZER
    options = "fused=True, capturable=True" if _is_on_gpu(optimizer) else "fused=True"
    dense = f"; {DENSE}" * isinstance(optimizer, torch.optim.SparseAdam)
    return f"take another optimizer than {type(optimizer).__name__}, such as AdamW with {options}{dense}"


def _options(optimizer: Optimizer) -> list[str]:
    """Those that keep it from reading its state on the host. PyTorch fuses Adagrad on CPUs only."""
    is_on_gpu = _is_on_gpu(optimizer)
    can_fuse = not (is_on_gpu and isinstance(optimizer, torch.optim.Adagrad))
    possible = ["fused"] * can_fuse + ["capturable"] * is_on_gpu
    return [option for option in possible if option in optimizer.defaults]


def _missing(optimizer: Optimizer) -> list[str]:
    return [option for option in _options(optimizer) if not optimizer.param_groups[0].get(option)]


def _is_on_gpu(optimizer: Optimizer) -> bool:
    return bool(optimizer.param_groups[0]["params"][0].is_cuda)
