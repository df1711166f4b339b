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
    Functional ones, DTensor's among them, are waited for by their results.
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
import subprocess
import sys
import threading
import time
import types
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from thunder_cg.compat.autograd import CODE_OF_BACKWARD, leaves_of_backward
from thunder_cg.compat.cuda import is_current_stream_capturing
from thunder_cg.compat.distributed import (
    ProcessGroup,
    Work,
    functional_call,
    is_torchs_own,
    may_be_uncapturable,
    told_of_collectives,
    uncapturable,
)
from thunder_cg.compat.guards import variables_of
from thunder_cg.compat.lines import is_pythons
from thunder_cg.compat.tensors import has_memory, has_storage, tensors_in
from thunder_cg.compat.torch_compile import code_before_dynamo, is_restored_by_dynamo
from thunder_cg.errors import CaptureLater, CaptureRefused, SkipReason
from thunder_cg.runtime.tensors import address_if_any, is_plain
from thunder_cg.step.attributes import unwatched
from thunder_cg.step.bytecode import sets_variables, variable_passed
from thunder_cg.step.facts import ATOMS
from thunder_cg.step.heap import known_functions
from thunder_cg.step.lookups import MISSING, content_of_cell
from thunder_cg.step.numbers import KernelNumbers, StandIns
from thunder_cg.step.packages import is_constant, is_installed
from thunder_cg.step.reads import Called
from thunder_cg.step.snapshot import Undo

_GENERATED = ("<eval_with_key>", "thunder.")  # files with the code of graphs and traces
_GENERATED_MODULES = "torch._inductor."  # wherever their files are
_SEEDS = {"manual_seed", "seed", "set_offset", "set_state"}  # methods of a generator
_STATES = {"getstate", "setstate"}  # methods that change nothing if the old state is set back
_UNCOMPARED_NAMES = {"_version", "retains_grad", "__closure__"}  # of attributes of tensors and functions in C
_READS_OF_TENSORS = {"numpy", "tolist"}
_READS_OF_TENSORS_IN_PYTHON = {  # some of them under no dispatch mode, as the tape is
    vars(torch.Tensor)[name].__code__: name for name in ("__dlpack__", "__reduce_ex__", "__repr__")
}
# Methods that tell which tensor or whose memory an argument is, and not what it holds.
_TELL_APART = {"data_ptr", "storage_offset", "untyped_storage", "_is_view", "is_inference"}
_TELL_APART_IN_PYTHON = {vars(torch.Tensor)[name].__code__: name for name in ("__hash__", "storage", "is_shared")}
_READS_OF_SEEDS = {"get_offset", "get_state", "initial_seed"}
_GETTERS = ("_get_", "_is_")  # those without a line in front are in `thread_states`, or deprecated
_random: Any = random.random  # of the generator of the process
_LOOKS_UP_UNSEEN = {"__getattribute__", "getattr_static"}
_UNSEEN = {*_LOOKS_UP_UNSEEN, "__setattr__", "__delattr__"}
_ASKS: Any = torch.cuda.is_current_stream_capturing
_WITHOUT_EFFECT = {"logging", "importlib._bootstrap", "warnings"}  # modules
# What they return is another value in each call.
UNSTEADY = {datetime.date.today, datetime.datetime.today, datetime.datetime.now, datetime.datetime.utcnow, os.urandom}
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
UNSTEADY |= {vars(time)[f"{clock}{unit}"] for clock in _CLOCKS for unit in ("", "_ns")}
UNSTEADY |= {time.localtime, time.gmtime, time.ctime, time.strftime}
_STARTS_OF_THREADS = {
    each for each in (getattr(_thread, n, None) for n in ("start_new_thread", "start_joinable_thread")) if each
}
# Nothing undoes what they do.
_EFFECTS = "fork", "kill", "link", "mkdir", "posix_spawn", "remove", "rename", "replace", "rmdir", "symlink", "system"
_WITH_EFFECTS = {each for each in (getattr(os, name, None) for name in (*_EFFECTS, "unlink")) if each}
_WITH_EFFECTS |= {sys.setrecursionlimit, torch.set_flush_denormal, torch.set_num_threads, torch.set_num_interop_threads}
_PYTHON_WITH_EFFECTS = {torch.save.__code__: "saves a file", subprocess.Popen.__init__.__code__: "starts a process"}
# What they return is compared before each replay. `inspect.signature` asks for the limit of recursions.
_COMPARED = {sys.getrecursionlimit, gc.isenabled, os.getcwd, _thread.get_ident, _thread.get_native_id}
_COMPARED |= {torch.get_num_threads, torch.get_num_interop_threads}


