"""What compat/distributed.py relies on, in a group of one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_cg.compat import distributed
from thunder_cg.compat.tensors import storage_id, storage_use_count


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def test_what_a_graph_can_hold(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    assert distributed.capture_problem(group, "cpu") is None
    problem, fix = distributed.capture_problem(group, "cuda")
    assert "gloo" in problem and "NCCL" in fix
    assert "no backend for meta" in distributed.capture_problem(group, "meta")[0]
    # As init_process_group() makes it by default where there are GPUs: get_backend does not say that it is NCCL's.
    monkeypatch.setattr(dist, "get_backend", lambda group: "undefined")
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda group, device: SimpleNamespace(name=lambda: "nccl"))
    assert distributed.capture_problem(group, "cuda") is None
    for name, value in (("TORCH_NCCL_BLOCKING_WAIT", "1"), ("NCCL_BLOCKING_WAIT", "T")):  # which PyTorch reads as well
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            problem, fix = distributed.capture_problem(group, "cuda")
            assert f"{name}={value}" in problem and fix == f"unset {name}"
            patch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
            assert distributed.capture_problem(group, "cuda") is None
    monkeypatch.setattr(distributed, "get_debug_level", lambda: dist.DebugLevel.DETAIL)
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in distributed.capture_problem(group, "cuda")[0]


def test_what_a_capture_is_told_of_collectives(group: dist.ProcessGroup) -> None:
    """And how many there have been."""
    seen, x = [], torch.ones(2)

    def begins(method: str, frame: FrameType, args: tuple[object, ...]) -> None:
        given = args[0][0] if isinstance(args[0], list) else args[0]
        seen.append((method, distributed.is_torchs_own(frame), frame.f_locals["group"] is group, given is x))

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event == "return" and (found := distributed.functional_call(frame)) is not None:
            seen.append((*found[:2], found[2][0].shape == (2,), called.shape == (2,)))

    before = distributed.progress(group)["cpu"]
    works: list[object] = []

    def uses(method: str, frame: FrameType, work: object) -> None:
        works.append(work if method == "wait" else method)

    with distributed.told_of_collectives(begins, lambda work, frame: works.append(work), uses):
        dist.all_reduce(x)
        work = dist.broadcast(x, 0, async_op=True)
        work.wait()
        work.is_completed()
    assert seen == [("allreduce", True, True, True), ("broadcast", True, True, True)]
    first, waited, *others = works
    assert first is waited and others == [work, work, "is_completed"]
    dist.all_reduce(x)
    assert len(seen) == 2 and len(works) == 5
    sys.setprofile(note)
    functional.wait_tensor(functional.all_reduce(x, "sum", group))
    sys.setprofile(None)
    assert seen[2] == ("all_reduce", group, True, True) and seen[-1] == ("wait_tensor", None, True, True)
    assert distributed.progress(group)["cpu"] == before + 4 and distributed.groups() == [group]
    assert distributed.default_group() is not None and distributed.default_group()() is group


def test_captures_of_two_threads_are_told_of_collectives(group: dist.ProcessGroup) -> None:
    """The one that begins first may end first."""
    seen: list[list[bool]] = [[], []]
    method = dist.ProcessGroup.allreduce

    def told(i: int) -> Any:
        begins = lambda method, frame, args: seen[i].append(distributed.is_torchs_own(frame))  # noqa: E731
        return distributed.told_of_collectives(begins, lambda *work: None, lambda *work: None)

    first, second = told(0), told(1)
    first.__enter__()
    second.__enter__()
    dist.all_reduce(torch.ones(2))
    first.__exit__(None, None, None)
    dist.all_reduce(torch.ones(2))
    second.__exit__(None, None, None)
    dist.all_reduce(torch.ones(2))
    assert seen == [[True], [True, True]] and dist.ProcessGroup.allreduce is method


def test_time_out_of_a_group_without_gpus(group: dist.ProcessGroup) -> None:
    assert distributed.timeout(group) == 1800


def test_a_group_and_its_store(group: dist.ProcessGroup) -> None:
    assert distributed.is_alive(group)
    distributed.store(group).set("key", "value")
    assert distributed.store(group).check(["key"]) and distributed.store(group).get("key") == b"value"
    dist.destroy_process_group()
    assert not distributed.is_alive(group)


def test_before_a_group_goes(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.ProcessGroup, "shutdown", dist.ProcessGroup.shutdown)
    monkeypatch.setattr(dist.ProcessGroup, "abort", dist.ProcessGroup.abort)
    alive = []

    def callback(going: dist.ProcessGroup, *, may_wait: bool) -> None:
        alive.append((going is group, distributed.is_alive(going), may_wait))

    distributed.before_shutdown(callback)
    distributed.before_shutdown(callback)  # once is enough
    dist.destroy_process_group()
    assert alive == [(True, True, True)]


def test_a_collective_in_a_dispatch_mode(group: dist.ProcessGroup) -> None:
    """Its operators are seen, with work that can be waited for, and may be left out."""
    seen = []

    class Records(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace != "c10d":
                return func(*args, **(kwargs or {}))
            seen.append(func)
            return distributed.begun(func, args, kwargs or {})

    tensor, out = torch.ones(2), torch.zeros(2)
    with Records():
        dist.all_reduce(tensor, async_op=True).wait()
        dist.reduce_scatter_tensor(out, tensor, async_op=True).wait()
        dist.all_gather_into_tensor(out, tensor, async_op=True).wait()
        dist.broadcast(tensor, 0, async_op=True).wait()
    assert len(seen) == 4 and not out.any()

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not distributed.communicates(func):
                return func(*args, **(kwargs or {}))
            held = storage_use_count(storage_id(out))
            for _ in range(200):
                distributed.run(func, args, kwargs or {})
                assert storage_use_count(storage_id(out)) == held  # gloo makes views, and drops them afterwards
            return distributed.begun(func, args, kwargs or {})

    with Waits():
        dist.all_gather_into_tensor(out, tensor, async_op=True)
    assert out.equal(tensor)


def test_coalesced_collectives(group: dist.ProcessGroup) -> None:
    """Inside, nothing runs yet; afterwards each future has the work of all."""
    sent, received = [torch.ones(2), torch.ones(3)], [torch.zeros(2), torch.zeros(3)]
    with distributed.coalesce(group) as real:
        futures = [(dist.all_gather_into_tensor(r, s, group, True), r) for r, s in zip(received, sent)]
        assert not any(r.any() for r in received)
    for (work, result), r in zip(map(real, futures), received):
        work.wait()
        assert result is r and r.all()


def test_an_error_among_coalesced_collectives(group: dist.ProcessGroup) -> None:
    """Later collectives are not taken for a part of what failed."""

    def run_out_of_memory() -> None:
        with distributed.coalesce(group):
            dist.all_reduce(torch.ones(2), group=group, async_op=True)
            raise MemoryError

    with pytest.raises(MemoryError):
        run_out_of_memory()
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    assert tensor.tolist() == [1, 1]
    with distributed.coalesce(group):
        dist.all_reduce(tensor, group=group, async_op=True)
