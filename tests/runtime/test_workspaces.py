"""When the workspaces of cuBLAS are freed: PyTorch frees those of all streams, or none."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from support import on_threads

from thunder_cg.compat import cuda
from thunder_cg.runtime.cuda import streams
from thunder_cg.runtime.cuda.streams import CaptureStream, capture_lock, free_workspaces


class FakeStream:
    """A stream, and the numbers of those that it has waited for."""

    def __init__(self, number: int) -> None:
        self.cuda_stream, self.waited_for = number, []

    def wait_stream(self, other):
        self.waited_for.append(other.cuda_stream)


class FakeCuda:
    """Private pools that are numbers, and the bytes of workspaces in them."""

    def __init__(self) -> None:
        self.pools: dict[int, int] = {}
        self.foreign_pools: set[int] = set()
        self.cleared = 0
        self.has_foreign_graphs = False
        self._pool = -1
        self._workspaces: dict[tuple[int, CaptureStream], int] = {}  # their pools, by thread and stream
        self.current = FakeStream(7)

    def new_pool(self, index):
        pool = 1 + max(self.pools, default=0)
        self.pools[pool] = 0
        return pool

    @contextmanager
    def use_pool(self, index, pool):
        self._pool = pool
        yield

    def make_workspace(self, stream):
        if (who := (threading.get_ident(), stream)) not in self._workspaces:
            self._workspaces[who] = self._pool
            self.pools[self._pool] += 32

    def clear(self):
        self.cleared += 1
        for pool in self._workspaces.values():
            self.pools[pool] -= 32
        self._workspaces.clear()

    def pool_segments(self, pools):
        return [{"total_size": self.pools[pool]} for pool in pools]


@pytest.fixture
def fake(monkeypatch):
    fake, threads = FakeCuda(), streams.modules_of_threads
    those_of_pytest = threads()
    monkeypatch.setattr(streams, "modules_of_threads", lambda: threads() - those_of_pytest)
    monkeypatch.setattr(cuda, "new_stream", lambda index: object())
    monkeypatch.setattr(cuda, "current_raw_stream", lambda index: fake.current.cuda_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: fake.current)
    monkeypatch.setattr(cuda, "new_pool", fake.new_pool)
    monkeypatch.setattr(cuda, "use_pool", fake.use_pool)
    monkeypatch.setattr(cuda, "release_pool", lambda index, pool: fake.pools.pop(pool))
    monkeypatch.setattr(cuda, "pool_segments", fake.pool_segments)
    monkeypatch.setattr(cuda, "clear_cublas_workspaces", fake.clear)
    monkeypatch.setattr(cuda, "pools_with_memory", lambda: {*fake.pools, *fake.foreign_pools})
    monkeypatch.setattr(cuda, "has_foreign_graphs", lambda: fake.has_foreign_graphs)
    monkeypatch.setattr(CaptureStream, "_make_workspaces", lambda stream: fake.make_workspace(stream))
    monkeypatch.setattr(CaptureStream, "_all", [])
    monkeypatch.setattr(streams, "own_pools", set())
    return fake


def prepared():
    stream = CaptureStream.take(0)
    stream.prepare()
    stream.prepare()
    return stream


def test_arenas_of_one_thread_and_stream_share_workspaces_and_are_ordered(fake, monkeypatch):
    first = prepared()
    assert prepared() is first and fake.pools == {1: 32}
    here, there = fake.current, FakeStream(8)
    fake.current = there
    assert prepared() is not first and there.waited_for == []
    assert first.order.follow() == 8 and there.waited_for == [7]  # a graph of the first stream's arenas on the second
    assert first.order.follow() == 8 and there.waited_for == [7]
    fake.current = here
    assert first.order.follow() == 7 and here.waited_for == [8]
    found = []
    for is_backward in (True, False, True):  # which runs on a thread of autograd's
        monkeypatch.setattr(streams, "in_backward", partial(bool, is_backward))
        on_threads(lambda: found.append(prepared()))
    assert [each is first for each in found] == [True, False, False]


def test_draws_follow_the_stream_that_drew_last(fake, monkeypatch):
    monkeypatch.setattr(streams, "_draws", {})
    here, there = fake.current, FakeStream(0)  # the default stream has this handle
    streams.wait_for_draws(0)
    fake.current = there
    streams.wait_for_draws(1)  # of another device
    assert here.waited_for == there.waited_for == []
    streams.wait_for_draws(0)
    streams.wait_for_draws(0)
    assert here.waited_for == [] and there.waited_for == [7]


def test_workspaces_of_the_last_arena_are_back_at_once(fake):
    first = prepared()
    fake.current = FakeStream(8)
    second = prepared()
    assert (fake.pools, first.workspace_nbytes()) == ({1: 32, 2: 32}, 32)
    first.give_back()
    assert fake.cleared == 0  # the next arena takes it
    fake.current = FakeStream(9)
    assert CaptureStream.take(0) is first
    for stream in (first, second):
        stream.give_back()
    assert fake.cleared == 1 and fake.pools == {}
    assert stream.workspace_nbytes() == 0
    assert prepared().workspace_nbytes() == 32  # a stream that comes into use again


def test_pools_that_are_gone_are_forgotten(fake):
    stream = prepared()
    streams.own_pools.update((7, 8))
    fake.foreign_pools.add(8)  # of a step that is gone, and in whose capture autograd made a workspace
    stream.give_back()
    assert fake.cleared == 1 and streams.own_pools == {8}


@pytest.mark.parametrize(
    "why", ["graphs of others", "their memory", "another arena", "a capture on this thread", "one on another"]
)
def test_nothing_is_freed_where_that_could_harm_a_graph(fake, why):
    stream = prepared()
    if why == "graphs of others":
        fake.has_foreign_graphs = True
        stream.give_back()
    elif why == "their memory":
        fake.foreign_pools.add(9)
        stream.give_back()
    elif why == "another arena":
        CaptureStream.take(0)
        stream.give_back()
        free_workspaces()
    elif why == "a capture on this thread":
        with capture_lock:
            stream.give_back()
    else:
        with capture_lock:
            on_threads(stream.give_back)
    assert fake.cleared == 0 and fake.pools == {1: 32}
    with capture_lock.if_free() as is_free:
        assert is_free


def test_graphs_of_others(monkeypatch):
    segments = [{"segment_pool_id": (0, i), "active_size": size} for i, size in enumerate((8, 8, 0))]
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda pool: {"segments": segments}, raising=False)
    assert cuda.pools_with_memory() == {(0, 1)}  # nobody owns memory of the last one, which may be gone
    graph = type("Graph", (), {})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(cuda, "OwnGraph", own := type("OwnGraph", (graph,), {}))
    found = [own()]
    assert not cuda.has_foreign_graphs()
    found.append(graph())
    assert cuda.has_foreign_graphs()


def warm_up(stream, meanwhile=lambda: None):
    """Whether the workspaces of a warm-up were in its own memory, and whether they were freed at its end."""
    with stream.for_warm_up(True):
        is_inside = stream.workspace_nbytes() == 0
        meanwhile()
        before = CaptureStream._cleared
    return is_inside, CaptureStream._cleared > before


def capture(stream, error=None):
    with stream.for_capture():
        assert stream.workspace_nbytes() == 32
        if error is not None:
            raise error


def test_a_warm_up_before_the_first_capture_has_workspaces_in_its_own_memory(fake):
    stream = CaptureStream.take(0)
    streams.own_pools.add(5)  # an arena's, which is empty as yet
    assert warm_up(stream) == (True, True) and 5 in streams.own_pools
    with pytest.raises(ValueError, match="fails"), stream.for_warm_up(True):
        raise ValueError("fails")
    assert fake.cleared == 2 and fake.pools == {}
    capture(stream)
    assert warm_up(stream) == (False, False)


def test_a_capture_in_a_warm_up_has_workspaces_of_its_own(fake):
    stream = CaptureStream.take(0)

    def fail():
        with pytest.raises(ValueError, match="fails"):
            capture(stream, ValueError("fails"))
        fake._pool = 5  # the warm-up goes on in the arena's
        fake.make_workspace(stream)

    fake.pools[5] = 0
    streams.own_pools.add(5)
    assert warm_up(stream, lambda: (fail(), capture(stream))) == (True, False)
    assert stream.workspace_nbytes() == 32 and fake.pools[5] == 0


def test_a_capture_frees_only_workspaces_that_are_in_an_arena(fake):
    stream = prepared()
    capture(stream)
    assert fake.cleared == 0


def test_a_capture_makes_workspaces_that_inductor_has_freed(fake):
    stream = prepared()
    fake.clear()
    assert stream.workspace_nbytes() == 0
    capture(stream)


def test_a_first_capture_that_fails_leaves_no_workspaces(fake):
    stream = CaptureStream.take(0)
    with pytest.raises(ValueError, match="fails"):
        capture(stream, ValueError("fails"))
    assert fake.pools == {}
    capture(stream)
    with pytest.raises(ValueError, match="fails"):
        capture(stream, ValueError("fails"))
    assert fake.pools == {1: 32}


@pytest.mark.parametrize("why", ["graphs of others", "their memory", "another arena", "another thread", "a backward"])
def test_workspaces_are_apart_where_freeing_them_could_harm_somebody(fake, monkeypatch, why):
    stream, wait = CaptureStream.take(0), threading.Event()
    thread = threading.Thread(target=wait.wait)
    if why == "graphs of others":
        fake.has_foreign_graphs = True
    elif why == "their memory":
        fake.foreign_pools.add(9)
    elif why == "another arena":
        fake.current = FakeStream(8)
        CaptureStream.take(0)
    elif why == "another thread":
        thread.start()
    else:
        monkeypatch.setattr(streams, "in_backward", lambda: True)
    try:
        assert warm_up(stream) == (False, False) and fake.cleared == 0
    finally:
        wait.set()
        if thread.ident:
            thread.join()


def test_workspaces_stay_in_memory_if_a_graph_appears_meanwhile(fake):
    stream = CaptureStream.take(0)
    assert warm_up(stream, partial(setattr, fake, "has_foreign_graphs", True)) == (True, False)