def _plain(get: Callable[[], Any]) -> str:
    """All that an object has as plain values, such as the name of a thread."""
    return repr({name: value for name, value in vars(get()).items() if isinstance(value, ATOMS)})


_OF_LOGGERS = "isEnabledFor", "getEffectiveLevel", "hasHandlers"
_COMPARED_PYTHON: dict[types.CodeType, Callable[..., Any]] = {
    **{each.__code__: partial(_plain, each) for each in (threading.current_thread, threading.main_thread)},
    **{vars(logging.Logger)[name].__code__: vars(logging.Logger)[name] for name in _OF_LOGGERS},
}
# What they return is not compared before a replay, and may be another value in a later call.
_UNCOMPARED = {eval, exec, __import__, input, open, decimal.getcontext, weakref.getweakrefcount, weakref.getweakrefs}
_UNCOMPARED_PYTHON = importlib.import_module, threading.active_count, threading.enumerate, uuid.uuid1
_UNCOMPARED_CODE = {each.__code__ for each in _UNCOMPARED_PYTHON}
# What may lead to anything, which the step may then change, so that nothing would know what to undo.
_LEAD_ANYWHERE: set[Any] = {eval, exec, __import__, "_getframe", "__subclasses__", weakref.getweakrefs}
_LEAD_ANYWHERE |= {gc.get_objects, gc.get_referrers, gc.get_referents}
_LEAD_ANYWHERE |= {importlib.import_module.__code__, threading.enumerate.__code__}
_ENVIRONMENT = {vars(type(os.environ))[name].__code__ for name in ("__getitem__", "__iter__", "__len__")}
# Modules of Python's library whose other functions depend on their arguments alone, or on what is seen otherwise.
_STEADY = {
    *("abc", "argparse", "array", "ast", "base64", "binascii", "bisect", "builtins", "calendar", "cmath", "codecs"),
    *("collections", "colorsys", "concurrent", "configparser", "contextlib", "contextvars", "copy", "copyreg", "csv"),
    *("ctypes", "dataclasses", "datetime", "decimal", "difflib", "encodings", "enum", "errno", "fnmatch", "fractions"),
    *("functools", "genericpath", "glob", "graphlib", "hashlib", "heapq", "hmac", "importlib", "inspect", "io"),
    *("itertools", "json", "keyword", "logging", "marshal", "math", "multiprocessing", "ntpath", "numbers", "operator"),
    *("os", "pathlib", "pickle", "posixpath", "pprint", "queue", "random", "re", "reprlib", "secrets", "shutil"),
    *("stat", "statistics", "string", "struct", "tempfile", "textwrap", "thread", "threading", "time", "traceback"),
    *("types", "typing", "unicodedata", "unittest", "uuid", "warnings", "weakref", "zlib"),
    *("blake2", "collections_abc", "md5", "sha1", "sha2", "sha256", "sha3", "sha512", "sre", "weakrefset"),
}
_UNSEEN_THERE = "is not compared before a replay{at}"
_CALL_BEFORE = "call it outside of the step, and have the step read the result by a name"
_OUTSIDE = "do that outside of the step"
_STEADY_FUNCTIONS = {
    *("fspath", "getpid", "getppid", "write", "fsync", "close", "register_at_fork"),  # of posix and nt
    *("exc_info", "exception", "intern", "is_finalizing", "setprofile", "collect", "is_tracked"),  # of sys and gc
}
# Packages that do not pass on what they read of all of this, and modules of PyTorch that do.
_KEEP = {"torch", "thunder", "thunder_cg", "triton"}
_PASS_ON = {"torch.cuda.random", "torch.random", "torch.serialization"}
_OF_NO_OBJECT = {types.ModuleType, type, types.NoneType}  # types of what functions of C belong to


