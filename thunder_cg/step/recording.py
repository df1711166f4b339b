"""One captured step: the graph, what has to hold for it to be replayed, and what a replay leaves behind.

Note [Captures of one call]
    A capture runs Python once, so what Python does for the call is done, also where no later replay would be right: the
    step has counted something, or reads what was not compared. Then the graph is replayed for this very call, and
    dropped. To run the step in Python instead would do all of that twice. Where ranks have to agree it is done
    nevertheless: they run in Python together.
"""

from __future__ import annotations

import gc
import sys
import weakref
from abc import get_cache_token
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, islice
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.random import fork_rng

from thunder_cg.compat.autograd import before_backwards
from thunder_cg.compat.cuda import hidden_capture, is_of_capture
from thunder_cg.compat.distributed import ProcessGroup, local_tensor
from thunder_cg.compat.objects import alive, counting
from thunder_cg.compat.settings import Settings, kernel_settings
from thunder_cg.compat.tensors import (
    autograd_base,
    has_storage,
    is_size,
    read_as,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    version,
)
from thunder_cg.errors import CaptureLater, CaptureRefused, ReplayRefused, SkipReason, without_frames
from thunder_cg.runtime.arena import Arena, RecordingUse
from thunder_cg.runtime.backend import Backend, Graph, Pool
from thunder_cg.runtime.inputs import CopiedInput
from thunder_cg.runtime.outputs import AliasedInput, Outputs
from thunder_cg.runtime.ranks.agreement import Collectives
from thunder_cg.runtime.tensors import (
    Extents,
    address_if_any,
    copy_all,
    has_history,
    is_plain,
    is_whole,
    same_tensors,
    tracked_view,
)
from thunder_cg.step.averages import known_to_be_positive
from thunder_cg.step.batch import COPY_CONTAINER, TAKE_ANOTHER, Batch
from thunder_cg.step.calls import Calls, StepCollective
from thunder_cg.step.facts import ATOMS, difference
from thunder_cg.step.fixes import DENSE, fix_of_change
from thunder_cg.step.gradients import (
    ANY,
    LIKE,
    THERE,
    ExpectedGradients,
    GradientsBefore,
    GraphGradient,
    Overwritten,
    is_changed,
    place_of,
)
from thunder_cg.step.memory import nbytes
from thunder_cg.step.other_memory import Addresses, OtherMemoryUsed, memory_of_tensors, moved, refuse_other_memory
from thunder_cg.step.outside import settings_of_numpy, states_outside
from thunder_cg.step.packages import is_constant
from thunder_cg.step.places import Carried, place_of_read
from thunder_cg.step.reads import Read, settings_in
from thunder_cg.step.snapshot import Snapshot
from thunder_cg.step.stack import clear_stack
from thunder_cg.step.state import StepState
from thunder_cg.step.storages import KEPT_SHARES, OriginalStorages, ReplacedStorages

_ATTEMPTS = 4  # of a capture, at most: see Note [Numbers that look like addresses] in other_memory.py
_OWN_REFERENCES = 3  # to an event: of `Calls`, the loop's, the argument's
_OTHERS = "something else than tensors without a history"
_SHARES = SkipReason("an argument shares memory with a tensor that the step reads from outside", "pass a clone of it")
_IS_GRADIENT = SkipReason("the step returns or keeps the memory of a gradient, which others may write", "clone it")
_IS_HELD = SkipReason("a gradient of an earlier step is still held, and a replay would overwrite it", "clone it")


