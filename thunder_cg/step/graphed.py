"""``graphed_step()``: a whole training iteration as one graph, once two calls of it have done the same."""

from __future__ import annotations

import linecache
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from traceback import walk_tb
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thunder_cg.compat.distributed import is_distributed
from thunder_cg.compat.torch import any_autocast_enabled, tree_map_only
from thunder_cg.errors import CaptureRefused, NoRoom, OptionError, ReplayRefused
from thunder_cg.options import BACKENDS, check_memory_budget
from thunder_cg.progress import Stage
from thunder_cg.runtime.arena import Arena, Arenas
from thunder_cg.runtime.backends import resolve
from thunder_cg.runtime.failures import note_replay
from thunder_cg.runtime.skip_reasons import held_back, skip_reason
from thunder_cg.step.memory import PythonCall, nbytes
from thunder_cg.step.reads import is_installed
from thunder_cg.step.recording import Batch, StepRecording, capture
from thunder_cg.step.state import Facts, StepState, difference, random_states

_OPTIMIZERS = f"{os.sep}torch{os.sep}optim{os.sep}"
_MAX_UNSTABLE = 8  # calls in a row that change the state, or find another one; then the regions' own graphs are used
_MAX_CAPTURES = 16  # if they do not pay
_LOOK_AGAIN = 32  # after so many more
_MAX_LAYOUTS = 64  # remembered
_FIRST = "the first call of its kind: what the step does is noted"
_HOPELESS = "Python changes what the step depends on in each call"
_READ = "the host reads a value there; return the tensor, and read it outside of the step"
_OPTIMIZER = "the optimizer reads its state on the host; make it with capturable=True (on a CPU with fused=True)"
_RATE = "make the learning rate a tensor on the device, which a scheduler then writes"
_HISTORY = (
    "a tensor with a history from before the step is still held, so autograd joins its stream; detach what you keep"
)


@dataclass(frozen=True, slots=True)
class _Ready:
    """What a call in Python has shown that left its state as it was."""

    facts: Facts
    needs: int  # bytes of the pool, at least
    without_graphs: int  # bytes that the call has allocated at a time, at least


@dataclass(frozen=True, slots=True)
class _Capture:
    """A call that captures, as the memory budget sees it."""

    memory: Arena
    recording: None = None

    def arenas(self) -> list[Arena]:
        return [self.memory]