@dataclass(slots=True)
class StepCollective:
    """One collective of a step."""

    name: str
    nbytes: int  # of what it reads, or of what it writes, whichever is more
    overlaps: bool = False  # whether the graph has other work between its start and its wait


class _Pending(NamedTuple):
    """A collective that nobody has waited for yet."""

    result: Work | torch.Tensor  # kept, so that nothing else has its identity or its memory
    line: str  # where it is called
    collective: StepCollective
    began: int  # how much other work had been captured


class Calls:
    """The user's functions that run between `watch` and `end`, as a profiler of Python is told of them.

    Args:
        device_type: of the graph.

    Attributes:
        found: each function, and what it is bound to, once they were looked for.
        objection: something that runs and that no replay would do; None if nothing does.
        groups: that they communicate in, each with its collectives, in order.
        pending: those that nobody has waited for yet, by identity or by where a result is.
        communicated: addresses of tensors that they got, with their names. NCCL's kernels may find them in memory.
        written: addresses of storages that they write to, and where they are called. No version counts such a write.
        looks_up_unseen: whether something ran that looks attributes up in another way than Python's: what Dynamo has
            compiled does, and `object.__getattribute__`.
        events: of CUDA, that were recorded, and where, by identity.
        of_torch: functions of PyTorch's, as their code with their globals.
        getters: functions of C, of which some return settings, and whether a logger logs.
        raised: the first method of a tensor that has raised an error, in words.
        undos: how what these functions read gets back what it held. See Note [Effects once].
        gradients: what leaves had before the first backward that reaches them, but for parameters of the step.
        reads_gradients: whether a function that is not PyTorch's names ``grad``, and may ask whether there is one.
        numbers: those of optimizers that the groups hold in the capture.
    """

    def __init__(self, device_type: str = "cuda") -> None:
        self._device_type = device_type
        self.found: dict[tuple[int, int], Called] = {}
        self.objection: SkipReason | None = None
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
        self.undos: list[Undo] = []
        self._thread: int | None = None  # the one that is watched; backwards run on it, too
        self._callback: Callable[[types.FrameType, str, Any], None] | None = None  # which refers to this object
        self.begin(lambda _: [])

    def begin(
        self,
        undos_of: Callable[[Called], list[Undo]],
        parameters: Iterable[torch.Tensor] = (),
        numbers: KernelNumbers | None = None,
    ) -> None:
        """Before a capture, which may be the second one of a call.

        Args:
            undos_of: how what a function reads gets back what it holds.
            parameters: of the step.
            numbers: of optimizers, that it does not compare.
        """
        self.numbers = StandIns(numbers or KernelNumbers())
        self._undos_of, self._parameters = undos_of, {*map(id, parameters)}
        self.gradients: MutableMapping[torch.Tensor, torch.Tensor | None] = WeakTensorKeyDictionary()
        self.groups: dict[ProcessGroup, list[StepCollective]] = {}
        self.pending: dict[int, _Pending] = {}
        self.communicated: dict[int, str] = {}
        self.written: dict[int, str] = {}
        self._began = self._of_collectives = 0  # nodes before the last collective, and of all, in what is captured

    def watch(self, copied: Iterable[torch.Tensor] = (), *, carries: bool = False) -> None:
        """Begins to watch the calling thread. `CaptureLater` if it is watched by somebody else.

        Args:
            copied: what stands for the step's arguments, and for what it carries.
            carries: whether it carries something, which it finds by names, so that no frame may show it.
        """
        self._copied = {*map(address_if_any, copied)} - {0}
        self._carries = carries
        if sys.getprofile() is not None:
            problem = "a profiler of Python is active, and a capture needs to be told what the step calls"
            raise CaptureLater(problem, "begin to profile after the step has been captured")
        self._thread, self._callback = threading.get_ident(), self._filtered()
        sys.setprofile(self._callback)

    def end(self) -> None:
        self._thread = None
        if self._callback is not None and sys.getprofile() is self._callback:
            sys.setprofile(None)
        self._callback = None

    def _filtered(self) -> Callable[[types.FrameType, str, Any], None]:
        """Calls `_note`, not for what is known to tell nothing, which is most."""
        quiet, note = self._quiet, torch.compiler.disable(self._note)  # Dynamo would compile it

        def callback(frame: types.FrameType, event: str, called: Any) -> None:
            if event == "call" or event == "return":
                if id(frame.f_code) not in quiet:
                    note(frame, event, called)
            elif event == "c_exception" or (event == "c_call" and _key(called) not in quiet):
                note(frame, event, called)

        return torch.compiler.disable(callback, recursive=False)  # what is recursive takes longer than the callback

    def _note(self, frame: types.FrameType, event: str, called: Any) -> None:
        if event == "call":
            self._note_call(frame, frame.f_code)
        elif event == "return":
            if (found := functional_call(frame)) is not None:
                self._note_functional(frame, *found, tensors_in(called))
        elif event == "c_call":
            self._note_call_of_c(frame, called, called.__name__)
        elif isinstance(getattr(called, "__self__", None), torch.Tensor):
            self.raised = self.raised or f"{called.__name__}() raised an error while capturing{_line(frame, True)}"

    def _note_call(self, frame: types.FrameType, code: types.CodeType) -> None:
        if functional_call(frame) is not None:
            self._began = self._work()
        if code.co_name == "__init__" and code.co_argcount:
            self._new.add(id(frame.f_locals.get(code.co_varnames[0])))
        self._object_to(frame)
        if code is _ASKS.__code__ and frame.f_back is not None:
            self._note_question(frame.f_back)
        elif code in _ENVIRONMENT:
            if _is_called_by_user(frame):
                owner = frame.f_locals[code.co_varnames[0]]
                self.found[id(variables_of), id(owner)] = Called(variables_of, owner)  # type: ignore[arg-type]
        elif code is CODE_OF_BACKWARD:
            self.of_torch[code] = frame.f_globals
            for leaf in leaves_of_backward(frame):
                if id(leaf) not in self._parameters:
                    self.gradients.setdefault(leaf, leaf.grad)
        elif code is ThreadPoolExecutor.submit.__code__:
            if _is_called_by_user(frame.f_back):
                problem = "the step gives work to another thread{at}, which is in no graph"
                self._object(frame, problem, _OUTSIDE, stops=True)
        elif code in _PYTHON_WITH_EFFECTS:
            if _is_called_by_user(frame.f_back):
                problem = f"the step {_PYTHON_WITH_EFFECTS[code]}{{at}}, and no replay would"
                self._object(frame, problem, _OUTSIDE, stops=True)
        elif code is random.Random.seed.__code__:
            if frame.f_locals["a"] is None and _is_called_by_user(frame):
                fix = "make generators of random numbers outside of the step"
                self._object(frame, "the step takes a seed from the system{at}, and no replay would", fix)
        elif (compared := _COMPARED_PYTHON.get(code)) is not None:
            if _is_called_by_user(frame.f_back):
                arguments = (frame.f_locals[name] for name in code.co_varnames[: code.co_argcount])
                self.getters[partial(compared, *arguments)] = None
        elif _is_uncompared_code(code, str(frame.f_globals.get("__name__"))):
            if _is_called_by_user(frame.f_back):
                self._object_to_result(frame, code.co_name, code in _LEAD_ANYWHERE)
        elif code in _READS_OF_TENSORS_IN_PYTHON:
            if self._is_of_graph(owner := frame.f_locals["self"]) and _is_called_by_user(frame.f_back):
                self._object_to_read(frame, _READS_OF_TENSORS_IN_PYTHON[code])
        elif code in _TELL_APART_IN_PYTHON:
            if frame.f_back is not None:
                self._note_identity(frame.f_back, _TELL_APART_IN_PYTHON[code], [frame.f_locals["self"]])
        elif id(code) not in self._foreign:
            self._note_function(frame, code_before_dynamo(code))

    def _note_call_of_c(self, frame: types.FrameType, called: Any, name: str) -> None:
        owner = getattr(called, "__self__", None)
        if called is is_current_stream_capturing:
            self._note_question(frame)
        elif name in _READS_OF_TENSORS:
            if self._is_of_graph(owner):
                self._object_to_read(frame, name)
        elif called is id:
            if _is_users(frame.f_code, frame.f_globals):
                given = frame.f_locals.get(variable_passed(frame.f_code, frame.f_lasti))
                if isinstance(given, torch.Tensor):
                    self._note_identity(frame, name, [given])
                else:
                    may_be_any = self._carries and given is None
                    self._note_identity(frame, name, tensors_in([*frame.f_locals.values()]), may_be_any=may_be_any)
        elif name in _TELL_APART and isinstance(owner, torch.Tensor):
            self._note_identity(frame, name, [owner])
        elif called in UNSTEADY:
            if _is_called_by_user(frame):
                problem = f"{name}() returns another value in each call{{at}}, and in no replay"
                self._object(frame, problem, "call it outside of the step, and pass a tensor")
        elif called in _STARTS_OF_THREADS:
            if _is_called_by_user(frame):
                problem = "the step starts a thread{at}, whose work is in no graph"
                self._object(frame, problem, _OUTSIDE, stops=True)
        elif type(owner) is type(_random.__self__):
            if owner is _random.__self__ and name not in _STATES:
                problem = "the step draws Python's random numbers, or seeds them{at}, and no replay would"
                self._object(frame, problem, "draw with torch on the device", weak=True)
        elif called is globals:
            if _is_users(frame.f_code, frame.f_globals):
                self._object(frame, f"what globals() gives {_UNSEEN_THERE}", "name what the step needs", stops=True)
        elif called is open:
            if _is_called_by_user(frame):
                self._object(frame, "the step opens a file{at}, and no replay would", _OUTSIDE, weak=True)
        elif name.startswith(_GETTERS) and _is_torchs(called):
            self.getters[called] = None
        elif called in _COMPARED:
            if _is_called_by_user(frame):
                self.getters[called] = None
        elif called in _WITH_EFFECTS:
            if _is_called_by_user(frame):
                self._object(frame, f"the step calls {name}(){{at}}, and no replay would", _OUTSIDE, stops=True)
        elif _is_uncompared(called):
            if _is_called_by_user(frame):
                self._object_to_result(frame, name, not _LEAD_ANYWHERE.isdisjoint((called, name)))
        elif isinstance(owner, torch.Generator):
            self._note_generator(frame, name)
        elif isinstance(owner, torch.cuda.Event) and name == "record":
            self.events[id(owner)] = owner, _line(frame)
        else:  # whoever calls it
            self._quiet.add(_key(called))

    def _object(
        self,
        frame: types.FrameType,
        problem: str,
        fix: str,
        *,
        weak: bool = False,
        code: bool = False,
        stops: bool = False,
    ) -> None:
        """Notes why no replay would be right; ``weak`` if any other reason is better.

        The user's line, with its ``code`` or without, comes in the place of ``{at}``. What nothing could undo
        ``stops`` the capture before it happens.
        """
        if self.objection is None or not weak:
            self.objection = SkipReason(problem.format(at=_line(frame, code)), fix)
        if stops:
            raise CaptureRefused(*self.objection)

    def _object_to_result(self, frame: types.FrameType, name: str, stops: bool) -> None:
        self._object(frame, f"what {name}() gives {_UNSEEN_THERE}", _CALL_BEFORE, weak=True, stops=stops)

    def _object_to_read(self, frame: types.FrameType, method: str) -> None:
        fix = "return the tensor, and read it outside of the step"
        self._object(frame, f"{method}() reads a tensor on the host{{at}}", fix, code=True)

    def _note_identity(
        self, frame: types.FrameType, name: str, tensors: Iterable[torch.Tensor], *, may_be_any: bool = False
    ) -> None:
        """A replay has a copy in the place of each argument, and of what it carries."""
        if not _is_called_by_user(frame):
            return
        if may_be_any or not self._copied.isdisjoint(map(address_if_any, filter(has_memory, tensors))):
            problem = f"what {name}() gives of an argument, or of a tensor that steps or the loop replace{{at}}, is not"
            problem += " the same in a replay, which has a copy of it"
            self._object(frame, problem, "call it outside of the step, and pass what it gives", weak=True)

    def _object_to(self, frame: types.FrameType, method: str | None = None) -> None:
        if self.objection is None and (found := uncapturable(frame, method)) is not None:
            self._object(frame, f"{found.problem}{{at}}", found.fix)

    def told_of_collectives(self, captured_nodes: Callable[[], int]) -> AbstractContextManager[None]:
        """Inside, the collectives of the thread that is watched are noted."""
        self._captured_nodes = captured_nodes
        return told_of_collectives(self._note_collective, self._note_work, self._note_use)

    def _work(self) -> int:
        """How much has been captured, but for collectives."""
        return self._captured_nodes() - self._of_collectives

    def _note_begun(self, collective: StepCollective, results: Mapping[int, Work | torch.Tensor], line: str) -> None:
        self._of_collectives = self._captured_nodes() - self._began
        self.pending |= {key: _Pending(result, line, collective, self._began) for key, result in results.items()}

    def _note_wait(self, key: int) -> None:
        if (waited := self.pending.pop(key, None)) is not None:
            waited.collective.overlaps |= self._work() > waited.began

    def _note_work(self, work: Work, frame: types.FrameType) -> None:
        if threading.get_ident() == self._thread:
            self._note_begun(self._last, {id(work): work}, _line(frame))

    def _note_use(self, method: str, frame: types.FrameType, work: Work) -> None:
        if threading.get_ident() != self._thread:
            return
        if method == "is_completed":  # never, in a capture
            problem = f"the host asks whether a collective is done{_line(frame)}"
            raise CaptureRefused(problem, "call wait() of what it returns")
        self._note_wait(id(work))

    def _note_collective(self, method: str, frame: types.FrameType, args: tuple[Any, ...]) -> None:
        """Notes what `torch.distributed` calls, which keeps the group in a variable."""
        if threading.get_ident() != self._thread:
            return
        self._object_to(frame, method)
        name = frame.f_code.co_name
        name = method if name.startswith("_") else name  # of several that PyTorch coalesces
        self._last, self._began = StepCollective(name, _nbytes(args)), self._work()
        if is_torchs_own(frame) and isinstance(group := frame.f_locals.get("group"), ProcessGroup):
            self.groups.setdefault(group, []).append(self._last)
        else:
            fix = "call the function of torch.distributed"
            self._object(frame, "it calls a method of a process group itself{at}", fix, weak=True)
        self.communicated |= {tensor.data_ptr(): name for tensor in tensors_in(args) if has_storage(tensor)}
        self.written |= dict.fromkeys(map(address_if_any, tensors_in(args[:1])), _line(frame))  # its first argument

    def _note_functional(
        self,
        frame: types.FrameType,
        name: str,
        group: ProcessGroup | None,
        args: tuple[Any, ...],
        results: list[torch.Tensor],
    ) -> None:
        """Notes a functional collective, which is waited for by its results, or a wait."""
        if not all(map(is_plain, tensors := tensors_in(args))):  # a wrapper, which calls it again with what it holds
            return
        if group is None:
            for tensor in tensors if name == "wait_tensor" else ():
                self._note_wait(address_if_any(tensor))
            return
        collective, line = StepCollective(name, _nbytes((args, results))), _line(frame)
        self.groups.setdefault(group, []).append(collective)
        self.communicated |= {tensor.data_ptr(): name for tensor in tensors if has_storage(tensor)}
        self.written |= dict.fromkeys(map(address_if_any, results), line)  # some are arguments
        self._note_begun(collective, {address_if_any(tensor): tensor for tensor in results}, line)

    def _is_of_graph(self, value: Any) -> bool:
        """Whether a value is a tensor on the device, which is the host itself for a tape."""
        return issubclass(type(value), torch.Tensor) and bool(value.device.type == self._device_type)

    def _note_question(self, frame: types.FrameType) -> None:
        """A step that asks whether it is captured may do in its graph what it does not do in Python."""
        if not is_constant(frame.f_code.co_filename):
            fix = "call torch.cuda.is_current_stream_capturing() by this name, which is False there"
            self._object(frame, "the step asks whether it is captured{at}", fix, code=True)

    def _note_generator(self, frame: types.FrameType, method: str) -> None:
        sets = method in _SEEDS and not is_restored_by_dynamo(frame)
        if sets or (method in _READS_OF_SEEDS and _is_called_by_user(frame)):
            fix = "do it outside of the step"
            if _is_called_in(frame, "torch.utils.checkpoint"):
                fix = "checkpoint with preserve_rng_state=False what draws nothing, or in a function that is compiled"
            problem = "the step reads or sets the state of a generator of random numbers{at}, which no replay would do"
            self._object(frame, problem, fix)

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
        for name in sorted(_UNCOMPARED_NAMES.intersection((*code.co_names, *code.co_consts))):
            self._object(frame, f"what {name} gives {_UNSEEN_THERE}", _CALL_BEFORE.replace("call", "read"), weak=True)
        is_own = code.co_name in ("__init__", *_UNSEEN)  # what it does with an object was seen already
        self.numbers.note_call(code, frame.f_locals)
        self.looks_up_unseen |= not is_own and not _UNSEEN.isdisjoint(code.co_names)
        if not is_own and not _LOOKS_UP_UNSEEN.isdisjoint(code.co_names):
            self.numbers.note_unseen(code)
        self._inner.update(each for each in code.co_consts if isinstance(each, types.CodeType))
        if code in self._inner:
            return
        owner, method = _owner(frame, code)
        owner = type(owner) if id(owner) in self._new else owner  # which has what the class gives it
        variables = tuple(id(frame.f_locals.get(name, MISSING)) for name in code.co_freevars)
        if (key := (code, id(owner), variables)) not in self._ran:
            self._ran[key] = ran = _Ran(code, owner, variables, frame.f_globals)
            with unwatched():
                functions = [Called(each, owner) for each in ran.functions(frame.f_locals, method)]
                if sets_variables(code):  # by which nobody could find them later
                    self.found |= {(id(each.function), id(owner)): each for each in functions}
                for each in functions:
                    self.undos += self._undos_of(each)

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


