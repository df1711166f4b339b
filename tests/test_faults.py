"""Whatever fails, wherever: the call's result is right, and nothing is left behind.

Every test compares with uncaptured Thunder, bit for bit: results, gradients, buffers, and what is drawn next.
"""

from __future__ import annotations

import copy
import gc
import re
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import thunder
import torch
from faults import (
    Broken,
    FaultyRegion,
    Switch,
    arenas,
    exception,
    failed_launch,
    forget,
    host_sync,
    out_of_memory,
    programs,
    transfer,
)
from models import Precomputed
from support import fast_path_calls, regions, replays, same, same_state
from torch import nn
from torch._C._dynamo import guards as _c_guards

from thunder_cg import CaptureError, explain
from thunder_cg.compat import cuda
from thunder_cg.errors import ReplayRefused
from thunder_cg.runtime import tape
from thunder_cg.runtime.cuda.backend import CudaBackend
from thunder_cg.runtime.cuda.graph import CudaGraph
from thunder_cg.runtime.cuda.pool import CudaPool
from thunder_cg.runtime.cuda.streams import CaptureStream
from thunder_cg.runtime.outputs import Outputs, _Copy
from thunder_cg.runtime.recording import RegionGraph
from thunder_cg.runtime.region_capture import RegionCapture


class Net(nn.Module):
    """Views, a write to a buffer, random draws, matrix products, several outputs that share memory."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        h = torch.tanh(torch.matmul(x, self.weight))
        self.total.add_(h.detach().sum(0))
        y = torch.exp(h.view(-1, 2, 2).transpose(1, 2))
        z = nn.functional.dropout(h, self.p) * 2
        return y, y.reshape(-1), z.t(), h.sum()


class Other(nn.Module):
    """Writes to nothing; its inference is nothing but a replay."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(nn.functional.dropout(self.first(x), self.p)) * 2


class Halves(nn.Module):
    """Two regions, with an operator in between that no graph may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        h = torch.tanh(torch.matmul(x, self.weight)) * 2
        n = h.detach().sum().item()
        self.total.add_(h.detach().sum(0) * n)
        return nn.functional.dropout(torch.tanh(h * n), 0.5) * 2, h.view(-1)


class Compiled:
    """Compiles models. What tests share is reset for each of them, and given up when one of them fails.

    Args:
        make: a transform, with options.
        shared: what was compiled before, by key.
    """

    def __init__(self, make: Callable[..., Any], device: str, shared: dict[Any, Any], failed: int) -> None:
        self.make, self.device, self.shared, self.failed = make, device, shared, failed

    def uncaptured(self, model: nn.Module) -> Any:
        """Calls leave nothing in it but parameters, gradients and buffers. Those are the model's from here on."""
        grads = tuple(p.requires_grad for p in model.parameters())
        key = self.failed, self.device, type(model), getattr(model, "p", None), grads
        plain = self.shared.get(key)
        if plain is None:
            plain = self.shared[key] = thunder.jit(copy.deepcopy(model).to(self.device))
        plain.load_state_dict(model.state_dict())
        plain.zero_grad()
        return plain

    def captured(self, model: nn.Module, **options: Any) -> Any:
        return thunder.jit(model.to(self.device), transforms=[self.make(**options)])

    def others(self) -> tuple[Any, Any]:
        """Another pair, which forgets its captures before it is used."""
        key = self.failed, self.device, "others"
        if key not in self.shared:
            model = Other()
            plain = thunder.jit(copy.deepcopy(model).to(self.device))
            self.shared[key] = plain, self.captured(model)
        plain, graphed = self.shared[key]
        graphed.load_state_dict(plain.state_dict())
        return plain, graphed


