"""When the workspaces of cuBLAS are freed: PyTorch frees those of all streams, or none."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

from thunder_cg.compat import cuda
from thunder_cg.runtime.cuda import streams
from thunder_cg.runtime.cuda.streams import CaptureStream, capture_lock, free_workspaces


class FakeCuda:
    """Private pools that are numbers, and the bytes of workspaces in them."""

    def __init__(self) -> None:
        self.pools: dict[int, int] = {}
        self.cleared = 0
        self.has_foreign_graphs = False
        self._pool = -1

    def new_pool(self, index):
        pool = 1 + max(self.pools, default=0)
        self.pools[pool] = 0
        return pool

    @contextmanager
    def use_pool(self, index, pool):
        self._pool = pool
        yield

    def make_workspace(self):
        self.pools[self._pool] += 32

    def clear(self):
        self.cleared += 1

    def pool_segments(self, pools):
        return [{"total_size": self.pools[pool]} for pool in pools]


@pytest.fixture
def fake(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(cuda, "new_stream", lambda index: object())
    monkeypatch.setattr(cuda, "new_pool", fake.new_pool)
    monkeypatch.setattr(cuda, "use_pool", fake.use_pool)
    monkeypatch.setattr(cuda, "release_pool", lambda index, pool: fake.pools.pop(pool))
    monkeypatch.setattr(cuda, "pool_segments", fake.pool_segments)
    monkeypatch.setattr(cuda, "clear_cublas_workspaces", fake.clear)
    monkeypatch.setattr(cuda, "has_foreign_graphs", lambda pools: fake.has_foreign_graphs)
    monkeypatch.setattr(CaptureStream, "_make_workspaces", lambda stream: fake.make_workspace())
    monkeypatch.setattr(CaptureStream, "_idle", [])
    monkeypatch.setattr(CaptureStream, "_in_use", 0)
    monkeypatch.setattr(streams, "own_pools", set())
    return fake


def prepared():
    stream = CaptureStream.take(0)
    stream.prepare()
    stream.prepare()
    return stream


def test_workspaces_of_the_last_arena_are_back_at_once(fake):
    first, second = prepared(), prepared()
    assert (fake.pools, first.workspace_nbytes()) == ({1: 32, 2: 32}, 32)
    first.give_back()
    assert fake.cleared == 0  # the next arena takes it
    assert CaptureStream.take(0) is first
    for stream in (first, second):
        stream.give_back()
    assert fake.cleared == 1 and fake.pools == {} and streams.own_pools == set()
    assert stream.workspace_nbytes() == 0
    assert prepared().workspace_nbytes() == 32  # a stream that comes into use again


def test_release_frees_those_of_idle_streams_and_the_others_are_made_again(fake):
    idle, busy = prepared(), prepared()
    idle.give_back()
    free_workspaces()
    assert fake.cleared == 1 and list(fake.pools) == [2]
    busy.prepare()
    assert fake.pools == {2: 64}  # of the fake; PyTorch has the freed block of the same pool at hand


@pytest.mark.parametrize("why", ["graphs of others", "a capture on this thread", "one on another"])
def test_nothing_is_freed_where_that_could_harm_a_graph(fake, why):
    stream = prepared()
    if why == "graphs of others":
        fake.has_foreign_graphs = True
        stream.give_back()
    elif why == "a capture on this thread":
        with capture_lock:
            stream.give_back()
    else:
        with capture_lock:
            worker = threading.Thread(target=stream.give_back)
            worker.start()
            worker.join()
    assert fake.cleared == 0 and fake.pools == {1: 32}
    with capture_lock.if_free() as is_free:
        assert is_free


def test_graphs_of_others(monkeypatch):
    segments = [{"segment_pool_id": (0, 0), "active_size": 8}, {"segment_pool_id": (0, 7), "active_size": 8}]
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda pool: {"segments": segments}, raising=False)
    assert cuda.has_foreign_graphs(set())
    assert not cuda.has_foreign_graphs({(0, 7)})
    segments[1]["active_size"] = 0  # of a pool that is gone, and whose memory is cached
    assert not cuda.has_foreign_graphs(set())
    graph = type("Graph", (), {})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(cuda, "OwnGraph", own := type("OwnGraph", (graph,), {}))
    found = [own()]
    monkeypatch.setattr(cuda.gc, "get_objects", lambda: found)
    assert not cuda.has_foreign_graphs(set())
    found.append(graph())
    assert cuda.has_foreign_graphs(set())