class _Ran(NamedTuple):
    """A function that has run, as its frame shows it. It may be gone, or have been made by the step."""

    code: types.CodeType
    owner: Any
    cells: tuple[int, ...]  # what it closes over, by identity: a reference would keep memory
    variables: dict[str, Any]  # global ones

    def functions(self, values: Mapping[str, Any], method: types.FunctionType | None) -> list[types.FunctionType]:
        """Those that it may be, as it is called; one that reads the same, if that does as well and is found sooner.

        Args:
            values: of its variables.
            method: is returned if there is one.
        """
        code, arguments = self.code, self.code.co_varnames[: self.code.co_argcount + self.code.co_kwonlyargcount]
        if not code.co_freevars:  # otherwise, there may be others with the code
            method = method or _with_code(self.variables.get(code.co_name), code)
        if method is not None:
            return [method]
        if sets_variables(code) or any(isinstance(values.get(name), (dict, list, set, deque)) for name in arguments):
            return [*filter(self.is_of, known_functions({code}))]
        cells = (types.CellType(values[name]) if name in values else types.CellType() for name in code.co_freevars)
        return [types.FunctionType(code, self.variables, code.co_name, None, tuple(cells))]

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
    owner, name = getattr(called, "__self__", None), called.__name__
    if isinstance(owner, types.ModuleType):
        is_steady = name in _STEADY_FUNCTIONS or (name != "fromfile" and _is_steady(owner.__name__))  # which is NumPy's
        return called in _UNCOMPARED or not is_steady
    return name in ("__subclasses__", "cache_info") or (isinstance(owner, io.IOBase) and bool(name.startswith("read")))


