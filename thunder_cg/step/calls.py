"""Watches which functions of the user's and of packages a step calls while it is captured.

Note [Functions that no bytecode names]
    The bytecode of a step tells what it calls by name. It does not tell what comes out of a dictionary or a base class,
    what stands behind an operator or a property, and what autograd calls in the backward. So a capture is watched. If
    functions run that read more from outside than is compared before a replay, the capture is given up, and the step is
    looked at anew, these functions included.

Note [Collectives in a step]
    A graph holds what `torch.distributed` launches, and nothing of what it does on the host. So these are not captured:
    what the host waits in, what it communicates itself, and DistributedDataParallel, whose reducer counts gradients in
    C++: a capture that fails would leave it in the middle of a backward. Nor is a collective that nobody waits for. In
    Python, PyTorch keeps its memory until it is done; in a graph, later kernels would get it. NCCL's kernels may find
    the addresses of tensors in memory and not among their arguments, so those that collectives get are noted.
"""

from __future__ import annotations

import _thread
import datetime
import decimal
import gc
import importlib
import inspect
import io
import linecache
import logging
import os
import random
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch

from thunder_cg.compat.cuda import is_current_stream_capturing
from thunder_cg.compat.distributed import (
    ProcessGroup,
    Work,
    is_torchs_own,
    may_be_uncapturable,
    told_of_collectives,
    uncapturable,
)
from thunder_cg.compat.lines import getframe
from thunder_cg.compat.torch import code_before_dynamo, has_storage, is_restored_by_dynamo, tensors_in, variables_of
from thunder_cg.errors import CaptureLater, CaptureRefused
from thunder_cg.runtime.tensors import address_if_any
from thunder_cg.step.attributes import unwatched
from thunder_cg.step.heap import known_functions
from thunder_cg.step.reads import MISSING, Called, content_of_cell, is_constant, is_installed
from thunder_cg.step.snapshot import Undo, undos_of, undos_of_globals

_GENERATED = ("<eval_with_key>", "thunder.")  # files with the code of graphs and traces
_GENERATED_MODULES = "torch._inductor."  # wherever their files are
_SEEDS = {"manual_seed", "seed", "set_offset", "set_state"}  # methods of a generator
_STATES = {"getstate", "setstate"}  # methods that change nothing if the old state is set back
_READS_OF_TENSORS = {"numpy", "tolist"}
_READS_OF_SEEDS = {"get_offset", "get_state", "initial_seed"}
_GETTERS = ("_get_", "_is_")  # those without a line in front are in `thread_states`, or deprecated
_random: Any = random.random  # of the generator of the process
_UNSEEN = {"__getattribute__", "__setattr__", "__delattr__", "getattr_static"}
_ASKS: Any = torch.cuda.is_current_stream_capturing
_WITHOUT_EFFECT = {"logging", "importlib._bootstrap"}  # modules
# What they return is another value in each call.
_UNSTEADY = {datetime.date.today, datetime.datetime.today, datetime.datetime.now, datetime.datetime.utcnow, os.urandom}
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_UNSTEADY |= {vars(time)[f"{clock}{unit}"] for clock in _CLOCKS for unit in ("", "_ns")}
_UNSTEADY |= {time.localtime, time.gmtime, time.ctime, time.strftime}
_STARTS_OF_THREADS = {
    each for each in (getattr(_thread, n, None) for n in ("start_new_thread", "start_joinable_thread")) if each
}
# What they return is not compared before a replay, and may be another value in a later call.
_UNCOMPARED = {eval, exec, __import__, input, open, decimal.getcontext}
_UNCOMPARED |= {torch.get_num_threads, torch.get_num_interop_threads, _thread.get_ident, _thread.get_native_id}
_UNCOMPARED |= {getframe, sys.getrecursionlimit, sys.getrefcount, gc.get_count, gc.get_objects, gc.get_referrers}
_UNCOMPARED |= {*(vars(os)[name] for name in ("cpu_count", "getloadavg", "sched_getaffinity") if hasattr(os, name))}
_OF_FILES = {"posix", "nt"}  # modules whose functions read files and what the process is
_NO_READS = {"fspath", "getpid", "getppid", "write", "fsync", "close", "register_at_fork"}
_ENVIRONMENT = {vars(type(os.environ))[name].__code__ for name in ("__getitem__", "__iter__", "__len__")}
_OF_NO_OBJECT = {types.ModuleType, type, types.NoneType}  # types of what functions of C belong to
# Modules that return all of that to their callers.
_PASS_ON = {"random", "secrets", "uuid", "torch.cuda.random", "torch.random"}
_PASS_ON |= {"os", "posixpath", "ntpath", "genericpath", "pathlib", "glob", "io", "shutil", "decimal"}
_PASS_ON |= {"threading", "concurrent.futures.thread", "concurrent.futures._base", "multiprocessing.pool"}
_PASS_ON |= {"importlib", "inspect", "collections.abc", "torch.serialization"}