@dataclass(slots=True, eq=False)
class StepRecording(RecordingUse):
    """A step for one layout of the batch and one state."""

    layout: Any
    arena: Arena
    state: StepState
    graph: Graph
    outputs: Outputs
    structure: Any  # of the result
    sources: list[CopiedInput]
    gradients_before: ExpectedGradients
    left: list[GraphGradient]  # gradients that the step leaves
    without_gradient: list[Tensor]  # parameters to which it leaves none, and that may have one before
    overwritten: Overwritten
    dropped: frozenset[int]  # parameters whose gradients it drops unread, by identity
    apart: weakref.WeakSet[GraphGradient]  # whose memory it does not use for anything else
    touched: list[Tensor]  # of the state: tensors whose version each step advances
    numbers: tuple[str, ...]  # keys in groups of optimizers, see Note [Numbers of fused optimizers] in numbers.py
    memory: Extents  # where the state's tensors are, and gradients that the step reads or adds to
    gradient_nbytes: int  # of the pool: recordings may share gradients
    settings: list[tuple[Callable[[], Any], Any]]  # of PyTorch and NumPy, and what ABC.register() has changed
    carried: list[tuple[Callable[[Any], object], Any]]  # puts a value that PyTorch has as a tree
    written: Mapping[int, bool]  # inputs that are copied back, by position, and whether their version advances
    replaced: ReplacedStorages
    added: list[tuple[Read, int]]  # to numbers
    only_once: CaptureRefused | None = None  # why no later replay would be right; the first one is
    last_call: int = 0  # of the step that used it
    without_graphs: int = 0  # what a call in Python has allocated at a time, at least
    collectives: Collectives | None = None  # that it holds
    communicates: Mapping[ProcessGroup, Sequence[StepCollective]] = field(default_factory=dict)  # see `Calls.groups`
    before: tuple[Snapshot, GradientsBefore] | None = None  # the capture, until the first replay
    left_behind: Sequence[weakref.ref[Tensor]] = ()  # by the capture, in containers that the state still refers to

    def arenas(self) -> list[Arena]:
        """The one that all recordings of the step use."""
        return [self.arena]

    def graphs(self) -> list[Graph]:
        """The one that it is."""
        return [self.graph]

    @property
    def buffer_nbytes(self) -> int:
        """Of the pool: copies of the batch."""
        return sum(each.buffer.untyped_storage().nbytes() for each in self.sources)

    @property
    def nbytes_out(self) -> int:
        """Copied out per call: results, and what is copied back."""
        return self.outputs.nbytes + nbytes(each.buffer for each in self.sources if each.arg in self.written)

    @property
    def nbytes_in(self) -> int:
        """Copied in per call."""
        return sum(each.target.numel() * each.target.element_size() for each in self.sources)

    def buffers(self) -> list[Tensor]:
        return [tensor for each in self.sources for tensor in (each.buffer, each.target)]

    def carried_in(self, layout: Any) -> list[Tensor] | None:
        """What is copied in besides the batch, if a replay is a call with this layout, from what there is now."""
        if layout != self.layout or (carried := self.state.carried_if_unchanged()) is None:
            return None
        is_for = all(get() == then for get, then in self.settings) and self.gradients_before.are_there()
        return carried if is_for and self.replaced.fit(carried) else None

    def is_for_other_gradients(self, layout: Any) -> bool:
        """Whether it is for a call with this layout, but for the memory of gradients."""
        return layout == self.layout and self.state.holds() and self.gradients_before.are_elsewhere()

    def is_void(self) -> bool:
        """Whether no replay will ever be right, since the graph writes where nothing of the step's is any more."""
        return self.overwritten.are_moved() or self.replaced.is_lost()

    def why_not(self, batch: Batch, carried: Sequence[Tensor], left: Sequence[GraphGradient]) -> SkipReason | None:
        """Why no replay is right now, although the recording is for the call; None if one is.

        Args:
            carried: what `carried_in` has returned.
            left: gradients in memory that it uses, and that replays of other recordings have left.
        """
        others = self.replaced.others(carried)
        reason = _shared(batch, self.state, others, self.memory, writes=bool(self.written))
        if (reason := reason or self.replaced.why_not(carried)) is not None:
            return reason
        return _IS_HELD if self.overwritten.are_held() or any(each.is_held() for each in left) else None

    def move_out(self, left: Sequence[GraphGradient]) -> None:
        """Gives those of these gradients other memory that parameters have. `ReplayRefused` if there is none."""
        for each in left:
            if not each.is_shared and self._stays(each):
                try:
                    each.parameter.grad = each.tensor.clone()
                except torch.OutOfMemoryError as error:
                    raise ReplayRefused(error) from error

    def in_use_after(self, left: Sequence[GraphGradient]) -> list[GraphGradient]:
        """The gradients that it leaves, and those of ``left``, gradients that others have left, that stay in use."""
        return [*dict.fromkeys([*self.left, *(each for each in left if self._stays(each) or each.is_held())])]

    def _stays(self, gradient: GraphGradient) -> bool:
        """Whether a replay leaves a parameter the gradient."""
        return gradient.is_parameters() and id(gradient.parameter) not in self.dropped

    def close(self, *, may_wait: bool = True) -> None:
        """Destroys the graph, after its work is done if that may be waited for."""
        with GraphGradient.recounted(self.state.parameters):
            self.graph.close(may_wait=may_wait)
            self.left = []
            self.gradients_before.close()
            self.replaced.close()
            self.overwritten.gradients.clear()

    def end_capture(self, *, undo: bool) -> None:
        """After the first replay. If that was refused, what the capture has done in Python is undone."""
        assert self.before is not None
        snapshot, gradients = self.before
        self.before = None
        with GraphGradient.recounted(self.state.parameters):
            if undo:
                snapshot.restore()
                gradients.restore()
            gradients.release()

    def take_unseen_writes(self, batch: Sequence[Tensor], carried: Sequence[Tensor]) -> CaptureRefused | None:
        """After the first replay: writes to inputs that no version counts, as those through ``.data``.

        They are done to these inputs, too. No later replay would do them.
        """
        inputs = [*batch, *carried]
        unseen = [each for each in self.sources if each.arg not in self.written and not each.is_as_in(inputs)]
        if not unseen:
            return None
        copy_all([each.source(inputs).data for each in unseen], [each.target for each in unseen])
        kind = "an argument" if unseen[0].arg < len(batch) else "a tensor that steps or the loop replace"
        return CaptureRefused(f"the step writes to {kind}, such as through .data", "clone it first")

    def replay(self, batch: Sequence[Tensor], carried: Sequence[Tensor]) -> Any:
        """Runs the step again, with the tensors of a batch and those to carry in. `ReplayRefused` if nothing of it
        happened.
        """
        results: list[Any] = [None] * (self.structure.num_leaves + sum(tree.num_leaves for _, tree in self.carried))
        try:
            targets = self.outputs.allocate(results)
        except torch.OutOfMemoryError as error:
            raise ReplayRefused(error) from error
        self.gradients_before.copy()
        self.replaced.copy_back(carried)
        inputs, scalars = [*batch, *carried], self.state.kernel_numbers.scalars() or ()
        targets = [*targets, *map(inputs.__getitem__, self.written)]
        self.graph.replay([each.source(inputs) for each in self.sources], targets, scalars)
        if self.collectives is not None:
            self.collectives.count_replay()
        self.outputs.derive(results, [*inputs, *self.state.memory])
        for put, tree in reversed(self.carried):
            results, tensors = results[: -tree.num_leaves], results[-tree.num_leaves :]
            put(tree_unflatten(tensors, tree))
        for read, number in self.added:
            for at in place_of_read(read):
                at.put(at.get() + number)
        for each in self.left:
            if each.parameter.grad is not each.tensor:
                each.parameter.grad = each.tensor
        for parameter in self.without_gradient:
            parameter.grad = None
        if touched := [*self.touched, *(inputs[i] for i, is_new in self.written.items() if is_new)]:
            torch.autograd.graph.increment_version(touched)
        return tree_unflatten(results, self.structure)