class Twins:
    """A model without and with graphs, in step, and another pair that has to work after each fault.

    Args:
        arm: what to call before the forward, and before the backward, of the model with graphs.
    """

    def __init__(self, compiled: Compiled, device: str, model: nn.Module, *, trains: bool = True, **options: Any):
        self.device = device
        self.trains = trains
        self.plain = compiled.uncaptured(model)
        self.graphed = compiled.captured(model, **options)
        self.others = compiled.others()
        self.steps = 0
        self.arm: dict[int, Callable[[], None]] = {}
        self.call()  # compiles
        self.faulty = [FaultyRegion(region) for program in programs(self.graphed) for region in program.regions]
        self.start()

    def start(self) -> None:
        """As if nothing had been called yet."""
        forget(self.graphed)
        self.sync()

    def sync(self) -> None:
        self.graphed.load_state_dict(self.plain.state_dict())

    def step(self, model: Any, trains: bool) -> list[torch.Tensor]:
        torch.manual_seed(self.steps)
        x = torch.randn(6, 4, device=self.device).requires_grad_(trains)
        model.zero_grad()
        arm = self.arm if model is self.graphed else {}
        arm.pop(0, lambda: None)()
        with torch.set_grad_enabled(trains):
            results = model(x)
            results = results if isinstance(results, tuple) else (results,)
            if trains:
                self.loss = sum((i + 1) * result.sum() for i, result in enumerate(results))
                arm.pop(1, lambda: None)()
                self.loss.backward()
        self.loss = None
        return [*(result.detach() for result in results), x.grad, torch.rand(4, device=self.device)]

    def call(self, pair: tuple[Any, Any] | None = None) -> None:
        """One call of both: equal results, gradients, buffers and random draws."""
        plain, graphed = pair or (self.plain, self.graphed)
        trains = self.trains and pair is None
        self.steps += 1
        expected, found = self.step(plain, trains), self.step(graphed, trains)
        same([t for t in expected if t is not None], [t for t in found if t is not None])
        same_state(plain, graphed)

    def fails(self, kind: type[Exception]) -> str:
        """One call, which raises with graphs."""
        self.steps += 1
        self.step(self.plain, self.trains)
        with pytest.raises(kind) as caught:
            self.step(self.graphed, self.trains)
        self.notes = " ".join(getattr(caught.value, "__notes__", ()))  # Python 3.11 has them
        return str(caught.value)

    def after(self, other_too: bool = True) -> None:
        """The program goes on, another is captured, and nothing is lost."""
        for _ in range(2):
            self.call()
        if other_too:
            self._capture_other()
        gc.collect()
        assert not any(arena.is_held() for arena in arenas(self.graphed))

    def _capture_other(self) -> None:
        other = self.others[1]
        if other._lc_cs.interpreter_cache:
            forget(other)
        before = replays(other) if other._lc_cs.interpreter_cache else 0
        for _ in range(3):
            self.call(self.others)
        assert replays(other) == before + 2

    def arena_bytes(self) -> int:
        gc.collect()
        return sum(arena.nbytes() for arena in arenas(self.graphed))

    def bytes(self) -> int:
        """Memory in use when all recordings and gradients are gone."""
        for model in (self.plain, self.graphed):
            model.zero_grad()
        for arena in arenas(self.graphed):
            assert arena.hold()  # what it has lent is back
            arena.release()
        forget(self.graphed)
        forget(self.others[1])
        if self.device == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated()
        return self.arena_bytes()


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """What `pair` has frozen is collected when all tests of the module have run."""
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def shared():
    return {}


@pytest.fixture
def pair(transform, device, shared, request):
    def make(model, **options):
        pair = Twins(Compiled(transform, device, shared, request.session.testsfailed), device, model, **options)
        gc.collect()
        gc.freeze()  # all that is there by now, so that the many collections take little time
        return pair

    return make


@pytest.fixture
def fail(monkeypatch, device):
    """Has a method go through a switch before it runs, or after."""

    def at(owner, name, *, after=False):
        switch, original = Switch(), getattr(owner, name)

        def faulty(*args, **kwargs):
            if not after:
                switch(torch.device(device))
            result = original(*args, **kwargs)
            if after:
                switch(torch.device(device))
            return result

        monkeypatch.setattr(owner, name, faulty)
        return switch

    return at


def failure(twins: Twins, number: int) -> str:
    return str(regions(twins.graphed)[number]["failure"])