class Calls:
    """The user's functions that run between `watch` and `end`, as a profiler of Python is told of them.

    Args:
        device_type: of the graph.

    Attributes:
        found: each function, and what it is bound to, once they were looked for.
        objection: something that runs and that no replay would do, in words; None if nothing does.
        groups: that they communicate in, each with the names of its collectives, in order.
        pending: those that nobody has waited for yet, by identity, and where they are called.
        communicated: addresses of tensors that they got, with their names. NCCL's kernels may find them in memory.
        written: addresses of storages that they write to, and where they are called. No version counts such a write.
        looks_up_unseen: whether something ran that looks attributes up in another way than Python's: what Dynamo has
            compiled does, and `object.__getattribute__`.
        events: of CUDA, that were recorded, and where, by identity.
        of_torch: functions of PyTorch's, as their code with their globals.
        getters: functions of C of PyTorch's, of which some return settings, and whether a logger logs.
        raised: the first method of a tensor that has raised an error, in words.
        reads_gradients: whether a function that is not PyTorch's names ``grad``, and may ask whether there is one.
    """

    def __init__(self, device_type: str = "cuda") -> None:
        self._device_type = device_type
        self.found: dict[tuple[int, int], Called] = {}
        self.objection: str | None = None
        self.events: dict[int, tuple[torch.cuda.Event, str]] = {}  # a weak reference to one would dangle (torch 2.11)
        self.looks_up_unseen = False
        self.getters: dict[Callable[[], Any], None] = {}
        self.of_torch: dict[types.CodeType, dict[str, Any]] = {}
        self._foreign: dict[int, types.CodeType] = {}  # by identity: to hash a code is slow
        self._quiet: set[Any] = set()  # codes of those, by identity, and functions of C that tell nothing
        self._inner: set[types.CodeType] = set()  # of functions that are made in the step
        self._new: set[int] = set()  # objects that are made in the step
        self._ran: dict[Any, _Ran] = {}
        self.raised: str | None = None
        self.reads_gradients = False
        self._undos: list[Undo] = []
        self._thread: int | None = None  # the one that is watched; backwards run on it, too
        self.forget_collectives()
        self._callback = self._filtered()

    def forget_collectives(self) -> None:
        """Before a capture, which may be the second one of a call."""
        self.groups: dict[ProcessGroup, list[str]] = {}
        self.pending: dict[int, tuple[Work, str]] = {}
        self.communicated: dict[int, str] = {}
        self.written: dict[int, str] = {}

    def watch(self) -> None:
        """Begins to watch the calling thread. `CaptureLater` if it is watched by somebody else."""
        if sys.getprofile() is not None:
            problem = "a profiler of Python is active, and a capture needs to be told what the step calls"
            raise CaptureLater(f"{problem}; begin to profile after the step has been captured")
        self._thread = threading.get_ident()
        sys.setprofile(self._callback)

    def end(self) -> None:
        self._thread = None
        if sys.getprofile() is self._callback:
            sys.setprofile(None)

    def _filtered(self) -> Callable[[types.FrameType, str, Any], None]:
        """Calls `_note`, not for what is known to tell nothing, which is most, nor for what returns."""
        quiet, note = self._quiet, torch.compiler.disable(self._note)  # Dynamo would compile it

        def callback(frame: types.FrameType, event: str, called: Any) -> None:
            if event == "call":
                if id(frame.f_code) not in quiet:
                    note(frame, event, called)
            elif event == "c_exception" or (event == "c_call" and _key(called) not in quiet):
                note(frame, event, called)

        return torch.compiler.disable(callback, recursive=False)  # what is recursive takes longer than the callback

    def _note(self, frame: types.FrameType, event: str, called: Any) -> None:
        if event == "call":
            self._note_call(frame, frame.f_code)
        elif event == "c_call":
            self._note_call_of_c(frame, called, getattr(called, "__self__", None))
        elif isinstance(getattr(called, "__self__", None), torch.Tensor):
            self.raised = self.raised or f"{called.__name__}() raised an error while capturing{_line(frame, True)}"

    def _note_call(self, frame: types.FrameType, code: types.CodeType) -> None:
        if code.co_name == "__init__" and code.co_argcount:
            self._new.add(id(frame.f_locals.get(code.co_varnames[0])))
        self._object_to(frame)
        if code is _ASKS.__code__ and frame.f_back is not None:
            self._note_question(frame.f_back)
        elif code in _ENVIRONMENT:
            if _is_called_by_user(frame):
                owner = frame.f_locals[code.co_varnames[0]]
                self.found[id(variables_of), id(owner)] = Called(variables_of, owner)  # type: ignore[arg-type]
        elif code is ThreadPoolExecutor.submit.__code__:
            if _is_called_by_user(frame.f_back):
                problem = f"the step gives work to another thread{_line(frame)}, which is in no graph"
                self.objection = f"{problem}; do that outside of the step"
        elif code is random.Random.seed.__code__:
            if frame.f_locals["a"] is None and _is_called_by_user(frame):
                problem = f"the step takes a seed from the system{_line(frame)}, and no replay would"
                self.objection = f"{problem}; make generators of random numbers outside of the step"
        elif code is logging.Logger.isEnabledFor.__code__:
            if _is_called_by_user(frame.f_back):
                self.getters[partial(frame.f_locals["self"].isEnabledFor, frame.f_locals["level"])] = None
        elif code is importlib.import_module.__code__:
            if _is_called_by_user(frame):
                self._refuse_uncompared(frame, "import_module")
        elif id(code) not in self._foreign:
            self._note_function(frame, code_before_dynamo(code))

    def _note_call_of_c(self, frame: types.FrameType, called: Any, owner: Any) -> None:
        if called is is_current_stream_capturing:
            self._note_question(frame)
        elif called.__name__ in _READS_OF_TENSORS:
            if self._is_of_graph(owner):
                problem = f"{called.__name__}() reads a tensor on the host{_line(frame, True)}"
                self.objection = f"{problem}; return the tensor, and read it outside of the step"
        elif called in _UNSTEADY:
            if _is_called_by_user(frame):
                problem = f"{called.__name__}() returns another value in each call{_line(frame)}, and in no replay"
                self.objection = f"{problem}; call it outside of the step, and pass a tensor"
        elif called in _STARTS_OF_THREADS:
            if _is_called_by_user(frame):
                problem = f"the step starts a thread{_line(frame)}, whose work is in no graph"
                self.objection = f"{problem}; do that outside of the step"
        elif type(owner) is type(_random.__self__):
            if owner is _random.__self__ and called.__name__ not in _STATES:
                problem = f"the step draws Python's random numbers, or seeds them{_line(frame)}"
                self.objection = self.objection or f"{problem}, and no replay would; draw with torch on the device"
        elif called is globals:
            if _is_users(frame.f_code, frame.f_globals):
                problem = f"what globals() gives is not compared before a replay{_line(frame)}"
                self.objection = f"{problem}; name what the step needs"
        elif _is_uncompared(called):
            if _is_called_by_user(frame):
                self._refuse_uncompared(frame, called.__name__)
        elif isinstance(owner, torch.Generator):
            self._note_generator(frame, called.__name__)
        elif isinstance(owner, torch.cuda.Event) and called.__name__ == "record":
            self.events[id(owner)] = owner, _line(frame)
        elif called.__name__.startswith(_GETTERS) and _is_torchs(called):
            self.getters[called] = None
        else:  # whoever calls it
            self._quiet.add(_key(called))

    def _object_to(self, frame: types.FrameType, method: str | None = None) -> None:
        if self.objection is None and (found := uncapturable(frame, method)) is not None:
            problem, fix = found
            self.objection = f"{problem}{_line(frame)}; {fix}"

    def told_of_collectives(self) -> AbstractContextManager[None]:
        """Inside, the collectives of the thread that is watched are noted."""
        return told_of_collectives(self._note_collective, self._note_work, self._note_use)

    def _note_work(self, work: Work, frame: types.FrameType) -> None:
        if threading.get_ident() == self._thread:
            self.pending[id(work)] = work, _line(frame)

    def _note_use(self, method: str, frame: types.FrameType, work: Work) -> None:
        if threading.get_ident() != self._thread:
            return
        if method == "is_completed":  # never, in a capture
            problem = f"the host asks whether a collective is done{_line(frame)}"
            raise CaptureRefused(f"{problem}; call wait() of what it returns")
        self.pending.pop(id(work), None)

    def _note_collective(self, method: str, frame: types.FrameType, args: tuple[Any, ...]) -> None:
        """Notes what `torch.distributed` calls, which keeps the group in a variable."""
        if threading.get_ident() != self._thread:
            return
        self._object_to(frame, method)
        values = frame.f_locals
        if is_torchs_own(frame) and isinstance(group := values.get("group"), ProcessGroup):
            self.groups.setdefault(group, []).append(method)
        else:
            problem = f"it calls a method of a process group itself{_line(frame)}"
            self.objection = self.objection or f"{problem}; call the function of torch.distributed"
        self.communicated |= {tensor.data_ptr(): method for tensor in tensors_in(args) if has_storage(tensor)}
        self.written |= dict.fromkeys(map(address_if_any, tensors_in(args[:1])), _line(frame))  # its first argument

    def _is_of_graph(self, value: Any) -> bool:
        """Whether a value is a tensor on the device, which is the host itself for a tape."""
        return issubclass(type(value), torch.Tensor) and bool(value.device.type == self._device_type)

    def _note_question(self, frame: types.FrameType) -> None:
        """A step that asks whether it is captured may do in its graph what it does not do in Python."""
        if is_constant(frame.f_code.co_filename):
            return
        problem = f"the step asks whether it is captured{_line(frame, True)}"
        self.objection = f"{problem}; call torch.cuda.is_current_stream_capturing() by this name, which is False there"

    def _refuse_uncompared(self, frame: types.FrameType, name: str) -> None:
        problem = f"what {name}() gives is not compared before a replay{_line(frame)}"
        fix = "call it outside of the step, and have the step read the result by a name"
        self.objection = self.objection or f"{problem}; {fix}"

    def _note_generator(self, frame: types.FrameType, method: str) -> None:
        does = None
        if method in _SEEDS and not is_restored_by_dynamo(frame):
            does = "sets"
        elif method in _READS_OF_SEEDS and _is_called_by_user(frame):
            does = "reads"
        if does is not None:
            problem = f"the step {does} the state of a generator of random numbers{_line(frame)}"
            fix = "do it outside of the step"
            if _is_called_in(frame, "torch.utils.checkpoint"):
                fix = "checkpoint with preserve_rng_state=False what draws nothing, or in a function that is compiled"
            self.objection = f"{problem}, which no replay would do; {fix}"

    def _note_function(self, frame: types.FrameType, code: types.CodeType) -> None:
        self.looks_up_unseen |= code is not frame.f_code
        if not _is_users(code, frame.f_globals, is_constant):
            self._foreign[id(frame.f_code)] = frame.f_code
            if code.co_name != "__init__" and not may_be_uncapturable(frame.f_code):
                self._quiet.add(id(frame.f_code))
            if str(frame.f_globals.get("__name__")).startswith("torch."):
                self.of_torch[code] = frame.f_globals
            return
        if is_installed(code.co_filename) and _logs_or_imports(frame):
            return
        self.reads_gradients |= "grad" in code.co_names or "grad" in code.co_consts
        is_own = code.co_name in ("__init__", *_UNSEEN)  # what it does with an object was seen already
        self.looks_up_unseen |= not is_own and not _UNSEEN.isdisjoint(code.co_names)
        self._inner.update(each for each in code.co_consts if isinstance(each, types.CodeType))
        if code in self._inner:
            return
        owner = _owner(frame, code)
        owner = type(owner) if id(owner) in self._new else owner  # which has what the class gives it
        variables = tuple(id(frame.f_locals.get(name, MISSING)) for name in code.co_freevars)
        if (key := (code, id(owner), variables)) not in self._ran:
            self._ran[key] = _Ran(code, owner, variables, frame.f_globals)
            with unwatched():
                if not isinstance(owner, torch.Tensor):
                    self._undos += undos_of(owner)
                self._undos += undos_of_globals(code, frame.f_globals)

    def undo(self) -> None:
        """Gives objects and globals of the functions that have run what they had before. See Note [Effects once]."""
        for undo in reversed(self._undos):
            undo()

    def find_functions(self) -> None:
        """Finds the functions that have run, each with those that nobody can tell from it. Not inside of a capture."""
        gc.collect()  # whose destructors a capture may not survive; without it, garbage would be found, too
        functions = known_functions({ran.code for ran in self._ran.values()})
        for ran in self._ran.values():
            alike = [each for each in functions if ran.is_of(each)]
            if not alike and not ran.code.co_freevars:
                alike = [types.FunctionType(ran.code, ran.variables)]
            self.found |= {(id(each), id(ran.owner)): Called(each, ran.owner) for each in alike}
        self._ran.clear()
        self._undos.clear()