@cache
def _is_uncompared_code(code: types.CodeType, module: str) -> bool:
    """Whether a function of Python's library depends on what is not compared."""
    return code in _UNCOMPARED_CODE or (is_pythons(code.co_filename) and not _is_steady(module))


@cache
def _is_steady(module: str) -> bool:
    """Whether a module is none of Python's library, or its functions depend on nothing that changes unseen."""
    name = module.partition(".")[0]
    return name not in sys.stdlib_module_names or name.strip("_") in _STEADY


def _is_torchs(called: Any) -> bool:
    """Whether a function of C is one of PyTorch's, and no method."""
    owner = getattr(called, "__self__", None)
    return isinstance(owner, types.ModuleType) and owner.__name__.startswith("torch.")


def _is_called_by_user(frame: types.FrameType | None) -> bool:
    """Whether the user's code may get what a function that is called in a frame returns, such as from `secrets`."""
    while frame is not None and (name := str(frame.f_globals.get("__name__"))) not in _WITHOUT_EFFECT:
        if _is_users(frame.f_code, frame.f_globals):
            return True
        if name not in _PASS_ON and name.partition(".")[0] in _KEEP:
            return False
        frame = frame.f_back
    return False


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


def _owner(frame: types.FrameType, code: types.CodeType) -> tuple[Any, types.FunctionType | None]:
    """What the function is bound to, an object or a class, and the function; None, twice, if it is no method."""
    if not code.co_argcount:
        return None, None
    first: Any = frame.f_locals.get(code.co_varnames[0])
    is_class = issubclass(type(first), type)  # isinstance() would look up an attribute
    for kind in (*type(first).__mro__, *(first.__mro__ if is_class else ())):
        named = vars(kind).get(code.co_name)
        for member in (getattr(named, "__func__", named), *_properties(kind)):
            if (method := _with_code(member, code)) is not None:
                return first, method
    return None, None


def _properties(kind: type) -> Iterator[Any]:
    """What the properties that a class defines call, by whatever name."""
    for member in vars(kind).values():
        if isinstance(member, property):
            yield from (member.fget, member.fset, member.fdel)


def _with_code(value: Any, code: types.CodeType) -> types.FunctionType | None:
    """The function that a value is or wraps, if it has the code."""
    if not isinstance(value, types.FunctionType):
        return None
    function: Any = inspect.unwrap(value)
    return function if function.__code__ is code else None


def _nbytes(sides: Iterable[Any]) -> int:
    return max(sum(tensor.nbytes for tensor in tensors_in(side)) for side in sides)


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