KINDS = {
    "exception": (exception, "Broken: a fault"),
    "memory": (out_of_memory, "OutOfMemoryError: out of memory on"),
    "sync": (host_sync, "makes the host wait|not permitted|during CUDA graph capture"),
    "transfer": (transfer, "makes the host wait|not permitted|during CUDA graph capture"),
    "launch": (failed_launch, "invalid|INVALID"),
}


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("trace", [0, 1], ids=["forward", "backward"])
def test_an_op_fails_in_a_capture(pair, trace, request):
    """Each op fails in one or two of the ways, and at night in all."""
    twins = pair(Net())
    faulty, base = twins.faulty[trace], None
    program = programs(twins.graphed)[trace]
    assert len(faulty.region.planned.ops) >= 12
    for _ in range(3):
        twins.call()
    without_faults = twins.arena_bytes()
    for position, index in enumerate(faulty.region.planned.ops):
        op = program.ops.ops[index]
        place = program.ops.place(op)
        assert "test_faults.py:" in place
        for number, (kind, (fault, reason)) in enumerate(KINDS.items()):
            if (position + number) % 3 and not request.config.getoption("nightly"):
                continue
            twins.start()
            twins.call()
            faulty.arm(position, fault, times=99 if kind in ("sync", "transfer") else 1)
            twins.call()
            assert faulty.switch.hits >= 1
            said = failure(twins, trace)
            assert said.startswith(f"{op.name} {place}: ") and re.search(reason, said), said
            assert said in str(explain(twins.graphed))
            before = replays(twins.graphed)
            twins.after(other_too=position % 4 == 0)
            faulty.switch.disarm()
            if kind == "memory":  # which may be there next time
                assert replays(twins.graphed) == before + 4 and failure(twins, trace) == "None"
            else:
                assert replays(twins.graphed) == before + 2 and failure(twins, trace) == said
            assert 0 < twins.arena_bytes() <= without_faults
            base = twins.bytes() if base is None else base
            assert twins.bytes() == base


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("trace", [0, 1], ids=["forward", "backward"])
def test_an_op_fails_in_a_warm_up(pair, trace):
    """That is the user's own operator raising: the error is the user's, and what ran before it has happened."""
    twins = pair(Net())
    faulty, ops = twins.faulty[trace], programs(twins.graphed)[trace].ops.ops
    (write,) = [i for i, op in enumerate(programs(twins.graphed)[0].ops.ops) if op.id == "copy_"]
    for position, index in enumerate(faulty.region.planned.ops):
        twins.start()
        for kind, fault in ((Broken, exception), (torch.OutOfMemoryError, out_of_memory)):
            before = twins.graphed.get_buffer("total").clone()
            faulty.arm(position, fault, times=99)
            twins.fails(kind)
            if sys.version_info >= (3, 11):
                assert (
                    f"{ops[index].name} " in twins.notes and f" raised this, in {faulty.region.name}. " in twins.notes
                )
                assert ("it fails without CUDA graphs, too." if kind is Broken else "it may fit.") in twins.notes
            faulty.switch.disarm()
            assert ops[index].index == index
            happened = trace == 1 or index > write
            same(twins.graphed.get_buffer("total"), twins.plain.get_buffer("total") if happened else before)
            twins.sync()
        twins.call()
        assert failure(twins, trace) == "None"
        before = replays(twins.graphed)
        twins.after(other_too=position % 4 == 0)
        assert replays(twins.graphed) == before + 4


def test_memory_runs_out_once_in_a_warm_up(pair):
    """The allocator's cache is at the disposal of whoever tries again: so do we, where nothing has been written."""
    twins = pair(Other())
    (faulty, _) = twins.faulty
    for position in range(len(faulty.region.planned.ops)):
        twins.start()
        faulty.arm(position, out_of_memory)
        twins.call()
        assert faulty.switch.hits == 1
        before = replays(twins.graphed)
        twins.after()
        assert replays(twins.graphed) == before + 4