class GraphedStep:
    """What :func:`graphed_step` returns: call it in the place of the step's function.

    Attributes:
        calls, replays, captures: how many calls there were, and what became of them; the others ran in Python.
        in_python: why calls ran in Python, and how many.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        roots: Mapping[str, Any],
        backend: str,
        max_recordings: int,
        memory_budget: int | float | None,
    ) -> None:
        update_wrapper(self, fn)
        self._fn, self._roots = fn, roots
        self._backend = resolve(backend)
        self._max_recordings = max_recordings
        self._lock = threading.RLock()
        self._arenas = Arenas(self._backend, 1, poison=False, budget=memory_budget)
        self._arenas.join(self)
        self.arena: Arena | None = None  # of all recordings; only calls of the step use it, one at a time
        self.recordings: list[StepRecording] = []  # newest first
        self._ready: dict[Any, _Ready] = {}  # by layout
        self._refused: dict[Any, str] = {}  # by layout: why it cannot be captured
        self._unstable = 0  # calls in a row
        self.calls = self.replays = self.captures = 0
        self.in_python: Counter[str] = Counter()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self.calls += 1
            if (reason := self._skip_reason()) is not None:
                return self._run(args, kwargs, reason)
            try:
                batch = Batch.of(args, kwargs, self._backend.device_type)
            except CaptureRefused as error:
                return self._run(args, kwargs, str(error))
            layout = (*batch.layout, *_thread_state())
            recording = next((each for each in self.recordings if each.is_for(layout)), None)
            if recording is None:
                return self._observe(batch, layout, args, kwargs)
            if (reason := recording.why_not(batch)) is not None:
                return self._run(args, kwargs, reason)
            try:
                return self._replay(recording, batch)
            except ReplayRefused as error:
                return self._run(args, kwargs, str(error))

    def _skip_reason(self) -> str | None:
        """Why no step on this thread can be one graph now."""
        if is_distributed():
            return "several processes train together, and their collectives are in the graphs of the compiled modules"
        return skip_reason(self._backend, saves=True)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> Any:
        """Runs the step in Python. The compiled modules in it have their own graphs."""
        self.in_python[reason] += 1
        return _detached(self._fn(*args, **kwargs))

    def _replay(self, recording: StepRecording, batch: Batch) -> Any:
        recording.arena.enter()
        result = self._launch(recording, batch)
        self.replays += 1
        recording.replays += 1
        self._unstable = 0
        return result

    def _observe(self, batch: Batch, layout: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that no recording is for: captures it, if an earlier one did the same, else runs it in Python."""
        if layout in self._refused:
            return self._run(args, kwargs, self._refused[layout])
        hopeless = self._unstable >= _MAX_UNSTABLE
        if hopeless and self.calls % _LOOK_AGAIN:
            return self._run(args, kwargs, _HOPELESS)
        state = StepState(self._fn, self._roots, self._backend.device_type)
        known = self._ready.get(layout)
        if not self.captures_pay():
            self._refuse(layout, f"it was captured {self.captures} times and replayed {self.replays} times")
        elif known is not None and known.facts == state.facts:
            try:
                return self._capture(state, batch, layout, known)
            except CaptureRefused as error:  # its frames hold the tensors of the step, so it has to go before
                refusal, is_final = str(error), not (isinstance(error, NoRoom) and error.may_pass)
            if not self.recordings:
                self.release()
            if is_final:
                self._refuse(layout, refusal)
            return self._run(args, kwargs, refusal)
        reason = _FIRST if known is None else difference(known.facts, state.facts) or _FIRST
        random = random_states()
        python = PythonCall(state, self._backend)
        with held_back(not hopeless):
            result = self._run(args, kwargs, reason)
        after = state.again()
        change = difference(state.facts | random, after.facts | random_states())
        if change is None:
            needs = python.allocated(after)
            self._ready[layout] = _Ready(state.facts, needs + nbytes(batch.tensors), needs)
            while len(self._ready) > _MAX_LAYOUTS:
                del self._ready[next(iter(self._ready))]
        self._unstable += change is not None or known is not None
        if self._unstable == _MAX_UNSTABLE:
            said = change or reason
            self._warn(f"{said}, in each step{_fix_for(said)}")
        if change is not None:
            self.in_python[reason] -= 1
            self.in_python[f"{change}, in the step{_fix_for(change)}"] += 1
        return result

    def _capture(self, state: StepState, batch: Batch, layout: Any, ready: _Ready) -> Any:
        """Captures the step and replays it. `CaptureRefused` if that cannot be; then nothing has happened."""
        while len(self.recordings) >= self._max_recordings:
            self.recordings.pop().close()
        if self.arena is None:
            self.arena = self._arenas.hold([])
            assert self.arena is not None
            self.arena.release()
        make_room = partial(self._make_room, self.arena, state.device, layout)
        make_room(ready.needs)
        if any_autocast_enabled():
            torch.clear_autocast_cache()
        try:
            self.arena.pool(state.device).enter()
            with Stage(lambda: f"capturing the step {self.name}"):
                recording = capture(self._fn, batch, state, self._backend, self.arena, self.recordings, make_room)
        except NoRoom:
            raise
        except CaptureRefused as error:
            raise CaptureRefused(f"{error}{_where(error)}") from error
        except Exception as error:
            raise CaptureRefused(f"{_said(error)}{_where(error)}") from error
        finally:
            if any_autocast_enabled():  # it holds weights in the pool
                torch.clear_autocast_cache()
        recording.layout, recording.nbytes, recording.without_graphs = layout, ready.needs, ready.without_graphs
        self.recordings.insert(0, recording)
        self.captures += 1
        result = self._launch(recording, batch)
        self._unstable = 0
        return result

    def _launch(self, recording: StepRecording, batch: Batch) -> Any:
        try:
            return recording.replay(batch)
        except ReplayRefused:
            raise
        except Exception as error:
            note_replay(error, f"the step {self.name}", "the whole step", f"call {self.name} without graphed_step()")
            raise

    def _make_room(self, arena: Arena, device: torch.device, layout: Any, expected: int | None = None) -> None:
        """`NoRoom` if what a capture needs is past the budget: see Note [Memory budget] in runtime/arena.py."""
        kept = len(self.recordings)
        if (problem := self._arenas.make_room(_Capture(arena), device, self.captures_pay, expected)) is not None:
            may_pass = len(self.recordings) < kept
            if expected is None and not may_pass:
                self._ready[layout] = replace(self._ready[layout], needs=arena.nbytes())
            raise NoRoom(problem, may_pass=may_pass)

    def captures_pay(self) -> bool:
        """Whether captures up to now have been replayed often enough for one more."""
        return self.captures < _MAX_CAPTURES or self.captures <= self.replays // 4

    def discard_for_budget(self, recording: StepRecording) -> None:
        """Gives the recording up for another one."""
        self.recordings.remove(recording)
        recording.close()

    def _refuse(self, layout: Any, reason: str) -> None:
        self._refused[layout] = reason
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        said = f"graphed_step({self.name}) runs in Python, with the graphs of the compiled modules in it: {reason}"
        warnings.warn(said, UserWarning, stacklevel=4)

    @property
    def name(self) -> str:
        """That of the step's function."""
        return getattr(self._fn, "__name__", type(self._fn).__name__)

    def release(self) -> None:
        """Gives the memory of all graphs of the step back. A later call captures anew."""
        with self._lock:
            while self.recordings:
                self.recordings.pop().close()
            self.arena = None
        self._backend.give_back()

    def budget(self) -> int | None:
        """The memory budget in bytes."""
        return self._arenas.budget(torch.device(self._backend.device_type))

    def awaiting(self) -> list[_Ready]:
        """Of each layout that is not captured, and would be when it comes again if it can: what it needs."""
        captured = {recording.layout for recording in self.recordings}
        return [ready for layout, ready in self._ready.items() if layout not in captured]


