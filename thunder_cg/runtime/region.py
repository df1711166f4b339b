"""One region of a program: its ops, and what it does in a call. See Note [Four modes of a call]."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from thunder_cg.analysis.coalescing import described
from thunder_cg.analysis.ops import Op
from thunder_cg.analysis.partition import Region
from thunder_cg.analysis.region_io import RegionIO
from thunder_cg.analysis.sources import users_level
from thunder_cg.compat.autograd import backward_keeps_graph
from thunder_cg.compat.settings import saved_tensors_hooks
from thunder_cg.compat.tensors import storage_id
from thunder_cg.compat.torch import IS_PROFILING, profiler_state
from thunder_cg.errors import CaptureError, CaptureRefused, DisagreementWarning, RanksDiffer, ReplayRefused, SkipReason
from thunder_cg.runtime import skip_reasons
from thunder_cg.runtime.call import Call, Mode
from thunder_cg.runtime.counts import Stats
from thunder_cg.runtime.early_outputs import CopiedEarly, EarlyCopier
from thunder_cg.runtime.failures import failing_op, is_out_of_memory, note, sentence
from thunder_cg.runtime.inputs import detached
from thunder_cg.runtime.lent import Lent
from thunder_cg.runtime.lent_results import Lending
from thunder_cg.runtime.outputs import AliasedInput, Outputs
from thunder_cg.runtime.recording import RegionGraph
from thunder_cg.runtime.region_capture import RegionCapture
from thunder_cg.runtime.tensors import (
    address_if_any,
    is_leaf_with_grad,
    is_plain,
    is_sparse,
    layout,
    refuses_writes,
    same_tensors,
)

if TYPE_CHECKING:
    from thunder_cg.verify.verifier import Disagreement

_MAX_ATTEMPTS = 3  # warm-ups and captures that may fail for a reason that can pass, such as too little memory
_SAME_CALLS = 'make the same calls on all ranks, or capture all but the collectives with capture_collectives="never"'
_ZERO_GRAD = "call zero_grad() before one rank calls alone: it held gradients, and so has to capture anew; or "


class RuntimeRegion:
    """One region of a program: its function, and its part in every recording.

    Args:
        planned: its place in the plan.
        ops: its ops.
        make_function: makes a function that runs the ops on a list of inputs, which it empties, and an `EarlyCopier`;
            whether with each op in a range of a profile, and whether it may write over what is ``donated``.
        hash_function: for verification: runs the ops too, but returns the hashes of their values, in order.
        donated: inputs that only this region needs, if the call owns them.
    """

    def __init__(
        self,
        name: str,
        planned: Region,
        ops: Sequence[Op],
        io: RegionIO,
        make_function: Callable[[bool, bool], Callable[..., Sequence[Any]]],
        hash_function: Callable[..., Sequence[Any]] | None = None,
        donated: Set[str] = frozenset(),
    ) -> None:
        self.name, self.planned, self.ops, self.io = name, planned, tuple(ops), io
        self._make_function, self.hash_function, self._donated = make_function, hash_function, donated
        self._functions = {(False, False): make_function(False, False)}
        self.device = torch.device(planned.device)
        self.input_names = tuple(each.name for each in io.inputs)
        self.written = frozenset(i for i, each in enumerate(io.inputs) if each.written)
        self.are_copied_out = [each.copied_out for each in io.outputs]
        self.names_in_pool = frozenset(each.name for each in io.outputs if not each.copied_out)  # of results
        copied_out = {each.name for each in io.outputs if each.copied_out}
        # Results that stay in the pool, and are copied out besides.
        self._stay_and_copied = [i for i, e in enumerate(io.outputs) if not e.copied_out and e.name in copied_out]
        self.communicates = any(op.communicates for op in ops)
        self.is_always_verified = bool(io.scalars)  # before a recording of it counts: see Note [Kernel scalars]
        self.index = 0  # in the program
        self.describe: Callable[[str], str] = "input {!r}".format  # says of a value of the trace what the user calls it
        self.not_leaves: list[int] = []  # inputs that PyTorch refuses to write where they are leaves that require grad
        self.aliased_in_pool: list[int] = []  # inputs in the pool that results may be views of
        self.stats = Stats()
        self.failure: SkipReason | None = None  # why its last capture failed; without a fix, the next may succeed
        self.is_deselected = False  # whether it does not pay, which `failure` says then
        self.failed_attempts = 0  # warm-ups and captures that failed
        self.stays_eager = False  # whether no later call warms it up or captures it
        self.lacks_ranks = False  # whether that is because another rank did something else, which may pass
        self._warm: set[int] = set()  # `_layouts` of its warm-ups
        self._warmed_late = 0  # captures in which it was warmed up instead
        self.disagreement: Disagreement | None = None  # of its graph with its ops: it is quarantined
        self.remark: str | None = None  # what verification found besides

    @property
    def function(self) -> Callable[..., Sequence[Any]]:
        """Runs the ops. While a profiler is active, each is in a range, and so are the nodes that a capture makes."""
        return self._function(donates=False)

    def _function(self, *, donates: bool) -> Callable[..., Sequence[Any]]:
        which = bool(profiler_state[IS_PROFILING]), donates
        if which not in self._functions:
            self._functions[which] = self._make_function(*which)
        return self._functions[which]

    @property
    def why_eager(self) -> SkipReason:
        """Of a region without a graph: why its ops run eagerly, as calls are counted."""
        if self.is_deselected:
            return skip_reasons.DESELECTED
        if self.disagreement is not None:
            return SkipReason(f"{self.name} disagrees with its ops", self.disagreement.reason.fix)
        return self._failed("captured")

    def _failed(self, what: str) -> SkipReason:
        assert self.failure is not None
        return SkipReason(f"{self.name} could not be {what}: {self.failure.problem}", self.failure.fix)

    def run(self, call: Call, *args: Any) -> Sequence[Any]:
        """What the region does in a call, with its inputs: what stands behind its symbol in a forward."""
        return self.run_list(call, args)

    def run_list(self, call: Call, args: Sequence[Any]) -> Sequence[Any]:
        """The same in a backward: an eager run empties the list, so that it can free what it has read."""
        if call.selection is not None:
            return call.selection.run(self, call, args)
        return self.run_untimed(call, args)

    def run_untimed(self, call: Call, args: Sequence[Any]) -> Sequence[Any]:
        """`run_list` without a clock."""
        if call.mode is Mode.REPLAY:
            assert call.trace is not None
            graph = call.trace.graphs[self.index]
            if graph is not None and self.disagreement is not None:  # found while the call was in flight
                call.run_eagerly(SkipReason(f"verify= found the graph of {self.name} wrong"), strict=False)
            elif graph is not None:
                if graph.admits(args):
                    verifies = call.verifies and not self.communicates
                    try:
                        results = self._verify(call, graph, args) if verifies else self._replay(call, graph, args)
                        self.stats.replays += 1
                        return results
                    except ReplayRefused as error:
                        problem = f"{self.name} could not be replayed: {sentence(error)}"
                        call.run_eagerly(SkipReason(problem), strict=not self._is_retired(call, graph, problem))
                    except Exception:
                        call.program.count_raised(is_counted=True)
                        raise
                else:
                    assert call.recording is not None
                    problem = "what an eager operator made is not laid out as when it was captured"
                    is_retired = call.program.pair.retire(call.recording, problem)
                    call.run_eagerly(SkipReason(f"{self.name}: {problem}"), strict=not is_retired)
        elif any(refuses_writes(args[i]) for i in self.written):
            call.run_eagerly(skip_reasons.WRITTEN_OUTSIDE, strict=False)  # which raises, as below
        elif any(is_leaf_with_grad(args[i]) for i in self.not_leaves):
            # Which raises, where a detached leaf would be written.
            call.run_eagerly(skip_reasons.WRITTEN_LEAF, strict=False)
        elif call.mode is Mode.CAPTURE:
            if not self.stays_eager:
                return self._capture(call, args)
            self._refuse(call, "before", self.failure.problem if self.failure is not None else "")
            self._raise_if_strict(call)
        elif call.mode is Mode.WARMUP and not self.stays_eager:
            return self._warm_up(call, args)
        return self._run_eagerly(call, args)

    def _is_retired(self, call: Call, graph: RegionGraph, problem: str) -> bool:
        """Of a graph that refused a replay: whether the next call captures another one, with results elsewhere."""
        assert call.recording is not None
        return bool(graph.lent_results) and call.program.pair.retire(call.recording, problem)

    def _replay(self, call: Call, graph: RegionGraph, args: Sequence[Any]) -> Sequence[Any]:
        results = graph.replay(args)
        if self.communicates and call.program.collectives is not None:
            call.program.collectives.note_launch()
        return results

    def _verify(self, call: Call, graph: RegionGraph, args: Sequence[Any]) -> Sequence[Any]:
        """A replay that is compared with an eager run, which wins."""
        outcome = call.program.verifier.replay(self, graph, args)
        self.stats.verified += outcome.compared
        self.remark = outcome.remark or self.remark
        if not isinstance(call.program.options.verify, int):
            graph.check = None
        results = outcome.results
        if outcome.disagreement is not None:
            self.disagreement, self.stays_eager = outcome.disagreement, True
            self.failure = outcome.disagreement.reason
            call.program.quarantine(call, self.index)
        if results is None:
            results = self._run_eagerly(call, args)
        if (found := outcome.disagreement) is not None:  # last, since a filter may make an error of the warning
            self._raise_if_strict(call)
            message = f"{self.name} is eager from now on: {found.reason}"
            warnings.warn(message, DisagreementWarning, stacklevel=users_level())
        return results

    def _raise_if_strict(self, call: Call) -> None:
        """Raises with ``strict=True``, because the region could not be captured, or was and is quarantined."""
        if call.program.options.strict and (self.disagreement is not None or not self.is_deselected):
            assert self.failure is not None
            problem, fix = self.failure
            raise CaptureError(
                f"{call.program.label}, {self.name}", problem, fix or "deny the operator with deny=[...]"
            )

    def leave_eager(self, as_graph: float, eagerly: float, *, is_whole: bool) -> None:
        """Has later calls run the ops, because that takes less time.

        Args:
            as_graph, eagerly: microseconds.
            is_whole: whether it is its whole trace.
        """
        self.is_deselected = self.stays_eager = True
        fix = "" if is_whole else "remove what splits its trace, since larger regions pay more, or "
        fix += 'capture it with select="all"'
        self.failure = SkipReason(f"{as_graph:,.1f} µs as a graph, {eagerly:,.1f} µs eagerly", fix)

    # Eager runs and warm-ups

    def _run_eagerly(self, call: Call, args: Sequence[Any]) -> Sequence[Any]:
        """Runs the region's ops. A result that is to be copied out is no view of the arena's memory."""
        self.stats.eager_runs += 1
        function, owners = self._function(donates=self._donates_in_step(call, args)), list(args)
        for i in self.in_pool(call, args):
            owners[i] = call.owned[self.input_names[i]]
        held = {_memory(args[i]) for i in self.aliased_in_pool} - {0}
        if isinstance(args, list) and not held:
            args.clear()
        try:
            results = list(function(owners))
        except Exception as error:
            self._name_failing_op(call, error)
            raise
        is_in_step = skip_reasons.is_held_back() and call.why_eager in skip_reasons.HELD_ELSEWHERE
        if is_in_step and saved_tensors_hooks() is None:  # which may keep it; in a capture they are no reason
            call.made |= {output.name: _memory(result) for output, result in zip(self.io.outputs, results)}
        for i in self._stay_and_copied:  # the copy becomes a part of autograd's graph, and what stays does not
            results[i] = results[i].detach()
        if held:
            to_copy = [yes and _memory(result) in held for yes, result in zip(self.are_copied_out, results)]
            if any(to_copy):
                outputs = Outputs(results.copy(), (), to_copy, self.device, torch.Tensor.detach)
                outputs.deliver_owned(results, args)
        self._share_ownership(call, results)
        return results

    def _share_ownership(self, call: Call, results: Sequence[Any]) -> None:
        """What shares memory with a value that the call owns owns it as well."""
        owned = set(map(_memory, call.owned.values())) - {0}
        for output, result in zip(self.io.outputs, results):
            if not output.copied_out and _memory(result) in owned:
                call.owned[output.name] = result

    def _warm_up(self, call: Call, args: Sequence[Any]) -> Sequence[Any]:
        try:
            with call.program.progress(call, "warming up", "warmed up", self):
                return self._run_in_arena(call, args)
        except _NotRun as failed:
            self._fail(call, *failed.args)
        self._raise_if_strict(call)
        call.program.count_fallback(self._failed("warmed up"))
        call.switch_to(Mode.EAGER)  # counted as eager when the warm-up began
        return self._run_eagerly(call, args)

    def _run_in_arena(self, call: Call, args: Sequence[Any]) -> Sequence[Any]:
        """Runs the region's ops with their memory in the arena, and copies results out.

        Where memory runs out, the allocator's cache has been emptied, and the ops may be run again if they have not
        written to what was there before, nor given up memory that they read.

        Raises:
            _NotRun: nothing of it ran.
        """
        began = False

        def function(inputs: list[Any], copier: EarlyCopier) -> Sequence[Any]:
            nonlocal began
            began = True
            return run(inputs, copier)

        run = self.function_in_arena(call, args)
        layouts = self._layouts(call, args)
        may_rerun = not (self.written or self.communicates) and self.io.alive.issuperset(call.owned)
        while True:
            try:
                pool = call.memory.pool(self.device)
                in_pool = self.in_pool(call, args)
                taken = self.take(call, args, in_pool)
                aliased = self.aliased_inputs(taken, in_pool)
                lends = call.mode is Mode.WARMUP and self.lends_results(call)
                lending = Lending(call.memory, pool) if lends else None
                with skip_reasons.held_back(True):  # the allocator would put graphs of what ops call here, too
                    produced = list(pool.warm_up(function, [taken], call.program.may_hold_workspaces))
                break
            except Exception as error:
                if not began:
                    raise _NotRun(error) from error
                if not (may_rerun and isinstance(error, torch.OutOfMemoryError)):
                    self._name_failing_op(call, error)
                    raise
                may_rerun = False
        self.stats.eager_runs += 1
        self._warm.add(layouts)
        return self._deliver(call, args, in_pool, aliased, produced, lending)

    def _layouts(self, call: Call, args: Sequence[Any]) -> int:
        """A hash of what its ops see of their inputs. Not all of it follows from the inputs of the program."""
        inputs = args[: len(self.input_names)]
        # PyTorch makes the seed of an attention, which has no dimensions, on the host, and in a capture on the device.
        seen = [
            (layout(t) if t is None or t.dim() else t.dtype, t is not None and t.requires_grad)
            for t in inputs
            if is_plain(t) and not is_sparse(t)
        ]
        return hash((*seen, *same_tensors(inputs).items(), self._donates(call, args)))

    def _deliver(
        self,
        call: Call,
        args: Sequence[Any],
        in_pool: frozenset[int],
        aliased: Sequence[AliasedInput],
        produced: list[Any],
        lending: Lending | None,
    ) -> Sequence[Any]:
        """The results for the caller: copies of what the ops have ``produced`` in the arena, unless it stays there."""
        pool = call.memory.pool(self.device)
        early = {i: produced[i] for i in range(len(produced)) if isinstance(produced[i], CopiedEarly)}
        for i in early:
            produced[i] = None
        # The memory of other arguments in the arena may be a result's by now.
        borrowed = [
            arg for i, (n, arg) in enumerate(zip(self.input_names, args)) if i not in in_pool or n in self.io.alive
        ]
        borrowed += call.recording.owned.values() if call.recording is not None else ()
        addresses = set(map(_memory, borrowed))

        def may_lend(tensors: list[torch.Tensor]) -> Set[int]:
            own = [tensor for tensor in tensors if _memory(tensor) not in addresses]
            return {*map(storage_id, own)} if lending is None else lending.choose(own)

        lends_gradients = call.mode is Mode.WARMUP and self.lends_gradients(call)
        lends = may_lend if lends_gradients or lending is not None else None
        outputs = Outputs(produced, aliased, self.are_copied_out, self.device, pool.alias, lends)
        results: list[Any] = [None] * len(produced)
        if lending is not None:
            for lent_result in lending.results(outputs.lent, call.program.pair):
                lent_result.hand_out(results)
        elif outputs.lent:
            lent = Lent(outputs.lent, call.program.pair.stop_lending)
            lent.hand_out(results)
            call.lent.append(lent)
        handed_out = outputs.deliver_owned(results, args, addresses)
        call.handed_out |= handed_out
        for i, copied in early.items():
            results[i] = copied.tensor
        for i in outputs.fixed:
            results[i] = produced[i]
            if call.mode is Mode.WARMUP:
                call.owned[self.io.outputs[i].name] = produced[i]
                # What the caller writes to memory that it shares shows in its version, which a backward checks.
                is_shared = _memory(produced[i]) in handed_out
                results[i] = produced[i].detach() if is_shared else pool.alias(produced[i])
        if call.mode is Mode.CAPTURE:  # it runs in every replay, too, so nothing else that it makes has an address
            self._share_ownership(call, results)
        return results

    def lends_results(self, call: Call) -> bool:
        """Whether the caller gets large results in the arena's memory. See Note [Lent results]."""
        return call.program.gives_large and call.program.pair.lends_results and not call.memory.trains

    def lends_gradients(self, call: Call) -> bool:
        """Whether the caller gets gradients in the arena's memory. See Note [Lent gradients]."""
        pair, is_backward = call.program.pair, call.program.kind == "backward"
        may_lend = not (self._stay_and_copied or self.is_always_verified)
        if not (is_backward and may_lend and pair.lends) or call.scratch is not None:
            return False
        if call.mode is Mode.CAPTURE:
            assert call.trace is not None
            return not call.trace.beside
        return not call.memory.waiting_beside(call.token)

    def function_in_arena(self, call: Call, args: Sequence[Any]) -> Callable[..., Sequence[Any]]:
        """What a warm-up or a capture runs. It copies nothing early where results are lent."""
        function = self._function(donates=self._donates(call, args))
        lends = self.lends_gradients(call) or self.lends_results(call)
        return (lambda inputs, copier: function(inputs)) if lends else function

    def _donates(self, call: Call, args: Sequence[Any]) -> bool:
        """Whether its ops may write over what is donated: the call owns it, in memory of its own.

        A comparison with an eager run reads it once more.
        """
        if not self._may_donate(call):
            return False
        owned = {name: arg for name, arg in zip(self.input_names, args) if call.owns(name, arg)}
        count = Counter(_memory(value) for value in call.owned.values()) + Counter(call.handed_out)
        return all(name in owned and count[_memory(call.owned[name])] == 1 for name in self._donated)

    def _donates_in_step(self, call: Call, args: Sequence[Any]) -> bool:
        """The same of a backward that runs eagerly inside of a graphed step, whose graph holds it.

        Autograd alone has what the forward saved, unless the backward is to run again.
        """
        if not (call.made and self._may_donate(call)) or backward_keeps_graph():
            return False
        count = Counter(call.made.values())
        given = [(name, _memory(arg)) for name, arg in zip(self.input_names, args) if name in self._donated]
        return all(call.made.get(name) == address and count[address] == 1 for name, address in given)

    def _may_donate(self, call: Call) -> bool:
        return bool(self._donated) and call.program.options.verify is None and not self.is_always_verified

    def in_pool(self, call: Call, args: Sequence[Any]) -> frozenset[int]:
        """The arguments whose memory is the arena's."""
        return frozenset(i for i, name in enumerate(self.input_names) if call.owns(name, args[i]))

    def take(self, call: Call, args: Sequence[Any], in_pool: frozenset[int]) -> list[Any]:
        """The region's arguments, each the only owner of its memory if nothing after the region needs it.

        Warm-ups and captures see plain tensors where calls have parameters: a fusion that torch.compile guards by the
        type of its inputs would otherwise be compiled again in the middle of a capture.
        """
        inputs = detached(args, self.written)
        for i in in_pool:
            inputs[i] = call.owned[self.input_names[i]]
        given_up = [call.owned.pop(name) for name in [n for n in call.owned if n not in self.io.alive]]
        kept = call.recording.owned.values() if call.recording is not None else ()
        call.memory.forget(given_up, [*(inputs[i] for i in in_pool), *call.owned.values(), *kept])
        return inputs

    def aliased_inputs(self, taken: Sequence[Any], in_pool: frozenset[int]) -> list[AliasedInput]:
        """The arguments outside of the arena that results may be views of."""
        return [
            AliasedInput.of(i, taken[i])
            for i, each in enumerate(self.io.inputs)
            if each.aliased and i not in in_pool and isinstance(taken[i], torch.Tensor)
        ]

    # Captures

    def _capture(self, call: Call, args: Sequence[Any]) -> Sequence[Any]:
        recording = call.recording
        assert recording is not None
        in_pool, before = self.in_pool(call, args), (self.failure, self.failed_attempts, self.stays_eager)
        if self._layouts(call, args) not in self._warm and self._warmed_late < call.program.options.max_recordings:
            self._warmed_late += 1  # else a fusion would be compiled in the capture
            self._refuse(call, "before", "what an eager operator made is not laid out as in a warm-up")
            recording.incomplete = True
            return self._run_instead(call, args, in_pool)
        try:
            self._agree(call, "before")
            with call.program.progress(call, "capturing", "captured", self):
                began = time.perf_counter()
                results = self._record(call, args)
                self.stats.capture_seconds += time.perf_counter() - began
            return results
        except _Executed as error:
            call.program.count_raised(is_counted=True)
            raise error.__cause__ from None  # type: ignore[misc]
        except Exception as error:
            self._refuse(call, "after", self._fail(call, error))
        self._raise_if_strict(call)
        recording.incomplete = True
        try:
            results = self._run_instead(call, args, in_pool)
        except Exception:
            # The operator itself raises, and the error says so. It may do better next time.
            self.failure, self.failed_attempts, self.stays_eager = before
            raise
        call.program.count_fallback(self.why_eager)
        return results

    def _run_instead(self, call: Call, args: Sequence[Any], in_pool: frozenset[int]) -> Sequence[Any]:
        """Runs the ops of a region that could not be captured."""
        # In the arena the memory of the warm-up is at hand, unless the capture has given up what the ops read.
        if in_pool == self.in_pool(call, args):
            with suppress(_NotRun):
                return self._run_in_arena(call, args)
        return self._run_eagerly(call, args)

    def _agree(self, call: Call, when: str) -> None:
        """Raises `RanksDiffer` unless all ranks of the groups that the region communicates in are at this stage.

        Args:
            when: "before" the region's capture, or "after" it.
        """
        if self.communicates and call.round is not None:
            call.round.ask(f"{when} the capture of {self.index}", partial(described, self.ops, call.program.ops.values))

    def _refuse(self, call: Call, when: str, problem: str) -> None:
        """Tells the other ranks that this one has failed, if the region communicates."""
        if self.communicates and call.round is not None:
            call.round.refuse(f"{when} the capture of {self.index}", problem, may_pass=not self.stays_eager)

    def _fail(self, call: Call, error: Exception) -> str:
        """Keeps the reason, and whether to try again: what fails in an operator, or is refused, does so again.

        A fusion may have been compiled in the capture, which fails while it times kernels; the next one finds them.

        Returns the reason alone.
        """
        op = self._failing_op(error)
        text = f"{op.name} {call.program.ops.place(op)}: " if op is not None else ""
        if isinstance(error, RanksDiffer):
            text, may_pass = str(error), error.may_pass
        else:
            text += sentence(error)
            may_compile = op is None or op.is_fusion
            may_pass = is_out_of_memory(error) or (may_compile and not isinstance(error, CaptureRefused))
        self.lacks_ranks = isinstance(error, RanksDiffer) and may_pass
        self.failed_attempts += 1
        self.stays_eager |= not may_pass or self.failed_attempts >= _MAX_ATTEMPTS
        left = f" (the next call tries again; {_MAX_ATTEMPTS - self.failed_attempts} of {_MAX_ATTEMPTS} tries left)"
        if isinstance(error, RanksDiffer):
            is_alone = error.no_answer and call.program.pair.has_moved_gradients
            fix = _ZERO_GRAD * is_alone + _SAME_CALLS
        else:
            denied = f"[{op.deny_name!r}]" if op is not None else "[...]"
            fix = f"deny={denied} leaves the operator eager and the rest captured" if self.stays_eager else ""
        self.failure = SkipReason(text if self.stays_eager else text + left, fix)
        return text

    def _name_failing_op(self, call: Call, error: Exception) -> None:
        """Notes on an error that goes to the user which op of the region raised it."""
        op = self._failing_op(error)
        if op is not None:
            fails = "No graph ran it, so it fails without CUDA graphs, too."
            if is_out_of_memory(error) and call.mode in (Mode.WARMUP, Mode.CAPTURE):
                fails = "Its memory was to be in a pool of CUDA graphs. Without them, it may fit."
            note(error, f"{op.name} {call.program.ops.place(op)} raised this, in {self.name}. {fails}")

    def _failing_op(self, error: Exception) -> Op | None:
        """The op of the region that raised the error, if it was one of them."""
        functions = [*self._functions.values(), self.hash_function]
        return failing_op(error, self.ops, [each.__code__ for each in functions if each is not None])

    def _record(self, call: Call, args: Sequence[Any]) -> Sequence[Any]:
        """Captures the region's ops, replays the graph, and keeps it in the recording."""
        assert call.recording is not None and call.trace is not None
        verifies = (call.verifies or self.is_always_verified) and not self.communicates
        capture = RegionCapture(self, call, args)
        graph, produced = capture.run(verifies=verifies)
        self._agree(call, "after")
        capture.complete(graph, produced)
        try:
            results = self._verify(call, graph, args) if verifies else self._replay(call, graph, args)
        except ReplayRefused:
            raise
        except Exception as error:
            raise _Executed from error
        call.owned |= {self.io.outputs[i].name: produced[i] for i in graph.outputs.fixed}
        views = graph.outputs.view_sources.items()
        call.recording.static |= {self.io.outputs[i].name for i, source in views if source in capture.static}
        if self.disagreement is None:
            self.failure = None
        self.stats.captures += 1
        self.stats.replays += 1
        self.stats.bytes_in, self.stats.bytes_out = graph.nbytes_in, graph.nbytes_out
        call.trace.graphs[self.index] = graph
        return results


class _Executed(Exception):
    """A graph failed after it may have run: running its ops again could do their effects twice."""


class _NotRun(Exception):
    """A warm-up failed before the first op, for the reason that is its argument."""


def _memory(value: Any) -> int:
    """Where the memory of a plain tensor begins; 0 for anything else."""
    return address_if_any(value) if is_plain(value) else 0