class _Ran(NamedTuple):
    """A function that has run, as its frame shows it. It may be gone, or have been made by the step."""

    code: types.CodeType
    owner: Any
    cells: tuple[int, ...]  # what it closes over, by identity: a reference would keep memory
    variables: dict[str, Any]  # global ones

    def is_of(self, function: types.FunctionType) -> bool:
        cells = function.__closure__ or ()
        return function.__code__ is self.code and self.cells == tuple(id(content_of_cell(cell)) for cell in cells)


@torch.compiler.disable(recursive=False)
def _key(called: Any) -> Any:
    """What tells a function of C from others: itself; of a method of an object, the object's type and the name."""
    kind = type(getattr(called, "__self__", None))
    return called if kind in _OF_NO_OBJECT else (kind, called.__name__)


def _is_uncompared(called: Any) -> bool:
    """Whether a function of C reads a file, or anything else that is not compared."""
    owner = getattr(called, "__self__", None)
    if called.__name__ == "__subclasses__":
        return True
    if isinstance(owner, io.IOBase):
        return bool(called.__name__.startswith("read"))
    if isinstance(owner, types.ModuleType):
        is_of_files = owner.__name__ in _OF_FILES and called.__name__ not in _NO_READS
        return is_of_files or called in _UNCOMPARED
    return False