class _Body:
    """The function as a pool captures it, and what it shows of the step."""

    def __init__(
        self,
        fn: Callable[..., Any],
        batch: Batch,
        buffers: list[Tensor],
        state: StepState,
        calls: Calls,
        storages: OriginalStorages,
    ) -> None:
        self._originals = storages
        self._fn, self._batch, self._buffers, self._state, self._calls = fn, batch, buffers, state, calls
        carried = buffers[len(batch.tensors) :]
        aliases = {id(buffer): buffer.detach() for buffer in carried}
        self._aliases = [aliases[id(buffer)] for buffer in carried]  # what is carried in
        self._buffer_of = {id(alias): buffer for alias, buffer in zip(self._aliases, carried)}
        self.carried: list[tuple[Callable[[Any], object], Any]] = []  # what is carried out
        self.added: list[tuple[Read, int]] = []
        self._found_or_left: list[Any] = []  # in places of what is carried, and in lists
        self._stay: list[Tensor] = []  # in places of what is carried
        self.written: dict[int, bool] = {}  # see `StepRecording`
        self.structure: Any = None
        self.addresses: Mapping[int, str] = {}
        self.outputs: Outputs | None = None
        self.results: frozenset[int] = frozenset()  # where their memory is

    def run(self, backend: Backend, copier: Any) -> list[Any]:
        clear_stack()  # nothing but the step itself runs between this and its kernels
        first, views = len(self._batch.tensors), self._originals.views
        copied = [buffer for i, buffer in enumerate(self._buffers) if i - first not in views]
        self._calls.watch(copied, carries=len(self._buffers) > first)
        versions = [*map(version, self._buffers)]
        attributes = self._state.attributes
        lists = [_Grown.of(*each, self._state.device.type) for each in self._state.lists().values()]
        numbers = [*self._state.numbers().values()]
        watched = nullcontext() if attributes is None else attributes.watched(self._state.objects)
        try:
            with (
                hidden_capture(is_constant),
                known_to_be_positive(self._state.averages),
                self._calls.told_of_collectives(backend.captured_nodes),
                self._carry() as left,
                before_backwards(filter(has_history, self._state.tensors), self._refuse_older_graph),
                watched,
            ):
                result, arguments = self._batch.call(self._fn, self._buffers)
                leaves, structure = tree_flatten(result, is_size)  # a dictionary may get its value back
        finally:
            self._calls.end()
        for each in self._calls.pending.values():  # on a GPU, its memory would be used again while it runs
            problem = f"a collective is not waited for in the step{each.line}"
            raise CaptureRefused(problem, "call wait() of what it returns")
        device = self._state.device
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if not is_plain(leaf):
                    raise CaptureRefused(
                        f"a result is a {type(leaf).__name__}, not a plain tensor", "return a plain one"
                    )
                if leaf.device != device or not has_storage(leaf):
                    raise CaptureRefused(
                        f"a result is a {leaf.layout} tensor on {leaf.device}; the graph is on {device}"
                    )
                if (given := vars(leaf)) and not leaf.requires_grad:  # those of one with a history are dropped
                    problem = f"a result has the attribute {next(iter(given))}"
                    raise CaptureRefused(f"{problem}, which no replay would give it", "return its value")
            elif not isinstance(leaf, ATOMS):
                raise CaptureRefused(f"a result is a {type(leaf).__name__}", "return tensors")
        self.structure = structure
        self.addresses = {**self._captured_addresses(backend), **self._calls.communicated}
        left += self._take_appended(lists)
        self._take_added(numbers)
        leaves += left
        self._note_written(versions)
        self._originals.copy_back(leaves, self._stay)  # before aliases go, whose identities its tensors could get
        self._stay.clear()
        self._refuse_shared_containers(arguments)
        if _storages(leaves[structure.num_leaves :]) & _storages(each.grad for each in self._state.parameters):
            raise CaptureRefused(*_IS_GRADIENT)
        self.results = _storages(leaves[: structure.num_leaves])
        results = {id(leaf): self._to_leave(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        return [results.get(id(leaf), leaf) for leaf in leaves]

    def _note_written(self, versions: Sequence[int]) -> None:
        """What is carried and stays is copied back: no version says what is written through ``.data``."""
        first, views, same = len(self._batch.tensors), self._originals.views, same_tensors(self._buffers)
        stay = {id(self._buffer_of[id(alias)]) for alias in self._stay}
        for i, (buffer, then) in enumerate(zip(self._buffers, versions)):
            if id(buffer) in stay and is_whole(buffer) and not (i in same or i - first in views):
                self.written[i] = version(buffer) != then or address_if_any(buffer) in self._calls.written
        carried = self._originals.others(self._state.carried_tensors())
        if self.written and not _extents(carried).are_apart:
            raise CaptureLater(*KEPT_SHARES)

    def _refuse_older_graph(self, tensor: Tensor) -> None:
        name = self._state.name_of(tensor)
        problem = f"the backward goes on into the history that {name} has from before the step, where hooks may be"
        raise CaptureRefused(f"{problem} that are not compared", "detach it, or make it in the step")

    def _to_leave(self, tensor: Tensor) -> Tensor:
        """What a replay gives for a tensor: one object for each, since Python may ask whether two are one.

        A view of what is carried is one of its buffer, so that a replay gives a view of what is there then.
        """
        if tensor.requires_grad:
            return tensor.detach()
        buffer, of_base = (self._buffer_of.get(id(each)) for each in (tensor, autograd_base(tensor)))
        if buffer is not None or of_base is None:
            return tensor if buffer is None else buffer
        offset = int(tensor.storage_offset())
        view = tracked_view(of_base, tensor.dtype, offset, tensor.size(), tensor.stride())
        return read_as(view, conj=tensor.is_conj(), neg=tensor.is_neg())

    def _captured_addresses(self, backend: Backend) -> dict[int, str]:
        try:
            return backend.captured_addresses()
        except RuntimeError as error:
            if (raised := self._calls.raised) is None:
                raise
            raise CaptureRefused(f"{raised}, and the step has caught it") from error

    @contextmanager
    def _carry(self) -> Iterator[list[Tensor]]:
        """Has the step find buffers in the places of what is carried. Yields a list that gets what it leaves there."""
        left: list[Tensor] = []
        carried, values = self._state.carried, self._state.carried_values()
        aliases = iter(self._aliases)
        buffers = [[*islice(aliases, len(value.tensors))] for value in values]
        self._aliases.clear()  # one that the step keeps elsewhere would be found
        stand_ins = [value.with_tensors(tensors) for value, tensors in zip(values, buffers)]
        places = [[*map(place_of, tensors)] for tensors in buffers]
        had = [each.place.get() for each in carried]
        for each, value in zip(carried, stand_ins):
            each.place.put(value)
        yield left
        there = [each.place.get() for each in carried]  # two may be one: ``module.x`` is a global
        for (label, place, _), before, then, value, left_there, tensors, were_at in zip(
            carried, had, values, stand_ins, there, buffers, places
        ):
            if any(map(is_changed, tensors, were_at)):
                problem = f"the step changes the tensor that it finds in {label}{self._state.line_of(label)}"
                raise CaptureRefused(problem, TAKE_ANOTHER)
            now, is_given = Carried.of(left_there, self._state.device.type), left_there is value
            place.put(before)
            self._found_or_left += [value] if is_given else [value, left_there]
            if is_given and all(map(is_, tree_leaves(value), tensors)):
                self._stay += tensors
                continue
            if is_given or now is None or not now.is_like(then):
                raise CaptureRefused(f"the step leaves something else in {label} than a new tensor like the one before")
            self.carried.append((place.put, now.tree))
            left += now.tensors

    def _take_appended(self, lists: Iterable[_Grown]) -> list[Tensor]:
        """What the step has appended to lists, which get back what they had. See Note [What only grows] in reads.py."""
        left: list[Tensor] = []
        for each in lists:
            read = each.read
            if not (appended := each.take_appended()):
                continue
            if (carried := Carried.of(appended, self._state.device.type)) is None:
                fix = "detach them, or return them, and append them outside of the step"
                raise CaptureRefused(f"the step appends {_OTHERS} to {read.label} ({read.line})", fix)
            self._found_or_left += appended
            self.carried.append((partial(_extend, read.get), carried.tree))
            left += carried.tensors
        return left

    def _take_added(self, numbers: Iterable[tuple[Read, int]]) -> None:
        """What the step has added to numbers, which get back what they were."""
        for read, before in numbers:
            if type(now := read.get()) is not int:
                raise CaptureRefused(f"the step makes {read.label} a {type(now).__name__} ({read.line})")
            for at in place_of_read(read):
                at.put(before)
            self.added.append((read, now - before))

    def _refuse_shared_containers(self, arguments: Any) -> None:
        """`CaptureRefused` for a list or a dictionary that is in two places: a replay makes one for each."""
        seen: set[int] = set()
        for each in _containers([arguments, *self._found_or_left]):
            if id(each) in seen or self._state.has_holder(each):
                problem = f"the step keeps a {type(each).__name__} in two places, or one that was there before"
                fix = f"keep a copy, such as {type(each).__name__}(metrics)"
                raise CaptureRefused(f"{problem}, and a replay would make two of it", fix)
            seen.add(id(each))
        self._found_or_left.clear()

    def copied_out(self, pool: Pool, copied: Iterable[CopiedInput], results: Sequence[Any]) -> list[Tensor]:
        tensors = [*self._buffers, *self._state.memory]
        inputs = [AliasedInput.of(i, tensor) for i, tensor in enumerate(tensors) if has_storage(tensor)]
        self.outputs = Outputs([*results], inputs, [True] * len(results), self._state.device, pool.alias)
        buffers = {each.arg: each.buffer for each in copied}
        return [*self.outputs.sources(), *map(buffers.__getitem__, self.written)]

    def disowned(self) -> Outputs:
        """The outputs, without their memory."""
        assert self.outputs is not None
        self.outputs.disown()
        return self.outputs


@dataclass(frozen=True, slots=True)
class _Grown:
    """A list or a deque to which a captured step appends.

    A deque with a bound drops its first items. So it has others for the time of the capture, which are of the same
    memory, and which the step cannot append: what is new is known then.
    """

    read: Read
    value: Any
    had: list[Any]
    has: list[Any]  # for the time of the capture

    @classmethod
    def of(cls, read: Read, value: Any, device_type: str) -> _Grown:
        has = had = [*value]
        if had and getattr(value, "maxlen", None) is not None:
            if (carried := Carried.of(had, device_type)) is None:
                raise CaptureRefused(
                    f"{read.label} ({read.line}) has {_OTHERS}", "empty it before the step is captured"
                )
            has = carried.with_tensors([each.detach() for each in carried.tensors])
            _put_in(value, has)
        return cls(read, value, had, has)

    def take_appended(self) -> list[Any]:
        """What was appended. It is taken out again."""
        now, bound = [*self.value], getattr(self.value, "maxlen", None)
        stays = len(self.has)
        if bound is not None:
            known = {*map(id, self.has)}
            stays = sum(id(each) in known for each in now)
        is_full = stays == len(self.has) or len(now) == bound
        if len(now) < stays or not is_full or not all(map(is_, now, self.has[len(self.has) - stays :])):
            raise CaptureRefused(f"the step changes what is in {self.read.label} ({self.read.line})")
        _put_in(self.value, self.had)
        return now[stays:]


def _containers(value: Any) -> Iterator[Any]:
    """The lists and dictionaries in the values of a tuple, a list or a dictionary, at any depth."""
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, (dict, list, deque)):
            yield each
        if isinstance(each, (dict, list, deque, tuple)):
            yield from _containers(each)


def _put_in(value: Any, items: Iterable[Any]) -> None:
    value.clear()
    value.extend(items)


class CallsMore(CaptureLater):
    """See Note [Functions that no bytecode names] in calls.py."""


@dataclass(frozen=True, slots=True)
class StepCapture:
    """One capture of a step.

    Args:
        others: the recordings that use the arena already.
        check: is called when the graph has its memory; raises `CaptureRefused` if that is too much, or `RanksDiffer`.
        calls: is told of the functions of the user's that run.
        needs: bytes of the pool, at least.
        is_second: whether there is a recording for the call but for the memory of gradients.
    """

    fn: Callable[..., Any]
    batch: Batch
    state: StepState
    backend: Backend
    arena: Arena
    others: Sequence[StepRecording]
    check: Callable[[], None]
    calls: Calls
    needs: int
    is_second: bool

    def run(self) -> StepRecording:
        """Records a call of ``fn``, which runs nothing.

        Raises:
            CaptureRefused: no replay would be right, or the graph takes too much memory.
            RanksDiffer: another rank does not capture it.
            Exception: what ``fn`` raised.

        In both cases everything is as before: see Note [Effects once] in snapshot.py.
        """
        if self.state.device.type != "cpu":  # garbage may be in the graph's memory, or keep gradients on another stream
            gc.collect()
        suspects: list[Tensor] = []
        said: set[str] = set()
        with ExitStack() as moves:
            for _ in range(_ATTEMPTS):
                try:
                    return self._attempt()
                except OtherMemoryUsed as refused:
                    refusal = without_frames(refused)
                if any(tensor is each for tensor in refusal.tensors for each in suspects):
                    break  # it is where the kernels' arguments say again
                if not refusal.tensors and str(refusal) in said:
                    break  # nothing can be moved, so nothing will be different
                said.add(str(refusal))
                suspects += refusal.tensors
                moves.enter_context(moved(refusal))
        raise refusal

    def _attempt(self) -> StepRecording:
        state = self.state
        self.calls.begin(state.undos_of, state.parameters, state.kernel_numbers)
        state.guard_tensors(self.batch.tensors)
        _refuse_gradients(state)
        # A step that sets a generator sets it in the capture, too. Draws in a capture move no generator of CUDA.
        counted = GraphGradient.recounted(state.parameters)
        with counted, fork_rng([state.device], enabled=state.device.type != "cpu"):
            to = None if self.others else self.arena.pool(state.device)
            storages = OriginalStorages(state, state.carried_tensors(), self.backend)
            snapshot = state.snapshot()
            before = GradientsBefore(state.parameters, self.backend, self.calls, to, self.needs)
            try:
                with torch.autograd.set_multithreading_enabled(False):  # each thread has a workspace of cuBLAS
                    recording = self._record(before, storages)
                self.check()
            except BaseException:
                snapshot.take(self.calls.undos)
                snapshot.restore()
                before.restore()
                before.release()
                for leaf, gradient in self.calls.gradients.items():
                    leaf.grad = gradient
                raise
            finally:
                self.calls.end()
                self.calls.gradients.clear()
        snapshot.take(self.calls.undos)
        recording.before = snapshot, before
        pool = self.arena.pool(state.device)
        recording.left_behind = [weakref.ref(each) for each in state.tensors_in_holders() if _is_in(each, pool)]
        state.release()
        for known in (*recording.left, *filter(None, recording.gradients_before.copied)):
            known.count()
        recording.apart.update(GraphGradient.all())
        return recording

    def _record(self, before: GradientsBefore, storages: OriginalStorages) -> StepRecording:
        state, batch = self.state, self.batch
        pool = self.arena.pool(state.device)
        inputs = self._inputs(before, storages)
        memory = {at: tensor for at, tensor in memory_of_tensors(state.device).items() if at not in before.moved}
        copied, buffers = storages.place(pool, batch.tensors, inputs)
        versions = [version(tensor) for tensor in (*state.with_memory, *buffers)]
        places = state.places_of_tensors()
        body = _Body(self.fn, batch, buffers, state, self.calls, storages)
        outside = states_outside(state.device)
        targets = [each.target for each in copied]
        numbers = self.calls.numbers
        numbers.check_facts(lambda: state.again().facts)
        graph = numbers.captured(pool, partial(body.run, self.backend), targets, partial(body.copied_out, pool, copied))
        _refuse_gradients(state)
        outputs = body.disowned()
        touched = self._touched(versions, buffers, body.written)
        taken = numbers.taken(touched, graph.missing)
        self._refuse_what_python_did(outside, places)
        missing = self._what_replays_would_miss()
        addresses = Addresses(body.addresses)
        own = [*graph.tensors(), *outputs.sources(), *buffers, *targets, *(each.buffer for each in copied)]
        known = [*state.memory, *inputs, *(each if each is None else local_tensor(each) for each in before.memory)]
        with counting, _first(missing):
            try:
                refuse_other_memory(addresses, known, [*own, *self._held_elsewhere()], state.device, pool, memory)
            except CaptureRefused as error:  # whose frames hold all tensors
                raise without_frames(error) from None
        tensors, expected = [parameter.grad for parameter in state.parameters], before.expected(addresses)
        _refuse_results(body.results, tensors, expected)
        left = self._left(expected, before.are_graphs)
        kept = {id(each) for each in expected if isinstance(each, Tensor)}
        getters = kernel_settings(Settings.ALL), get_cache_token, *settings_of_numpy().values()
        return StepRecording(
            layout=batch.layout,
            arena=self.arena,
            state=state,
            graph=graph,
            outputs=outputs,
            structure=body.structure,
            sources=copied,
            gradients_before=ExpectedGradients(state.parameters, expected, before.are_graphs, self.is_second),
            left=left,
            without_gradient=[p for p, g, e in zip(state.parameters, tensors, expected) if g is None and e is not None],
            overwritten=Overwritten(each for each in left if id(each.tensor) not in kept),
            dropped=frozenset(id(p) for p, each in zip(state.parameters, expected) if each is ANY or each is THERE),
            apart=weakref.WeakSet(),
            touched=touched,
            numbers=taken,
            memory=_extents([*state.memory, *expected]),
            gradient_nbytes=nbytes(g for g in tensors if g is not None and _is_in(g, pool)),
            only_once=missing,
            carried=body.carried,
            written=body.written,
            replaced=storages.replaced(),
            added=body.added,
            communicates=self.calls.groups,
            settings=[*((get, get()) for get in getters), *settings_in(self.calls.of_torch, self.calls.getters)],
        )

    def _left(self, expected: Sequence[Any], are_graphs: Sequence[bool]) -> list[GraphGradient]:
        """The gradients that the step leaves, but those that it has not looked at."""
        found = zip(self.state.parameters, expected, are_graphs)
        return [
            GraphGradient.of(p.grad, p, is_shared=isinstance(before, Tensor) and not is_graphs)
            for p, before, is_graphs in found
            if p.grad is not None and before is not LIKE
        ]

    def _inputs(self, before: GradientsBefore, storages: OriginalStorages) -> list[Tensor]:
        """The tensors of the batch and those that are carried; `CaptureLater` if they share memory with others."""
        carried, memory = self.state.carried_tensors(), _extents([*self.state.memory, *before.memory])
        if (reason := _shared(self.batch, self.state, storages.others(carried), memory)) is not None:
            raise CaptureLater(*reason)
        return [*self.batch.tensors, *carried]

    def _touched(self, versions: Sequence[int], buffers: Sequence[Tensor], written: Collection[int]) -> list[Tensor]:
        """The tensors of the state that the step writes to; `CaptureRefused` if it writes to an argument.

        Args:
            versions: before the step, of the state's tensors and of the buffers that stand for the arguments.
            written: positions of what replays copy back.
        """
        state, tensors = self.state, self.state.with_memory
        has_changed = [version(tensor) != then for tensor, then in zip((*tensors, *buffers), versions)]
        names = [each.label for each, value in zip(state.carried, state.carried_values()) for _ in value.tensors]
        found = (None,) * len(self.batch.tensors)
        copied_back = {id(buffers[i]) for i in written}
        others = [id(buffer) not in copied_back for buffer in buffers]
        for label in compress(compress([*found, *names], others), compress(has_changed[len(tensors) :], others)):
            if label is None:
                raise CaptureRefused("the step writes to an argument", "clone it first")
            fix, line = "make a new one, as in x = x + 1 for x += 1", state.line_of(label)
            problem = f"the step writes to the tensor that it finds in {label}{line}, and puts another there"
            raise CaptureRefused(problem, fix)
        found_at = map(address_if_any, compress(buffers, others))
        for line in (self.calls.written[at] for at in found_at if at in self.calls.written):
            raise CaptureRefused(f"a collective writes to an argument of the step{line}", "clone it first")
        counters = {id(each.n_averaged) for each in state.averages}  # their versions say who else writes to them
        return [each for each, changed in zip(tensors, has_changed) if changed and id(each) not in counters]

    def _refuse_what_python_did(self, outside: Mapping[str, Any], places: Sequence[Any]) -> None:
        """`CaptureRefused` if the call has done or changed what is not part of the state, and no replay would.

        Args:
            outside: `states_outside` before the call.
            places: where tensors of the state were.
        """
        state = self.state
        if (moved := state.moved_since(places)) is not None:
            raise CaptureRefused(f"Python changes in each step: {moved.problem}", moved.fix)
        if self.calls.objection is not None:
            raise CaptureRefused(*self.calls.objection)
        for event, line in self.calls.events.values():
            if sys.getrefcount(event) > _OWN_REFERENCES and is_of_capture(event):
                problem = f"the step records an event that is used outside of it{line}"
                raise CaptureRefused(f"{problem}, and no replay would", "make it with torch.cuda.Event(external=True)")
        self._refuse_change(outside, states_outside(state.device))

    def _what_replays_would_miss(self) -> CaptureRefused | None:
        """Whether the call reads more than the state has, or has changed the state. See Note [Captures of one call]."""
        state = self.state
        if state.attributes is not None and self.calls.looks_up_unseen:
            state.attributes.add_all()
        self.calls.find_functions()
        try:
            if (label := state.first_unknown([*self.calls.found.values()])) is not None:
                raise CallsMore(f"the step reads more than was compared, such as {label}")
            self.calls.undos.clear()  # what the functions that are known may change is in the state's snapshot
            self._refuse_change(state.facts, state.again().facts)
        except CaptureRefused as refused:
            if self.calls.groups:
                raise
            self._refuse_read_numbers()
            return without_frames(refused)
        return None

    def _refuse_read_numbers(self) -> None:
        """`NumbersRead` if what has run may have found sentinels by way of what nobody knew of."""
        called = [*self.calls.found.values()]
        self.calls.numbers.check_facts(lambda: self.state.with_called(called).facts)

    def _refuse_change(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        if (change := difference(before, after)) is not None:
            fix = fix_of_change(change, self.state.facts, {}, in_step=True)
            if not fix:
                raise CaptureLater(f"{change}, in the step")
            raise CaptureRefused(f"Python changes in each step: {change}{self.state.line_of(change.label)}", fix)

    def _held_elsewhere(self) -> list[Tensor]:
        """Tensors that may be in the arena, besides those of the new graph."""
        held = [
            *GraphGradient.tensors(),
            *(local_tensor(parameter.grad) for parameter in self.state.parameters if parameter.grad is not None),
            *self.state.tensors_in_holders(),
        ]
        for other in self.others:
            held += [*other.graph.tensors(), *other.outputs.sources(), *other.buffers(), *alive(other.left_behind)]
            held += map(local_tensor, other.gradients_before.tensors)  # which a graph may have left that is gone
        return held


@contextmanager
def _first(missing: CaptureRefused | None) -> Iterator[None]:
    """Raises `CallsMore` for what is refused inside: functions that nobody knew of may name what makes it right."""
    try:
        yield
    except CaptureRefused:
        if isinstance(missing, CallsMore):
            raise missing from None
        raise


def _extend(get: Callable[[], Any], items: list[Any]) -> None:
    get().extend(items)


def _refuse_gradients(state: StepState) -> None:
    """`CaptureRefused` if one is sparse, or no plain tensor."""
    for parameter in state.parameters:
        gradient = None if parameter.grad is None else local_tensor(parameter.grad)
        if not is_plain(gradient):
            raise CaptureRefused(
                f"a gradient is a {type(gradient).__name__}, not a plain tensor", "put a plain one there"
            )
        if gradient is not None and not has_storage(gradient):
            name = state.name_of(parameter)
            problem = f"the gradient of {name} is a tensor with the layout {gradient.layout}, which has no address"
            raise CaptureRefused(problem + state.line_of(name), DENSE)


def _refuse_results(results: frozenset[int], gradients: Sequence[Tensor | None], expected: Sequence[Any]) -> None:
    """`CaptureRefused` if a gradient is among the results, and a later step does not drop it before it adds to it."""
    are_kept = [not (each is ANY or each is THERE) for each in expected]
    if results & _storages(compress(gradients, are_kept)):
        raise CaptureRefused(*_IS_GRADIENT)


def _shared(
    batch: Batch, state: StepState, carried: Sequence[Tensor], memory: Extents, *, writes: bool = False
) -> SkipReason | None:
    """What is, or shares memory with, something else that the step uses.

    Args:
        writes: whether something that is carried is copied back. Then no two tensors of it may share memory.
    """
    kept = _extents(carried)
    if memory.overlap(kept):
        return KEPT_SHARES
    if (same := next(filter(state.has_holder, batch.containers.values()), None)) is not None:
        problem = f"an argument is a {type(same).__name__} that the step reads from outside as well"
        return SkipReason(problem, COPY_CONTAINER)
    passed = _extents(batch.tensors)
    if memory.overlap(passed) or kept.overlap(passed):
        return _SHARES
    return KEPT_SHARES if writes and not kept.are_apart else None


def _storages(tensors: Iterable[Any]) -> frozenset[int]:
    """Where those of the tensors among the values begin."""
    return frozenset(address_if_any(local_tensor(each)) for each in tensors if isinstance(each, Tensor)) - {0}


def _extents(tensors: Iterable[Any]) -> Extents:
    """The memory of the tensors among the values, each of which counts once."""
    once = {id(each): each for each in tensors if isinstance(each, Tensor)}
    return Extents(map(local_tensor, once.values()))


def _is_in(tensor: Tensor, pool: Pool) -> bool:
    return any(start <= address_if_any(local_tensor(tensor)) < stop for start, stop in pool.ranges())