def steps(backend: str, fail: Callable[..., Switch], trace: int) -> dict[str, Switch]:
    """What a capture does, one after the other."""
    pool, graph = (tape.TapePool, tape.TapeGraph) if backend == "tape" else (CudaPool, CudaGraph)
    found = {
        "static buffer": fail(pool, "memory"),
        "capture": fail(pool, "capture"),
        "graph": fail(graph, "__init__"),
        "alias": fail(pool, "alias"),
        "guard": fail(RegionCapture, "_late_guard"),
        "results": fail(Outputs, "allocate"),
    }
    if trace == 1:  # of a backward, whose gradients may be lent
        found["owned"] = fail(tape.TapePool if backend == "tape" else CudaPool, "owned")
    if backend == "tape":
        found["copy_in"] = fail(RegionGraph, "copy_in")
    if backend == "cuda":
        for name in ("begin", "copy_in", "copy_out", "end", "instantiate"):
            found[f"after {name}"] = fail(graph, name, after=True)
        found["before begin"] = fail(graph, "begin")
        found["before instantiate"] = fail(graph, "instantiate")
        found["side stream"] = fail(CaptureStream, "prepare")
    return found


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("trace", [0, 1], ids=["forward", "backward"])
def test_a_step_of_a_capture_fails(pair, backend, fail, trace):
    switches = steps(backend, fail, trace)
    twins = pair(Net())
    base = None
    for name, switch in switches.items():
        for fault, reason in (KINDS["exception"], KINDS["memory"]):
            for times in (1, 99):
                if times > 1 and name in ("alias", "results"):  # which eager runs need as well
                    continue
                twins.start()
                twins.call()
                twins.arm[trace] = lambda switch=switch, fault=fault, times=times: switch.arm(fault, times=times)
                twins.call()
                assert reason in failure(twins, trace) and "2 of 3 tries left" in failure(twins, trace), name
                before = replays(twins.graphed)
                if times == 1:
                    assert switch.hits == 1
                    twins.after()  # the next call captures
                    assert replays(twins.graphed) == before + 4 and failure(twins, trace) == "None", name
                else:
                    for _ in range(4):
                        twins.call()
                    assert programs(twins.graphed)[trace].regions[0].stays_eager
                    assert reason in failure(twins, trace) and "left" not in failure(twins, trace)
                    hits = switch.hits
                    twins.call()
                    assert switch.hits == hits, "it goes on trying"
                    switch.disarm()
                    twins.after()
                base = twins.bytes() if base is None else base
                assert twins.bytes() == base


@pytest.mark.usefixtures("each_leaves_alone")
def test_a_gradient_cannot_leave_a_capture(pair, backend, fail):
    switch = fail(tape._Tape, "copy_early") if backend == "tape" else fail(CudaPool, "_capture_early_copy")
    twins = pair(Net(), memory_budget=2**30)  # with a budget, no gradient is lent
    for fault, reason in (KINDS["exception"], KINDS["memory"]):
        twins.start()
        twins.call()
        twins.arm[1] = lambda fault=fault: switch.arm(fault)
        twins.call()
        assert switch.hits == 1
        said = failure(twins, 1)
        assert said.startswith(reason) and "2 of 3 tries left" in said, "no operator is to blame"
        before = replays(twins.graphed)
        twins.after()
        assert replays(twins.graphed) == before + 4 and failure(twins, 1) == "None"