def _is_torchs(called: Any) -> bool:
    """Whether a function of C is one of PyTorch's, and no method."""
    owner = getattr(called, "__self__", None)
    return isinstance(owner, types.ModuleType) and owner.__name__.startswith("torch.")


def _is_called_by_user(frame: types.FrameType | None) -> bool:
    """Whether the user's code gets what a function that is called in a frame returns, such as from `secrets`."""
    while frame is not None and frame.f_globals.get("__name__") in _PASS_ON:
        frame = frame.f_back
    return frame is not None and _is_users(frame.f_code, frame.f_globals)


def _is_users(code: types.CodeType, variables: dict[str, Any], is_others: Callable[[str], bool] = is_installed) -> bool:
    file = code.co_filename
    if file == "<string>":  # written by a class decorator or a compiler, or all that Python runs
        file = variables.get("__file__", "<frozen" if variables.get("__name__") != "__main__" else file)
    is_generated = file.startswith(_GENERATED) or str(variables.get("__name__")).startswith(_GENERATED_MODULES)
    return not is_generated and not is_others(file)


def _logs_or_imports(frame: types.FrameType | None) -> bool:
    """Whether a frame is a part of a call of `logging`, whose handlers keep what no step depends on, or of an import.

    A module is imported once, with and without graphs.
    """
    while frame is not None and frame.f_globals.get("__name__") not in _WITHOUT_EFFECT:
        frame = frame.f_back
    return frame is not None