def _detached(result: Any) -> Any:
    """The result as a replay returns it: without a history."""
    return tree_map_only(torch.Tensor, lambda t: t.detach() if t.requires_grad and not t.is_leaf else t, result)


def _thread_state() -> tuple[Any, ...]:
    kinds = ("cuda", "cpu")
    autocast = tuple(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in kinds)
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled()
    return autocast, modes, torch.get_default_dtype(), torch.get_default_device()


def _fix_for(change: str) -> str:
    """What to do about a fact that changes in each step."""
    if "['lr']" in change:
        return f"; {_RATE}"
    return f"; {_OPTIMIZER}" if ".state[" in change and "['step']" in change else ""


def _where(error: BaseException) -> str:
    """The line of the user's that raised, and what to do about it."""
    files = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    user = [(file, line) for file, line in files if os.path.isfile(file) and not is_installed(file)]
    said, fix = str(error).lower(), ""
    if "legacy stream depend" in said:
        fix = f"; {_HISTORY}"
    elif any(sign in said for sign in ("_local_scalar_dense", "capturing", "capturable", "host")):
        fix = f"; {_OPTIMIZER if any(_OPTIMIZERS in file for file, _ in files) else _READ}"
    if not user:
        return fix
    file, line = user[-1]
    return f", at {os.path.basename(file)}:{line} ({linecache.getline(file, line).strip()}){fix}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0].rstrip('.')}"


def graphed_step(
    fn: Callable[..., Any],
    *,
    modules: nn.Module | Iterable[nn.Module] = (),
    optimizers: Optimizer | Iterable[Optimizer] = (),
    backend: str = "auto",
    max_recordings: int = 4,
    memory_budget: int | float | None = None,
) -> GraphedStep:
    """A training iteration as one CUDA graph: forward, loss, backward, clipping, optimizer, scaler, moving averages.

    ::

        def train_step(x, y):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(jmodel(x), y)
            loss.backward()
            optimizer.step()
            return loss

        step = thunder_cg.graphed_step(train_step, modules=[jmodel], optimizers=[optimizer])
        for x, y in loader:
            loss = step(x.cuda(), y.cuda())

    The first calls run in Python, until one has left all that Python knows as it found it. The next one is captured,
    and later ones copy the batch in and replay. Python runs no more then: what the step prints or counts happens only
    in calls that run in Python. A call for which no graph is right runs in Python, with the graphs of the compiled
    modules in it, and :func:`thunder_cg.explain` says why.

    Args:
        fn: takes tensors on one device, in any nesting, and returns tensors, in any nesting. It finds what it needs
            besides as globals, variables of closures, or attributes of what it is bound to.
        modules: that it uses without naming them.
        optimizers: that it uses without naming them.
        backend: as for :func:`thunder_cg.cudagraph_transform`.
        max_recordings: graphs kept, one for each layout of the batch and each state, such as a learning rate that is a
            number; the oldest goes first.
        memory_budget: how much memory the pool of all graphs of the step may have: bytes, or a share of the device as a
            float in (0, 1]. The gradients that stay after a call are part of it. Before a capture it is compared with
            what the step needs at least, as a call in Python has shown: the gradients, the copy of the batch, and, if
            PyTorch's peak of allocated memory has risen in that call, what it has allocated. After the capture it is
            compared with the pool. The graph with the fewest replays per byte goes first. A step that does not fit runs
            in Python, and :func:`thunder_cg.explain` has the reason with both values.

    Returns:
        The step. Its results are new tensors without a history.

    Raises:
        OptionError: a value that an option cannot have.
        BackendError: the backend does not work on this machine.
    """
    if not callable(fn):
        raise OptionError("fn", fn, "a function", "pass the function of one training step", "graphed_step")
    modules = [modules] if isinstance(modules, nn.Module) else [*modules]
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else [*optimizers]
    for name, values, kind in (("modules", modules, nn.Module), ("optimizers", optimizers, Optimizer)):
        for value in values:
            if not isinstance(value, kind):
                raise OptionError(name, value, f"a {kind.__name__}", "pass it, or a list of them", "graphed_step")
    if isinstance(max_recordings, bool) or not isinstance(max_recordings, int) or max_recordings < 1:
        raise OptionError("max_recordings", max_recordings, "a whole number of at least 1", "raise it", "graphed_step")
    check_memory_budget(memory_budget, "graphed_step")
    if backend not in BACKENDS:
        expected = f"one of {', '.join(map(repr, BACKENDS))}"
        raise OptionError("backend", backend, expected, "choose one of these", "graphed_step")
    roots: dict[str, Any] = {f"modules[{i}]": module for i, module in enumerate(modules)}
    roots |= {f"optimizers[{i}]": optimizer for i, optimizer in enumerate(optimizers)}
    return GraphedStep(fn, roots, backend, max_recordings, memory_budget)