@pytest.mark.usefixtures("each_leaves_alone")
@pytest.mark.parametrize("trace", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("model", [Net, Other, Halves])
@pytest.mark.nightly_after(2)
def test_results_cannot_leave_a_warm_up(pair, backend, fail, model, trace):
    """There is room for the ops, and none for copies: what is the caller's is in the arena, and stays the caller's."""
    switches = [
        fail(tape, "_copied") if backend == "tape" else fail(CudaPool, "_copy_to_caller"),
        fail(_Copy, "allocate"),
    ]
    twins = pair(model(), memory_budget=2**30)
    for fault, _ in (KINDS["exception"], KINDS["memory"]):
        for some in (switches[:1], switches[1:], switches):
            twins.start()
            twins.arm[trace] = lambda some=some, fault=fault: [switch.arm(fault, times=99) for switch in some]
            twins.steps += 1
            expected, found = twins.step(twins.plain, True), twins.step(twins.graphed, True)
            assert any(switch.hits for switch in some) or (trace == 0 and some is not switches)
            for switch in switches:
                switch.disarm()
            before = replays(twins.graphed)
            twins.after()
            assert replays(twins.graphed) == before + 2 * len(regions(twins.graphed))
            same([t for t in expected if t is not None], [t for t in found if t is not None])  # still


def test_a_write_to_a_result_that_could_not_leave(pair, device, fail):
    """Where the backward needs it, too, it raises, as without graphs."""
    switch = fail(_Copy, "allocate")
    twins = pair(Net())
    for model in (twins.plain, twins.graphed):
        twins.start()
        switch.arm(exception, times=99)
        results = model(torch.randn(6, 4, device=device))
        results[0].detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            results[0].sum().backward()
        del results
    assert switch.hits
    switch.disarm()
    twins.sync()
    twins.after()


@pytest.mark.parametrize("trace", [0, 1], ids=["forward", "backward"])
@pytest.mark.nightly_after(1)
def test_a_warm_up_cannot_begin(pair, backend, fail, trace):
    """No pool, or no room for what cuBLAS needs on the pool's stream: the call runs eagerly."""
    kind = tape.TapeBackend if backend == "tape" else CudaBackend
    switches = [fail(tape.TapePool if backend == "tape" else CudaPool, "warm_up")]
    switches += [fail(CaptureStream, "prepare")] if backend == "cuda" else []
    if trace == 0:  # the backward has its forward's pool
        switches += [fail(kind, "pool"), *([fail(CudaPool, "_keep_pool_alive")] if backend == "cuda" else [])]
    twins = pair(Net())
    for switch in switches:
        for fault, reason in (KINDS["exception"], KINDS["memory"]):
            forget(twins.graphed)
            for program in programs(twins.graphed):
                program.pair._used.clear()  # so that a new arena is made
            gc.collect()
            twins.arm[trace] = lambda switch=switch, fault=fault: switch.arm(fault)
            twins.call()
            assert switch.hits == 1
            (said,) = [s for s in programs(twins.graphed)[trace].counts.fallbacks if "could not be warmed up" in s]
            assert reason in said and programs(twins.graphed)[trace].regions[0].name in said
            assert said in str(explain(twins.graphed))
            before = replays(twins.graphed)
            twins.call()
            twins.after()
            assert replays(twins.graphed) >= before + 4


class Launches:
    """The ways to launch a graph, which all can be refused. PyTorch's has moved the generator on by then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail: Callable[..., Switch], backend: str) -> None:
        if backend == "tape":
            self._switch, self._fault = fail(tape.TapeGraph, "replay"), self._refuse_replay
            return
        self._switch, self._fault = Switch(), exception
        replay, launch = torch.cuda.CUDAGraph.replay, cuda.driver.cuGraphLaunch
        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: self._refused_replay() or replay(graph))
        monkeypatch.setattr(cuda.driver, "cuGraphLaunch", lambda *args: self._refused_launch() or launch(*args))

    @staticmethod
    def _refuse_replay(device: torch.device) -> None:
        raise ReplayRefused("CUDA error: out of memory")

    def _is_refused(self) -> bool:
        try:
            self._switch(torch.device("cuda"))
        except Broken:
            return True
        return False

    def _refused_replay(self) -> None:
        if self._is_refused():
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.set_offset(generator.get_offset() + 4)
            raise RuntimeError("CUDA error: out of memory")

    def _refused_launch(self) -> Any:
        return (cuda.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY,) if self._is_refused() else None

    def refuse(self, *, skip: int = 0, times: int = 1) -> None:
        self._switch.arm(self._fault, skip=skip, times=times)

    def allow(self) -> int:
        hits, self._switch.hits = self._switch.hits, 0
        self._switch.disarm()
        return hits


@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize(
    "model", [Net, Other, lambda: Other(p=0.0), Halves], ids=["net", "other", "no draws", "halves"]
)
@pytest.mark.nightly_after(2)
def test_a_launch_is_refused(pair, monkeypatch, fail, backend, model, trains):
    launches = Launches(monkeypatch, fail, backend)
    twins = pair(model(), trains=trains)
    count = len(regions(twins.graphed))
    for trace in range(1 + trains):
        for skip in range(len(programs(twins.graphed)[trace].regions)):
            for calls in (1, 2, 4):  # when it captures, in Thunder's dispatch, on the fast path
                twins.start()
                for _ in range(calls):
                    twins.call()
                before, went = replays(twins.graphed), fast_path_calls(twins.graphed)
                twins.arm[trace] = lambda skip=skip: launches.refuse(skip=skip, times=9)
                twins.call()
                assert launches.allow() >= 1
                said = "captured" if calls == 1 else "replayed"
                found = programs(twins.graphed)[trace].counts.fallbacks
                assert any(f"could not be {said}: " in s and re.search("out.of.memory", s, re.I) for s in found), found
                assert any(s in str(explain(twins.graphed)) for s in found)
                before = replays(twins.graphed)
                twins.after(other_too=calls == 4)
                assert replays(twins.graphed) == before + 2 * count
                if calls > 1:
                    assert fast_path_calls(twins.graphed) >= went + 2


@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("model", [Net, Other, Halves])
@pytest.mark.nightly_after(2)
def test_no_memory_for_the_results_of_a_replay(pair, fail, device, model, trains):
    allocations = [fail(Outputs, "allocate"), fail(_c_guards, f"_empty_strided_{device}")]
    twins = pair(model(), trains=trains)
    for trace in range(1 + trains):
        for calls in (2, 4):
            twins.start()
            for _ in range(calls):
                twins.call()
            twins.arm[trace] = lambda: [switch.arm(out_of_memory, times=9) for switch in allocations[:1]]
            if model is Other and not trains:
                twins.arm[trace] = lambda: [switch.arm(out_of_memory, times=9) for switch in allocations]
            twins.call()
            assert sum(switch.hits for switch in allocations) >= 1
            for switch in allocations:
                switch.disarm()
            assert any(
                "could not be replayed: OutOfMemoryError" in s for s in programs(twins.graphed)[trace].counts.fallbacks
            )
            before = replays(twins.graphed)
            twins.after()
            assert replays(twins.graphed) == before + 2 * len(regions(twins.graphed))


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("trace", [0, 1], ids=["forward", "backward"])
def test_a_graph_fails_after_it_ran(pair, backend, fail, trace):
    """Nobody knows how far it came, so the call fails, with nothing done twice."""
    switch = fail(tape.TapeGraph if backend == "tape" else CudaGraph, "replay", after=True)
    twins = pair(Net())
    for calls in (1, 2, 4):
        for fault, kind in ((exception, Broken), (out_of_memory, torch.OutOfMemoryError)):
            twins.start()
            for _ in range(calls):
                twins.call()
            twins.arm[trace] = lambda fault=fault: switch.arm(fault)
            twins.fails(kind)
            assert switch.hits == 1
            if sys.version_info >= (3, 11):
                assert twins.notes.count("A replay of the graph of CUDAGraph") == 1
                assert " test_faults.py:" in twins.notes and "compile without cudagraph_transform()" in twins.notes
            same(twins.plain.get_buffer("total"), twins.graphed.get_buffer("total"))
            if trace == 1:
                with pytest.raises(RuntimeError):  # the forward's memory may have been overwritten
                    twins.loss.backward()
            twins.loss = None
            before = replays(twins.graphed)
            twins.after()
            assert replays(twins.graphed) == before + 4


def test_a_release_fails(pair, backend, fail):
    switch = fail(tape.TapePool if backend == "tape" else CudaPool, "poison")
    twins = pair(Other().requires_grad_(False), trains=False)
    for calls in range(5):
        twins.start()
        for _ in range(calls):
            twins.call()
        twins.arm[0] = lambda: switch.arm(exception)
        twins.fails(Broken)
        twins.after()


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("trace", [0, 1], ids=["forward", "backward"])
def test_strict(pair, backend, fail, trace):
    """Instead of running eagerly the call raises, before anything has happened, and goes on as well afterwards."""
    memory = fail(tape.TapePool if backend == "tape" else CudaPool, "memory")
    twins = pair(Net(), strict=True)
    faulty, program = twins.faulty[trace], programs(twins.graphed)[trace]
    for position, index in list(enumerate(faulty.region.planned.ops))[::3]:
        for fault, reason in (KINDS["exception"], KINDS["memory"], KINDS["sync"], KINDS["launch"]):
            twins.start()
            twins.call()
            before = twins.graphed.get_buffer("total").clone()
            faulty.arm(position, fault)
            said = twins.fails(CaptureError)
            op = program.ops.ops[index]
            assert said.startswith(f"{program.label}, {program.regions[0].name}: {op.name} {program.ops.place(op)}: ")
            denied = "..." if reason == KINDS["memory"][1] else repr(op.deny_name)
            assert re.search(reason, said) and f"deny=[{denied}]" in said and "strict=" in said
            if trace == 0:
                same(twins.graphed.get_buffer("total"), before)
            twins.sync()
            if reason == KINDS["memory"][1]:
                twins.after(other_too=False)
            else:  # it would fail again, so it does
                assert twins.fails(CaptureError) == said
                twins.sync()
    twins.start()
    twins.call()
    twins.arm[trace] = lambda: memory.arm(out_of_memory)
    assert "OutOfMemoryError" in twins.fails(CaptureError)
    twins.sync()
    twins.after()


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.shift = nn.Parameter(torch.randn(()))

    def forward(self, x):
        return Precomputed.apply(x + self.weight.t(), torch.sin(self.shift * 2) * 3)


def test_gradients_that_are_what_the_forward_saved(pair):
    """They leave, also where the backward runs eagerly though its forward did not."""
    twins = pair(Fused())
    assert twins.faulty[1].region.aliased_in_pool
    for position in range(len(twins.faulty[1].region.planned.ops)):
        twins.start()
        twins.call()
        twins.faulty[1].arm(position, exception)
        kept = []
        for _ in range(4):
            twins.call()
            kept.append((twins.graphed.weight.grad, twins.graphed.weight.grad.clone()))
        for gradient, clone in kept:
            same(gradient, clone)


@pytest.mark.nightly
def test_nothing_is_left_of_a_model_with_faults(transform, device):
    """But for what the first one leaves to those after it: workspaces, and a graph of which the capture broke."""
    shared = transform()

    def call(model):
        x = torch.randn(6, 4, device=device)
        sum(result.sum() for result in model(x)).backward()

    def fail():
        jmodel = thunder.jit(Net().to(device), transforms=[shared])
        call(jmodel)
        faulty = [FaultyRegion(region) for program in programs(jmodel) for region in program.regions]
        for region in faulty:
            for fault in (exception, out_of_memory, host_sync):
                forget(jmodel)
                for _ in range(4):
                    region.arm(3, fault)
                    with suppress(Broken, torch.OutOfMemoryError):
                        call(jmodel)
        return [weakref.ref(program) for program in programs(jmodel)]

    allocated = []
    for _ in range(2):
        alive = fail()
        gc.collect()
        assert alive and all(ref() is None for ref in alive)
        assert all(ref() is None for ref in shared._shared.arenas._arenas)
        if device == "cuda":
            torch.cuda.synchronize()
            allocated.append(torch.cuda.memory_allocated())
    assert allocated == sorted(allocated, reverse=True)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_an_error_says_which_op_raised_it(transform, device):
    """An index that is out of range on the CPU: in the warm-up, and in a call that cannot be captured."""
    if device == "cuda":
        pytest.skip("it would end the CUDA context")
    table = nn.Embedding(4, 4)
    compiled = thunder.jit(lambda x, w: torch.relu(nn.functional.embedding(x, w) * 2), transforms=[transform()])
    good, bad = torch.tensor([0, 3]), torch.tensor([0, 4])
    notes = []
    for x in (bad, good, bad, good, good):
        try:
            with torch.no_grad():
                compiled(x, table.weight)
        except IndexError as error:
            notes += error.__notes__
    said = r"\S*embedding at test_faults.py:\d+ raised this, in CUDAGraph1. "
    said += "No graph ran it, so it fails without CUDA graphs, too."
    assert [bool(re.fullmatch(said, note)) for note in notes] == [True, True]