def _is_called_in(frame: types.FrameType | None, module: str) -> bool:
    """Whether a function of a package that the user's line calls is one of the module's, or calls one."""
    while frame is not None and is_installed(frame.f_code.co_filename):
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


def _owner(frame: types.FrameType, code: types.CodeType) -> Any:
    """What the function is bound to, an object or a class; None if it is no method."""
    if not code.co_argcount:
        return None
    first: Any = frame.f_locals.get(code.co_varnames[0])
    is_class = issubclass(type(first), type)  # isinstance() would look up an attribute
    for kind in (*type(first).__mro__, *(first.__mro__ if is_class else ())):
        member = vars(kind).get(code.co_name)
        member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if isinstance(member, types.FunctionType) and inspect.unwrap(member).__code__ is code:
            return first
    return None


def _line(frame: types.FrameType | None, with_code: bool = False) -> str:
    """The line of the user's that is under way."""
    while frame is not None and is_installed(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f", at {line_with_code(file, line) if with_code else f'{os.path.basename(file)}:{line}'}"


def is_of_package(file: str) -> bool:
    """Whether it is of an installed package that is not taken to be constant."""
    return os.path.isfile(file) and is_installed(file) and not is_constant(file)


def line_with_code(file: str, line: int) -> str:
    """``"train.py:31 (loss.backward())"``."""
    return f"{os.path.basename(file)}:{line} ({linecache.getline(file, line).strip()})"
